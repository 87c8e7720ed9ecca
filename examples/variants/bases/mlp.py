"""The Keras guides' training step of a classifier."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training


def mlp(function):
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(32, 20)), tf.float32)
    y = tf.constant(numbers.integers(10, size=32), tf.int32)
    model = keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    @function
    def train(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = objective(y, logits)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Training(step=lambda: train(x, y), state=lambda: (model.variables, optimizer.variables))
