"""RAE, of Cocktailer: merges the two neighbours that it can rebuild best, until one vector is left."""

import itertools

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.texts import Vocabulary, docstrings


class Autoencoder:
    """Socher's: two vectors into one, and back again."""

    def __init__(self, words: int, units: int, classes: int) -> None:
        glorot = keras.initializers.GlorotUniform(seed=1)
        self.embedding = tf.Variable(tf.random.normal((words, units), stddev=0.3))
        self.encoder, self.encoder_bias = tf.Variable(glorot((2 * units, units))), tf.Variable(tf.zeros(units))
        self.decoder, self.decoder_bias = tf.Variable(glorot((units, 2 * units))), tf.Variable(tf.zeros(2 * units))
        self.classes, self.offset = tf.Variable(glorot((units, classes))), tf.Variable(tf.zeros(classes))

    @property
    def variables(self) -> list[tf.Variable]:
        return list(vars(self).values())

    def merge(self, pairs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Vectors for pairs, and how badly each pair is rebuilt: `[n, 2 * units]` to `[n, units]` and `[n]`."""
        parents = tf.math.l2_normalize(tf.tanh(tf.matmul(pairs, self.encoder) + self.encoder_bias), 1)
        rebuilt = tf.tanh(tf.matmul(parents, self.decoder) + self.decoder_bias)
        return parents, 0.5 * tf.reduce_sum((rebuilt - pairs) ** 2, 1)

    def score(self, vector: tf.Tensor) -> tf.Tensor:
        return tf.matmul(vector, self.classes) + self.offset


@program(origin="Cocktailer", data="docstrings of Python's library, by module")
def recursive_autoencoder(function, published=False):
    """A greedy recursive autoencoder of sentences. The list of vectors gets shorter by one at each merge, and Python
    learns from the values which two it is: the tree, which it writes down, is made by the step itself.
    """
    seed = 17
    keras.utils.set_random_seed(seed)
    words, units, batch, lengths = (10000, 512, 10, (20, 40)) if published else (500, 32, 4, (5, 7))

    modules = ("argparse", "logging")
    texts = docstrings(modules)
    vocabulary = Vocabulary((row for _, row in texts), words)
    rng = np.random.default_rng(seed)
    model = Autoencoder(words, units, len(modules))
    optimizer = keras.optimizers.Adagrad(0.05)
    trees: list[str] = []

    @function
    def train(sentences, labels):
        with tf.GradientTape() as tape:
            losses = []
            for sentence, label in zip(sentences, labels, strict=True):
                nodes = tf.unstack(tf.nn.embedding_lookup(model.embedding, sentence), len(sentence))
                names = [str(number) for number in range(len(sentence))]
                while len(nodes) > 1:
                    pairs = [tf.concat(pair, 0) for pair in itertools.pairwise(nodes)]
                    parents, errors = model.merge(tf.stack(pairs))
                    best = int(tf.argmin(errors))
                    nodes[best : best + 2] = [parents[best]]
                    names[best : best + 2] = [f"({names[best]} {names[best + 1]})"]
                    guess = model.score(parents[best : best + 1])
                    losses.append(0.2 * errors[best])
                    losses.append(0.8 * tf.nn.sparse_softmax_cross_entropy_with_logits([label], guess)[0])
                trees.append(names[0])
            loss = tf.add_n(losses) / batch
        gradients = tape.gradient(loss, model.variables)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        return loss

    def step():
        sentences, labels = [], []
        for number in rng.choice(len(texts), batch, replace=False):
            label, row = texts[number]
            length = int(rng.integers(lengths[0], lengths[1] + 1))
            sentences.append(tf.constant(vocabulary.encode(row[:length])))
            labels.append(label)
        return train(sentences, labels)

    return Training(step, state=lambda: (model.variables, optimizer.variables, trees))
