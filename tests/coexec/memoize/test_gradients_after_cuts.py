"""Gradients asked after a value was read: operations in between take one or the other of the tape's tensors."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec import testing
from tests.coexec import run_both

WIDTH, CALLS = 3, 48


@tf.custom_gradient
def doubled(x):
    y = x * 2.0
    return y, lambda dy: dy * tf.cos(y)


def operations(tape, w, x, z, layer):
    a, b = x * w, z * w
    return (a, b), tf.reduce_sum(tf.sin(a) * 2.0 + tf.cos(b))


def layers(tape, w, x, z, layer):
    a, b = layer(x), layer(z)
    return (a, b), tf.reduce_sum(tf.sin(a) * 2.0 + tf.cos(b) * w)


def inputs(tape, w, x, z, layer):
    tape.watch([x, z])
    return (x, z), tf.reduce_sum(tf.sin(x * w) * 2.0 + tf.cos(z * w) * tf.reduce_sum(layer(z)))


def functions(tape, w, x, z, layer):
    a, b = doubled(x * w), doubled(z * w)
    return (a, b), tf.reduce_sum(tf.sin(a) * 2.0 + tf.cos(b))


def of_a_loop(tape, w, x, z, layer):
    both = []
    for _ in range(2):
        x, z = tf.sin(x * w), tf.cos(z * w)
        both += [x, z]
    return both[:2], tf.reduce_sum(both[2] * both[3] * both[0])


def hosts(tape, w, x, z, layer):
    a, b = (tf.py_function(lambda v: v * 1.5, [v * w], tf.float32) for v in (x, z))
    a.set_shape(x.shape)
    b.set_shape(x.shape)
    return (a, b), tf.reduce_sum(tf.sin(a) * 2.0 + tf.cos(b))


def stacked(tape, w, x, z, layer):
    both = tf.unstack(tf.stack([x * w, z * w]))
    return both, tf.reduce_sum(tf.concat([tf.sin(both[0]), tf.cos(both[1])], 0) ** 2)


def numbers(tape, w, x, z, layer):
    rates = tf.constant(2.0), tf.constant(3.0)
    return rates, tf.reduce_sum(tf.sin(x * rates[0] * w) * rates[1])


PROGRAMS = [operations, layers, inputs, functions, of_a_loop, hosts, stacked, numbers]
LAYERS = {layers: 2, inputs: 1}  # the calls of layers

BETWEEN = {
    "an operation": lambda tensor, other: tf.exp(tensor * 0.1),
    "two operations": lambda tensor, other: tf.exp(tensor * 0.1) + tf.sin(other),
    "the other way round": lambda tensor, other: tf.sin(other) * tf.exp(tensor * 0.1),
    "a number": lambda tensor, other: tensor * 2.0 + other * 3.0,
    "a function of Keras": lambda tensor, other: keras.ops.relu(tensor * 0.1),
}


def program(forward, between, read, persistent):
    def make(decorate):
        keras.utils.set_random_seed(3)
        layer = keras.layers.Dense(WIDTH, "silu")
        layer.build((None, WIDTH))
        metric = keras.metrics.Mean()
        metric.update_state(0.0)
        w = tf.Variable([1.0, 2.0, 0.5])

        @decorate
        def step(x, z, choice):
            with tf.GradientTape(persistent=persistent) as tape:
                both, loss = forward(tape, w, x, z, layer)
                other = tf.reduce_sum(both[choice] ** 2)
            if read:
                float(loss)
            shown = BETWEEN[between](both[choice], both[1 - choice])
            metric.update_state(both[choice])
            variables = [w, *layer.trainable_variables]
            first = tape.gradient(other, variables) if persistent else None
            return shown, first, tape.gradient(loss, variables), metric.result()

        return step

    return make


def calls(pattern):
    draw = np.random.default_rng(5)
    return [
        (
            *tf.constant(draw.normal(size=(2, 2, WIDTH)), tf.float32),
            {"blocks": n // 6, "random": draw.integers(2)}[pattern] % 2,
        )
        for n in range(CALLS)
    ]


@pytest.mark.parametrize("read", [True, False], ids=["read", "in one segment"])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("forward", PROGRAMS)
def test_one_of_the_tapes_tensors(forward, between, read):
    with testing.always_follow():
        step = run_both(program(forward, between, read, False), calls("blocks"))
    assert step.stats().regions > (skipped(forward, 1) - 0.4) * CALLS, step.explain()


def skipped(forward, gradients):
    """How many library calls a call skips: the metric's two, layers, and gradients, but of a Python function."""
    return 2 + LAYERS.get(forward, 0) + (0 if forward is hosts else gradients)


