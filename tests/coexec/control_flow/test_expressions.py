"""Expressions that ask tensors, in the midst of a statement: what the device decides, and that nobody can tell."""

import linecache
import sys
import textwrap

import keras
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_branches import INPUTS, with_else
from tests.coexec.control_flow.test_control_flow import outcome, same
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [
    needs_places,
    pytest.mark.usefixtures("eager_to_stage"),
]


# On the device.


def conditional(x):
    y = x * 2.0 if x > 0.0 else x - 1.0
    return y + x


def conditional_of_names(x):
    a, b = x * 2.0, x + 1.0
    y = a if a > b else b
    return y, a, b


def negated(x):
    y = x * 2.0 if not x > 3.0 else x - 1.0
    return y + x


def chained_conditions(x):
    y = x if x > 6.0 else x * 2.0 if x > 2.0 else -x if x > 0.0 else x - 1.0
    return y * 1.0


def conditions_in_conditions(x):
    y = (x + 1.0 if x > 3.0 else x + 2.0) if x > 0.0 else (x + 3.0 if x > -2.0 else x + 4.0)
    return y * 1.0


def several_in_one_statement(x):
    a, b = x if x > 0.0 else -x, x + 1.0 if x > 5.0 else x - 1.0
    return a * b, a


def in_the_midst_of_an_expression(x):
    y = 1.0 + 2.0 * (x if x > 0.0 else tf.exp(x)) - tf.abs(x if x < 2.0 else x * 3.0)
    return y + x


def over_several_lines(x):
    y = tf.add(
        x * 2.0
        if x > 0.0
        else x - 1.0,
        x if x < 5.0
        else -x,
    )  # fmt: skip
    return y + x


def value_of_and(x):
    y = (x - 1.0) and (x + 3.0)
    return y * 1.0


def value_of_or(x):
    y = (x - 1.0) or (x - 6.0) or (x + 3.0)
    return y * 1.0


def values_of_both(x):
    y = (x - 1.0 and x + 3.0) or x - 5.0
    z = x and (x + 1.0 or x * 2.0)
    return y, z


def a_chain_is_a_value(x):
    inside = 0.0 < x < 6.0
    return tf.cast(inside, tf.float32) + x


def a_chain_is_the_first_that_fails(x):
    y = tf.reshape(x, [1, 1])
    inside = -2.0 < y <= 6.0 != y
    return inside, y


def augmented(x):
    y = x * 1.0
    y += x if x > 0.0 else x + 10.0
    y *= y and 2.0 * x
    return y


def annotated(x):
    y: tf.Tensor = x + 1.0 if x > 0.0 else x - 1.0
    return y


def of_itself(x):
    y = x * 1.0
    y = y + 1.0 if y > 3.0 else y
    y = y if y < 7.0 else y * 2.0
    return y, x


def swapped(x):
    a, b = x + 1.0, x * 3.0
    a, b = (b, a) if a > b else (a, b)
    return a, b, a - b


def returned(x):
    return x * 2.0 if x > 0.0 else x - 1.0


def returned_in_a_loop(x):
    for k in range(3):
        x = x + float(k)
        if k == 2:
            return (x, x * 2.0) if x > 5.0 else (x * 3.0, x)
    return x


def returned_under_a_name_scope(x):
    with tf.name_scope("scope"):
        y = x - 1.0
        return y and y * 2.0


def in_a_python_loop(x):
    total = x * 0.0
    for k in range(4):
        total = total + (x if x > float(k) else x * 0.5)
    return total


def last_in_a_python_loop(x):
    for k in range(4):
        x = x - 1.0 if x > float(k) else x + 2.5
    return x


def last_in_a_with(x):
    with tf.name_scope("scope"):
        y = x if x > 0.0 else -x
    with tf.name_scope("other"):
        y = y + 1.0 if y > 2.0 else y
    return y


def last_in_a_try(x):
    y = x
    try:
        y = x if x > 0.0 else -x
    finally:
        y = y + 1.0
    return y


def last_of_all(x):
    box.last = x
    x = x if x > 0.0 else -x


