"""Gradients through loops on the device, where something else goes on: dtypes, other tapes, not enough room."""

import gc

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_control_flow import TRIPS, same, scalars
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot
from tracer.lazy import LazyTensor
from tracer.private import context

pytestmark = [
    needs_places,
    pytest.mark.usefixtures("eager_to_stage"),
]


def grown(x):
    w = tf.constant(1.5)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        y, z, turns = x * 1.0, tf.stack([x, -x]), 0
        while y < 100.0:
            y, z = y + w + tf.reduce_mean(z * z) * 1e-3, z * 0.75 + w
            turns += 1
        loss = y * tf.reduce_sum(z)
    return loss, turns, tape.gradient(loss, [x, w]), tape.gradient(z, [x, w, y])


def left_by_chance(x):
    w = tf.constant(1.5)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = x * 1.0
        for k in range(80):
            if y > 60.0:
                break
            y = y + w + k
    return y, k, tape.gradient(y, [x, w])


@pytest.mark.slow
@pytest.mark.sample("graph-268435456-grown", "xla-40-grown", "graph-40-left_by_chance")
@pytest.mark.parametrize("function", [grown, left_by_chance], ids=lambda f: f.__name__)
@pytest.mark.parametrize("most", [1 << 28, 40])
def test_not_enough_room(function, most, backend, tune):
    """Python takes a turn where it is full; there is more another time, as long as that is not too much."""
    tune(min_turn_room=2)
    tune(max_turn_bytes=most)
    same(function, TRIPS, backend)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.complex64], ids=lambda d: d.name)
def test_dtypes(dtype, backend):
    """Each has gradients of its own dtype; integers and bools go beside."""

    def function(x):
        w = tf.cast(1.0625, dtype)
        x = tf.cast(x, dtype)
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y, n, odd = x * 1.0, tf.constant(3, tf.int64), tf.constant(False)
            while tf.math.real(y) < 100.0:
                if odd:
                    y = y * w + 2.0
                else:
                    y = y + w * 8.0
                n, odd = n + 2, tf.logical_not(odd)
        return y, n, odd, tape.gradient(y, [x, w])

    expected = [snapshot(function(x)) for (x,) in TRIPS]
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    rough = {tf.float16: 2e-2, tf.bfloat16: 1e-1}.get(dtype, 1e-5)
    with testing.compile_everything():
        for (x,), eager in zip(TRIPS, expected, strict=True):
            assert_same(eager, snapshot(fn(x)), rtol=rough, atol=rough)
    assert fn.stats().decisions_on_device > 0, fn.explain()


def test_complex_branches(backend):
    """Tapes watch complex numbers, too."""

    def function(x):
        z = tf.complex(x, x * 0.5)
        with tf.GradientTape() as tape:
            tape.watch(z)
            w = z * 1.0
            if x > 50.0:
                w = w * w
            else:
                w = w * tf.complex(2.0, 1.0)
            w = w + 1.0
        return w, tape.gradient(w, z)

    same(function, TRIPS, backend)


def test_a_tape_outside(backend):
    """The caller's tape sees every turn."""
    w = tf.Variable(1.05)

    def function(y):
        while y < 100.0:
            y = y * w + 5.0
        return y * 2.0

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    for (x,) in TRIPS:
        grads = []
        for each in (function, fn):
            with tf.GradientTape() as tape:
                y = each(x)
            grads.append(snapshot(tape.gradient(y, w)))
        assert_same(*grads, rtol=1e-5, atol=1e-6)


def test_a_tape_that_is_asked_later(backend):
    """When the call is over."""
    w = tf.Variable(1.05)

    def function(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x * 1.0
            while y < 100.0:
                y = y * w + 5.0
            z = y + x
        return tape, y, z

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    for (x,) in TRIPS:
        found = []
        for each in (function, fn):
            tape, y, z = each(x)
            found.append([snapshot(tape.gradient(t, s)) for t in (y, z) for s in (x, w, y, [x, w])])
        assert_same(snapshot(found[0]), snapshot(found[1]), rtol=1e-5, atol=1e-6)
    assert fn.stats().decisions_on_device > 0


def squares_or_sines(w):
    if w[0] > 3.0:
        w = w * w
    else:
        w = tf.sin(w) * 3.0
    return w


def growing(w):
    while tf.reduce_max(w) < 100.0:
        if tf.reduce_sum(w) > 30.0:
            w = w * 1.5 + tf.sin(w)
        else:
            w = w + 20.0 + w * w * 0.01
    return w


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deciding", "inputs"), [(squares_or_sines, scalars(1, -1, 7, -3, 6, 0)), (growing, scalars(10, 20, 3, 70, 30, 5))]
)
def test_a_jacobian(deciding, inputs, backend):
    """Which traces what it asks of each element, through branches and loops."""

    def function(x):
        v = tf.stack([x, x * 2.0, -x])
        with tf.GradientTape() as tape:
            tape.watch(v)
            w = deciding(v * 1.0) * 2.0
        return tape.jacobian(w, v)

    same(function, inputs, backend)


