"""Ever new sizes: what is known of a call at one size is carried over to the next, and nothing that differs is."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def floats(*shape):
    return tf.constant(np.random.default_rng(sum(shape)).normal(size=shape), tf.float32)


def training(forward, variables, optimizer=None):
    """A step: loss of what `forward` gives, gradient, update."""
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    optimizer.build(variables)

    def step(*args):
        with tf.GradientTape() as tape:
            loss = forward(*args)
        gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def dense():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(4)])
    return training(lambda x, y: tf.reduce_mean((model(x, training=True) - y) ** 2), model.trainable_variables), (
        lambda n: (floats(n, 4), floats(n, 4))
    )


def normalised():
    """Statistics of the batch, and dropout: random numbers of a shape that varies."""
    layers = [keras.Input((4,)), keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    return training(lambda x: tf.reduce_mean(model(x, training=True) ** 2), model.trainable_variables), (
        lambda n: (floats(n, 4),)
    )


def embedded():
    """The gradient has as many rows as there are words, and says so by a number of Python's."""
    table = tf.Variable(floats(10, 4))
    head = keras.layers.Dense(3)
    head.build((None, 4))

    def forward(words, marks):
        found = tf.nn.embedding_lookup(table, words)
        return tf.reduce_mean((head(found) - tf.cast(marks, tf.float32)[:, tf.newaxis]) ** 2)

    def data(n):
        numbers = np.random.default_rng(n)
        return tf.constant(numbers.integers(0, 10, n)), tf.constant(numbers.integers(0, 3, n))

    return training(forward, [table, *head.trainable_variables]), data


def attentive():
    """Reshapes by sizes that Python reads, some of which are others' by accident, and a mask made of them."""
    query, key = keras.layers.Dense(4), keras.layers.Dense(4)
    for layer in (query, key):
        layer.build((None, None, 4))

    def forward(x):
        batch, size = x.shape[:2]
        heads = [tf.transpose(tf.reshape(part(x), [batch, size, 2, 2]), [0, 2, 1, 3]) for part in (query, key)]
        mask = tf.linalg.band_part(tf.ones((size, size)), -1, 0)
        scores = tf.matmul(*heads, transpose_b=True) * mask - 100.0 * (1 - mask)
        mixed = tf.reshape(tf.matmul(tf.nn.softmax(scores), heads[1]), [batch * size, -1])
        return tf.reduce_sum(mixed**2) / float(batch * size)

    return training(forward, [*query.trainable_variables, *key.trainable_variables]), lambda n: (floats(2, n, 4),)


def branching():
    """A layer of the program's that does something else for small batches."""

    class Branching(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(4)

        def call(self, x):
            return self.inner(x) if x.shape[0] > 3 else self.inner(x) * 2.0

    layer = Branching()
    layer.inner.build((None, 4))
    return training(lambda x: tf.reduce_sum(layer(x) ** 2), layer.trainable_variables), lambda n: (floats(n, 4),)


def broadcast():
    """A sum over the batch, whose gradient depends on whether something was repeated along it."""
    weight = tf.Variable(floats(1, 4))
    return training(lambda x, y: tf.reduce_sum((x * weight + y) ** 2 / x.shape[0]), [weight]), (
        lambda n: (floats(n, 4), floats(min(n, 4) if n in (1, 4) else 1, 4))
    )


PROGRAMS = [dense, normalised, embedded, attentive, branching, broadcast]
ORDERS = [[5, 4, 7, 6, 3, 1, 2, 9], [1, 2, 4, 3, 8, 5], [4, 1, 16, 17, 6]]


@pytest.mark.sample(*(f"{p.__name__}-{ORDERS[n % 3]}" for n, p in enumerate(PROGRAMS)))
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_sizes_that_come_and_go(program, order):
    """Losses at all sizes are eager's, in whatever order they come, each some times in a row and then by turns."""
    keras.utils.set_random_seed(3)
    plain, data = program()
    expected = [float(plain(*data(n))) for n in [*np.repeat(order, 4), *order, *order]]
    keras.utils.set_random_seed(3)
    mine, data = program()
    step = coexec.function(mine)
    got = [float(step(*data(n))) for n in [*np.repeat(order, 4), *order, *order]]
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-6)
    stats = step.stats()
    assert stats.followed >= len(got) - len(order) - 2, step.explain()
    before = step.stats()
    for n in order:
        step(*data(n))
    after = step.stats()
    assert after.launches - before.launches >= len(order), step.explain()
    assert after.compiles == before.compiles


@pytest.mark.parametrize("program", [dense, normalised, attentive, embedded], ids=lambda p: p.__name__)
def test_a_new_size_is_learnt_in_one_call(program):
    """In the second call no Python of the library's runs: as many calls are jumped over as at sizes known for long."""
    keras.utils.set_random_seed(3)
    mine, data = program()
    step = coexec.function(mine)

    def jumped(n):
        before = step.stats().regions
        step(*data(n))
        return step.stats().regions - before

    most = [jumped(n) for n in (20, 21, 22) for _ in range(6)][-1]
    assert most >= 3
    assert jumped(23) < most
    assert jumped(23) == most, step.explain()
    assert jumped(24) < most
    assert jumped(24) == most


def test_shapes_that_numbers_of_python_decide():
    """Where such a number was fed first, one call finds out that a shape depends on it; later ones are one segment."""
    mine, data = embedded()
    step = coexec.function(mine)
    for n in (20, 21, 22, 23):
        for _ in range(4):
            step(*data(n))
    before = step.stats()
    for n in (20, 22, 23):
        step(*data(n))
    after = step.stats()
    assert after.launches - before.launches == 3, step.explain()
    assert "which is a constant from now on" in step.explain()
