"""Failures and interrupts amid `finally`, `with`, generators and shared generators of numbers: all as eagerly."""

import contextlib
import functools
import sys

import keras
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import in_threads, run_both
from tests.snapshots import assert_same, snapshot

GOOD, BAD = tf.constant([0, 1, 2, 0]), tf.constant([0, 1, 7, 0])
CALLS = [(i, n) for n, i in enumerate([GOOD, GOOD, GOOD, BAD, GOOD, BAD, GOOD, GOOD, BAD, GOOD])]


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def step_in_finally(v, log, i, n):
    try:
        x = tf.gather(v, i)
        try:
            y = tf.reduce_sum(x) * 2.0
        finally:
            v.assign_add([0.5, 0.25, 0.125])
            log.append(n)
    finally:
        log.append("outer")
        v.assign_sub([0.1, 0.1, 0.1])
    return y


def step_fails_in_finally(v, log, i, n):
    try:
        if n % 4 == 2:
            raise KeyError(n)
        y = tf.reduce_sum(v)
    except KeyError as error:
        log.append(str(error))
        y = v[0]
    finally:
        y = y + tf.reduce_sum(tf.gather(v, i))
        v.assign_add([1.0, 0.0, 1.0])
    return y


def step_returns_in_finally(v, log, i, n):
    try:
        v.assign_add(tf.gather(v, i)[:3])
        return tf.reduce_sum(v)
    except tf.errors.InvalidArgumentError as error:
        log.append(type(error).__name__)
        raise ValueError(n) from error
    finally:
        if n % 2:
            return v[1]  # noqa: B012


def step_in_exit(v, log, i, n):
    @contextlib.contextmanager
    def scope():
        v.assign_add([1.0, 1.0, 1.0])
        try:
            yield tf.reduce_max(v)
        except tf.errors.OpError as error:
            log.append(type(error).__name__)
        finally:
            v.assign(v * 0.5)

    with scope() as most, contextlib.ExitStack() as stack:
        stack.callback(lambda: v.assign_add([0.0, 0.0, 0.25]))
        x = tf.gather(v, i)
        log.append(float(most))
        v.assign_add(x[:3] * 0.01)
    return tf.reduce_sum(v)


def step_with_generator(v, log, i, n):
    def stream():
        try:
            for k in range(3):
                tf.debugging.assert_less(i, 5, f"turn {k}")
                yield tf.gather(v, i)[k] * (k + 1.0)
        except GeneratorExit:
            log.append("closed")
            raise
        finally:
            v.assign_add([0.5, 0.5, 0.5])

    total = tf.constant(0.0)
    for k, part in enumerate(stream()):
        total += part
        if k == n % 3:
            break
    return total


def step_interrupted(v, log, i, n):
    v.assign_add([1.0, 2.0, 3.0])
    x = tf.reduce_sum(v) * 0.1
    try:
        if n % 3 == 1:
            raise KeyboardInterrupt
        v.assign_sub(tf.gather(v, i)[1:] * 0.1)
    finally:
        log.append(n)
        v.assign_add(tf.stack([x, x, x]))
    return x


def step_makes_late(v, log, i, n):
    late = log[0] if log else None
    if late is None:
        late = tf.Variable(tf.gather(v, i) * 0.5)
        log.append(late)
    late.assign_add(tf.gather(v, i))
    if n == 6:
        log[0] = tf.Variable(late[:1] * 2.0, shape=tf.TensorShape(None))
        late = log[0]
        late.assign(tf.ones([4]))
    return tf.reduce_sum(late) + tf.reduce_sum(v)


