"""Calls of the program's own functions, followed as one because what they read and change was watched."""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import gc
import itertools
import math
import os
import random
import sys
import threading
import time
import traceback
import types
import typing
import weakref

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.base.tuning import tuned
from coexec.compile.compile_thread import background
from tests.marks import needs_watch
from tests.snapshots import assert_same, snapshot

pytestmark = needs_watch

CALLS = 8
# Watching begins in the third call, and may take any time.
AT_ONCE = {
    "watched_from": 1, "watched_operations": 0, "watched_share": math.inf, "watched_idle": 10**9,
    "watched_calls": math.inf, "watched_in_all": math.inf,
}  # fmt: skip
X = tf.constant([[1.0, -2.0], [3.0, 4.0]])


class Dense:
    """A layer as people write it without a library."""

    def __init__(self, scale=1.0):
        self.w = tf.Variable([[0.5, -0.25], [1.5, 2.0]])
        self.scale = scale
        self.activation = tf.tanh
        self.parts = [1.0, 2.0]
        self.config = {"bias": 0.5}

    def __call__(self, x):
        y = self.activation(tf.matmul(x, self.w) * self.scale) + self.config["bias"]
        for part in self.parts:
            y = y * part + tf.sin(y)
        return tf.reduce_sum(tf.sin(y))


@pytest.fixture(autouse=True)
def at_once():
    """Has calls watched from a function's third call on."""
    with tuned(**AT_ONCE):
        yield


def as_regions(step):
    """Decorates a step so that any call in it may be followed as one."""
    return coexec.function(step, regions="all")


def followed_as_one(step, *args, calls=CALLS):
    """Returns the co-executed function after some calls, of which the last ones have skipped Python."""
    function = as_regions(step)
    for _ in range(calls):
        function(*args)
    assert function.stats().regions > 0, function.explain()
    return function


def assert_noticed(step, change, *args):
    """A change between two calls shows in the very next one, and in those after it."""
    function = followed_as_one(step, *args)
    before = snapshot(function(*args))
    change()
    eager = snapshot(step(*args))
    for _ in range(4):
        assert_same(eager, snapshot(function(*args)))
    return before, eager


