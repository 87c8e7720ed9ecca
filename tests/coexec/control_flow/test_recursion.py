"""Functions that are called by others, and by themselves, and return as a tensor says: on the device, as eager's."""

import sys
import threading

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuning
from tests.coexec.control_flow.test_control_flow import TRIPS, outcome, same, scalars
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]

NUMBERS = scalars(5, 1, 0, 7, 3, 6, 2, -1, 4, 5, 0, 8)

LEFT = tf.constant([1, 3, -1, 5, -1, -1, -1, 8, -1])
RIGHT = tf.constant([2, 4, -1, 6, -1, -1, -1, 0, -1])
WORDS = tf.reshape(tf.range(18.0), [9, 2]) * 0.1 - 0.5
WEIGHT = tf.Variable([[0.5, 0.25], [-0.5, 1.0]])


# Helpers.


def sign(v):
    if v > 0.0:
        return v * 2.0
    w = -v
    return w


def clipped(v, most):
    while v > most:
        v = v - 3.0
    if v < 1.0 and most > 2.0:
        return v * 0.5
    elif v < 2.0:
        return v
    return tf.sqrt(v)


def chosen(v):
    return v + 1.0 if v > 3.0 else v * 3.0


def twice(v):
    w = chosen(sign(v))
    return w + sign(v - 2.0)


def a_helper_returns(x):
    y = sign(x)
    return y + 1.0


def two_in_a_statement(x):
    y = sign(x) * chosen(x - 3.0) + sign(x - 3.0)
    return y, x


def one_in_another(x):
    y = chosen(sign(x - 1.0))
    return y


def helpers_of_helpers(x):
    return twice(x) - 1.0


def a_loop_in_a_helper(x):
    y = clipped(x, 4.0)
    return y + 0.0


def unpacked(x):
    def pair(v):
        if v > 2.0:
            return v, v * v
        return -v, v

    a, (b, c) = sign(x), pair(x)
    return a + b, c


def in_a_loop(x):
    total = x
    for _ in range(3):
        total = sign(total - 4.0)
        total = total + chosen(total)
    return total


def within_a_context(x):
    with tf.name_scope("scope"):
        y = sign(x)
    return y


class Network:
    def __init__(self):
        self.scale = tf.Variable(0.5)
        self.most = 3.0

    def gate(self, v):
        if v > self.most:
            return v * self.scale
        h = v - self.scale
        return h

    def __call__(self, v):
        h = self.gate(v)
        h = self.gate(h * 2.0)
        return h


NETWORK = Network()


def in_methods(x):
    y = NETWORK(x)
    return y * 2.0


HELPERS = [
    a_helper_returns, two_in_a_statement, one_in_another, helpers_of_helpers, a_loop_in_a_helper, unpacked, in_a_loop,
    within_a_context, in_methods,
]  # fmt: skip


@pytest.mark.parametrize("function", HELPERS, ids=lambda f: f.__name__)
def test_what_helpers_return_is_decided_on_the_device(function, backend):
    """With the statement that has called them; in the end nobody waits."""
    fn = same(function, NUMBERS * 2, backend)
    assert "may be left to Python" in fn.explain() or fn.stats().decisions_on_device >= 6, fn.explain()


def without_variables(v):
    if v > 0.0:
        return v * 2.0
    return -v


def inside_of_an_assignment(x):
    y = without_variables(x) + 1.0
    return y


def inside_of_a_return(x):
    return without_variables(without_variables(x - 1.0) + 1.0) * 0.5


def test_a_function_is_left_by_a_return_of_variables_or_with_the_decorated_one(backend):
    """Else Python decides, and `explain()` says why."""
    fn = same(inside_of_an_assignment, NUMBERS, backend, on_device=False)
    assert "no `return` of nothing but variables" in fn.explain()
    fn = same(inside_of_a_return, NUMBERS * 2, backend)
    assert fn.stats().decisions_on_device >= 6, fn.explain()


