"""Gradients through lists that grow in loops on the device: eager's, whichever tensor of them is asked for."""

import keras
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_control_flow import TRIPS, same, scalars
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage"), pytest.mark.slow]


def stacked(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        out, y = [], x
        while y < 100.0:
            y = y * 1.5 + 9.0
            out.append(y)
        total = tf.reduce_sum(tf.stack(out)) if out else x
    return total, tape.gradient(total, x)


def of_weights(x):
    w, v = tf.constant([0.5, 0.25]), tf.constant(1.25)
    with tf.GradientTape() as tape:
        tape.watch([w, v])
        h, out = tf.ones([2]) * 0.1, [tf.zeros([2])]
        while x + tf.reduce_sum(h) < 100.0:
            h = tf.tanh(h * w + x * 0.01)
            out.append(h * v)
            x = x + 9.0
        loss = tf.reduce_sum(tf.stack(out) ** 2) + tf.reduce_sum(h)
    return out, h, tape.gradient(loss, [w, v])


def some_of_them(x):
    w = tf.constant(1.125)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        out, y = [], x
        while y < 100.0:
            out.append(y)
            y = y * w + 9.0
            out.append(y * 2.0)
    grads = [tape.gradient(each, [x, w]) for each in (*out[:3], *out[-2:], y)]
    return out, y, grads


def for_some_of_them(x):
    w = tf.constant(1.125)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        out, half, y = [], [], x * 1.0
        while y < 100.0:
            y = y * w + 9.0
            out.append(y)
            z = y * 0.5
            half.append(z)
            y = y + tf.sin(z)
    if not out:
        return tape.gradient(y, [x, w])
    return (
        y, tape.gradient(y, [out[0], half[0], out[-1], half[-1]]), tape.gradient(out[-1], [*out, *half]),
        tape.gradient(half[0], [*out[:2], *half[:2]]), tape.gradient(half, [out[0], x]),
    )  # fmt: skip


def is_the_state(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        out, y = [], x * 1.0
        while y < 100.0:
            y = y * 1.25 + 9.0
            out.append(y)
    return tape.gradient(y, [*out, x])


def what_blows_up_is_not_used(x):
    """Later turns have derivatives without bounds: nothing may come back through them."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        out, y, n = [], x * 1.0 + 1.0, x
        while n < 100.0:
            out.append(y)
            y = tf.sqrt(tf.abs(y) - tf.abs(y)) * 1e30 + tf.sqrt(n * 0.0)
            n = n + 20.0
        total = out[0] * 2.0 if out else y
    return total, tape.gradient(total, x)


def constants_in_it(x):
    w = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        out, marks, flags, y = [], [], [], x
        while y < 100.0:
            out.append(w)
            marks.append(tf.constant([1.0, 2.0]))
            flags.append(y > 50.0)
            y = y + 9.0
        total = sum(out, y) + (tf.reduce_sum(tf.stack(marks)) if marks else 0.0)
    return total, flags, tape.gradient(total, [x, w])


def several_tapes(x):
    w = tf.constant(1.5)
    with tf.GradientTape() as one, tf.GradientTape() as other:
        one.watch(w)
        other.watch(x)
        out, y = [], x
        while y < 100.0:
            y = y + w * w * 5.0
            out.append(y * x)
        total = tf.add_n([*out, y])
    return one.gradient(total, w), other.gradient(total, x)


def second_order(x):
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            out, y, n = [x], x * 0.01, x
            while n < 100.0:
                y, n = tf.sin(y) * x + y * y * 0.001, n + 15.0
                out.append(y)
            total = tf.reduce_sum(tf.stack(out) * 2.0)
        g = inner.gradient(total, x)
    return total, g, outer.gradient(g, x)


def with_a_branch(x):
    w = tf.constant(1.05)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        out, y = [], x * 1.0
        while y < 100.0:
            if y > 50.0:
                y = y + w * 7.0
            else:
                y = y * w + tf.sqrt(tf.abs(y) + 1.0)
            out.append(y)
        total = tf.reduce_sum(tf.stack(out)) if out else y
    return total, tape.gradient(total, [x, w])


def counted(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        out, y, turns = [x], x * 1.0, 0
        while y < 100.0 and len(out) < 9:
            y = y + tf.square(tf.sin(x)) * turns + 9.0
            turns += 1
            out.append(y * len(out))
        total = tf.reduce_mean(tf.stack(out))
    return total, turns, tape.gradient(total, x)


def states_change_places(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        a, b, out = x * 1.0, x * 0.5 + 1.0, []
        while a + b < 100.0:
            a, b = b + 9.0, a * 1.125
            out.append(a * b)
        total = tf.add_n([*out, a])
    return total, tape.gradient(total, x)


def keeps_the_one_before(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, before, out = x * 1.0, x * 2.0, []
        while y < 100.0:
            out.append(before)
            before = y
            y = y * 1.25 + tf.sin(before) + 9.0
        total = tf.add_n([*out, y, before])
    return total, tape.gradient(total, [x, before])


def numbers_beside(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, n, out, seen = x * 1.0, tf.constant(0), [], []
        while y < 100.0:
            seen.append(n)
            n = n + 1
            y = y + tf.cast(n, tf.float32) * 4.0
            out.append(y * tf.cast(n, tf.float32))
        total = tf.add_n([*out, y])
    return total, seen, tape.gradient(total, x)


ON_DEVICE = [
    stacked, of_weights, some_of_them, for_some_of_them, is_the_state, what_blows_up_is_not_used, constants_in_it,
    several_tapes, second_order, with_a_branch, counted, states_change_places, keeps_the_one_before, numbers_beside,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_DEVICE, ids=lambda f: f.__name__)
def test_gradients_through_lists(function, backend):
    """Values and gradients are eager's, None where eager's is; the turns are the device's."""
    fn = same(function, TRIPS * 2, backend)
    assert "turns on the device" in fn.explain()
    assert "under a tape:" not in fn.explain(), fn.explain()
    before = fn.stats().decisions_on_device
    with testing.compile_everything():
        for args in TRIPS:
            fn(*args)
    assert fn.stats().decisions_on_device - before >= len(TRIPS), fn.explain()


def test_more_turns_than_there_is_room_for(backend, tune):
    """Python takes a turn, and the device goes on, with more room: the list, and what comes back, are of one piece."""
    tune(min_turn_room=2)

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out, y = [], x * 1.0
            while y < 300.0:
                y = y + tf.sin(y) + 2.0
                out.append(y)
            total = tf.add_n([*out, y])
        return total, len(out), tape.gradient(total, [x, *out[1:4]])

    fn = same(function, scalars(0, 290, 0, 100, 0, 299, 301, -20, 0), backend)
    assert fn.stats().decisions_on_device > 10 * fn.stats().decisions, fn.explain()


def test_turns_that_are_pythons(backend):
    """One that prints is, and is on the tape between those of the device."""
    log = []

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out, y = [], x * 1.0
            while y < 100.0:
                y = y * 1.125 + 2.0
                out.append(tf.square(y))
                if tf.abs(y - 60.0) < 4.0:
                    log.append(float(y))
            total = tf.add_n([*out, y])
        return total, tape.gradient(total, [x, *out])

    same(function, TRIPS * 2, backend, lambda: list(log), reset=log.clear)


def test_a_loop_over_a_range_that_is_left(backend):
    """As one that asks a tensor to go on."""

    def function(x, most):
        w = tf.constant(1.25)
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            out, y = [x], x * 1.0
            for k in range(most):
                y = y * w + k
                out.append(y)
                if y > 100.0:
                    break
                out.append(y * x)
            total = tf.reduce_sum(tf.stack(out) * w)
        return total, len(out), tape.gradient(total, [x, w, *out[1:3]])

    same(function, [(*args, most) for most in (12, 1, 40, 12) for args in TRIPS], backend)


def test_a_recurrent_network_that_stacks_its_states(backend):
    """Over as many steps as a tensor says; trained on all states, with two kinds of weights."""
    keras.utils.set_random_seed(1)
    cell, scores = keras.layers.GRUCell(4), keras.layers.Dense(3)
    cell.build((2, 3))
    scores.build((2, 4))
    weights = [*cell.trainable_variables, *scores.trainable_variables]
    start = [tf.identity(w) for w in weights]
    data = tf.random.stateless_normal((12, 2, 3), [1, 2])

    def function(steps):
        with tf.GradientTape() as tape:
            h, t, states, found = tf.zeros([2, 4]), tf.constant(0), [], []
            while t < steps:
                h, _ = cell(data[t], h)
                states.append(h)
                found.append(scores(h))
                t = t + 1
            if not states:
                return h
            loss = tf.reduce_mean(tf.stack(states) ** 2) + tf.reduce_sum(tf.nn.softmax(tf.stack(found))[..., 0])
        grads = tape.gradient(loss, weights)
        for weight, grad in zip(weights, grads, strict=True):
            weight.assign_sub(0.1 * grad)
        return loss, h, states[-1]

    def reset():
        for weight, value in zip(weights, start, strict=True):
            weight.assign(value)

    steps = [(tf.constant(n),) for n in (3, 0, 7, 1, 12, 5, 0, 12, 7)]
    fn = same(function, steps, backend, lambda: [tf.identity(w) for w in weights], reset=reset)
    assert fn.stats().decisions_on_device > fn.stats().decisions, fn.explain()


def test_greedy_decoding_that_is_trained(backend):
    """What was written is compared with what should have been, score by score."""
    keras.utils.set_random_seed(1)
    units, letters, end = 8, 9, 2
    embedding = tf.Variable(tf.random.stateless_normal((letters, units), [0, 1]))
    cell, scores = keras.layers.GRUCell(units), keras.layers.Dense(letters)
    cell.build((1, units))
    scores.build((1, units))
    weights = [*cell.trainable_variables, *scores.trainable_variables]
    start = [tf.identity(w) for w in weights]

    def function(state, targets):
        with tf.GradientTape() as tape:
            letter, count, logits, written = tf.constant([1]), 0, [], []
            while count < 12 and letter[0] != end:
                state, _ = cell(tf.gather(tf.stop_gradient(embedding), letter), state)
                found = scores(state)
                letter = tf.argmax(found, 1, output_type=tf.int32)
                logits.append(found)
                written.append(letter)
                count += 1
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets[:count], tf.concat(logits, 0))
            loss = tf.reduce_mean(losses)
        for weight, grad in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * grad)
        return loss, tf.concat(written, 0), count

    def reset():
        for weight, value in zip(weights, start, strict=True):
            weight.assign(value)

    targets = tf.constant([3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5, 6])
    inputs = [(tf.random.stateless_normal((1, units), [0, n]) * 3.0, targets) for n in range(8)]
    fn = same(function, inputs, backend, lambda: [tf.identity(w) for w in weights], reset=reset)
    assert fn.stats().decisions_on_device > fn.stats().decisions, fn.explain()


