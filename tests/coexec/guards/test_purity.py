"""Code of the program's that only computes, followed as one: what is proven, what is noticed. Eager is the oracle."""

import functools
import logging
import random
import sys
import time
import types
import warnings
from typing import ClassVar

import absl.logging
import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.base.stats import Kind
from coexec.guards.pure_calls import is_computing
from tests.snapshots import assert_same, snapshot
from tracer import library

CALLS = 16


def batch(i):
    return tf.constant(np.random.default_rng(i).normal(size=(3, 4)), tf.float32)


class Layer(keras.layers.Layer):
    """A layer that does what a function says."""

    def __init__(self, work):
        super().__init__()
        self.work = work

    def call(self, x):
        return self.work(x)


def outcomes(make, decorate, change=None, calls=CALLS):
    """What the calls of a step give; `make` returns the step and what `change(that, i)` changes before call i."""
    step, changed = make()
    step = decorate(step)
    found = []
    for i in range(calls):
        if change is not None:
            change(changed, i)
        found.append(snapshot(step(batch(i))))
    return found, step


def compare(make, change=None, calls=CALLS, regions=4):
    """Calls a step eagerly and co-executed; `regions`: how many calls at least were passed over; 0: none."""
    expected, _ = outcomes(make, lambda f: f, change, calls)
    found, step = outcomes(make, coexec.function, change, calls)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, rtol=1e-4, atol=1e-5, path=f"call {number}: ")
    stats = step.stats()
    assert stats.followed + stats.diverged >= calls - 2, step.explain()
    assert stats.regions >= regions if regions else stats.regions == 0, step.explain()
    return step


# What is followed as one.


def gelu(x):
    return 0.5 * x * (1.0 + tf.tanh(0.8 * (x + 0.04 * x**3)))


def normalised(x, axis=-1, epsilon=1e-3):
    mean = tf.reduce_mean(x, axis=axis, keepdims=True)
    centred = x - mean
    return centred / tf.sqrt(tf.reduce_mean(tf.square(centred), axis=axis, keepdims=True) + epsilon)


class Cell:
    """A cell written by hand, with all that is common in such: attributes, tables, lists, loops, tuples."""

    activations: ClassVar = {"tanh": tf.tanh, "relu": tf.nn.relu}

    def __init__(self):
        initial = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
        self.kernel, self.bias = tf.Variable(initial), tf.Variable(tf.zeros(8))
        self.units, self.kinds, self.rate = 4, ["tanh", "relu"], 0.5

    @property
    def doubled(self):
        return 2.0 * self.rate

    def gates(self, x):
        return tf.split(tf.matmul(x, self.kernel) + self.bias, 2, 1)

    def __call__(self, x):
        parts = []
        for kind, gate in zip(self.kinds, self.gates(x), strict=True):
            parts.append(self.activations[kind](gate) * self.rate)
        total = 0.0
        for number, part in enumerate(parts):
            total += part * (number + 1.0)
        if self.units > 2:
            total = gelu(total) * self.doubled
        return total, [part + 1.0 for part in parts]


class PureCell(Cell):
    __call__ = coexec.pure(Cell.__call__)


def test_a_cell_is_one_region():
    """Its Python is not run again, and its results are new lists each time."""

    def make():
        cell = PureCell()
        return lambda x: cell(cell(x)[0]), cell

    step = compare(make, regions=2 * (CALLS - 7))
    first, second = step(batch(0))[1], step(batch(0))[1]
    assert first is not second


def test_a_layer_of_the_programs_is_one_region():
    """So is a model, with all that is inside of it."""

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = keras.layers.Dense(8, "relu"), keras.layers.Dense(4)
            self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
            self.dropout = keras.layers.Dropout(0.2, seed=3)

        def call(self, x, training=False):
            y = self.outer(self.inner(self.norms[0](x)))
            return x + self.dropout(self.norms[1](gelu(y)), training=training)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Block() for _ in range(2)]

        def call(self, x, training=False):
            kept = []
            for block in self.blocks:
                x = block(x, training=training)
                kept.append(x)
            return tf.concat(kept, -1)

    def make():
        keras.utils.set_random_seed(1)
        model = Model()
        model(batch(0))
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True)))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss, model.variables

        return step, model

    step = compare(make, calls=24, regions=3 * 12)
    before = step.stats()
    step(batch(0))
    after = step.stats()
    assert after.regions - before.regions == 3  # the model, the gradient, the optimizer