# Functions that call themselves.


def fib(n):
    if n < 2.0:
        return n
    return fib(n - 1.0) + fib(n - 2.0)


def twice_itself(x):
    y = fib(x)
    return y * 2.0


def returned_at_once(x):
    return fib(x) + 1.0


def halved(value, depth):
    if value < 2.0:
        return value, depth
    return halved(value * 0.5, depth + 1)


def counts(x):
    value, depth = halved(x, 0)
    return value, depth + 1


def in_an_expression(x):
    def power(value, times):
        return value if times < 1.0 else power(value * 1.25 + x, times - 1.0)

    y = power(x * 0.1, x)
    return y


def tree(i):
    if LEFT[i] < 0:
        h = WORDS[i]
        return h
    a, b = tree(LEFT[i]), tree(RIGHT[i])
    return tf.tanh(tf.linalg.matvec(WEIGHT, a) + b)


def over_a_tree(x):
    h = tree(tf.cast(tf.abs(x), tf.int32) % 7)
    return h, tf.reduce_sum(h)


def added(data, first, last):
    if last - first <= 1:
        found = tf.gather(data, first)
        return found
    middle = (first + last) // 2
    return added(data, first, middle) + added(data, middle, last)


def by_halves(x):
    data = tf.range(20.0) * x
    total = added(data, tf.constant(0), tf.cast(tf.abs(x), tf.int32) * 2 + 1)
    return total


def search(state, depth):
    if depth == 0:
        return state
    if state > 20.0:
        return state - 20.0
    return tf.maximum(search(state * 2.0, depth - 1), search(state + 3.0, depth - 1) * 0.5)


def with_a_limit(x):
    best = search(x, 4)
    return best


def deepest(i):
    depth = tf.constant(0)
    if LEFT[i] >= 0:
        depth = tf.maximum(deepest(LEFT[i]), deepest(RIGHT[i])) + 1
    return depth


def without_a_return(x):
    d = deepest(tf.cast(tf.abs(x), tf.int32) % 7)
    return d + 1


class Tree:
    def __init__(self):
        self.leaf, self.inner = tf.Variable([[1.0, 0.5], [0.25, 1.0]]), tf.Variable([[0.5, -1.0], [1.0, 0.5]])
        self.children = tf.stack([LEFT, RIGHT], 1)

    def node(self, i):
        state = tf.linalg.matvec(self.leaf, WORDS[i])
        if self.children[i, 0] < 0:
            count = tf.ones([])
            return state, count
        left, right = self.node(self.children[i, 0]), self.node(self.children[i, 1])
        total = tf.nn.sigmoid(left[0] + right[0])
        return tf.linalg.matvec(self.inner, total) + state, left[1] + right[1] + 1.0


TREE = Tree()


def in_a_method(x):
    state, count = TREE.node(tf.cast(tf.abs(x), tf.int32) % 7)
    return state, count


def behind_a_loop_of_pythons(x):
    """XLA gets what comes again as loops, but where functions are called by name."""
    for _ in range(40):
        x = tf.sin(x) * 1.5 + tf.cos(x * 0.5)
    y = fib(tf.abs(x) + 3.0)
    return y


def is_even(v):
    if v < 1.0:
        return v
    return is_odd(v - 1.0)


def is_odd(v):
    if v < 1.0:
        return v + 100.0
    return is_even(v - 1.0)


def of_each_other(x):
    y = is_even(x)
    return y


def at_an_index(i, v):
    if LEFT[i] < 0:
        return v
    total = below(LEFT[i], v * 0.5)
    return total + below(RIGHT[i], v + 1.0)


def below(i, v):
    return at_an_index(i, v) if v < 9.0 else v - 1.0


def a_pair_over_a_tree(x):
    y = at_an_index(tf.cast(tf.abs(x), tf.int32) % 7, x)
    return y


def helped_leaf(v):
    if v < 1.0:
        w = chosen(chosen(v))
        return w
    return helped_leaf(v - 1.0)


