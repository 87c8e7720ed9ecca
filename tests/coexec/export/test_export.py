"""`to_tf_function`: values and state are the step's; whatever else the step does is refused, by name and line."""

import array
import dataclasses
import datetime
import functools
import inspect
import itertools
import random
import re
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from tests.snapshots import assert_same, snapshot

# Keras converts its variables for NumPy in a way that NumPy 2 no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = tf.constant([[1.0, 2.0], [3.0, 4.0]])
SPEC = tf.TensorSpec([None, 2], tf.float32)


# What is exported.


def training(build):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((2,)), layers.Dense(4, "relu"), layers.Dropout(0.4, seed=3), layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(0.05)
    if build:
        optimizer.build(model.trainable_variables)
    mean, count = keras.metrics.Mean(), tf.Variable(0)

    @coexec.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        mean.update_state(loss)
        count.assign_add(1)
        norms = [tf.norm(g) for g in gradients]
        logs = {"loss": loss}
        logs["norm"] = tf.add_n(norms)
        norms.append(loss)
        return logs, mean.result()

    return step, lambda: [v.numpy() for v in (*model.variables, *optimizer.variables, *mean.variables, count)]


@pytest.mark.parametrize("build", [True, False])
@pytest.mark.parametrize("called", [0, 3])
def test_a_training_step(called, build):
    """Losses, weights, slots, moving averages, metrics and dropout's numbers are those of the step."""
    found = []
    for export in (False, True):
        step, state = training(build)
        before = [step(X, X[:, :1]) for _ in range(called)]
        if export:
            step = step.to_tf_function()
            assert type(step) is type(tf.function(lambda: None))
        results = [step(X[: 1 + i % 2] * float(i), X[: 1 + i % 2, 1:]) for i in range(6)]
        found.append(snapshot((before, results, state())))
    assert_same(*found, rtol=1e-4, atol=1e-5, path="")


def test_saved_and_loaded(tmp_path):
    """As a `tf.Module`'s function in a SavedModel, with the values and writes of before, in any batch size."""

    class Counting(tf.Module):
        def __init__(self):
            super().__init__()
            self.total = tf.Variable([0.0, 0.0])

        @coexec.function(input_signature=[SPEC])
        def __call__(self, x):
            self.total.assign_add(tf.reduce_sum(x, axis=0))
            return {"all": self.total * 1.0, "mean": tf.reduce_mean(x)}

    module = Counting()
    module(X)
    exported = tf.Module()
    exported.total = module.total

    @coexec.function(input_signature=[SPEC])
    def step(x):
        return module(x)

    exported.step = step.to_tf_function()
    tf.saved_model.save(exported, tmp_path / "model", signatures=exported.step)
    loaded = tf.saved_model.load(tmp_path / "model")
    for x in (X, X[:1], tf.concat([X, X], 0)):
        assert_same(*(snapshot(sorted(found.items())) for found in (module(x), loaded.step(x))), path="")
    np.testing.assert_array_equal(loaded.total, module.total)
    served = loaded.signatures["serving_default"](x=X)
    assert_same(*(snapshot(sorted(found.items())) for found in (module(X), served)), path="")


class Scale:
    __slots__ = ("factor", "uses")

    def __init__(self):
        self.factor, self.uses = 3.0, 0

    def __call__(self, x):
        return x * self.factor

    def counted(self, x):
        self.uses += 1
        return x * self.factor


@dataclasses.dataclass
class Pair:
    one: tf.Tensor
    other: tf.Tensor

    def total(self):
        return self.one + self.other


SCALE, LOG, TABLE, HISTORY = Scale(), [], {"a": 1.0}, np.zeros(2)
CALLS = 0
NUMBERS = np.random.default_rng(1)
COUNTER = itertools.count()


def objects_of_its_own(x):
    """Makes objects, fills lists and dicts, sorts, closes over variables: nobody outside sees any of it."""
    found = {}
    for name in sorted({"a", "b"}):
        found[name] = Pair(x, x * float(len(name)))
    found.update(c=Pair(x, x))
    parts = [p.total() for p in found.values()]
    parts.extend([SCALE(x), functools.partial(tf.add, x)(1.0)])
    kept = 0.0

    def add(part):
        nonlocal kept
        kept = kept + tf.reduce_sum(part) * TABLE["a"]
        return part

    list(map(add, reversed(parts)))
    shape = np.array(x.shape)
    shape[0] += 1
    return tf.stack(parts), kept, tf.zeros(shape.tolist()), f"{len(parts)}" == "5"


