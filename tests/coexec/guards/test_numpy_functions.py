"""Functions of NumPy in the program's layers: they compute, so that calls are memoized, unless they write."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import unchanged
from tests.snapshots import assert_same, snapshot


class Layer(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)
        self.rates = np.linspace(0.0, 1.0, 4).astype(np.float32)
        self.buffer = np.zeros(4, np.float32)


class Attention(Layer):
    """Masks and positions as they are often computed: by functions, methods and operators on arrays."""

    def call(self, x):
        size = x.shape[1]
        mask = np.triu(np.full((size, size), -1e9, "float32"), k=1)
        angles = np.arange(size)[:, None] / np.power(10000, (2 * (np.arange(4) // 2)) / 4)
        positions = np.where(np.arange(4) % 2 == 0, np.sin(angles), np.cos(angles)).astype("float32")
        scores = tf.matmul(x, x, transpose_b=True) + mask
        return self.dense(tf.nn.softmax(scores) @ x + positions) * np.clip(self.rates, 0.1, 0.9).sum()


class Ufunc(Layer):
    def call(self, x):
        np.add(self.buffer, 1, self.buffer)
        return self.dense(x) * self.buffer.sum()


class Keyword(Layer):
    def call(self, x):
        np.clip(self.buffer + 1, 0, 100, out=self.buffer)
        return self.dense(x) * self.buffer.sum()


class Dispatched(Layer):
    def call(self, x):
        np.cumsum(np.ones(4, "float32") + self.buffer, 0, None, self.buffer)
        return self.dense(x) * self.buffer[0]


class Method(Layer):
    def call(self, x):
        (self.buffer + 1).clip(0, 100, self.buffer)
        return self.dense(x) * self.buffer.sum()


class OfLocal(Layer):
    def call(self, x):
        more = self.buffer + 1
        more.round(0, self.buffer)
        return self.dense(x) * self.buffer.sum()


class Spread(Layer):
    def call(self, x):
        np.add(*[self.buffer, 1, self.buffer])
        return self.dense(x) * self.buffer.sum()


class Fill(Layer):
    def call(self, x):
        self.buffer.fill(self.buffer[0] + 1)
        return self.dense(x) * self.buffer.sum()


class Copy(Layer):
    def call(self, x):
        np.copyto(self.buffer, self.buffer + 1)
        return self.dense(x) * self.buffer.sum()


class InPlace(Layer):
    def call(self, x):
        buffer = self.buffer
        buffer += 1
        return self.dense(x) * buffer.sum()


class View(Layer):
    def call(self, x):
        view = np.atleast_1d(self.buffer)
        view += 1
        return self.dense(x) * self.buffer.sum()


class Printed(Layer):
    def call(self, x):
        return self.dense(x) * len(np.array2string(self.rates))


class Drawn(Layer):
    def call(self, x):
        return self.dense(x) * np.random.normal()


class Replaced(Layer):
    def call(self, x):
        return self.dense(x) * np.median(self.rates)


def outcome(kind, decorate, change=None):
    """Returns the results of eight calls, and the state after each; `change` runs before the sixth."""
    keras.utils.set_random_seed(1)
    layer = kind()

    @decorate
    def step(x):
        return layer(x)

    found = []
    with testing.always_follow():
        for call in range(8):
            if call == 5 and change is not None:
                change(layer)
            found.append((step(tf.ones([2, 3, 4]) * float(call)), layer.buffer.copy()))
    return snapshot(found), step


@pytest.mark.parametrize(
    "kind", [Ufunc, Keyword, Dispatched, Method, OfLocal, Spread, Fill, Copy, InPlace, View, Drawn]
)
def test_what_writes(kind):
    """An array that a layer holds is written to in each call, wherever the function takes it."""
    assert_same(outcome(kind, unchanged)[0], outcome(kind, coexec.function)[0])


def test_what_computes():
    """The layer is one call, until an array that it holds is written to, also in place."""

    def change(layer):
        layer.rates[1] = 0.7

    (expected, _), (found, step) = outcome(Attention, unchanged, change), outcome(Attention, coexec.function, change)
    assert_same(expected, found)
    reasons = [line for line in step.explain().split("\n") if "Layer.__call__" in line]
    assert reasons == ["  1 x Layer.__call__: what the program's code in it looks at is not what it was"]
    assert step.stats().regions >= 3


def test_how_arrays_are_printed():
    """It is a setting of NumPy's, which is not guarded."""

    def change(layer):
        np.set_printoptions(precision=2)

    try:
        expected, _ = outcome(Printed, unchanged, change)
        np.set_printoptions(precision=8)
        assert_same(expected, outcome(Printed, coexec.function, change)[0])
    finally:
        np.set_printoptions(precision=8)


def test_a_function_is_replaced(monkeypatch):
    median = np.median

    def change(layer):
        monkeypatch.setattr(np, "median", lambda values: 3.0 * median(values))

    expected, _ = outcome(Replaced, unchanged, change)
    monkeypatch.undo()
    assert_same(expected, outcome(Replaced, coexec.function, change)[0])
