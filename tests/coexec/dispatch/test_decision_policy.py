"""Decision policy: `while` loops that ask often turn on the device without being asked to, and nothing differs."""

import dis
import linecache
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.base.stats import EventLog
from coexec.base.tuning import tuning
from coexec.dispatch import decision_policy
from coexec.dispatch.decision_policy import DecisionPolicy
from tests.snapshots import assert_same, snapshot
from tracer.syntax import decision_at


def grows(x):
    """A loop that asks a tensor some seventy times."""
    turns = 0
    while tf.reduce_sum(x) < 4000.0:
        x = 1.1 * x + 0.1
        turns += 1
    return x, turns


def approaches(x):
    """A loop that keeps the tensor of the iteration before: after one, that is what the function was given."""
    old, turns = x - 1.0, 0
    while tf.reduce_max(tf.abs(x - old)) > 1e-3:
        old = x
        x = 0.9 * x
        turns += 1
    return x, old, turns


def gates(x):
    """Thirty branches on tensors."""
    for _ in range(30):
        if tf.reduce_sum(x) > 1.0:
            x = 0.5 * x
        tf.identity(x)
    return x


def tells(x, log):
    """As `grows`, with an effect in each iteration."""
    while tf.reduce_sum(x) < 4000.0:
        x = 1.1 * x + 0.1
        log.append(len(log))
    return x


def settled(function, calls=12):
    """A co-executed function, after so many calls as eagerly, without the clock's say."""
    step = coexec.function(function)
    for n in range(calls):
        x = tf.constant([1.0 + n % 3, 2.0])
        assert_same(snapshot(function(x)), snapshot(step(x)))
    return step


def on_device(step):
    return step.stats().decisions_on_device


def has_control(step):
    return step._controller.decisions.control is not None


def test_a_loop_turns_on_the_device():
    """From the fourth call on, with eager's values and Python numbers."""
    step = settled(grows)
    assert on_device(step) > 8 * 60, step.explain()
    before = step.stats().decisions
    step(tf.constant([1.0, 2.0]))
    assert step.stats().decisions - before <= 2  # where it begins, and where it ends


ASSERTS = """
def body(x, log):
    for _ in range(30):
        x = x * 0.5 if tf.reduce_sum(x) > 1.0 else x + 0.25
        assert tf.reduce_sum(x) < 1000.0
        log.append(0)
    while tf.reduce_sum(x) < 4000.0:
        x = 1.1 * x + 0.1
    return x
"""


def test_nothing_but_loops():
    """For branches, Python's frame would have to go on elsewhere; an assertion would be checked too late."""
    file, names = "<asserts>", {"tf": tf}
    # Not a function of this file, as pytest rewrites the assertions in it.
    linecache.cache[file] = (len(ASSERTS), None, ASSERTS.splitlines(True), file)
    exec(compile(ASSERTS, file, "exec"), names)
    body = names["body"]
    step, log, other = coexec.function(body), [], []
    for n in range(12):
        x = tf.constant([1.0 + n % 3, 2.0])
        assert_same(snapshot(body(x, log)), snapshot(step(x, other)))
    assert on_device(step) > 0, step.explain()
    before = step.stats().decisions
    step(x, other)
    assert step.stats().decisions - before >= 60
    for each, calls in ((body, log), (step, other)):
        del calls[:]
        with pytest.raises(AssertionError):
            each(tf.constant([1e9, 2.0]), calls)
    assert log == other


def test_branches_alone_do_not_begin_it():
    """However many they are."""
    step = settled(gates)
    assert step.stats().decisions > 200
    assert not has_control(step)


def test_a_tensor_that_others_have_stays_the_object_that_it_is():
    """What a loop hands on from before the call may be asked for outside: Python runs the iterations that see it."""
    step = settled(approaches)
    assert on_device(step) > 100, step.explain()
    once = tf.constant([0.0, 0.0])
    assert approaches(once)[1] is once
    assert step(once)[1] is once


