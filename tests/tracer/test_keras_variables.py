"""Arithmetic of Keras' variables, and writes: results and state are eager's, and the libraries' Python rests."""

import operator
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import run_both
from tracer.variables import plain_variable

X = tf.constant([[1.0, -2.0], [3.0, 0.5]])
V = keras.Variable([[2.0, 0.5], [-1.0, 4.0]])
W = keras.Variable([[0.25, -3.0], [2.0, 1.0]])
PLAIN = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
ROW = keras.Variable([10.0, -20.0])
WHOLE = keras.Variable([[1, 2], [3, 4]], dtype="int32")
HALF = keras.Variable([[1.0, 2.0], [3.0, 4.0]], dtype="float16")

ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv]

# Each is answered.
ANSWERED = {
    **{f"{op.__name__} of a variable": (lambda x, op=op: op(x, V)) for op in ARITHMETIC},
    **{f"{op.__name__} to a variable": (lambda x, op=op: op(V, x)) for op in ARITHMETIC},
    **{f"{op.__name__} of a number": (lambda x, op=op: op(V, 3.0) + x) for op in ARITHMETIC},
    **{f"{op.__name__} to a number": (lambda x, op=op: op(3.0, V) + x) for op in ARITHMETIC},
    **{f"{op.__name__} of two variables": (lambda x, op=op: op(V, W) + x) for op in ARITHMETIC},
    "a whole number": lambda x: V * 2 + x,
    "a power": lambda x: V**2 + x,
    "halves": lambda x: HALF * 0.5 - tf.cast(x, tf.float16),
    "beside a variable of TensorFlow's": lambda x: x * PLAIN + V,
    "a product": lambda x: tf.matmul(x, V, transpose_b=True),
    "a bias": lambda x: tf.nn.bias_add(x, ROW),
    "a write": lambda x: W.assign(x * 0.5),
    "what adds": lambda x: W.assign_add(x),
    "what subtracts": lambda x: W.assign_sub(x * V),
}

# These are left to Keras and TensorFlow, with whatever comes of them.
LEFT = {
    "a bias that is added": lambda x: V + ROW + x,
    "wholes": lambda x: WHOLE * 2 - tf.cast(x, tf.int32),
    "wholes and a float": lambda x: WHOLE * 2.5 + x,
    "a quotient of wholes": lambda x: WHOLE / 2 + x,
    "promoted": lambda x: V * HALF + x,
    "a double": lambda x: V * tf.cast(x, tf.float64),
    "an array": lambda x: V * np.array([1.0, 2.0], np.float32) + x,
    "NumPy's number": lambda x: V * np.float64(2.0) + x,
    "a write of a number": lambda x: W.assign(1.0) + x,
    "a truth": lambda x: V * True + x,
    "another shape": lambda x: V + tf.ones([3]) + x,
    "in words": lambda x: V * "2",
    "nothing": lambda x: V - None,
    "a number to a power": lambda x: 2.0**V + x,
    "a write of numbers": lambda x: W.assign([[1.0, 2.0], [3.0, 4.0]]) + x,
    "a write of an array": lambda x: W.assign(np.ones((2, 2))) + x,
    "a write of another dtype": lambda x: W.assign(tf.cast(x, tf.float64)),
    "a write of another shape": lambda x: W.assign(tf.ones([3])),
    "a write of a variable": lambda x: W.assign(V) + x,
    "TensorFlow's write of another shape": lambda x: PLAIN.assign(x[0]),
    "TensorFlow's write of another dtype": lambda x: PLAIN.assign_add(tf.cast(x, tf.float64)),
    "TensorFlow's write that is not read": lambda x: (PLAIN.assign(x, read_value=False), x)[1],
}


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small, and each test finds the same values."""
    W.assign([[0.25, -3.0], [2.0, 1.0]])
    PLAIN.assign([[1.0, 2.0], [3.0, 4.0]])
    with testing.compile_everything():
        yield


def repeated(function, *written):
    """The function between operations, so that it is no first one; what it may write begins anew in each run."""

    def make(decorate):
        for variable in written:
            variable.assign([[0.25, -3.0], [2.0, 1.0]])

        @decorate
        def step(x):
            before = tf.identity(x)
            found = tf.identity(function(before))
            return found, tf.identity(before), [variable * 1.0 for variable in written]

        return step

    return make


PREPARING = {"add", "assign", "divide", "matmul", "multiply", "power", "subtract", "true_divide",
             "bias_add", "assign_add", "assign_sub"}  # fmt: skip


def python_of(run):
    """Functions of Keras' and TensorFlow's that prepare operations, and begin while `run` does."""
    seen = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name in PREPARING and "/tensorflow/" in code.co_filename:
            seen.append(code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("name", ANSWERED)
def test_answered(name):
    """Values, dtypes and state are eager's, and once it is followed the libraries' Python is not run for it."""
    step = run_both(repeated(ANSWERED[name], W), [(X,), (X,), (X * 2.0,), (X,)])
    assert (step.stats().recorded, step.stats().followed, step.stats().diverged) == (1, 3, 0)
    assert not python_of(lambda: step(X))
    assert python_of(lambda: coexec.imperative()(step)(X))


@pytest.mark.parametrize("name", LEFT)
def test_left_to_the_libraries(name):
    """Results, state and errors are eager's, words included."""
    run_both(repeated(LEFT[name], W, PLAIN), [(X,), (X,), (X * 2.0,), (X,), (X,)])


