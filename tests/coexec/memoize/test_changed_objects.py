"""Whatever is changed in what a memoized call has read, and by whatever means, the next call notices it."""

import collections
import configparser
import enum
import os
import types
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.activations import activations
from keras.src.backend.tensorflow import nn

import coexec
from coexec import testing
from coexec.base.tuning import tuned
from tests.coexec import run_both

X = tf.constant(np.random.default_rng(3).normal(size=[4, 6]).astype(np.float32))
Y = tf.constant(np.random.default_rng(4).normal(size=[4, 3]).astype(np.float32))
SHARED = types.SimpleNamespace(factor=1.0)


def factor(scale=1.0, *, shift=0.0):
    return scale + shift


def another_factor(scale=1.0, *, shift=0.0):
    return 3.0 * scale + shift


def closure(number):
    def content():
        return number

    return content


class Items(keras.layers.Layer):
    """A layer whose `call` only computes, with all kinds of things around it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.scales = [1.0, 2.0]
        self.config = {"rate": 1.0}
        self.plain = types.SimpleNamespace(factor=1.0)
        self.content = closure(1.0)

    def call(self, x):
        y = self.dense(x) * self.scales[0] * self.config["rate"] + len(self.scales)
        return y * SHARED.factor * factor() * self.plain.factor * self.content()


SCALES = {"a": 1.0, "b": 2.0, "c": 3.0}


class Switched(keras.layers.Layer):
    def call(self, x, kind):
        return x * SCALES[kind]


class Scaled(keras.layers.Layer):
    scale = 1.0

    def call(self, x):
        return x * self.scale


class Program:
    """A training step, and what its calls read."""

    def __init__(self):
        keras.utils.set_random_seed(5)
        self.rescaling = keras.layers.Rescaling(1.0)
        self.own = Items()
        self.model = keras.Sequential([self.rescaling, keras.layers.Dense(6, "relu"), keras.layers.Softmax(), self.own])
        self.model.build((None, 6))
        self.objective = keras.losses.Huber(delta=1.0)
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        self.optimizer.build(self.model.trainable_variables)
        self.metric = keras.metrics.MeanSquaredError()
        self.rescaling.table = np.array([1.0, 1.0], np.float32)


def put(holder, name, value):
    """Sets an attribute; returns what sets it back."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    return lambda: setattr(holder, name, before)


def put_past(holder, name, value):
    """The same, past `__setattr__`."""
    before = vars(holder)[name]
    vars(holder)[name] = value
    return lambda: vars(holder).update({name: before})


def put_object(holder, name, value):
    before = vars(holder)[name]
    object.__setattr__(holder, name, value)
    return lambda: object.__setattr__(holder, name, before)


def put_dict(holder, name, value):
    before = vars(holder)
    object.__setattr__(holder, "__dict__", {**before, name: value})
    return lambda: object.__setattr__(holder, "__dict__", before)


def put_item(container, key, value):
    before = container[key]
    type(container).__mro__[-2].__setitem__(container, key, value)  # past Keras' list or dict
    return lambda: type(container).__mro__[-2].__setitem__(container, key, before)


def append(container, value):
    container.append(value)
    return container.pop


def patched(holder, name, value):
    patch = mock.patch.object(holder, name, value)
    patch.start()
    return patch.stop


