"""pix2pix, of JANUS: a U-Net colours grey photographs, and a discriminator judges them patch by patch."""

import collections

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.photographs import piece

LAYERS = keras.layers


def normal(seed: int) -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(0.0, 0.02, seed=seed)


class Down(LAYERS.Layer):
    """Half the size: convolution, normalisation where asked for, leaky ReLU."""

    def __init__(self, filters: int, normalise: bool = True) -> None:
        super().__init__()
        self.convolution = LAYERS.Conv2D(filters, 4, 2, "same", use_bias=False, kernel_initializer=normal(filters))
        self.norm = LAYERS.BatchNormalization() if normalise else None

    def call(self, x, training=False):
        x = self.convolution(x)
        if self.norm is not None:
            x = self.norm(x, training=training)
        return tf.nn.leaky_relu(x, 0.3)


class Up(LAYERS.Layer):
    """Twice the size: transposed convolution, normalisation, dropout where asked for, ReLU."""

    def __init__(self, filters: int, drop: bool, seed: int) -> None:
        super().__init__()
        self.convolution = LAYERS.Conv2DTranspose(
            filters, 4, 2, "same", use_bias=False, kernel_initializer=normal(filters)
        )
        self.norm = LAYERS.BatchNormalization()
        self.dropout = LAYERS.Dropout(0.5, seed=seed) if drop else None

    def call(self, x, training=False):
        x = self.norm(self.convolution(x), training=training)
        if self.dropout is not None:
            x = self.dropout(x, training=training)
        return tf.nn.relu(x)


class Generator(keras.Model):
    """A U-Net: what the way down saw is kept in a list, and taken from its end on the way up."""

    def __init__(self, filters: int, depth: int, seed: int) -> None:
        super().__init__()
        widths = [filters * min(2**n, 8) for n in range(depth)]
        self.downs = [Down(width, normalise=0 < n < depth - 1) for n, width in enumerate(widths)]
        self.ups = [Up(width, drop=n < 3, seed=seed + n) for n, width in enumerate(reversed(widths[:-1]))]
        self.last = LAYERS.Conv2DTranspose(3, 4, 2, "same", activation="tanh", kernel_initializer=normal(seed))

    def call(self, x, training=False):
        skips = []
        for down in self.downs:
            x = down(x, training=training)
            skips.append(x)
        skips.pop()
        for up in self.ups:
            x = tf.concat([up(x, training=training), skips.pop()], -1)
        return self.last(x)


class Discriminator(keras.Model):
    """A score for each patch of a pair of pictures."""

    def __init__(self, filters: int, seed: int) -> None:
        super().__init__()
        self.downs = [Down(filters, normalise=False), Down(2 * filters), Down(4 * filters)]
        self.convolution = LAYERS.Conv2D(8 * filters, 4, use_bias=False, kernel_initializer=normal(seed))
        self.norm = LAYERS.BatchNormalization()
        self.scores = LAYERS.Conv2D(1, 4, padding="same", kernel_initializer=normal(seed + 1))

    def call(self, given, picture, training=False):
        x = tf.concat([given, picture], -1)
        for down in self.downs:
            x = down(x, training=training)
        x = self.norm(self.convolution(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])), training=training)
        return self.scores(tf.nn.leaky_relu(x, 0.3))


@program(origin="JANUS", data="pieces of scikit-learn's photographs", rtol=1e-3, atol=1e-4)
def pix2pix(function, published=False):
    """Colours for grey pictures, batch size one. A coin of Python's mirrors the picture inside of the step, lists hold
    the skip connections, and old fakes are shown to the discriminator again from a bounded memory.
    """
    seed = 10
    keras.utils.set_random_seed(seed)
    size, filters, depth = (256, 64, 8) if published else (32, 8, 5)

    rng, coins = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    generator, discriminator = Generator(filters, depth, seed), Discriminator(filters, seed)
    objective = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizers = [keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(2)]
    fakes: collections.deque = collections.deque(maxlen=8)
    losses: list[tuple[float, float]] = []

    @function
    def train(picture):
        picture = picture * 2.0 - 1.0
        if coins.random() < 0.5:
            picture = tf.image.flip_left_right(picture)
        grey = tf.image.rgb_to_grayscale(picture)
        with tf.GradientTape(persistent=True) as tape:
            painted = generator(grey, training=True)
            of_real = discriminator(grey, picture, training=True)
            of_fake = discriminator(grey, painted, training=True)
            generator_loss = objective(tf.ones_like(of_fake), of_fake) + 100.0 * tf.reduce_mean(abs(picture - painted))
            real, fake = objective(tf.ones_like(of_real), of_real), objective(tf.zeros_like(of_fake), of_fake)
            if len(fakes) == fakes.maxlen:
                of_old = discriminator(*fakes[int(coins.integers(len(fakes)))], training=True)
                fake = 0.5 * (fake + objective(tf.zeros_like(of_old), of_old))
            discriminator_loss = real + fake
        pairs = ((generator_loss, generator), (discriminator_loss, discriminator))
        for (loss, model), optimizer in zip(pairs, optimizers, strict=True):
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        fakes.append((grey, tf.stop_gradient(painted)))
        losses.append((float(generator_loss), float(discriminator_loss)))
        return generator_loss, discriminator_loss

    def state():
        kept = [optimizer.variables for optimizer in optimizers]
        return generator.variables, discriminator.variables, kept, fakes, losses

    return Training(step=lambda: train(tf.constant(piece(rng, size)[0][None])), state=state)