def with_helpers_at_the_end(x):
    y = helped_leaf(x) + helped_leaf(x * 0.5)
    return y


RECURSIVE = [
    behind_a_loop_of_pythons,
    twice_itself, returned_at_once, counts, in_an_expression, over_a_tree, by_halves, with_a_limit, without_a_return,
    in_a_method, of_each_other, a_pair_over_a_tree, with_helpers_at_the_end,
]  # fmt: skip


@pytest.mark.parametrize("function", RECURSIVE, ids=lambda f: f.__name__)
def test_functions_that_call_themselves_run_on_the_device(function, backend):
    """One decision a call, once it is known; under XLA as a part of the graph beside it."""
    fn = same(function, NUMBERS * 2, backend)
    assert "where functions call themselves" in fn.explain(), fn.explain()
    before = fn.stats()
    with testing.compile_everything():
        for args in NUMBERS:
            assert_same(snapshot(function(*args)), snapshot(fn(*args)))
    after = fn.stats()
    assert after.decisions_on_device - before.decisions_on_device >= len(NUMBERS) - 2, fn.explain()
    assert after.launches - before.launches <= 3 * len(NUMBERS), fn.explain()
    assert "NotImplementedError" not in fn.explain(), fn.explain()  # XLA gets what is around the calls


def doubled(x, step):
    if x > 4.0:
        return 1
    m = doubled(x + step, step)
    n = m + m
    return n


def doubled_in_another_call(x, step, n):
    if x > 4.0:
        return n + n
    m = doubled_in_another_call(x + step, step, n)
    n = doubled_in_another_call(x + 5.0, step, m)
    return n


def doubled_for_the_next(x, step, n):
    if x > 4.0:
        return n
    return doubled_for_the_next(x + step, step, n + n)


def counts_doubled(x, step):
    n = doubled(x, step)
    return n


def counts_doubled_in_another_call(x, step):
    n = doubled_in_another_call(x, step, 1)
    return n


def counts_doubled_for_the_next(x, step):
    n = doubled_for_the_next(x, step, 1)
    return n


@pytest.mark.parametrize(
    "function", [counts_doubled, counts_doubled_in_another_call, counts_doubled_for_the_next], ids=lambda f: f.__name__
)
def test_what_they_count_has_no_end(function, backend):
    """Python's numbers do not wrap where int32 does; what would leave it is left to Python."""
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    steps = [1.0, 0.5, 1.0, 0.5, 0.7, 0.4, 0.7, 0.1, 0.05, 0.2, 0.5]  # 4 to 81 calls deep
    with testing.always_follow():
        for step in map(tf.constant, steps):
            expected, found = function(tf.zeros([]), step), fn(tf.zeros([]), step)
            assert (type(found), found) == (int, expected), float(step)
    if function is not counts_doubled_for_the_next:  # refused as a whole: it grows by what is not known
        assert fn.stats().decisions_on_device >= 4, fn.explain()


# What stays with Python.


LOG = []


def has_effects(v):
    if v < 1.0:
        LOG.append(float(v))
        return v
    return has_effects(v - 1.0)


def effects(x):
    y = has_effects(x)
    return y


def grows(v):
    if tf.reduce_sum(v) > 20.0:
        return v
    return grows(tf.concat([v, v + 1.0], 0))


def other_shapes(x):
    y = grows(tf.reshape(x, [1]))
    return y


def one_or_the_other(v):
    if v < 1.0:
        return v
    return str(v.dtype)


def other_kinds(x):
    y = one_or_the_other(x)
    return y


def alias(v):
    if v > 5.0:
        return alias(v - 1.0)
    if v > 1.0:
        return another_name(v - 1.0)
    return v


another_name = alias


def by_another_name(x):
    y = alias(x)
    return y


def neither(v):
    if v < 1.0:
        return otherwise(v)
    return neither(v - 2.0)


