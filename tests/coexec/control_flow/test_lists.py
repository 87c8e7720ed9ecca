"""Lists that grow in loops which turn on the device: afterwards they are the same lists, with the right tensors."""


import keras
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_control_flow import TRIPS, same
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [
    needs_places,
    pytest.mark.usefixtures("eager_to_stage"),
]


def returned(x):
    out = []
    while x < 100.0:
        out.append(x)
        x = x + 9.0
    return out, x


def stacked(x):
    out = [x]
    while x < 100.0:
        x = x + 9.0
        out.append(x * 2.0)
    return tf.stack(out), out[-1], out[0], len(out)


def summed(x):
    out = []
    while x < 100.0:
        out.append(x)
        x = x + 9.0
    total = x
    for part in out:
        total = total + part
    return total


def several_lists(x):
    ups, downs, y = [], [tf.zeros([2, 3], tf.int32)], tf.ones([2, 3], tf.int32)
    while x < 100.0:
        x, y = x + 9.0, y - 1
        ups.append(x)
        downs.append(y)
    return ups, downs


def twice_a_turn(x):
    out = []
    while x < 100.0:
        out.append(x)
        x = x + 9.0
        out.append(-x)
    return out


def several_at_a_time(x):
    out = [x]
    while x < 100.0:
        out.extend([x, x * 2.0])
        x = x + 9.0
        out.extend((x,))
        out.extend([])
    return out, len(out)


def in_some_turns(x):
    out, rest = [], []
    while x < 100.0:
        x = x + 9.0
        if tf.cast(x, tf.int32) % 2 == 0:
            out.append(x)
        else:
            rest.append(x * 0.5)
            out.append(x + 0.25)
            if x > 50.0:
                rest.append(x)
    return out, rest


def behind_continue(x):
    out = []
    while x < 100.0:
        x = x + 9.0
        if x < 50.0:
            continue
        out.append(x)
    return out


def before_break(x):
    out = []
    while x < 100.0:
        out.append(x)
        x = x + 9.0
        if x > 77.0:
            out.append(x * 2.0)
            break
        out.append(x * 3.0)
    return out


def for_ever(x):
    out = []
    while True:
        x = x + 9.0
        if x > 100.0:
            break
        out.append(x)
    return out


def known_by_two_names(x):
    out = []
    again = out
    while x < 100.0:
        out.append(x)
        x = x + 9.0
        again.append(-x)
    return out is again, again


def counted(x):
    out, turns = [], 0
    while x < 100.0 and turns < 6:
        out.append(x + turns)
        x = x + 9.0
        turns += 1
    return out, turns


def measured(x):
    out = [x]
    while len(out) < 6 and x < 100.0:
        x = x + 9.0
        out.append(x + len(out))
    return out


def measured_in_the_middle(x):
    out, rest = [], [x]
    while True:
        x = x + 9.0
        out.append(x)
        if len(out) > 5 or x > 80.0:
            rest.append(x - len(out))
        if x > 100.0:
            return out, rest


def noted(out, x):
    out.append(x * 0.5)
    return x + 9.0


def in_a_helper(x):
    out = []
    while x < 100.0:
        x = noted(out, x)
    return out


def of_pairs(x):
    firsts, seconds = [], []
    pair = (x, x + 1.0)
    while pair[0] < 100.0:
        pair = (pair[1] + 5.0, pair[0])
        firsts.append(pair[0])
        seconds.append(tf.stack(pair))
    return firsts, seconds


def of_flags(x):
    out = []
    while x < 100.0:
        x = x + 9.0
        out.append(x > 50.0)
    return out


def of_constants(x):
    out = []
    while x < 100.0:
        x = x + 9.0
        out.append(tf.constant([1, 2]))
    return out


def made_in_a_turn(x):
    out = []
    while x < 100.0:
        parts = []
        for k in range(3):
            parts.append(x + float(k))
        x = tf.reduce_max(tf.stack(parts)) + 7.0
        out.append(tf.stack(parts))
    return out


ON_DEVICE = [
    returned, stacked, summed, several_lists, twice_a_turn, several_at_a_time, in_some_turns, behind_continue,
    before_break, for_ever,
    known_by_two_names, counted, measured, measured_in_the_middle, in_a_helper,
    of_pairs, of_flags, of_constants, made_in_a_turn,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_DEVICE, ids=lambda f: f.__name__)
def test_lists_grow_on_the_device(function, backend):
    """By as many tensors, of the same values, dtypes and shapes; and nearly all turns are the device's."""
    fn = same(function, TRIPS * 2, backend)
    stats = fn.stats()
    assert "turns on the device" in fn.explain()
    before, turns = fn.stats(), 0
    with testing.compile_everything():
        for args in TRIPS:
            fn(*args)
            turns += 1
    stats = fn.stats()
    assert stats.launches - before.launches <= 4 * len(TRIPS), fn.explain()