CHANGES = {
    "an attribute of the layer, in its dict": lambda p: put_past(p.rescaling, "scale", 5.0),
    "an attribute of the layer, by object": lambda p: put_object(p.rescaling, "scale", 5.0),
    "an attribute of the layer, in another dict": lambda p: put_dict(p.rescaling, "scale", 5.0),
    "an attribute of a layer in the model": lambda p: put_past(p.model.layers[1], "activation", keras.ops.tanh),
    "an attribute of the loss": lambda p: put_past(p.objective, "_fn_kwargs", {"delta": 0.1}),
    "an item of a dict of the loss": lambda p: put_item(p.objective._fn_kwargs, "delta", 0.1),
    "an attribute of the optimizer": lambda p: put_past(p.optimizer, "momentum", 0.9),
    "an attribute of the optimizer, by object": lambda p: put_object(p.optimizer, "nesterov", True),
    "an attribute of the metric": lambda p: put_past(p.metric, "_fn", keras.losses.mean_absolute_error),
    "an item of a list": lambda p: put_item(p.own.scales, 0, 3.0),
    "one more item of a list": lambda p: append(p.own.scales, 3.0),
    "an item of a dict": lambda p: put_item(p.own.config, "rate", 3.0),
    "a container's attribute": lambda p: put_past(p.own, "scales", [2.0]),
    "an object of the program's": lambda p: put(p.own.plain, "factor", 3.0),
    "a global object of the program's": lambda p: put(SHARED, "factor", 3.0),
    "a function's code": lambda p: put(factor, "__code__", another_factor.__code__),
    "a function's defaults": lambda p: put(factor, "__defaults__", (3.0,)),
    "a function's keyword defaults": lambda p: put(factor, "__kwdefaults__", {"shift": 3.0}),
    "a cell": lambda p: put(p.own.content.__closure__[0], "cell_contents", 3.0),
    "a function of a module": lambda p: patched(nn, "softmax", lambda x, axis=-1: tf.nn.softmax(x * 3.0, axis)),
    "a function of TensorFlow's": lambda p: patched(tf.nn, "softmax", lambda x, axis=-1, name=None: x * 3.0),
    "a class of a module": lambda p: patched(activations, "ReLU", type("ReLU", (), {
        "static_call": staticmethod(lambda x, **_: x * 3.0)})),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_the_next_call_sees_it(name):
    made, undo = [], []

    def make(decorate):
        program = Program()

        @decorate
        def step(x, changed):
            with tf.GradientTape() as tape:
                output = program.model(x)
                loss = program.objective(Y, output)
            variables = program.model.trainable_variables
            program.optimizer.apply(tape.gradient(loss, variables), variables)
            program.metric.update_state(Y, output)
            return loss, [*program.model.weights, *program.metric.variables]

        def changing(x, changed):
            if changed and not undo:
                undo.append(CHANGES[name](program))
            elif not changed and undo:
                undo.pop()()
            loss, weights = step(x, changed)
            return loss, [w.numpy() for w in weights]

        made.append(step)
        return changing

    try:
        # No run of a call's Python finds it, but the check before it.
        with tuned(region_first_check=10_000):
            run_both(make, [(X, n in (9, 10, 11)) for n in range(18)])
    finally:
        while undo:
            undo.pop()()
    stats = made[1].stats()
    assert stats.regions > 40, made[1].explain()
    assert stats.followed > 12


ACTIVATIONS = ["gelu", "silu", "elu", "sigmoid"]  # each a function of one module, which asks another one for it


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("module", ["replaced", "kept"])
def test_all_that_functions_ask_of_the_same_module(name, module, monkeypatch):
    """Each by a name of its own; also of a module that took the place of the one that was looked into first."""
    made = []

    def make(decorate):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.layers.Dense(6, kind) for kind in ACTIVATIONS])
        model(X)
        made.append(decorate(lambda x: model(x)))

        def changing(x, number):
            with monkeypatch.context() as patch:
                if number == 6 and module == "replaced":  # for good
                    monkeypatch.setattr(activations, "ops", copied(keras.src.ops))
                if number > 13:
                    real = getattr(activations.ops, name)
                    patch.setattr(activations.ops, name, lambda *given, **named: 3.0 * real(*given, **named))
                return made[-1](x)

        return changing

    def copied(original):
        module = types.ModuleType(original.__name__)
        vars(module).update(vars(original))
        return module

    with tuned(region_first_check=10_000):
        run_both(make, [(X, number) for number in range(18)])
    assert made[1].stats().regions > 5, made[1].explain()


class Kind(enum.Enum):
    FIRST = 2.0


