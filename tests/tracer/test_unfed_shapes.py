"""Shapes at a place where another call was fed a number: they are constants again where the result depends on them."""

import numpy as np
import tensorflow as tf

from coexec import testing
from tests.coexec import run_both


def test_gradients_of_ways_that_reshape_at_one_line():
    """A gradient's operations are all at one line: by turns, that of a scalar stands where that of a matrix did."""

    def make(function):
        table, matrix = tf.Variable(tf.ones([6, 4])), tf.Variable(tf.fill([4, 6], 0.1))
        variables = [table, matrix, tf.Variable(tf.zeros([6]))]

        def step(words, plan):
            with tf.GradientTape() as tape:
                word, loss, total, h = words[:, 0], 0.0, 0.0, tf.zeros([8, 4])
                for t, forced in enumerate(plan):
                    h = tf.tanh(h + tf.gather(table, word))
                    logits = h @ matrix + variables[2]
                    gold = words[:, t + 1]
                    weight = tf.cast(gold != 0, tf.float32)
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(gold, logits)
                    loss += tf.reduce_sum(weight * losses)
                    total += tf.reduce_sum(weight)
                    word = gold if forced else tf.argmax(logits, -1, output_type=tf.int32)
                loss = loss / total
            return loss, [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

        return function(step)

    numbers, calls = np.random.RandomState(0), []
    for _ in range(24):
        turns = int(numbers.choice([2, 3]))
        plan = [bool(numbers.rand() < 0.7) for _ in range(turns)]
        calls.append((tf.constant(numbers.randint(0, 6, (8, turns + 1)), tf.int32), plan))
    with testing.always_follow():
        step = run_both(make, calls)
    assert step.stats().followed > 12
    assert "depends on values" not in step.explain()


def test_a_line_that_runs_more_often_than_when_it_was_recorded():
    """What the second turn issues first stands where the first turn issued something else: that is no other number."""

    def make(function):
        weight = tf.Variable(tf.ones([3, 3]))

        def up(x):
            return tf.repeat(tf.repeat(x @ weight, 2, axis=1), 2, axis=2)

        def step(x, turns):
            with tf.GradientTape() as tape:
                loss = tf.zeros([])
                for _ in range(turns):
                    loss += tf.reduce_sum(up(x) ** 2)
            return loss, tape.gradient(loss, weight)

        return function(step)

    x = tf.constant(np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype("float32"))
    with testing.always_follow():
        step = run_both(make, [(x, turns) for turns in (1, 1, 2, 3, 1, 2, 3)])
    assert step.stats().followed >= 5
    assert "CX-ALONE" not in step.explain()