def test_objects_of_its_own():
    """What is made in the call may be changed in the call."""
    exported = coexec.function(objects_of_its_own).to_tf_function(X)
    *expected, _ = objects_of_its_own(X)
    *found, _ = exported(X)
    assert_same(snapshot(expected), snapshot(found), path="")


def test_random_numbers_and_options():
    """Draws of TensorFlow's are traced; `jit_compile=True` stays."""
    step = coexec.function(jit_compile=True)(lambda x: x + tf.random.uniform(x.shape)).to_tf_function(SPEC_OF_X)
    assert step._jit_compile is True
    assert not np.array_equal(step(X), step(X))


SPEC_OF_X = tf.TensorSpec([2, 2], tf.float32)


# What is refused.


def printing(x):
    print("hello")  # effect
    return x


def logging_loss(x):
    y = tf.reduce_sum(x)
    LOG.append(y)  # effect
    return y


def in_place(x):
    log = LOG
    log += [1]  # effect
    return x


def counting(x):
    global CALLS
    CALLS += 1  # effect
    return x * 2.0


def keeping(x):
    TABLE["b"] = 2.0  # effect
    return x


def through_a_method(x):
    return SCALE.counted(x)


def filling(x):
    HISTORY[0] = 3.0  # effect
    return x


def drawing(x):
    return x * random.random()  # effect


def drawing_with_numpy(x):
    y = x * np.random.normal()  # effect
    return y + 1.0


def drawing_with_a_generator(x):
    return x * float(NUMBERS.normal())  # effect


def timing(x):
    return x * time.time()  # effect


def writing(x):
    with open("/dev/null", "w") as file:  # effect
        file.write("x")
    return x


def reading(x):
    return x * float(tf.reduce_sum(x))  # effect


def reading_an_array(x):
    return x * x.numpy().max()  # effect


def deciding(x):
    if tf.reduce_sum(x) > 0.0:  # effect
        return x
    return -x


def swallowing(x):
    try:
        print("hello")  # effect
    except TypeError:
        pass
    return x


REFUSED = {
    printing: "calls print",
    logging_loss: "changes LOG",
    in_place: "changes LOG",
    counting: "changes the global CALLS",
    keeping: "changes TABLE",
    filling: "read-only",
    drawing: "calls random.Random.random",
    drawing_with_numpy: "changes NumPy's random numbers",
    drawing_with_a_generator: "changes NUMBERS",
    timing: r"calls time\.time",
    writing: r"calls .*open",
    reading: "float",
    reading_an_array: "numpy",
    deciding: "bool",
    swallowing: "calls print",
}


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    return next(f"{__file__}:{first + i} in {function.__name__}" for i, line in enumerate(lines) if "# effect" in line)


def outside():
    return list(LOG), dict(TABLE), CALLS, HISTORY.tolist(), SCALE.uses, NUMBERS.bit_generator.state, random.getstate()


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_effects_are_refused(function, capsys):
    """With the effect and its line; nothing is left of it, and the function goes on as it was."""
    before = snapshot(outside())
    with pytest.raises(coexec.ExportError, match=REFUSED[function]) as caught:
        coexec.function(function).to_tf_function(X)
    assert line_of(function) in str(caught.value)
    assert_same(before, snapshot(outside()), path="")
    assert capsys.readouterr().out == ""
    assert HISTORY.flags.writeable