class Own(collections.UserDict):
    """A class of the program's, whose operators a library has written."""


class Pair(tuple):
    """A tuple with attributes."""


class Number(np.float64):
    """A number with attributes."""


def asked():
    """A function with attributes."""


def with_factor(value):
    value.factor = 2.0
    return value


def set_factor(held):
    held.factor = 9.0


def named(name):
    asked.__name__ = name
    return asked


def valued(value):
    Kind.FIRST._value_ = value
    return Kind


def environment():
    os.environ["COEXEC_TEST"] = "2"
    return os.environ


def parser():
    found = configparser.ConfigParser()
    found["a"] = {"factor": "2"}
    return found


# How a layer's code reads what it has.
READS = {
    "x": lambda held: held["x"],
    "first": lambda held: held[0],
    "configured": lambda held: float(held["a"]["factor"]),
    "environment": lambda held: float(held["COEXEC_TEST"]),
    "factor": lambda held: held.factor,
    "optional": lambda held: getattr(held, "factor", 1.0),
    "name": lambda held: float(len(held.__name__)),
    "value": lambda held: held.FIRST.value,
    "member's": lambda held: held.FIRST.factor,
    "trained": lambda held: 2.0 if held.trainable else 9.0,
}

# What it has, how it reads that, how the program changes it later; whether such a layer is memoized.
HELD = {
    "a UserDict": (lambda: Own(x=2.0), "x", lambda held: held.update(x=9.0), False),
    "a UserList": (lambda: collections.UserList([2.0]), "first", lambda held: held.insert(0, 9.0), False),
    "a chain of dicts": (lambda: collections.ChainMap({}, {"x": 2.0}), "x", lambda held: held.update(x=9.0), False),
    "a configuration": (parser, "configured", lambda held: held["a"].update(factor="9"), False),
    "the environment": (environment, "environment", lambda held: held.update(COEXEC_TEST="9"), False),
    "a function's attribute": (lambda: with_factor(asked), "factor", set_factor, True),
    "a function's optional attribute": (lambda: with_factor(asked), "optional", lambda held: vars(held).clear(), True),
    "a function's later attribute": (lambda: vars(asked).clear() or asked, "optional", set_factor, True),
    "a function's name": (lambda: named("asked"), "name", lambda held: named("another"), True),
    "a member's value": (lambda: valued(2.0), "value", lambda held: valued(9.0), True),
    "a member's attribute": (lambda: with_factor(Kind.FIRST) and Kind, "member's", lambda held: set_factor(held.FIRST),
                             True),
    "a tuple's attribute": (lambda: with_factor(Pair((1, 2))), "factor", set_factor, False),
    "a number's attribute": (lambda: with_factor(Number(3.0)), "factor", set_factor, False),
    "a variable's attribute": (lambda: with_factor(tf.Variable(1.0)), "factor", set_factor, True),
    "a variable of Keras' attribute": (lambda: with_factor(keras.Variable(1.0)), "factor", set_factor, True),
    "whether a variable of Keras is trained": (lambda: keras.Variable(1.0), "trained", lambda held: put(
        held, "trainable", False), True),
    "a variable's private attribute": (lambda: tf.Variable(1.0), "trained", lambda held: put(
        held, "_trainable", False), True),
    "a tensor's attribute": (lambda: with_factor(tf.constant(1.0)), "factor", set_factor, True),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_what_a_layers_code_looks_at(name, monkeypatch):
    """Whatever it is: where it cannot be guarded, the layer's Python runs."""
    monkeypatch.setenv("COEXEC_TEST", "2")  # the environment is as before afterwards
    hold, read, change, memoized = HELD[name]
    read, made = READS[read], []

    def make(decorate):
        held = hold()

        class Looking(keras.layers.Layer):
            def call(self, x):
                return (x + 1.0) * read(held) - x

        layer = Looking()
        made.append(decorate(lambda x: layer(x) * 2.0))

        def changing(x, number):
            if number == 12:
                change(held)
            return made[-1](x)

        return changing

    with tuned(region_first_check=10_000), testing.always_follow():
        run_both(make, [(X, number) for number in range(18)])
    assert (made[1].stats().regions > 6) is memoized, made[1].explain()


@coexec.pure
def counted(x):
    """A function that has an attribute, which it asks itself for."""
    return tf.tanh(x) * counted.factor + x


def test_a_function_that_asks_itself():
    made = []

    def make(decorate):
        counted.factor = 2.0
        made.append(decorate(lambda x: counted(x) * 2.0))

        def changing(x, number):
            if number == 12:
                counted.factor = 9.0
            return made[-1](x)

        return changing

    with tuned(region_first_check=10_000), testing.always_follow():
        run_both(make, [(X, number) for number in range(18)])
    assert made[1].stats().regions > 6, made[1].explain()


def test_what_is_patched_inside_of_the_step_counts_there():
    def make(decorate):
        keras.utils.set_random_seed(5)
        layer = keras.layers.Softmax()
        layer(X)

        @decorate
        def step(x, number):
            if number % 3 == 2:
                with mock.patch.object(nn, "softmax", tripled):
                    return layer(x)
            vars(layer)["axis"] = number % 2
            return layer(x)

        return step

    def tripled(x, axis=-1):
        return tf.nn.softmax(x * 3.0, axis)

    run_both(make, [(X, number) for number in range(18)])


def test_what_changes_nothing_costs_no_region():
    made = []

    def make(decorate):
        program = Program()
        program.notes = []

        @decorate
        def step(x, number):
            vars(program.rescaling)["scale"] = float("1.0")  # another object each time
            vars(program.rescaling)["unheard_of"] = number
            program.rescaling.unheard = number if number < 3 else None
            nn.unheard_of = number
            program.own.scales.append(2.0)
            program.own.scales.pop()
            return program.model(x)

        made.append(step)
        return step

    try:
        run_both(make, [(X, number) for number in range(30)])
    finally:
        del nn.unheard_of
    assert made[1].stats().regions > 20, made[1].explain()


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_guard_keeps_nothing_alive(kind):
    import gc
    import weakref

    import coexec

    layer = keras.layers.Rescaling(2.0)
    other = keras.layers.Rescaling(3.0)
    held = {"other": other, "self": layer}
    vars(layer)["items"] = held if kind is dict else kind(held.values())

    @coexec.function
    def step(x, layer):
        return layer(x)

    for _ in range(6):
        step(X, layer)
    assert step.stats().regions
    ends = [weakref.ref(layer), weakref.ref(other)]
    del layer, other, held
    gc.collect()
    assert [end() for end in ends] == [None, None]


@pytest.mark.parametrize("change", ["an attribute", "a number"])
def test_a_change_before_a_check_is_no_finding(change):
    """A memoized call runs again now and then: what it does otherwise then, as something changed, is no fault."""
    with tuned(region_first_check=4):
        for changed in range(5, 13):
            layer = keras.layers.Rescaling(1.0) if change == "an attribute" else Scaled()
            step = coexec.function(lambda x, layer=layer: layer(x))
            for number in range(16):
                if number == changed:
                    vars(layer)["scale"] = 2.0
                np.testing.assert_allclose(step(X), X * layer.scale, rtol=1e-6)
            assert step.stats().regions > 4
            assert "CX-VALIDATION" not in str(step.explain())


def test_a_constant_that_has_become_a_feed_is_no_finding():
    """The same operations take the same value, but as other calls of the layer take others, it is no constant."""
    with tuned(region_first_check=4):
        layer = Switched()
        step = coexec.function(lambda x, kind: layer(x, kind=kind))
        for kind in ("a",) * 5 + ("b", "c") * 3 + ("a",) * 8:
            np.testing.assert_allclose(step(X, kind), X * SCALES[kind], rtol=1e-6)
        assert step.stats().regions > 4
        assert "CX-VALIDATION" not in str(step.explain())
