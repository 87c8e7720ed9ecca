"""Functions that hand their arguments to one operation: answered, they do what they do eagerly, and Python rests."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.guards.pure_calls import is_computing
from tests.coexec import run_both
from tests.tracer.test_answers import CODES, calls_of, repeated
from tracer import single_ops
from tracer.answers import answered

X = tf.constant([[1.0, -2.0, 3.0], [0.25, 5.0, -6.0]])
WHOLES = tf.constant([[1, -2, 3], [0, 5, -6]])
TRUTHS = tf.constant([[True, False, True], [True, True, True]])
V = tf.Variable([[0.5, 2.0, -1.0], [3.0, 0.125, 1.0]])


def of(path):
    return functools.reduce(getattr, path.split("."), tf)


UNARY = {
    path: (lambda x, path=path: of(path)(x), TRUTHS if path.endswith("logical_not") else X)
    for paths in single_ops._UNARY
    for path in paths
}
BINARY = {
    f"{path} {what}": (lambda x, path=path, call=call: call(of(path), x), X)
    for paths in single_ops._BINARY
    for path in paths[:1]
    for what, call in {
        "of tensors": lambda f, x: f(x, x + 1.0),
        "of a tensor and a number": lambda f, x: f(x, 2.0),
        "of a tensor and a whole number": lambda f, x: f(x, 3),
        "of a tensor and a variable": lambda f, x: f(x, V),
        "of a variable and a tensor": lambda f, x: f(V, x),
        "by name": lambda f, x: f(y=x, x=x * 2.0, name="named"),
    }.items()
}
ANSWERED = {
    **UNARY,
    **BINARY,
    "a variable": (lambda x: tf.square(V) + tf.sqrt(V) + x, X),
    "a number on the left": (lambda x: tf.maximum(0.5, x) + tf.subtract(1, x), X),
    "wholes": (lambda x: tf.maximum(x, 1) + tf.add(x, 2), WHOLES),
    "square of wholes": (lambda x: tf.square(x), WHOLES),
    "sign of wholes": (lambda x: tf.sign(x), WHOLES),
    "divide": (lambda x: tf.divide(x, x + 7.0), X),
    "divide by a number": (lambda x: tf.math.divide(x, 4.0), X),
    "softmax": (lambda x: tf.nn.softmax(x), X),
    "softmax of the last": (lambda x: tf.nn.softmax(x, axis=-1), X),
    "softmax of the last, counted": (lambda x: tf.nn.log_softmax(x, 1), X),
    "leaky": (lambda x: tf.nn.leaky_relu(x) + tf.nn.leaky_relu(x, alpha=0.1), X),
    "reshape": (lambda x: tf.reshape(x, [3, 2]), X),
    "reshape to a tuple": (lambda x: tf.reshape(x, (-1,)), X),
    "reshape to a number": (lambda x: tf.reshape(x, 6), X),
    "reshape to a shape": (lambda x: tf.reshape(x, tf.constant([3, 2])), X),
    "expand": (lambda x: tf.expand_dims(x, -1), X),
    "expand by name": (lambda x: tf.expand_dims(input=x, axis=1), X),
    "squeeze": (lambda x: tf.squeeze(tf.expand_dims(x, 1)), X),
    "squeeze one": (lambda x: tf.squeeze(tf.expand_dims(x, 1), axis=1), X),
    "squeeze some": (lambda x: tf.squeeze(tf.expand_dims(x, 0), [0]), X),
    "concat": (lambda x: tf.concat([x, x * 2.0], axis=1), X),
    "concat a tuple": (lambda x: tf.concat((x, x, x), -1), X),
    "stack": (lambda x: tf.stack([x, x * 2.0], axis=1), X),
    "add_n": (lambda x: tf.add_n([x, x * 2.0]), X),
    "transpose": (lambda x: tf.transpose(x), X),
    "transpose by a list": (lambda x: tf.transpose(x, [1, 0]), X),
    "transpose by name": (lambda x: tf.transpose(a=x, perm=(1, 0)), X),
    "argmax": (lambda x: tf.argmax(x), X),
    "argmax of an axis": (lambda x: tf.argmax(x, axis=-1, output_type=tf.int32), X),
    "tile": (lambda x: tf.tile(x, [1, 2]), X),
    "stop_gradient": (lambda x: tf.stop_gradient(x), X),
}  # fmt: skip

# These are left to TensorFlow, with whatever comes of it, now and then beside what is answered.
LEFT = {
    "an array": (lambda x: tf.sqrt(np.ones(3, np.float32)) + tf.exp(x)[0], X),
    "a number": (lambda x: tf.sqrt(2.0) * x, X),
    "a list": (lambda x: tf.square([x, x]), X),
    "NumPy's number": (lambda x: tf.maximum(x, np.float32(2.0)), X),
    "a double beside a float": (lambda x: tf.add(x, tf.cast(x, tf.float64)), X),
    "a double of NumPy's": (lambda x: tf.multiply(x, np.float64(2.0)), X),
    "wholes and a float": (lambda x: tf.add(x, 0.5), WHOLES),
    "a float and wholes": (lambda x: tf.multiply(0.5, x), WHOLES),
    "a truth": (lambda x: tf.maximum(x, True), X),
    "a large number": (lambda x: tf.add(x, 1 << 40), X),
    "none": (lambda x: tf.add(x, None), X),
    "other shapes": (lambda x: tf.subtract(x, x[:, :2]), X),
    "round of wholes": (lambda x: tf.round(x), WHOLES),
    "log of wholes": (lambda x: tf.math.log(x), WHOLES),
    "quotient of wholes": (lambda x: tf.divide(x, 2), WHOLES),
    "quotient by name": (lambda x: tf.divide(x, 2.0, name="named"), X),
    "complex": (lambda x: tf.sign(tf.complex(x, x)), X),
    "softmax of the first": (lambda x: tf.nn.softmax(x, axis=0), X),
    "softmax of an axis that is none": (lambda x: tf.nn.softmax(x, axis=5), X),
    "leaky wholes": (lambda x: tf.nn.leaky_relu(x), WHOLES),
    "leaky by a tensor": (lambda x: tf.nn.leaky_relu(x, tf.constant(0.1)), X),
    "a shape with tensors": (lambda x: tf.reshape(x, [tf.shape(x)[1], -1]), X),
    "a shape of NumPy's": (lambda x: tf.reshape(x, np.array([3, 2])), X),
    "a shape's shape": (lambda x: tf.reshape(x, x.shape), X),
    "a shape that does not fit": (lambda x: tf.reshape(x, [4, 4]), X),
    "no axis": (lambda x: tf.expand_dims(x), X),
    "an axis too many": (lambda x: tf.expand_dims(x, 9), X),
    "squeeze what is not one": (lambda x: tf.squeeze(x, 0), X),
    "one to concat": (lambda x: tf.concat([x], 0), X),
    "concat of numbers": (lambda x: tf.concat([x, [[1.0, 2.0, 3.0]]], 0), X),
    "concat of dtypes": (lambda x: tf.concat([x, tf.cast(x, tf.int32)], 0), X),
    "concat along a tensor": (lambda x: tf.concat([x, x], tf.constant(0)), X),
    "stack of numbers": (lambda x: tf.stack([1.0, 2.0]) + x[0, 0], X),
    "stack of a number": (lambda x: tf.stack([x[0, 0], 2.0]), X),
    "stack of the first": (lambda x: tf.stack((x, x)), X),
    "stack of an axis that is none": (lambda x: tf.stack([x, x], 7), X),
    "add_n of one": (lambda x: tf.add_n([x]), X),
    "conjugate": (lambda x: tf.transpose(tf.complex(x, x), conjugate=True), X),
    "argmax by a tensor": (lambda x: tf.argmax(x, tf.constant(1)), X),
    "ragged": (lambda x: tf.sqrt(tf.RaggedTensor.from_tensor(tf.abs(x))).to_tensor(), X),
    "sparse": (lambda x: tf.sparse.to_dense(tf.abs(tf.sparse.from_dense(x))), X),
    "too much": (lambda x: tf.sqrt(x, None, 1), X),
    "nothing": (lambda x: tf.maximum(x), X),
    "an unknown name": (lambda x: tf.exp(x, axis=1), X),
    "an integer variable": (lambda x: tf.maximum(x, tf.Variable(1)), X),
    "a truth for numbers": (lambda x: tf.sqrt(x > 0.0), X),
}  # fmt: skip


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


@pytest.mark.parametrize("name", ANSWERED)
def test_answered(name):
    """Values, dtypes and shapes are eager's, and once it is followed TensorFlow's Python is not run for it."""
    function, x = ANSWERED[name]
    step = run_both(repeated(function), [(x,), (x,), (x + x if x.dtype != tf.bool else ~x,), (x,)])
    assert (step.stats().recorded, step.stats().followed, step.stats().diverged) == (1, 3, 0)
    assert not calls_of(CODES, lambda: step(x))
    assert calls_of(CODES, lambda: coexec.imperative()(step)(x))


@pytest.mark.parametrize("name", LEFT)
def test_left_to_tensorflow(name):
    """Results and errors are eager's, words included."""
    function, x = LEFT[name]
    run_both(repeated(function), [(x,), (x,), (x * 2,), (x,), (x,)])


