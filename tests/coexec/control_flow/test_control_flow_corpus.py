"""The corpus of control flow: small programs, each with `control_flow` on and off, against plain Python.

Each is called on numbers that make a loop turn not at all, once and many times, and a branch go either way, twice over.
Values, effects (what is in `log`), and gradients are compared; counts say who has decided: the device, Python, or both.
"""

import linecache
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage"), pytest.mark.slow]

NUMBERS = [0.0, 9.0, 10.0, 30.0, 4.0, -3.0, 9.0, 0.0, 10.0, 1.0, 5.0, 30.0]

PROGRAMS = []


def on(*deciders):
    """Adds a program; `deciders` are those who decide in it: "device", "python"."""

    def add(function):
        PROGRAMS.append((function, deciders))
        return function

    return add


# Loops.


@on("device")
def a_loop(x, log):
    while x < 10.0:
        x = x + 1.0
    return x


@on("device")
def a_loop_with_else(x, log):
    while x < 10.0:
        x = x + 1.0
    else:
        x = x * 2.0
    return x


@on("device")
def a_loop_with_break(x, log):
    while x < 10.0:
        x = x + 1.0
        if x > 6.5:
            break
    else:
        return x, "else"
    return x, "break"


@on("device")
def a_loop_with_continue(x, log):
    kept = x * 0.0
    while x < 10.0:
        x = x + 1.0
        if x > 5.0:
            continue
        kept = kept + x
    return x, kept


@on("device")
def a_loop_with_an_early_return(x, log):
    turns = 0
    while x < 10.0:
        turns += 1
        if x > 7.5:
            return x, turns
        x = x + 1.0
    return x, -turns


@on("device")
def a_loop_that_counts(x, log):
    turns = 0
    while x < 10.0 and turns < 5:
        x = x + 1.0
        turns += 1
    return x, turns


@on("device")
def a_loop_in_a_loop(x, log):
    while x < 10.0:
        y = x
        while y > 2.0:
            y = y - 3.0
        x = x + tf.abs(y) + 1.0
    return x


@on("device")
def a_loop_for_ever(x, log):
    while True:
        x = x + 1.0
        if x > 12.0:
            return x


@on("device")
def first_defined_in_a_loop(x, log):
    while x < 10.0:
        last = x * 2.0
        x = x + 1.0
    try:
        return x, last
    except UnboundLocalError:
        return x, None


@on("device")
def a_loop_over_a_range_that_breaks(x, log):
    for k in range(12):  # noqa: B007
        x = x + 1.0
        if x > 9.0:
            break
    return x, k


@on("device")
def a_loop_over_a_range_that_breaks_first(x, log):
    for _ in range(2, 14, 3):
        if not x < 9.0:
            break
        x = x * 1.5 + float(2)
    return x + 1.0


@on("device")
def a_loop_over_a_range_counted_down(x, log):
    n, total = 9, x * 0.0
    for k in range(n, -1, -1):  # noqa: B007
        total = total + x
        if total > 20.0 or x < -1.0:
            break
        x = x + 1.0
    return total, x, k


@on("device")
def a_loop_over_a_range_with_else(x, log):
    for k in range(5):  # noqa: B007
        x = x + 1.0
        if x > 9.0:
            break
    else:
        return x, "else"
    return x, k


@on("python")
def a_loop_over_a_list_that_breaks(x, log):
    for by in [1.0, 2.0, 3.0]:
        x = x + by
        if x > 9.0:
            break
    return x, by


@on("device")
def a_loop_over_a_tensor(x, log):
    total = x
    for row in tf.reshape(tf.range(6.0), [3, 2]):
        if row[0] > x:
            total = total + row[1]
    return total


