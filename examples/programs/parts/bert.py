"""The encoder that both BERT programs fine-tune, and how they are optimised."""

import keras
import tensorflow as tf


def initializer(seed: int) -> keras.initializers.Initializer:
    return keras.initializers.TruncatedNormal(stddev=0.02, seed=seed)


class Attention(keras.layers.Layer):
    """Every token looks at every token that is no padding."""

    def __init__(self, hidden: int, heads: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.query, self.key, self.value, self.out = (
            keras.layers.Dense(hidden, kernel_initializer=initializer(seed + n)) for n in range(4)
        )
        self.dropout = keras.layers.Dropout(dropout, seed=seed)

    def split(self, x: tf.Tensor) -> tf.Tensor:
        batch, length, _ = x.shape
        return tf.transpose(tf.reshape(x, (batch, length, self.heads, self.size)), (0, 2, 1, 3))

    def call(self, x, bias, training=False):
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = tf.matmul(query, key, transpose_b=True) / self.size**0.5 + bias
        weights = self.dropout(tf.nn.softmax(scores), training=training)
        context = tf.transpose(tf.matmul(weights, value), (0, 2, 1, 3))
        return self.out(tf.reshape(context, x.shape))


class Block(keras.layers.Layer):
    """Attention, then two dense layers, each with a shortcut and normalised after it."""

    def __init__(self, hidden: int, heads: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, dropout, seed)
        self.intermediate = keras.layers.Dense(4 * hidden, "gelu", kernel_initializer=initializer(seed + 4))
        self.out = keras.layers.Dense(hidden, kernel_initializer=initializer(seed + 5))
        self.dropouts = [keras.layers.Dropout(dropout, seed=seed + n) for n in (1, 2)]
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-12) for _ in range(2)]

    def call(self, x, bias, training=False):
        attended = self.dropouts[0](self.attention(x, bias, training=training), training=training)
        x = self.norms[0](x + attended)
        transformed = self.dropouts[1](self.out(self.intermediate(x)), training=training)
        return self.norms[1](x + transformed)


class Bert(keras.Model):
    """Token ids and segment ids, both `int32[batch, length]`, to a vector a token and one for the whole sequence."""

    def __init__(
        self, vocabulary: int, length: int, hidden: int, layers: int, heads: int, dropout: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__()
        self.words, self.positions, self.segments = (
            keras.layers.Embedding(rows, hidden, embeddings_initializer=initializer(seed + n))
            for n, rows in enumerate((vocabulary, length, 2))
        )
        self.norm = keras.layers.LayerNormalization(epsilon=1e-12)
        self.dropout = keras.layers.Dropout(dropout, seed=seed)
        self.blocks = [Block(hidden, heads, dropout, seed + 100 * n) for n in range(1, layers + 1)]
        self.pooler = keras.layers.Dense(hidden, "tanh", kernel_initializer=initializer(seed + 3))

    def call(self, inputs, training=False):
        tokens, segments = inputs
        x = self.words(tokens) + self.positions(tf.range(tokens.shape[1])) + self.segments(segments)
        x = self.dropout(self.norm(x), training=training)
        bias = -1e4 * tf.cast(tokens == 0, tf.float32)[:, None, None, :]  # out of attention's sight: the padding
        for block in self.blocks:
            x = block(x, bias, training=training)
        return x, self.pooler(x[:, 0])


class WarmUp:
    """A linear rise of the learning rate and a linear fall, moved on by each step."""

    def __init__(self, peak: float, warmup: int, total: int) -> None:
        self.peak, self.warmup, self.total = peak, warmup, total
        self.step = 0

    def advance(self) -> float:
        self.step += 1
        if self.step < self.warmup:
            return self.peak * self.step / self.warmup
        return self.peak * max(0.0, (self.total - self.step) / (self.total - self.warmup))


def adamw() -> keras.optimizers.AdamW:
    """BERT's: neither biases nor what normalises decay."""
    optimizer = keras.optimizers.AdamW(weight_decay=0.01, epsilon=1e-6)
    optimizer.exclude_from_weight_decay(var_names=["bias", "norm", "gamma", "beta"])
    return optimizer
