"""Loops that decide on tensors: what turns on the device, what stays with Python, and that nobody can tell."""

import math
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.control_flow.run import decisions
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]


def outcome(function, args):
    try:
        return function(*args)
    except Exception as error:
        return error.with_traceback(None)


def same(function, inputs, backend, state=lambda: None, on_device=True, reset=lambda: None):
    """Calls `function` plainly and co-executed on the same inputs: both do the same, the latter where it says."""
    reset()
    expected = [snapshot((outcome(function, args), state())) for args in inputs]
    reset()
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        found = [snapshot((outcome(fn, args), state())) for args in inputs]
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, rtol=1e-5, atol=1e-6, path=f"call {number}: ")
    stats = fn.stats()
    assert stats.decisions > 0, "nobody was asked"
    assert (stats.decisions_on_device > 0) is on_device, fn.explain()
    return fn


def scalars(*values):
    return [(tf.constant(float(v)),) for v in values]


TRIPS = scalars(0, 95, 98, 150, 60, 99, 100, 101, 0, 50, 97, 5)


# On the device.


def plain(x):
    while x < 100.0:
        x = x + 1.0
    return x


def two_states(x):
    y = tf.zeros([3])
    while x < 100.0:
        x, y = x + 2.0, y + x
    return x, y


def swapped(x):
    y = x * 2.0
    while x + y < 100.0:
        x, y = y + 1.0, x
    return x, y


def with_else(x):
    while x < 100.0:
        x = x + 1.0
    else:
        x = -x
    return x


def counted(x):
    turns = 0
    left = 7
    while x < 100.0:
        x = x + 1.0
        turns += 1
        left -= 2
    return x, turns, left


def count_is_used(x):
    turns = 0
    while x < 100.0:
        x = x + turns
        turns += 1
    return x, turns


def count_bounds(x):
    turns = 0
    while x < 100.0 and turns < 7:
        x = x + 1.0
        turns += 1
    return x, turns


def bounds_first(x):
    turns = 0
    while turns < 30 and x < 100.0:
        x = x * 1.125 + 1.0
        turns += 1
    return x, turns


def either(x):
    y = x - 20.0
    while x < 60.0 or y < 70.0:
        x, y = x + 3.0, y + 1.0
    return x, y


def negated(x):
    while not x > 100.0:
        x = x + 3.0
    return x


def flag(x):
    done = x > 100.0
    while not done:
        x = x + 3.0
        done = x > 100.0
    return x, done


def first_defined_inside(x):
    while x < 100.0:
        last = x * 2.0
        x = x + 1.0
    try:
        return x, last
    except UnboundLocalError:
        return x, "nothing"


def branching(x):
    total = tf.constant(0.0)
    while x < 100.0:
        if tf.cast(x, tf.int32) % 2 == 0:
            total = total + x
        elif x > 70.0:
            total = total * 0.5
        else:
            total = total - 1.0
        x = x + 1.0
    return x, total


def conditional_expression(x):
    y = x
    while x < 100.0:
        y = y + 1.0 if x < 50.0 else y * 1.5
        x = x + 3.0
    return x, y


def and_or_values(x):
    y = tf.constant(1.0)
    while x < 100.0:
        if (x > 20.0 and x < 40.0) or not (x < 80.0):
            y = y + x
        if 30.0 < x < 60.0:
            y = y - 2.0
        x = x + 3.0
    return x, y


def continuing(x):
    kept = tf.constant(0.0)
    while x < 100.0:
        x = x + 1.0
        if x > 50.0:
            continue
        kept = kept + x
    return x, kept


def breaking(x):
    while x < 100.0:
        x = x + 1.0
        if x > 50.5:
            break
    else:
        return x, "else"
    return x, "break"


def returning(x):
    turns = 0
    while x < 100.0:
        x = x + 1.0
        if x > 60.5:
            return x, turns, "early"
        turns += 1
    return x, turns, "late"


def raising(x):
    while x < 100.0:
        x = x + 1.0
        if x > 60.5:
            raise ValueError("too much")
    return x


