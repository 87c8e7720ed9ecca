"""Functions of NumPy in the program's layers: they compute, so that calls are memoized, unless they write."""

import warnings

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


class World:
    """What a case's layer reads besides itself: `a` and `b`, of which the latter may be the former's base, and more."""

    a = b = None
    hits = ()


def views():
    World.b = np.ones(20000, np.float32)
    World.a = World.b[:4]


def zeros():
    World.a, World.b = np.zeros(4, np.float32), np.zeros(4, np.float32)


def handed_on():
    f = np.add
    f(World.a.base[4:], 1, World.a.base[4:])
    return 1.0


def mapped():
    return float(len(list(map(np.add, [World.a.base[4:]], [1], [World.a.base[4:]]))))


def by_name():
    given = {"out": World.a.base[4:]}
    np.add(World.a.base[4:], 1, **given)
    return 1.0


def in_place():
    rest = World.a.base[4:]
    rest += 1
    return 1.0


def aliases():
    a, b = World.a, World.b
    a += 1
    b -= 1
    return 1.0 + a.sum()


def views_in_place():
    a = np.ravel(World.a)
    a += 1
    found = World.b.sum()
    a -= 1
    return 1.0 + found


def shadowed(list=lambda values: values):
    own = list(World.hits)
    own.append(1)
    return 1.0 + len(World.hits)


def divides():
    return float((1 / World.a)[0] > 5)


def formats():
    return float(len(f"{np.arange(6.0) / 3}"))


def globals_of():
    return handed_on.__globals__["World"].b.sum()


def now():
    return float(np.datetime64("now", "s").astype("int64") > 0)


def share():
    World.b = World.a


def part():
    World.b = World.a[:3]


def write(place, value):
    def change():
        World.b[place] = value

    return change


def fortran():
    World.a = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))


def ordered():
    World.a = np.arange(6, dtype=np.float32).reshape(2, 3)


def records():
    World.a = np.zeros(1, [("x", "f4")])[0]


def set_record():
    World.a["x"] = 5


CASES = {
    "handed on": (views, handed_on, None),
    "mapped": (views, mapped, None),
    "by name": (views, by_name, None),
    "in place": (views, in_place, None),
    "aliases": (zeros, aliases, share),
    "views in place": (zeros, views_in_place, part),
    "shadowed": (zeros, shadowed, None),
    "base": (views, lambda: World.a.base[5000], write(5000, 7.0)),
    "sum of the base": (views, lambda: World.a.base.sum(), write(8, 100.0)),
    "memory": (views, lambda: World.a.data.obj.base[9], write(9, 7.0)),
    "order": (ordered, lambda: World.a.ravel("K")[1], fortran),
    "strides": (ordered, lambda: float(World.a.strides[0]), fortran),
    "flags": (zeros, lambda: 2.0 if World.a.flags.writeable else 3.0, lambda: World.a.setflags(write=False)),
    "errors": (zeros, divides, lambda: np.seterr(all="raise")),
    "errors of functions": (zeros, lambda: 1.0 + np.isinf(np.log(World.a)).sum(), lambda: np.seterr(all="raise")),
    "warnings": (zeros, divides, lambda: warnings.simplefilter("error")),
    "text": (zeros, formats, lambda: np.set_printoptions(precision=2)),
    "globals": (zeros, globals_of, write(0, 3.0)),
    "now": (zeros, now, None),
    "records": (records, lambda: 1.0 + World.a["x"], set_record),
    "not a number": (views, lambda: float(np.nan_to_num(World.a.base[4:], False).sum()), write(8, float("nan"))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_compared(case):
    """Memory, layout and settings besides contents; what runs before the sixth call changes one of them."""
    before, work, change = CASES[case]

    class Working(Layer):
        def call(self, x):
            return self.dense(x) * work()

    def calls(decorate):
        keras.utils.set_random_seed(1)
        World.hits = []
        before()
        layer, found = Working(), []

        @decorate
        def step(x):
            return layer(x)

        with testing.always_follow(), warnings.catch_warnings(), np.errstate(all="ignore"), np.printoptions():
            warnings.simplefilter("ignore")
            for call in range(8):
                if call == 5 and change is not None:
                    change()
                try:
                    result = step(tf.ones([2, 4]) * float(call))
                except (FloatingPointError, RuntimeWarning) as error:
                    result = type(error).__name__
                world = float(World.b[15]) if World.b is not None and World.b.size > 15 else None
                found.append((result, world, len(World.hits)))
        return snapshot(found)

    assert_same(calls(unchanged), calls(coexec.function))
