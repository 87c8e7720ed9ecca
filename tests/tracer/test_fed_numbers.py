"""Numbers that are not written in the code are fed from the start: another one is no new path."""

import math
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from tests.coexec import run_both
from tests.coexec.test_value_fidelity import bits
from tracer.fed_numbers import is_same_number


def body(x, n):
    y = x * n
    for _ in range(5):
        y = tf.tanh(y) + x
    return y


def held(x, holder):
    y = x * holder.scale
    for _ in range(5):
        y = tf.tanh(y) + x
    return y


def written(x, n):
    y = x * 0.3 if n == 0.3 else x * 0.4
    for _ in range(5):
        y = tf.tanh(y) + x
    return y


X = tf.constant([[1.5, -2.0], [0.0, 3.0]])


def learnt(step):
    """How many operations had no step yet, or were recorded."""
    return step.stats().ops_recorded, step.trace_graph.steps


def outcome(function, *args):
    try:
        return bits(function(*args))
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("other", [0.4, -1.0, 1e-30, math.inf, np.float32(0.25), np.float64(0.75), -0.0, 0.0])
def test_another_number_is_no_new_path(other):
    """After calls with one number, another is followed along the same steps, and gives what eager gives."""
    step = coexec.function(body, jit_compile=False)
    for _ in range(4):
        assert bits(step(X, 0.3)) == bits(body(X, 0.3))
    before = learnt(step)
    for number in (other, 0.3, other):
        assert bits(step(X, number)) == bits(body(X, number))
    assert learnt(step) == before, step.explain()


def test_an_attribute_is_no_new_path():
    holder = types.SimpleNamespace(scale=0.7)
    step = coexec.function(held)
    for _ in range(4):
        step(X, holder)
    before = learnt(step)
    for holder.scale in (0.5, 0.25, 0.25, 0.125):
        np.testing.assert_allclose(step(X, holder), held(X, holder), rtol=1e-6)
    assert learnt(step) == before, step.explain()


def test_a_written_number_is_a_constant():
    """What stands in the code is compiled into the graph."""
    step = coexec.function(written)
    for _ in range(3):
        step(X, 0.3)
    assert not any(node.fed for node in step.trace_graph.nodes)
    for _ in range(3):
        np.testing.assert_allclose(step(X, 0.4), written(X, 0.4), rtol=1e-6)


SPELLINGS = [
    "x + [0.1, 0.2]", "x[0, 0] * [0.1, 0.2, 3.0]", "x * -2.5", "x / (1 - 0.9)", "tf.add(x, 3)", "tf.maximum(x, 1e-7)",
]  # fmt: skip


@pytest.mark.parametrize("written", SPELLINGS)
def test_spellings_of_written_numbers(written, tmp_path):
    """Lists, folded expressions, integers: all stand in the code."""
    file = tmp_path / "spelt.py"
    file.write_text(f"def f(x):\n    return {written}\n")
    names = {"tf": tf}
    exec(compile(file.read_text(), str(file), "exec"), names)
    step = coexec.function(names["f"])
    for _ in range(3):
        assert bits(step(X)) == bits(names["f"](X))
    assert not any(node.fed for node in step.trace_graph.nodes), str(step.trace_graph)


def test_an_exponent_is_a_constant_until_it_changes():
    """XLA multiplies where it knows that a power is a square."""
    step = coexec.function(lambda x, n: tf.pow(x, n))
    for _ in range(3):
        step(X, 2.0)
    assert not any(node.fed for node in step.trace_graph.nodes)
    for exponent in (3.0, 2.0, 3.0, 0.0):
        np.testing.assert_allclose(step(X, exponent), tf.pow(X, exponent), rtol=1e-6)


