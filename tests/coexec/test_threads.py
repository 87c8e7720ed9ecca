"""Threads: each has its calls, handlers and tapes to itself, and what they share they see in eager's order."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import TIMEOUT, assert_quiet, holders, in_thread, in_threads, run_both
from tracer import intercept
from tracer.lazy import LazyTensor

X = tf.constant([[1.0, -2.0], [3.0, 4.0]])


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def chain(x, scale):
    for _ in range(4):
        x = tf.tanh(x @ x) * scale + x
    return tf.reduce_sum(x)


def scalars(count=6):
    return [(tf.constant(float(i)),) for i in range(count)]


@pytest.mark.parametrize("warm", [0, 3], ids=["cold", "warm"])
def test_one_function_from_many_threads(warm):
    """Every thread gets eager's values, whether the paths are known or are being learnt by all at once."""
    before = holders()
    fn = coexec.function(chain)
    for n in range(warm):
        fn(X, tf.constant(float(n)))

    def work(number):
        return [float(fn(X + float(number), tf.constant(0.1 * n))) for n in range(12)]

    found = in_threads(*[lambda n=n: work(n) for n in range(6)])
    for number, values in enumerate(found):
        expected = [float(chain(X + float(number), tf.constant(0.1 * n))) for n in range(12)]
        np.testing.assert_allclose(values, expected, rtol=1e-5)
    stats = fn.stats()
    assert stats.calls == 72 + warm
    assert stats.followed + stats.diverged + stats.recorded + stats.imperative == stats.calls
    assert stats.launches > 0
    assert stats.followed >= (72 + warm - 1 if warm else 30)
    assert_quiet(before)


def test_different_functions_from_threads():
    """Functions that share a variable and a helper, each on its thread, follow their own graphs."""
    before = holders()
    weight = tf.Variable(2.0)
    functions = [coexec.function(lambda x, n=n: chain(x, weight) * float(n)) for n in range(4)]

    def work(number):
        return [float(functions[number](X + float(i))) for i in range(8)]

    found = in_threads(*[lambda n=n: work(n) for n in range(4)])
    for n, values in enumerate(found):
        np.testing.assert_allclose(values, [float(chain(X + float(i), weight) * n) for i in range(8)], rtol=1e-5)
    for function in functions:
        assert (function.stats().followed, function.stats().diverged) == (7, 0)
        assert function.stats().launches > 0
    assert_quiet(before)


def test_a_thread_without_the_decorator_is_not_answered():
    """While a call is followed, another thread's operations run at once, on eager tensors, and are not counted."""
    before = holders()
    seen = []

    def other():
        seen.append((intercept.installed(), intercept.current_handler()))
        y = tf.tanh(X) * 2.0
        seen.append(type(y))
        return float(tf.reduce_sum(y))

    fn = coexec.function(lambda x: (tf.reduce_sum(x * 3.0), in_thread(other)))
    expected = float(tf.reduce_sum(tf.tanh(X) * 2.0))
    for _ in range(4):
        total, from_thread = fn(X)
        assert (float(total), from_thread) == (18.0, pytest.approx(expected))
    assert seen[::2] == [(True, None)] * 4
    assert set(seen[1::2]) == {type(X)}
    assert (fn.stats().followed, fn.stats().ops_followed, fn.stats().ops_recorded) == (3, 6, 2)
    del total
    assert_quiet(before)


def test_a_call_from_a_thread_inside_a_call():
    """A decorated function called on a thread that a call has started is a call of its own."""
    before = holders()
    inner = coexec.function(lambda x: tf.reduce_sum(tf.tanh(x)) * 2.0)
    outer = coexec.function(lambda x: inner(x) + in_thread(lambda: inner(x + 1.0)))
    expected = float(tf.reduce_sum(tf.tanh(X)) * 2.0 + tf.reduce_sum(tf.tanh(X + 1.0)) * 2.0)
    for _ in range(5):
        assert float(outer(X)) == pytest.approx(expected, rel=1e-5)
    assert (outer.stats().calls, outer.stats().followed) == (5, 4)
    assert (inner.stats().calls, inner.stats().followed) == (5, 4)
    assert_quiet(before)


def test_a_running_calls_tensor_is_read_by_another_thread():
    """What a call has published can be read, computed with and differentiated elsewhere, while the call goes on."""

    def make(decorate):
        @decorate
        def step(x):
            y = x * x + 1.0

            def elsewhere():
                with tf.GradientTape() as tape:
                    tape.watch(y)
                    z = tf.sin(y)
                return float(y), z.numpy(), tape.gradient(z, y).numpy()

            seen = in_thread(elsewhere)
            return seen, y * 2.0

        return step

    before = holders()
    fn = run_both(make, scalars())
    assert (fn.stats().followed, fn.stats().diverged) == (5, 0)
    assert_quiet(before)


