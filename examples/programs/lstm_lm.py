"""LSTM, of JANUS: a language model whose state lives in Python from one stretch of the text to the next."""

import math

import keras
import numpy as np
import tensorflow as tf

from examples.programs import Training, program
from examples.programs.parts.texts import Vocabulary, docstrings


class Cell:
    """One LSTM layer of plain operations and variables."""

    def __init__(self, units: int, scale: float) -> None:
        self.kernel = tf.Variable(tf.random.uniform((2 * units, 4 * units), -scale, scale))
        self.bias = tf.Variable(tf.zeros(4 * units))

    @property
    def variables(self) -> list[tf.Variable]:
        return [self.kernel, self.bias]

    def __call__(self, x: tf.Tensor, state: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        h, c = state
        i, j, f, o = tf.split(tf.matmul(tf.concat([x, h], 1), self.kernel) + self.bias, 4, 1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(j)
        return tf.sigmoid(o) * tf.tanh(c), c


class LanguageModel:
    """Layers of LSTM over embedded words; remembers, as an attribute, where the text before left its state."""

    def __init__(self, words: int, units: int, layers: int, batch: int, scale: float, drop: float, seed: int) -> None:
        self.embedding = tf.Variable(tf.random.uniform((words, units), -scale, scale))
        self.cells = [Cell(units, scale) for _ in range(layers)]
        self.kernel = tf.Variable(tf.random.uniform((units, words), -scale, scale))
        self.bias = tf.Variable(tf.zeros(words))
        self.dropout = keras.layers.Dropout(drop, seed=seed)
        self.batch, self.units = batch, units
        self.reset()

    def reset(self) -> None:
        """Forgets the text so far."""
        self.states = [(tf.zeros((self.batch, self.units)), tf.zeros((self.batch, self.units))) for _ in self.cells]

    @property
    def variables(self) -> list[tf.Variable]:
        cells = [variable for cell in self.cells for variable in cell.variables]
        return [self.embedding, *cells, self.kernel, self.bias]

    def __call__(self, tokens: tf.Tensor) -> tf.Tensor:
        """`int32[batch, length]` to the scores of each next word, `float32[batch, length, words]`."""
        outputs = []
        for t in range(tokens.shape[1]):
            x = self.dropout(tf.nn.embedding_lookup(self.embedding, tokens[:, t]), training=True)
            for layer, cell in enumerate(self.cells):
                self.states[layer] = cell(x, self.states[layer])
                x = self.dropout(self.states[layer][0], training=True)
            outputs.append(x)
        return tf.tensordot(tf.stack(outputs, 1), self.kernel, 1) + self.bias


@program(origin="JANUS", data="docstrings of Python's library")
def lstm_lm(function, published=False):
    """Two layers of LSTM, as on the Penn Treebank. Each step goes on from the state that the step before left in a list
    of the model, and Python lowers the learning rate at the end of an epoch.
    """
    seed = 3
    keras.utils.set_random_seed(seed)
    words, units, length, batch, tokens = (10000, 650, 35, 20, None) if published else (500, 64, 10, 10, 1500)

    text = [word for _, row in docstrings() for word in row][:tokens]
    vocabulary = Vocabulary([text], words)
    columns = np.array(vocabulary.encode(text), np.int32)
    columns = columns[: len(columns) // batch * batch].reshape(batch, -1)
    stretches = range(0, columns.shape[1] - length - 1, length)

    model = LanguageModel(words, units, layers=2, batch=batch, scale=0.05, drop=0.5 if published else 0.1, seed=seed)
    optimizer = keras.optimizers.SGD(1.0)
    epochs: list[list[float]] = []

    @function
    def train(inputs, targets):
        model.states = [(tf.stop_gradient(h), tf.stop_gradient(c)) for h, c in model.states]
        with tf.GradientTape() as tape:
            logits = model(inputs)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            loss = tf.reduce_sum(losses) / batch
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.variables), 5.0)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        epochs[-1].append(math.exp(float(loss) / length))  # the perplexity
        return loss

    def step():
        if not epochs or len(epochs[-1]) == len(stretches):
            epochs.append([])
            model.reset()
            optimizer.learning_rate = 0.8 ** max(len(epochs) - 6, 0)
        start = stretches[len(epochs[-1])]
        window = columns[:, start : start + length + 1]
        return train(tf.constant(window[:, :-1]), tf.constant(window[:, 1:]))

    return Training(step, state=lambda: (model.variables, model.states, optimizer.variables, epochs))
