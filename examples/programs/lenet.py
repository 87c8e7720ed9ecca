"""LeNet, of JANUS: the small convolutional network, with a log of its mistakes that Python keeps."""

import collections

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from examples.programs import Training, program
from examples.programs.parts.batches import batches


class LeNet(keras.Model):
    """LeNet-5: two convolutions with average pooling, three dense layers, hyperbolic tangents between them."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.convolutions = [
            keras.layers.Conv2D(6, 5, padding="same", activation="tanh"),
            keras.layers.Conv2D(16, 5, activation="tanh"),
        ]
        self.pools = [keras.layers.AveragePooling2D(2) for _ in self.convolutions]
        self.flatten = keras.layers.Flatten()
        self.dense = [keras.layers.Dense(120, "tanh"), keras.layers.Dense(84, "tanh"), keras.layers.Dense(classes)]

    def call(self, x):
        for convolution, pool in zip(self.convolutions, self.pools, strict=True):
            x = pool(convolution(x))
        x = self.flatten(x)
        for layer in self.dense:
            x = layer(x)
        return x


@program(origin="JANUS", data="scikit-learn's digits, enlarged to 28x28")
def lenet(function, published=False):
    """LeNet-5 with momentum. The step counts in a dictionary which digit it takes for which, and lowers its rate."""
    seed = 2
    keras.utils.set_random_seed(seed)
    batch = 128 if published else 64

    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8) / 16.0, np.ones((3, 3)))  # every pixel three times as wide and as high
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))[..., None].astype(np.float32)
    data = batches(np.random.default_rng(seed), batch, images, labels.astype(np.int32))

    model = LeNet()
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    mistakes: collections.Counter = collections.Counter()
    losses: list[float] = []

    @function
    def train(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images)
            loss = objective(labels, logits)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        losses.append(float(loss))
        if len(losses) % 4 == 0 and losses[-1] > losses[-4]:  # no better than a while ago: go slower
            optimizer.learning_rate = float(optimizer.learning_rate) * 0.7
        for truth, guess in zip(labels.numpy(), tf.argmax(logits, 1).numpy(), strict=True):
            if truth != guess:
                mistakes[int(truth), int(guess)] += 1
        return loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (model.variables, optimizer.variables, sorted(mistakes.items()), losses),
    )
