"""Gradients of TensorFlow's own functions alone are skipped from the second call with the same tape on."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.coexec import run_both
from tracer.library import gradient

WIDTH = 4


@tf.custom_gradient
def doubled(x):
    return x * 1.0, lambda dy: dy * 2.0


LOSSES = {
    "layer": lambda dense, x, n: tf.reduce_sum(dense(x) ** 2),
    "operations": lambda dense, x, n: tf.reduce_mean(tf.nn.softmax(tf.sin(x) @ dense.kernel)[:, :2]),
    "a number": lambda dense, x, n: tf.reduce_sum(dense(x) * float(n)),
    "an integer": lambda dense, x, n: tf.reduce_sum(dense(x) ** (n % 3 + 1)),
    "an array": lambda dense, x, n: tf.reduce_sum(dense(x) * np.arange(n, n + WIDTH, dtype=np.float32)),
    "indices": lambda dense, x, n: tf.reduce_sum(tf.gather(dense.kernel, [n % WIDTH, 0]) * x[:2]),
    "an axis": lambda dense, x, n: tf.reduce_sum(tf.reduce_max(dense(x), n % 2)),
    "a slice": lambda dense, x, n: tf.reduce_sum(dense(x)[n % 3 :]),
    "a tensor from before": lambda dense, x, n: tf.reduce_sum(dense(x) * tf.constant(float(n))),
    "a variable": lambda dense, x, n: tf.reduce_sum(dense(x) * dense.counter.assign_add(1.0)),
    "a backward function": lambda dense, x, n: tf.reduce_sum(doubled(dense(x))),
    "a library's": lambda dense, x, n: tf.reduce_sum(tf.nn.silu(dense(x))),
    "a choice": lambda dense, x, n: tf.reduce_sum(dense(x) if n % 3 else tf.tanh(dense(x))),
}  # fmt: skip


def training(name, persistent):
    def make(decorate):
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(WIDTH)
        dense.build((None, WIDTH))
        dense.counter = tf.Variable(1.0, trainable=False)
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build([dense.kernel])

        @decorate
        def step(x, n):
            with tf.GradientTape(persistent=persistent) as tape:
                loss = LOSSES[name](dense, x, n)
            gradients = tape.gradient(loss, [dense.kernel, dense.bias])
            optimizer.apply([tf.convert_to_tensor(gradients[0])], [dense.kernel])
            return loss, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

        return step

    return make


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_what_it_is_given_changes(name, persistent):
    draw = np.random.default_rng(3)
    calls = [(tf.constant(draw.normal(size=(5, WIDTH)), tf.float32), number // 2) for number in range(30)]
    run_both(training(name, persistent), calls)


@pytest.mark.parametrize("name", ["layer", "operations", "a library's"])
def test_one_run(name, observed):
    draw = np.random.default_rng(3)
    calls = [(tf.constant(draw.normal(size=(5, WIDTH)), tf.float32), 1) for _ in range(10)]
    step = run_both(training(name, False), calls)
    assert observed.count(gradient) == 1, step.explain()
    assert step.stats().regions >= 6


def test_two_where_a_backward_function_is_called(observed):
    draw = np.random.default_rng(3)
    calls = [(tf.constant(draw.normal(size=(5, WIDTH)), tf.float32), 1) for _ in range(10)]
    run_both(training("a backward function", False), calls)
    assert observed.count(gradient) > 1