@pytest.mark.parametrize("pattern", ["blocks", "random"])
@pytest.mark.parametrize("read", [True, False], ids=["read", "in one segment"])
@pytest.mark.parametrize("forward", PROGRAMS)
def test_an_earlier_gradient_of_the_tape(forward, read, pattern):
    with testing.always_follow():
        step = run_both(program(forward, "an operation", read, True), calls(pattern))
    # Behind a first gradient of Python functions, one of the metric's two calls is skipped.
    assert step.stats().regions > (skipped(forward, 2) - (1.2 if forward is hosts else 0.5)) * CALLS, step.explain()


def test_a_number_that_was_on_the_tape():
    """One tensor of a number is on the tape, another of the same dtype is fed behind the cut in its place."""

    def make(decorate):
        w = tf.Variable([1.0, 2.0, 0.5])
        rates = [tf.constant(rate) for rate in (2.0, 3.0)]

        @decorate
        def step(x, z, choice):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.sin(x * rates[0]) * w * rates[1])
            float(loss)
            shown = z * rates[choice]
            return shown, tape.gradient(loss, w)

        return step

    step = run_both(make, calls("blocks"))
    assert step.stats().regions > CALLS // 2, step.explain()


class Held(keras.layers.Layer):
    """A layer with two tensors of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.other = tf.constant([0.5, -1.0, 2.0]), tf.constant([1.5, 0.3, -0.7])

    def call(self, x):
        return (x * self.one) * self.other


def of_a_layer(decorate):
    """One of a layer's tensors is fed before the gradient's first operation, behind a cut."""
    layer = Held()

    @tf.custom_gradient
    def function(x):
        return x * 1.0, lambda dy: dy * 2.0

    @decorate
    def step(x, z, choice):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(layer(x)))
        float(loss)
        return tf.exp((layer.one, layer.other)[choice]), tape.gradient(loss, x)

    return step


def of_the_first_function(decorate):
    """A backward function feeds a tensor that the gradient takes after the next one, too."""
    kept = {}

    @tf.custom_gradient
    def first(x):
        def backward(dy):
            kept["shown"] = tf.exp(kept["both"][kept["choice"]])
            return dy * 2.0

        return x * 1.0, backward

    @tf.custom_gradient
    def last(x):
        return x * 1.0, lambda dy: dy * 2.0

    @decorate
    def step(x, z, choice):
        a, b = tf.tanh(x), tf.sin(x)
        kept.update(both=(a, b), choice=choice)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(first(last(x * a * b)))
        float(loss)
        return tape.gradient(loss, x), kept["shown"]

    return step


def returned(decorate):
    """A backward function returns one of the tape's tensors."""
    kept = {}

    @tf.custom_gradient
    def function(x):
        return x * 1.0, lambda dy: kept["both"][kept["choice"]]

    @decorate
    def step(x, z, choice):
        a, b = tf.tanh(x), tf.sin(x)
        kept.update(both=(a, b), choice=choice)
        with tf.GradientTape() as tape:
            tape.watch([x, a, b])
            loss = tf.reduce_sum(function(a * b))
        float(loss)
        return tape.gradient(loss, a)

    return step


def given_back(decorate):
    """A backward function reads a value, and returns what it was given, or another tensor."""
    kept = {}

    @tf.custom_gradient
    def function(x):
        def backward(dy):
            other = dy * 2.0
            float(tf.reduce_sum(dy) + tf.reduce_sum(other))
            return (dy, other)[kept["choice"]]

        return x * 1.0, backward

    @decorate
    def step(x, z, choice):
        kept["choice"] = choice
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(function(x * z)) * z)
        return tape.gradient(loss, x)

    return step


@pytest.mark.parametrize("follows", [True, False], ids=["always", "where it pays"])
@pytest.mark.parametrize("make", [of_a_layer, of_the_first_function, returned, given_back])
def test_backward_functions(make, follows):
    with testing.always_follow() if follows else contextlib.nullcontext():
        step = run_both(make, [call for _ in range(2) for call in calls("blocks")])
    assert step.stats().regions > CALLS // 4, step.explain()
