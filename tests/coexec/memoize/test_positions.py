"""Gradients of slices whose positions change: memoized like any other, with eager's values."""

import random

import numpy as np
import pytest
import tensorflow as tf

from coexec import testing
from tests.coexec import run_both

CALLS = [(i,) for i in range(16)]
ROWS = np.linspace(-1.0, 2.0, 40).astype(np.float32).reshape(5, 8)


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


SLICES = {
    "row": lambda x, i: x[i % 5],
    "from the end": lambda x, i: x[-1 - i % 5],
    "element": lambda x, i: x[i % 5, (3 * i) % 8],
    "window": lambda x, i: x[i % 3 : i % 3 + 2],
    "of another size": lambda x, i: x[: 1 + i % 4],
    "every other": lambda x, i: x[i % 2 :: 2],
    "backwards": lambda x, i: x[:, i % 8 :: -1],
    "new axis": lambda x, i: x[..., tf.newaxis, i % 8],
    "by a tensor": lambda x, i: x[tf.constant(i % 5)],
    "by a drawn number": lambda x, i: x[np.random.RandomState(i).randint(5)],
    "by a value": lambda x, i: x[int(tf.argmax(x[:, i % 8]))],
    "the same": lambda x, i: x[2],
    "two": lambda x, i: x[i % 5] * x[(i + 2) % 5],
    "slices of slices": lambda x, i: x[i % 3 :][:2][:, i % 7],
    "empty": lambda x, i: x[i % 2 : 1],
}


@pytest.mark.parametrize("jit", ["auto", True, False])
@pytest.mark.parametrize("name", SLICES)
def test_gradients_of_slices(name, jit):
    """Where the same operations come again, the Python of the gradient does not run."""
    cut = SLICES[name]

    def program(function):
        w = tf.Variable(ROWS)

        def step(i):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(cut(w * 1.5, i) ** 2)
            gradient = tape.gradient(loss, w)
            w.assign_sub(0.05 * gradient)
            return loss, gradient

        return function(step)

    fn = run_both(program, CALLS, jit_compile=jit)
    assert fn.stats().followed == len(CALLS) - 1, fn.explain()
    if name not in ("of another size", "every other", "backwards", "empty"):
        assert fn.stats().regions >= len(CALLS) - 8, fn.explain()


def test_a_policy_that_draws():
    """The logarithm of the probability of a drawn action, as in every text on policy gradients."""

    def program(function):
        rng, w = random.Random(3), tf.Variable(tf.ones([8, 4]) * 0.1)
        kept = []

        def step(state):
            with tf.GradientTape() as tape:
                probabilities = tf.nn.softmax(state @ w)
                action = rng.choices(range(4), probabilities.numpy()[0])[0]
                loss = -tf.math.log(probabilities[0, action]) * float(action)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            kept.append(action)
            return loss, list(kept)

        return function(step)

    states = [(tf.constant(ROWS[i % 5][None]),) for i in range(40)]
    fn = run_both(program, states)
    assert fn.stats().regions >= 25, fn.explain()


@pytest.mark.parametrize("way", ["second order", "persistent", "jacobian", "forward", "after the call", "graph"])
def test_other_ways_to_ask(way):
    """Slices under nested and persistent tapes, jacobians, accumulators, graph functions, and tapes asked later."""

    def program(function):
        w, tapes = tf.Variable(ROWS), []

        @tf.function
        def traced(x):
            return tf.gradients(tf.reduce_sum(x[1:3] ** 3), x)[0]

        def step(i):
            if way == "second order":
                with tf.GradientTape() as outer:
                    with tf.GradientTape() as inner:
                        loss = tf.reduce_sum((w * w)[i % 5] ** 3)
                    first = inner.gradient(loss, w)
                    second = tf.reduce_sum(first[(i + 1) % 5] + first[i % 5])
                return first, outer.gradient(second, w)
            if way == "forward":
                with tf.autodiff.ForwardAccumulator(w, tf.ones_like(w)) as acc:
                    y = (w * 2.0)[i % 5]
                return acc.jvp(y)
            if way == "graph":
                return traced(w[i % 2 :] * 1.0)
            with tf.GradientTape(persistent=True) as tape:
                y = (w * w)[i % 5]
                z = tf.reduce_sum(y[:3])
            if way == "after the call":
                tapes.append((tape, z))
                return tapes[0][0].gradient(tapes[0][1], w) if i > 8 else None
            if way == "jacobian":
                return tape.jacobian(y[:2], w, experimental_use_pfor=False)
            return tape.gradient(y, w), tape.gradient(z, w)

        return function(step)

    fn = run_both(program, CALLS)
    assert fn.stats().followed >= len(CALLS) // 2


def test_errors_are_eagers():
    """A position out of range raises where eager does, and the next call goes on."""

    def program(function):
        w = tf.Variable(ROWS)

        def step(i):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(w[i] ** 2)
            return tape.gradient(loss, w)

        return function(step)

    fn = run_both(program, [(i,) for i in (0, 1, 2, 3, 9, 4, -5, -6, 1, 0)])
    assert fn.stats().followed > 2, fn.explain()