def test_variables_that_nothing_else_reads():
    """It is of no matter that they hold one tensor, as a cell's output and its state are."""
    cell = keras.layers.GRUCell(2)

    def body(x):
        x = tf.reshape(x, [1, 2])
        letter, turns, written = tf.constant([1]), 0, tf.zeros([40], tf.int32)
        while turns < 40 and letter[0] != 3:
            x, _ = cell(tf.cast(letter, tf.float32)[:, None] * 0.1, x)
            letter = tf.argmax(x, 1, output_type=tf.int32)
            written = tf.tensor_scatter_nd_update(written, [[turns]], letter)
            turns += 1
        return x, written, turns

    step = settled(body)
    assert on_device(step) > 200, step.explain()


def test_one_tensor_in_two_variables_is_one_object():
    """Tapes that begin to watch one of them, and `is`, find the same as eagerly, inside and outside."""

    def twice(x):
        b = x
        while tf.reduce_sum(x) < 4000.0:
            x = 1.1 * x + 0.1
            b = x
        return x, b

    def best(x):
        b = x * 2.0
        while tf.reduce_sum(x) < 4000.0:
            x = 1.1 * x + 0.1
            if tf.reduce_sum(x) > 2000.0:
                b = x
        return x, b

    def listed(x):
        found = []
        while tf.reduce_sum(x) < 4000.0:
            x = 1.1 * x + 0.1
            found.append(x)
        return x, found[-1]

    def in_a_branch(x):
        y = z = x * 0.5
        while tf.reduce_sum(x) < 4000.0:
            x = 1.1 * x + 0.1
            if tf.reduce_sum(x) > 2000.0:
                y = x * 2.0
                z = y
            else:
                y = x * 3.0
                z = x * 4.0
        return y, z

    def watched(x):
        x, b = twice(x + 0.0)
        with tf.GradientTape() as tape:
            tape.watch(b)
            y = tf.reduce_sum(x * x)
        return tape.gradient(y, b)

    for each in (twice, best, listed, in_a_branch):
        step = settled(each)
        one, other = step(tf.constant([1.0, 2.0]))
        assert one is other, each
    settled(watched)


def test_a_profiler_sees_every_call():
    """Python decides while one is set."""

    def helper(x):
        return 1.1 * x + 0.1

    def loop(x):
        while tf.reduce_sum(x) < 4000.0:
            x = helper(x)
        return x

    step = settled(loop)
    assert on_device(step) > 0, step.explain()
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append(event) if frame.f_code is helper.__code__ else None)
    try:
        before = on_device(step)
        step(tf.constant([1.0, 2.0]))
        assert on_device(step) == before
    finally:
        sys.setprofile(None)
    assert seen.count("call") > 20


def test_it_is_left_to_python_where_the_device_takes_none():
    """For good, and the function is followed as any other, at any size."""
    step, log, other = coexec.function(tells), [], []
    for _ in range(tuning.decisions_in_vain + 8):
        assert_same(snapshot(tells(tf.ones(2), log)), snapshot(step(tf.ones(2), other)))
    assert log == other
    assert step.stats().followed >= tuning.decisions_in_vain, step.explain()
    assert not has_control(step)
    assert step._controller.decisions._open is False
    assert on_device(step) == 0


def test_sizes_that_change_end_it(tune):
    """Paths for any size have Python's decisions."""
    tune(sizes_at_once=1)
    step = settled(grows)
    assert has_control(step)
    for n in range(3, 20):
        assert_same(snapshot(grows(tf.ones(n))), snapshot(step(tf.ones(n))))
    assert not has_control(step)
    assert step.stats().imperative < 8, step.explain()


@pytest.mark.parametrize("keywords", [{"control_flow": False}, {"strict": True}])
def test_it_does_not_begin(keywords):
    """Where it is declined, or where each call is to be known."""
    step = coexec.function(grows, **keywords)
    for _ in range(8):
        try:
            step(tf.ones(2))
        except coexec.Divergence:
            step.clear()
    assert on_device(step) == 0
    assert not has_control(step)