def otherwise(v):
    if v < 0.5:
        return v
    return neither(v - 1.0)


def by_neither(x):
    y = neither(x)
    return y


def by_way(v):
    if v < 1.0:
        return v
    return by_way(v - 2.0) + detour(v)


def detour(v):
    return by_way(v - 3.0) if v > 2.0 else by_way(v - 1.0)


def by_way_of_another(x):
    y = by_way(x)
    return y


def over_objects(x):
    def total(node, v):
        if v > 7.0:
            return v
        return v if node is None else total(node[0], v + 1.0) + total(node[1], v)

    y = total(((None, None), (None, (None, None))), x)
    return y


def not_plain(v):
    return (v < 1.0 and v) or not_plain(v - 1.0)


def by_and_and_or(x):
    y = not_plain(x + 0.5)
    return y


def noisy(v):
    if v < 1.0:
        return v
    return noisy(v - 1.0) + tf.random.stateless_uniform([], [1, 2])


def random_numbers(x):
    y = noisy(x)
    return y


def in_a_guard(x):
    try:
        return without_variables(x)
    finally:
        LOG.append(1)


def is_the_same(x):
    y = kept(x)
    return y is x


def kept(v):
    if v > 2.0:
        return v
    return v * 2.0


@pytest.mark.parametrize("function", [by_neither, by_another_name], ids=lambda f: f.__name__)
def test_it_does_not_matter_by_which_name_and_way_a_function_calls_itself(function, backend):
    """What it does is traced, and not its source searched for a way that ends."""
    same(function, NUMBERS, backend)


STAYING = [
    effects, other_shapes, other_kinds, by_way_of_another, by_and_and_or,
    random_numbers, in_a_guard, is_the_same,
]  # fmt: skip


@pytest.mark.parametrize("function", STAYING, ids=lambda f: f.__name__)
def test_what_is_more_than_computing_is_pythons(function, backend):
    """As ever, with all effects once."""
    same(function, NUMBERS, backend, lambda: list(LOG), on_device=False, reset=LOG.clear)


def forever(v):
    if v > 1e9:
        return v
    a = forever(v + 1.0)
    b = forever(v * 0.5)
    return a + b


def test_calls_that_go_too_deep(backend):
    """Python's own error comes, and soon, though each call makes two; the next calls are as ever."""

    def function(x, most):
        y = fib(x) if most else forever(x)
        return y

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for _ in range(3):
            for x, most in ((3.0, True), (3.0, False), (5.0, True)):
                if most:
                    assert float(fn(tf.constant(x), most)) == float(fib(tf.constant(x)))
                else:
                    with pytest.raises(RecursionError):
                        fn(tf.constant(x), most)
    assert fn.stats().decisions_on_device > 0, fn.explain()


def test_as_deep_as_python_goes(backend, tune):
    """Far down, on the device; where there is less room than calls, in Python, with the same result."""

    def down(v, calls):
        if v < 1.0:
            return v, calls
        return down(v - 1.0, calls + 1)

    def function(x):
        found = down(x, 0)
        return found

    inputs = scalars(0.5, 300.5, 3.5, 200.5, 0.5, 350.5)
    same(function, inputs, backend)
    tune(max_recursion=250)
    fn = same(function, inputs, backend)
    assert fn.stats().decisions > 300, "Python has asked at each call"


def test_an_index_that_is_not_there(backend):
    """Is found out by Python, with eager's error."""

    def walked(i):
        if i > 100:
            return i
        return walked(tf.gather(NEXT, i))

    def function(x):
        y = walked(tf.cast(x, tf.int32))
        return y

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for value in (0, 1, 2, 1, 0, 3, 0, 1, 3, 2):
            results = []
            for each in (function, fn):
                try:
                    results.append(snapshot(each(tf.constant(float(value)))))
                except tf.errors.InvalidArgumentError as error:
                    results.append(type(error).__name__)
            assert_same(*results) if not isinstance(results[0], str) else None
            assert isinstance(results[0], str) == isinstance(results[1], str) == (value == 3)
    assert fn.stats().decisions_on_device > 0, fn.explain()


