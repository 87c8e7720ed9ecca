"""A variational autoencoder, as a `keras.Model` of two networks."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training


class VAE(keras.Model):
    """Draws its codes."""

    def __init__(self):
        super().__init__()
        self.inner, self.code = keras.layers.Dense(16, "relu"), keras.layers.Dense(4)
        self.outer, self.pixels = keras.layers.Dense(16, "relu"), keras.layers.Dense(8)

    def encode(self, x):
        return tf.split(self.code(self.inner(x)), 2, axis=1)

    def decode(self, z):
        return self.pixels(self.outer(z))


def vae(function):
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.uniform(size=(16, 8)), tf.float32)
    model = VAE()
    model.decode(model.encode(x)[0])
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    @function
    def train(x):
        with tf.GradientTape() as tape:
            mean, logvar = model.encode(x)
            z = mean + tf.exp(0.5 * logvar) * tf.random.normal(mean.shape, seed=5)
            logits = model.decode(z)
            entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=x, logits=logits)
            reconstruction = tf.reduce_mean(tf.reduce_sum(entropy, axis=1))
            divergence = -0.5 * tf.reduce_sum(1.0 + logvar - tf.square(mean) - tf.exp(logvar), axis=1)
            loss = reconstruction + tf.reduce_mean(divergence)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Training(step=lambda: train(x), state=lambda: (model.trainable_variables, optimizer.variables))
