"""Gradients that other tapes record: memoized, and differentiated again as eagerly."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from tests.coexec import run_both

CALLS = 24
PROGRAMS = {}


def program(skipped):
    """Registers a program; `skipped`: how many memoized calls each of its last ones makes, at least."""

    def register(make):
        PROGRAMS[make.__name__] = pytest.param(make, skipped, id=make.__name__)
        return make

    return register


def data(i, *shape):
    return tf.constant(np.random.default_rng(i).normal(size=shape), tf.float32)


def net(*sizes, activation="tanh"):
    hidden = [keras.layers.Dense(size, activation=activation) for size in sizes[1:-1]]
    return keras.Sequential([keras.Input((sizes[0],)), *hidden, keras.layers.Dense(sizes[-1])])


@program(skipped=5)
def residual_of_a_differential_equation(decorate):
    """Three tapes: first derivatives, second ones by a persistent tape, and the gradient of what is made of both."""
    model, optimizer = net(2, 16, 16, 1), keras.optimizers.Adam(1e-2)

    @decorate
    def step(i):
        x = data(i, 32, 2)
        with tf.GradientTape() as outer:
            with tf.GradientTape(persistent=True) as second:
                second.watch(x)
                with tf.GradientTape() as first:
                    first.watch(x)
                    u = model(x)
                du = first.gradient(u, x)
                along = du[:, 0:1]
            curvature = second.gradient(along, x)[:, 0:1]
            loss = tf.reduce_mean((du[:, 1:2] + u * along - 0.01 * curvature) ** 2)
        slopes = outer.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(slopes, model.trainable_variables, strict=True))
        return float(loss), [v.numpy() for v in model.variables]

    return step


@program(skipped=6)
def gradient_penalty(decorate):
    """The norm of a gradient is part of the loss."""
    critic, optimizer = net(8, 16, 1, activation="elu"), keras.optimizers.RMSprop(1e-2)

    @decorate
    def step(i):
        x, z = data(i, 16, 8), data(i + 100, 16, 8)
        with tf.GradientTape() as tape:
            mixed = x + tf.random.uniform((tf.shape(x)[0], 1)) * (z - x)
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                scores = critic(mixed)
            slopes = inner.gradient(scores, mixed)
            penalty = tf.reduce_mean((tf.norm(slopes, axis=1) - 1.0) ** 2)
            loss = tf.reduce_mean(critic(z)) - tf.reduce_mean(critic(x)) + 10.0 * penalty
        again = tape.gradient(loss, critic.trainable_variables)
        optimizer.apply_gradients(zip(again, critic.trainable_variables, strict=True))
        return float(loss), slopes, [v.numpy() for v in critic.variables]

    return step


@program(skipped=2)
def learning_to_learn(decorate):
    """One or two steps of descent, each a gradient, are differentiated."""
    keras.utils.set_random_seed(1)
    weights = [tf.Variable(tf.random.normal(shape)) for shape in ((1, 12), (12,), (12, 1))]

    def loss_of(parameters, x):
        first, bias, last = parameters
        return tf.reduce_mean((tf.tanh(x @ first + bias) @ last - tf.sin(x)) ** 2)

    @decorate
    def step(i):
        x = data(i, 10, 1)
        with tf.GradientTape() as tape:
            parameters = [tf.convert_to_tensor(v) for v in weights]
            for _ in range(1 + i % 2):
                with tf.GradientTape() as inner:
                    inner.watch(parameters)
                    loss = loss_of(parameters, x)
                slopes = inner.gradient(loss, parameters)
                parameters = [v - 0.1 * slope for v, slope in zip(parameters, slopes, strict=True)]
            loss = loss_of(parameters, x)
        for v, slope in zip(weights, tape.gradient(loss, weights), strict=True):
            v.assign_sub(0.05 * slope)
        return float(loss), [v.numpy() for v in weights]

    return step


@program(skipped=2)
def a_value_is_read_in_between(decorate):
    """What the inner gradient takes was computed by an earlier launch: tapes know it as the tensor it was then."""
    v = tf.Variable([1.0, 2.0, 3.0])

    @decorate
    def step(i):
        x = data(i, 3)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(tf.sin(v * x) ** 3)
            scale = float(y)
            slope = inner.gradient(y, v)
            z = tf.reduce_sum(slope * slope) * scale
        again = outer.gradient(z, v)
        v.assign_sub(0.01 * again)
        return scale, again, v.numpy()

    return step


@program(skipped=2)
def a_value_of_the_gradient_is_read(decorate):
    """The outer gradient takes what the inner one made in an earlier launch."""
    layer = keras.layers.Dense(4, activation="tanh")
    layer.build((None, 3))

    @decorate
    def step(i):
        x = data(i, 5, 3)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(layer(x) ** 2)
            slope = inner.gradient(y, x)
            size = float(tf.norm(slope))
            z = tf.reduce_sum(slope**3) * size
        again = outer.gradient(z, layer.trainable_variables)
        return size, again

    return step


@program(skipped=2)
def asked_inside_of_its_own_scope(decorate):
    """The inner tape ends by being asked; the loss itself is used behind it, too."""
    v = tf.Variable([1.0, 2.0, 3.0])

    @decorate
    def step(i):
        x = data(i, 3)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(tf.sin(v * x) ** 3)
                slope = inner.gradient(y, v)
            z = tf.reduce_sum(slope * slope) * y
        again = outer.gradient(z, v)
        v.assign_sub(0.01 * again)
        return float(z), again, v.numpy()

    return step


@program(skipped=3)
def the_outer_tape_begins_later(decorate):
    """It sees the gradient, and nothing of what is differentiated in it."""
    layer, v = keras.layers.Dense(3), tf.Variable([1.0, 2.0, 3.0])
    layer.build((None, 3))

    @decorate
    def step(i):
        x = data(i, 3)
        with tf.GradientTape(persistent=True) as inner:
            y = tf.reduce_sum(layer((v * x)[None]) ** 3)
        with tf.GradientTape() as outer:
            outer.watch(x)
            slope = inner.gradient(y, v)
            z = tf.reduce_sum(slope * x)
        both = outer.gradient(z, [x, v], unconnected_gradients="zero")
        return float(z), both, inner.gradient(y, layer.kernel)

    return step


@program(skipped=0)
def the_outer_gradient_is_not_memoized(decorate):
    """Its Python reads a value, so it gets all records, the inner gradient's among them, in each call."""
    model = net(3, 8, 1)

    @tf.custom_gradient
    def scaled(y):
        return y * 2.0, lambda dy: dy * (2.0 if float(tf.reduce_sum(dy)) > 0 else 1.0)

    @decorate
    def step(i):
        x = data(i, 6, 3)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = model(x)
            slope = inner.gradient(y, x)
            z = tf.reduce_mean(scaled(tf.reduce_sum(slope * slope, 1)))
        return float(z), outer.gradient(z, model.trainable_variables)

    return step


