"""A character-level GPT on docstrings of Python's library.

python -m examples.training.char_gpt
"""

import math

import keras
import numpy as np
import tensorflow as tf

import coexec
from examples.programs.parts.texts import docstrings

LENGTH, WIDTH, HEADS, ROWS = 24, 32, 4, 8


class Block(keras.layers.Layer):
    """Attention to what came before, and two dense layers, each with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        self.inner, self.outer = layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH)

    def call(self, x):
        normal = self.norms[0](x)
        x = x + self.attention(normal, normal, use_causal_mask=True)
        return x + self.outer(self.inner(self.norms[1](x)))


class GPT(keras.Model):
    """Logits of the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        layers = keras.layers
        self.names, self.places = layers.Embedding(characters, WIDTH), layers.Embedding(LENGTH, WIDTH)
        self.blocks, self.out = [Block(), Block()], layers.Dense(characters)

    def call(self, x):
        x = self.names(x) + self.places(tf.range(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Trainer:
    """The model, its optimizer, and how far it is."""

    def __init__(self, characters: int) -> None:
        self.model, self.optimizer = GPT(characters), keras.optimizers.AdamW(3e-3)
        self.objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.perplexities: list[float] = []

    @coexec.function
    def step(self, text: tf.Tensor) -> float:
        """Learns from some lines; slows down for good once the perplexity is low."""
        with tf.GradientTape() as tape:
            loss = self.objective(text[:, 1:], self.model(text[:, :-1]))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.perplexities.append(math.exp(float(loss)))
        if self.perplexities[-1] < 5.0:
            self.optimizer.learning_rate = 1e-3
        return float(loss)


def train(steps: int) -> list[float]:
    """Trains and returns the loss of each step."""
    keras.utils.set_random_seed(0)
    text = " ".join(word for _, words in docstrings(["random", "statistics"]) for word in words)
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(character) for character in text], np.int32)
    trainer, chosen = Trainer(len(alphabet)), np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        starts = chosen.integers(len(numbers) - LENGTH - 1, size=ROWS)
        losses.append(trainer.step(tf.constant(np.stack([numbers[s : s + LENGTH + 1] for s in starts]))))
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(200)))