class Affine:
    def __init__(self):
        self.weight = tf.Variable(np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4))

    @coexec.pure
    def forward(self, x):
        return normalised(tf.matmul(x, self.weight)) + gelu(x)

    @coexec.pure
    def update(self, gradient, rate):
        self.weight.assign_sub(rate * gradient)
        return tf.reduce_sum(tf.square(gradient)), tf.reduce_mean(self.weight * 2.0)

    @coexec.pure
    def graded(self, x):
        return self.forward(x) * 2.0


@pytest.mark.parametrize("persistent", [False, True])
def test_gradients_go_through_helpers(persistent):
    """Their operations are on the tape, and what they assign is assigned."""

    def make():
        affine = Affine()

        def step(x):
            with tf.GradientTape(persistent=persistent) as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.square(affine.forward(affine.graded(x))))
            gradient = tape.gradient(loss, affine.weight)
            others = [tape.gradient(loss, x), tape.gradient(loss, [affine.weight, x])] if persistent else []
            return affine.update(gradient, 0.05), gradient, others, affine.weight

        return step, affine

    compare(make, regions=3 * 6)


def test_random_operations_draw_what_eager_draws():
    """From the same seeds, however often the helper is passed over."""

    @coexec.pure
    def noisy(x):
        return x + tf.random.uniform(tf.shape(x), seed=4) * tf.nn.tanh(tf.random.normal((4,), stddev=0.1, seed=6))

    def make():
        tf.random.set_seed(5)
        return lambda x: noisy(noisy(x)), None

    compare(make, regions=0)  # seeds that come again are states, drawn at once

    @coexec.pure
    def free(x):
        return x + tf.nn.tanh(tf.random.normal((4,), stddev=0.1)) * 2.0

    def another():
        tf.random.set_seed(5)
        return lambda x: free(free(x)), None

    compare(another)


@coexec.pure
def nested(x, depth):
    if depth == 0:
        return tf.tanh(x)
    return nested(gelu(x), depth - 1) + nested(x * 0.5, depth - 1)


def test_helpers_may_call_themselves():
    """How deep follows from what they are given."""
    depths = [2]

    def make():
        depths[0] = 2
        return lambda x: nested(x, depths[0]), None

    def change(_, i):
        depths[0] = 3 if i > 8 else 2

    compare(make, change)


@coexec.pure
def kept_and_made(x, others):
    made = tf.tanh(x)
    return x, made, [made, x], others[0]


def test_what_is_given_back_is_what_was_given():
    """The same tensors, and lists that are nobody else's."""
    same = []

    def make():
        def step(x):
            y = x * 2.0
            one, made, both, other = kept_and_made(y, [x])
            again = kept_and_made(y, [x])
            same.append((one is y, both[0] is made, both[1] is y, other is x, again[2] is both))
            return one, made, both, other

        return step, None

    compare(make)
    assert set(same) == {(True, True, True, True, False)}


def test_a_container_that_is_given_back_is_the_same():
    """So such a helper is not passed over, nor one that gives the same list twice."""

    @coexec.pure
    def through(x, given):
        return given, tf.tanh(x)

    @coexec.pure
    def twice(x):
        made = [tf.tanh(x)]
        return made, made

    same = []

    def make():
        def step(x):
            given = [x]
            one, two = through(x, given)[0], twice(x)
            same.append((one is given, two[0] is two[1]))
            return one, two

        return step, None

    compare(make, regions=0)
    assert set(same) == {(True, True)}