def test_numbers_of_keras_are_constants():
    """What a layer of Keras' passes to its operations is part of what is memoized of it."""
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.LeakyReLU(0.17)])
    model.build((None, 2))
    step = coexec.function(lambda x: tf.reduce_sum(model(x, training=True)))
    for _ in range(6):
        step(X)
    assert step.stats().regions > 0
    assert not any(node.fed for node in step.trace_graph.nodes), str(step.trace_graph)


def by_assigning(optimizer, rate):
    optimizer.learning_rate.assign(rate)


def by_setting(optimizer, rate):
    optimizer.learning_rate = rate


@pytest.mark.parametrize("schedule", [by_assigning, by_setting])
@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_the_rate_of_an_optimizer_of_keras(kind, schedule):
    """A rate that has stayed for many calls changes, and nothing is learnt."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    optimizer = kind(0.015)
    optimizer.build(model.trainable_variables)
    start = model.get_weights()

    def train(rate):
        schedule(optimizer, rate)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X, training=True) - 0.5) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def run(function, rates):
        model.set_weights(start)
        for variable in optimizer.variables:
            variable.assign(tf.zeros_like(variable.value))
        return [float(function(rate)) for rate in rates]

    rates = [0.015] * 7 + [0.005] * 3 + [0.03125, 0.015]
    step = coexec.function(train)
    found = run(step, rates[:7])
    before = learnt(step)
    for rate in rates[7:]:
        found.append(float(step(rate)))
    assert learnt(step) == before, step.explain()
    np.testing.assert_allclose(found, run(train, rates), rtol=1e-4)


def test_numbers_that_pass_through_functions_of_keras():
    holder = types.SimpleNamespace(scale=0.7)
    function = lambda x: keras.ops.tanh(keras.ops.multiply(x, holder.scale)) + keras.ops.clip(x, -holder.scale, 0.9)  # noqa: E731
    step = coexec.function(function)
    for _ in range(4):
        step(X)
    before = learnt(step)
    for holder.scale in (0.5, 0.25, 0.125):
        np.testing.assert_allclose(step(X), function(X), rtol=1e-6)
    assert learnt(step) == before, step.explain()


HOSTILE = {
    "kinds": [0.5, 1, True, np.float32(0.5), np.float64(0.5), np.int32(1), 0.5, 1.0, np.float16(0.5), np.bool_(True)],
    "zeros": [0.0, -0.0, 0.0, np.float32(-0.0), np.float32(0.0), 0, -0.0],
    "not numbers": [math.nan, 0.5, -math.nan, math.inf, math.nan, -math.inf],
    "too large": [0.5, 1e39, 0.5, -1e39, 0.25],
    "of a class": [0.5, type("Number", (float,), {})(0.25), 0.5, type("Number", (float,), {})(0.5)],
    "arrays": [np.float32([0.5, 1.5]), np.float32([0.25, 1.5]), np.float64([0.5, 1.5]), np.float32([[0.5, 1.5]])],
    "lists": [[0.5, 1.5], [0.25, 1.5], (0.5, 1.5), [[0.5, 1.5]], [0.5, 1], [1, 2]],
    "other things": [0.5, None, "0.5", b"0.5", [], {}, 0.5j, object(), 0.25],
}


GIVEN = ["x * n", "tf.constant(n) * x", "tf.stack([x[0] * n, x[1]])", "x * tf.convert_to_tensor(n)", "tf.fill([2], n)"]


@pytest.mark.parametrize("spelled", GIVEN)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_numbers_in_turn(kind, spelled):
    """Each comes thrice, and then they take turns: bits, dtypes and errors are eager's."""
    function = eval(f"lambda x, n: {spelled}", {"tf": tf})
    step = coexec.function(function, jit_compile=False)
    values = [v for v in HOSTILE[kind] for _ in range(3)] + 2 * HOSTILE[kind]
    for number, value in enumerate(values):
        assert outcome(step, X, value) == outcome(function, X, value), (number, value, step.explain())
    assert step.stats().followed > 3