def test_arguments_that_change():
    """What stands where something else stood before is what it is: numbers, shapes, axes, kinds."""

    def make(decorate):
        @decorate
        def step(x, number, shape, axis, other):
            y = x * 1.0
            return tf.maximum(y, number), tf.reshape(y, shape), tf.concat([y, y], axis), tf.add(y, other), y

        return step

    shapes = [[3, 2], (6,), [-1], [2, 3]]
    numbers = [1.0, 2, -0.0, float("nan"), np.float32(3), True, X]
    others = [1.0, 2, X, V, X.numpy(), [1.0, 2.0, 3.0]]
    calls = [(X, numbers[k % 7], shapes[k % 4], k % 2, others[k % 6]) for k in range(24)]
    run_both(make, calls)


def test_gradients():
    """Tapes hear of what is answered, and not of what stops them."""

    def make(decorate):
        w = tf.Variable(X)

        @decorate
        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = tf.square(w) + tf.nn.relu(tf.maximum(x, w)) * tf.stop_gradient(tf.tanh(w))
                z = tf.concat([tf.transpose(y), tf.reshape(y, (3, 2))], 1)
                loss = tf.reduce_mean(tf.nn.softmax(z)[0]) + tf.reduce_sum(tf.sigmoid(tf.stack([y, y], 1)))
                stopped = tf.stop_gradient(w) * 2.0
            return loss, tape.gradient(loss, [w, x]), tape.gradient(stopped, w)

        return step

    step = run_both(make, [(X,), (X * 0.5,), (X + 1.0,), (X,), (-X,)])
    assert step.stats().followed == 4
    assert not step.stats().diverged


def test_a_variable_is_read_once():
    """Also where the operation behind the read is another one than before."""

    def make(decorate):
        v = tf.Variable(X)

        @decorate
        def step(x, which):
            with tf.GradientTape() as tape:
                y = x * 1.0
                y = (tf.square(v) if which else tf.sqrt(tf.abs(v))) + y
                y = tf.subtract(v, y) if which else tf.pow(v, 2.0)
            return y, tape.gradient(y, v), [watched is v for watched in tape.watched_variables()]

        return step

    run_both(make, [(X, which) for which in (True, True, False, True, False, False, True)])


def test_functions_looked_up_before_are_known_to_compute():
    """A layer may hold the function that was there before it was wrapped."""
    for paths, original, wrapper in answered():
        found = functools.reduce(getattr, paths[0].split("."), tf)
        if is_computing(found):
            assert is_computing(original), paths
            assert is_computing(wrapper), paths