def a_test_of(function):
    """The place of an instruction in it that decides a statement."""
    code = function.__code__
    offsets = (at.offset for at in dis.get_instructions(code))
    return code, next(at for at in offsets if decision_at(code, at, globals()) is not None)


def begun_after(calls, times, place, at_any_size=False):
    """Whether the device has control after so many calls, in which Python decided so many times at a place."""
    policy = DecisionPolicy(None, EventLog("counted"))
    for _ in range(calls):
        if policy.places is not None:
            policy.places[place] = times, globals()
        policy.called(at_any_size)
    return policy.control is not None


def test_few_decisions_are_pythons():
    """They do not pay; nor do any in a function that is followed at any size."""
    place = a_test_of(grows)
    assert not begun_after(100, tuning.decisions_many - 1, place)
    assert begun_after(1, tuning.decisions_many, place)
    assert not begun_after(100, tuning.decisions_many, place, at_any_size=True)
    assert not begun_after(100, tuning.decisions_many, a_test_of(gates))


def test_what_a_library_asks_does_not_count():
    """Nor a comparison inside of a call."""

    def sorts(x):
        return sorted(tf.unstack(x))[0]  # asks 63 times

    step = settled(lambda x: sorts(tf.reshape(x[0] * tf.range(64.0), [64])), 6)
    assert step.stats().decisions > 4 * 60
    assert not has_control(step)


def test_asked_for_it_stays():
    """Whatever the device takes."""
    policy = DecisionPolicy(True, EventLog("asked"))
    for _ in range(10 * tuning.decisions_in_vain):
        policy.called(at_any_size=True)
    policy.end()
    assert policy.control is not None


def test_another_value_is_refused():
    """With what it may be."""
    with pytest.raises(ValueError, match="control_flow is True, False or None, not 'auto'"):
        coexec.function(grows, control_flow="auto")


def test_variables_that_a_loop_reads():
    """They are written after it, and are eager's after each call."""
    ours, theirs = tf.Variable([0.0, 1.0]), tf.Variable([0.0, 1.0])

    def body(v, x):
        while tf.reduce_max(x) < 20.0:
            x = 1.05 * x + 0.01 * v
        v.assign_add(0.01 * x)
        return x

    step = coexec.function(body)
    for _ in range(12):
        assert_same(snapshot(body(theirs, tf.ones(2))), snapshot(step(ours, tf.ones(2))), rtol=1e-5)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)  # XLA rounds otherwise
    assert on_device(step) > 0, step.explain()


def old(x, turns):
    """Hands on the tensor of the iteration before: after one, of before the loop."""
    first = y = before = 1.0 * x
    first.tag, n = "first", 0.0 * x[0]
    while n < turns:
        before, y, n = y, 0.9 * y + x, n + 1.0
    return first, y, before


def older(x, turns):
    """Hands tensors on for two iterations."""
    a, b, c, n = 1.0 * x, 2.0 * x, 3.0 * x, 0.0 * x[0]
    kept = a, b, c
    while n < turns:
        a, b, c, n = b, c, c + a, n + 1.0
    return *kept, a, b, c


def swapped(x, turns):
    """States that go round, in variables and in a list."""
    a, b, c, n = 1.0 * x, 2.0 * x, 3.0 * x, 0.0 * x[0]
    kept, held = (a, b, c), [a, b]
    while n < turns:
        a, b, c, held, n = b, c, a, [held[1], held[0]], n + 1.0
    return *kept, a, b, c, *held


def pairs(x, turns):
    """Tuples, which go round as a whole, and one that is made anew."""
    h, g, made, n = (1.0 * x, 2.0 * x), (3.0 * x, x), (x, 1.0 * x), 0.0 * x[0]
    kept = [h, g]
    while n < turns:
        h, g, made, n = g, h, (made[1], 0.9 * made[0]), n + 1.0
    return *kept, h, g, *h, *g, *made