def numbers(x):
    out, n = [], 0
    while x < 100.0:
        x = x + 9.0
        n += 1
        out.append(n)
    return out


def plain_numbers(x):
    out = []
    while x < 100.0:
        x = x + 9.0
        out.append(1.0)
    return out


def other_shapes(x):
    out, y = [], tf.zeros([2])
    while x < 100.0:
        x = x + 9.0
        out.append(x)
        out.append(y)
    return out


def is_looked_at(x):
    out = [x]
    while x < 100.0:
        x = out[-1] + 9.0
        out.append(x)
    return out


def is_measured(x):
    out = [x]
    while x < 100.0 and tf.fill([len(out)], 9.0)[0] > 0.0:
        x = x + 9.0
        out.append(x)
    return out


def is_empty(x):
    out = []
    while x < 100.0:
        if out:
            x = x + 4.0
        x = x + 9.0
        out.append(x)
    return out


def is_stacked(x):
    out = [x]
    while tf.reduce_sum(tf.stack(out)) < 100.0:
        out.append(x + 9.0)
    return out


def is_known_by_another_name_and_looked_at(x):
    out = [x]
    again = out
    while x < 100.0:
        x = again[0] + x + 9.0
        out.append(x)
    return out


def is_an_attribute(x):
    box = Box()
    while x < 100.0:
        x = x + 9.0
        box.out.append(x)
    return box.out


class Box:
    def __init__(self):
        self.out = []


class Kind(list):
    """A list that does more."""

    def append(self, value):
        super().append(value)
        super().append(0)


def of_another_kind(x):
    out = Kind()
    while x < 100.0:
        x = x + 9.0
        out.append(x)
    return list(out)


def extended(x):
    out = []
    while x < 100.0:
        x = x + 9.0
        out += [x]
    return out


def extended_by_itself(x):
    out = [x]
    while x < 40.0:
        x = x + 9.0
        out.extend(out)
    return out


def extended_by_rows(x):
    out = []
    while x < 100.0:
        x = x + 9.0
        out.extend(tf.stack([x, x]))
    return out


def in_a_loop_inside(x):
    out = []
    while x < 100.0:
        y = x
        while y < x + 20.0:
            y = y + 7.0
            out.append(y)
        x = y
    return out


def assigned_in_the_loop(x):
    out = []
    while x < 100.0:
        x = x + 9.0
        out.append(x)
        if x > 80.0:
            out = []
    return out


ON_HOST = [
    numbers, plain_numbers, other_shapes, is_looked_at, is_measured, is_empty, is_stacked,
    is_known_by_another_name_and_looked_at,
    is_an_attribute, of_another_kind, extended, extended_by_itself, extended_by_rows, assigned_in_the_loop,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_HOST, ids=lambda f: f.__name__)
def test_lists_that_are_more_than_filled_are_pythons(function, backend):
    """As ever."""
    same(function, TRIPS, backend, on_device=False)


def test_two_lists_that_become_one(backend):
    """What was written down for two is not what Python does with one."""

    def function(x, out, other, read):
        while x < 100.0:
            out.append(x)
            other.append(x * 2.0)
            x = x + 9.0 + read[-1] * 0.0
        return out, other, read[-1]

    def three(x, kind):
        a, b, c = [], [], [x * 0.5]
        if kind == 1:
            a = b
        elif kind == 2:
            c = b
        elif kind == 3:
            a = b = c
        elif kind == 4:
            c.append(x)
        if not c:
            c.append(x)
        return function(x, a, b, c)

    inputs = [(*args, n % 5) for n, args in enumerate(TRIPS[:4] * 10)]
    fn = same(three, inputs, backend)
    assert fn.stats().decisions_on_device > 0


def test_a_list_that_is_assigned_too(backend):
    """One that has been the same before."""

    def function(x, apart):
        pair = [x, x + 1.0]
        out = list(pair) if apart else pair
        while x < 100.0:
            out.append(x)
            last = pair[-1]
            pair = [x, last + 1.0]
            x = x + 9.0
        return out, pair, last if x > 200.0 else x

    same(function, [(*args, n % 3 > 0) for n, args in enumerate(TRIPS * 3)], backend)


def test_a_loop_inside_grows_a_list(backend):
    """The inner one may turn on the device, the outer one not."""
    same(in_a_loop_inside, TRIPS, backend)


def test_lists_of_others(backend):
    """The list is an argument, and stays the one that it was."""
    kept = []

    def function(x, out):
        while x < 100.0:
            out.append(x)
            x = x + 9.0
        return len(out)

    fn = same(function, [(*args, kept) for args in TRIPS], backend, lambda: list(kept), reset=kept.clear)
    assert fn.stats().decisions_on_device > 0