def test_a_gradient_inside_another_tape(backend):
    """A penalty on a gradient."""
    w = tf.Variable(1.25)

    def function(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = x * 1.0
                while y < 100.0:
                    y = y * w + tf.tanh(y) + 1.0
            g = inner.gradient(y, x)
            loss = y * y + tf.square(g - 1.0)
        return loss, outer.gradient(loss, w)

    same(function, TRIPS, backend)


def test_an_accumulator_sees_every_turn(backend):
    """Forward mode is Python's."""

    def function(x):
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
            y = x * 1.0
            while y < 100.0:
                y = y * 1.25 + 5.0
        return y, accumulator.jvp(y)

    same(function, TRIPS, backend, on_device=False)


def test_what_python_must_see(backend):
    """Turns that print, or fail, are Python's; the gradient goes through both kinds."""
    log = []

    def function(x):
        table = tf.constant([5.0, 6.0, 7.0, 8.0, 9.0, 5.0, 4.0, 3.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, n = x * 1.0, tf.constant(0)
            while y < 150.0:
                y = y * 1.125 + tf.gather(table, n)
                n = n + 1
                if y > 120.0:
                    log.append("high")
        return y, n, tape.gradient(y, x)

    inputs = scalars(0, 95, 20, 60, 30, 60, 20, -100, 40, -90, 60, 0)
    same(function, inputs, backend, lambda: list(log), reset=log.clear)


def test_one_tensor_in_two_places(backend):
    """Each of them has a gradient of its own, which are added up once."""

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            a, b = x, x
            while a < 100.0:
                a, b = a * 1.25 + b * 0.1 + x * 0.2 + 1.0, b + x * 0.5
            a = a * 1.0
        return tape.gradient(a, x)

    same(function, TRIPS, backend)


@pytest.mark.slow
@pytest.mark.sample("graph-0", "graph-9", "graph-15", "xla-3", "xla-21")
@pytest.mark.parametrize("event", range(0, 24, 3))
def test_divergences_around(event, backend):
    """Wherever following ends, the tape knows all."""
    function = grown
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    values = scalars(0, 30, 90, 60)
    with testing.compile_everything():
        for (x,) in values * 2:
            fn(x)
        with testing.diverge_at(event):
            for (x,) in values:
                assert_same(snapshot(function(x)), snapshot(fn(x)), rtol=1e-5, atol=1e-6)
        for (x,) in values:
            assert_same(snapshot(function(x)), snapshot(fn(x)), rtol=1e-5, atol=1e-6)
    assert fn.stats().decisions_on_device > 0


@pytest.mark.distrusting
def test_what_is_compiled_is_compared(backend):
    """What is saved beside the turns is the same, too."""
    fn = coexec.function(grown, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for (x,) in TRIPS * 2:
            assert_same(snapshot(grown(x)), snapshot(fn(x)), rtol=1e-5, atol=1e-6)
    stats = fn.stats()
    assert stats.validated > 0
    assert stats.decisions_on_device > 0
    assert "differ" not in fn.explain()


def test_second_results_of_a_chain(backend):
    """Loops behind each other, and a gradient through all of them at once."""

    def function(x):
        w = tf.constant([[0.5, 0.25], [0.125, 0.5]])
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            h, y = tf.ones([1, 2]) * x * 0.1, x * 1.0
            while tf.reduce_sum(h) < 30.0:
                h = tf.matmul(h, w) + 2.0 + h * 0.5
            while y < 100.0:
                y = y + tf.reduce_sum(h * h) * 0.05 + 1.0
            loss = y + tf.reduce_sum(h)
        return loss, tape.gradient(loss, [x, w])

    same(function, TRIPS, backend)


def test_nothing_of_the_writing_down_is_left(backend):
    """TensorFlow's gradient functions keep tensors: those without values are not for others."""

    def function(x):
        v = tf.stack([x, x + 1.0])
        with tf.GradientTape() as tape:
            tape.watch(v)
            w = v * 1.0
            if x > 50.0:
                w = w * tf.reduce_sum(w)
            else:
                w = w * 3.0 + tf.reduce_sum(w)
            while tf.reduce_sum(w) < 100.0:
                w = w * 1.25 + tf.reduce_max(w) + 1.0
        return tape.gradient(w, v)

    context.context().ones_rank_cache().flush()
    fn = same(function, TRIPS, backend)
    del fn
    gc.collect()
    caches = context.context().ones_rank_cache(), context.context().zeros_cache()
    assert not any(type(kept) is LazyTensor for cache in caches for kept in cache._data.values())
    function(*TRIPS[0])


# Ranges.


def leaves_first(x):
    w = tf.constant(1.25)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y, k = x * 1.0, -1
        for k in range(7):
            if y > 50.0:
                break
            y = y * w + k
    return y, k, tape.gradient(y, [x, w])


def leaves_last(x):
    w = tf.constant(1.25)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = x * 1.0
        for _ in range(2, 30, 3):
            y = y * w + 1.0
            if y > 50.0:
                break
    return y, tape.gradient(y, [x, w])


def leaves_between(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, turns = x * 1.0, 0
        for k in range(9, 0, -1):
            y = y + x * 0.25 + k
            if y > 60.0:
                break
            y = y * 1.25
            turns += 1
    return y, k, turns, tape.gradient(y, x)


@pytest.mark.parametrize("function", [leaves_first, leaves_last, leaves_between], ids=lambda f: f.__name__)
def test_ranges(function, backend):
    """That an `if` on a tensor leaves, or that come to their end."""
    same(function, TRIPS, backend)
