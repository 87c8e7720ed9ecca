"""Gradients through branches on the device: eager's, and none where eager has none."""

import pytest
import tensorflow as tf

import coexec
from tests.coexec.control_flow.test_branches import INPUTS
from tests.coexec.control_flow.test_control_flow import same
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]


def both_ways(x):
    w = tf.constant(1.5)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        h = x * w
        if h > 3.0:
            y = tf.tanh(h) * h
        else:
            y = h * h - 1.0
        z = y * x
    return z, tape.gradient(z, [x, w])


def nested(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * 2.0
        if y > 0.0:
            if y > 8.0:
                y = tf.sin(y)
            else:
                y = y * y
        else:
            y = tf.exp(y)
        z = tf.reduce_sum(y * 3.0)
    return tape.gradient(z, x)


def two_results(x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        a, b = x * 2.0, x * 3.0
        if x > 0.0:
            a, b = a * a, b * 2.0
        else:
            a, b = a * 5.0, tf.exp(b)
        c = a + 1.0
    return tape.gradient(a, x), tape.gradient(b, x), tape.gradient(c, [x, b]), tape.gradient([a, b], x)


def second_order(x):
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = x * 1.0
            if x > 0.0:
                y = y * y * y
            else:
                y = tf.sin(y) * y
            y = y * 1.0
        g = inner.gradient(y, x)
    return y, g, outer.gradient(g, x)


def costly(x):
    w = tf.eye(6) * 0.5 + 0.1
    with tf.GradientTape() as tape:
        tape.watch(w)
        m = w * (x * 0.125)
        if x > 0.0:
            m = tf.matmul(tf.tanh(tf.matmul(m, m)), m) + tf.matmul(m, m)
            m = tf.tanh(m) * 2.0 + tf.sin(m) - tf.cos(m) + tf.exp(-m)
        else:
            m = tf.matmul(m, m) - tf.nn.softplus(m)
        loss = tf.reduce_sum(m)
    return tape.gradient(loss, w)


@pytest.mark.parametrize("function", [both_ways, nested, two_results, second_order, costly], ids=lambda f: f.__name__)
def test_gradients_through_branches(function, backend):
    """Of both ways, of each result, of higher order."""
    same(function, INPUTS, backend)


def test_variables(backend):
    """Which tapes watch as they are read."""
    weight = tf.Variable(1.5)

    def function(x):
        with tf.GradientTape() as tape:
            if x > 3.0:
                y = x * weight
            else:
                y = tf.sin(weight) - x
            loss = y * y
        grad = tape.gradient(loss, weight)
        weight.assign_sub(0.01 * grad)
        return loss, grad, tape.watched_variables()

    same(function, INPUTS, backend, lambda: weight, reset=lambda: weight.assign(1.5))


def one_way_only(x):
    w = tf.constant(1.5)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = x * 1.0
        if x > 3.0:
            y = y * w
        y = y * 1.0
    return y, tape.gradient(y, [x, w])


def stopped_in_one_way(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * 1.0
        if x > 3.0:
            y = tf.stop_gradient(y) * 2.0
        else:
            y = y * 3.0
        y = y * 1.0
    return y, tape.gradient(y, x)


def one_of_another(x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        a, b = x * 2.0, x * 3.0
        if x > 0.0:
            b = b * b
            a = a * b
        else:
            b = b * 0.5
            a = a - b
        a = a * 1.0
    return tape.gradient(a, b), tape.gradient(a, x), tape.gradient(b, x)


def test_a_result_of_another_is_pythons_to_see(backend):
    """A program may ask for the gradient of one result for another that it was computed from."""
    fn = same(one_of_another, INPUTS, backend, on_device=False)
    assert "it computes one result from another" in fn.explain()


@pytest.mark.parametrize("function", [one_way_only, stopped_in_one_way], ids=lambda f: f.__name__)
def test_a_gradient_of_one_way_only_is_pythons_to_see(function, backend):
    """There is none on the other way, and not a zero."""
    fn = same(function, INPUTS, backend, on_device=False)
    assert "one way has a gradient where the other has none" in fn.explain()


def test_a_tape_outside(backend):
    """The caller's tape sees the operations."""
    w = tf.Variable(1.5)

    def function(x):
        if x > 3.0:
            y = x * w
        else:
            y = w - x
        return y * 2.0

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    for (x,) in INPUTS:
        grads = []
        for each in (function, fn):
            with tf.GradientTape() as tape:
                y = each(x)
            grads.append(tape.gradient(y, w))
        assert_same(snapshot(grads[0]), snapshot(grads[1]), rtol=1e-5, atol=1e-6)
    for (x,) in INPUTS:
        fn(x)
    assert fn.stats().decisions_on_device > 0


def test_a_tape_that_is_asked_later(backend):
    """When the call is over."""

    def function(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x * 1.0
            if x > 3.0:
                y = y * y
            else:
                y = tf.sin(y)
            y = y + 1.0
        return tape, y

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    for (x,) in INPUTS:
        grads = []
        for each in (function, fn):
            tape, y = each(x)
            grads += [snapshot(tape.gradient(y, x)), snapshot(tape.gradient(y * y, x))]
        assert_same(grads[0], grads[2], rtol=1e-5, atol=1e-6)
        assert_same(grads[1], grads[3], rtol=1e-5, atol=1e-6)
    assert fn.stats().decisions_on_device > 0
