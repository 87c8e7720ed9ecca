"""The last launch of a call goes on behind it, where the caller allows that: whoever looks finds what eager leaves."""

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

import coexec
from tracer import intercept

CALLS = 24


def make():
    """A step on a variable, with enough operations to be launched, that may fail; and the variable."""
    total = tf.Variable(tf.ones((4, 4)))

    def step(x, index=0):
        y = total
        for _ in range(8):
            y = tf.tanh(tf.matmul(x, y)) + 0.5
        total.assign_add(y)
        return {"sum": tf.reduce_sum(y), "picked": tf.gather(tf.reshape(y, [-1]), index)}

    return step, total


def ahead(step):
    function = coexec.function(step, jit_compile=False)
    function._controller.ahead = True
    return function


def run(look, calls=CALLS):
    """Makes the calls eagerly and ahead, and looks after each; returns the function."""
    x = tf.reshape(tf.range(16.0), (4, 4)) / 16.0
    plain, expected = make()
    mine, found = make()
    function = ahead(mine)
    for n in range(calls):
        one, other = plain(x), function(x)
        np.testing.assert_allclose(look(n, one, expected), look(n, other, found), rtol=1e-5)
    function._controller.land()
    np.testing.assert_allclose(expected.numpy(), found.numpy(), rtol=1e-5)
    assert function.stats().followed == calls - 1, function.explain()
    assert function.stats().beside >= calls // 2, function.explain()
    assert function.stats().launches >= calls // 2
    return function


@functools.cache
def copied(handle):
    """A copy of a handle, made once: making it waits for what is written."""
    return tf.identity(handle.deref())


def copied_read(total):
    return tf.raw_ops.ReadVariableOp(resource=copied(total.handle.ref()), dtype=tf.float32)


LOOKS = {
    "nobody": lambda n, result, total: 0.0,
    "a result": lambda n, result, total: float(result["sum"]),
    "an operation on a result": lambda n, result, total: (result["picked"] * 2.0).numpy(),
    "the variable": lambda n, result, total: total.numpy(),
    "the variable, by a copy of its handle": lambda n, result, total: copied_read(total).numpy(),
    "an operation on the variable": lambda n, result, total: tf.reduce_sum(total).numpy(),
    "a list with the variable": lambda n, result, total: tf.concat([total, total], 0).numpy(),
    "a gather of the variable": lambda n, result, total: tf.gather(total, [1]).numpy(),
    "now and then": lambda n, result, total: total.numpy() if n % 5 == 0 else 0.0,
    "a write": lambda n, result, total: total.assign(total * 0.5).numpy(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_sees_what_eager_leaves(name):
    """Values and state are eager's, whatever is looked at between two calls."""
    before = intercept.holders()
    function = run(LOOKS[name])
    assert not [r for r in intercept._running if type(r).__name__ == "Ahead"]
    del function
    assert intercept.holders() <= before + 2  # for the results that a frame still holds


def test_results_kept_for_long():
    """Each keeps its value, and is used by later calls and outside."""
    kept = []
    run(lambda n, result, total: kept.append(result) or 0.0)
    for eager, mine in zip(kept[::2], kept[1::2], strict=True):
        np.testing.assert_allclose(eager["sum"].numpy(), (mine["sum"] + 0.0).numpy(), rtol=1e-5)


def test_another_thread_sees_the_launch_done():
    """A read on another thread waits for it."""

    def look(n, result, total):
        found = []
        thread = threading.Thread(target=lambda: found.append(total.numpy()))
        thread.start()
        thread.join()
        return found[0]

    run(look)


@pytest.mark.parametrize("asked", ["by land", "by the next call", "after a look", "by a plain call"])
def test_a_failure_is_heard_of_once(asked):
    """By whoever asks next; nothing of a call behind the one that failed is carried out."""
    x = tf.ones((4, 4))
    mine, total = make()
    function = ahead(mine)
    for _ in range(12):
        function(x)
    function._controller.land()
    before = total.numpy()
    indices = iter([0, 0, 99, 0, 0])
    failed: list[Exception] = []
    for _ in range(4):
        try:
            function(x, tf.constant(next(indices)))
            if asked == "after a look":
                total.numpy()
            elif asked == "by land":
                function._controller.land()
            elif asked == "by a plain call":
                function._controller.ahead = False
        except tf.errors.InvalidArgumentError as error:
            failed.append(error)
    function._controller.land()
    assert len(failed) == 1
    plain, other = make()
    other.assign(before)
    for index in (0, 0):
        plain(x, index)
    # The third adds before it fails, as eagerly; the fourth is made unless the failure reached its caller.
    with pytest.raises(tf.errors.InvalidArgumentError):
        plain(x, 99)
    candidates = [other.numpy()]
    plain(x, 0)
    candidates.append(other.numpy())
    assert any(np.allclose(total.numpy(), c, rtol=1e-5) for c in candidates)


def test_modes_wait():
    """A call under a mode begins when the one before is done."""
    step, _ = make()
    function, x = ahead(step), tf.ones((4, 4))
    for _ in range(8):
        function(x)
    with coexec.imperative():
        result = function(x)
    assert function._controller._under_way is None
    assert float(result["sum"]) > 0
