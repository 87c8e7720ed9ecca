"""Recorded runs: a library call that does the same in the recorded and in the first followed call is learnt then."""

import contextlib
import functools
import itertools
import queue
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuned
from tests.snapshots import assert_same, snapshot
from tracer import library
from tracer.effects import Effects
from tracer.library import layer_call

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
LABELS = np.arange(8) % 3


@pytest.fixture
def hidden(monkeypatch):
    """A registered library with state that nobody can see; its recorded runs count here, so that they are compared."""
    monkeypatch.setattr(Effects, "runs_registered", False)
    names = []

    def fill(source, **given):
        module = types.ModuleType(f"hidden_state_{len(names)}")  # a module's functions are wrapped once
        names.append(module.__name__)
        sys.modules[module.__name__] = module
        vars(module).update(given)
        exec(compile(source, "hidden_state.py", "exec"), vars(module))
        coexec.register_library(module.__name__)
        assert library.is_wrapper(module.act)
        return module

    yield fill
    for name in names:
        del sys.modules[name]
    library.uninstall()
    library.install()


def compared(make, calls=8, follow=coexec.function):
    """Runs a program eagerly and followed, each made by `make`; returns the followed function."""
    found = []
    for decorate in (lambda f: f, follow):
        keras.utils.set_random_seed(1)
        step, state = make()
        step = decorate(step)
        found.append([snapshot((step(number), state())) for number in range(calls)])
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        assert_same(one, other, rtol=1e-4, path=f"call {number}: ")
    return step


def layer(made, given=X):
    made.build(given.shape)
    return lambda number: made(tf.constant(given + number)), lambda: made.variables


def model(*layers):
    made = keras.Sequential([keras.Input((6,)), *layers])
    return lambda number: made(tf.constant(X + number), training=True), lambda: made.variables


def training(optimizer, built=False):
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(3)])
    loss, metric = keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.metrics.Mean()
    if built:
        optimizer.build(made.trainable_variables)

    def step(number):
        with tf.GradientTape() as tape:
            value = loss(LABELS, made(tf.constant(X + number / 8), training=True))
        gradients = tape.gradient(value, made.trainable_variables)
        optimizer.apply_gradients(zip(gradients, made.trainable_variables, strict=True))
        metric.update_state(value)
        return value

    return step, lambda: [*made.variables, *optimizer.variables, *metric.variables]