@on("device")
def a_loop_over_a_range_of_tensors(x, log):
    total = x
    for k in tf.range(tf.cast(tf.maximum(x, 0.0), tf.int32) // 3):
        total = total + tf.cast(k, tf.float32)
        if total > 5.0:
            total = total - 2.0
    return total


@on("device")
def a_loop_over_a_dataset(x, log):
    for element in tf.data.Dataset.range(3):
        if x > tf.cast(element, tf.float32):
            x = x - 1.0
    return x


@on("device")
def a_loop_in_a_loop_over_a_list(x, log):
    for limit in (5.0, 10.0, 20.0):
        while x < limit:
            x = x + 2.0
    return x


@on("device")
def whole_numbers(x, log):
    n = tf.cast(x, tf.int32) + 4
    turns = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        turns += 1
    return n, turns


@on("device")
def a_list_grows_in_a_loop(x, log):
    seen = []
    while x < 10.0:
        seen.append(x)
        x = x + 3.0
    return seen, x


@on("device")
def a_list_is_measured_in_a_loop(x, log):
    seen = [x]
    while x < 20.0 and len(seen) < 5:
        x = x + 3.0
        if x > 7.0:
            seen.append(x)
    return tf.stack(seen), len(seen)


@on("python")
def a_list_is_looked_at_in_a_loop(x, log):
    seen = [x]
    while x < 10.0:
        x = seen[-1] + 3.0
        seen.append(x)
    return seen


@on("device")
def a_loop_in_an_interval(x, log):
    while -5.0 < x < 10.0:
        x = x + 1.5
    return x


@on("python")
def a_shape_changes_in_a_loop(x, log):
    y = tf.reshape(x, [1])
    while tf.reduce_sum(y) < 40.0 and tf.size(y) < 6:
        y = tf.concat([y, y[:1] + 5.0], 0)
    return y


@on("device", "python")
def a_dtype_changes_in_a_loop(x, log):
    y = tf.cast(x, tf.int32)
    while y < 10:
        y = tf.cast(y, tf.float32) + 2.5
    return y


@on("python")
def a_number_becomes_another_in_a_loop(x, log):
    step = 1.0
    while x < 10.0:
        x = x + step
        step = step * 1.5
    return x, step


@on("python")
def an_effect_in_a_loop(x, log):
    while x < 10.0:
        log.append(float(x))
        x = x + 4.0
    return x


@on("device", "python")
def an_effect_in_some_turns(x, log):
    while x < 10.0:
        if tf.abs(x - 6.0) < 0.5:
            log.append("six")
        x = x + 1.0
    return x


@on("python")
def a_print_in_a_loop(x, log):
    told = StringIO()
    with redirect_stdout(told):
        while x < 10.0:
            print(int(x))
            x = x + 4.0
    return x, told.getvalue()


@on("python")
def an_attribute_is_written_in_a_loop(x, log):
    note = SimpleNamespace(n=0)
    while x < 10.0:
        note.n += 1
        x = x + 4.0
    return x, note.n


@on("python")
def an_unknown_library_in_a_loop(x, log):
    while x < 10.0:
        x = x + float(np.linalg.norm([3.0, 4.0]))
    return x


@on("python")
def an_exception_is_handled_in_a_loop(x, log):
    limits, turn = {0: 1.0, 1: 3.0}, 0
    while x < 10.0:
        try:
            x = x + limits[turn]
        except KeyError as error:
            log.append(error.args[0])
            x = x + 10.0
        turn += 1
    return x


@on("device")
def an_exception_is_handled_around_a_loop(x, log):
    try:
        while x < 10.0:
            x = x + 1.0
            if x > 8.5:
                raise ValueError("too much")
    except ValueError as error:
        return x, str(error)
    return x


@on("device")
def a_context_around_a_loop(x, log):
    with nullcontext(2.0) as by, tf.name_scope("scope"):
        while x < 10.0:
            x = x + by
    return x


@on("device")
def a_closure_is_read_in_a_loop(x, log):
    by = tf.constant(2.0)

    def more(value):
        return value + by

    while x < 10.0:
        x = more(x)
    return x


@on("python")
def a_nonlocal_in_a_loop(x, log):
    calls = 0

    def more(value):
        nonlocal calls
        calls += 1
        return value + 4.0

    while x < 10.0:
        x = more(x)
    return x, calls


@on("device")
def lambdas_over_a_loop_variable(x, log):
    scales = []
    for factor in (1.0, 2.0, 3.0):
        scales.append(lambda value: value + factor)  # noqa: B023
    while x < 10.0:
        x = scales[0](x)
    return x, scales[1](x)


@on("python")
def a_predicate_that_is_logged(x, log):
    going = x < 10.0
    while going:
        log.append(bool(going))
        x = x + 4.0
        going = x < 10.0
    return x


@on("device")
def a_predicate_that_is_returned(x, log):
    going = x < 10.0
    while going:
        x = x + 4.0
        going = x < 10.0
    return x, bool(going), going


@on("device")
def a_loop_without_source(x, log):
    return NAMESPACE["step"](x)


NAMESPACE = {"tf": tf}
SOURCE = "def step(x):\n    while x < 10.0:\n        x = x + 1.0\n    return x\n"
linecache.cache["<cell>"] = (len(SOURCE), None, SOURCE.splitlines(True), "<cell>")
exec(compile(SOURCE, "<cell>", "exec"), NAMESPACE)
SOURCELESS = {"tf": tf}
exec(SOURCE, SOURCELESS)


@on("python")
def a_loop_whose_source_is_unknown(x, log):
    return SOURCELESS["step"](x)


@on("python")
def a_generator(x, log):
    def turns(value):
        while value < 10.0:
            value = value + 4.0
            yield value

    return [float(value) for value in turns(x)]


# Branches.


@on("device")
def a_branch(x, log):
    if x > 5.0:
        y = x * 2.0
    else:
        y = x - 1.0
    return y + 1.0


@on("device")
def a_branch_without_else(x, log):
    y = x
    if y > 5.0:
        y = y * 2.0
    return y + 1.0


@on("device")
def many_branches(x, log):
    if x > 9.5:
        y = x * 2.0
    elif x > 4.5:
        y = x - 1.0
    elif x > 0.5:
        y = -x
    else:
        y = x * x
    return y + 1.0


@on("device")
def a_branch_in_a_branch(x, log):
    y = x
    if x > 0.5:
        if x > 5.0:
            y = y * 2.0
        else:
            y = y * 3.0
    return y + 1.0


@on("device")
def an_early_return(x, log):
    if x > 5.0:
        return x * 2.0
    y = x + 1.0
    return y * y


@on("device")
def a_branch_on_and_or_not(x, log):
    y = x
    if x > 1.0 and x < 9.5 and x != 5.0:
        y = y + 1.0
    z = y
    if x < 0.0 or x > 9.5:
        z = y + 2.0
    return y, z


@on("device")
def conditional_expressions(x, log):
    y = x
    while y < 10.0:
        y = y + 1.0 if y > 5.0 else y + 2.0
    return y


@on("device")
def a_conditional_expression(x, log):
    return x * 2.0 if x > 5.0 else x - 1.0


@on("device")
def values_of_and_or(x, log):
    return ((x - 4.0) and (x - 9.0)) or x


@on("python")
def a_conditional_expression_in_the_midst(x, log):
    log.append("before")
    y = 2.0 * (x if x > 5.0 else x - 1.0) + (tf.abs(x) if not x > 0.5 else x)
    log.append("behind")
    return y


@on("python")
def a_conditional_expression_of_numbers(x, log):
    n = 1 if x > 5.0 else 2
    return x * n, n


@on("python")
def a_test_that_mixes(x, log):
    y = x
    if (x > 0.5 and x < 4.5) or not x < 9.5:
        y = y + 1.0
    return y * 2.0


@on("python")
def a_gradient_through_an_expression(x, log):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x if x > 5.0 else x * 3.0
        z = (y - 9.0) and y * 2.0
    return y, tape.gradient(z, x)


@on("device")
def a_chained_comparison(x, log):
    y = x
    if 1.0 < x < 9.5:
        y = y + 1.0
    return y


@on("device")
def an_assertion(x, log):
    return ASSERTING["step"](x)


# Not here: pytest makes something else of `assert`, which has no source then.
ASSERTING = {"tf": tf}
ASSERTION = "def step(x):\n    y = x * 2.0\n    assert 0.0 <= y < 50.0, 'too far'\n    return y + 1.0\n"
linecache.cache["<asserting>"] = (len(ASSERTION), None, ASSERTION.splitlines(True), "<asserting>")
exec(compile(ASSERTION, "<asserting>", "exec"), ASSERTING)


@on("python")
def a_comprehension(x, log):
    return [float(v) for v in tf.stack([x, x + 1.0, x + 6.0]) if v > 5.0]


@on("python")
def none_in_one_branch(x, log):
    y = None
    if x > 5.0:
        y = x * 2.0
    return y


@on("python")
def undefined_in_one_branch(x, log):
    if x > 5.0:
        y = x * 2.0
    try:
        return y
    except UnboundLocalError:
        return "undefined"


@on("python")
def a_dtype_changes_in_a_branch(x, log):
    y = x
    if x > 5.0:
        y = tf.cast(x, tf.int32)
    return y


@on("python")
def a_shape_changes_in_a_branch(x, log):
    y = x
    if x > 5.0:
        y = tf.stack([x, x])
    return y


@on("device")
def a_branch_on_a_shape(x, log):
    y = tf.ones([3])
    if tf.shape(y)[0] > 2:
        y = y[:2] * x
    if x > 5.0:
        y = y + 1.0
    return y + 0.0


@on("python")
def an_effect_in_a_branch(x, log):
    if x > 5.0:
        log.append("large")
    return x


class Counter:
    """Of objects that are changed."""

    def __init__(self):
        self.large, self.last = 0, None

    def note(self, x):
        self.large += 1
        self.last = x


@on("python")
def an_object_is_changed_in_a_branch(x, log):
    counter = Counter()
    if x > 5.0:
        counter.note(x * 2.0)
    return counter.large, counter.last


@on("python")
def a_dict_with_a_computed_key(x, log):
    counts = {}
    for value in tf.stack([x, x, x + 1.0]):
        counts[int(value)] = counts.get(int(value), 0) + 1
    if x > 5.0:
        counts[f"first {int(x)}"] = True
    return counts


@on("python")
def deleted_in_a_branch(x, log):
    y = x + 1.0
    if x > 5.0:
        del y
        y = [x, x]
    return y


@on("python")
def an_identity_is_asked(x, log):
    y, z = x * 1.0, x * 1.0
    best = y
    if x > 5.0:
        best = z
    return best is y, best is z


@on("python")
def a_fault_in_one_branch(x, log):
    y = x
    if x > 9.5:
        y = tf.gather(tf.range(20.0), tf.cast(x, tf.int32))
    return y


@on("device")
def callees(x, log):
    return bounded(x) + bounded(x * 2.0)


def bounded(x):
    """A callee with a branch, whose caller waits for a value."""
    y = x
    if x > 5.0:
        y = y * 0.5
    return y


@on("device")
def layers_behind_gates(x, log):
    h = tf.fill([1, 3], 0.1) * x
    for layer in LAYERS:
        if tf.reduce_sum(layer(h)) > 0.0:
            h = h + layer(h)
    return h


keras.utils.set_random_seed(3)
LAYERS = [keras.layers.Dense(3, "tanh", bias_initializer="normal") for _ in range(3)]
for _layer in LAYERS:
    _layer.build((1, 3))


# Recursion.


@on("device")
def recursion_on_a_tensor(x, log):
    def halved(value, depth):
        if value < 2.0:
            return value, depth
        return halved(value * 0.5, depth + 1)

    return halved(x, 0)


@on("device")
def recursion_on_a_number(x, log):
    def power(value, n):
        if n == 0:
            return tf.ones_like(value)
        half = power(value, n // 2)
        return half * half * value if n % 2 else half * half

    y = power(x, 5)
    if y > 1e4:
        y = y * 0.5
    return y + 0.0


@on("device")
def recursion_over_a_tree(x, log):
    h = subtree(tf.cast(tf.abs(x), tf.int32) % 5)
    return h * x


def subtree(i):
    if CHILDREN[i, 0] < 0:
        leaf = tf.cast(i, tf.float32) * 0.5
        return leaf
    return tf.tanh(subtree(CHILDREN[i, 0])) + subtree(CHILDREN[i, 1]) * 0.75


CHILDREN = tf.constant([[1, 2], [3, 4], [-1, -1], [-1, -1], [-1, -1]])


@on("python")
def recursion_with_effects(x, log):
    def halved(value):
        if value < 2.0:
            log.append("end")
            return value
        return halved(value * 0.5)

    y = halved(x)
    return y


@on("device")
def what_a_helper_returns(x, log):
    def bounded(value):
        if value > 9.0:
            return value * 0.5
        if value < 0.0:
            return -value
        value = value + 1.0
        return value

    y = bounded(x) + bounded(x - 5.0)
    log.append("behind")
    return y


# Gradients.


@on("device")
def a_gradient_through_a_loop(x, log):
    w = tf.constant(1.5)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = x
        while y < 10.0:
            y = y * w + 5.0
    return y, tape.gradient(y, [x, w])


@on("device")
def a_gradient_through_a_list(x, log):
    w = tf.constant(1.5)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y, parts = x, [x]
        while y < 10.0:
            y = y * w + 5.0
            parts.append(tf.sin(y))
        total = tf.add_n(parts)
    return total, len(parts), tape.gradient(total, [x, w, *parts[:2]])


@on("device")
def a_gradient_through_a_list_of_a_range(x, log):
    w = tf.constant(1.5)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y, parts = x, []
        for k in range(6):
            y = y * w + k
            parts.append(y)
            if y > 20.0:
                break
        total = tf.reduce_sum(tf.stack(parts) * w)
    return total, k, tape.gradient(total, [x, w])


@on("device")
def a_gradient_of_what_a_helper_returns(x, log):
    def bounded(value):
        if value > 5.0:
            return value * value
        value = value * 3.0
        return value

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = bounded(x) + 1.0
        y = y * 2.0
    return y, tape.gradient(y, x)


@on("device")
def a_gradient_of_recursion(x, log):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = powers(x)
    return y, tape.gradient(y, x)


def powers(value):
    if value > 100.0:
        return value
    return powers(value * value + 1.0)


@on("device")
def a_gradient_through_a_branch(x, log):
    with tf.GradientTape() as tape:
        tape.watch(x)
        if x > 5.0:
            y = x * x
        else:
            y = x * 3.0
        y = y + 0.0
    return y, tape.gradient(y, x)


@on("python")
def a_gradient_of_one_way_only(x, log):
    w = tf.constant(1.5)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = x * 1.0
        if x > 5.0:
            y = x * w
    return y, tape.gradient(y, [x, w])


@on("device")
def a_gradient_beside_a_loop(x, log):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    g = tape.gradient(y, x)
    while g < 10.0:
        g = g + 3.0
    return g


@pytest.mark.parametrize("control_flow", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(("function", "deciders"), PROGRAMS, ids=lambda v: getattr(v, "__name__", ""))
def test_programs(function, deciders, control_flow, backend):
    """Plain Python's values, effects and gradients; the device decides where it is said to."""
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=control_flow)
    with testing.compile_everything():
        for number, value in enumerate(NUMBERS):
            results = []
            for each in (function, fn):
                log = []
                try:
                    result = each(tf.constant(value), log)
                except Exception as error:
                    result = error.with_traceback(None)
                results.append(snapshot((result, log)))
            assert_same(*results, rtol=1e-5, atol=1e-5, path=f"call {number}, of {value}: ")
    stats = fn.stats()
    assert stats.followed > 0
    assert stats.decisions > 0 or "generator" in function.__name__, "nobody was asked"
    assert (stats.decisions_on_device > 0) is (control_flow and "device" in deciders), fn.explain()


def test_how_many_there_are():
    """And that each has a name of its own."""
    assert len({function.__name__ for function, _ in PROGRAMS}) == len(PROGRAMS) >= 60
