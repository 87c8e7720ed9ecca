"""The whole system in one small file, run first: each test compares with eager and counts how that came."""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing

X = tf.constant([[1.0, -2.0], [3.0, 4.0]])


@pytest.fixture(autouse=True)
def small_segments_too():
    with testing.compile_everything():
        yield


def compare(function, calls, **options):
    """Runs the calls eagerly and decorated; returns the decorated function's counts if all is the same."""
    expected = [np.asarray(function(*c)) for c in calls]
    decorated = coexec.function(function, **options)
    found = [np.asarray(decorated(*c)) for c in calls]
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(b, a, rtol=1e-5)
    return decorated.stats()


def chain(x):
    for _ in range(5):
        x = tf.tanh(x @ x) + 0.5 * x
    return x


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_recorded_then_followed_then_launched(jit_compile):
    stats = compare(chain, [(X,)] * 5, jit_compile=jit_compile)
    assert (stats.calls, stats.recorded, stats.followed, stats.diverged) == (5, 1, 4, 0)
    assert (stats.compiles, stats.ops_per_segment) == (1, (20,))
    assert stats.launches == 3  # the first followed call runs operation by operation
    assert (stats.ops_recorded, stats.ops_followed) == (20, 80)


def test_a_new_path_diverges_once():
    def branch(x, square):
        y = x + 1.0
        return tf.square(y) if square else tf.exp(y)

    stats = compare(branch, [(X, False)] * 3 + [(X, True)] * 3 + [(X, False)] * 2)
    assert (stats.recorded, stats.diverged, stats.followed) == (1, 1, 6)


def test_a_value_is_read_in_the_middle():
    def reading(x):
        total = float(tf.reduce_sum(x * 2.0))
        return x / total if total > 0.0 else -x

    stats = compare(reading, [(X,)] * 4)
    assert (stats.followed, stats.compiles, stats.ops_per_segment) == (3, 2, (2, 1))
    assert stats.launches == 4


def test_effects_happen_once_each_in_order():
    def logging(log, x):
        log.append("before")
        y = tf.nn.relu(x)
        log.append(float(tf.reduce_max(y)))
        y = y + float(len(log))
        log.append("after")
        return y

    expected, found = [], []
    decorated = coexec.function(logging)
    for n in range(4):
        np.testing.assert_array_equal(decorated(found, X * float(n)), logging(expected, X * float(n)))
    assert found == expected
    assert len(found) == 12
    assert (decorated.stats().followed, decorated.stats().diverged) == (3, 0)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_a_training_step(jit_compile):
    def training(decorate):
        weights = tf.Variable([[0.5], [-0.5]])

        @decorate
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weights - y))
            weights.assign_sub(0.01 * tape.gradient(loss, weights))
            return loss

        losses = [float(step(X, tf.constant([[1.0], [2.0]]))) for _ in range(6)]
        return losses, weights.numpy(), step

    expected, found = training(lambda f: f), training(coexec.function(jit_compile=jit_compile))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    assert expected[0][-1] < expected[0][0]
    stats = found[2].stats()
    assert (stats.recorded, stats.followed, stats.diverged) == (1, 5, 0)
    assert (stats.launches, stats.compiles) == (4, 1)
