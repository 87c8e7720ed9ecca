"""Loops over ranges that an `if` on a tensor leaves, with an `else` for those that it does not."""

# ruff: noqa: B007

import traceback

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_branches import INPUTS
from tests.coexec.control_flow.test_control_flow import same
from tests.coexec.control_flow.test_expressions import made
from tests.marks import needs_places

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]

MORE = [*INPUTS, *((tf.constant(float(v)),) for v in (20, 4, 3.5, 5.5, 1.25))]
LOG = []


def with_effects(x):
    for k in range(8):
        if tf.reduce_sum(x) > 20.0:
            break
        x = x * 2.0 + tf.cast(k, tf.float32)
    else:
        LOG.append("over")
        x = x - 100.0
    return x, k


def at_end(x):
    y = x
    for k in range(3):
        y = y + 1.0
        if y > 5.0:
            break
    else: y = -y  # noqa: E701
    return y


def nothing_behind(x):
    for k in range(4):
        x = x + 1.0
        if x > 6.0:
            break
    else:
        LOG.append(float(x))


def returning_from_else(x):
    y = x
    for k in range(2, 6):
        if y > 6.0:
            break
        y = y * 1.5
    else:
        return y, "over"
    return y, k


def inside_of_another(x):
    total = x
    for j in range(2):
        for k in range(3):
            if total > 10.0:
                break
            total = total + 1.0
        else:
            total = total + 0.5
            continue
        total = total * 0.5
    return total


def under_a_tape(x):
    with tf.GradientTape() as watching:
        watching.watch(x)
        y = x
        for k in range(3):
            if y > 10.0:
                break
            y = y * 2.0
        else:
            y = y + x * x
    return y, watching.gradient(y, x)


def under_a_tape_behind_a_change(x):
    with tf.GradientTape() as watching:
        watching.watch(x)
        y = x
        for k in range(3):
            y = y * 2.0
            if y > 10.0:
                break
        else:
            y = y + x * x
    return y, watching.gradient(y, x), k


def growing_a_list(x):
    ys = []
    for k in range(4):
        if x > 6.0:
            break
        x = x + 1.0
        ys.append(x)
    else:
        ys.append(x * 100.0)
    return ys


def negated(x):
    for k in range(4):
        if not x < 6.0:
            break
        x = x + 1.0
    else:
        x = x * 10.0
    return x


def raising_in_else(x):
    try:
        for k in range(4):
            if x > 6.0:
                break
            x = x + 1.0
        else:
            raise KeyError(float(x))
    except KeyError as error:
        return error.args[0]
    return x


def as_the_last_statement_of_a_loop(x):
    count = 0
    while count < 3:
        count += 1
        for _ in range(3):
            if x > 12.0:
                break
            x = x + 1.0
        else:
            x = x * 1.5
    return x, count


@pytest.mark.parametrize("function", [
    with_effects, at_end, nothing_behind, returning_from_else,
    inside_of_another, under_a_tape, under_a_tape_behind_a_change, growing_a_list,
    negated, raising_in_else,
    as_the_last_statement_of_a_loop,
], ids=lambda f: f.__name__)  # fmt: skip
def test_else_runs_where_no_break_has(function, backend):
    """Once, in Python, with the variables as the turns have left them."""
    fn = same(function, MORE, backend, lambda: list(LOG), reset=LOG.clear)
    assert "a `for` loop turns on the device" in fn.explain()


def test_an_error_in_else_has_its_line(backend):
    """The frame goes on there as if it had come there by itself."""

    def step(x):
        for _ in range(3):
            if x > 6.0:
                break
            x = x + 1.0
        else:
            raise ValueError("over")
        return x

    fn = coexec.function(step, control_flow=True, jit_compile=backend == "xla")
    lines = []
    with testing.compile_everything():
        for (x,) in INPUTS:
            found = []
            for function in (step, fn):
                try:
                    found.append(float(function(x)))
                except ValueError as error:
                    frames = traceback.extract_tb(error.__traceback__)
                    found.append([frame.lineno for frame in frames if frame.name == "step"])
            assert found[0] == found[1]
            lines.append(found[0])
    assert any(isinstance(line, list) for line in lines)
    assert fn.stats().decisions_on_device > 0


def test_else_on_a_line_with_others_is_pythons(backend):
    """A frame can go on only where a line begins."""

    def step(x):
        for _ in range(3):
            if x > 6.0:
                break
            x = x + 1.0
        else:
            x = x * 2.0; x = x - 1.0  # noqa: E702
        return x

    same(step, INPUTS, backend)


WITH_ASSERTIONS = """
def with_assertions(x):
    for _ in range(4):
        assert x < 9.0, "large"
        if x > 6.0:
            break
        x = x + 1.0
    else:
        assert x > 0.0, "small"
        x = x * 2.0
    return x
"""


def test_assertions_hold_or_fail_as_they_do(backend):
    """One in a turn, which is Python's then, and one in the `else`."""
    function = made(WITH_ASSERTIONS, "with_assertions")
    fn = same(function, MORE, backend)
    assert "a `for` loop turns on the device" in fn.explain()