class Box:
    last = None


box = Box()


def helper(x, limit=3.0):
    y = x * 0.5 if x > limit else x + 1.0
    return y * 2.0


def in_a_helper(x):
    return helper(x) + helper(x * 2.0, 1.0)


def helpers_on_both_ways(x):
    y = helper(x) if x > 0.0 else helper(-x) + 1.0
    return y - x


def of_a_number(x):
    n = tf.cast(x, tf.int32)
    y = x * 2.0 if n else x
    z = x if n % 2 else x + 1.0
    return y, z


def a_test_of_a_chain(x):
    y = x
    if 0.0 < x < 6.0:
        y = y + 100.0
    z = y
    if -2.0 <= x < 0.0 < y + 8.0:
        z = y * 2.0
    else:
        z = z - 1.0
    return y, z


def a_chain_among_others(x):
    y = x
    if x != 2.0 and 0.0 < x < 6.0 and x < 5.5:
        y = y + 100.0
    return y * 1.0


def a_mixed_test(x):
    y = x
    if (x > 0.0 and x < 3.0) or x > 6.0:
        y = y + 100.0
    if not (x > 0.0 and x < 6.0):
        y = y - 10.0
    else:
        y = y * 2.0
    if x < 0.0 or 1.0 < x < 5.0:
        y = y + 0.5
    return y * 1.0


def a_mixed_test_over_lines(x):
    y = x
    if (
        (x > 0.0
         and x < 3.0)
        or x > 6.0
    ):  # fmt: skip
        y = y + 100.0
    elif (x
          < -2.0) or (-1.0
                      < x <= 0.0):  # fmt: skip
        y = y - 100.0
    z = y + 1.0
    return z


def a_test_of_a_condition(x):
    y = x
    if x < 5.0 if x > 0.0 else x < -2.0:
        y = y + 100.0
    return y * 1.0


def behind_what_holds(x):
    n = tf.cast(x, tf.int32)
    y = x
    if 0 <= n < 4 and ROW[n] > 2.0:
        y = y + 100.0
    return y * 1.0


ROW = tf.constant([1.0, 2.0, 3.0, 4.0])


def costly_ways(x):
    m = tf.eye(8) * x
    m = tf.matmul(tf.tanh(m), m) if x > 0.0 else tf.matmul(m, m) + tf.matmul(m, m - 1.0)
    return tf.reduce_sum(m)


def returned_to_a_caller(x):
    def inner(v):
        return v if v > 0.0 else -v

    return inner(x) + inner(x * 2.0)


def annotated_name(x):
    y: tf.Tensor = x if x > 0.0 else x - 1.0
    return y


def negated_name(x):
    y = x * 2.0 if not x > 3.0 else x
    return y + x


def last_name_in_a_python_loop(x):
    for k in range(4):
        x = x if x > float(k) else x + 2.5
    return x


def both_end_at_once(x):
    y = x
    if not (x > 0.0 and x < 6.0):
        y = y - 10.0
    else:
        y = y * 2.0
    z = y if x > 0.0 and x != 2.0 else x
    return y, z


def in_a_lambda(x):
    return (lambda v: v if v > 0.0 else -v)(x)


ON_DEVICE = [
    returned_to_a_caller, conditional_of_names, value_of_and, value_of_or, a_chain_is_a_value,
    a_chain_is_the_first_that_fails, of_itself, swapped, returned, returned_in_a_loop, returned_under_a_name_scope,
    last_in_a_with, last_in_a_try, last_of_all, of_a_number, a_test_of_a_chain, a_chain_among_others, annotated_name,
    negated_name, last_name_in_a_python_loop, both_end_at_once, in_a_lambda,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_DEVICE, ids=lambda f: f.__name__)
def test_expressions_are_decided_on_the_device(function, backend):
    """Either way, and Python does not wait: a call is one launch."""
    fn = same(function, INPUTS, backend, lambda: box.last)
    before = fn.stats()
    with testing.compile_everything():
        for args in INPUTS:
            fn(*args)
            assert sys.gettrace() is None
    after = fn.stats()
    assert after.launches - before.launches == len(INPUTS), fn.explain()
    assert after.diverged == before.diverged
    assert after.decisions_on_device - before.decisions_on_device == after.decisions - before.decisions
    assert "is decided on the device" in fn.explain()


