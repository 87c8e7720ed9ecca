"""A Keras cell in a Python loop."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training


def lstm(function):
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(16, 8, 8)), tf.float32)
    y = tf.constant(numbers.normal(size=(16, 1)), tf.float32)
    cell, head = keras.layers.LSTMCell(32), keras.layers.Dense(1)
    cell.build((16, 8))
    head.build((16, 32))
    variables = cell.trainable_variables + head.trainable_variables
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(variables)

    @function
    def train(x, y):
        with tf.GradientTape() as tape:
            state = [tf.zeros((16, 32)), tf.zeros((16, 32))]
            for time in range(8):
                hidden, state = cell(x[:, time], state)
            loss = tf.reduce_mean(tf.square(head(hidden) - y))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Training(step=lambda: train(x, y), state=lambda: (variables, optimizer.variables))