def returned(x, turns):
    """Layers and functions that return what they are given."""
    y, z, n = 1.0 * x[None], 2.0 * x, 0.0 * x[0]
    kept = y, z
    while n < turns:
        y, z, n = LINEAR(DROPOUT(y)), tf.cast(z, tf.float32), n + 1.0
    return *kept, y, z


def chosen(x, turns):
    """A tensor that goes through a branch."""
    best, y, n = 5.0 * x, 1.0 * x, 0.0 * x[0]
    kept = best
    while n < turns:
        y, n = 0.9 * y, n + 1.0
        if y[0] > best[0]:
            best = y
    return kept, best, y


LINEAR, DROPOUT = keras.layers.Activation("linear"), keras.layers.Dropout(0.5)


@pytest.mark.parametrize("function", [old, older, swapped, pairs, returned, chosen], ids=lambda f: f.__name__)
def test_what_a_loop_hands_on_is_the_tensor_that_it_was(function):
    """Also where the call has made it: its results, what is kept of them, and their attributes are eager's."""
    step, x = coexec.function(function), tf.constant([1.0, 3.0])
    LINEAR(x), DROPOUT(x)
    for turns in [40.0, 41.0, 42.0] * 3 + [0.0, 1.0, 2.0, 3.0, 4.0, 45.0]:
        theirs, ours = function(x, tf.constant(turns)), step(x, tf.constant(turns))
        assert_same(snapshot(theirs), snapshot(ours))
        assert [[a is b for a in theirs] for b in theirs] == [[a is b for a in ours] for b in ours], turns
        assert [getattr(a, "tag", None) for a in theirs] == [getattr(a, "tag", None) for a in ours], turns
    assert (on_device(step) > 100) is (function is not chosen), step.explain()


def test_the_gradient_for_a_tensor_that_a_loop_handed_on():
    """It has what comes through the same tensor on other ways."""

    def found(x, turns):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            first, y, before = old(x, turns)
            loss = tf.reduce_sum(first**2) + tf.reduce_sum(y**2)
        return tape.gradient(loss, [before, first, x])

    step, x = coexec.function(found), tf.constant([1.0, 3.0])
    for turns in [30.0] * 6 + [0.0, 1.0, 2.0, 3.0, 1.0, 30.0]:
        assert_same(snapshot(found(x, tf.constant(turns))), snapshot(step(x, tf.constant(turns))))
    assert on_device(step) > 30, step.explain()


def until(v, x, turns):
    n, read, y = 0.0 * x[0], x, 1.0 * x
    while n < turns:
        read, y, n = tf.convert_to_tensor(v), 0.9 * y + v, n + 1.0
    return read, y


def in_a_range(v, x, turns):
    n, read, y = 0.0 * x[0], x, 1.0 * x
    for _ in range(40):
        read, y, n = tf.convert_to_tensor(v), 0.9 * y + v, n + 1.0
        if n > turns:
            break
    return read, y


READING = {"while": (until, None), "asked for": (until, True), "range": (in_a_range, True)}


@pytest.mark.parametrize("name", READING)
def test_the_gradient_for_a_variable_that_a_loop_read(name):
    """Each read makes another tensor: what others came to has nothing to do with it."""
    loop, option = READING[name]

    def make():
        v = tf.Variable([1.0, 2.0, 3.0])

        def step(x, turns):
            with tf.GradientTape(persistent=True) as tape:
                read, y = loop(v, x, turns)
                product = read * y
            return tape.gradient(product, [read, v]), tape.gradient(y, [read, v])

        return step

    plain, step = make(), coexec.function(make(), control_flow=option)
    x = tf.constant([1.0, 2.0, 3.0])
    for turns in [30.0] * 6 + [0.0, 1.0, 2.0, 30.0]:
        assert_same(snapshot(plain(x, tf.constant(turns))), snapshot(step(x, tf.constant(turns))), rtol=1e-5)
    assert step.stats().followed > 7