# With Python: whatever it is answered, more of the statement or test is left to evaluate than names.

LEFT_TO_PYTHON = [
    conditional, negated, chained_conditions, conditions_in_conditions, several_in_one_statement,
    in_the_midst_of_an_expression, over_several_lines, values_of_both, augmented, annotated, in_a_python_loop,
    last_in_a_python_loop, in_a_helper, helpers_on_both_ways, a_mixed_test_over_lines, a_test_of_a_condition,
    costly_ways,
]  # fmt: skip


@pytest.mark.parametrize("function", LEFT_TO_PYTHON, ids=lambda f: f.__name__)
def test_nothing_is_evaluated_to_be_dropped(function, backend):
    """Values are eager's, and `explain()` says why Python decides."""
    fn = same(function, INPUTS, backend, on_device=False)
    assert "whatever the answer" in fn.explain(), fn.explain()


def test_some_tests_end_at_once_and_others_do_not(backend):
    """Those of the device, and Python's, of one function."""
    fn = same(a_mixed_test, INPUTS, backend)
    assert "whatever the answer" in fn.explain()



def a_number_of_pythons(x):
    n = 1 if x > 0.0 else 2
    return x * float(n), n


def a_truth_of_pythons(x):
    positive = not x > 0.0
    return positive, x


def other_shapes(x):
    y = tf.ones([2]) if x > 0.0 else tf.ones([3])
    return y * x


def other_dtypes(x):
    y = x - 1.0
    return y and tf.cast(y, tf.int32)


def none_on_one_way(x):
    y = x * 2.0 if x > 0.0 else None
    return y


def on_one_line_with_others(x):
    y = x if x > 0.0 else -x; z = y + 1.0  # noqa: E702
    return y, z


def into_a_list(x):
    found = [x, x]
    found[0] = x if x > 0.0 else -x
    return found


def an_argument_of_something_unknown(x):
    found = []
    found.append(x if x > 0.0 else -x)
    return found


def shared_with_a_closure(x):
    def show():
        return y * 1.0

    y = x if x > 0.0 else -x
    return show()


def looks_at_its_variables(x):
    y = x if x > 0.0 else -x
    return y, sorted(locals())


def fails_on_one_way(x):
    y = tf.gather(tf.range(4.0), tf.cast(x, tf.int32)) if x > 6.0 else x
    return y + 1.0


def returned_from_a_try(x):
    try:
        return x if x > 0.0 else -x
    finally:
        x = None


def random_on_one_way(x):
    y = x + tf.random.stateless_uniform([], [1, 2]) if x > 0.0 else x
    return y


def named_on_the_way(x):
    y = (z := x + 1.0) if x > 0.0 else (z := x - 1.0)
    return y, z


ON_HOST = [
    a_number_of_pythons, a_truth_of_pythons, other_shapes, other_dtypes, none_on_one_way, on_one_line_with_others,
    into_a_list, an_argument_of_something_unknown,
    shared_with_a_closure, looks_at_its_variables, fails_on_one_way, returned_from_a_try, random_on_one_way,
    named_on_the_way,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_HOST, ids=lambda f: f.__name__)
def test_what_differs_by_more_than_values_is_pythons(function, backend):
    """As ever."""
    same(function, INPUTS, backend, on_device=False)


def test_what_python_would_not_compute_does_not_fail(backend):
    """The second part of `and` and of a chain, where the first does not hold."""
    fn = same(behind_what_holds, INPUTS, backend, on_device=False)
    assert "may fail" in fn.explain()

    def function(x):
        n = tf.cast(x, tf.int32)
        while 0 <= n < 4 and tf.gather(ROW, n) < 3.5:
            n = n + 1
        return n

    same(function, INPUTS, backend)


# Loops.


def a_loop_in_an_interval(x):
    while -9.0 < x < 20.0:
        x = x + 1.5
    return x


