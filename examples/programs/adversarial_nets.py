"""AN, of JANUS: the first generative adversarial nets, two multilayer perceptrons that play against each other."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from examples.programs import Training, program
from examples.programs.parts.batches import batches


class Generator(keras.Model):
    """Uniform noise to pixels in [0, 1]."""

    def __init__(self, units: int, pixels: int) -> None:
        super().__init__()
        initializer = keras.initializers.RandomUniform(-0.05, 0.05, seed=1)
        self.hidden = [keras.layers.Dense(units, "relu", kernel_initializer=initializer) for _ in range(2)]
        self.pixels = keras.layers.Dense(pixels, "sigmoid", kernel_initializer=initializer)

    def call(self, noise):
        for layer in self.hidden:
            noise = layer(noise)
        return self.pixels(noise)


class Maxout(keras.layers.Layer):
    """The greatest of some linear functions, for each unit."""

    def __init__(self, units: int, pieces: int) -> None:
        super().__init__()
        initializer = keras.initializers.RandomUniform(-0.05, 0.05, seed=2)
        self.units, self.pieces = units, pieces
        self.linear = keras.layers.Dense(units * pieces, kernel_initializer=initializer)

    def call(self, x):
        return tf.reduce_max(tf.reshape(self.linear(x), (-1, self.units, self.pieces)), 2)


class Discriminator(keras.Model):
    """The score of pixels being data, with dropout before every layer."""

    def __init__(self, units: int, seed: int) -> None:
        super().__init__()
        self.hidden = [Maxout(units, 5), Maxout(units, 5)]
        self.score = keras.layers.Dense(1)
        self.dropouts = [keras.layers.Dropout(rate, seed=seed + n) for n, rate in enumerate((0.2, 0.5, 0.5))]

    def call(self, x, training=False):
        for layer, dropout in zip([*self.hidden, self.score], self.dropouts, strict=True):
            x = layer(dropout(x, training=training))
        return x


class Momentum:
    """Gradient descent whose rate decays and whose momentum grows, both as Python numbers of the object."""

    def __init__(self, rate: float) -> None:
        self.rate, self.momentum = rate, 0.5
        self.velocities: dict[int, tf.Variable] = {}

    def apply(self, gradients: list[tf.Tensor], variables: list) -> None:
        for number, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if number not in self.velocities:
                self.velocities[number] = tf.Variable(tf.zeros_like(gradient))
            velocity = self.velocities[number]
            velocity.assign(self.momentum * velocity - self.rate * gradient)
            variable.assign_add(velocity)
        self.rate = max(self.rate / 1.000004, 1e-6)
        self.momentum = min(self.momentum + 0.0008, 0.7)


@program(origin="JANUS", data="scikit-learn's digits")
def adversarial_nets(function, published=False):
    """Goodfellow's nets: a discriminator of maxout units against a generator. Python holds rate and momentum, which are
    others in every step, and decides by the discriminator's success whose turn it is.
    """
    seed = 8
    keras.utils.set_random_seed(seed)
    batch, noise, wide, units = (100, 100, 1200, 240) if published else (64, 32, 256, 64)

    pixels = (load_digits().data / 16.0).astype(np.float32)
    data = batches(np.random.default_rng(seed), batch, pixels)
    generator, discriminator = Generator(wide, pixels.shape[1]), Discriminator(units, seed)
    optimizers = {"generator": Momentum(0.1), "discriminator": Momentum(0.1)}
    successes: list[float] = []

    def entropy(scores, truth):
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.fill(scores.shape, truth), scores))

    @function
    def train(real):
        with tf.GradientTape() as tape:
            fake = generator(tf.random.uniform((batch, noise), -1.0, 1.0))
            of_real, of_fake = discriminator(real, training=True), discriminator(fake, training=True)
            loss = entropy(of_real, 1.0) + entropy(of_fake, 0.0)
        variables = discriminator.trainable_variables
        optimizers["discriminator"].apply(tape.gradient(loss, variables), variables)
        right = tf.concat([of_real > 0, of_fake <= 0], 0)
        successes.append(float(tf.reduce_mean(tf.cast(right, tf.float32))))
        if successes[-1] < 0.5:  # it knows too little to teach
            return loss, None

        with tf.GradientTape() as tape:
            fake = generator(tf.random.uniform((batch, noise), -1.0, 1.0))
            fooled = entropy(discriminator(fake, training=True), 1.0)
        variables = generator.trainable_variables
        optimizers["generator"].apply(tape.gradient(fooled, variables), variables)
        return loss, fooled

    def state():
        kept = {name: vars(optimizer) for name, optimizer in optimizers.items()}
        return generator.variables, discriminator.variables, kept, successes

    return Training(step=lambda: train(*next(data)), state=state)
