"""TensorFlow's operations and variables, and a hand-written update."""

import numpy as np
import tensorflow as tf

from examples.programs import Training


def raw(function):
    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(16, 8)), tf.float32)
    y = tf.constant(numbers.normal(size=(16, 4)), tf.float32)
    kernel = tf.Variable(numbers.normal(size=(8, 16)) / 4, dtype=tf.float32)
    bias = tf.Variable(tf.zeros(16))
    head = tf.Variable(numbers.normal(size=(16, 4)) / 4, dtype=tf.float32)
    variables = [kernel, bias, head]
    moments = [tf.Variable(tf.zeros_like(v)) for v in variables]
    rate = 0.05

    @function
    def train(x, y):
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.matmul(x, kernel) + bias)
            hidden = tf.tanh(hidden)
            loss = tf.reduce_mean(tf.square(tf.matmul(hidden, head) - y))
        gradients = tape.gradient(loss, variables)
        for gradient, moment, variable in zip(gradients, moments, variables):
            moment.assign(0.9 * moment + gradient)
            variable.assign_sub(rate * moment)
        return loss

    return Training(step=lambda: train(x, y), state=lambda: (variables, moments))