def a_loop_in_an_interval_that_moves(x):
    low, high = x - 1.0, x + 20.0
    while low < x < high < 50.0:
        x, low, high = x + 3.0, low + 2.0, high + 1.0
    return x, low, high


def a_loop_that_counts_in_an_interval(x):
    turns = 0
    while turns < 9 and -9.0 < x < 20.0:
        x = x + 1.5
        turns += 1
    return x, turns


def a_loop_left_in_an_interval(x):
    turns = 0
    while True:
        x = x + 0.75
        turns += 1
        if 9.0 < x < 12.0:
            break
        x = x + 0.5
    return x, turns


def a_loop_left_on_the_same_line(x):
    turns = 0
    while turns < 30:
        turns += 1
        if 9.0 < x < 12.0: break  # noqa: E701
        x = x + 1.25
    return x, turns


def a_loop_with_expressions(x):
    y = x
    while 0.0 <= y < 30.0 and x < 8.0:
        y = y + (x and 1.0 + tf.abs(x)) + (y if y > 5.0 else tf.abs(x)) + tf.cast(-1.0 < x < 1.0, tf.float32)
        y = y + 1.0 if (y > 3.0 and x < 5.0) or not -1.0 < y < 1.0 else y + 2.0
    return y


def a_loop_with_a_mixed_test(x):
    while (x > -5.0 and x < 3.0) or 4.0 < x < 20.0:
        x = x + 1.25
    return x


def a_loop_behind_what_holds(x):
    n, total = tf.cast(x, tf.int32), x
    while n > 0 and 12 // n < 7:
        n, total = n - 1, total + 1.0
    return n, total


LOOPS = [
    a_loop_in_an_interval, a_loop_in_an_interval_that_moves, a_loop_that_counts_in_an_interval,
    a_loop_left_in_an_interval, a_loop_left_on_the_same_line, a_loop_with_expressions, a_loop_behind_what_holds,
]  # fmt: skip


@pytest.mark.parametrize("function", LOOPS, ids=lambda f: f.__name__)
def test_loops_that_ask_in_chains(function, backend):
    """Turn on the device, whatever part of the test ends them."""
    same(function, INPUTS * 2, backend)
    assert sys.gettrace() is None


def test_a_loop_that_asks_in_more_ways_turns_in_python(backend):
    """Its test is no chain."""
    same(a_loop_with_a_mixed_test, INPUTS, backend, on_device=False)


def test_a_loop_stops_anywhere_in_a_chain(backend, tune):
    """At the limit of its turns what was compared before is not what is compared now."""
    tune(max_device_turns=3)
    for function in (a_loop_in_an_interval, a_loop_in_an_interval_that_moves, a_loop_left_in_an_interval):
        same(function, INPUTS, backend)


def test_numbers_of_pythons_in_a_chain(backend):
    """They are on Python's stack: such a loop is Python's."""

    def function(x):
        n = 9
        while x < n < 10:
            x, n = x + 1.0, n - 1
        return x, n

    fn = same(function, INPUTS, backend, on_device=False)
    assert "numbers of Python's" in fn.explain()


# Effects, tapes, errors.


def test_effects_come_once_and_in_order(backend):
    """Those before and behind an expression; those inside of one keep it from the device."""
    log, weight = [], tf.Variable(1.0)

    def noted(v):
        log.append(float(v))
        return v

    def function(x):
        weight.assign_add(x)
        y = weight + x
        y = x if weight > 3.0 else x * y
        log.append("between")
        weight.assign_sub(y * 0.125)
        z = noted(x) if x > 6.0 else y
        return z + y

    def reset():
        log.clear()
        weight.assign(1.0)

    fn = same(function, INPUTS, backend, lambda: (list(log), weight), reset=reset)
    assert "an expression is decided on the device" in fn.explain()
    assert "an expression is decided by Python" in fn.explain()


