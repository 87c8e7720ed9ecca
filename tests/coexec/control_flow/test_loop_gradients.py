"""Gradients through loops on the device: eager's, and none where eager has none."""


import keras
import pytest
import tensorflow as tf

from coexec import testing
from tests.coexec.control_flow.test_control_flow import TRIPS, same, scalars
from tests.marks import needs_places

pytestmark = [
    needs_places,
    pytest.mark.usefixtures("eager_to_stage"),
]


def plain(x):
    w = tf.constant(1.05)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = x
        while y < 100.0:
            y = y * w + 5.0
    return y, tape.gradient(y, [x, w])


def several_states(x):
    w = tf.constant([0.5, 0.25, 0.125])
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        h, total, turns = tf.ones([3]) * 0.1, tf.constant(0.0), 0
        while x + total < 100.0:
            h = tf.tanh(h * w + x * 0.01)
            total = total + tf.reduce_sum(h * h) * 9.0 + 1.0
            turns += 1
        loss = total * 2.0
    return loss, turns, tape.gradient(loss, [x, w])


def a_count_is_used(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, turns = x * 1.0, 0
        while y < 100.0:
            y = y + tf.square(tf.sin(x)) * turns + 4.0
            turns += 1
    return tape.gradient(y, x)


def persistent(x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        a, b = x * 1.0, tf.constant(1.0)
        while a < 100.0:
            a, b = a + b * b, b * 1.125 + x * 0.01
        c = a * b
    return tape.gradient(a, x), tape.gradient(b, x), tape.gradient(c, [x, a, b]), tape.gradient([a, b], x)


def several_tapes(x):
    w, v = tf.constant(1.25), tf.constant(2.0)
    with tf.GradientTape() as one, tf.GradientTape() as other:
        one.watch(w)
        other.watch([v, x])
        y = x * 1.0
        while y < 100.0:
            y = y * w + v * v
    return one.gradient(y, w), other.gradient(y, [v, x, w])


def second_order(x):
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y, n = x * 0.01, x
            while n < 100.0:
                y, n = tf.sin(y) * x + y * y * 0.001, n + 15.0
        g = inner.gradient(y, x)
    return y, g, outer.gradient(g, x)


def branch_inside(x):
    w = tf.constant(1.05)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = x * 1.0
        while y < 100.0:
            if y > 50.0:
                y = y + w * 7.0
            else:
                y = y * w + tf.sqrt(tf.abs(y) + 1.0)
    return y, tape.gradient(y, [x, w])


def loop_inside(x):
    w = tf.constant(1.5)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = x * 1.0
        if x > 50.0:
            while y < 100.0:
                y = y + w * 3.0
        else:
            while y < 80.0:
                y = y * w + 1.0
    return y, tape.gradient(y, [x, w])


def in_a_helper(x):
    def grow(y, w):
        while y < 100.0:
            y = y * w + 2.0
        return y

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = grow(x, x * 0.001 + 1.1)
    return tape.gradient(y, x)


def with_break(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * 1.0
        while True:
            y = y * 1.25 + 1.0
            if y > 100.0:
                break
            y = y + x * 0.1
    return y, tape.gradient(y, x)


def behind_it(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.stack([x, x + 1.0, x * 2.0])
        while tf.reduce_sum(y) < 100.0:
            y = y * 1.125 + 1.0
        z = tf.gather(y, [0, 2, 0])
    return tape.gradient(z, x)


def not_through_it(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        n, y = tf.constant(0), x * x
        while n < 7:
            n = n + 1
        z = y * tf.cast(n, tf.float32)
    return n, tape.gradient(z, x)


def stopped(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * 1.0
        with tape.stop_recording():
            while y < 100.0:
                y = y * 1.25 + 1.0
    return y, tape.gradient(y, x)


def stopped_inside(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, s = x * 1.0, x * 2.0
        while y < 100.0:
            y, s = tf.stop_gradient(y) * 1.25 + s * 0.1 + 1.0, s * 0.5
    return y, tape.gradient(y, x), tape.gradient if y is None else 0


FUNCTIONS = [
    plain, several_states, a_count_is_used, persistent, several_tapes, second_order, branch_inside, loop_inside,
    in_a_helper, with_break, behind_it, not_through_it, stopped, stopped_inside,
]  # fmt: skip


@pytest.mark.sample(
    *(f"graph-{f.__name__}" for f in FUNCTIONS), "xla-plain", "xla-second_order", "xla-branch_inside", "xla-with_break"
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_through_loops(function, backend):
    """Of no turn, one and many; of each state; of higher order; with what is around them and inside."""
    same(function, TRIPS, backend)


# What has a gradient.


def by_turns(x):
    v, w = tf.constant(2.0), tf.constant(3.0)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, v, w])
        a, b, c, d, n = x * 1.0, v * 1.0, w * 1.0, x + w, x
        while n < 100.0:
            a, b, c, d, n = b * 2.0, c * 3.0, c + 1.0, v * 5.0, n + 20.0
    return [tape.gradient(y, [x, v, w]) for y in (a, b, c, d, n)]


def infinite_beside(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, z, n = x * 1.0, x + 4.0, x
        while n < 100.0:
            y, z, n = y + z, tf.sqrt(z - z), n + 45.0
    return y, tape.gradient(y, x)


def unused_and_infinite(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, z = x * 1.0, x * 2.0
        while y < 100.0:
            y, z = y * 1.5 + 3.0, tf.sqrt(y - y) * z
    return y, tape.gradient(y, x)


def results_of_results(x):
    w = tf.constant(0.5)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        h, total, same, n = x * 0.01, x * 0.0, w, x
        while n < 100.0:
            h = tf.tanh(h * w + 0.5)
            total = total + h * h * w
            same, n = h, n + 20.0
        loss = total * 2.0
    found = [tape.gradient(loss, x), tape.gradient(loss, w), tape.gradient(loss, h), tape.gradient(loss, same)]
    return found, tape.gradient(loss, total), tape.gradient(h, x), tape.gradient(h, w), tape.gradient(h, same)


def one_before(x):
    w = tf.constant(0.5)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        y, last = x * 1.0, x * 0.0
        while tf.abs(y - last) > 1.0:  # from 6, one turn: then `last` is what tapes know from before the loop
            last = y
            y = y * w + 3.0
        z = y * last
    found = [tape.gradient(y, x), tape.gradient(y, w), tape.gradient(y, last), tape.gradient(z, x)]
    return found, tape.gradient(z, last), tape.gradient(last, x), tape.gradient(last, y), y, last


def kept_from_before(x):
    w = tf.constant(0.5)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        h, total, last, n = x * 0.01, x * 0.0, x + 1.0, x
        while n < 100.0:
            last = h
            h = tf.tanh(h * w + 0.5)
            total, n = total + h * h * w, n + 20.0
    return tape.gradient(total, last), tape.gradient(total, h), tape.gradient(h, last), tape.gradient(last, x)


@pytest.mark.sample("graph-by_turns", "graph-unused_and_infinite", "graph-one_before", "xla-infinite_beside")
@pytest.mark.parametrize(
    "function",
    [by_turns, infinite_beside, unused_and_infinite, results_of_results, one_before],
    ids=lambda f: f.__name__,
)
def test_what_has_a_gradient_is_exact(function, backend):
    """None where as many turns lead nowhere; and nothing comes of ways that nobody goes back."""
    same(function, [*scalars(99, 81, 61, 41, 55, 60, 10, 6), *TRIPS], backend)


def swapped(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, z = x * 1.0, tf.constant(3.0)
        n = x
        while n < 100.0:
            y, z, n = z * 2.0, y * 0.5, n + 30.0
    return tape.gradient(y, x), tape.watched_variables()


def one_way_only(x):
    w = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = x * 1.0
        while y < 100.0:
            y = y + 9.0
            if y > 70.0:
                y = y * w
    return tape.gradient(y, [x, w])


def hidden_in_a_branch(x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, h = x * 1.0, x * 0.5
        while y < 100.0:
            if y > 50.0:
                h = h * 0.5 + y
                y = y + h * h * 0.01 + 1.0
            else:
                h = h + y * 0.1
                y = y + h * 0.5 + 9.0
        y = y * 1.0
    return tape.gradient(y, x), tape.gradient(y, h)


def rows_of_a_table(x):
    table = tf.reshape(tf.range(12.0), [6, 2]) + 1.0
    with tf.GradientTape() as tape:
        tape.watch(table)
        y, n = x * 1.0, tf.constant(0)
        while y < 100.0:
            y, n = y + tf.reduce_sum(tf.gather(table, n)), (n + 1) % 6
    grad = tape.gradient(y, table)
    return y, grad if grad is None else tf.convert_to_tensor(grad), type(grad).__name__ == "IndexedSlices"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (swapped, "what has a gradient changes from iteration to iteration"),
        (one_way_only, "one way has a gradient where the other has none"),
        (kept_from_before, "it keeps a value of the turn before"),
        (rows_of_a_table, "a gradient is sparse"),
        (hidden_in_a_branch, "an `if` in it computes one result from another"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_stays_with_python(function, reason, backend):
    """And says why."""
    fn = same(function, TRIPS, backend, on_device=False)
    assert reason in fn.explain()


def test_rows_that_nobody_watches(backend):
    """Data may be looked up by a tensor, in any way."""
    data = tf.reshape(tf.range(24.0), [12, 2]) * 0.5

    def function(x):
        w = tf.constant([1.0, 0.5])
        with tf.GradientTape() as tape:
            tape.watch(w)
            y, n = x * 1.0, tf.constant(0)
            while y < 100.0:
                y, n = y + tf.reduce_sum(tf.gather(data, n) * w), (n + 1) % 12
        return y, tape.gradient(y, w)

    same(function, TRIPS, backend)


# Variables.


def test_variables(backend):
    """Which tapes watch as they are read, and which change between the calls."""
    weight, frozen = tf.Variable(1.125), tf.Variable(2.0, trainable=False)

    def function(x):
        with tf.GradientTape() as tape:
            y = x
            while y < 100.0:
                y = y * weight + frozen
            loss = y * y
        grad = tape.gradient(loss, [weight, frozen])
        if grad[0] is not None:
            weight.assign_sub(1e-8 * grad[0])
        return loss, grad, [v is weight for v in tape.watched_variables()]

    same(function, TRIPS, backend, lambda: weight, reset=lambda: weight.assign(1.125))


@pytest.mark.sample("graph")
def test_a_training_step(backend):
    """A cell that turns until it is content, and an optimizer."""
    keras.utils.set_random_seed(1)
    cell, out = keras.layers.GRUCell(4), keras.layers.Dense(1)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    out(cell(tf.ones([2, 3]), tf.ones([2, 4]))[0])
    weights = [*cell.trainable_variables, *out.trainable_variables]
    optimizer.build(weights)
    kept = [w.numpy() for w in [*weights, *optimizer.variables]]

    def function(x):
        with tf.GradientTape() as tape:
            h, turns, inputs = tf.zeros([2, 4]), 0, tf.ones([2, 3]) * x * 0.01
            while tf.reduce_sum(tf.abs(h)) < 3.0 and turns < 12:
                h, _ = cell(inputs, h)
                turns += 1
            loss = tf.reduce_mean(tf.square(out(h) - 1.0))
        grads = tape.gradient(loss, weights)
        optimizer.apply(grads, weights)
        return loss, turns, grads

    def reset():
        for variable, value in zip([*weights, *optimizer.variables], kept, strict=True):
            variable.assign(value)

    fn = same(function, TRIPS, backend, lambda: [w.numpy() for w in weights], reset=reset)
    with testing.compile_everything():
        fn(*TRIPS[1])
        before = fn.stats()
        fn(*TRIPS[1])
        after = fn.stats()
    assert after.launches - before.launches <= 4
    assert after.decisions - before.decisions == 1
