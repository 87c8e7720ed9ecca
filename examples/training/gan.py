"""A generative adversarial network with two optimizers, whose turns Python decides by who is ahead.

python -m examples.training.gan
"""

import keras
import numpy as np
import tensorflow as tf

import coexec

LATENT, ROWS = 4, 64


class Duel:
    """Both networks, their optimizers, and the score between them."""

    def __init__(self) -> None:
        layers, optimizers = keras.layers, keras.optimizers
        self.generator = keras.Sequential([keras.Input((LATENT,)), layers.Dense(32, "relu"), layers.Dense(2)])
        self.critic = keras.Sequential([keras.Input((2,)), layers.Dense(32, "leaky_relu"), layers.Dense(1)])
        self.slow, self.fast = optimizers.Adam(1e-3, 0.5), optimizers.Adam(2e-3, 0.5)
        self.objective = keras.losses.BinaryCrossentropy(from_logits=True)
        self.turns = {"generator": 0, "critic": 0}

    @coexec.function
    def step(self, real: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        """Updates the critic, and the generator where it is not far ahead; returns both losses."""
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise, training=True)
            on_real, on_fake = self.critic(real, training=True), self.critic(fake, training=True)
            doubt = self.objective(tf.ones_like(on_real), on_real) + self.objective(tf.zeros_like(on_fake), on_fake)
            deceit = self.objective(tf.ones_like(on_fake), on_fake)
        variables = self.critic.trainable_variables
        self.fast.apply_gradients(zip(tape.gradient(doubt, variables), variables, strict=True))
        self.turns["critic"] += 1
        if float(deceit) > 0.6:
            variables = self.generator.trainable_variables
            self.slow.apply_gradients(zip(tape.gradient(deceit, variables), variables, strict=True))
            self.turns["generator"] += 1
        return tf.stack([doubt, deceit])


def train(steps: int) -> list[float]:
    """Learns to draw points of a ring; returns the losses of both in turn."""
    keras.utils.set_random_seed(0)
    numbers, duel = np.random.default_rng(0), Duel()
    losses: list[float] = []
    for _ in range(steps):
        angles = numbers.uniform(0, 2 * np.pi, ROWS)
        real = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
        noise = numbers.normal(size=(ROWS, LATENT)).astype("float32")
        losses += duel.step(tf.constant(real), tf.constant(noise)).numpy().tolist()
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(200)))
