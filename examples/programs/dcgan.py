"""DCGAN, of Terra: two convolutional networks against each other, with two tapes in one step."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.digits import digits


class Generator(keras.Model):
    """From noise to an image between -1 and 1, doubled in size by each layer but the first."""

    def __init__(self, size: int, width: int, doublings: int, channels: int) -> None:
        super().__init__()
        self.smallest, self.widest = size // 2**doublings, width * 2 ** (doublings - 1)
        self.first = keras.layers.Dense(self.smallest**2 * self.widest, use_bias=False)
        self.norms = [keras.layers.BatchNormalization() for _ in range(doublings)]
        widths = [width * 2**n for n in reversed(range(doublings - 1))] + [channels]
        self.grow = [keras.layers.Conv2DTranspose(w, 5, 2, padding="same", use_bias=False) for w in widths]

    def call(self, noise, training=False):
        x = tf.reshape(self.first(noise), (-1, self.smallest, self.smallest, self.widest))
        for norm, grow in zip(self.norms, self.grow, strict=True):
            x = grow(tf.nn.leaky_relu(norm(x, training=training)))
        return tf.tanh(x)


class Discriminator(keras.Model):
    """The logit of an image being real."""

    def __init__(self, width: int, halvings: int, seed: int) -> None:
        super().__init__()
        self.shrink = [keras.layers.Conv2D(width * 2**n, 5, 2, padding="same") for n in range(halvings)]
        self.dropouts = [keras.layers.Dropout(0.3, seed=seed + n) for n in range(halvings)]
        self.head = keras.layers.Dense(1)

    def call(self, x, training=False):
        for shrink, dropout in zip(self.shrink, self.dropouts, strict=True):
            x = dropout(tf.nn.leaky_relu(shrink(x)), training=training)
        return self.head(tf.reshape(x, (x.shape[0], -1)))


@program(origin="Terra", data="scikit-learn's digits, enlarged")
def dcgan(function, published=False):
    """A generator and a discriminator: noise is drawn in the step, and two tapes watch the same images."""
    seed = 7
    keras.utils.set_random_seed(seed)
    if published:
        size, batch, noise, width, doublings, channels = 64, 128, 100, 128, 4, 3
    else:
        size, batch, noise, width, doublings, channels = 16, 16, 32, 8, 2, 1
    images, _ = digits(size, channels)
    data = batches(np.random.default_rng(seed), batch, images * 2.0 - 1.0)

    generator, discriminator = Generator(size, width, doublings, channels), Discriminator(width, doublings, seed)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizers = [keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(2)]
    history = {"generator": [], "discriminator": []}
    samples = []

    @function
    def train(images):
        seeds = tf.random.normal((batch, noise))
        with tf.GradientTape() as generator_tape, tf.GradientTape() as discriminator_tape:
            generated = generator(seeds, training=True)
            real, fake = discriminator(images, training=True), discriminator(generated, training=True)
            generator_loss = entropy(tf.ones_like(fake), fake)
            discriminator_loss = entropy(tf.ones_like(real), real) + entropy(tf.zeros_like(fake), fake)
        for model, tape, loss, optimizer in (
            (generator, generator_tape, generator_loss, optimizers[0]),
            (discriminator, discriminator_tape, discriminator_loss, optimizers[1]),
        ):
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        history["generator"].append(generator_loss)
        history["discriminator"].append(discriminator_loss)
        samples[:] = [generated[0]]
        return generator_loss, discriminator_loss

    return Training(
        step=lambda: train(*next(data)),
        state=lambda: (
            (generator.variables, discriminator.variables, [optimizer.variables for optimizer in optimizers]),
            (history, samples),
        ),
    )
