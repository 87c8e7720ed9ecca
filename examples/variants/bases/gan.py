"""Two networks against each other, with two tapes."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training


def gan(function):
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    real = tf.constant(numbers.normal(size=(16, 8)), tf.float32)
    layers = keras.layers
    generator = keras.Sequential([keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(8)])
    critic = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)])
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    of_generator, of_critic = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)
    of_generator.build(generator.trainable_variables)
    of_critic.build(critic.trainable_variables)

    @function
    def train(real):
        noise = tf.random.normal((16, 4), seed=3)
        with tf.GradientTape() as tape, tf.GradientTape() as other:
            fake = generator(noise, training=True)
            yes, no = critic(real, training=True), critic(fake, training=True)
            fooled = entropy(tf.ones_like(no), no)
            loss = entropy(tf.ones_like(yes), yes) + entropy(tf.zeros_like(no), no)
        variables = generator.trainable_variables
        of_generator.apply_gradients(zip(tape.gradient(fooled, variables), variables))
        variables = critic.trainable_variables
        of_critic.apply_gradients(zip(other.gradient(loss, variables), variables))
        return fooled, loss

    return Training(
        step=lambda: train(real),
        state=lambda: (generator.variables, critic.variables, of_generator.variables, of_critic.variables),
    )