def test_effects_further_inside_are_refused():
    """In methods of the program's objects, in models of its own, in what Keras calls back."""
    with pytest.raises(coexec.ExportError, match="changes attributes of SCALE") as caught:
        coexec.function(through_a_method).to_tf_function(X)
    _, first = inspect.getsourcelines(Scale.counted)
    assert f"{__file__}:{first + 1} in counted" in str(caught.value)

    class Noting(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.calls = keras.layers.Dense(1), []

        def call(self, x):
            self.calls.append(len(self.calls))
            return self.dense(x)

    model = Noting()
    model(X)
    before = list(model.calls)
    with pytest.raises(coexec.ExportError, match=r"changes model.calls"):
        coexec.function(lambda x: model(x)).to_tf_function(X)
    assert list(model.calls) == before
    dense = keras.layers.Dense(1)
    dense(X)

    def freezing(x):
        dense.trainable = False
        return dense(x)

    with pytest.raises(coexec.ExportError, match="changes attributes of dense"):
        coexec.function(freezing).to_tf_function(X)
    assert dense.trainable


LAYERS = {
    "conv": (lambda: keras.layers.Conv2D(2, 2), (4, 4, 1)),
    "pool": (lambda: keras.layers.MaxPooling2D(), (4, 4, 1)),
    "lstm": (lambda: keras.layers.LSTM(3), (4, 2)),
    "attention": (lambda: (lambda a: lambda x: a(x, x))(keras.layers.MultiHeadAttention(2, 3, dropout=0.1)), (4, 2)),
    "norm": (lambda: keras.layers.LayerNormalization(), (4, 2)),
    "batch norm": (lambda: keras.layers.BatchNormalization(), (4, 2)),
    "embedding": (lambda: keras.layers.Embedding(10, 3), (4,)),
    "noise": (lambda: keras.layers.GaussianNoise(0.1, seed=1), (4, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("built", [True, False])
def test_keras_layers_have_no_effects(name, built):
    """What Keras notes on its own objects while it builds and runs them is nobody's effect."""
    make, shape = LAYERS[name]
    keras.utils.set_random_seed(1)
    layer, x = make(), tf.ones([2, *shape])
    if built:
        layer(x)
    exported = coexec.function(lambda x: layer(x)).to_tf_function()
    np.testing.assert_allclose(exported(x), layer(x), rtol=1e-4, atol=1e-5)


def test_what_nobody_can_watch_is_refused():
    """Iterators from outside, and functions that are compiled and unknown."""
    with pytest.raises(coexec.ExportError, match="can reach COUNTER, a count"):
        coexec.function(lambda x: x * float(next(COUNTER))).to_tf_function(X)


class Uses(tf.Module):
    def __init__(self):
        super().__init__()
        self._uses, self._log = 0, []

    def count(self, x):
        self._uses += 1
        return x

    def note(self, x):
        self._log.append("used")
        return x


class UsesOfALayer(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self._uses = 0

    def call(self, x):
        self._uses += 1
        return x


class Total(list):
    total = 0


def test_effects_on_private_attributes_of_modules_are_refused():
    """A class of the program keeps private attributes next to those of TensorFlow and Keras."""
    module, layer = Uses(), UsesOfALayer()
    layer(X)
    for step, what in (
        (lambda x: module.count(x), "attributes of module"),
        (lambda x: module.note(x), r"module\._log"),
        (lambda x: layer(x), "attributes of layer"),
    ):
        with pytest.raises(coexec.ExportError, match=f"changes {what}"):
            coexec.function(step).to_tf_function(X)
    assert (module._uses, list(module._log), layer._uses) == (0, [], 1)


def test_effects_on_what_is_not_a_plain_container_are_refused():
    """Attributes of functions, modules and containers; buffers; iterators of builtin types; clocks of a class."""
    helper, other = (lambda x: x), types.ModuleType("other")
    helper.calls, other.calls = 0, 0
    total, numbers, items = Total(), array.array("d", [0.0]), iter([1.0, 2.0])
    space = {"helper": helper, "other": other, "total": total, "numbers": numbers, "items": items, "datetime": datetime}
    effects = {
        "helper.calls += 1": "changes attributes of helper",
        "other.calls += 1": r"changes other\.calls",
        "total.total += 1": "changes attributes of total",
        "numbers[0] += 1.0": "changes numbers",
        "next(items)": "can reach items, a list_iterator",
        "globals()['found'] = 1": "calls globals",
        "datetime.datetime.now()": r"calls datetime\.now",
        "datetime.date.today()": r"calls date\.today",
    }
    for effect, what in effects.items():
        exec(compile(f"def step(x):\n    {effect}\n    return x", __file__, "exec"), space)
        with pytest.raises(coexec.ExportError, match=what):
            coexec.function(space["step"]).to_tf_function(X)
    assert (helper.calls, other.calls, total.total, numbers[0], list(items)) == (0, 0, 0, 0.0, [1.0, 2.0])
    assert "found" not in space


def test_numbers_that_change_are_refused():
    """Earlier calls have shown that the step hands in another number each time."""
    rate = [1.0]

    @coexec.function
    def step(x):
        return x * rate[0] + 1.0

    for i in range(4):
        rate[0] = 1.0 + i
        step(X)
    with pytest.raises(coexec.ExportError, match=f"(?s)another one from call to call.*{re.escape(__file__)}"):
        step.to_tf_function()


def test_each_trace_is_watched():
    """Also one that comes later, for other arguments; without arguments nothing is traced at once."""

    @coexec.function
    def step(x, loud):
        if loud:
            print("hello")
        return x * 2.0

    exported = step.to_tf_function()
    np.testing.assert_array_equal(exported(X, False), X * 2.0)
    with pytest.raises(coexec.ExportError, match="calls print"):
        exported(X, True)
    np.testing.assert_array_equal(exported(X[:1], False), X[:1] * 2.0)
