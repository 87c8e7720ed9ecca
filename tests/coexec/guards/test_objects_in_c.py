"""Objects with state that is not in attributes, but in memory of C code: what reads them is not skipped."""

import array
import collections
import ctypes
import functools

import keras
import pytest
import tensorflow as tf

from tests.coexec.guards.test_purity import CALLS, Layer, compare


class Record(ctypes.Structure):
    _fields_ = [("rate", ctypes.c_float)]


class Deque(collections.deque):
    pass


OBJECTS = {
    "array": (lambda: array.array("f", [2.0]), lambda o, x: x * o[0], lambda o: o.__setitem__(0, 3.0)),
    "array of C": (lambda: (ctypes.c_float * 1)(2.0), lambda o, x: x * o[0], lambda o: o.__setitem__(0, 3.0)),
    "structure of C": (lambda: Record(2.0), lambda o, x: x * o.rate, lambda o: setattr(o, "rate", 3.0)),
    "deque": (lambda: collections.deque([2.0]), lambda o, x: x * o[0], lambda o: o.appendleft(3.0)),
    "deque of a subclass": (lambda: Deque([2.0]), lambda o, x: x * o[0], lambda o: o.appendleft(3.0)),
    "bytes": (lambda: bytearray(b"ab"), lambda o, x: x * o[0], lambda o: o.__setitem__(0, 3)),
    "partial": (
        lambda: functools.partial(tf.nn.leaky_relu, alpha=0.1), lambda o, x: o(x),
        lambda o: o.keywords.update(alpha=0.5),
    ),
    "keywords of a partial": (
        lambda: functools.partial(tf.nn.leaky_relu, alpha=0.1), lambda o, x: x * o.keywords["alpha"],
        lambda o: o.keywords.update(alpha=0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_a_change_is_seen(name):
    new, work, change = OBJECTS[name]

    def make():
        held = new()
        layer = Layer(lambda x: work(held, tf.tanh(x)))
        return lambda x: layer(x), held

    compare(make, lambda held, i: change(held) if i == 8 else None, regions=0)


def test_calls_of_a_cached_function_are_counted():
    counts = []

    def make():
        cached = functools.lru_cache(lambda number: number * 0.5)
        layer = Layer(lambda x: tf.tanh(x) * cached(3))

        def step(x):
            y = layer(x)
            counts.append(cached.cache_info().hits)
            return y

        return step, None

    compare(make, regions=0)
    assert counts[:CALLS] == counts[CALLS:] == list(range(CALLS))


def test_a_partial_that_gets_another_state():
    """Its function and keywords are replaced; a layer of the library has it as its activation."""
    def make():
        keras.utils.set_random_seed(1)
        rectified = functools.partial(tf.nn.leaky_relu, alpha=0.1)
        layer = keras.layers.Dense(4, activation=rectified)
        return lambda x: layer(x), rectified

    def change(rectified, i):
        if i == 8:
            rectified.__setstate__((tf.nn.leaky_relu, (), {"alpha": 0.9}, None))

    compare(make, change)