NEXT = tf.constant([1, 2, 200, 50])


def test_functions_of_each_other_go_as_deep_as_python_does(backend):
    """And no deeper: each of the two counts."""

    def down(v, calls):
        if v < 1.0:
            return v, calls
        return further(v - 1.0, calls + 1)

    def further(v, calls):
        if v < 1.0:
            return v, calls
        found = down(v - 1.0, calls + 1)
        return found

    def function(x):
        found = down(x, 0)
        return found

    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for value in (3.5, 100.5, 0.5, 300.5, 3.5, 2000.5, 7.5):
            if value > 2000.0:  # which plain TensorFlow may not survive: an operation in C++ meets the limit
                assert isinstance(outcome(fn, (tf.constant(value),)), RecursionError)
            else:
                assert_same(snapshot(function(tf.constant(value))), snapshot(fn(tf.constant(value))))
    assert fn.stats().decisions_on_device > 0, fn.explain()


def test_a_function_that_is_changed(backend, monkeypatch):
    """Is followed: what was written down is what its code was."""
    module = sys.modules[__name__]
    fn = coexec.function(twice_itself, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for number in range(3):
            for args in NUMBERS[:4]:
                assert_same(snapshot(twice_itself(*args)), snapshot(fn(*args)))
            if number == 1:
                monkeypatch.setattr(module, "fib", lambda n: n * 100.0)
    assert fn.stats().decisions_on_device > 0


def test_several_threads(backend):
    """Each with calls of its own."""
    fn = coexec.function(twice_itself, jit_compile=backend == "xla", control_flow=True)
    expected = [float(twice_itself(*args)) for args in NUMBERS]
    found = {}

    def work(name):
        found[name] = [float(fn(*args)) for _ in range(3) for args in NUMBERS]

    with testing.compile_everything():
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(values == expected * 3 for values in found.values())
    assert len(found) == 3


def test_trees_of_objects(backend):
    """Which way they go is Python's, and what they ask on it the device's, as far as that is carried out here."""
    same(over_objects, NUMBERS, backend)


def test_under_tapes(backend):
    """What helpers return has its gradient, and so have functions that call themselves."""

    def helped(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = sign(x * 3.0)
            y = y * chosen(x)
        return y, tape.gradient(y, x)

    def repeated(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fib(x)
        return y, tape.gradient(y, x)

    def of_a_tree(x):
        with tf.GradientTape() as tape:
            h = tree(tf.cast(tf.abs(x), tf.int32) % 7)
            loss = tf.reduce_sum(h * h)
        return loss, tape.gradient(loss, WEIGHT)

    same(helped, NUMBERS, backend)
    same(repeated, NUMBERS, backend)
    same(of_a_tree, NUMBERS, backend)


def test_the_option_leaves_all_to_python():
    """Each call then asks."""
    fn = coexec.function(twice_itself, control_flow=False)
    for args in NUMBERS:
        assert_same(snapshot(twice_itself(*args)), snapshot(fn(*args)))
    assert fn.stats().decisions_on_device == 0
    assert tuning.decision_patience == 1


def test_what_is_around_a_call_runs_once(backend):
    """On the device or not, what the statement in front of it and behind it do is done once."""

    def function(x, log):
        log.append("before")
        y = sign(x) + fib(x)
        log.append("behind")
        return y

    logs = [[], []]
    fn = coexec.function(function, jit_compile=backend == "xla", control_flow=True)
    with testing.compile_everything():
        for (x,) in TRIPS[:1] + NUMBERS:
            assert_same(snapshot(function(x * 0.1, logs[0])), snapshot(fn(x * 0.1, logs[1])))
    assert logs[0] == logs[1]
    assert fn.stats().decisions_on_device > 0, fn.explain()
