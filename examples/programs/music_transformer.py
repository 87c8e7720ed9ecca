"""MusicTransformer, of Terra: relative attention over musical events; layers and lists keep what it attended to."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.batches import batches

# What an event is: pressing one of 128 keys, releasing it, letting 10 ms to 1 s pass, or setting one of 32 loudnesses.
PRESS, RELEASE, PASS, LOUDNESS = 0, 128, 256, 356
PAD, EVENTS = 388, 389


class RelativeAttention(keras.layers.Layer):
    """Attention to earlier events that also knows how much earlier; `seen` holds the weights of the last call."""

    def __init__(self, hidden: int, heads: int, reach: int) -> None:
        super().__init__()
        self.heads, self.size, self.reach = heads, hidden // heads, reach
        self.query, self.key, self.value, self.out = (keras.layers.Dense(hidden) for _ in range(4))
        self.seen = None

    def build(self, shape):
        self.distances = self.add_weight(shape=(self.reach, self.size), initializer="random_normal", name="distances")

    def split(self, x):
        self.batch, self.length, _ = x.shape
        return tf.transpose(tf.reshape(x, (self.batch, self.length, self.heads, self.size)), (0, 2, 1, 3))

    def skewed(self, scores):
        """Moves the scores by distance so that they become scores by place."""
        scores = tf.pad(scores, [[0, 0], [0, 0], [0, 0], [1, 0]])
        scores = tf.reshape(scores, (self.batch, self.heads, self.length + 1, self.length))
        return scores[:, :, 1:]

    def call(self, x, mask):
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        distances = self.distances[max(0, self.reach - self.length) :]
        by_distance = tf.einsum("bhld,md->bhlm", query, distances)
        earlier = tf.linalg.band_part(tf.ones((self.length, self.length)), -1, 0)
        scores = tf.matmul(query, key, transpose_b=True) + self.skewed(by_distance * tf.reverse(earlier, [1]))
        weights = tf.nn.softmax(scores / self.size**0.5 - 1e9 * mask)
        self.seen = weights
        context = tf.transpose(tf.matmul(weights, value), (0, 2, 1, 3))
        return self.out(tf.reshape(context, x.shape))


class Block(keras.layers.Layer):
    """Attention and two dense layers, each with a shortcut and normalised after it."""

    def __init__(self, hidden: int, heads: int, reach: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.attention = RelativeAttention(hidden, heads, reach)
        self.inner, self.outer = keras.layers.Dense(hidden // 2, "relu"), keras.layers.Dense(hidden)
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [keras.layers.Dropout(dropout, seed=seed + n) for n in range(2)]

    def call(self, x, mask, training=False):
        x = self.norms[0](x + self.dropouts[0](self.attention(x, mask), training=training))
        return self.norms[1](x + self.dropouts[1](self.outer(self.inner(x)), training=training))


class MusicTransformer(keras.Model):
    """Logits of the next event, and a list of where each block looked."""

    def __init__(self, length: int, hidden: int, layers: int, heads: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.embedding = keras.layers.Embedding(EVENTS, hidden)
        places = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, hidden, 2) / hidden)
        self.places = np.concatenate([np.sin(places), np.cos(places)], -1).astype(np.float32)
        self.dropout = keras.layers.Dropout(dropout, seed=seed)
        self.blocks = [Block(hidden, heads, length, dropout, seed + 10 * n) for n in range(1, layers + 1)]
        self.head = keras.layers.Dense(EVENTS)

    def call(self, events, training=False):
        length = events.shape[1]
        later = 1.0 - tf.linalg.band_part(tf.ones((length, length)), -1, 0)
        padding = tf.cast(events == PAD, tf.float32)[:, None, None, :]
        mask = tf.maximum(later, padding)
        x = self.embedding(events) * self.hidden**0.5 + self.places[:length]
        x = self.dropout(x, training=training)
        weights = []
        for block in self.blocks:
            x = block(x, mask, training=training)
            weights.append(block.attention.seen)
        return self.head(x), weights


class Trainer:
    """The model with its loss, its learning rate by number of steps, and what the last step left on it."""

    def __init__(self, function, model: MusicTransformer, warmup: int) -> None:
        self.model, self.warmup = model, warmup
        self.optimizer = keras.optimizers.Adam(beta_1=0.9, beta_2=0.98, epsilon=1e-9)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.steps, self.weights, self.focus = 0, [], []
        self.train = function(self.train_on)

    def train_on(self, events):
        self.steps += 1
        rate = self.model.hidden**-0.5 * min(self.steps**-0.5, self.steps * self.warmup**-1.5)
        self.optimizer.learning_rate = rate
        inputs, targets = events[:, :-1], events[:, 1:]
        with tf.GradientTape() as tape:
            logits, self.weights = self.model(inputs, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            counted = tf.cast(targets != PAD, tf.float32)
            self.loss = tf.reduce_sum(losses * counted) / tf.reduce_sum(counted)
        gradients = tape.gradient(self.loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.accuracy.update_state(targets, logits, counted)
        # How sharply each block looks; only a few steps' worth is kept.
        self.focus.append([tf.reduce_mean(tf.reduce_max(weights, -1)) for weights in self.weights])
        del self.focus[:-3]
        return self.loss


def tune(rng: np.random.Generator, length: int) -> np.ndarray:
    """Chords of a random key, one after another, as events; padded at its end."""
    scale = 48 + rng.integers(12) + np.array([0, 2, 4, 5, 7, 9, 11, 12, 14, 16, 17, 19, 21, 23])
    events: list[int] = []
    while len(events) < length - rng.integers(8):
        root = rng.integers(8)
        chord = [int(scale[root + step]) for step in (0, 2, 4)]
        events += [LOUDNESS + int(rng.integers(12, 20))]
        events += [PRESS + key for key in chord] + [PASS + int(rng.integers(20, 60))] + [RELEASE + key for key in chord]
    return np.array((events + [PAD] * length)[:length], np.int32)


@program(origin="Terra", data="generated: chords as the published 388 kinds of events")
def music_transformer(function, published=False):
    """A decoder with relative attention. Its attention weights stay on layers and in lists, beyond the step."""
    seed = 4
    keras.utils.set_random_seed(seed)
    if published:
        length, batch, hidden, layers, heads = 2048, 2, 256, 6, 4
    else:
        length, batch, hidden, layers, heads = 48, 4, 64, 2, 2
    rng = np.random.default_rng(seed)
    data = batches(rng, batch, np.stack([tune(rng, length + 1) for _ in range(64)]))

    trainer = Trainer(function, MusicTransformer(length, hidden, layers, heads, 0.1, seed), warmup=4000)
    return Training(
        step=lambda: trainer.train(*next(data)),
        state=lambda: (
            trainer.model.variables,
            trainer.optimizer.variables,
            trainer.accuracy.result(),
            [block.attention.seen for block in trainer.model.blocks],
            (trainer.steps, trainer.loss, trainer.weights, trainer.focus),
        ),
    )