CHANGES = {
    "attribute": lambda layer: setattr(layer, "scale", 3.0),
    "attribute past __setattr__": lambda layer: vars(layer).update(scale=3.0),
    "function in an attribute": lambda layer: setattr(layer, "activation", tf.nn.softplus),
    "variable in an attribute": lambda layer: setattr(layer, "w", tf.Variable([[9.0, 8.0], [7.0, 6.0]])),
    "list in place": lambda layer: layer.parts.append(0.5),
    "item of a list": lambda layer: layer.parts.__setitem__(0, 5.0),
    "item of a dict": lambda layer: layer.config.update(bias=7.0),
    "method of the instance": lambda layer: setattr(layer, "activation", lambda y: y * 2.0),
    "class of the instance": lambda layer: setattr(layer, "__class__", type("Other", (Dense,), {
        "__call__": lambda self, x: tf.reduce_sum(x) * self.scale})),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", ["argument", "global", "closure", "attribute", "method"])
def test_changes_of_an_object(name, way):
    """What an object holds may change between any two calls, however the code comes to it."""
    layer = Dense()
    holder = types.SimpleNamespace(layer=layer)

    def of_closure(x):
        return layer(x) * 2.0

    def of_attribute(x):
        return holder.layer(x) * 2.0

    def of_argument(x, given):
        return given(x) * 2.0

    def of_method(x):
        return Dense.__call__(layer, x) * 2.0

    globals()["_LAYER"] = layer

    def step(x):
        if way == "argument":
            return of_argument(x, layer)
        if way == "closure":
            return of_closure(x)
        if way == "attribute":
            return of_attribute(x)
        return of_method(x) if way == "method" else of_global(x)

    before, after = assert_noticed(step, lambda: CHANGES[name](layer), X)
    if way != "method" or name != "class of the instance":
        with pytest.raises(AssertionError):
            assert_same(before, after)


_LAYER = None
_FACTOR = 2.0


def of_global(x):
    return _LAYER(x) * 2.0


def scaled(x, by=2.0, *, plus=1.0):
    return tf.reduce_sum(tf.sin(x) * by + plus) * _FACTOR


def other(x, by=2.0, *, plus=1.0):
    return tf.reduce_sum(tf.cos(x) * by - plus)


def caller(x):
    return scaled(x) + tf.reduce_sum(x)


def step_of_functions(x):
    return caller(x) * 2.0


FUNCTIONS = {
    "code": lambda patch: patch.setattr(scaled, "__code__", other.__code__),
    "defaults": lambda patch: patch.setattr(scaled, "__defaults__", (5.0,)),
    "keyword defaults": lambda patch: patch.setattr(scaled, "__kwdefaults__", {"plus": 9.0}),
    "global": lambda patch: patch.setitem(globals(), "_FACTOR", 7.0),
    "global function": lambda patch: patch.setitem(globals(), "scaled", other),
    "function of a module": lambda patch: patch.setattr(tf, "sin", tf.cos),
    "builtin hidden by a global": lambda patch: patch.setitem(globals(), "caller", lambda x: tf.reduce_sum(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_changes_of_functions(name, monkeypatch):
    """Functions may be replaced, or changed themselves."""
    assert_noticed(step_of_functions, lambda: FUNCTIONS[name](monkeypatch), X)


class Computed:
    """Attributes by every way that Python has."""


    __slots__ = ("__dict__", "slot")
    of_class = 2.0
    table: typing.ClassVar = collections.OrderedDict(a=1.0)

    def __init__(self):
        self.slot = 3.0
        self.held = 1.0

    @property
    def property(self):
        return self.held * 2.0

    @functools.cached_property
    def cached(self):
        return self.held + 1.0

    def __getattr__(self, name):
        if name == "anything":
            return self.held * 4.0
        raise AttributeError(name)


def test_computed_attributes():
    """Properties, slots, class attributes, `__getattr__` and containers of classes are guarded."""
    it = Computed()

    def helper(x):
        y = x * it.property + it.slot * it.of_class + it.anything + it.cached + it.table["a"]
        return tf.reduce_sum(tf.sin(y) + tf.cos(y))

    def step(x):
        return helper(x) * 2.0

    function = followed_as_one(step, X)
    for change in (
        lambda: setattr(it, "held", 5.0),
        lambda: setattr(it, "slot", 7.0),
        lambda: setattr(Computed, "of_class", 1.5),
        lambda: Computed.table.update(a=4.0),
        lambda: it.__dict__.update(cached=0.25),
        lambda: setattr(Computed, "property", 3.0),
    ):
        change()
        expected = step(X)
        for _ in range(4):
            assert_same(snapshot(expected), snapshot(function(X)))


def test_a_new_getattribute():
    """A class may begin to compute its attributes."""

    class Held:
        def __init__(self):
            self.factor = 2.0

    held = Held()

    def helper(x):
        return tf.reduce_sum(tf.sin(x) * held.factor)

    def change():
        Held.__getattribute__ = lambda self, name: 5.0 if name == "factor" else object.__getattribute__(self, name)

    def step(x):
        return helper(x) + 1.0

    assert_noticed(step, change, X)


_VARIABLE = contextvars.ContextVar("factor", default=2.0)
_LOCAL = threading.local()
_REFERENCE = {}


@functools.lru_cache
def cached_factor(seed):
    return next(_COUNTER) * 1.0 + seed


_COUNTER = iter(range(1000))


class Metaclass(type):
    def __getattr__(cls, name):
        return next(_COUNTER) * 1.0


class Counting(metaclass=Metaclass):
    pass


def _environment():
    return float(os.environ.get("COEXEC_TEST_FACTOR", "2"))


def _generator():
    yield next(_COUNTER) * 1.0


CLOCKS = {
    "context variable": _VARIABLE.get,
    "thread-local": lambda: _LOCAL.factor,
    "clock": lambda: time.perf_counter() * 1e6 % 1000.0,
    "random": random.random,
    "numpy.random": np.random.rand,
    "iterator": lambda: next(_COUNTER),
    "iterator in a loop": lambda: next(i for i in _COUNTER),
    "unpacked iterator": lambda: sum([*itertools.islice(_COUNTER, 1)]),
    "cache": lambda: cached_factor(len(_REFERENCE)),
    "metaclass": lambda: Counting.anything,
    "environment": _environment,
    "weak reference": lambda: _REFERENCE["weak"]().factor,
    "generator": lambda: sum(_generator()),
    "id": lambda: float(id(object()) % 7),
    "frame": lambda: float(len(sys._getframe(1).f_code.co_name)),
    "globals": lambda: globals()["_FACTOR"],
    "eval": lambda: eval("_FACTOR"),
    "exec": lambda: exec("global _LAST\n_LAST = _FACTOR") or globals()["_LAST"],
    "array": lambda: _ARRAY[0],
    "large array": lambda: _LARGE.sum(),
    "bytearray": lambda: _BYTES[0],
    "memoryview": lambda: memoryview(_BYTES)[0],
    "file": lambda: float(os.path.exists("/nowhere")) + 1.0,
    "deque": lambda: _DEQUE[0],
    "set": lambda: len(_SET),
    "counter": lambda: _COUNTS["a"],
    "max of a list": lambda: max(_LIST),
    "nested": lambda: _NESTED["a"][0]["b"],
    "named tuple": lambda: _TUPLE.a[0],
    "copy": lambda: dict(_NESTED)["a"][0]["b"],
    "format": lambda: float(f"{_LIST[0]}"),
    "comparison": lambda: 2.0 if _LIST == [1.0, 2.0] else 3.0,
    "membership": lambda: 2.0 if 5.0 in _LIST else 3.0,
    "truth": lambda: 2.0 if _TRUE else 3.0,
    "getattr": lambda: getattr(_NAMESPACE, "factor", 3.0),
    "hasattr": lambda: 2.0 if hasattr(_NAMESPACE, "other") else 3.0,
    "vars": lambda: vars(_NAMESPACE)["factor"],
    "map": lambda: sum(map(float, _LIST)),
    "operator": lambda: functools.reduce(lambda a, b: a * b, _LIST),
    "partial": lambda: functools.partial(getattr, _NAMESPACE)("factor"),
    "star": lambda: (lambda *a: sum(a))(*_LIST),
    "keywords": lambda: (lambda **k: sum(k.values()))(**_COUNTS),
    "slice": lambda: sum(_LIST[:2]),
    "class attribute": lambda: Counted.factor,
    "inherited": lambda: Derived().factor,
    "dataclass": lambda: Data([1.0]).items[0] * Data.scale,
    "exception": lambda: _raises(),
    "import": lambda: __import__("math").pi * _FACTOR,
}  # fmt: skip

_ARRAY, _LARGE, _BYTES = np.array([2.0, 3.0]), np.ones(1000), bytearray(b"\2\3")
_DEQUE, _SET, _COUNTS = collections.deque([2.0]), {1, 2}, collections.Counter(a=2)
_LIST, _NESTED, _TRUE = [1.0, 2.0], {"a": [{"b": 2.0}]}, []
_TUPLE = collections.namedtuple("Pair", "a b")([2.0], 1)
_NAMESPACE = types.SimpleNamespace(factor=2.0)


class Counted:
    factor = 2.0


class Derived(Counted):
    pass


@dataclasses.dataclass
class Data:
    items: list
    scale = 2.0


def _raises():
    try:
        return _NESTED["missing"]
    except KeyError:
        return _FACTOR


def _move_everything(monkeypatch):
    """Changes whatever the functions above look at."""
    _VARIABLE.set(_VARIABLE.get() + 1.0)
    _LOCAL.factor += 1.0
    monkeypatch.setitem(os.environ, "COEXEC_TEST_FACTOR", str(float(os.environ.get("COEXEC_TEST_FACTOR", "2")) + 1))
    _REFERENCE["weak"]().factor += 1.0
    globals()["_FACTOR"] += 1.0
    _ARRAY[0] += 1.0
    _LARGE[0] += 1.0
    _BYTES[0] += 1
    _DEQUE[0] += 1.0
    _SET.add(len(_SET) + 10)
    _COUNTS["a"] += 1
    _LIST[0] += 1.0
    _NESTED["a"][0]["b"] += 1.0
    _TUPLE.a[0] += 1.0
    _NAMESPACE.factor += 1.0
    Counted.factor += 1.0
    Data.scale += 1.0


_HOLDER = Counted()


@pytest.mark.parametrize("name", CLOCKS)
def test_hidden_reads(name, monkeypatch):
    """Whatever a helper takes a number from, the number is that of this call: guarded, or not memoized."""
    _LOCAL.factor, _REFERENCE["weak"] = 2.0, weakref.ref(_HOLDER)
    _HOLDER.factor = 2.0
    monkeypatch.setitem(globals(), "_FACTOR", 2.0)
    read = CLOCKS[name]
    seen = []

    def helper(x):
        factor = float(read())
        seen.append(factor)
        return tf.reduce_sum(tf.sin(x) * factor + tf.cos(x))

    def quiet(x):
        factor = float(read())
        return tf.reduce_sum(tf.sin(x) * factor + tf.cos(x))

    def step(x):
        return quiet(x) * 2.0, helper(x)

    def given(x):
        return quiet(x) * 2.0

    function, only = as_regions(step), as_regions(given)
    for number in range(14):
        if number in (6, 9, 10):
            _move_everything(monkeypatch)
        _, told = function(X)
        expected = tf.reduce_sum(tf.sin(X) * seen[-1] + tf.cos(X))
        np.testing.assert_allclose(told, expected, rtol=1e-5)
        if name not in ("clock", "random", "numpy.random", "iterator", "iterator in a loop", "unpacked iterator",
                        "metaclass", "generator", "id", "frame"):  # fmt: skip
            np.testing.assert_allclose(only(X), given(X), rtol=1e-5)
    if name in ("clock", "random", "numpy.random", "iterator", "iterator in a loop", "metaclass", "generator"):
        values = [float(only(X)) for _ in range(10)]
        assert len(set(values)) == 10, values


class Effects:
    def __init__(self):
        self.log, self.count, self.last, self.table, self.best = [], 0, None, {}, -1.0


EFFECTS = {
    "list": lambda it, y: it.log.append(1),
    "count": lambda it, y: setattr(it, "count", it.count + 1),
    "tensor": lambda it, y: setattr(it, "last", y),
    "dict": lambda it, y: it.table.__setitem__(len(it.table), 1),
    "vars": lambda it, y: vars(it).update(count=it.count + 1),
    "through a method": lambda it, y: list.append(it.log, 2),
    "object.__setattr__": lambda it, y: object.__setattr__(it, "count", it.count + 2),
    "extend": lambda it, y: it.log.extend([1, 2]),
    "in place": lambda it, y: it.log.__iadd__([3]),
    "global": lambda it, y: globals().update(_GLOBAL=globals().get("_GLOBAL", 0) + 1),
    "class": lambda it, y: setattr(Effects, "shared", getattr(Effects, "shared", 0) + 1),
    "closure": lambda it, y: _tally(),
    "default": lambda it, y: _with_default(),
    "operator": lambda it, y: __import__("operator").setitem(it.table, len(it.table), 1),
    "map": lambda it, y: list(map(it.log.append, [1])),
    "sort": lambda it, y: (it.log.append(-len(it.log)), it.log.sort()),
    "array": lambda it, y: _ARRAY.__iadd__(1.0),
    "delete": lambda it, y: (it.log.append(1), it.log.__delitem__(0)),
}


def _make_tally():
    count = 0

    def tally():
        nonlocal count
        count += 1
        return count

    return tally


_tally = _make_tally()


def _with_default(seen=[]):  # noqa: B006
    seen.append(1)
    return len(seen)


@pytest.mark.parametrize("name", EFFECTS)
def test_effects(name):
    """Whatever a helper changes, it changes on every call."""
    effect = EFFECTS[name]

    def make():
        it = Effects()

        def helper(x):
            y = tf.reduce_sum(tf.sin(x) + tf.cos(x) * 2.0)
            effect(it, y)
            return y

        def step(x):
            return helper(x) * 2.0

        return it, step

    def state(it):
        return {**vars(it), "global": globals().get("_GLOBAL"), "class": getattr(Effects, "shared", None),
                "default": list(_with_default.__defaults__[0]), "array": _ARRAY.copy()}  # fmt: skip

    def reset():
        globals().pop("_GLOBAL", None)
        if "shared" in vars(Effects):
            del Effects.shared
        _with_default.__defaults__[0].clear()
        _ARRAY[:] = 2.0, 3.0

    states = []
    for decorate in (lambda f: f, as_regions):
        reset()
        it, step = make()
        step = decorate(step)
        found = []
        for _ in range(10):
            found.append((float(step(X)), snapshot(state(it))))
        states.append(found)
    for one, other in zip(*states, strict=True):
        assert_same(one[1], other[1])
        np.testing.assert_allclose(one[0], other[0], rtol=1e-5)


def test_what_ends_as_it_began_is_no_effect():
    """A helper that changes something and puts it back is followed as one."""
    it = Effects()

    @contextlib.contextmanager
    def counting():
        it.count += 1
        try:
            yield
        finally:
            it.count -= 1

    def helper(x):
        with counting(), tf.name_scope("helper"):
            return tf.reduce_sum(tf.sin(x) + tf.cos(x) * 2.0)

    def step(x):
        return helper(x) * 2.0

    function = followed_as_one(step, X)
    regions = function.stats().regions
    np.testing.assert_allclose(function(X), step(X), rtol=1e-6)
    assert function.stats().regions > regions
    assert it.count == 0


def test_arguments():
    """Other arguments, and the same ones changed in place, are other calls."""

    def helper(x, options, *more, scale=1.0, **named):
        y = tf.sin(x) * options["a"] * scale + sum(more)
        return tf.reduce_sum(y + sum(named.values())), options

    def step(x, options, *more, **named):
        total, given = helper(x, options, *more, **named)
        return total * 2.0, given is options

    function = as_regions(step)
    options = {"a": 2.0}
    for number in range(24):
        if number % 6 == 5:
            options["a"] += 1.0
        more, named = (1.0, 2.0)[: number % 3], ({"k": 1.0} if number % 4 == 3 else {})
        one, other = step(X, options, *more, **named), function(X, options, *more, **named)
        np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
        assert one[1] == other[1]


def test_lines_of_errors():
    """An error inside of a helper has the program's lines, in a function with the program's name."""

    def helper(x, n):
        y = tf.sin(x)
        return tf.reshape(y, [n]) + len(str(n))

    def step(x, n):
        return helper(x, n) * 2.0

    function = as_regions(step)
    for _ in range(6):
        function(X, 4)
    places = []
    for called in (step, function):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            called(X, 5)
        frames = [f for f in traceback.extract_tb(caught.tb) if f.name in ("step", "helper")]
        places.append((frames[-1].name, frames[-1].lineno))
    assert places[0] == places[1]


def test_recursion_to_the_limit():
    """A helper that calls itself gets as deep as in eager."""

    def helper(x, n):
        return x if n == 0 else helper(x, n - 1) + 1.0

    def step(x):
        return helper(x, 250)

    function = as_regions(step)
    for _ in range(4):
        np.testing.assert_allclose(function(X), X + 250.0)


def test_training_with_helpers():
    """Layers, a loss and an optimizer of one's own: the values are eager's, and their Python is skipped."""

    class Adam:
        def __init__(self, variables):
            self.m = [tf.Variable(tf.zeros_like(v)) for v in variables]
            self.v = [tf.Variable(tf.zeros_like(v)) for v in variables]
            self.t = tf.Variable(0.0)

        def apply(self, gradients, variables):
            self.t.assign_add(1.0)
            for g, w, m, v in zip(gradients, variables, self.m, self.v, strict=True):
                m.assign(0.9 * m + 0.1 * g)
                v.assign(0.99 * v + 0.01 * g * g)
                w.assign_sub(0.01 * m / (tf.sqrt(v) + 1e-6) / (1.0 - 0.9**self.t))

    def make():
        layers = [Dense(0.5), Dense(0.25)]
        variables = [layer.w for layer in layers]
        optimizer = Adam(variables)

        def loss_of(x):
            return sum(layer(x) for layer in layers)

        def step(x):
            with tf.GradientTape() as tape:
                loss = loss_of(x)
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        return variables, step

    eager, plain = make()
    mine, step = make()
    function = as_regions(step)
    for _ in range(15):
        np.testing.assert_allclose(plain(X), function(X), rtol=1e-4)
    for one, other in zip(eager, mine, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
    assert function.stats().regions >= 15, function.explain()


def test_an_old_dict_that_takes_its_first_tensor():
    """It is no new one, even if it is as it was in the end."""
    table = {"factor": 2.0}

    def helper(x):
        table["made"] = tf.sin(x)
        y = table["made"] * table["factor"] + tf.cos(x)
        del table["made"]
        return tf.reduce_sum(y)

    def step(x):
        return helper(x) * 2.0

    assert_noticed(step, lambda: table.update(factor=5.0), X)


def test_helpers_made_on_every_call_are_let_go():
    """A function that a call defines, calls and drops is freed by then, or with what is known of the program."""
    w, made = tf.Variable(tf.ones([2, 2])), []

    def build(scale):
        def helper(x):
            return tf.nn.relu(tf.matmul(x, w)) * scale

        made.append(weakref.ref(helper))
        return helper

    def step(x):
        return tf.reduce_sum(build(2.0)(x))

    function = as_regions(step)
    for _ in range(CALLS):
        assert_same(function(X), step(X))
    function.clear()
    assert background.wait(60)  # XLA compiles what has been dropped
    gc.collect()
    assert [each() for each in made] == [None] * len(made)
