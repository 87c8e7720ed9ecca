"""NASRNN, of Cocktailer: the recurrent cell that a search found, in a Python loop over the letters of a text."""

import inspect
import itertools
import math
import statistics

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program

ACTIVATIONS = {"sigmoid": tf.sigmoid, "relu": tf.nn.relu, "tanh": tf.tanh, "identity": tf.identity}
# The tree of the cell, from its leaves: how a gate of the input and one of the state meet, and what becomes of it.
LEAVES = ("sigmoid", "relu", "sigmoid", "multiply", "tanh", "sigmoid", "tanh", "sigmoid")


class NASCell:
    """Zoph and Le's cell: eight gates for the input, eight for the state, folded in pairs into one."""

    def __init__(self, inputs: int, units: int) -> None:
        glorot = keras.initializers.GlorotUniform(seed=units)
        self.inputs = tf.Variable(glorot((inputs, 8 * units)))
        self.recurrent = tf.Variable(glorot((units, 8 * units)))
        self.bias = tf.Variable(tf.zeros(8 * units))
        self.variables = [self.inputs, self.recurrent, self.bias]

    def __call__(self, x: tf.Tensor, h: tf.Tensor, c: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        of_input = tf.split(tf.matmul(x, self.inputs) + self.bias, 8, 1)
        of_state = tf.split(tf.matmul(h, self.recurrent), 8, 1)
        level = []
        for kind, mine, its in zip(LEAVES, of_input, of_state, strict=True):
            level.append(tf.nn.relu(mine * its) if kind == "multiply" else ACTIVATIONS[kind](mine + its))

        level = [tf.tanh(level[0] * level[1]), tf.tanh(level[2] + level[3]),
                 tf.tanh(level[4] * level[5]), tf.sigmoid(level[6] + level[7])]  # fmt: skip
        level[0] = tf.tanh(level[0] + c)
        c = level[0] * level[1]
        return tf.tanh(c * tf.tanh(level[2] + level[3])), c


@program(origin="Cocktailer", data="the source of Python's statistics module, letter by letter")
def nasrnn(function, published=False):
    """A language model of letters with the NAS cell. The cell is a table of activations that Python walks at every
    letter, and the loop is as long as the step's stretch of text, which is now and then half of the usual.
    """
    seed = 12
    keras.utils.set_random_seed(seed)
    units, batch, longest = (256, 64, 1000) if published else (48, 16, 12)

    letters = np.frombuffer(inspect.getsource(statistics).encode("ascii", "replace"), np.uint8)
    alphabet, text = np.unique(letters, return_inverse=True)
    rng = np.random.default_rng(seed)
    uniform = keras.initializers.RandomUniform(-0.1, 0.1, seed=seed)

    embedding = tf.Variable(uniform((len(alphabet), units)))
    kernel, bias = tf.Variable(uniform((units, len(alphabet)))), tf.Variable(tf.zeros(len(alphabet)))
    cell = NASCell(units, units)
    variables = [embedding, kernel, bias, *cell.variables]
    optimizer = keras.optimizers.Adam(3e-3)
    bits: list[float] = []

    @function
    def train(text):
        h = c = tf.zeros((batch, units))
        losses = []
        with tf.GradientTape() as tape:
            for now, following in itertools.pairwise(text):
                h, c = cell(tf.nn.embedding_lookup(embedding, now), h, c)
                scores = tf.matmul(h, kernel) + bias
                losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits(following, scores))
            loss = tf.reduce_mean(tf.stack(losses))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        bits.append(float(loss) / math.log(2))
        return loss

    def step():
        length = longest if len(bits) % 20 < 16 else longest // 2
        starts = rng.integers(len(text) - length - 1, size=batch)
        window = np.stack([text[start : start + length + 1] for start in starts], 1)
        return train([tf.constant(column, tf.int32) for column in window])

    return Training(step, state=lambda: (variables, optimizer.variables, bits))
