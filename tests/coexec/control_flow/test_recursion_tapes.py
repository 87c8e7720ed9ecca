"""Functions that call themselves on the device, and tapes that ask more of them, or what stays with Python."""

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_control_flow import outcome, same, scalars
from tests.coexec.control_flow.test_recursion_gradients import (
    LEFT,
    NUMBERS,
    RIGHT,
    SCALE,
    WEIGHT,
    WORDS,
    fib,
    gradient,
    shared,
    tree,
)
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage"), pytest.mark.slow]

NEXT = tf.constant([1, 2, 200, 50])


# What asks otherwise.


def twice(x):
    with tf.GradientTape() as first:
        first.watch(x)
        with tf.GradientTape() as second:
            second.watch(x)
            y = shared(x) + fib(x) * x
        slope = second.gradient(y, x)
    return y, slope, first.gradient(slope, [x, SCALE])


def persistently(x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        z = x * 1.5
        y = shared(z)
        w = fib(z) * y
    return tape.gradient(w, x), tape.gradient(y, [z, SCALE]), tape.gradient(w, [y, z])


def jacobians(x):
    v = tf.stack([x, x * 0.5, x + 1.0])

    def down(value, times):
        return value if times < 1.0 else down(value * SCALE + tf.sin(value), times - 1.0)

    with tf.GradientTape(persistent=True) as tape:
        tape.watch(v)
        y = down(v, x)
    return tape.jacobian(y, v), tape.jacobian(y, SCALE)


def two_tapes(x):
    with tf.GradientTape() as one, tf.GradientTape(watch_accessed_variables=False) as other:
        one.watch(x)
        other.watch(x)
        y = shared(x)
    return one.gradient(y, [x, SCALE]), other.gradient(y, [x, SCALE])


def stopped(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tape.stop_recording():
            y = shared(x)
        y = y * x
    return y, tape.gradient(y, [x, SCALE])


def in_two_parts(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = shared(x)
        y = tree(tf.cast(tf.abs(x), tf.int32) % 5) * y
        y = tf.reduce_sum(y * y)
    return y, tape.gradient(y, [x, SCALE, WEIGHT], unconnected_gradients="zero")


def of_a_custom_gradient(x):
    @tf.custom_gradient
    def clipped(v):
        return v, lambda back: tf.clip_by_value(back, -0.5, 0.5)

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = clipped(shared(clipped(x)))
    return y, tape.gradient(y, [x, SCALE])


OTHERWISE = [twice, persistently, jacobians, two_tapes, stopped, in_two_parts, of_a_custom_gradient]


@pytest.mark.parametrize("function", OTHERWISE, ids=lambda f: f.__name__)
def test_tapes_that_ask_otherwise(function, backend):
    """Get what they ask for: where need be, the calls once more, one by one."""
    same(function, NUMBERS[:8] * 2, backend)


def test_a_tape_that_outlives_the_call(backend):
    """May be asked behind it."""

    def function(x):
        tape = tf.GradientTape(persistent=True)
        with tape:
            tape.watch(x)
            y = shared(x)
        return tape, y

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for (x,) in NUMBERS * 2:
            found = []
            for each in (function, fn):
                tape, y = each(x)
                found.append(snapshot((y, tape.gradient(y, [x, SCALE]), tape.gradient(y * y, x))))
            assert_same(*found, rtol=1e-5, atol=1e-6)
    assert fn.stats().decisions_on_device > 0, fn.explain()


def test_tapes_of_others_are_pythons(backend):
    """And so are accumulators."""
    fn = coexec.function(shared, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for (x,) in NUMBERS:
            found = []
            for each in (shared, fn):
                with tf.GradientTape() as tape, tf.autodiff.ForwardAccumulator(x, tf.ones([])) as accumulator:
                    tape.watch(x)
                    y = each(x)
                found.append(snapshot((y, tape.gradient(y, [x, SCALE]), accumulator.jvp(y))))
            assert_same(*found, rtol=1e-5, atol=1e-6)
    assert fn.stats().decisions_on_device == 0, fn.explain()


# What stays with Python.


TABLE = tf.Variable([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0], [1.5, 1.0], [0.25, 0.5], [1.0, 1.0], [0.0, 1.0], [3.0, 2.0],
                     [1.0, -2.0]])  # fmt: skip


def looked_up(i):
    if LEFT[i] < 0:
        leaf = tf.gather(TABLE, i)
        return leaf
    return tf.tanh(looked_up(LEFT[i]) + looked_up(RIGHT[i]))


def rows_of_a_table(x):
    y = tf.reduce_sum(looked_up(tf.cast(tf.abs(x), tf.int32) % 7))
    return y


def looping(v, times):
    if times < 1.0:
        return v
    w = looping(v * 0.5, times - 1.0)
    while w < 10.0:
        w = w * 1.5 + 1.0
    return w


def a_loop_in_it(x):
    y = looping(x, x)
    return y


def same_tensor(v):
    if v < 1.0:
        leaf_0, leaf_1 = v, v
        return leaf_0, leaf_1
    a, b = same_tensor(v - 1.0)
    c = a * SCALE + b
    return c, c * 2.0


def one_result_of_another(x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        a, b = same_tensor(x)
    return tape.gradient(b, [a, x, SCALE]), tape.gradient(a, [b, x, SCALE])


STAYING = [gradient(rows_of_a_table, TABLE), gradient(a_loop_in_it, SCALE), one_result_of_another]


@pytest.mark.parametrize("function", STAYING, ids=lambda f: f.__name__)
def test_what_has_another_gradient_is_pythons(function, backend):
    """With the reason."""
    fn = same(function, NUMBERS, backend, on_device=function.__name__ == "a_loop_in_it")
    assert "under a tape: " in fn.explain(), fn.explain()


def test_what_nobody_reads_is_a_result_still(backend):
    """The program could ask for its gradient, so Python decides where another result is computed from it."""

    def memory(i):
        if LEFT[i] < 0:
            leaf_0, leaf_1 = tf.tanh(WORDS[i] * SCALE), WORDS[i] * SCALE
            return leaf_0, leaf_1
        h, c = memory(LEFT[i])
        g, d = memory(RIGHT[i])
        now = tf.sigmoid(tf.linalg.matvec(WEIGHT, h) + g) * c + d
        return tf.tanh(now) * h, now

    def step(x):
        with tf.GradientTape() as tape:
            h, c = memory(tf.cast(tf.abs(x), tf.int32) % 7)  # noqa: RUF059
            loss = tf.reduce_sum(h * h)
        return loss, tape.gradient(loss, [WEIGHT, SCALE])

    same(step, NUMBERS, backend, on_device=False)


def test_too_deep_under_a_tape(backend, monkeypatch):
    """Python does it, which goes as deep as ever."""

    def forever(v):
        if v > 1e9:
            return v
        return forever(v + 1.0) * SCALE + forever(v * 0.5)

    def function(x, ends):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fib(x) if ends else forever(x)
        return y, tape.gradient(y, x)

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for x, ends in ((3.0, True), (3.0, False), (5.0, True)) * 3:
            if ends:
                assert_same(snapshot(function(tf.constant(x), True)), snapshot(fn(tf.constant(x), True)))
            else:
                with pytest.raises(RecursionError):
                    fn(tf.constant(x), False)
    assert fn.stats().decisions_on_device > 0, fn.explain()


def test_as_deep_as_python_goes_under_a_tape(backend, tune):
    """On the device; where there is less room than calls, in Python; and once more where a tape asks otherwise."""
    inputs = scalars(0.5, 150.5, 3.5, 100.5, 0.5, 170.5)
    same(gradient(shared, SCALE), inputs, backend)
    same(twice_shared, inputs, backend)
    tune(max_recursion=120)
    fn = same(gradient(shared, SCALE), inputs, backend)
    assert fn.stats().decisions > 150, "Python has asked at each call"


def twice_shared(x):
    with tf.GradientTape() as first:
        first.watch(x)
        with tf.GradientTape() as second:
            second.watch(x)
            y = shared(x)
        slope = second.gradient(y, x)
    return first.gradient(slope, x)


def test_an_index_that_is_not_there_under_a_tape(backend):
    """Is found out by Python, with eager's error; nothing is left of the try."""

    def walked(i, v):
        if i > 100:
            return v
        return walked(tf.gather(NEXT, i), v * SCALE)

    step = gradient(lambda x: walked(tf.cast(x, tf.int32), x), SCALE)
    inputs = scalars(0, 1, 2, 1, 0, 3, 0, 1, 3, 2)
    fn = coexec.function(step, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for args in inputs:
            one, other = outcome(step, args), outcome(fn, args)
            assert type(one) is type(other)
            if not isinstance(one, Exception):
                assert_same(snapshot(one), snapshot(other), rtol=1e-5, atol=1e-6)
    assert fn.stats().decisions_on_device > 0, fn.explain()


def test_training_over_trees(backend):
    """Step by step, variables and losses are eager's."""
    optimizers = [tf.keras.optimizers.Adam(0.01) for _ in range(2)]
    weights = [tf.Variable([[0.5, 0.25], [-0.5, 1.0]]) for _ in range(2)]

    def trained(number):
        optimizer, weight = optimizers[number], weights[number]

        def node(i):
            if LEFT[i] < 0:
                leaf = WORDS[i]
                return leaf
            return tf.tanh(tf.linalg.matvec(weight, node(LEFT[i])) + node(RIGHT[i]))

        def step(i):
            with tf.GradientTape() as tape:
                h = node(i)
                loss = tf.reduce_sum((h - 0.5) ** 2)
            grads = tape.gradient(loss, [weight])
            if grads[0] is not None:
                optimizer.apply_gradients(zip(grads, [weight], strict=True))
            return loss

        return step

    plain, fn = trained(0), coexec.function(trained(1), jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for i in [0, 1, 3, 0, 7, 0, 3, 1, 0, 2, 0, 0]:
            assert_same(snapshot(plain(tf.constant(i))), snapshot(fn(tf.constant(i))), rtol=1e-4, atol=1e-5)
    assert_same(snapshot(weights[0].numpy()), snapshot(weights[1].numpy()), rtol=1e-4, atol=1e-5)
    assert fn.stats().decisions_on_device > 6, fn.explain()
