"""LM, of JANUS: a language model of many words, which learns from a sample of the words that it did not see."""

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.texts import Vocabulary, docstrings


class ProjectedLSTM:
    """An LSTM whose output is projected to fewer units."""

    def __init__(self, inputs: int, units: int, outputs: int) -> None:
        glorot = keras.initializers.GlorotUniform(seed=1)
        self.kernel = tf.Variable(glorot((inputs + outputs, 4 * units)))
        self.bias = tf.Variable(tf.zeros(4 * units))
        self.projection = tf.Variable(glorot((units, outputs)))

    @property
    def variables(self) -> list[tf.Variable]:
        return [self.kernel, self.bias, self.projection]

    def __call__(self, x: tf.Tensor, state: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        h, c = state
        i, j, f, o = tf.split(tf.concat([x, h], 1) @ self.kernel + self.bias, 4, 1)
        c = tf.sigmoid(f + 1.0) * c + tf.sigmoid(i) * tf.tanh(j)
        return (tf.sigmoid(o) * tf.tanh(c)) @ self.projection, c


class Adagrad:
    """Adagrad that touches only those rows of a matrix that a batch has used."""

    def __init__(self, variables: list[tf.Variable], rate: float) -> None:
        self.variables, self.rate = variables, rate
        self.sums = [tf.Variable(tf.ones(variable.shape), trainable=False) for variable in variables]

    def apply(self, gradients: list) -> None:
        for variable, total, gradient in zip(self.variables, self.sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                rows, places = tf.unique(gradient.indices)
                # A word that came twice: its gradients are one row.
                values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
                total.scatter_add(tf.IndexedSlices(values**2, rows))
                moved = self.rate * values / tf.sqrt(tf.gather(total, rows))
                variable.scatter_sub(tf.IndexedSlices(moved, rows))
            else:
                total.assign_add(gradient**2)
                variable.assign_sub(self.rate * gradient / tf.sqrt(total))


@program(origin="JANUS", data="docstrings of Python's library")
def sampled_softmax_lm(function, published=False):
    """The One Billion Words' language model: embedding and softmax in shards, an LSTM with a projection, a loss over
    sampled words. The gradients of shards are sparse, with other rows each step; the state is carried on in Python.
    """
    seed = 9
    keras.utils.set_random_seed(seed)
    batch, length, words, size, units, samples, shards = 16, 8, 2000, 32, 128, 64, 4
    if published:
        batch, length, words, size, units, samples, shards = 128, 20, 793470, 512, 2048, 8192, 8

    text = [word for _, row in docstrings() for word in row]
    columns = np.array(Vocabulary([text], words).encode(text), np.int32)
    columns = columns[: len(columns) // batch * batch].reshape(batch, -1)

    rows = -(-words // shards)
    uniform = keras.initializers.RandomUniform(-0.5, 0.5, seed=2)
    embedding, softmax, biases = (
        [tf.Variable(uniform(shape)) for _ in range(shards)] for shape in ((rows, size), (rows, size), (rows,))
    )
    lstm = ProjectedLSTM(size, units, size)
    optimizer = Adagrad([*embedding, *softmax, *biases, *lstm.variables], 0.2)
    memory = {"state": (tf.zeros((batch, size)), tf.zeros((batch, units))), "place": 0}
    losses: list[float] = []

    @function
    def train(inputs, targets):
        with tf.GradientTape() as tape:
            x = tf.nn.embedding_lookup(embedding, inputs)
            state, outputs = memory["state"], []
            for t in range(length):
                state = lstm(x[:, t], state)
                outputs.append(state[0])
            memory["state"] = tuple(tf.stop_gradient(part) for part in state)
            each = tf.nn.sampled_softmax_loss(
                softmax, biases, tf.reshape(targets, (-1, 1)), tf.reshape(tf.stack(outputs, 1), (-1, size)),
                num_sampled=samples, num_classes=words, seed=seed,
            )  # fmt: skip
            loss = tf.reduce_mean(each)
        gradients = tape.gradient(loss, optimizer.variables)
        last, norm = tf.clip_by_global_norm(gradients[-3:], 10.0)  # those of the LSTM
        optimizer.apply([*gradients[:-3], *last])
        losses.append(float(loss))
        if float(norm) > 10.0:
            optimizer.rate *= 0.95
        return loss

    def step():
        if memory["place"] + length >= columns.shape[1]:
            memory.update(state=tuple(map(tf.zeros_like, memory["state"])), place=0)
        window = columns[:, memory["place"] : memory["place"] + length + 1]
        memory["place"] += length
        return train(tf.constant(window[:, :-1]), tf.constant(window[:, 1:]))

    return Training(step, state=lambda: (optimizer.variables, optimizer.sums, optimizer.rate, memory, losses))
