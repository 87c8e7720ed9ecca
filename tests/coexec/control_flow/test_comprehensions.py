"""Comprehensions and lambdas that ask tensors: what the device decides, and that nobody can tell."""

# ruff: noqa: E731

import sys

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_branches import INPUTS
from tests.coexec.control_flow.test_control_flow import outcome, same
from tests.coexec.control_flow.test_expressions import made
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]


# On the device.


def a_list(x):
    return [v if v > 0.0 else -v for v in (x, x + 1.0)]


def a_list_that_is_kept(x):
    ys = [v * 2.0 if v > 0.0 else x - v for v in (x, x + 1.0)]
    ys.append(x)
    return ys, tf.add_n(ys)


def names_of_its_own(x):
    v, k = x + 5.0, 7
    ys = [v * k if v > k else v for k, v in enumerate((x, v, v * 0.5))]
    return ys, v, k


def names_that_it_shares(x):
    y = x * 2.0 if x > 0.0 else x - 1.0
    z = tf.stack([y + k if x > k else y for k in range(3)])
    y = y + 1.0 if tf.reduce_sum(z) > 5.0 else y
    return y, z, [y * k for k in range(2)]


def in_each_other(x):
    return tuple([[v * k if v > k else v for k in range(2)] for v in (x, -x)])


def with_parts_left_out(x):
    ys = [
        v if v > 2.0 else v * k
        for k in range(5)
        if k % 2 == 0
        for v in (x, x + k)
        if k < 3
    ]  # fmt: skip
    return ys


def a_sum(x):
    y = sum(v if v > 0.0 else -v for v in (x, x + 1.0, x - 1.0))
    return y * 2.0


def a_tuple(x):
    y, z = tuple(v if v > 0.0 else -v for v in (x, x + 1.0))
    return y - z


def given_to_tensorflow(x):
    y = tf.reduce_max(tf.stack([x * k if x > k else x - k for k in range(4)]))
    return y


def in_a_loop(x):
    found = []
    for k in range(3):
        ys = [v * 2.0 if v > k else v for v in (x, x + 1.0)]
        x = ys[0] - ys[1] * 0.5
        found.append(x)
    return found


def best_of(x, count):
    offset = x * 0.5
    ys = [x + offset if x > k else x - offset for k in range(count)]
    return tf.reduce_max(tf.stack(ys))


def in_a_helper(x):
    y = best_of(x, 3)
    return y + best_of(y, 2)


absolute = lambda v: v if v > 0.0 else -v
scaled = lambda v, by=2.0: v * by if absolute(v) > 3.0 else v


def a_lambda(x):
    y = absolute(x - 1.0)
    return y * 2.0


def a_lambda_that_calls_another(x):
    return scaled(x) + 1.0


def a_lambda_with_a_default(x):
    y = scaled(x, by=3.0)
    z = scaled(y)
    return y, z


def a_lambda_made_in_each_call(x):
    limit = x * 0.5
    pick = lambda v: v if v > limit else limit
    y = pick(x) + pick(-x)
    return y


def a_lambda_on_several_lines(x):
    pick = (lambda v:
            v * 2.0 if v > 2.0
            else v + 1.0)  # fmt: skip
    y = pick(x)
    return y


def a_lambda_in_a_comprehension(x):
    ys = [absolute(v) for v in (x, x - 2.0)]
    return ys


TABLE = {"absolute": absolute}


def a_lambda_from_a_table(x):
    y = TABLE["absolute"](x)
    return y


def made_and_called_at_once(x):
    return (lambda v: v if v > 0.0 else -v)(x)


def called_for_its_effects(x):
    absolute(x)
    return x


ON_DEVICE = [
    a_list, in_each_other, a_lambda, a_lambda_that_calls_another, a_lambda_with_a_default, a_lambda_made_in_each_call,
    a_lambda_in_a_comprehension, a_lambda_from_a_table, made_and_called_at_once, called_for_its_effects,
]  # fmt: skip

# Comprehensions that the decorated function does not return, and lambdas of which both ways compute.
LEFT_TO_PYTHON = [
    a_list_that_is_kept, names_of_its_own, with_parts_left_out, a_sum, a_tuple, given_to_tensorflow, in_a_loop,
    a_lambda_on_several_lines,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_DEVICE, ids=lambda f: f.__name__)
