"""Calls of graph functions: what they are made of is followed, where they only compute."""

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.snapshots import assert_same, snapshot


@pytest.fixture(params=["graph", "xla"])
def backend(request):
    return request.param


def same(make, backend, launches, calls=6):
    """Both ways of a program give the same; `launches` is how many a followed call takes at most."""
    expected_step, expected_state = make()
    found_step, found_state = make()
    fn = coexec.function(found_step, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for number in range(calls):
            before = fn.stats().launches
            x = tf.constant([1.0, -2.0, 3.0]) * (0.5 + number % 3) * (-1.0) ** number
            results = []
            for each, state in ((expected_step, expected_state), (fn, found_state)):
                try:
                    results.append(snapshot((each(x), state())))
                except Exception as error:
                    results.append(snapshot((type(error), state())))  # messages tell where a function was traced
            # Of the derivative of `tanh`, eager and XLA round off up to 6.5e-7 each before TensorFlow 2.20.
            atol = 2e-6 if tf.__version__.startswith(("2.18.", "2.19.")) else 1e-6
            assert_same(*results, rtol=1e-5, atol=atol, path=f"call {number}: ")
        if launches is not None:
            assert 0 < fn.stats().launches - before <= launches, fn.explain()
    return fn


def nothing():
    return None


def computing():
    @tf.function
    def inner(a, b):
        return tf.tanh(a) + b, tf.reduce_sum(a * b)

    def step(x):
        y, z = inner(x * 2.0, x)
        return inner(y, x + z)

    return step, nothing


def reading_a_variable():
    weight = tf.Variable([1.0, 2.0, 3.0])

    @tf.function
    def inner(a):
        return a * weight

    def step(x):
        y = inner(x)
        weight.assign_add(x)
        return inner(y) + 1.0

    return step, lambda: weight


def conditions_and_loops():
    @tf.function
    def inner(a):
        if tf.reduce_sum(a) > 0:
            a = a * 2.0
        else:
            a = a - 1.0
        turns = 0
        while tf.reduce_max(tf.abs(a)) < 50.0:
            a = a * 1.5
            turns += 1
        return a, turns

    def step(x):
        y, turns = inner(x + 1.0)
        return y * 2.0, turns

    return step, nothing


def functions_of_tensorflow():
    @tf.function
    def inner(a):
        scanned = tf.while_loop(lambda i, v: i < 4, lambda i, v: (i + 1, v * 0.5), [tf.constant(0), a])[1]
        return tf.cond(a[0] > 0, lambda: scanned, lambda: -scanned)

    def step(x):
        return inner(x) + inner(x * 2.0)

    return step, nothing


def gradients():
    weight = tf.Variable([1.0, 2.0, 3.0])

    @tf.function
    def inner(a):
        return tf.reduce_sum(tf.tanh(a * weight))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = inner(x) * inner(x + 1.0)
        grads = tape.gradient(y, [weight, x])
        weight.assign_sub(0.125 * grads[0])
        return y, grads

    return step, lambda: weight


@pytest.mark.parametrize(
    ("make", "launches"),
    [(computing, 1), (reading_a_variable, 1), (conditions_and_loops, 1), (functions_of_tensorflow, 1), (gradients, 1)],
)
def test_functions_are_followed(make, launches, backend):
    """Their operations are part of the launches around them."""
    same(make, backend, launches)


def assigning():
    total = tf.Variable([0.0, 0.0, 0.0])

    @tf.function
    def inner(a):
        total.assign_add(a)
        return total * 2.0

    def step(x):
        return inner(x) + inner(x * 0.5)

    return step, lambda: total


def failing():
    @tf.function
    def inner(a):
        tf.debugging.assert_less(a[0], 2.0)
        return a * 2.0

    def step(x):
        return inner(x) + 1.0

    return step, nothing


def out_of_range():
    @tf.function
    def inner(a):
        return tf.gather([1.0, 2.0], tf.cast(tf.abs(a), tf.int32))

    def step(x):
        return inner(x * 0.5) * 2.0

    return step, nothing


def caught():
    @tf.function
    def inner(a):
        return tf.gather([1.0, 2.0], tf.cast(tf.abs(a), tf.int32))

    log = []

    def step(x):
        y = x + 1.0
        try:
            y = y + inner(x * 0.5)
        except tf.errors.InvalidArgumentError:
            log.append(float(x[0]))
        return y * 2.0

    return step, lambda: list(log)


def printing():
    log = []

    @tf.function
    def inner(a):
        tf.py_function(lambda v: log.append(float(v)), [a[0]], [])
        return a + 1.0

    def step(x):
        return inner(x) * 2.0

    return step, lambda: list(log)


def made_in_each_call():
    def step(x):
        inner = tf.function(lambda a: a * 3.0)
        return inner(x) + 1.0

    return step, nothing


@pytest.mark.parametrize("make", [assigning, failing, out_of_range, caught, printing, made_in_each_call])
def test_what_does_more_than_compute_runs_on_its_own(make, backend):
    """State, errors and Python's effects are eager's."""
    same(make, backend, None)


def test_the_option_leaves_functions_alone():
    """They are called as they are then, and not taken apart."""
    step, _ = computing()
    fn = coexec.function(step, control_flow=False)
    for _ in range(3):
        fn(tf.constant([1.0, 2.0, 3.0]))
    assert "PartitionedCall" not in str(fn.trace_graph)
    assert "__inference_inner" in str(fn.trace_graph)
