"""Items of a shape: Python's index differs where calls come by other ways, and is no number that changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.coexec import run_both


def dropping(decorate):
    """Dropouts on tensors of ranks that choices decide: each takes the items of a shape, in Keras' Python."""
    keras.utils.set_random_seed(1)
    dropouts = [keras.layers.Dropout(0.3, seed=n) for n in range(3)]
    dense = keras.layers.Dense(4)
    dense.build((None, 4))

    @decorate
    def step(x, ranks):
        with tf.GradientTape() as tape:
            total = 0.0
            for dropout, rank in zip(dropouts, ranks, strict=True):
                y = tf.reshape(dense(x), [-1, *[2] * (rank - 1)])
                total += tf.reduce_sum(dropout(y, training=True) ** 2)
        return total, tape.gradient(total, dense.trainable_variables)

    return step


def indexing(decorate):
    """The same by the program's own Python."""

    @decorate
    def step(x, ranks):
        total = 0.0
        for rank in ranks:
            y = tf.reshape(x, [-1, *[2] * (rank - 1)])
            sizes = tf.shape(y)
            for axis in range(rank):
                total += tf.reduce_sum(tf.ones([sizes[axis], 2])) * float(axis + 1)
            total += tf.cast(sizes[-1] * tf.size(y), tf.float32)
        return total

    return step


@pytest.mark.parametrize("make", [dropping, indexing])
def test_ranks_that_differ(make):
    draw = np.random.default_rng(2)
    x = tf.constant(draw.normal(size=(4, 4)), tf.float32)
    step = run_both(make, [(x * n, draw.integers(1, 4, 3).tolist()) for n in range(30)])
    assert step.stats().followed > 20, step.explain()
    assert "a value was read" not in str(step.explain()), step.explain()


def test_indices_of_tensors_that_are_not_known():
    """At the same line, an index into data is a number that changes, and one into a shape is none."""

    def make(decorate):
        @decorate
        def step(x, numbers):
            total = 0.0
            for number in numbers:
                for taken in (x, tf.shape(x), tf.cast(tf.reduce_sum(x), tf.int32) + tf.range(3)):
                    total += tf.reduce_sum(tf.cast(taken[number % taken.shape[0]], tf.float32))
            return total

        return step

    draw = np.random.default_rng(3)
    x = tf.constant(draw.integers(0, 9, (6, 4)), tf.float32)
    run_both(make, [(x + n, draw.integers(0, 6, 2 + n % 3).tolist()) for n in range(40)])
