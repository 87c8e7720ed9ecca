"""Gradients of functions that call themselves, on the device: there where eager has one, and eager's."""

import pytest
import tensorflow as tf

from coexec import testing
from coexec.control_flow.recursion import recursion_records
from tests.coexec.control_flow.test_control_flow import same
from tests.coexec.control_flow.test_recursion import LEFT, NUMBERS, RIGHT, WEIGHT, WORDS
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]

SCALE = tf.Variable(0.75)


def fib(n):
    if n < 2.0:
        return n
    return fib(n - 1.0) + fib(n - 2.0)


def tree(i):
    if LEFT[i] < 0:
        leaf = WORDS[i]
        return leaf
    a, b = tree(LEFT[i]), tree(RIGHT[i])
    return tf.tanh(tf.linalg.matvec(WEIGHT, a) + b)


def gradient(function, *variables):
    """Returns a step that asks a tape for the gradient of what the function gives, for its argument and these."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return y, tape.gradient(y, [x, *variables])

    step.__name__ = function.__name__
    return step


# What runs on the device.


def over_a_tree(x):
    h = tree(tf.cast(tf.abs(x), tf.int32) % 7)
    return tf.reduce_sum(h * h)


def a_chain(x):
    y = fib(x * 1.25) * x
    return y


def counted(value, depth):
    if value < 2.0:
        leaf_0, leaf_1 = value * SCALE, depth
        return leaf_0, leaf_1
    return counted(value * 0.5, depth + 1)


def with_a_number(x):
    value, depth = counted(x * x, 0)
    return value * depth


def power(value, times, most):
    if times < 1.0:
        return value
    if value > most:
        return power(value * 0.5, times - 1.0, most)
    return power(value * 1.25 + SCALE, times - 1.0, most * SCALE)


def several_arguments(x):
    y = power(x * 0.1, x, x + 2.0)
    return y


def shared(x):
    def down(value, times):
        return value if times < 1.0 else down(value * x + SCALE, times - 1.0)

    y = down(x * 0.1, x)
    return y


def searched(state, depth):
    if depth == 0:
        return state
    if state > 20.0:
        leaf = state - 20.0 * SCALE
        return leaf
    return tf.maximum(searched(state * 2.0, depth - 1), searched(state + 3.0, depth - 1) * 0.5)


def to_a_limit(x):
    best = searched(x, 4)
    return best


def cell(i):
    if LEFT[i] < 0:
        leaf_0, leaf_1 = WORDS[i] * SCALE, tf.zeros([2])
        return leaf_0, leaf_1
    (h, c), (g, d) = cell(LEFT[i]), cell(RIGHT[i])
    forget = tf.sigmoid(tf.linalg.matvec(WEIGHT, h) + g)
    return tf.tanh(forget + c), forget * c + d + h


def pairs(x):
    h, c = cell(tf.cast(tf.abs(x), tf.int32) % 7)
    return tf.reduce_sum(h) * 2.0 + tf.reduce_sum(c * c)


def one_of_a_pair(x):
    _, c = cell(tf.cast(tf.abs(x), tf.int32) % 7)
    return tf.reduce_sum(c * c)


def larger(v, times):
    if times < 1.0:
        return v
    a = larger(v * SCALE, times - 1.0)
    b = larger(v - SCALE, times - 2.0)
    return a if a > b else b * b


def one_or_the_other(x):
    y = larger(x * 0.5, x)
    return y


def mixed(v, times):
    a = v * 2.0
    if times >= 1.0:
        a = mixed(tf.sin(v), times - 1.0)
        if a > 0.5:
            a = a * SCALE
        else:
            a = a + tf.stop_gradient(v)
    return a


def an_if_behind_a_call(x):
    y = mixed(x, x)
    return y


def inner(v):
    if v < 1.0:
        leaf = v * SCALE
        return leaf
    return inner(v - 1.5) + 1.0


def outer(v):
    if v < 2.0:
        leaf = inner(v * 3.0)
        return leaf
    return outer(v - 1.0) * inner(v)


def one_in_another(x):
    y = outer(x)
    return y


def rising(i, v):
    if LEFT[i] < 0:
        leaf = v * WORDS[i]
        return leaf
    return falling(LEFT[i], v * 0.5) + falling(RIGHT[i], v * SCALE)


def falling(i, v):
    if v > 3.0:
        return rising(i, v - 1.0)
    return tf.sin(v) * WORDS[i]


def in_turn(x):
    y = rising(tf.cast(tf.abs(x), tf.int32) % 7, x)
    return tf.reduce_sum(y)


def unequal(v, times):
    if times < 1.0:
        leaf_0, leaf_1, leaf_2 = v, v * SCALE, tf.cos(v)
        return leaf_0, leaf_1, leaf_2
    a, b, c = unequal(tf.sqrt(v * v), times - 1.0)
    total = a * 0.5
    if b > 1.0:
        total = total + b
    if c > 0.25:
        total = total * c
    return total, a + v, b if total > 0.5 else c


def some_of_three(x):
    a, _, c = unequal(x * 0.3 + 0.05, x)
    return a + c


def in_a_branch(x):
    if x > 4.0:
        y = fib(x) * 3.0
    else:
        y = x * SCALE
    return y


def of_each_other(x):
    y = fib(fib(x * 0.5) + 1.0)
    return y


ON_DEVICE = [
    over_a_tree, a_chain, with_a_number, several_arguments, shared, to_a_limit, pairs, one_of_a_pair,
    one_or_the_other, an_if_behind_a_call, one_in_another, of_each_other, in_turn, in_a_branch,
]  # fmt: skip


@pytest.mark.sample(*(f"graph-{f.__name__}" for f in ON_DEVICE), "xla-over_a_tree", "xla-pairs", "xla-of_each_other")
@pytest.mark.parametrize("function", ON_DEVICE, ids=lambda f: f.__name__)
def test_the_gradient_runs_on_the_device(function, backend, monkeypatch):
    """Both ways; nothing is issued operation by operation."""
    step = gradient(function, WEIGHT, SCALE)
    fn = same(step, NUMBERS * 2, backend)
    assert "where functions call themselves" in fn.explain(), fn.explain()
    before, again = fn.stats(), []
    monkeypatch.setattr(recursion_records, "issue_again", lambda *_: again.append(1))
    with testing.compile_everything():
        for args in NUMBERS:
            assert_same(snapshot(step(*args)), snapshot(fn(*args)), rtol=1e-5, atol=1e-6)
    after = fn.stats()
    assert not again
    assert after.decisions_on_device - before.decisions_on_device >= len(NUMBERS), fn.explain()
    assert after.launches - before.launches <= 4 * len(NUMBERS), fn.explain()
    assert "NotImplementedError" not in fn.explain(), fn.explain()


# Where there is none.


def ends_apart(v, w):
    if v < 1.0:
        leaf = tf.stop_gradient(v)
        return leaf
    return ends_apart(v - 2.0, w * SCALE) * w


def none_at_once(x):
    y = ends_apart(x, x * 2.0)
    return y


def counts_only(v):
    if v < 1.0:
        leaf = tf.ones([])
        return leaf
    return counts_only(v - 1.0) + 1.0


def none_at_all(x):
    y = counts_only(x)
    return y


def of_the_number(v, times):
    if times < 1.0:
        leaf = tf.floor(v)
        return leaf
    return of_the_number(tf.sqrt(v - v), times - 1.0) + v * SCALE


def infinite_times_none(x):
    y = of_the_number(x, x)
    return y


def infinite_on_a_way(v, times):
    if times < 1.0:
        leaf = v if v > 0.5 else tf.round(v)
        return leaf
    return infinite_on_a_way(tf.sqrt(tf.maximum(v - 3.0, 0.0)), times - 4.0) * 2.0 + v


def infinite_times_perhaps(x):
    y = infinite_on_a_way(x, x)
    return y


def either(v, times):
    a = either(tf.sqrt(v * 0.0), times - 1.0) if times >= 1.0 else v
    b = tf.stop_gradient(a) if times > 2.0 else a * SCALE
    return b + v


def infinite_behind_a_call(x):
    y = either(x, x)
    return y


def whole(i):
    if LEFT[i] < 0:
        return i
    return whole(LEFT[i]) + whole(RIGHT[i])


def whole_numbers(x):
    y = tf.cast(whole(tf.cast(tf.abs(x), tf.int32) % 7), tf.float32) * x
    return y


NONE = [
    none_at_once, none_at_all, infinite_times_none, infinite_times_perhaps, infinite_behind_a_call, whole_numbers,
    over_a_tree,
]  # fmt: skip


@pytest.mark.parametrize("function", NONE, ids=lambda f: f.__name__)
def test_there_is_none_where_eager_has_none(function, backend):
    """Which may be another one in each call; and nothing goes on from there, not even times infinity."""
    same(gradient(function, WEIGHT, SCALE), NUMBERS * 2, backend)


def test_results_that_are_computed_from_each_other_are_pythons(backend):
    """All that the function returns is known to the program, whatever it uses of it."""
    fn = same(gradient(some_of_three, SCALE), NUMBERS, backend, on_device=False)
    assert "computes one result from another" in fn.explain()
