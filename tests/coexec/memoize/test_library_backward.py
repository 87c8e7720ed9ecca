"""Backward functions of libraries (`tf.nn.silu`): calls with them are memoized, and so are gradients through them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec.testing import always_follow
from tests.coexec import run_both

RNG = np.random.default_rng(4)
BATCHES = [tf.constant(RNG.normal(size=[n, 6]).astype(np.float32)) for n in (5, 5, 8, 5, 3, 8)]
CALLS = [(BATCHES[n % 2],) for n in range(24)]


@pytest.fixture(autouse=True)
def followed():
    """Every call is followed."""
    with always_follow():
        yield


def model_of(activation="silu"):
    keras.utils.set_random_seed(6)
    model = keras.Sequential([keras.layers.Dense(6, activation=activation) for _ in range(3)])
    model.build([None, 6])
    return model


def training(loss_of, **options):
    """A training step of a model with `loss_of(model, rows, tape)`."""

    def make(decorate):
        model, optimizer = model_of(), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

        @decorate
        def step(rows):
            with tf.GradientTape(**options) as tape:
                loss = loss_of(model, rows, tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients)
            return loss, gradients

        return step

    return make


def of_outputs(model, rows, tape):
    return tf.reduce_mean(model(rows, training=True) ** 2)


def beside_operations(model, rows, tape):
    return tf.reduce_mean(tf.nn.silu(model(tf.nn.silu(rows * 2.0))) * rows)


def another_beta(model, rows, tape):
    return tf.reduce_sum(tf.nn.silu(model(rows), beta=1.5) + tf.nn.silu(model(rows), tf.reduce_mean(rows)))


def penalized(model, rows, tape):
    with tf.GradientTape() as inner:
        inner.watch(rows)
        out = tf.reduce_sum(model(rows))
    return out + tf.reduce_sum(inner.gradient(out, rows) ** 2)


def of_a_jacobian(model, rows, tape):
    with tf.GradientTape() as inner:
        inner.watch(rows)
        out = model(rows)
    return tf.reduce_mean(inner.batch_jacobian(out, rows) ** 2)


def asked_in_between(model, rows, tape):
    tape.watch(rows)
    hidden = model.layers[0](rows)
    inside = tape.gradient(hidden, [rows, model.layers[0].kernel])
    return tf.reduce_sum(model.layers[2](model.layers[1](hidden)) * tf.reduce_sum(inside[0]))


LOSSES = {
    "outputs": (of_outputs, {}),
    "outputs, persistent": (of_outputs, {"persistent": True}),
    "beside operations": (beside_operations, {}),
    "another beta": (another_beta, {}),
    "asked in between": (asked_in_between, {"persistent": True}),
    "a gradient's": (penalized, {}),
    "a jacobian's": (of_a_jacobian, {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_equals_eager(name):
    loss_of, options = LOSSES[name]
    step = run_both(training(loss_of, **options), CALLS)
    # The loop of a Jacobian is a new `tf.function` in each call.
    assert step.stats().followed > 20 or name == "a jacobian's"


def test_layers_and_gradient_are_skipped():
    step = run_both(training(of_outputs), CALLS)
    before = step.stats()
    for _ in range(4):
        step(*CALLS[0])
    after = step.stats()
    # The model, its gradient, the optimizer: nothing of their Python runs.
    assert after.regions - before.regions == 4 * 3
    assert "tapes" not in str(step.explain())


def test_sizes_in_turn():
    step = run_both(training(of_outputs), [(BATCHES[n % 6],) for n in range(48)])
    before = step.stats().regions
    for rows in BATCHES:
        step(rows)
    assert step.stats().regions - before >= 2 * len(BATCHES)


def test_a_value_that_changes_is_no_constant():
    def make(decorate):
        model, betas = model_of("relu"), iter(np.linspace(0.5, 2.0, 24).astype(np.float32))

        @decorate
        def step(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.silu(model(rows), beta=float(next(betas))))
            return loss, tape.gradient(loss, model.trainable_variables)

        return step

    run_both(make, CALLS)


def test_a_variable_that_it_closes_over_is_read_anew():
    def make(decorate):
        model, beta = model_of("relu"), tf.Variable(1.0)

        @decorate
        def step(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.silu(model(rows), beta))
            gradients = tape.gradient(loss, [beta, *model.trainable_variables])
            beta.assign_sub(0.01 * gradients[0])
            return loss, gradients, beta.numpy()

        return step

    run_both(make, CALLS)


def test_a_backward_function_of_the_programs_runs_each_time():
    def make(decorate):
        model, seen = model_of(), []

        @tf.custom_gradient
        def twice(x):
            def backward(dy):
                seen.append(len(seen))
                return 2.0 * tf.nn.silu(dy)

            return x * 1.0, backward

        @decorate
        def step(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(twice(model(rows)))
            return loss, tape.gradient(loss, model.trainable_variables), len(seen)

        return step

    run_both(make, CALLS)


def test_a_layer_of_the_programs_with_it():
    class Gated(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (keras.layers.Dense(6, use_bias=False) for _ in range(3))

        def call(self, x):
            return self.down(tf.nn.silu(self.gate(x)) * self.up(x))

    def make(decorate):
        keras.utils.set_random_seed(6)
        layers = [Gated() for _ in range(2)]
        for layer in layers:
            layer(BATCHES[0])
        weights = [w for layer in layers for w in layer.trainable_variables]

        @decorate
        def step(rows):
            with tf.GradientTape() as tape:
                h = rows
                for layer in layers:
                    h = h + layer(h)
                loss = tf.reduce_mean(h**2)
            gradients = tape.gradient(loss, weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(0.01 * gradient)
            return loss, gradients

        return step

    step = run_both(make, CALLS)
    assert step.stats().regions >= 3 * 12
