"""DeepXDE: a network that solves a differential equation, by derivatives of what it computes."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["DDE_BACKEND"] = "tensorflow"

import deepxde
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


@example(rtol=1e-2, atol=1e-3)
def deepxde_poisson():
    """The Poisson equation in one dimension: second derivatives by tapes inside of a tape."""
    rng = np.random.default_rng(0)
    deepxde.config.set_random_seed(0)
    net = deepxde.nn.FNN([1] + [32] * 3 + [1], "tanh", "Glorot uniform")
    optimizer = tf.keras.optimizers.legacy.Adam(1e-3)
    ends = tf.constant([[-1.0], [1.0]])
    arguments = [(tf.constant(rng.uniform(-1, 1, (64, 1)), tf.float32),) for _ in range(4)]
    net(arguments[0][0])

    def residual(x):
        with tf.GradientTape() as second:
            second.watch(x)
            with tf.GradientTape() as first:
                first.watch(x)
                y = net(x)
            slope = first.gradient(y, x)
        return -second.gradient(slope, x) - np.pi**2 * tf.sin(np.pi * x)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(residual(x))) + tf.reduce_mean(tf.square(net(ends)))
        variables = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Example(step, lambda: (net.variables, optimizer.variables()), arguments)
