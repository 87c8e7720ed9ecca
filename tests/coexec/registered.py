"""A library as a user might register it: some functions, a layer, and one that is no library's business."""

import keras
import tensorflow as tf

calls = []  # what has run; tests look at it


def smooth(x, rounds=3):
    """Several operations, nothing else; that it ran shows in a count of the interpreter's own."""
    for _ in range(rounds):
        x = (x + tf.roll(x, 1, axis=0) + tf.roll(x, -1, axis=0)) / 3.0
    return x


def counted(x):
    """An effect: it must happen on every call."""
    calls.append("counted")
    return x * 2.0


total = 0
by_size = {}


def summed(x):
    """A write to a global."""
    global total
    total += 1
    return x * 2.0


def cached(x):
    """A write into a container of the module."""
    by_size.setdefault(len(by_size), x.shape)
    return x * 2.0


def of_class(x):
    """A write to an attribute of a class."""
    Gate.used += 1
    return x * 2.0


def with_attribute(x):
    """A write to an attribute of a function."""
    with_attribute.used += 1
    return x * 2.0


with_attribute.used = 0


def by_default(x, seen=[]):  # noqa: B006
    """A write into a default argument."""
    seen.append(1)
    return x * 2.0


def seeding(x):
    """Sets the seed of what is drawn later."""
    tf.random.set_seed(7)
    return x * tf.random.gamma([], 1.0)  # not memoized by itself


def _closure():
    used = 0

    def closure(x):
        """A write to a variable of the function around."""
        nonlocal used
        used += 1
        by = used
        return x * 2.0, by

    return closure


closure = _closure()


class Gate(keras.layers.Layer):
    """A layer whose `call` is the library's."""

    used = 0

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4, "sigmoid", kernel_initializer="ones")
        self.scale = 1.0

    def call(self, x):
        return smooth(self.dense(x)) * x * self.scale


def bounded(x, most, name):
    """An assertion, and what comes behind it."""
    tf.debugging.assert_less(x, most, message=name)
    return tf.math.sigmoid(x)


def of_many_or_few(x):
    """Does something else where there are many rows, of which the shape of the result does not tell."""
    y = tf.tanh(x)
    return tf.reduce_sum(y * 2.0 if x.shape[0] < 20 else y * y)
