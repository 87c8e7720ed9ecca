"""Variables that skipped calls read: custom gradients find them by a watcher, on tapes or not.

TensorFlow asks the watcher for what a custom gradient's function depends on; a variable that it does not know of gets
no gradient, without an error.
"""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import record

import coexec
from coexec import testing
from tests.coexec import unchanged
from tests.snapshots import assert_same, snapshot
from tracer import variables

X = tf.constant(np.random.default_rng(3).normal(size=[2, 4]).astype(np.float32))
CALLS = 10


def perceptron():
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])


def custom(model):
    """A custom gradient of the program's, whose function reads the model's variables in layers."""

    @tf.custom_gradient
    def f(x):
        with tf.GradientTape() as inner:
            y = model(x)

        def back(dy, variables=None):
            grads = inner.gradient(y, variables, output_gradients=dy * 2.0)
            return tf.zeros_like(x), grads

        return y, back

    return f


def around_a_tape(model):
    """The watcher is opened under a tape, and the call is made on one."""

    def f(x):
        with record.VariableWatcher() as watcher:
            y = model(x)
        return y * float(len(watcher.watched_variables()))

    return f


def nested(model):
    """What an inner watcher is notified of, an outer one is, too."""

    def f(x):
        with record.VariableWatcher() as outer:
            with record.VariableWatcher() as inner:
                y = model(x)
            z = model.layers[-1](tf.ones([1, 5]))
        return (y + z) * float(len(outer.watched_variables()) + 10 * len(inner.watched_variables()))

    return f


def frozen(model):
    """Variables that are not trainable are not watched."""
    model.layers[0].trainable = False
    return tf.recompute_grad(lambda x: model(x))


def by_tensorflow(model):
    """Functions of TensorFlow's that read variables, and calls of graphs."""
    kernel, graph = model.layers[0].kernel.value, tf.function(lambda x: tf.matmul(x, model.layers[0].kernel))
    return tf.recompute_grad(lambda x: tf.nn.relu(tf.linalg.matmul(x, kernel)) + graph(x))


WAYS = {
    "recomputed": lambda model: tf.recompute_grad(lambda x: model(x)),
    "recomputed, nested": lambda model: tf.recompute_grad(tf.recompute_grad(lambda x: model(x))),
    "custom": custom,
    "on a tape": around_a_tape,
    "nested": nested,
    "frozen": frozen,
    "by TensorFlow": by_tensorflow,
}


def calls(decorate, way, outside=False):
    """What each call gives; `outside`: the decorated function is called by that of the custom gradient."""
    model = perceptron()
    if outside:
        forward = decorate(lambda x: model(x))
        f, decorate = way(forward), unchanged
    else:
        forward, f = None, way(model)

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(f(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(0.01 * gradient)
        return loss, gradients

    with testing.always_follow():
        found = [(step(X), [w.numpy() for w in model.weights]) for _ in range(CALLS)]
    return snapshot(found), forward or step


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_skipped_reads_count(way):
    """Gradients of all variables, as eagerly, while the layers' Python is skipped."""
    expected, _ = calls(unchanged, way)
    found, step = calls(coexec.function, way)
    assert_same(expected, found)
    assert step.stats().followed >= CALLS - 1
    if way is not by_tensorflow:
        assert step.stats().regions >= CALLS - 5, step.explain()


@pytest.mark.parametrize("way", [custom, WAYS["recomputed"]], ids=["custom", "recomputed"])
def test_the_watcher_of_a_caller(way):
    """A watcher that was opened before the call. Under the caller's own tape no library call is skipped."""
    expected, _ = calls(unchanged, way, outside=True)
    found, step = calls(coexec.function, way, outside=True)
    assert_same(expected, found)
    assert step.stats().followed >= CALLS - 1
    if way is not custom:
        assert step.stats().regions >= CALLS - 5, step.explain()


def test_statements_on_the_device():
    """Loops and branches that run on the device read variables, too."""

    def calls(decorate):
        weight = tf.Variable([[0.5, -1.0], [0.25, 2.0]])

        @tf.recompute_grad
        def f(x):
            for _ in tf.range(3):
                if tf.reduce_sum(x) > 1.0:
                    x = tf.tanh(x @ weight)
                else:
                    x = x @ weight + 0.1
            return x

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(f(x) ** 2)
            gradient = tape.gradient(loss, weight)
            weight.assign_sub(0.01 * gradient)
            return loss, gradient

        with testing.always_follow():
            return snapshot([(step(X[:, :2]), weight.numpy()) for _ in range(40)])

    assert_same(calls(unchanged), calls(coexec.function(control_flow=True)))


@pytest.mark.parametrize("taped", [False, True])
def test_variables_that_are_replaced(taped):
    """A variable that a memoized call has read is not kept alive, and its end drops the call in good order."""

    class Cell:
        def __init__(self):
            self.weight = tf.Variable([1.0, 2.0])

        @coexec.pure
        def __call__(self, x):
            return tf.tanh(x * self.weight) + 1.0

    def calls(decorate):
        cell, gone, found = Cell(), [], []

        @decorate
        def step(x):
            if not taped:
                return cell(x)
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(cell(x))
            return y, tape.gradient(y, cell.weight)

        for i in range(24):
            if i % 8 == 7:
                weakref.finalize(cell.weight, gone.append, i)
                before = weakref.ref(cell.weight)
                cell.weight = tf.Variable([float(i), 0.5])
                held = before()
                assert held is None, [(type(each), repr(each)[:300]) for each in gc.get_referrers(held)]
            found.append((step(tf.constant([0.1, 0.2])), list(gone)))
        return snapshot(found), step

    with testing.always_follow():
        (expected, _), (found, step) = calls(unchanged), calls(coexec.function)
    assert_same(expected, found)
    assert step.stats().regions > 0, step.explain()


def test_none_is_left():
    """What is in force is known only while it is, also behind an error."""
    with pytest.raises(ZeroDivisionError), record.VariableWatcher():
        1 // (len(variables.watchers) - 1)
    assert not variables.watchers
