"""Growth: what one call spends on learning and compiling is bounded, and does not grow with the square of anything."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.base import budget
from coexec.follow.tape_entry import Entry
from tracer.index import Index


def chain(steps):
    """A step whose gradient takes what was computed before a value was read."""
    weight = tf.Variable([0.5, -0.25])

    def step(x):
        with tf.GradientTape() as tape:
            for _ in range(steps):
                x = tf.tanh(x * weight)
            loss = tf.reduce_sum(x)
        value = float(loss)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return value

    return step, weight


def looked_at(monkeypatch, steps):
    """Runs a step until it is known; returns how often the tensors of a record were listed."""
    looked = [0]
    tensors = Entry._tensors

    def counted(self):
        looked[0] += 1
        return tensors(self)

    with monkeypatch.context() as patch:
        patch.setattr(Entry, "_tensors", counted)
        (eager, one), (step, other) = chain(steps), chain(steps)
        fn = coexec.function(step)
        x = tf.constant([1.0, 2.0])
        for _ in range(6):
            np.testing.assert_allclose(fn(x), eager(x), rtol=1e-4)
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4)
    assert fn.stats().regions >= 1
    return looked[0]


def test_learning_a_gradient_looks_at_each_record_a_few_times(monkeypatch):
    few, many = looked_at(monkeypatch, 40), looked_at(monkeypatch, 160)
    assert few > 40
    assert many < 5 * few  # 16 times as many where each feed was looked for in all records


class Counted(list):
    reads = 0

    def __getitem__(self, at):
        Counted.reads += 1
        return super().__getitem__(at)


def test_an_index_looks_at_each_item_once():
    items = Counted()
    index = Index(items)
    Counted.reads = 0
    for n in range(1000):
        items.append(object())
        assert index.find(items[-1]) == n
    assert Counted.reads <= 2000
    assert index.find(object()) is None


def test_an_index_finds_the_first_place_and_follows_a_list_that_shrinks():
    one, other = object(), object()
    items = [one, other, one]
    index = Index(items)
    assert (index.find(one), index.find(other)) == (0, 1)
    del items[1:]
    assert index.find(other) is None
    items.append(other)
    assert index.find(other) == 1


def long(x):
    for _ in range(30):
        x = tf.tanh(x * 1.1 + 0.1)
    return x


def test_what_no_call_has_the_budget_for_is_compiled_once_it_has_come_often(tune):
    tune(graph_operation=1.0, hopeless_visits=6)
    fn, x = coexec.function(long), tf.constant([0.5, 1.0])
    for _ in range(6):
        np.testing.assert_allclose(fn(x), long(x), rtol=1e-5)
    assert (fn.stats().launches, fn.stats().compiles, fn.stats().followed) == (0, 0, 5)
    assert "to compile its 90 operations holds up a call" in fn.explain()
    for _ in range(3):
        np.testing.assert_allclose(fn(x), long(x), rtol=1e-5)
    assert (fn.stats().launches, fn.stats().compiles) == (3, 1)


def test_what_one_call_has_no_budget_for_later_calls_compile(monkeypatch, tune):
    """Five segments, of which each call has the budget for one."""
    tune(graph_operation=0.01, call_seconds=1.0, call_times=0.0)
    monkeypatch.setattr(budget.Budget, "spend", lambda self, _: setattr(self, "left", 0.0))

    def step(x):
        for _ in range(5):
            x = long(x) * 0.5
            float(x[0])
        return x

    fn, x = coexec.function(step), tf.constant([0.5, 1.0])
    compiled = []
    for _ in range(10):
        np.testing.assert_allclose(fn(x), step(x), rtol=1e-5)
        compiled.append(fn.stats().compiles)
    assert all(after - before <= 1 for before, after in itertools.pairwise(compiled))
    assert "hold up" not in fn.explain()
    assert fn.stats().launches > 5


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_learning_ends_with_the_budget(tune, seconds):
    tune(call_seconds=seconds)
    layer = tf.keras.layers.Dense(2)
    layer.build((None, 2))
    fn, x = coexec.function(lambda x: layer(x) * 2.0), tf.ones([3, 2])
    for _ in range(6):
        np.testing.assert_allclose(fn(x), layer(x) * 2.0, rtol=1e-5)
    assert (fn.stats().regions == 0) is (seconds == 0.0)
    assert ("learning has taken long enough" in fn.explain()) is (seconds == 0.0)