def test_a_tape_per_thread():
    """Gradients through calls on several threads belong to the tapes of their own thread."""
    before = holders()
    weight = tf.Variable([1.0, 2.0])

    @coexec.function
    def loss(x):
        return tf.reduce_sum(tf.square(weight * x))

    def work(number):
        gradients = []
        for i in range(8):
            with tf.GradientTape() as tape:
                value = loss(tf.constant([float(number), float(i)]))
            gradients.append(tape.gradient(value, weight).numpy())
        return gradients

    for number, found in enumerate(in_threads(*[lambda n=n: work(n) for n in range(4)])):
        for i, gradient in enumerate(found):
            np.testing.assert_allclose(gradient, [2.0 * number**2, 4.0 * i**2])
    assert loss.stats().calls == 32
    assert loss.stats().followed >= 16
    assert_quiet(before)


def test_two_threads_meet_inside_their_calls():
    """Two calls of one function are followed at the same time, operation by operation in turns."""
    before = holders()
    turns: list[threading.Barrier] = []

    def step(x, alone):
        for _ in range(5):
            x = x * 2.0 - 1.0
            if not alone:
                turns[0].wait(TIMEOUT)
        return x

    fn = coexec.function(step)
    for _ in range(3):
        fn(X, True)
    turns.append(threading.Barrier(2))
    found = in_threads(lambda: fn(X, False).numpy(), lambda: fn(X + 1.0, False).numpy())
    np.testing.assert_array_equal(found[0], step(X, True).numpy())
    np.testing.assert_array_equal(found[1], step(X + 1.0, True).numpy())
    assert (fn.stats().followed, fn.stats().diverged) == (4, 0)
    assert_quiet(before)


def test_an_exception_on_one_thread_leaves_the_others_alone():
    """A call that fails on its thread changes nothing for the calls of other threads."""
    before = holders()

    @coexec.function
    def step(x, index):
        return tf.gather(x * 2.0, index)

    for _ in range(3):
        step(X, tf.constant(1))

    def failing():
        for _ in range(6):
            with pytest.raises(tf.errors.InvalidArgumentError):
                step(X, tf.constant(7))

    def working():
        return [step(X, tf.constant(1)).numpy() for _ in range(6)]

    _, found = in_threads(failing, working)
    for value in found:
        np.testing.assert_array_equal(value, [6.0, 8.0])
    assert step.stats().followed >= 8
    assert_quiet(before)


# A variable that two threads use: the second thread is joined, so eager's order is the only one.


def test_another_thread_writes_after_a_pending_write():
    """An assignment of the call comes before that of a thread which the call starts later."""

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x):
            v.assign(x)
            in_thread(lambda: v.assign_add(1.0) is None)
            return v.read_value()

        return step

    fn = run_both(make, scalars())
    assert fn.stats().followed == 5


def test_another_thread_reads_after_a_pending_write():
    """A thread sees what the call has assigned before it was started."""

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x):
            v.assign(x)
            return in_thread(lambda: float(v.numpy()))

        return step

    fn = run_both(make, scalars())
    assert fn.stats().followed == 5


def test_another_thread_writes_after_a_pending_read():
    """A value read from a variable is that of the time of the reading."""

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x):
            y = v + 1.0
            in_thread(lambda: v.assign(x * 100.0) is None)
            return y

        return step

    fn = run_both(make, scalars())
    assert fn.stats().followed == 5


def test_a_failed_operation_is_raised_in_the_thread_that_issued_it():
    """A thread that reads a healthy tensor never gets the exception of another operation of the call."""

    def make(decorate):
        log = []

        @decorate
        def step(x):
            y = x + 1.0
            tf.gather([1.0, 2.0, 3.0], tf.cast(x, tf.int32) * 2)
            try:
                in_thread(lambda: float(y))
            except tf.errors.InvalidArgumentError:
                log.append("raised in the thread")
            return y, len(log)

        return step

    run_both(make, scalars())


