"""Backing off: a function that is new on every call runs plainly, comes back when it settles, and stays bounded."""

import collections
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuning
from coexec.dispatch.profitability import Profitability
from tests.coexec import assert_quiet, holders
from tracer.private import context

X = tf.constant([-1.0, 2.0, -3.0])
CALLS = 2000
# Calls that are followed at all: some until there is doubt and the allowance is used up, then one after each pause,
# which doubles up to its bound. (On a busy machine a call may take less than a plain one, and be followed by others.)
TRIED = 4 * (tuning.following_allowance + 4 * (6 + CALLS // tuning.max_backoff))


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def leaky(x, alpha):
    """An attribute that is a Python number: each number is another operation."""
    return tf.nn.leaky_relu(x + 1.0, alpha=alpha) * 2.0


def steps(fn):
    """How many steps the graph's trees hold."""
    found = 0
    for node in fn.trace_graph.nodes:
        todo = [node.after] if node.after is not None else []
        while todo:
            step = todo.pop()
            found += 1
            todo += step.next
    return found


def segments():
    """How many compiled segments TensorFlow's runtime knows."""
    names = context.context().list_function_names()
    return sum("coexec_segment" in (n if isinstance(n, str) else n.decode()) for n in names)


@pytest.fixture
def fast_plain_calls(monkeypatch):
    """Plain calls count as if they took a quarter of their time: in no busy moment does following them seem to pay."""
    ran_plainly = Profitability.ran_plainly
    monkeypatch.setattr(Profitability, "ran_plainly", lambda self, *times: ran_plainly(self, *(t / 4 for t in times)))


@pytest.mark.clocked
@pytest.mark.usefixtures("fast_plain_calls")
def test_new_on_every_call():
    """Results are right, nearly all calls run plainly, pauses are bounded, and the graph is small."""
    before = holders()
    fn = coexec.function(leaky)
    for n in range(CALLS):
        y = fn(X, 0.1 + n / CALLS)
        if n % 50 == 0:
            np.testing.assert_array_equal(y.numpy(), leaky(X, 0.1 + n / CALLS).numpy())
    stats = fn.stats()
    assert stats.calls == CALLS == stats.followed + stats.diverged + stats.recorded + stats.imperative
    assert stats.imperative > 0.9 * CALLS
    assert stats.diverged <= TRIED
    assert 0 < fn._controller.account.pause <= tuning.max_backoff
    assert len(fn.trace_graph.nodes) <= 4 * TRIED
    assert steps(fn) <= 4 * TRIED
    assert "backed off:" in fn.explain()
    del y
    assert_quiet(before)


def long(x, alpha):
    """Enough operations for a launch to be faster than they are."""
    for _ in range(40):
        x = tf.nn.leaky_relu(x + 1.0, alpha=alpha) * 0.5
    return x


@pytest.mark.clocked
def test_it_comes_back():
    """When the path becomes stable, it is learnt, and followed in all calls, after a few pauses."""
    fn = coexec.function(long)
    for n in range(100):
        fn(X, 0.1 + n / 100)
    assert 0 < fn.stats().imperative < 100
    for _ in range(6 * tuning.max_backoff // 50):
        before = fn.stats()
        for _ in range(50):
            y = fn(X, 0.5)
        after = fn.stats()
        if min(after.followed - before.followed, after.launches - before.launches) >= 45:
            break
    else:
        pytest.fail(f"never followed in most of 50 calls: {after}")
    np.testing.assert_array_equal(y.numpy(), long(X, 0.5).numpy())


def test_a_good_path_stays_beside_new_ones():
    """New paths between do not keep a known path from being followed."""
    fn = coexec.function(leaky)
    for _ in range(4):
        fn(X, 0.5)
    for n in range(200):
        np.testing.assert_array_equal(fn(X, 0.5).numpy(), leaky(X, 0.5).numpy())
        if n % 20 == 0:
            fn(X, 1.0 + n)
    assert fn.stats().followed >= 200
    assert fn.stats().launches >= 190


@pytest.mark.clocked
def test_every_other_call_new():
    """A function that is known and new in turns does not grow without bound."""
    fn = coexec.function(leaky)
    for n in range(CALLS):
        fn(X, 0.5 if n % 2 else 1.0 + n)
    assert fn.stats().followed > 0
    assert len(fn.trace_graph.nodes) < CALLS // 4


@pytest.mark.clocked
def test_new_shapes():
    """Ever-new shapes give right results in bounded memory, and compile few executables."""
    fn = coexec.function(lambda x: tf.reduce_sum(tf.tanh(x) * 2.0))
    before = segments()
    for n in range(CALLS):
        x = np.full([n + 1], 0.5, np.float32)
        assert float(fn(x)) == pytest.approx((n + 1) * 2.0 * np.tanh(0.5), rel=1e-4)
    stats = fn.stats()
    assert stats.followed + stats.diverged + stats.recorded + stats.imperative == CALLS
    assert len(fn.trace_graph.nodes) <= 8
    assert sum(len(n.variants) for n in fn.trace_graph.nodes) <= 4 * TRIED
    assert steps(fn) <= 8 * TRIED
    assert segments() - before <= 4


@pytest.mark.clocked
def test_new_paths():
    """Ever-new sequences of known operations give right results in bounded memory."""

    def walk(x, number):
        for bit in range(11):
            x = x * 0.5 if number >> bit & 1 else x + 1.0
        return x

    fn = coexec.function(walk)
    before = segments()
    for n in range(CALLS):
        y = fn(X, n)
        if n % 50 == 0:
            np.testing.assert_allclose(y.numpy(), walk(X, n).numpy(), rtol=1e-6)
    stats = fn.stats()
    assert stats.followed + stats.diverged + stats.recorded + stats.imperative == CALLS
    assert len(fn.trace_graph.nodes) <= 140  # one a place and iteration
    assert steps(fn) <= 64 * 11 * 20
    assert segments() - before <= CALLS // 8


def test_new_numbers_are_fed():
    """A Python number that is a tensor's value, and not an attribute, is fed: no divergence, one executable."""
    fn = coexec.function(lambda x, n: tf.tanh(x * n) + n)
    for n in range(200):
        number = 0.1 + n / 100
        np.testing.assert_allclose(fn(X, number).numpy(), np.tanh(X.numpy() * number) + number, rtol=1e-5, atol=1e-6)
    assert (fn.stats().followed, fn.stats().diverged, fn.stats().imperative) == (199, 0, 0)
    assert fn.stats().compiles <= 4
    assert fn.stats().launches >= 190
    assert steps(fn) <= 16


def sine(x):
    """What builtins call back for."""
    return tf.sin(x) * 2.0


CALLED_BACK = {
    "next": lambda x: next(y * 2.0 for y in [x]),
    "map": lambda x: tuple(map(sine, (x, x)))[1],
    "sorted": lambda x: sorted([1.0, 2.0], key=lambda n: float(x[0] * n))[0] * x,
    "reduce": lambda x: functools.reduce(lambda a, b: a + b, [x, x, x]),
    "starmap": lambda x: collections.deque(itertools.starmap(tf.add, [(x, x)]), maxlen=1)[0],
}


@pytest.mark.parametrize("function", CALLED_BACK.values(), ids=CALLED_BACK)
def test_operations_issued_by_builtins(function):
    """Operations that a builtin calls back for have one place, from the first call on."""
    fn = coexec.function(function)
    for n in range(24):
        np.testing.assert_array_equal(fn(X + float(n)).numpy(), function(X + float(n)).numpy())
    assert (fn.stats().recorded, fn.stats().diverged) == (1, 0)
    assert fn.stats().followed == 23


@pytest.mark.clocked
def test_a_step_that_settles_is_never_run_plainly():
    """Calls that observe, compile and then get fast raise no doubt: none of the first ones is spent on timing."""

    def build():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, activation="relu") for _ in range(6))])
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return float(loss)

        return step

    data = tf.random.stateless_normal([4, 8], [1, 2])
    plain, fn = build(), coexec.function(build())
    for _ in range(8):
        np.testing.assert_allclose(fn(data), plain(data), rtol=1e-4)
    stats = fn.stats()
    assert (stats.recorded, stats.followed, stats.imperative) == (1, 7, 0)
    assert stats.launches >= 6
    assert stats.regions