@program(skipped=0)
def a_persistent_tape_records_its_own_gradient(decorate):
    """Derivatives of derivatives by one tape: its history grows with each of them."""
    v = tf.Variable(0.7)

    @decorate
    def step(i):
        with tf.GradientTape(persistent=True) as tape:
            y = tf.sin(v * (1.0 + 0.1 * (i % 3))) ** 2
            first = tape.gradient(y, v)
            second = tape.gradient(first, v)
        third = tape.gradient(second, v)
        return y, first, second, third

    return step


@program(skipped=0)
def two_outer_tapes_now_and_then(decorate):
    """Which tapes record the inner gradient changes from call to call, and nothing else does."""
    layer = keras.layers.Dense(4, activation="tanh")
    layer.build((None, 3))

    @decorate
    def step(i):
        x = data(i, 5, 3)
        with tf.GradientTape() as outer, tf.GradientTape(watch_accessed_variables=i % 3 > 0) as other:
            if i % 3 == 1:
                other.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(layer(x) ** 2)
            if i % 4 == 2:
                with other.stop_recording():
                    slope = inner.gradient(y, x)
            else:
                slope = inner.gradient(y, x)
            z = tf.reduce_sum(slope**3)
        grads = outer.gradient(z, layer.trainable_variables), other.gradient(z, [x, *layer.trainable_variables])
        return z, grads

    return step


