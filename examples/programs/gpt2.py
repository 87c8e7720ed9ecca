"""GPT2, of Terra: trains a language model, and keeps the keys and values that generating text would go on from."""

import math

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches
from examples.programs.parts.texts import Vocabulary, docstrings


class Attention(keras.layers.Layer):
    """Attention to earlier tokens, the `past` ones included; also returns what is the past of the next tokens."""

    def __init__(self, hidden: int, heads: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.hidden, self.heads = hidden, heads
        normal = [keras.initializers.RandomNormal(stddev=0.02, seed=seed + n) for n in range(2)]
        self.inside = keras.layers.Dense(3 * hidden, kernel_initializer=normal[0])
        self.outside = keras.layers.Dense(hidden, kernel_initializer=normal[1])
        self.dropout = keras.layers.Dropout(dropout, seed=seed)

    def call(self, x, past=None, training=False):
        batch, length, _ = x.shape
        x = tf.reshape(self.inside(x), (batch, length, 3, self.heads, self.hidden // self.heads))
        query, key, value = tf.unstack(tf.transpose(x, (2, 0, 3, 1, 4)))
        if past is not None:
            key, value = (tf.concat([before, now], -2) for before, now in zip(past, (key, value), strict=True))
        present = key, value
        scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(query.shape[-1])
        seen = tf.range(length)[:, None] >= tf.range(key.shape[-2]) - key.shape[-2] + length
        weights = self.dropout(tf.nn.softmax(tf.where(seen, scores, -1e10)), training=training)
        context = tf.reshape(tf.transpose(tf.matmul(weights, value), (0, 2, 1, 3)), (batch, length, self.hidden))
        return self.outside(context), present


class Block(keras.layers.Layer):
    """Attention and two dense layers, each normalised before it and with a shortcut."""

    def __init__(self, hidden: int, heads: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, dropout, seed)
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self.dropouts = [keras.layers.Dropout(dropout, seed=seed + n) for n in (1, 2)]
        normal = [keras.initializers.RandomNormal(stddev=0.02, seed=seed + n) for n in (2, 3)]
        self.inner = keras.layers.Dense(4 * hidden, keras.activations.gelu, kernel_initializer=normal[0])
        self.outer = keras.layers.Dense(hidden, kernel_initializer=normal[1])

    def call(self, x, past=None, training=False):
        attended, present = self.attention(self.norms[0](x), past, training=training)
        x = x + self.dropouts[0](attended, training=training)
        return x + self.dropouts[1](self.outer(self.inner(self.norms[1](x))), training=training), present


class GPT2(keras.Model):
    """Logits of the next token; its embedding is also the matrix of its logits."""

    def __init__(self, vocabulary, length, hidden, layers, heads, dropout=0.1, seed=0) -> None:
        super().__init__()
        normal = [keras.initializers.RandomNormal(stddev=dev, seed=seed + n) for n, dev in enumerate((0.02, 0.01))]
        self.words = self.add_weight(shape=(vocabulary, hidden), initializer=normal[0], name="words")
        self.places = self.add_weight(shape=(length, hidden), initializer=normal[1], name="places")
        self.dropout = keras.layers.Dropout(dropout, seed=seed)
        self.blocks = [Block(hidden, heads, dropout, seed + 10 * n) for n in range(1, layers + 1)]
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5)

    def call(self, tokens, past=None, training=False):
        start = 0 if past is None else past[0][0].shape[-2]
        x = tf.gather(self.words, tokens) + self.places[start : start + tokens.shape[1]]
        x = self.dropout(x, training=training)
        presents = []
        for number, block in enumerate(self.blocks):
            x, present = block(x, None if past is None else past[number], training=training)
            presents.append(present)
        return tf.matmul(self.norm(x), self.words, transpose_b=True), presents


class Trainer:
    """A model, how it is optimised, and what it has come to."""

    def __init__(self, function, model: GPT2, rate: float) -> None:
        self.model, self.rate = model, rate
        self.optimizer = keras.optimizers.Adam(rate, epsilon=1e-8)
        self.step, self.perplexities, self.presents = 0, [], None
        self.best = math.inf
        self.train = function(self.train_on)

    def train_on(self, tokens):
        self.step += 1
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with tf.GradientTape() as tape:
            logits, self.presents = self.model(inputs, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            counted = tf.cast(targets != Vocabulary.PAD, tf.float32)
            loss = tf.reduce_sum(losses * counted) / tf.reduce_sum(counted)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        gradients = [tf.clip_by_norm(gradient, 1.0) for gradient in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        perplexity = math.exp(min(float(loss), 20.0))
        if perplexity < self.best:
            self.best = perplexity
        else:  # no better than before: slower from now on
            self.rate *= 0.99
            self.optimizer.learning_rate = self.rate
        self.perplexities.append(perplexity)
        return loss


@program(origin="Terra", data="docstrings of Python's library, one after another")
def gpt2(function, published=False):
    """A GPT2 that is trained: perplexity and the best of it by Python's math, keys and values kept on the trainer."""
    seed = 9
    keras.utils.set_random_seed(seed)
    length, batch = (512, 8) if published else (32, 8)
    size = {"vocabulary": 50257, "hidden": 768, "layers": 12, "heads": 12}
    if not published:
        size = {"vocabulary": 1000, "hidden": 64, "layers": 2, "heads": 2}

    texts = [words for _, words in docstrings()]
    vocabulary = Vocabulary(texts, size["vocabulary"])
    stream = [token for words in texts for token in [Vocabulary.START, *vocabulary.encode(words)]]
    rows = np.array(stream[: len(stream) // (length + 1) * (length + 1)], np.int32).reshape(-1, length + 1)
    data = batches(np.random.default_rng(seed), batch, rows)

    trainer = Trainer(function, GPT2(length=length, seed=seed, **size), 1e-3)
    return Training(
        step=lambda: trainer.train(*next(data)),
        state=lambda: (
            trainer.model.variables,
            trainer.optimizer.variables,
            (trainer.step, trainer.rate, trainer.best, trainer.perplexities, trainer.presents),
        ),
    )
