"""tf_keras: Keras 2, with a subclassed model and its own step, and `train_on_batch` that runs eagerly."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
import tf_keras

from examples.ecosystem import Example, example


def images(count=4, batch=16):
    """Batches of images and labels."""
    rng = np.random.default_rng(0)
    return [
        (tf.constant(rng.random((batch, 16, 16, 3)), tf.float32), tf.constant(rng.integers(0, 10, batch)))
        for _ in range(count)
    ]


class Net(tf_keras.Model):
    """The model of TensorFlow's quickstart for experts, with batch normalisation."""

    def __init__(self):
        super().__init__()
        self.conv1 = tf_keras.layers.Conv2D(16, 3, activation="relu")
        self.norm = tf_keras.layers.BatchNormalization()
        self.flatten = tf_keras.layers.Flatten()
        self.d1, self.d2 = tf_keras.layers.Dense(64, activation="relu"), tf_keras.layers.Dense(10)

    def call(self, x, training=False):
        return self.d2(self.d1(self.flatten(self.norm(self.conv1(x), training=training))))


@example(rtol=1e-2, atol=1e-3)
def tf_keras_quickstart():
    """The loop of the quickstart for experts: a loss, an optimizer, two metrics."""
    model = Net()
    objective = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf_keras.optimizers.Adam(1e-3)
    mean, accuracy = tf_keras.metrics.Mean(), tf_keras.metrics.SparseCategoricalAccuracy()
    arguments = images()
    model(arguments[0][0])

    def step(x, y):
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = objective(y, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean(loss)
        accuracy(y, predictions)
        return mean.result(), accuracy.result()

    state = lambda: (model.variables, optimizer.variables, mean.variables, accuracy.variables)  # noqa: E731
    return Example(step, state, arguments)


@example(rtol=1e-2, atol=1e-3)
def tf_keras_train_on_batch():
    """A functional model, compiled with `run_eagerly=True`."""
    inputs = tf_keras.Input([16, 16, 3])
    x = tf_keras.layers.Conv2D(8, 3, strides=2, activation="relu")(inputs)
    x = tf_keras.layers.GlobalAveragePooling2D()(x)
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(10)(x))
    model.compile(
        "sgd", tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"], run_eagerly=True
    )

    def step(x, y):
        return model.train_on_batch(x, y)

    return Example(step, lambda: model.variables, images())