def test_the_device_decides(function, backend):
    """Values are eager's, and Python waits for none."""
    fn = same(function, INPUTS, backend)
    before = fn.stats()
    for (x,) in INPUTS:
        fn(x)
    after = fn.stats()
    taken = after.decisions_on_device - before.decisions_on_device
    assert taken == after.decisions - before.decisions > 0, fn.explain()


# With Python.


def left_out_by_a_tensor(x):
    return [v for v in (x, x + 1.0, x - 1.0) if v > 0.0]


def a_set_of_numbers(x):
    return {k if x > k else -k for k in range(3)}


def a_dict(x):
    return {k: (x if x > k else -x) for k in range(2)}


def one_list_of_two_names(x):
    a = b = [v if v > 0.0 else -v for v in (x, x + 1.0)]
    a.append(x)
    return a, b


def a_generator_that_is_kept(x):
    ahead = (v if v > 0.0 else -v for v in (x, x + 1.0))
    first = next(ahead)
    return first, list(ahead), list(ahead)


def of_other_shapes(x):
    return [v if v > 0.0 else tf.stack([v, v]) for v in (x, x + 1.0)]


def in_the_head_of_a_loop(x):
    total = x
    for v in [v if v > 0.0 else -v for v in (x, x + 1.0)]:
        total = total * v
    return total


def assigning_within(x):
    ys = [(last := v if v > 0.0 else -v) for v in (x, x + 1.0)]
    return ys, last


def of_which_there_are_two_on_a_line(x):
    one, two = (lambda v: v if v > 0.0 else -v), (lambda v: -v if v > 0.0 else v)
    y = one(x) * two(x)
    return y


def called_by_python(x):
    y = max((1.0, -2.0, 3.0), key=lambda k: x * k if x * k > 0.0 else x - k)
    return x * y


def called_by_tensorflow(x):
    return tf.map_fn(lambda v: v if v > 0.0 else -v, tf.stack([x, x + 1.0]))


ON_HOST = [
    left_out_by_a_tensor, a_set_of_numbers, a_dict, one_list_of_two_names, a_generator_that_is_kept, of_other_shapes,
    in_the_head_of_a_loop, assigning_within, of_which_there_are_two_on_a_line, called_by_python,
    called_by_tensorflow, *LEFT_TO_PYTHON,
]  # fmt: skip


@pytest.mark.parametrize("function", ON_HOST, ids=lambda f: f.__name__)
def test_what_is_more_than_values_is_pythons(function, backend):
    """As ever; and there is a reason."""
    fn = same(function, INPUTS, backend, on_device=False)
    assert "decided by Python" in fn.explain() or function is called_by_tensorflow  # nobody else's frames are told of


@pytest.mark.parametrize("function", [names_that_it_shares, in_a_helper], ids=lambda f: f.__name__)
def test_what_is_returned_is_the_devices(function, backend):
    """And what is not is Python's, in one function; from 3.12 on, a comprehension has no frame that can be left."""
    same(function, INPUTS, backend, on_device=function is not in_a_helper or sys.version_info < (3, 12))


# Hostile ones.


def test_effects_come_once_for_each_item(backend):
    """A comprehension, or a lambda, that does more than compute is Python's."""
    log = []

    def noted(v):
        log.append("noted")
        return v

    def step(x):
        ys = [noted(v) if v > 0.0 else -v for v in (x, x + 1.0)]
        pick = lambda v: v if log.append("picked") or v > 0.0 else -v
        return ys, pick(x)

    same(step, INPUTS, backend, lambda: list(log), on_device=False, reset=log.clear)


def test_a_function_that_is_a_lambda(backend):
    """It is left at once with its result."""
    same(lambda x: x * 2.0 if x > 0.0 else x - 1.0, INPUTS, backend)
    same(lambda x: best_of(x, 2) + 1.0, INPUTS, backend, on_device=sys.version_info < (3, 12))