def test_two_calls_use_one_variable():
    """Two calls with pending operations on one variable write once each, and read what eager could have read."""
    before = holders()
    v = tf.Variable(0.0)
    meet: list[threading.Barrier] = []

    @coexec.function
    def step(x, amount):
        y = v.assign_add(amount) * 1.0
        for barrier in meet:
            barrier.wait(TIMEOUT)
        return y + x

    for _ in range(3):
        step(0.0, 0.0)
    for turn in range(1, 4):
        meet[:] = [threading.Barrier(2)]
        found = in_threads(lambda: float(step(0.0, 1.0)), lambda: float(step(0.0, 10.0)))
        total = 11.0 * turn
        assert float(v) == total
        assert sorted(found) in ([total - 10.0, total], [total - 1.0, total])
    assert (step.stats().followed, step.stats().diverged) == (8, 0)
    assert_quiet(before)


CROSSED = """
import threading
import tensorflow as tf
import coexec
from coexec import testing
from coexec.follow.follower import Follower

published, order = {}, threading.Barrier(2)
inside = threading.Barrier(2)
force = Follower.force

def meeting(self, lazy):
    # Both calls are inside of an operation of theirs when each wants the other's tensor.
    try:
        inside.wait(5)
    except threading.BrokenBarrierError:
        pass
    return force(self, lazy)

def step(x, me, alone):
    y = x * 2.0
    partner = x
    if not alone:
        published[me] = y
        order.wait(30)
        partner = published[1 - me]
    return y + partner

fn = coexec.function(step)
for _ in range(3):
    fn(tf.constant(1.0), 0, True)
Follower.force = meeting
found = {}
threads = [
    threading.Thread(target=lambda n=n: found.update({n: float(fn(tf.constant(n + 1.0), n, False))}), daemon=True)
    for n in range(2)
]
for t in threads:
    t.start()
for t in threads:
    t.join(10)
print(sorted(found.items()))
"""


def test_two_calls_that_use_each_others_tensors():
    """Calls on two threads may exchange tensors that are still to come, without a deadlock."""
    ran = subprocess.run(
        [sys.executable, "-c", CROSSED], capture_output=True, text=True, timeout=4 * TIMEOUT, check=False
    )
    assert ran.stdout.strip() == "[(0, 6.0), (1, 6.0)]", ran.stderr[-2000:]


def test_a_tensor_outlives_its_thread():
    """A lazy tensor made on a thread that has ended is read, and gives the hooks free, on another."""
    before = holders()
    box = []

    @coexec.function
    def step(x):
        y = x * 3.0
        box.append(y)
        return tf.reduce_sum(y)

    in_thread(lambda: [step(X) for _ in range(4)])
    assert step.stats().followed == 3
    assert [type(y) is LazyTensor for y in box] == [False, True, True, True]
    for y in box:
        np.testing.assert_array_equal((y + 1.0).numpy(), X.numpy() * 3.0 + 1.0)
    assert intercept.installed()
    box.clear()
    del y
    assert_quiet(before)


# Operations of another thread that C++ hands the variable to, and reads it past the hooks, or that Python reads it for.
READING = {
    "a product": lambda x, w: x * w,
    "the other way": lambda x, w: w * x,
    "a matrix product": lambda x, w: x @ w,
    "a function of it": lambda x, w: tf.tanh(w),
    "a sum": lambda x, w: tf.reduce_sum(w),
    "a list": lambda x, w: tf.concat([x, w], 0),
    "a list of lists": lambda x, w: tf.stack([[x, w], [w, x]]),
    "rows": lambda x, w: tf.gather(w, [1]),
    "a slice": lambda x, w: w[0],
    "by name": lambda x, w: tf.raw_ops.Mul(x=x, y=w),
    "by TensorFlow's slow path": lambda x, w: tf.squeeze(w[tf.newaxis], np.array([0])) * np.float32(2.0),
    "its value": lambda x, w: w.value(),
    "a number": lambda x, w: tf.constant(float(w[0, 1])),
    "a gradient": lambda x, w: gradient_of(x, w),
    "a graph function": tf.function(lambda x, w: x * w),
}


def gradient_of(x, w):
    with tf.GradientTape() as tape:
        y = x * w * w
    return tape.gradient(y, w)


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"batching": True}], ids=str)
@pytest.mark.parametrize("name", READING)
def test_what_another_thread_reads(name, options):
    """It finds what the step has assigned before, which waits for the thread."""

    def make(decorate):
        w = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

        @decorate
        def step(x):
            w.assign_add(x)
            seen = in_thread(lambda: READING[name](x, w))
            w.assign_sub(x * 0.5)
            return seen, w + 0.0

        return step

    calls = [(X * float(n),) for n in range(8)]
    step = run_both(make, calls, **options)
    assert step.stats().followed >= 3, step.explain()
