"""Attention, of Cocktailer: a transformer that takes one token at a time and keeps what it saw in a growing cache."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.texts import Vocabulary, docstrings


class CachedAttention(keras.layers.Layer):
    """Attention of the newest token to all before it; keys and values are attributes that each call makes longer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.projections = [keras.layers.Dense(hidden, use_bias=False) for _ in range(3)]
        self.out = keras.layers.Dense(hidden)
        self.forget()

    def build(self, shape):  # said outright: Keras would find out by a call, and that would be remembered
        for layer in (*self.projections, self.out):
            layer.build(shape)

    def forget(self) -> None:
        self.keys = self.values = None

    def call(self, x):
        query, key, value = (
            tf.reshape(project(x), (-1, self.heads, 1, self.size)) for project in self.projections
        )  # fmt: skip
        self.keys = key if self.keys is None else tf.concat([self.keys, key], 2)
        self.values = value if self.values is None else tf.concat([self.values, value], 2)
        weights = tf.nn.softmax(tf.matmul(query, self.keys, transpose_b=True) / self.size**0.5)
        return self.out(tf.reshape(tf.matmul(weights, self.values), (-1, self.heads * self.size)))


class Block(keras.layers.Layer):
    """Attention and two dense layers, normalised before."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = CachedAttention(hidden, heads)
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self.dense = [keras.layers.Dense(4 * hidden, "gelu"), keras.layers.Dense(hidden)]

    def build(self, shape):
        for layer in (self.attention, *self.norms, self.dense[0]):
            layer.build(shape)
        self.dense[1].build((*shape[:-1], 4 * shape[-1]))

    def call(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.dense[1](self.dense[0](self.norms[1](x)))


class Decoder(keras.Model):
    """The scores of the next token, from one token and what the blocks remember."""

    def __init__(self, words: int, hidden: int, heads: int, blocks: int, longest: int) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(words, hidden)
        self.positions = keras.layers.Embedding(longest, hidden)
        self.blocks = [Block(hidden, heads) for _ in range(blocks)]
        self.scores = keras.layers.Dense(words)

    def build(self, shape):
        for layer in (self.words, self.positions):
            layer.build(shape)
        for layer in (*self.blocks, self.scores):
            layer.build((*shape, self.words.output_dim))

    def forget(self) -> None:
        for block in self.blocks:
            block.attention.forget()

    def call(self, tokens, place):
        x = self.words(tokens) + self.positions(tf.constant([place]))
        for block in self.blocks:
            x = block(x)
        return self.scores(x)


@program(origin="Cocktailer", data="docstrings of Python's library", rtol=1e-3)
def growing_attention(function, published=False):
    """A decoder with a cache of keys and values that is one longer at each token. It learns through that cache, token
    by token, and every other step it writes a text, each token drawn by NumPy from the scores.
    """
    seed = 14
    keras.utils.set_random_seed(seed)
    words, hidden, heads, blocks, batch, length = (10000, 768, 12, 12, 1, 64) if published else (300, 32, 2, 1, 8, 6)

    text = [word for _, row in docstrings() for word in row]
    tokens = np.array(Vocabulary([text], words).encode(text), np.int32)
    rng = np.random.default_rng(seed)
    model = Decoder(words, hidden, heads, blocks, length)
    optimizer = keras.optimizers.AdamW(3e-3)
    written: list[list[int]] = []

    def write():
        model.forget()
        text = [int(rng.choice(tokens))]
        for place in range(length - 1):
            scores = model(tf.constant(text[-1:]), place=place)[0].numpy().astype(np.float64)
            best = np.argsort(-scores, kind="stable")[:10]
            chances = np.exp(scores[best] - scores[best[0]])
            text.append(int(rng.choice(best, p=chances / chances.sum())))
        return text

    @function
    def train(text):
        model.forget()
        losses = []
        with tf.GradientTape() as tape:
            for place in range(length):
                scores = model(text[:, place], place=place)
                losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits(text[:, place + 1], scores))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if int(optimizer.iterations) % 2 == 0:
            written.append(write())
        return loss

    def step():
        starts = rng.integers(len(tokens) - length - 1, size=batch)
        return train(tf.constant(np.stack([tokens[start : start + length + 1] for start in starts])))

    return Training(step, state=lambda: (model.variables, optimizer.variables, written))