@pytest.mark.parametrize(("make", "skipped"), PROGRAMS.values())
def test_gradients_under_tapes(make, skipped):
    """Values and state are eager's in every call, and the last calls skip the inner gradients, too."""

    def seeded(decorate):
        keras.utils.set_random_seed(5)
        return make(decorate)

    step = run_both(seeded, [(i,) for i in range(CALLS)])
    before = step.stats()
    for i in range(CALLS, CALLS + 4):
        step(i)
    after = step.stats()
    assert after.regions - before.regions >= 4 * skipped, step.explain()
    assert after.followed > CALLS // 2, step.explain()
    if skipped:
        assert "records the gradient" not in step.explain()


def test_a_layer_changes_under_the_inner_gradient():
    """A region in the inner tape's history is learnt anew: so are the gradients that rest on it."""

    def make(decorate):
        keras.utils.set_random_seed(5)
        layer = keras.layers.Dense(4, activation="tanh")
        layer.build((None, 3))

        @decorate
        def step(i):
            if i == 12:
                layer.activation = keras.activations.softplus
            if i == 18:
                layer.trainable = False
            x = data(i, 5, 3)
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(layer(x) ** 2)
                z = tf.reduce_sum(inner.gradient(y, x) ** 2)
            return outer.gradient(z, [x, layer.kernel], unconnected_gradients=tf.UnconnectedGradients.ZERO)

        return step

    run_both(make, [(i,) for i in range(26)])


def test_the_outer_tape_outlives_the_call():
    """The program keeps it, and asks it for a gradient later: it has all records by then."""

    def make(decorate):
        keras.utils.set_random_seed(5)
        layer = keras.layers.Dense(4, activation="tanh")
        layer.build((None, 3))

        @decorate
        def step(i):
            x = data(i, 5, 3)
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(layer(x) ** 2)
                z = tf.reduce_sum(inner.gradient(y, x) ** 2)
            return outer, z, layer.kernel

        return step

    followed, eager = (make(decorate) for decorate in (coexec.function, lambda function: function))
    for i in range(16):
        (tape, z, kernel), (known, expected, its) = followed(i), eager(i)
        np.testing.assert_allclose(tape.gradient(z, kernel), known.gradient(expected, its), rtol=1e-4, atol=1e-5)
    assert followed.stats().regions > 20


def test_an_outer_gradient_comes_in_one_order_where_inner_ones_are_skipped():
    """The tape's order depends on which operations share a tensor of shapes, so those do whose call is skipped."""

    def make(decorate):
        keras.utils.set_random_seed(6)
        weights = [tf.Variable(tf.random.normal(shape, stddev=0.5)) for shape in ((2, 8), (8, 8), (8, 1))]
        biases = [tf.Variable(tf.zeros([1, w.shape[1]])) for w in weights]

        def u(x, t):
            h = 2.0 * (tf.concat([x, t], 1) - [-1.0, 0.0]) / [2.0, 1.0] - 1.0
            for w, b in zip(weights[:-1], biases[:-1], strict=True):
                h = tf.tanh(tf.matmul(h, w) + b)
            return tf.matmul(h, weights[-1]) + biases[-1]

        @decorate
        def step(i):
            x, t = data(i, 16, 1), data(i + 100, 16, 1)
            with tf.GradientTape() as outer:
                with tf.GradientTape() as second:
                    second.watch(x)
                    with tf.GradientTape(persistent=True) as first:
                        first.watch([x, t])
                        y = u(x, t)
                    along, over = first.gradient(y, x), first.gradient(y, t)
                curvature = second.gradient(along, x)
                loss = tf.reduce_mean((over + y * along - 0.01 * curvature) ** 2)
            slopes = outer.gradient(loss, weights + biases)
            for v, slope in zip(weights + biases, slopes, strict=True):
                v.assign_sub(0.1 * (tf.zeros_like(v) if slope is None else slope))
            return float(loss), [v.numpy() for v in weights + biases]

        return step

    fn = run_both(make, [(i,) for i in range(12)], jit_compile=False)
    assert "did not agree" not in fn.explain()
    assert fn.stats().compiles == 1, fn.explain()
    assert fn.stats().regions > 20
