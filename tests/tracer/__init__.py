"""Trace graphs of small functions, as the decorator builds them: what the tracer's tests look at."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

import coexec
from tracer import intercept


def straight_line():
    """Three operations, followed."""

    @coexec.function
    def step(x, w):
        return tf.nn.relu(x @ w) + 1.0

    return step, [(tf.ones([2, 3]), tf.ones([3, 4]))] * 3


def branches():
    """A fork on a value that is read, and a join behind it."""

    @coexec.function
    def step(x):
        if tf.reduce_sum(x) > 0.0:
            y = x * 2.0
        else:
            y = x - 1.0
        return tf.tanh(y)

    return step, [(tf.ones([3]),), (-tf.ones([3]),), (tf.ones([3]),), (-tf.ones([3]),)]


def choices():
    """A fork in the middle of a segment, at what an argument decides."""

    @coexec.function
    def step(x, doubled):
        y = tf.tanh(x)
        return y * 2.0 if doubled else tf.exp(y)

    return step, [(tf.ones([3]), n % 2 == 0) for n in range(4)]


def loops():
    """The same places again and again, a number of times that changes."""

    @coexec.function
    def step(x, times):
        for i in range(times):
            x = x * float(i) + 1.0
        return x

    return step, [(tf.ones([2]), n) for n in (2, 3, 3, 1, 0)]


def variables():
    """A variable that is read and written, and a gradient."""
    v = tf.Variable([1.0, 2.0])

    @coexec.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * x)
        v.assign_sub(0.1 * tape.gradient(loss, v))
        return loss

    return step, [(tf.constant([1.0, 3.0]),)] * 3


def keras_layer():
    """A library's own Python between the user's frames and the operations."""
    layer = keras.layers.Dense(4, activation="relu")
    layer.build([None, 3])

    @coexec.function
    def step(x):
        return layer(x)

    return step, [(tf.ones([2, 3]),)] * 3


def lists():
    """Inputs and results that are lists, and a ragged tensor."""

    @coexec.function
    def step(x, ragged):
        a, b = tf.split(x, 2)
        values, places = tf.math.top_k(tf.concat([a, b, a], 0), 2)
        return (
            tf.add_n([values, values]),
            places,
            tf.stack([a, b, b]),
            ragged.with_values(ragged.values * 2.0),
        )

    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    return step, [(tf.constant([4.0, 1.0, 3.0, 2.0]), ragged)] * 3


def host_operations():
    """Operations that run on their own: random numbers, strings, Python inside of one."""

    @coexec.function
    def step(x):
        noise = tf.random.normal([2], seed=3)
        text = tf.strings.as_string(x)
        (doubled,) = tf.py_function(lambda v: [v * 2.0], [x], [tf.float32])
        return noise + doubled, tf.strings.join([text, "!"])

    return step, [(tf.ones([2]),)] * 3


def shapes():
    """Several shapes at the same places, and shapes made of shapes."""

    @coexec.function
    def step(x):
        flat = tf.reshape(x, [tf.shape(x)[0] * 2, -1])
        return tf.transpose(flat), tf.fill([len(x)], -0.0)

    return step, [(tf.ones([n, 4]),) for n in (1, 2, 2, 3, 3)]


def changing_numbers():
    """Python numbers that change: fed from then on."""

    @coexec.function
    def step(x, rate, row):
        return tf.gather(x * rate, row)

    return step, [(tf.ones([4, 2]), 0.5 * n, n) for n in range(4)]


def changing_items():
    """Python numbers that change inside of a list of inputs."""

    @coexec.function
    def step(x, scale):
        return tf.add_n([x, scale, x])

    return step, [(tf.constant(1), n) for n in range(4)]


def guarded():
    """An operation whose failure the function could catch."""

    @coexec.function
    def step(x):
        try:
            return tf.linalg.inv(x)
        except tf.errors.InvalidArgumentError:
            return x

    return step, [(tf.eye(2),)] * 3


def no_operations():
    """A call without any operation."""

    @coexec.function
    def step(x):
        return x

    return step, [(1,)] * 2


FUNCTIONS = {
    make.__name__: make
    for make in (
        straight_line, branches, choices, loops, variables, keras_layer, lists, host_operations, shapes,
        changing_numbers, changing_items, guarded, no_operations,
    )
}  # fmt: skip


def graph_of(make):
    """Calls the function that `make` returns with its arguments and returns what it has learnt."""
    function, calls = make()
    for arguments in calls:
        function(*arguments)
    return function.trace_graph


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """TensorFlow without the hooks of followed calls, whoever holds them: a lazy tensor of an earlier test, say."""
    held = intercept.holders()
    for _ in range(held):
        intercept.release()
    try:
        yield
    finally:
        for _ in range(held):
            intercept.hold()