MASKING, POOLING = keras.layers.Masking(0.0), keras.layers.GlobalAveragePooling1D()
CELLS = keras.layers.SimpleRNN(3, return_sequences=True)


def masked(x):
    """A layer whose result carries a mask out of the loop."""
    while tf.reduce_max(x) < 100.0:
        x = MASKING(1.1 * x)
    return POOLING(x), hasattr(x, "_keras_mask")


def masked_before(x):
    """A mask from before the loop, which a layer in it reads."""
    h, n = MASKING(x), 0.0 * x[0, 0, 0]
    while n < 40.0:
        h, n = h + 0.1 * CELLS(h), n + 1.0
    return h


def masked_inside(x):
    """A mask that the loop makes, and a layer in it reads."""
    total, n = tf.zeros([1, 2]), 0.0 * x[0, 0, 0]
    while n < 40.0:
        total, n = 0.5 * total + POOLING(MASKING(x * (1.0 + n)))[:, :2], n + 1.0
    return total


def logits(x):
    """An activation that leaves its logits with its result, for the loss."""
    p, n = x, 0.0 * x[0, 0, 0]
    while n < 40.0:
        p, n = keras.activations.sigmoid(x * n), n + 1.0
    return keras.losses.BinaryCrossentropy()(tf.zeros_like(x), p)


@pytest.mark.parametrize("function", [masked, masked_before, masked_inside, logits], ids=lambda f: f.__name__)
def test_attributes_of_tensors(function):
    """Keras keeps masks and logits there; what a loop gives back has none, and tensors that are traced neither."""
    rows = np.float32([[[0, 0, 0], [1, 2, 3], [4, 5, 6], [0, 0, 0]]])
    step = coexec.function(function)
    CELLS(rows), POOLING(rows), MASKING(rows)
    for _ in range(10):
        assert_same(snapshot(function(tf.constant(rows))), snapshot(step(tf.constant(rows))), rtol=1e-5)
    assert step.stats().followed > 7


def named(x):
    """Attributes that TensorFlow's fast path does not take: a dtype by its name."""
    n = 0.0 * x[0]
    while n < 40.0:
        place = tf.argmax(x, output_type="int32") + tf.cast(keras.ops.argmin(x), tf.int32)
        x, n = x + 0.01 * tf.one_hot(place, 3), n + 1.0
    return x


def numbered(x):
    """The same with a number of NumPy's, and one of the machine's."""
    n = 0.0 * x[0]
    while n < 40.0:
        rows = tf.gather(tf.stack([x, 0.5 * x]), [[0, 1], [2, 0]], axis=1, batch_dims=np.int64(0))
        x, n = x + 0.01 * tf.reduce_sum(rows, keepdims=np.bool_(False)), n + 1.0
    return x


@pytest.mark.parametrize("function", [named, numbered], ids=lambda function: function.__name__)
def test_attributes_of_other_types(function):
    """They are converted as eagerly, or the loop is Python's."""
    step, x = coexec.function(function), tf.constant([1.0, 2.0, 1.5])
    for _ in range(12):
        assert_same(snapshot(function(x)), snapshot(step(x)), rtol=1e-5)
    assert step.stats().followed > 8
    assert on_device(step) > 40 or function is numbered, step.explain()


def test_source_is_not_parsed_for_few_decisions(monkeypatch):
    """It would take longer than a small step's call."""
    asked = []
    monkeypatch.setattr(decision_policy, "decision_at", lambda *args: asked.append(args))

    @coexec.function
    def step(x):
        for n in range(10):
            x = 0.5 * x if tf.reduce_sum(x) > 1.0 else x + float(n)
        return x

    for _ in range(6):
        step(tf.constant([1.0, 2.0]))
    assert step.stats().decisions >= 40
    assert not asked
