"""A block of a GPT, whose `call` is the program's own."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training


class Block(keras.layers.Layer):
    """Attention and two dense layers, with shortcuts."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.norm1, self.norm2 = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(heads, hidden // heads)
        self.inner = keras.layers.Dense(2 * hidden, activation="gelu")
        self.outer = keras.layers.Dense(hidden)

    def call(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, use_causal_mask=True)
        return x + self.outer(self.inner(self.norm2(x)))


def gpt(function):
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    tokens = tf.constant(numbers.integers(32, size=(4, 9)), tf.int32)
    words, places = keras.layers.Embedding(32, 16), keras.layers.Embedding(8, 16)
    block = Block(16, 2)
    head = keras.layers.Dense(32)
    head(block(words(tokens[:, :-1]) + places(tf.range(8))))
    variables = [v for layer in (words, places, block, head) for v in layer.trainable_variables]
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(1e-3)
    optimizer.build(variables)

    @function
    def train(tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with tf.GradientTape() as tape:
            x = words(inputs) + places(tf.range(8))
            logits = head(block(x))
            loss = objective(targets, logits)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Training(step=lambda: train(tokens), state=lambda: (variables, optimizer.variables))
