"""Batches that are small arrays of integers are data: no path of a call's own for each of them."""

import numpy as np
import pytest
import tensorflow as tf

from tests.coexec import run_both


def embedded(decorate):
    """An embedding whose gradient's rows are summed by their numbers, as optimizers of libraries do."""
    table = tf.Variable(tf.reshape(tf.range(24 * 8, dtype=tf.float32), (24, 8)) / 100.0)
    head = tf.Variable(tf.ones((8, 1)) * 0.1)

    @decorate
    def step(ids):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, tf.convert_to_tensor(ids))
            loss = tf.reduce_mean(tf.square(rows @ head))
        slices, slope = tape.gradient(loss, [table, head])
        numbers, places = tf.unique(slices.indices)
        summed = tf.math.unsorted_segment_sum(slices.values, places, tf.shape(numbers)[0])
        table.scatter_sub(tf.IndexedSlices(0.1 * summed, numbers))
        head.assign_sub(0.1 * slope)
        return loss, numbers, table.read_value()

    return step


def counted(decorate):
    """Labels that are counted: which of them there are depends on the batch."""
    weights = tf.Variable(tf.ones((6, 5)) * 0.1)

    @decorate
    def step(labels):
        x = tf.one_hot(tf.constant(labels), 6)
        with tf.GradientTape() as tape:
            scores = x @ weights
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels % 5, scores))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        there, _, counts = tf.unique_with_counts(tf.constant(labels) + 0)
        return loss, there, counts

    return step


@pytest.mark.parametrize("program", [embedded, counted])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_new_batches_take_known_paths(program, dtype):
    """Values are eager's; once the gradient is known its Python does not run, though no batch comes twice."""
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 6 if program is counted else 24, 40).astype(dtype) for _ in range(24)]
    batches = batches if program is counted else [batch.reshape(4, 10) for batch in batches]
    step = run_both(program, [(batch,) for batch in batches[:16]])
    before = step.stats()
    for batch in batches[16:]:
        step(batch)
    after = step.stats()
    assert after.regions - before.regions >= 4, step.explain()
    assert after.diverged == before.diverged
    assert "CX-GRADIENT" not in step.explain() or "keep disagreeing" not in step.explain()


def test_arrays_that_come_again_after_others():
    """Whatever was a constant once: equal batches, other ones, other sizes, in any order."""
    rng = np.random.default_rng(1)
    batches = [rng.integers(0, 24, (rows, 5)) for rows in (2, 2, 3, 2, 3, 1)]
    run_both(embedded, [(batches[k],) for k in (0, 0, 0, 1, 1, 2, 0, 3, 4, 5, 0, 1, 2, 5, 5, 3)])
