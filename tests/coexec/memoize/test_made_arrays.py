"""Arrays that layers make in each call: of positions, masks, indices. They are fed again where the call is skipped."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec.base.tuning import tuned
from tests.coexec import run_both

WIDTH, LENGTH = 8, 60  # more than a kilobyte: smaller arrays are constants


def encoding(length):
    angles = np.arange(length)[:, None] / np.power(10000.0, np.arange(WIDTH)[None] / WIDTH)
    return np.sin(angles).astype("float32")


class Layer(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(WIDTH)
        self.most, self.phase = 5, 0.0

    def build(self, shape):
        self.dense.build(shape)
        self.table = self.add_weight(shape=(11, 1), name="table")


class Positions(Layer):
    def call(self, x):
        return self.dense(x) + tf.constant(encoding(x.shape[1]) + self.phase)


class Mask(Layer):
    def call(self, x):
        length = x.shape[1]
        mask = tf.constant(np.triu(np.full((length, length), -1e9, "float32"), 1))
        return tf.nn.softmax(tf.matmul(x, x, transpose_b=True) + mask) @ self.dense(x)


class Indices(Layer):
    def call(self, x):
        places = np.arange(x.shape[1])
        apart = np.clip(places[None] - places[:, None], -self.most, self.most) + self.most
        return tf.nn.softmax(tf.gather(self.table, apart)[..., 0]) @ self.dense(x)


class Operand(Layer):
    def call(self, x):
        return self.dense(x) * (encoding(x.shape[1]) + self.phase)


class Mixed(Layer):
    """Of several dtypes, in lists, given to functions of Keras."""

    def call(self, x):
        wide = np.arange(LENGTH * WIDTH * 4).reshape(-1, WIDTH)
        some = [tf.constant(wide, tf.float64)[:LENGTH], tf.cast(tf.constant(wide % 7 > 2), tf.float64)[-LENGTH:]]
        return self.dense(x) + keras.ops.cast(sum(some), "float32") * keras.ops.convert_to_tensor(encoding(LENGTH))


def training(kind, change=None):
    def make(decorate):
        keras.utils.set_random_seed(3)
        layer = kind()
        layer.build((None, LENGTH, WIDTH))
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(layer.trainable_variables)
        numbers = iter(range(1000))

        @decorate
        def train(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(layer(x) ** 2)
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply_gradients(
                (g, v) for g, v in zip(gradients, layer.trainable_variables, strict=True) if g is not None
            )
            return loss, gradients

        def step(x):
            if change is not None:
                change(layer, next(numbers))
            return train(x)

        step.stats, step.explain = getattr(train, "stats", None), getattr(train, "explain", None)
        return step

    return make


def data(count, lengths=(LENGTH,)):
    draw = np.random.default_rng(0)
    shapes = [(3, lengths[number % len(lengths)], WIDTH) for number in range(count)]
    return [(tf.constant(draw.normal(size=shape), tf.float32),) for shape in shapes]


@pytest.mark.parametrize("kind", [Positions, Mask, Indices, Operand, Mixed])
def test_skipped(kind):
    step = run_both(training(kind), data(12))
    assert step.stats().regions >= 3 * 8, step.explain()


@pytest.mark.parametrize("kind", [Positions, Indices, Operand])
def test_what_they_depend_on_changes(kind):
    """An attribute of the layer: as one value comes for some calls, and then another."""

    def change(layer, number):
        layer.most, layer.phase = 5 - number // 6 % 3, number // 6 / 4.0

    step = run_both(training(kind, change), data(40))
    assert step.stats().regions > 40, step.explain()


@pytest.mark.parametrize("kind", [Positions, Mask, Indices, Operand])
def test_of_lengths_that_differ(kind):
    """Some lengths at first; then each call has another."""
    lengths = [60, 90, 60, 90, 75, 60, 75, 90, *range(50, 65)]
    run_both(training(kind), data(45, lengths), jit_compile=False)


class Written(Layer):
    """The array is written to once the tensor has been made of it, and made anew by the next call."""

    def call(self, x):
        array = encoding(LENGTH)
        made = tf.constant(array)
        array[:] = 7.0
        return self.dense(x) + made


class Kept(Layer):
    """The tensor goes out of the call."""

    def call(self, x):
        return self.dense(x) + 0.0, tf.constant(encoding(LENGTH))


class Drawn(Layer):
    def call(self, x):
        return self.dense(x) + tf.constant(np.random.normal(size=(LENGTH, WIDTH)).astype("float32"))


class Counted(Layer):
    count = 0

    def call(self, x):
        Counted.count += 1
        return self.dense(x) + tf.constant(encoding(LENGTH) * Counted.count)


@pytest.mark.parametrize("kind", [Written, Drawn, Counted])
def test_arrays_that_differ(kind):
    def change(layer, number):
        if not number:
            np.random.seed(4)
            Counted.count = 0

    run_both(training(kind, change), data(12))


def test_one_that_is_returned():
    def make(decorate):
        keras.utils.set_random_seed(3)
        layer = Kept()
        layer.build((None, LENGTH, WIDTH))
        found = []

        @decorate
        def step(x):
            y, positions = layer(x)
            found.append(positions)
            return y @ tf.transpose(positions), [v is positions for v in found]

        return step

    run_both(make, data(8))


def test_large_ones_are_not_kept():
    with tuned(max_array=100):
        step = run_both(training(Positions), data(12))
    assert "keep disagreeing" in str(step.explain())