def test_a_tape_around_the_step():
    """Others' tapes see what a helper did."""
    affine, plain = Affine(), Affine()
    step = coexec.function(lambda x: affine.forward(affine.forward(x)))
    for i in range(CALLS):
        x = batch(i)
        found = []
        for one, function in ((affine, step), (plain, lambda x: plain.forward(plain.forward(x)))):
            if i < 8:
                found.append(snapshot((function(x), None)))
                continue
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x) ** 2.0)
            found.append(snapshot((loss, tape.gradient(loss, [x, one.weight]))))
        assert_same(*found, rtol=1e-4, atol=1e-5)
    assert step.stats().regions


def test_modules_may_be_variables_of_a_function_around():
    """What is asked of them is looked up."""
    import math

    @coexec.pure
    def helper(x):
        return tf.tanh(x) * math.pi

    compare(lambda: (lambda x: helper(x), None))


# What is looked at, and changes.

FACTOR = 1.5
TABLE = {"scale": 2.0}
CHOSEN = tf.nn.tanh


def _closure():
    offset = 0.25

    @coexec.pure
    def shifted(x):
        return tf.tanh(x * 2.0) + offset

    def shift(by):
        nonlocal offset
        offset = by

    return shifted, shift


@coexec.pure
def by_global(x):
    return tf.tanh(x) * FACTOR


@coexec.pure
def by_table(x):
    return tf.tanh(x) * TABLE["scale"]


@coexec.pure
def by_function(x):
    return CHOSEN(x) * 2.0


@coexec.pure
def by_default(x, factor=2.0):
    return tf.tanh(x) * factor


@coexec.pure
def by_helper(x):
    return gelu(x) * 2.0


def _set(name, value):
    globals()[name] = value


def _gelu(x):
    return tf.tanh(x)


_GELU = gelu.__code__

