"""Random steps that choose among layers, by ever other ways, while somebody changes the layers: values are eager's."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuned

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIDTH, CALLS = 6, 26


class Scaled(keras.layers.Layer):
    """A layer of the program's: its code reads an attribute, a size, and a list."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale, self.shifts = keras.layers.Dense(WIDTH), 1.5, [0.1, 0.2]

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        y = self.inner(x) * self.scale
        return y + self.shifts[0] if x.shape[0] > 3 else y - self.shifts[1]


class Cell(keras.layers.Layer):
    """A recurrent cell from a zero state."""

    def __init__(self):
        super().__init__()
        self.cell = keras.layers.GRUCell(WIDTH)

    def build(self, shape):
        self.cell.build(shape)

    def call(self, x):
        return self.cell(x, [tf.zeros_like(x)])[0]


LAYERS = [
    lambda: keras.layers.Dense(WIDTH, "silu"),
    lambda: keras.layers.Dense(WIDTH, "tanh", kernel_regularizer="l2"),
    lambda: keras.layers.LayerNormalization(),
    lambda: keras.layers.BatchNormalization(),
    lambda: keras.layers.Dropout(0.3, seed=7),
    lambda: keras.layers.Rescaling(0.5),
    lambda: keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(WIDTH)]),
    Scaled,
    Cell,
]
OPERATIONS = [
    lambda x, y: x + 0.1,
    lambda x, y: tf.tanh(x) * 2.0,
    lambda x, y: x - y,
    lambda x, y: tf.concat([x, y], 1)[:, :WIDTH],
    lambda x, y: tf.nn.l2_normalize(x, 1),
    lambda x, y: tf.clip_by_norm(x, 2.0),
    lambda x, y: keras.ops.softmax(x) + tf.one_hot(tf.argmax(y, 1), WIDTH),
    lambda x, y: x * tf.reduce_mean(y),
]
OPTIMIZERS = ["sgd", "adam", "rmsprop", "adamw"]


class Program:
    """One step, drawn from a seed: `call(number)` runs it."""

    def __init__(self, seed, decorate):
        keras.utils.set_random_seed(seed)
        draw = random.Random(seed)
        self.layers = [draw.choice(LAYERS)() for _ in range(draw.randint(2, 4))]
        for layer in self.layers:
            layer.build((None, WIDTH))
        self.stages = [self._stage(draw) for _ in range(draw.randint(2, 5))]
        self.loss, self.metric = keras.losses.MeanSquaredError(), keras.metrics.MeanAbsoluteError()
        self.trained = draw.random() < 0.7
        self.persistent = draw.random() < 0.2
        self.optimizer = keras.optimizers.get(draw.choice(OPTIMIZERS))
        self.variables = [v for layer in self.layers for v in layer.trainable_variables]
        self.optimizer.build(self.variables)
        self.sizes = draw.choice([[4], [4], [4, 5], [2, 4, 5]])
        self.moments = {draw.randrange(6, CALLS): draw.randrange(6) for _ in range(draw.randint(0, 3))}
        self.seed = seed
        self.step = decorate(self._step)

    @staticmethod
    def _stage(draw):
        kind = draw.choice(["layer", "choice", "choice", "choice", "loop", "twice"])
        return kind, [draw.randrange(100) for _ in range(3)]

    def _take(self, x, y, number):
        count = len(self.layers)
        if number % 3 == 0:
            return OPERATIONS[number % len(OPERATIONS)](x, y)
        return self.layers[number % count](x)

    def _step(self, x, choices, training):
        with tf.GradientTape(persistent=self.persistent) as tape:
            y, choices = x, iter(choices)
            for kind, numbers in self.stages:
                if kind == "layer":
                    y = self.layers[numbers[0] % len(self.layers)](y)
                elif kind == "choice":
                    y = self._take(y, x, numbers[next(choices)])
                elif kind == "loop":
                    for _ in range(1 + next(choices)):
                        y = self._take(y, x, numbers[next(choices)])
                else:
                    layer = self.layers[numbers[0] % len(self.layers)]
                    y = layer(layer(y)) if next(choices) else layer(y)
            loss = self.loss(y, y * 0.5) if next(choices) else self.loss(x, y)
        self.metric.update_state(x, y)
        if self.trained:
            variables = [v for v in self.variables if v.trainable]
            gradients = tape.gradient(loss, variables)
            pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
            if pairs:
                self.optimizer.apply_gradients(pairs)
        return loss, y, self.metric.result()

    def _change(self, what):
        """What somebody does to the layers between two calls."""
        for layer in self.layers:
            if what == 0 and isinstance(layer, Scaled):
                layer.scale += 1.0
            elif what == 1 and isinstance(layer, Scaled):
                layer.shifts[0] += 1.0
            elif what == 2 and isinstance(layer, keras.layers.Dense):
                layer.activation = keras.activations.relu
            elif what == 3 and layer.weights:
                layer.weights[0].assign(layer.weights[0] * 0.9)
            elif what == 4 and isinstance(layer, keras.layers.Rescaling):
                vars(layer)["scale"] = 0.75
            elif what == 5 and isinstance(layer, keras.layers.LayerNormalization):
                layer.trainable = not layer.trainable

    def call(self, number):
        if number in self.moments:
            self._change(self.moments[number])
        draw = np.random.default_rng([self.seed, number])
        x = tf.constant(draw.normal(size=(self.sizes[number % len(self.sizes)], WIDTH)), tf.float32)
        choices = draw.integers(0, 3, 40) if number % 5 else np.zeros(40, int)
        return self.step(x, choices.tolist(), number % 7 < 5)

    def state(self):
        return [*(v for layer in self.layers for v in layer.variables), *self.optimizer.variables]


def check(seed):
    """Compares a program's calls and state with eager's; returns the decorated step."""
    results = []
    for decorate in (lambda f: f, coexec.function):
        program = Program(seed, decorate)
        found = [[np.asarray(v) for v in program.call(number)] for number in range(CALLS)]
        results.append((found, [np.asarray(v) for v in program.state()]))
    (expected, state), (followed, state_followed) = results
    for number, (one, other) in enumerate(zip(expected, followed, strict=True)):
        for v, w in zip(one, other, strict=True):
            np.testing.assert_allclose(v, w, rtol=2e-3, atol=1e-4, err_msg=f"seed {seed}, call {number}")
    for v, w in zip(state, state_followed, strict=True):
        np.testing.assert_allclose(v, w, rtol=2e-3, atol=1e-3, err_msg=f"seed {seed}, state")
    return program.step


@pytest.mark.parametrize("seed", range(8))
def test_a_few(seed):
    with testing.always_follow(), tuned(call_seconds=1e9):  # nothing is left to later calls on a busy machine
        stats = check(seed).stats()
    assert stats.followed > CALLS // 2
    assert stats.regions > CALLS // 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_many(seed):
    with testing.always_follow():
        check(seed)