def test_writes_of_tensorflow():
    """A write returns what stands for the new value, and leaves out the conversion."""

    def make(decorate):
        v = tf.Variable(X)

        @decorate
        def step(x):
            first = v.assign(x * 2.0) + 1.0
            second = v.assign_add(x)
            third = v.assign_sub(x * 0.5).value()
            return first, second.read_value(), third, second.shape, v + 0.0

        return step

    step = run_both(make, [(X,), (X * 0.5,), (X + 1.0,), (X,), (-X,)])
    assert (step.stats().followed, step.stats().diverged) == (4, 0)
    assert not python_of(lambda: step(X))


def test_numbers_and_arrays_are_written():
    """Counters, schedules and rows come as Python's numbers and NumPy's arrays, the same or others in each call."""

    def make(decorate):
        count, rate = tf.Variable(0, dtype=tf.int64), tf.Variable(0.5)
        kept, seen = keras.Variable([0.0, 0.0]), keras.Variable(0.0)

        @decorate
        def step(x, number):
            count.assign_add(1)
            rate.assign(0.25)
            rate.assign_sub(np.float32(number))
            kept.assign(np.array([number, 1.0], np.float32))
            given = seen.assign(number)
            more = count.assign(count.value() + 1).value()
            return x * rate, count + 0, kept + 0.0, isinstance(given, tf.Tensor), given + 0.0, more

        return step

    step = run_both(make, [(X, 0.5), (X, 0.5), (X, 0.25), (X, 0.125), (X, 0.75), (X, 0.75)])
    assert (step.stats().recorded, step.stats().diverged) == (1, 0)
    assert not python_of(lambda: step(X, 0.5))


def test_what_a_write_returns():
    """It has the attributes of what TensorFlow returns, in the same order, and keeps no other variable alive."""
    v = tf.Variable([1.0, 2.0], name="named")

    @coexec.function
    def step(x):
        return v.assign(x), v.assign_add(x)

    for _ in range(4):
        found = step(tf.constant([3.0, 4.0]))
    expected = v.assign([6.0, 8.0])
    for one in found:
        assert type(one) is type(expected)
        assert list(vars(one)) == list(vars(expected))
        assert all(value is vars(expected)[name] or value == vars(expected)[name] for name, value in vars(one).items())
        assert one.numpy().tolist() == [6.0, 8.0]
        assert (one.shape, one.dtype, one.name, one.trainable) == (v.shape, v.dtype, "UnreadVariable", True)
    assert step.stats().followed == 3