def test_tapes_are_told(backend):
    """Of the way taken; where one has no gradient, Python decides."""
    weight = tf.Variable(1.5)

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            if x > 0.0:
                y = x * weight
            else:
                y = weight - x
            z = y and x + weight
            y = y * z
            inside = y > 0.0
        return y, inside, tape.gradient(y, [x, weight])

    fn = same(function, INPUTS, backend)
    before = fn.stats()
    fn(tf.constant(3.0))
    after = fn.stats()
    assert after.decisions_on_device - before.decisions_on_device == 1, fn.explain()  # of two

    def unconnected(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * 2.0 if x > 0.0 else tf.constant(1.0) * weight
        return y, tape.gradient(y, x)

    same(unconnected, INPUTS, backend, on_device=False)


def test_layers_on_either_way(backend):
    """Keras' layers, of which one is run."""
    keras.utils.set_random_seed(0)
    one, other = keras.layers.Dense(4, activation="relu"), keras.layers.Dense(4)
    for layer in (one, other):
        layer.build((1, 4))

    def function(x):
        h = tf.reshape(tf.linspace(-1.0, 1.0, 4), [1, 4]) * x
        for _ in range(3):
            if tf.reduce_sum(h) > 0.5:
                h = one(h)
            else:
                h = other(h)
            k = h * 1.0
            h = k if tf.reduce_sum(k) > 0.5 else one(k)
        return h

    fn = same(function, INPUTS * 2, backend)
    assert fn.stats().decisions_on_device >= 12


def test_an_interrupt_in_the_midst(backend):
    """What is caught in the function finds its variables as they were; nobody traces lines afterwards."""

    class Stop:
        at = None

        @property
        def now(self):
            return tf.constant(0.0)

    def function(x):
        y = x
        try:
            z = x - 1.0
            y = x * 2.0 if x > 3.0 else z
            if float(y) > 11.0:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            return y, "interrupted"
        return y, "whole"

    same(function, INPUTS, backend)
    assert sys.gettrace() is None


def test_an_exception_on_the_way(backend, monkeypatch):
    """Ends the way: the next statement is carried out as ever."""
    raising = [False]
    original = tf.abs

    def function(x):
        y = x
        try:
            y = tf.abs(x) + (x if x > 3.0 else x - 1.0) + tf.abs(x + 1.0)
        except KeyboardInterrupt:
            y = y + 5.0
        z = x + 1.0 if x > 0.0 else x
        return y, z

    fn = same(function, INPUTS, backend)
    assert fn.stats().decisions_on_device > 0

    def abs_(v):
        if raising[0] and sys.gettrace() is not None:
            raise KeyboardInterrupt
        return original(v)

    monkeypatch.setattr(tf, "abs", abs_)
    raising[0] = True
    y, z = fn(tf.constant(7.0))
    assert sys.gettrace() is None
    assert float(z) == 8.0
    assert float(y) in (12.0, 22.0)


@pytest.mark.parametrize(("function", "expected"), [(value_of_and, [1, 2]), (with_else, [1, 2, 5])])
def test_a_debugger_sees_each_line(function, expected):
    """Where somebody traces lines, Python decides, branches as well as expressions; afterwards nobody does."""
    lines = []

    def tracing(frame, event, arg):
        if event == "line" and frame.f_code is function.__code__:
            lines.append(frame.f_lineno - function.__code__.co_firstlineno)
        return tracing

    fn = coexec.function(function, control_flow=True)
    for args in INPUTS:
        fn(*args)
        assert sys.gettrace() is None
    before = fn.stats().decisions_on_device
    assert before > 0
    sys.settrace(tracing)
    try:
        fn(tf.constant(1.0))
    finally:
        sys.settrace(None)
    assert lines == expected
    assert fn.stats().decisions_on_device == before


def test_a_generator(backend):
    """Expressions between two of its values."""

    def halves(x):
        for _ in range(3):
            y = x + 2.0
            x = x * 0.5 if x > 1.0 else y
            yield x

    def function(x):
        return list(halves(x))

    same(function, INPUTS, backend)


def test_identities_are_asked(backend):
    """Then the way matters, and Python decides."""

    def function(x):
        a, b = x + 1.0, x - 1.0
        y = a if x > 0.0 else b
        return y is a, y

    same(function, INPUTS, backend, on_device=False)


# Assertions. (pytest makes something else of those of this file.)


def made(source, name="step", **names):
    """A function of a file of its own."""
    source = textwrap.dedent(source)
    file = f"<asserting {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names["tf"] = tf
    exec(compile(source, file, "exec"), names)
    return names[name]


ASSERTIONS = {
    "plain": "assert y < 15.0",
    "with a message": "assert y < 15.0, 'too large'",
    "of a chain": "assert -5.0 < y < 15.0 != x",
    "of several": "assert y < 15.0 and x > -6.0, 'outside'",
    "of a way": "assert tf.reduce_all(tf.stack([y, x]) < 13.0)",
}


@pytest.mark.parametrize("statement", list(ASSERTIONS.values()), ids=list(ASSERTIONS))
def test_assertions_are_found_out_with_the_launch(statement, backend):
    """Nobody waits; the error is eager's, with its line, and no write behind it is done."""
    weight = tf.Variable(0.0)
    step = made(f"""
        def step(x):
            y = x * 2.0
            weight.assign_add(1.0)
            {statement}
            weight.assign_add(y)
            return y + 1.0
    """, weight=weight)  # fmt: skip
    fn = same(step, INPUTS, backend, lambda: weight, reset=lambda: weight.assign(0.0))
    before = fn.stats()
    fn(tf.constant(1.0))
    after = fn.stats()
    assert after.launches - before.launches == 1, fn.explain()
    assert after.decisions_on_device - before.decisions_on_device == after.decisions - before.decisions > 0
    with pytest.raises(AssertionError) as raised:
        fn(tf.constant(50.0))
    assert any(entry.frame.code.path and "asserting" in str(entry.path) and entry.lineno == 4
               for entry in raised.traceback)  # fmt: skip


def test_assertions_that_somebody_catches(backend):
    """They fail where they are."""
    log = []
    step = made("""
        def step(x):
            y = x * 2.0
            try:
                assert y < 5.0, "large"
                log.append("small")
            except AssertionError as error:
                return y, str(error)
            return y + 1.0
    """, log=log)  # fmt: skip
    same(step, INPUTS, backend, lambda: list(log), reset=log.clear)


def test_assertions_whose_message_is_computed(backend):
    """Are read, as are those of several things of which one will do, and of what is no truth value."""
    for statement in ('assert y < 5.0, f"{float(y)}"', "assert y < 5.0 or x > 6.0", "assert not y > 5.0", "assert y"):
        step = made(f"""
            def step(x):
                y = x * 2.0
                {statement}
                return y + 1.0
        """)  # fmt: skip
        same(step, INPUTS, backend, on_device=False)


def test_assertions_in_a_loop_and_in_a_branch(backend):
    """A turn in which one fails is Python's, and so is a branch that has one."""
    step = made("""
        def step(x):
            while x < 8.0:
                x = x + 1.5
                assert x != 4.0, "four"
                y = x * 2.0
            return x, y
    """)
    same(step, INPUTS, backend)
    step = made("""
        def step(x):
            y = x
            if x > 0.0:
                assert x < 6.0
                y = y + 1.0
            return y
    """)
    same(step, INPUTS, backend)


def test_assertions_differ_by_call(backend):
    """The same place, with other tensors, in a loop of Python's."""
    step = made("""
        def step(x):
            for k in range(3):
                x = x + 1.0
                assert x < 4.0 + float(k), "here"
            return x
    """)
    same(step, INPUTS, backend)


@pytest.mark.parametrize("function", [value_of_and, a_mixed_test, returned], ids=lambda f: f.__name__)
def test_divergences_in_the_midst(function):
    """At each operation in turn: what is pending is carried out, and Python decides from there on."""
    for at in range(8):
        fn = coexec.function(function, control_flow=True)
        with testing.compile_everything():
            for args in INPUTS[:4]:
                fn(*args)
            with testing.diverge_at(at):
                for args in INPUTS:
                    assert_same(snapshot(outcome(function, args)), snapshot(fn(*args)), rtol=1e-5, atol=1e-6)
        assert sys.gettrace() is None
