"""Loops of Python: iterations share what is known, and a number of them that never was is nothing new."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import run_both

X = tf.reshape(tf.linspace(-1.0, 1.0, 32), [4, 8])
TRIPS = [3, 3, 3, 3, 1, 5, 9, 2, 40, 3, 0, 17, 400, 5]


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def unrolled(x, trips):
    """No value is read: the loop is one segment, as long as it has iterations."""
    for _ in range(trips):
        x = tf.tanh(x * 0.5) + 0.1
    return x * 2.0


def reading(x, trips):
    """Each iteration ends where Python reads a value."""
    seen = []
    for _ in range(trips):
        x = tf.tanh(x * 0.5) + 0.1
        seen.append(float(tf.reduce_sum(x)))
    return x * 2.0, seen


def counting(x, trips):
    """The iteration's number is part of the computation: as a float, as an index, and as a size."""
    seen = []
    for i in range(trips):
        x = x * (1.0 + i / 1000) + x[i % 4]
        seen.append(float(tf.reduce_sum(tf.ones([i % 3 + 1]) * x[0, 0])))
    return x, seen


def branching(x, trips):
    """What an iteration does depends on what the one before has computed."""
    way = ""
    for _ in range(trips):
        if x[0, 0] > 0.2:
            x, way = x * 0.5 - 0.1, way + "a"
        else:
            x, way = tf.abs(x) + 0.3, way + "b"
    return x, way


def tapes(x, trips):
    """Gradients of all that the iterations did, whose values Python has read."""
    weights = tf.Variable(tf.ones([8, 8]) * 0.1)

    def step(x, trips):
        with tf.GradientTape() as tape:
            total = 0.0
            for _ in range(trips):
                x = tf.tanh(x @ weights)
                total += float(x[0, 0])
            loss = tf.reduce_sum(x) * total
        return tape.gradient(loss, weights), loss

    return step(x, trips)


@pytest.mark.parametrize("function", [unrolled, reading, counting, branching, tapes])
def test_any_number_of_iterations(function):
    """Values are eager's whatever the number of iterations is, known or not."""
    fn = coexec.function(function)
    for trips in TRIPS:
        found, right = fn(X, trips), function(X, trips)
        for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(right), strict=True):
            if isinstance(other, str):
                assert one == other
            elif other is None:
                assert one is None
            else:
                np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)
    assert fn.stats().launches > 0, fn.explain()


@pytest.mark.parametrize("function", [unrolled, reading])
def test_more_iterations_are_nothing_new(function):
    """A call with more iterations than any before is followed from start to end."""
    fn = coexec.function(function)
    fn(X, 3)
    for trips in TRIPS[:10]:
        fn(X, trips)
    assert (fn.stats().recorded, fn.stats().diverged) == (1, 0), fn.explain()


def test_iterations_share_what_is_compiled():
    """Iterations that end where a value is read are launched by one executable, from the second call on."""
    fn = coexec.function(reading)
    for _ in range(2):
        fn(X, 12)
    before = fn.stats()
    for trips in (12, 30, 100):
        fn(X, trips)
    after = fn.stats()
    assert after.compiles - before.compiles <= 2
    assert after.launches - before.launches >= 12 + 30 + 100


def test_iterations_share_library_calls():
    """A layer that is learnt in some iterations is jumped over in all that follow."""
    layer = keras.layers.Dense(8)

    def step(x, trips):
        for _ in range(trips):
            x = layer(x)
            if float(x[0, 0]) > 1e9:
                break
        return x

    fn = coexec.function(step)
    for _ in range(3):
        fn(X, 8)
    before = fn.stats().regions
    np.testing.assert_allclose(fn(X, 20).numpy(), step(X, 20).numpy(), rtol=1e-4, atol=1e-6)
    assert fn.stats().regions - before >= 18


def test_a_library_call_behind_the_loop_is_another_one():
    """The same call at another line, after the same cut, goes on by other operations: both are skipped."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
    model.build([4, 8])

    def make(decorate):
        @decorate
        def step(x, trips):
            seen = []
            for _ in range(trips):
                seen.append(float(tf.nn.softmax(model(x))[0, 0]))
                x = x * 0.9
            return float(model(x)[0, 1]), float(tf.nn.relu(model(x))[0, 1]), seen

        return step

    step = run_both(make, [(X, trips) for trips in (3, 3, 3, 5, 2, 0, 4, 6, 1, 3)])
    before = step.stats().regions
    step(X, 7)
    assert step.stats().regions - before == 7 + 2
    assert "did not agree" not in str(step.explain())