@pytest.mark.parametrize("watching", [True, False])
def test_gradients(watching):
    """Tapes hear of what is read and of what is written, as they do eagerly."""

    def make(decorate):
        kernel, fixed = keras.Variable(X), keras.Variable(X, trainable=False)
        written = keras.Variable(X)

        @decorate
        def step(x):
            with tf.GradientTape(watch_accessed_variables=watching) as tape:
                tape.watch(fixed.value)
                loss = tf.reduce_sum((x - kernel) * (2.0 * kernel) / 3.0 + fixed * x)
                written.assign(x)
            names = len(tape.watched_variables())
            gradient = tape.gradient(loss, [kernel.value, fixed.value])
            if watching:
                kernel.assign(0.9 * kernel + 0.1 * gradient[0])
            return loss, gradient, names, kernel + 0.0, written + 0.0

        return step

    step = run_both(make, [(X,), (X * 0.5,), (X + 1.0,), (X,), (-X,)])
    assert (step.stats().followed, step.stats().diverged) == (4, 0)


def test_other_ways():
    """Where the program goes on otherwise behind a read, what was read is used, and nothing is read twice."""

    def make(decorate):
        v, w = keras.Variable(X), keras.Variable(X * 2.0)

        @decorate
        def step(x, way):
            y = x * 1.0
            if way == 0:
                return v * y
            if way == 1:
                return v - y
            if way == 2:
                return v * w
            if way == 3:
                return y / v
            if way == 4:
                return v + tf.constant([1.0, 2.0])
            return v.value.read_value()

        return step

    step = run_both(make, [(X, way) for _ in range(4) for way in (0, 1, 2, 3, 4, 5, 2, 0)])
    assert step.stats().followed > 15


def test_numbers_that_change():
    """Numbers of Python's count by value and kind."""

    def make(decorate):
        v = keras.Variable(X)

        @decorate
        def step(x, number):
            return v * number + x, number - v, v.assign(x * number)

        return step

    run_both(make, [(X, number) for number in [2.0, 2.0, 2, -0.0, 0.0, 1e30, float("nan"), 0.1] * 2])


def test_scopes_of_keras():
    """Under a scope that casts, or that holds values of its own, Keras decides what a variable is."""

    def make(decorate):
        v = keras.Variable(X)

        @decorate
        def step(x, half):
            if half:
                with keras.src.backend.AutocastScope("float16"):
                    return v * 2.0, v + tf.cast(x, tf.float16)
            with keras.StatelessScope() as scope:
                v.assign(x * 3.0)
                inside = v * 2.0
            return inside, v * 2.0, scope.get_current_value(v)

        return step

    run_both(make, [(X, half) for half in (True, True, False, False, True, False, True)])


def test_what_counts_as_plain():
    """Variables of Keras' own class and of TensorFlow's; none of a class that derives from it, no tensor."""

    class Own(keras.Variable):
        pass

    assert plain_variable(V) is V.value
    assert plain_variable(PLAIN) is PLAIN
    assert plain_variable(X) is None
    assert plain_variable(Own(X)) is None


def test_an_optimizer_of_ones_own():
    """Momentum and a moving average on a Keras model learn as they do eagerly, in one launch a step."""

    def make(decorate):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
        model.build((None, 2))
        moments = [keras.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]
        shadow = [keras.Variable(v, trainable=False) for v in model.trainable_variables]

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - x))
            trained = model.trainable_variables
            for v, m, s, g in zip(trained, moments, shadow, tape.gradient(loss, trained), strict=True):
                m.assign(m * 0.9 + g)
                v.assign_sub(0.1 * m)
                s.assign(0.99 * s + (1 - 0.99) * v)
            return loss, [s + 0.0 for s in shadow]

        return step

    step = run_both(make, [(X * n,) for n in (1.0, 0.5, -1.0, 2.0, 0.1, 1.0, 0.3, 0.7)])
    before = step.stats().launches
    assert not python_of(lambda: step(X))
    assert step.stats().launches == before + 1
