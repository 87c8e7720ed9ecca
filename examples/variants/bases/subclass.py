"""The training step of a model with a `call` of its own, with residual blocks."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training


class Block(keras.layers.Layer):
    """Two layers and a shortcut."""

    def __init__(self, units):
        super().__init__()
        self.inner = keras.layers.Dense(2 * units, activation="relu")
        self.outer = keras.layers.Dense(units)

    def call(self, x):
        h = self.inner(x)
        h = self.outer(h)
        return tf.nn.relu(x + 0.5 * h)


class Classifier(keras.Model):
    """Blocks between two layers."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(16)
        self.blocks = [Block(16), Block(16), Block(16)]
        self.head = keras.layers.Dense(10)

    def call(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        h = tf.reshape(h, (-1, 16))
        return self.head(h)


def subclass(function):
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(32, 20)), tf.float32)
    y = tf.constant(numbers.integers(10, size=32), tf.int32)
    model = Classifier()
    model(x)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    @function
    def train(x, y):
        with tf.GradientTape() as tape:
            logits = model(x)
            loss = objective(y, logits)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Training(step=lambda: train(x, y), state=lambda: (model.variables, optimizer.variables))
