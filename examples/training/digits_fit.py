"""Digits with `fit`: a Keras model whose training step reads its loss, keeps lists and asks scikit-learn.

python -m examples.training.digits_fit
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score

import coexec


class Classifier(keras.Model):
    """Learns more from batches that it finds hard, and knows how well it does on each digit."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(64, "relu"), keras.layers.Dense(10)
        self.hardest, self.scores = [], []

    def call(self, images):
        return self.out(self.hidden(images))

    def train_step(self, batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            logits = self(images)
            loss = self.compute_loss(images, labels, logits)
        usual = np.mean(self.hardest[-20:]) if self.hardest else float(loss)
        self.hardest.append(float(loss))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.hardest[-1] > usual:
            gradients = [2.0 * gradient for gradient in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.scores.append(f1_score(labels.numpy(), logits.numpy().argmax(axis=1), average="macro", zero_division=0.0))
        return {"loss": loss, "f1": self.scores[-1]}


def train(steps: int) -> list[float]:
    """Trains and returns the loss of each step."""
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("float32")[: 32 * steps], labels[: 32 * steps]
    model = Classifier()
    coexec.accelerate(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, run_eagerly=True)
    model.fit(images, labels, batch_size=32, epochs=1, verbose=0)
    return model.hardest


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(56)))
