"""Memoized calls at sizes that keep changing: skipped at new ones, unless the sizes of their arguments do not agree."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.coexec import run_both

WIDTH = 4


def batch(size, labels=None, dtype=np.int64):
    """Rows of numbers and as many labels, or of another number."""
    rng = np.random.default_rng(size)
    return rng.normal(size=(size, WIDTH)).astype(np.float32), rng.integers(0, WIDTH, size if labels is None else labels)


SIZES = np.random.default_rng(0).integers(20, 60, 50).tolist()

CALLS = {
    "cross entropy": lambda x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, x),
    "a loss of Keras": lambda x, y: keras.losses.sparse_categorical_crossentropy(y, x, from_logits=True),
    "one hot": lambda x, y: keras.losses.huber(tf.one_hot(y, WIDTH), x),
    "a shape alone": lambda x, y: x + tf.ones_like(y, tf.float32)[:, None],
    "a shape alone, in a function": lambda x, y: tf.nn.silu(x) + tf.ones_like(y, tf.float32)[:1],
    "a norm": lambda x, y: tf.nn.l2_normalize(x, 0) * tf.cast(y, tf.float32)[:, None],
    "moments": lambda x, y: tf.stack([*tf.nn.moments(x, 0), *tf.nn.moments(x * tf.cast(y, tf.float32)[:, None], 0)]),
    "rows repeated": lambda x, y: tf.repeat(x, 2, axis=0) + tf.cast(tf.repeat(y, 2), tf.float32)[:, None],
    "a size": lambda x, y: tf.nn.gelu(x) / tf.cast(tf.size(y), tf.float32),
    "what it was given": lambda x, y: (tf.identity(x), tf.nn.silu(x), tf.shape(y)),
}  # fmt: skip


def training(call, within):
    """Makes programs that train on what a call returns; `within`: whether the tensors are made in the step."""

    def make(decorate):
        weight = tf.Variable(tf.eye(WIDTH))

        @decorate
        def step(x, y):
            if within:
                x, y = tf.constant(x), tf.constant(y)
            with tf.GradientTape() as tape:
                found = call(tf.tanh(x @ weight), y)
                loss = tf.add_n([tf.reduce_mean(tf.cast(v, tf.float32)) for v in tf.nest.flatten(found)])
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss, found

        return step

    return make


@pytest.mark.parametrize("within", [False, True], ids=["given", "made"])
@pytest.mark.parametrize("name", CALLS)
def test_other_sizes(name, within):
    data = [batch(size) for size in SIZES]
    calls = data if within else [(tf.constant(x), tf.constant(y)) for x, y in data]
    run_both(training(CALLS[name], within), calls, jit_compile=False)


@pytest.mark.parametrize("within", [False, True], ids=["given", "made"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("labels", [1, 19])
def test_sizes_that_do_not_agree(name, within, labels):
    """They did, forty times: what is broadcast now, or fails, is so here, too."""
    data = [batch(size) for size in SIZES[:40]] + [batch(30, labels), batch(31), batch(1, labels), batch(41, 41)]
    calls = data if within else [(tf.constant(x), tf.constant(y)) for x, y in data]
    run_both(training(CALLS[name], within), calls, jit_compile=False)


@pytest.mark.parametrize("within", [False, True], ids=["given", "made"])
@pytest.mark.parametrize("name", ["cross entropy", "a loss of Keras"])
def test_calls_are_skipped_at_new_sizes(name, within):
    """With their gradients: once each has been proven, no size has to be learnt."""
    data = [batch(size) for size in range(20, 70)]
    calls = data if within else [(tf.constant(x), tf.constant(y)) for x, y in data]
    step = run_both(training(CALLS[name], within), calls, jit_compile=False)
    stats = step.stats()
    assert stats.regions >= 2 * 30, step.explain()
    assert stats.compiles <= 2, step.explain()