def forever(x):
    while True:
        x = x + 1.0
        if x > 100.0:
            break
    return x


def helper(value, by=1.0):
    """Computes, and returns early."""
    if value > 50.0:
        return value + by
    y = value * 1.0
    return y + by + 1.0


def calling(x):
    while x < 100.0:
        x = helper(x, by=2.0)
    return x


def inner_python_loop(x):
    while tf.reduce_sum(x) < 100.0:
        for k in range(3):
            x = x + float(k)
    return x


def matrix(x):
    w = tf.reshape(tf.linspace(0.0, 0.3, 9), [3, 3])
    h = tf.ones([1, 3]) * x
    while tf.reduce_max(h) > 1e-3:
        h = tf.matmul(tf.tanh(h), w)
    return h


def gathering(x):
    table = tf.range(0.0, 120.0)
    while x < 100.0:
        x = tf.gather(table, tf.cast(x, tf.int32)) + 1.0
    return x


def gathers_outside(x):
    table = tf.range(0.0, 70.0)
    while x < 100.0:
        x = tf.gather(table, tf.cast(x, tf.int32)) + 1.0
    return x


def divides(x):
    n = tf.cast(x, tf.int32)
    while n < 100:
        n = n + 1 + tf.abs(5 // (n - 97))
    return n


def collatz(x):
    n = tf.cast(x, tf.int32) + 3
    turns = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        turns += 1
    return n, turns


def nested_tensor_loop(x):
    while x < 100.0:
        y = x
        while y > 10.0:
            y = y - 7.0
        x = x + y + 5.0
    return x


def nested_deep(x):
    total = tf.constant(0.0)
    while x < 100.0:
        y = x
        while y > 10.0:
            y = y - 7.0
            z = y
            while z > 0.0:
                total, z = total + z, z - 4.0
        x = x + y + 15.0
    return x, total


def nested_that_breaks(x):
    total = tf.constant(0.0)
    while x < 100.0:
        y = x
        while y > 10.0:
            y = y - 7.0
            if tf.abs(y - 30.0) < 1.0:
                break
            total = total + y
        x = x + 5.0
    return x, total


def nested_from_constants(x):
    total = tf.constant(0)
    while x < 100.0:
        k, j = tf.constant(0), tf.constant([1, 2])
        while k < 3:
            k, j = k + 1, j * 2
        total = total + k + j[1]
        x = x + 20.0
    return x, total


def forever_in_the_middle(x):
    turns, total = 0, x * 0.0
    while True:
        x = x + 1.0
        turns += 1
        if x > 100.0 and total < 1e6:
            total = -total
            break
        total = total + x
    return x, turns, total


def bounded_and_left(x):
    turns = 0
    while turns < 40:
        y = x * 2.0
        x = x + 1.0
        turns += 1
        if not y < 100.0:
            break
        else:
            x = x + 0.5
    else:
        return x, y, turns, "else"
    return x, y, turns


def returns_from_forever(x):
    while True:
        if x > 100.0:
            return x, "done"
        x = x + 3.0


def pair_of_states(x):
    pair, both = (x, x * 2.0), [x, tf.ones([2])]
    while pair[0] < 100.0:
        a, b = pair
        if a > 50.0:
            pair = (a + 2.0, b)
        else:
            pair = (a + 1.0, b - 1.0)
        both = [both[0] * 0.5, both[1] + a]
    return pair, both


def scattering(x):
    seen, n = tf.zeros([8]), 0
    while x < 100.0:
        seen = tf.tensor_scatter_nd_update(seen, [[n]], [x])
        x = x + 12.0
        n += 1
    return x, seen, n


ON_DEVICE = [
    plain, two_states, swapped, with_else, counted, count_is_used, count_bounds, bounds_first, either, negated, flag,
    first_defined_inside, branching, conditional_expression, and_or_values, continuing, breaking, returning, raising,
    calling, inner_python_loop, matrix, gathering, gathers_outside, divides, collatz, nested_tensor_loop, nested_deep,
    pair_of_states, scattering, forever, forever_in_the_middle, bounded_and_left, returns_from_forever,
    nested_that_breaks, nested_from_constants,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_DEVICE, ids=lambda f: f.__name__)
def test_loops_turn_on_the_device(function, backend):
    """Any number of turns, and every way through them."""
    fn = same(function, TRIPS, backend)
    if function in (plain, two_states, counted, with_else):
        # Each call of many turns is one decision on the device, and one that Python hears of.
        before = fn.stats()
        with testing.compile_everything():
            fn(tf.constant(0.0))
        after = fn.stats()
        assert after.decisions_on_device - before.decisions_on_device >= 49
        assert after.launches - before.launches <= 3


# With Python.


def test_effects_stay_with_python(backend):
    """A list that grows in each turn."""
    log = []

    def function(x):
        while x < 100.0:
            log.append(float(x))
            x = x + 10.0
        return x

    fn = same(function, TRIPS, backend, lambda: list(log), on_device=False, reset=log.clear)
    assert "turns in Python" in fn.explain()


def test_an_effect_on_a_rare_path_ends_what_the_device_does(backend):
    """All other turns are the device's; the effect comes once, in its turn, with its value."""
    log = []

    def function(x):
        while x < 100.0:
            if tf.abs(x - 50.0) < 0.5:
                log.append(float(x))
            x = x + 1.0
        return x

    same(function, TRIPS, backend, lambda: list(log), reset=log.clear)


def test_values_from_outside_may_change(backend):
    """Globals, closures and attributes are looked up again each time."""

    class Settings:
        step = 1.0
        shift = tf.constant(0.5)

    settings, scale, log = Settings(), 1.0, []
    weight = tf.Variable(1.0)

    def function(x):
        while x < 100.0:
            x = x + settings.step * scale + weight * settings.shift
        log.append(float(x))
        settings.step = settings.step % 3 + 1
        settings.shift = settings.shift * 0.75
        weight.assign_add(0.25)
        return x

    def reset():
        nonlocal scale
        scale = 1.0
        settings.step, settings.shift = 1.0, tf.constant(0.5)
        weight.assign(1.0)
        log.clear()

    same(function, TRIPS, backend, lambda: (list(log), weight), reset=reset)


def test_a_replaced_function_is_not_the_one_that_was_seen(backend):
    """A helper is another one in some calls."""

    def one(v):
        return v + 1.0

    def other(v):
        return v + 2.0

    ways = {"now": one, "then": other, "n": 0}
    chosen = one

    def function(x):
        nonlocal chosen
        ways["n"] += 1
        chosen = ways["now"] if ways["n"] % 3 else ways["then"]
        while x < 100.0:
            x = chosen(x)
        return x

    same(function, TRIPS, backend, on_device=True, reset=lambda: ways.update(n=0))


def becomes_a_tensor(x):
    total = 0.0
    while x < 100.0:
        total = total + x
        x = x + 10.0
    return x, total


def python_number_changes(x):
    scale = 1.0
    while x < 100.0:
        x = x + scale
        scale = scale * 1.5
    return x, scale


def shape_changes(x):
    y = tf.zeros([1])
    while x < 100.0:
        y = tf.concat([y, tf.reshape(x, [1])], 0)
        x = x + 20.0
    return x, y


def dtype_changes(x):
    y = tf.constant(1)
    while x < 100.0:
        y = tf.cast(y, tf.float32) + 1.0 if x > 50.0 else y
        x = x + 20.0
    return x, y


def list_grows(x):
    seen = []
    while x < 100.0:
        seen.append(x)
        x = x + 20.0
    return x, seen


def reads_locals(x):
    while x < 100.0:
        x = x + float(len(locals()))
    return x


def random_numbers(x):
    while x < 100.0:
        x = x + tf.random.stateless_uniform([], [1, 2]) + 10.0
    return x


def shared_with_a_closure(x):
    def show():
        return x * 1.0

    while x < 100.0:
        x = x + 10.0
    return show()


def asks_twice(x):
    while 0.0 < x + 1.0 < 100.0:
        x = x + 10.0
    return x


def try_inside(x):
    while x < 100.0:
        try:
            x = x + 10.0
        finally:
            x = x + 1.0
    return x


def asks_any(x):
    y = x * 2.0
    while any([x < 60.0, y < 50.0]):
        x, y = x + 7.0, y + 3.0
    return x, y


def asks_bool(x):
    while bool(x > 100.0) is False:
        x = x + 7.0
    return x


@pytest.mark.parametrize(
    ("function", "on_device"),
    [
        (asks_any, False), (asks_bool, False),
        (becomes_a_tensor, True), (python_number_changes, False), (shape_changes, False), (dtype_changes, True),
        (list_grows, True), (reads_locals, False), (random_numbers, False),
        (shared_with_a_closure, False), (asks_twice, True), (try_inside, False),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)  # fmt: skip
def test_what_does_not_fit_turns_in_python(function, on_device, backend):
    """Nothing else is different."""
    fn = same(function, TRIPS, backend, on_device=on_device)
    if not on_device and function not in (reads_locals, asks_any, asks_bool):
        assert "turns in Python" in fn.explain()


def test_another_tape_outside(backend):
    """The caller's tape sees every turn."""
    w = tf.Variable(1.05)

    def function(y):
        while y < 100.0:
            y = y * w + 5.0
        return y

    fn = coexec.function(function, control_flow=True)
    for (x,) in TRIPS:
        grads = []
        for each in (function, fn):
            with tf.GradientTape() as tape:
                y = each(x)
            grads.append(tape.gradient(y, w))
        assert_same(snapshot(grads[0]), snapshot(grads[1]), rtol=1e-5, atol=1e-6)


def test_nan_and_infinity(backend):
    """Comparisons with what is no number end a loop as ever."""

    def function(x):
        while x < 100.0:
            x = x * x + tf.sqrt(x - 1.0)
        return x

    same(function, scalars(2, 0, 3, math.inf, math.nan, 1.5, -math.inf, 2, 0.5), backend)


def test_names_stay_what_they_are():
    """Objects that the loop does not touch are the same ones afterwards; the state is made of tensors."""
    thing = object()

    def function(x, other):
        keep, count, text = other, 0, "a"
        while x < 100.0:
            x = x + 1.0
            count += 1
        return x, keep is other, keep is thing, type(count) is int, text, isinstance(x, tf.Tensor)

    fn = coexec.function(function, control_flow=True)
    for (x,) in TRIPS * 2:
        assert fn(x, thing)[1:] == function(x, thing)[1:]
        assert float(fn(x, thing)[0]) == float(function(x, thing)[0])
    assert fn.stats().decisions_on_device > 0


def test_more_turns_than_the_device_takes_at_once(tune, backend):
    """Python takes one in between, and goes on from there."""
    tune(max_device_turns=7)
    fn = same(counted, TRIPS, backend)
    before = fn.stats()
    with testing.compile_everything():
        fn(tf.constant(0.0))
    after = fn.stats()
    assert 80 <= after.decisions_on_device - before.decisions_on_device < 100
    assert after.decisions - before.decisions >= 12
    same(nested_deep, TRIPS, backend)


def test_layers_are_called_on_the_device(backend):
    """Of Keras', as they are: what they hold is read each time, and a layer that is changed is looked at anew."""
    layer = keras.layers.Dense(4, kernel_initializer="orthogonal", activation="tanh")
    cell = keras.layers.GRUCell(4)
    table = keras.layers.Embedding(5, 4)
    start = [v.numpy() for part in (layer(tf.ones([1, 4])), cell(tf.ones([1, 4]), tf.ones([1, 4]))[0]) for v in [part]]
    table(tf.constant([1]))
    kept = [w.numpy() for part in (layer, cell, table) for w in part.weights]
    assert start
    calls = {"n": 0}

    def function(x):
        h, turns = tf.ones([1, 4]) * 0.01 * x, 0
        while tf.reduce_sum(tf.abs(h)) < 3.0 and turns < 20:
            letter = tf.argmax(h, 1)
            h, _ = cell(table(letter), layer(h) * 1.5)
            turns += 1
        calls["n"] += 1
        layer.kernel.assign_add(tf.ones([4, 4]) * 0.125)
        if calls["n"] == 6:
            layer.activation = keras.activations.relu
        return h, turns

    def reset():
        calls["n"] = 0
        layer.activation = keras.activations.tanh
        for weight, value in zip([w for part in (layer, cell, table) for w in part.weights], kept, strict=True):
            weight.assign(value)

    same(function, TRIPS, backend, lambda: layer.kernel, reset=reset)


def test_objects_are_not_kept_alive():
    """What a loop has read of an object does not keep it."""
    import gc
    import weakref

    class Model:
        def __init__(self):
            self.step = tf.constant(2.0)

        def run(self, x):
            while x < 100.0:
                x = x + self.step
            return x

    fn = coexec.function(lambda model, x: model.run(x), control_flow=True)
    model = Model()
    for _ in range(4):
        assert float(fn(model, tf.constant(0.0))) == 100.0
    assert fn.stats().decisions_on_device > 0
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    model = Model()
    model.step = tf.constant(5.0)
    assert float(fn(model, tf.constant(3.0))) == 103.0


def test_several_threads():
    """Each call is its own."""
    fn = coexec.function(counted, control_flow=True)
    failures = []

    def work(number):
        for n in range(12):
            x = tf.constant(float((number * 31 + n * 7) % 100))
            found, right = fn(x), counted(x)
            if float(found[0]) != float(right[0]) or found[1:] != right[1:]:
                failures.append((number, n, found, right))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert fn.stats().decisions_on_device > 0


def test_the_option_leaves_all_to_python():
    """Each turn is then a read."""
    fn = coexec.function(plain, control_flow=False)
    for (x,) in TRIPS:
        assert float(fn(x)) == float(plain(x))
    assert fn.stats().decisions_on_device == 0
    assert fn.stats().decisions > 300


@pytest.mark.clocked
def test_loops_that_take_longer_are_left_to_python(monkeypatch, tune):
    """By the clock: a loop that turns once, behind which all has to wait, say."""
    tune(decision_patience=20, doubt_before_timing=10**6)  # iterations are timed, calls are not
    monkeypatch.setattr(decisions.Decisions, "_compare_times", slowed(decisions.Decisions._compare_times))
    fn = coexec.function(plain, control_flow=True)
    for _ in range(40):
        assert float(fn(tf.constant(80.0))) == 100.0
    assert fn.stats().decisions_on_device > 0
    assert "on the device" in fn.explain()
    before = fn.stats().decisions_on_device
    fn(tf.constant(80.0))
    assert fn.stats().decisions_on_device == before, fn.explain()


def slowed(original):
    def account(self, site, seconds):
        original(self, site, seconds + 1.0)

    return account


def test_a_debugger_sees_each_turn():
    """Where somebody traces lines, Python turns."""

    lines = []

    def tracing(frame, event, arg):
        if event == "line" and frame.f_code is plain.__code__:
            lines.append(frame.f_lineno)
        return tracing

    fn = coexec.function(plain, control_flow=True)
    for _ in range(4):
        fn(tf.constant(0.0))
    assert fn.stats().decisions_on_device > 0
    before = sys.gettrace()
    sys.settrace(tracing)
    try:
        fn(tf.constant(90.0))
    finally:
        sys.settrace(before)
    assert len(lines) >= 20


def test_numbers_are_eagers():
    """A loop over whole numbers gives them exactly, whatever they become."""

    def function(n):
        total = tf.constant(0, tf.int64)
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            total = total + tf.cast(n, tf.int64) * 1_000_003
        return n, total

    fn = coexec.function(function, control_flow=True)
    for k in (27, 97, 6, 7, 1, 9, 27, 31):
        one, other = fn(tf.constant(k)), function(tf.constant(k))
        assert [int(v) for v in one] == [int(v) for v in other]
        np.testing.assert_equal([v.dtype for v in one], [v.dtype for v in other])
    assert fn.stats().decisions_on_device > 100