class Own(keras.layers.Layer):
    """A layer of the program's, with others inside."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(6, "tanh") for _ in range(2)]
        self.scale = 0.5

    def build(self, shape):
        for part in self.parts:
            part.build(shape)

    def call(self, x):
        for part in self.parts:
            x = x + self.scale * part(x)
        return x


LEARNT = {
    "a layer": lambda: layer(keras.layers.Dense(4)),
    "a layer of the program's": lambda: layer(Own()),
    "normalisation": lambda: layer(keras.layers.LayerNormalization()),
    "moving averages": lambda: model(keras.layers.BatchNormalization()),
    "dropout": lambda: model(keras.layers.Dropout(0.5)),
    "attention": lambda: layer_of_three(),
    "a recurrent network": lambda: model(keras.layers.Reshape((3, 2)), keras.layers.GRU(4)),
    "sgd": lambda: training(keras.optimizers.SGD(0.1, momentum=0.9)),
    "adam, built before": lambda: training(keras.optimizers.Adam(0.1), built=True),
    "adam": lambda: training(keras.optimizers.Adam(0.1)),
}


def layer_of_three():
    made, given = keras.layers.MultiHeadAttention(2, 3), tf.constant(np.reshape(X, (2, 4, 6)))
    made(given, given)
    return lambda number: made(given + float(number), given), lambda: made.variables


@pytest.mark.parametrize("what", LEARNT)
def test_one_observed_run_is_enough(what, observed):
    """The first followed call observes each library call; the second one skips all of them."""
    step = compared(LEARNT[what], calls=2)
    assert step.stats().regions == 0
    assert observed
    number = len(observed)
    step = compared(LEARNT[what])
    repeated = observed[2 * number :]
    assert not repeated, repeated
    assert step.stats().regions >= 6, step.explain()


def test_without_the_recorded_call_two_runs_are_needed(observed):
    """As behind calls that were not recorded."""
    with tuned(recorded_runs_kept=0):
        compared(LEARNT["a layer"])
    assert len(observed) == 2


@pytest.mark.parametrize("sizes", [(8, 6, 6), (8, 6, 4, 8), (2, 8, 8)])
def test_another_size_is_the_same_call(sizes, observed):
    """What was recorded at one size is the first run of what is observed at another."""

    def make():
        made = keras.layers.MultiHeadAttention(2, 3)
        made(tf.zeros((1, 4, 6)), tf.zeros((1, 4, 6)))

        def step(number):
            x = tf.reshape(tf.constant(X[: sizes[number]]), (2, -1, 6))
            return made(x, x)

        return step, lambda: made.variables

    compared(make, calls=2)
    assert len(observed) == 1
    step = compared(make, calls=len(sizes))
    assert observed.count(layer_call) <= 1 + len(set(sizes))
    assert step.stats().followed == len(sizes) - 1, step.explain()


HIDDEN = {
    "which argument": ("def act(x, y): return (x, y)[next(state)] * 2.0", 2),
    "which argument comes first": ("def act(x, y): return tf.subtract(*((x, y), (y, x))[next(state)])", 2),
    "which of its tensors": ("def act(x, y): return x * TABLE[next(state)] + y", 2),
    "a number": ("def act(x, y): return x * float(next(state) + 1) + y", 2),
    "an integer that decides a shape": ("def act(x, y): return tf.reshape(x, (next(state) + 1, -1, 2)) + 0.0", 2),
    "which operation": ("def act(x, y): return (tf.tanh, tf.sin)[next(state)](x) + y", 2),
    "how many operations": ("def act(x, y):\n for _ in range(next(state)): x = tf.tanh(x)\n return x + y", 2),
    "which result": ("def act(x, y):\n a, b = x * 2.0, y * 3.0\n return (a, b)[next(state)]", 2),
    "the order of results": ("def act(x, y):\n a, b = x * 2.0, y * 3.0\n return ((a, b), (b, a))[next(state)]", 2),
    "whether there is a result": ("def act(x, y):\n a = x * 2.0\n return (a, None)[next(state)]", 2),
    "an attribute": ("def act(x, y): return tf.concat([x, y], next(state))", 2),
    "in which list": ("def act(x, y): return tf.add_n(([x, y, y], [x, x, y])[next(state)])", 2),
}


@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("what", HIDDEN)
def test_what_hidden_state_decides_is_no_repetition(what, taped, hidden):
    """A registered library may have state that no guard sees: two runs that differ are not taken for one."""
    source, period = HIDDEN[what]

    def make():
        state = itertools.cycle(range(period))
        module = hidden(source, tf=tf, state=state, TABLE=[tf.constant(2.0), tf.constant(3.0)])
        variable = tf.Variable(X)

        def step(number):
            with tf.GradientTape() if taped else tf.name_scope("plain") as tape:
                found = module.act(variable * float(number + 1), tf.constant(X))
                total = tf.reduce_sum(tf.nest.flatten(found)[0] ** 2) if found is not None else None
            if taped and found is not None:
                return found, tape.gradient(total, variable)
            return found

        return step, lambda: variable

    compared(make, calls=9)


@pytest.mark.parametrize("taped", [False, True])
def test_constants_that_a_call_makes_are_several(taped, hidden):
    """Each is a tensor of its own: which one an operation takes is compared."""

    def make():
        state = itertools.cycle(range(2))
        module = hidden("def act(x, y): return tf.subtract(*((x, y), (y, x))[next(state)])", tf=tf, state=state)
        variable = tf.Variable(X)

        def step(number):
            x = tf.constant([number + 1.0])
            y = x if number == 0 else tf.constant([10.0])
            with tf.GradientTape() if taped else contextlib.nullcontext() as tape:
                found = module.act(x, y) * variable
            return found, tape.gradient(found, variable) if taped else None

        return step, lambda: variable

    with testing.always_follow():
        compared(make, calls=9)


RATES = {
    "an iterator": lambda rates: iter(rates).__next__,
    "a chain": lambda rates: itertools.chain(rates[:2], rates[2:]).__next__,
    "a partial": lambda rates: functools.partial(next, iter(rates)),
    "a dict": lambda rates: {"rate": 0.1}.get,
    "a queue": lambda rates: queue_of(rates).get_nowait,
    "a function": lambda rates: lambda: rates[len(rates) // 2],
}


def queue_of(items):
    made = queue.SimpleQueue()
    for item in items:
        made.put(item)
    return made


@pytest.mark.parametrize("what", RATES)
def test_a_schedule_in_c(what):
    """Keras asks a callable for the learning rate: one of C is called without anybody seeing it."""

    def make():
        rates = [0.1, 0.1, 0.1, 0.3, 0.3, 0.2, *(0.01 * n for n in range(20))]
        rate = RATES[what](rates)
        if what == "a dict":
            table, rate = rate.__self__, functools.partial(rate, "rate")
        variable = tf.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(rate)
        optimizer.build([variable])

        def step(number):
            if what == "a dict":
                table["rate"] = rates[number]
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable**2)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
            return loss

        return step, lambda: variable

    compared(make, calls=12)


def test_a_container_that_is_given_is_changed(hidden):
    """Also by a library's code, which is seen to do nothing else."""

    def make():
        module = hidden("def act(x, log):\n log.append(1)\n return x * 2.0", tf=tf)
        variable = tf.Variable(X)

        def step(number):
            log = []
            return module.act(variable * 1.0, log), len(log)

        return step, lambda: variable

    with testing.always_follow():
        compared(make)


def test_what_is_built_in_the_recorded_call_is_built_once(observed):
    """A layer that makes its weights there, and computes something besides, is learnt by what it does later."""

    class Late(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], 3), name="w")
            self.w.assign(self.w * 2.0 + 1.0)

        def call(self, x):
            return tf.matmul(x, self.w)

    def make():
        late = Late()
        return lambda number: late(tf.constant(X + number)), lambda: late.weights

    step = compared(make)
    assert len(observed) == 1, observed
    assert step.stats().regions >= 6, step.explain()


def test_a_layer_that_does_more_in_its_first_calls(observed):
    """What it notes of them is an effect, whatever was recorded."""

    class Warming(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def call(self, x):
            self.calls += 1
            return x * 2.0 if self.calls < 4 else x * 3.0

    def make():
        warming = Warming()
        return lambda number: warming(tf.constant(X + number)), lambda: warming.calls

    compared(make)