CHANGES = {
    "global": (by_global, lambda i: _set("FACTOR", float(i))),
    "item": (by_table, lambda i: TABLE.update(scale=float(i))),
    "function": (by_function, lambda i: _set("CHOSEN", tf.nn.relu if i == 7 else tf.nn.tanh)),
    "default": (by_default, lambda i: setattr(by_default.__wrapped__, "__defaults__", (float(i),))),
    "code": (by_helper, lambda i: setattr(gelu, "__code__", _gelu.__code__ if i == 7 else _GELU)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_helper_looks_at_is_looked_at_again(name):
    """Where it has changed, the Python runs, and is learnt anew."""
    helper, change = CHANGES[name]
    compare(lambda: (lambda x: helper(x), None), lambda _, i: change(i) if i in (0, 7, 12) else None)


def test_a_closure_is_looked_at_again():
    """A variable that functions share."""

    def make():
        shifted, shift = _closure()
        return lambda x: shifted(x), shift

    compare(make, lambda shift, i: shift(float(i)) if i in (7, 12) else None)


@pytest.mark.parametrize(
    "change",
    [
        lambda cell, i: setattr(cell, "rate", 0.1 * i),
        lambda cell, i: cell.kinds.reverse(),
        lambda cell, i: setattr(cell, "units", 4 - i % 2 * 3),
        lambda cell, i: setattr(cell, "bias", tf.Variable(tf.ones(8) * i)),
        lambda cell, i: setattr(cell, "gates", lambda x: [x[:, :2], x[:, 2:]] if i == 7 else [x[:, 1:3], x[:, :2]]),
        lambda cell, i: setattr(cell, "activations", {"tanh": tf.nn.relu, "relu": tf.nn.relu}),
        lambda cell, i: cell.kernel.assign(cell.kernel * 1.5),
        lambda cell, i: vars(cell).update(rate=0.1 * i),
        lambda cell, i: setattr(cell, "__class__", Other if i == 7 else PureCell),
    ],
)  # fmt: skip
def test_what_an_object_holds_is_looked_at_again(change):
    """Attributes, lists, methods, its class."""

    def make():
        cell = PureCell()
        return lambda x: cell(x), cell

    compare(make, lambda cell, i: change(cell, i) if i in (7, 12) else None)


class Other(PureCell):
    rate = 3.0

    def gates(self, x):
        return [x * 2.0, x]

    @property
    def doubled(self):
        return 7.0


def test_classes_are_looked_at_again(monkeypatch):
    """A method that is replaced, an attribute that a class gets."""

    def change(cell, i):
        if i == 7:
            PureCell.gates = lambda self, x: [x * 3.0, x]
        if i == 12:
            del PureCell.gates

    def make():
        cell = PureCell()
        return lambda x: cell(x), cell

    compare(make, change)


class Tracked(keras.layers.Layer):
    """Keras makes lists and dicts of its own of these."""

    def __init__(self):
        super().__init__()
        self.rates, self.scales = [1.0, 2.0], {"a": 0.5}
        self.parts = [Cell(), Cell()]

    def call(self, x):
        total = x * self.scales["a"]
        for rate, part in zip(self.rates, self.parts, strict=True):
            total = total + part(x)[0] * rate
        return total


class Module(tf.Module):
    """So does TensorFlow."""

    def __init__(self):
        super().__init__()
        self.rates, self.scales = [1.0, 2.0], (0.5, 0.25)
        self.parts = [Cell(), Cell()]

    @coexec.pure
    def __call__(self, x):
        total = x * self.scales[0]
        for rate, part in zip(self.rates, self.parts, strict=True):
            total = total + part(x)[0] * rate
        return total


@pytest.mark.parametrize("kind", [Tracked, Module])
@pytest.mark.parametrize(
    "change",
    [
        lambda that, i: that.rates.__setitem__(0, float(i)),
        lambda that, i: that.rates.reverse(),
        lambda that, i: that.parts.__setitem__(1, Other()),
        lambda that, i: setattr(that.parts[1], "rate", float(i)),
        lambda that, i: Cell.activations.update(tanh=tf.tanh if i == 12 else tf.nn.elu),
        lambda that, i: that.scales.update({"a": float(i)}) if isinstance(that.scales, dict) else None,
        lambda that, i: that.parts[0].kernel.assign_add(tf.ones((4, 8))),
        lambda that, i: setattr(that.parts[0], "kernel", tf.Variable(tf.ones((4, 8)) * i)),
    ],
)  # fmt: skip
def test_containers_that_are_changed_in_place(kind, change):
    """Lists and dicts of a layer or module, of what is in them, and of classes."""

    def make():
        that = kind()
        return lambda x: that(x), that

    compare(make, lambda that, i: change(that, i) if i in (7, 12) else None)


def test_two_objects_take_turns():
    """Each has its own numbers; subclasses have their own methods."""

    def make():
        cells = [PureCell(), Other(), PureCell()]
        cells[2].rate = 0.125

        def step(x):
            out = []
            for cell in cells:
                out.append(cell(x))
            return out

        return step, cells

    compare(make, regions=12)


def test_a_function_of_tensorflow_that_is_replaced(monkeypatch):
    """Somebody patches what a helper calls."""

    def change(_, i):
        if i == 7:
            monkeypatch.setattr(tf.nn, "elu", lambda x: x * 5.0)

    @coexec.pure
    def helper(x):
        return tf.nn.elu(x) + 1.0

    def make():
        monkeypatch.undo()
        return lambda x: helper(x), None

    compare(make, change)


def test_layers_that_a_helper_finds_elsewhere_are_watched():
    """A layer of Keras' among the globals, whose attributes are written to; one that has an effect of its own."""
    dense = keras.layers.Dense(4, kernel_initializer="ones")
    dense(batch(0))

    @coexec.pure
    def helper(x):
        return dense(x) * 2.0

    def change(_, i):
        if i in (0, 7, 12):
            dense.activation = keras.activations.relu if i == 7 else keras.activations.linear

    compare(lambda: (lambda x: helper(x), None), change)

    class Counting(keras.layers.Layer):
        used = 0

        def call(self, x):
            seen.append(1)
            return tf.tanh(x)

    counting = Counting()

    @coexec.pure
    def another(x):
        return counting(x) * 2.0

    seen.clear()
    compare(lambda: (lambda x: another(x), None), regions=0)
    assert len(seen) == 2 * CALLS


def test_functions_that_share_their_code():
    """Two closures of one function count by what each has."""

    def scaling(by):
        def scale(x):
            return tf.tanh(x) * by[0]

        return scale

    class Both(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.numbers = [[1.0], [2.0]]
            self.first, self.second = scaling(self.numbers[0]), scaling(self.numbers[1])

        def call(self, x):
            return self.first(x) + self.second(x)

    def make():
        layer = Both()
        return lambda x: layer(x), layer

    def change(layer, i):
        if i in (7, 12):
            layer.second = scaling([float(i)])

    compare(make, change)


def test_arguments_count_by_value_and_place():
    """Numbers, flags, shapes, lists that are changed later, the same tensor twice."""

    @coexec.pure
    def helper(tensors, flag, scale=1.0):
        total = tensors[0] * scale
        for tensor in tensors[1:]:
            total = total + tf.tanh(tensor)
        return total if flag else -total

    def make():
        given = []

        def step(x):
            given.append(x)
            del given[:-2]
            return helper(given, len(given) > 1), helper([x, x], False, scale=float(len(given))), helper((x,), True, 3)

        return step, None

    compare(make, regions=12)


# What is refused.

seen: list = []
table: dict = {}
total = 0


def appends(x):
    seen.append(1)
    return tf.tanh(x) * 2.0


def stores_items(x):
    table[len(table)] = 1
    return tf.tanh(x) * 2.0


def binds_globals(x):
    global total
    total += 1
    return tf.tanh(x) * 2.0


def prints(x):
    print("seen")
    return tf.tanh(x) * 2.0


def reads(x):
    return tf.tanh(x) * float(tf.reduce_sum(x))


def asks(x):
    return tf.tanh(x) if tf.reduce_sum(x) > 0.0 else x * 3.0


def draws(x):
    return tf.tanh(x) * random.random()


def draws_of_numpy(x):
    return tf.tanh(x) * np.random.random()


def warns(x):
    warnings.warn("seen", stacklevel=1)
    return tf.tanh(x) * 2.0


def looks_at_the_clock(x):
    return tf.tanh(x) * (2.0 if time.time() > 0 else 3.0)


def calls_numpy(x):
    return tf.tanh(x) * np.sqrt(4.0)


def calls_an_unknown_library(x):
    return tf.tanh(x) * functools.reduce(lambda a, b: a + b, [1.0, 2.0])


def calls_the_standard_library(x):
    return tf.tanh(x) * float(types.SimpleNamespace(a=2.0).a)


def catches(x):
    try:
        return tf.tanh(x) * {}["x"]
    except KeyError:
        seen.append(1)
        return tf.tanh(x) * 2.0


def attributes_of(x):
    holder.used += 1
    return tf.tanh(x) * 2.0


def grows(x, kept=[]):  # noqa: B006
    kept += [1]
    return tf.tanh(x) * float(len(kept))


def aliases(x):
    keep = seen.append
    keep(1)
    return tf.tanh(x) * 2.0


def identity_is_asked(x):
    other = x + 1.0
    return tf.tanh(x) if other is x else tf.tanh(other)


def generates(x):
    def parts():
        yield x

    return tf.tanh(next(parts()))


def by_slots(x):
    return tf.tanh(x) * slotted.rate


def by_computed(x):
    return tf.tanh(x) * computing.rate


def by_answering(x):
    return tf.tanh(x) * answering.rate


def by_property(x):
    return tf.tanh(x) * counting.rate


def sets_a_seed(x):
    tf.random.set_seed(4)
    return tf.tanh(x) * 2.0


def makes_a_variable(x):
    return tf.tanh(x) * tf.Variable(2.0)


def returns_what_is_kept(x):
    seen2[0] = tf.tanh(x)
    return seen2


def raises(x):
    if x.shape[0] == 3:
        raise KeyError("no")
    return x


def reads_an_array(x):
    return tf.tanh(x) * array


class Holder:
    used = 0


class Slotted:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 2.0


class Computing:
    def __getattr__(self, name):
        seen.append(name)
        return 2.0


class Answering:
    def __getattribute__(self, name):
        seen.append(name)
        return object.__getattribute__(self, name) if name != "rate" else 2.0


class Counting:
    @property
    def rate(self):
        seen.append(1)
        return 2.0


holder, slotted, computing, answering, counting = Holder(), Slotted(), Computing(), Answering(), Counting()
seen2 = [None]
array = np.full(4, 2.0, np.float32)

IMPURE = [
    appends, stores_items, binds_globals, prints, reads, asks, draws, draws_of_numpy, warns, looks_at_the_clock,
    calls_an_unknown_library, calls_the_standard_library, catches, attributes_of, grows, aliases,
    identity_is_asked, generates, by_slots, by_computed, by_answering, by_property, sets_a_seed, makes_a_variable,
    returns_what_is_kept,
]  # fmt: skip


def effects():
    return len(seen), dict(table), total, holder.used, random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("work", [calls_numpy, reads_an_array])
def test_what_computes_with_numpy_is_skipped(work):
    """See `test_numpy_functions`."""
    (expected, _), (found, step) = (outcomes(lambda: (Layer(work), None), d) for d in (lambda f: f, coexec.function))
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other, rtol=1e-4, atol=1e-5)
    assert step.stats().regions > 0, step.explain()


@pytest.mark.filterwarnings("ignore:seen")
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("work", IMPURE)
def test_what_may_do_more_runs_on_every_call(work, inner, capsys):
    """Whether it is what a layer does itself, or a helper that a helper calls; values and effects are eager's."""

    def around(x):
        return work(x * 1.5)

    def make():
        seen.clear()
        table.clear()
        _set("total", 0)
        holder.used = 0
        random.seed(3)
        np.random.seed(3)
        layer = Layer(around if inner else work)
        return lambda x: layer(x), None

    found = []
    for decorate in (lambda f: f, coexec.function):
        results, step = outcomes(make, decorate)
        found.append((results, effects(), capsys.readouterr().out))
        work.__defaults__ and work.__defaults__[0].clear()
    assert found[0][1:] == found[1][1:]
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert_same(one, other, rtol=1e-4, atol=1e-5)
    assert step.stats().regions == 0, step.explain()
    assert step.stats().followed >= CALLS - 2
    causes = [c.text for c in step._controller.ledger.causes if c.kind is Kind.LIBRARY]
    if work not in (reads, asks):  # a value is read, and the segment ends
        assert causes, step.explain()
    assert not any("looked up again" in text for text in causes), causes


class Records(logging.Handler):
    """Counts what is logged."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def may_log(x, this):
    if x.shape[-1] > this.limit:
        logging.warning("wide")
    return tf.tanh(x) * 2.0


def may_log_by_abseil(x, this):
    if x.shape[-1] > this.limit:
        absl.logging.warning("wide")
    return tf.tanh(x) * 2.0


@pytest.mark.parametrize("work", [may_log, may_log_by_abseil])
@pytest.mark.parametrize("from_then_on", [False, True])
def test_what_is_called_on_another_path(work, from_then_on):
    """A layer that would log is memoized while it does not; from when it does, each message comes."""

    class Warning(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.limit = 9

        def call(self, x):
            return work(x, self)

    def make():
        layer = Warning()
        return lambda x: layer(x), layer

    def change(layer, i):
        if from_then_on and i == CALLS - 6:
            layer.limit = 1

    records = Records()
    logger = logging.getLogger() if work is may_log else absl.logging.get_absl_logger()
    logger.addHandler(records)
    try:
        step = compare(make, change)
    finally:
        logger.removeHandler(records)
    assert records.found.count("wide") == (2 * 6 if from_then_on else 0)
    assert step.stats().regions >= (4 if from_then_on else CALLS - 6), step.explain()


def test_masks_of_tensors_that_a_layer_keeps():
    """Keras' mask of a tensor is looked at again, be it that of an argument or of one that is kept."""
    kept = tf.ones((3, 4))

    def work(x):
        mask = keras.src.backend.get_keras_mask(kept)
        return x * 2.0 if mask is None else x * tf.cast(mask, x.dtype)

    def make():
        vars(kept).pop("_keras_mask", None)
        layer = Layer(work)
        return lambda x: layer(x), None

    def change(_, i):
        if i == CALLS - 4:
            kept._keras_mask = tf.constant([[True, False, True, False]])

    compare(make, change)


def test_what_is_called_on_this_path():
    """A layer that logs in each call is not memoized."""

    def make():
        layer = Layer(lambda x: (logging.debug("seen"), tf.tanh(x))[1])
        return lambda x: layer(x), None

    step = compare(make, regions=0)
    assert "it calls logging.debug" in str(step.explain())


@pytest.mark.parametrize("inner", [False, True])
def test_what_only_computes_does_not(inner):
    """The same layer with a function that only computes is followed as one."""

    def around(x):
        return gelu(x * 1.5)

    def make():
        layer = Layer(around if inner else gelu)
        return lambda x: layer(x), None

    compare(make, regions=CALLS - 6)


def closes_over_an_argument(x):
    dynamic = tf.shape(x)
    return tf.reshape(x, [dynamic[i] if s is None else s for i, s in enumerate(x.shape)])


def closes_over_itself(x):
    rows = [[tf.tanh(x) * (i + j) + scale for j in range(2) if i >= 0] for i, scale in enumerate((1.0, 2.0))]
    return sum(y for row in rows for y in row) + sum(i * x for i in range(2))


def gives_a_dict(x):
    found = {i: {name: tf.tanh(x) * i * len(name) for name in ("a", "bc")} for i in (1, 2)}
    return {**found[1], "sum": sum(i * 2.0 * x for i in range(3) if x is not None)}


@pytest.mark.parametrize("work", [closes_over_an_argument, closes_over_itself, gives_a_dict])
def test_comprehensions_share_variables_with_what_is_around_them(work):
    def make():
        layer = Layer(work)
        return lambda x: layer(x), None

    compare(make, regions=CALLS - 6)


def test_a_generator_that_was_made_before_is_not_a_calls_own():
    """It has the code of one that the call makes, and holds other values."""

    class Late(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.given = None

        def values(self, x, by):
            return (tf.tanh(x) * by * i for i in range(3))

        def call(self, x):
            taken, self.given = self.given, None
            return sum(self.values(x, 2.0) if taken is None else taken)

    def make():
        layer = Late()
        return lambda x: layer(x), layer

    def change(layer, i):
        vars(layer)["given"] = layer.values(batch(0), float(i)) if i % 3 == 2 else None

    compare(make, change, regions=0)


def test_errors_are_raised_on_every_call():
    """Where eager would raise them."""
    layer = Layer(raises)
    step = coexec.function(lambda x: layer(x * 2.0))
    for _ in range(6):
        with pytest.raises(KeyError, match="no"):
            step(batch(0))


def test_a_layer_that_counts():
    """An attribute of its own, which Keras tells of."""

    class Counts(keras.layers.Layer):
        used = 0

        def call(self, x):
            self.used = self.used + 1
            return tf.tanh(x) * float(self.used)

    def make():
        layer = Counts()
        return lambda x: layer(x), layer

    compare(make, regions=0)


def test_nonlocal_variables_are_bound_on_every_call():
    """A count in the function around."""

    def make():
        count = 0

        def work(x):
            nonlocal count
            count += 1
            return tf.tanh(x) * float(count)

        layer = Layer(work)
        return lambda x: layer(x), None

    compare(make, regions=0)


@pytest.mark.parametrize(
    "work", [appends, stores_items, binds_globals, catches, attributes_of, aliases, identity_is_asked, generates]
)
def test_pure_refuses_what_its_source_shows(work):
    """With the line and the reason."""
    message = rf"{work.__name__} \(.*test_purity.py:\d+\) may do more than compute: line \d+"
    with pytest.raises(ValueError, match=message):
        coexec.pure(work)


def test_pure_takes_functions():
    """No classes, nor anything else; without source it warns, and the function runs plainly."""
    with pytest.raises(TypeError, match="function or method"):
        coexec.pure(Holder)
    namespace = {"tf": tf}
    exec("def helper(x):\n    return tf.tanh(x) * 2.0", namespace)
    with pytest.warns(UserWarning, match="source is not known"):
        helper = coexec.pure(namespace["helper"])
    compare(lambda: (lambda x: helper(x), None), regions=0)


def test_pure_is_an_ordinary_function_elsewhere():
    """It keeps its name, its doc and its arguments."""
    assert by_default.__name__ == "by_default"
    assert_same(snapshot(by_default(tf.ones(2), factor=3.0)), snapshot(tf.tanh(tf.ones(2)) * 3.0))
    graph = tf.function(lambda x: by_global(x))
    assert graph(tf.ones(2)).shape == (2,)


@pytest.mark.parametrize("hook", ["settrace", "setprofile"])
def test_debuggers_see_the_code(hook):
    """While one is there, the Python runs."""
    cell = PureCell()
    step = coexec.function(lambda x: cell(x))
    for i in range(8):
        step(batch(i))
    before = step.stats().regions
    assert before
    ran = []

    def note(frame, event, _):
        if event == "call" and frame.f_code is Cell.__call__.__code__:
            ran.append(1)

    known = getattr(sys, f"get{hook[3:]}")()
    getattr(sys, hook)(note)
    try:
        step(batch(0))
    finally:
        getattr(sys, hook)(known)
    assert ran == [1]
    assert step.stats().regions == before
    step(batch(0))
    assert step.stats().regions == before + (known is None)


def test_objects_are_freed():
    """What is known of a helper keeps nothing of it alive, once its variables are gone."""
    import gc
    import weakref

    cell = PureCell()
    held = [cell]
    step = coexec.function(lambda x: held[0](x))
    for i in range(8):
        step(batch(i))
    assert step.stats().regions
    references = [weakref.ref(cell), weakref.ref(cell.kernel)]
    held[0], cell = PureCell(), None
    step(batch(0))
    gc.collect()
    assert [r() for r in references] == [None, None]


def halved(x):
    """Asks for a function that TensorFlow had before its second version, as libraries for both do."""
    try:
        return tf.div(x, 2.0)
    except AttributeError:
        return tf.divide(x, 2.0)


@pytest.mark.parametrize("name", ["div", "__getattr__"])
def test_what_a_module_lacks_may_come_later(monkeypatch, name):
    added = {"div": lambda x, y: x * y, "__getattr__": lambda name: tf.multiply}[name]

    def change(_, i):
        if i == 10:
            monkeypatch.setattr(tf, name, added, raising=False)
        if i == 13:
            monkeypatch.delattr(tf, name)

    def make():
        monkeypatch.undo()
        return Layer(halved), None

    compare(make, regions=10)
    compare(make, change, regions=6)


def test_functions_that_compute_are_known_whatever_wraps_them():
    """The runtime's wrappers are made anew where hooks are installed again."""
    names = ["zeros", "one_hot", "matmul", "reduce_sum", "constant", "math.add", "nn.relu", "where"]

    def known():
        return [name for name in names if is_computing(functools.reduce(getattr, name.split("."), tf))]

    assert known() == names
    library.uninstall()
    try:
        assert known() == names
    finally:
        library.install()
    assert known() == names
    assert not is_computing(tf.random.normal)
    assert not is_computing(tf.recompute_grad)