STEPS = [step_in_finally, step_fails_in_finally, step_returns_in_finally, step_in_exit, step_with_generator,
         step_interrupted, step_makes_late]  # fmt: skip


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_frames(step, jit):
    """Results, errors, what was logged and the variable are eager's after each call."""

    def make(decorate):
        v, log = tf.Variable([1.0, 2.0, 3.0]), []
        inner = decorate(lambda i, n: step(v, log, i, n))

        def call(i, n):
            try:
                result = "returned", snapshot(inner(i, n))
            except BaseException as error:
                result = "raised", snapshot(error.with_traceback(None))
            return result, snapshot((v, list(log)))

        call.inner = inner
        return call

    made = run_both(make, CALLS, jit_compile=jit)
    assert made.inner.stats().followed >= 4
    assert made.inner.stats().launches > 0


@pytest.mark.parametrize("jit", [False, True])
def test_generators_shared_by_functions(jit):
    """Two functions and the caller draw from one generator, and one of Keras' seeds, in turns, across divergences."""

    def make(decorate):
        generator, seeds = tf.random.Generator.from_seed(1), keras.random.SeedGenerator(2)
        drawn = []

        @decorate
        def first(n):
            x = generator.uniform([3]) + keras.random.uniform((3,), seed=seeds)
            if n % 4 == 3:
                drawn.append(float(generator.normal([])))
            return x + second(n)

        @decorate
        def second(n):
            if n % 3 == 2:
                generator.skip(5)
            return keras.random.uniform((3,), seed=seeds) * generator.uniform([3], maxval=n + 1.0)

        def call(n):
            result = first(n), second(n), generator.uniform([2])
            if n == 5:
                generator.reset_from_seed(9)
            return result, keras.random.uniform((2,), seed=seeds), generator.state, seeds.state, list(drawn)

        call.inner = first
        return call

    made = run_both(make, [(n,) for n in range(12)], jit_compile=jit)
    assert made.inner.stats().followed >= 4


@pytest.mark.parametrize("jit", [False, True])
def test_what_tensorflow_prints_stands_where_it_was_printed(jit, capfd):
    """Among lines of Python's own, which say what they have read."""

    def make(decorate):
        v = tf.Variable([1.0, 2.0, 3.0])

        @decorate
        def step(i, n):
            print("before", n, file=sys.stderr, flush=True)
            tf.print("the sum", tf.reduce_sum(v))
            print("between", flush=True, file=sys.stderr)
            v.assign_add(tf.gather(v, i)[:3] * 0.5)
            tf.print("and behind", v, i)
            if n % 3:
                print("read", float(v[0]), file=sys.stderr, flush=True)
            return v[1]

        def call(i, n):
            try:
                result = snapshot(step(i, n))
            except tf.errors.OpError as error:
                result = snapshot(error.with_traceback(None))
            told = capfd.readouterr().err
            return result, told.splitlines()

        call.inner = step
        return call

    made = run_both(make, CALLS, jit_compile=jit)
    assert made.inner.stats().followed >= 4


def test_tapes_on_threads_while_another_function_is_compiled():
    """Each thread's tape hears of its own operations, on one variable that none of them writes."""
    v = tf.Variable([1.0, 2.0, 3.0])
    busy = coexec.function(lambda x: tf.reduce_sum(functools.reduce(lambda a, _: tf.tanh(a @ a), range(30), x)),
                           jit_compile=True)  # fmt: skip

    def trained(number):
        @coexec.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(v * x) * number)
                if number == 2:
                    loss = loss + float(tf.reduce_max(x))
            return loss, tape.gradient(loss, v)

        # Where tanh is nearly 1, its last digit, another under XLA, is a hundredth of the gradient.
        found = [step(tf.constant([0.01, 0.02, 0.03]) * k) for k in range(12)]
        assert step.stats().followed >= 8
        return snapshot(found)

    def compiled(number):
        return [busy(tf.eye(4 + k) * 0.5).numpy() for k in range(6)]

    expected = [trained(n) for n in (1, 2)]
    found = in_threads(lambda: trained(1), lambda: compiled(0), lambda: trained(2))
    assert_same(expected[0], found[0], rtol=1e-5)
    assert_same(expected[1], found[2], rtol=1e-5)