def test_lists_are_new_in_each_call(backend):
    """As in Python: what is done to one does nothing to the next."""

    def step(x):
        return [v if v > 0.0 else -v for v in (x, x + 1.0)]

    fn = coexec.function(step, control_flow=True, jit_compile=backend == "xla")
    kept = []
    with testing.compile_everything():
        for (x,) in INPUTS:
            kept.append(fn(x))
            kept[-1].append("mine")
    assert len({id(v) for v in kept}) == len(INPUTS)
    for found, (x,) in zip(kept, INPUTS, strict=True):
        assert (type(found), len(found), found[-1]) == (list, 3, "mine")
        assert [float(v) for v in found[:2]] == [float(v) for v in step(x)]
    assert fn.stats().decisions_on_device > 0


@pytest.mark.parametrize("function", [a_list, in_a_helper, a_lambda, in_each_other])
def test_gradients_are_eagers(function, backend):
    """Through either way of each item, whoever decides."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = function(x)
            y = tf.add_n([v * 1.5 for v in tf.nest.flatten(found)])
        return y, tape.gradient(y, x)

    same(step, INPUTS, backend, on_device=function is a_lambda)


def test_what_it_relies_on_may_change(backend):
    """Other lists, other lambdas, other numbers of items: written down anew, or Python's."""
    shared = {"pick": absolute, "scale": 2.0}

    def step(x, vs):
        return [shared["pick"](v) * shared["scale"] if x > v else v for v in vs]

    fn = coexec.function(step, control_flow=True, jit_compile=backend == "xla")
    for n in range(24):
        shared["scale"] = float(n // 4)
        shared["pick"] = absolute if n % 8 < 4 else tf.exp
        vs = [tf.constant(float(v)) for v in range(-1, n % 3)]
        x = tf.constant(float(n % 5 - 2))
        for one, other in zip(fn(x, vs), step(x, vs), strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)
    assert fn.stats().decisions_on_device > 0, fn.explain()


def test_an_error_of_an_item_is_eagers(backend):
    """At the item where Python gets to it."""

    def step(x):
        ys = [tf.gather([1.0, 2.0], tf.cast(v, tf.int32)) if v > 0.0 else v for v in (x, x + 1.0)]
        return ys

    same(step, INPUTS, backend, on_device=False)


ASSERTING = {
    "by a lambda": "assert absolute(x) > 0.5, 'small'",
    "by a comprehension": "assert all([v > -2.0 if v > 0.0 else v > -7.0 for v in (x, x - 1.0)]), 'low'",
    "in what a comprehension calls": "x = sum([checked(v) for v in (x, x + 1.0)])",
    "in what a lambda calls": "x = (checking(x) + 1.0)",
    "behind a comprehension": "x, y = [v if v > 0.0 else -v for v in (x, x + 1.0)]\n    assert x < 8.5, 'large'",
}

CHECKED = """
def checked(v):
    assert v > -5.0, "too small"
    return v if v > 0.0 else -v
"""


@pytest.mark.parametrize("statement", ASSERTING)
def test_assertions_hold_or_fail_as_they_do(statement, backend):
    """In a test that calls a lambda or has a comprehension, in what those call, and behind them."""
    checked = made(CHECKED, "checked")
    checking = made("checking = lambda v: checked(v) if v > 1.0 else v", "checking", checked=checked)
    source = f"def step(x):\n    {ASSERTING[statement]}\n    return x * 2.0\n"
    function = made(source, absolute=absolute, checked=checked, checking=checking)
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for args in INPUTS * 2:
            expected = outcome(function, args)
            assert_same(snapshot(expected), snapshot(outcome(fn, args)), rtol=1e-6)
    assert fn.stats().decisions > 0


def test_identity_is_asked_in_a_lambda(backend):
    """Tensors that come out are new ones: who asks for that decides in Python."""
    pick = lambda v, w: v if v is w or v > 0.0 else -v

    def by_a_lambda(x):
        y = pick(x, x + 1.0)
        return y

    def by_its_caller(x):
        y = absolute(x)
        return y, y is x

    def by_its_caller_of_items(x):
        ys = [v if v > 0.0 else -v for v in (x, x + 1.0)]
        return ys, ys[0] is x

    for function in (by_a_lambda, by_its_caller, by_its_caller_of_items):
        same(function, INPUTS, backend, on_device=False)