def test_arrays_that_change_in_place():
    """The same array, or list, with other items is another number."""
    array, items = np.float32([0.5, 1.5]), [0.5, 1.5]
    function = lambda x: (x * array, x + items)  # noqa: E731
    step = coexec.function(function, jit_compile=False)
    for n in range(12):
        if n > 3:
            array[n % 2] += 0.25
            items[n % 2] -= 0.125
        assert bits(step(X)) == bits(function(X)), n
    assert step.stats().followed > 8


def test_one_number_in_two_places_and_two_numbers_that_are_equal():
    """Which operations share a number is no part of the path."""
    function = lambda x, a, b: (x * a, x + b, x - a)  # noqa: E731
    step = coexec.function(function, jit_compile=False)
    same = 0.5
    for a, b in [(same, same), (0.25, 0.5), (same, same), (0.5, 0.75), (float("0.5"), float("0.5"))] * 3:
        assert bits(step(X, a, b)) == bits(function(X, a, b))
    assert step.stats().diverged == 0


def test_gradients_through_fed_numbers():
    """The forward's numbers are the gradient's; a schedule makes neither a new path."""
    v = tf.Variable([0.5, -1.5])
    weights = {"fit": 1.25, "decay": 0.375}

    def plain(x, rate):
        with tf.GradientTape() as tape:
            loss = weights["fit"] * tf.reduce_sum((x * v) ** 2) + weights["decay"] * tf.reduce_sum(v * v)
        gradient = tape.gradient(loss, v)
        v.assign_sub(rate * gradient)
        return loss, gradient

    def run(function):
        v.assign([0.5, -1.5])
        weights.update(fit=1.25, decay=0.375)
        found = []
        for n in range(16):
            if n == 8:
                weights["decay"] = 0.0625
            if n == 10:
                weights["fit"] = 0.75
            found.append([t.numpy() for t in function(X, 0.015 if n < 12 else 0.005)])
        return [*found, v.numpy()]

    step = coexec.function(plain, jit_compile=False)
    for one, other in zip(tf.nest.flatten(run(step)), tf.nest.flatten(run(plain)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    stats = step.stats()
    assert stats.diverged == 0
    assert stats.compiles == 1, step.explain()


def test_exports_refuse_numbers_that_have_changed():
    """A number that has stayed the same is a constant of the exported function, as of a `tf.function`."""
    holder = types.SimpleNamespace(scale=0.7)
    step = coexec.function(lambda x: held(x, holder))
    for _ in range(4):
        step(X)
    np.testing.assert_allclose(step.to_tf_function(tf.TensorSpec([2, 2]))(X), held(X, holder), rtol=1e-6)
    holder.scale = 0.6
    step(X)
    with pytest.raises(coexec.ExportError, match="another one from call to call"):
        step.to_tf_function(tf.TensorSpec([2, 2]))


def test_a_float_that_is_computed_anew_is_the_same_number():
    """Of its kind and value: then the tensor of the last call is fed. Zeros have a sign, and NaN equals nothing."""
    assert not is_same_number(0.3, 0.1 * 3)
    assert is_same_number(0.5, float("0.5"))
    assert is_same_number(np.float64(0.5), np.float64("0.5"))
    assert not is_same_number(0.5, np.float64(0.5))
    assert not is_same_number(np.float64(0.5), 0.5)
    assert not is_same_number(0.0, float("-0.0"))
    assert not is_same_number(float("nan"), float("nan"))
    assert not is_same_number(1, 1.0)

    def make(decorate):
        rates = [0.25, 0.25, 0.25, 0.5, 0.5, -0.0, 0.0, -0.0, float("nan"), 0.25, 0.25]

        @decorate
        def step(x, n):
            return tf.tanh(x) * (rates[n] * 1.0), tf.sin(x) * np.sqrt(n // 3 + 1.0)

        return step

    step = run_both(make, [(tf.constant([1.0, -2.0]), n) for n in range(11)])
    assert step.stats().followed >= 6, step.explain()