def test_tapes_of_others_and_accumulators(backend):
    """Those leave the loop to Python."""

    def function(x):
        out, y = [], x * 1.0
        while y < 100.0:
            y = y * 1.125 + 2.0
            out.append(y)
        return tf.add_n([*out, y])

    def plainly(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = function(x)
        return total, tape.gradient(total, x)

    def forward(x):
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
            total = function(x)
        return total, accumulator.jvp(total)

    same(forward, TRIPS, backend, on_device=False)
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for (x,) in TRIPS:
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = fn(x)
            assert_same(snapshot(plainly(x)), snapshot((total, tape.gradient(total, x))), rtol=1e-5)


def test_what_outlives_the_call(backend):
    """Lists that the program keeps, and a tape that is asked later on, by way of a jacobian too."""
    kept = []

    def function(x):
        kept.clear()
        tape = tf.GradientTape(persistent=True)
        with tape:
            tape.watch(x)
            out, y = kept, tf.stack([x, x + 1.0])
            while tf.reduce_sum(y) < 100.0:
                y = y * 1.125 + tf.sin(y) + 2.0
                out.append(y)
        return tape, y

    def asked(function, x):
        tape, y = function(x)
        targets = [*kept, y]
        return (
            tf.add_n(targets), tape.gradient(targets, x), tape.jacobian(y, [x, *kept[:2]]), len(kept),
            tape.jacobian(targets[0], x),
        )  # fmt: skip

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for (x,) in TRIPS:
            assert_same(snapshot(asked(function, x)), snapshot(asked(fn, x)), rtol=1e-5, atol=1e-6)
    assert fn.stats().decisions_on_device > 0, fn.explain()