def test_a_loop_over_a_range_fills_a_list(backend):
    """All of it or nothing: Python's iterator stays where it is. A list with no room for all gets more another time."""

    def function(x, most):
        out = [None] * most
        for k in range(most):
            out.append(x + k)
            if x > 60.0:
                break
            out.append(x * 2.0)
            x = x + 3.0
        return x, out, len(out), k

    inputs = [(*args, most) for most in (9, 1, 90) for args in TRIPS]
    fn = same(function, inputs * 2, backend)
    before = fn.stats().decisions
    with testing.compile_everything():
        for args in inputs:
            assert_same(snapshot(function(*args)), snapshot(fn(*args)))
    assert fn.stats().decisions == before + len(inputs), fn.explain()


def test_effects_beside_a_list(backend):
    """A turn with effects is Python's: what is appended before and behind it is in order."""
    log = []

    def function(x):
        out = []
        while x < 100.0:
            out.append(x)
            if tf.abs(x - 50.0) < 6.0:
                log.append(float(x))
            x = x + 9.0
        return out

    fn = same(function, TRIPS * 2, backend, lambda: list(log), reset=log.clear)
    assert fn.stats().decisions_on_device > 0


@pytest.mark.slow
def test_more_rows_than_there_are(backend):
    """The loop goes on with as many again; then with more at a time."""

    def function(x):
        out = []
        while x < 300.0:
            out.append(x)
            x = x + 1.0
        return out

    inputs = [(tf.constant(v),) for v in (0.0, 290.0, 0.0, 100.0, 0.0, -100.0, 0.0)]
    fn = same(function, inputs, backend)
    before = fn.stats()
    with testing.compile_everything():
        for args in inputs:
            assert_same(snapshot(function(*args)), snapshot(fn(*args)))
    after = fn.stats()
    turns = sum(300 - int(v[0]) for v in inputs)
    assert after.decisions_on_device - before.decisions_on_device > 0.98 * turns
    assert after.launches - before.launches <= 4 * len(inputs), fn.explain()
    assert "not compiled" not in fn.explain()


def test_a_turn_that_appends_more_than_there_is_room_for(backend, tune):
    """Is Python's, whatever it has appended by then."""
    tune(list_rows=2)
    tune(max_device_turns=2)

    def function(x):
        out = []
        while x < 100.0:
            for k in range(3):
                out.append(x + float(k))
            x = x + 9.0
        return out

    same(function, TRIPS, backend, on_device=False)
    same(twice_a_turn, TRIPS, backend)
    same(in_some_turns, TRIPS, backend)
    same(returned, TRIPS, backend)


def test_a_list_under_a_tape(backend):
    """What is appended has gradients: where turns append not the same, the loop is Python's."""

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out, y = [], x
            while y < 100.0:
                y = y * 1.5 + 9.0
                if y > 50.0:
                    out.append(y)
            total = tf.reduce_sum(tf.stack(out)) if out else x
        return total, tape.gradient(total, x)

    fn = same(function, TRIPS, backend, on_device=False)
    assert "a list grows in some turns otherwise than in others" in fn.explain()


def test_gradients_behind_a_list(backend):
    """A list that was filled before the tape is one of constants."""
    weight = tf.Variable(1.5)

    def function(x):
        out = [x]
        while x < 100.0:
            out.append(x)
            x = x + 9.0
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.stack(out) * weight)
        weight.assign_sub(1e-3 * tape.gradient(loss, weight))
        return loss

    same(function, TRIPS * 2, backend, lambda: weight, reset=lambda: weight.assign(1.5))


@pytest.mark.slow
def test_greedy_decoding(backend):
    """A GRU writes letters until the one that ends a word, or fifty; they are joined behind the loop."""
    keras.utils.set_random_seed(1)
    units, letters, end = 16, 20, 2
    embedding, cell = keras.layers.Embedding(letters, units), keras.layers.GRUCell(units)
    scores = keras.layers.Dense(letters)

    def decode(state):
        letter, count, written, sure = tf.constant([1]), 0, [], []
        while count < 50 and letter[0] != end:
            state, _ = cell(embedding(letter), state)
            logits = scores(state)
            letter = tf.argmax(logits, 1, output_type=tf.int32)
            written.append(letter)
            sure.append(tf.reduce_max(tf.nn.softmax(logits)))
            count += 1
        return tf.concat(written, 0), tf.reduce_mean(tf.stack(sure)), count

    states = [(tf.random.stateless_normal((1, units), [0, n]) * 3.0,) for n in range(5)]
    fn = same(decode, states * 2, backend)
    stats = fn.stats()
    assert stats.decisions_on_device > stats.decisions, fn.explain()


def test_the_option_leaves_all_to_python():
    """Each turn is then a read."""
    fn = coexec.function(returned, control_flow=False)
    for args in TRIPS:
        assert_same(snapshot(returned(*args)), snapshot(fn(*args)))
    assert fn.stats().decisions_on_device == 0
