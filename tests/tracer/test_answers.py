"""Functions that are answered before TensorFlow prepares them: they do what they do eagerly, and its Python rests."""

import functools
import inspect
import pickle
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gen_math_ops

import coexec
from coexec import testing
from tests.coexec import outcomes, run_both, unchanged
from tests.snapshots import assert_same
from tracer import answers
from tracer.lazy import LazyTensor

X = tf.constant([[1.0, -2.0, 3.0], [0.0, 5.0, -6.0]])
WHOLES = tf.constant([[1, -2, 3], [0, 5, -6]])
V = tf.Variable(2.0)
TRUTHS = tf.constant([[True, False, True], [True, True, True]])

REDUCED = [(n, t) for n in ("sum", "mean", "max", "min", "prod") for t in (X, WHOLES)]
REDUCED += [(n, TRUTHS) for n in ("all", "any")]


def reduced(name, x):
    return getattr(tf, f"reduce_{name}")(x)


# Each is answered.
ANSWERED = {
    "cast": (lambda x: tf.cast(x, tf.int32), X),
    "cast by name": (lambda x: tf.cast(x=x, dtype=tf.float64, name="named"), X),
    "cast of wholes": (lambda x: tf.dtypes.cast(x, tf.int64), WHOLES),
    "cast to itself": (lambda x: tf.cast(x, tf.float32), X),
    "cast of truths": (lambda x: tf.cast(x, dtype=tf.float32), TRUTHS),
    "cast of a number": (lambda x: x + tf.cast(3, x.dtype), X),
    "cast of a negative zero": (lambda x: tf.math.divide_no_nan(x, tf.cast(-0.0, tf.float32)), X),
    "cast of a float": (lambda x: x * tf.cast(2.75, tf.int32), WHOLES),
    "equal": (lambda x: tf.equal(x, tf.abs(x)), X),
    "equal to a number": (lambda x: tf.math.equal(x, 3), WHOLES),
    "a number that is equal": (lambda x: tf.equal(3.0, x, name="named"), X),
    "not equal": (lambda x: tf.not_equal(x, y=x * 1.0), X),
    "abs": (lambda x: tf.math.abs(x), X),
    "numerics": (lambda x: tf.debugging.check_numerics(x, "some words"), X),
    **{f"{name} of {x.dtype.name}": (functools.partial(reduced, name), x) for name, x in REDUCED},
    "an axis": (lambda x: tf.reduce_sum(x, 1), X),
    "an axis from behind": (lambda x: tf.math.reduce_max(input_tensor=x, axis=-2), X),
    "keeping the axes": (lambda x: tf.reduce_mean(x, keepdims=True), X),
    "an axis, kept": (lambda x: tf.reduce_min(x, 0, True, "named"), X),
}  # fmt: skip

# These are left to TensorFlow, with whatever comes of it.
LEFT = {
    "a dtype in words": (lambda x: tf.cast(x, "int32"), X),
    "NumPy's dtype": (lambda x: tf.cast(x, np.int32), X),
    "no dtype": (lambda x: tf.cast(x, None), X),
    "a truth of Python's": (lambda x: x * tf.cast(True, x.dtype), X),
    "a large number": (lambda x: x * tf.cast(1 << 40, x.dtype), X),
    "no number": (lambda x: x * tf.cast(float("nan"), x.dtype), X),
    "a complex number": (lambda x: tf.abs(tf.cast(x, tf.complex64)), X),
    "to a real one": (lambda x: tf.cast(tf.complex(x, x), tf.complex64), X),
    "two axes": (lambda x: tf.reduce_sum(x, [0, 1]), X),
    "an axis that is none": (lambda x: tf.reduce_sum(x, 7), X),
    "an axis of another kind": (lambda x: tf.reduce_sum(x, tf.constant(1)), X),
    "axes kept, in words": (lambda x: tf.reduce_sum(x, keepdims=1), X),
    "a scalar": (lambda x: tf.reduce_sum(x[0, 0]), X),
    "a list": (lambda x: tf.reduce_sum([x, x * 2.0]), X),
    "an array": (lambda x: x + tf.cast(np.arange(3), tf.float32), X),
    "a variable": (lambda x: tf.cast(V, tf.int32) + tf.cast(x, tf.int32), X),
    "sparse": (lambda x: tf.sparse.to_dense(tf.cast(tf.sparse.from_dense(x), tf.int32)), X),
    "slices": (lambda x: tf.convert_to_tensor(tf.cast(tf.IndexedSlices(x, [1, 0], [2, 3]), tf.int32)), X),
    "ragged": (lambda x: tf.reduce_sum(tf.RaggedTensor.from_tensor(x), axis=1), X),
    "other dtypes": (lambda x: tf.equal(x, tf.cast(x, tf.int32)), X),
    "other shapes": (lambda x: tf.equal(x, x[:, :2]), X),
    "a number of another kind": (lambda x: tf.equal(x, 2.5), WHOLES),
    "wholes": (lambda x: tf.debugging.check_numerics(x, "words"), WHOLES),
    "no message": (lambda x: tf.debugging.check_numerics(x), X),
    "too much": (lambda x: tf.cast(x, tf.int32, None, 1), X),
    "an unknown name": (lambda x: tf.reduce_sum(x, axes=1), X),
    "a name twice": (lambda x: tf.cast(x, tf.int32, x=x), X),
    "nothing": (lambda x: tf.cast(), X),
}


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def calls_of(codes, run):
    """How often functions of these codes begin while `run` does."""
    seen = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code in codes:
            seen.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return seen


CODES = {inspect.unwrap(function).__code__ for _, function, _ in answers.answered()}


def repeated(function):
    """The function between operations, so that it is no first one."""

    def make(decorate):
        @decorate
        def step(x):
            before = tf.identity(x)
            result = function(before)
            return result, tf.identity(before)

        return step

    return make


@pytest.mark.parametrize("name", ANSWERED)
def test_answered(name):
    """Values, dtypes and shapes are eager's, and once it is followed TensorFlow's Python is not run for it."""
    function, x = ANSWERED[name]
    step = run_both(repeated(function), [(x,), (x,), (x + x if x.dtype != tf.bool else ~x,), (x,)])
    assert (step.stats().recorded, step.stats().followed, step.stats().diverged) == (1, 3, 0)
    assert not calls_of(CODES, lambda: step(x))
    assert calls_of(CODES, lambda: coexec.imperative()(step)(x))


COMPARED = {
    "less": (lambda x: x < 2.5, X),
    "less than a whole number": (lambda x: x < 3, X),
    "less or equal": (lambda x: x <= 3, WHOLES),
    "greater": (lambda x: x > -0.0, X),
    "a number that is greater": (lambda x: x < 2.0, X),
    "greater or equal": (lambda x: x >= 1 << 30, WHOLES),
    "than a tensor": (lambda x: x >= x * 2, X),
}  # fmt: skip
COMPARING = {inspect.unwrap(getattr(tf.Tensor, f"__{name}__")).__code__ for name in ("lt", "le", "gt", "ge")}


@pytest.mark.parametrize("name", COMPARED)
def test_comparisons(name):
    """Operators that compare tensors with numbers are answered, too."""
    function, x = COMPARED[name]
    step = run_both(repeated(function), [(x,), (x,), (x + x,), (x,)])
    assert (step.stats().recorded, step.stats().followed, step.stats().diverged) == (1, 3, 0)
    assert not calls_of(COMPARING, lambda: step(x))
    assert calls_of(COMPARING, lambda: coexec.imperative()(step)(x))


@pytest.mark.parametrize("x", [X, WHOLES])
def test_comparisons_with_numbers_that_change(x):
    """Results and errors are eager's, whatever stands where a number stood before."""

    def make(decorate):
        @decorate
        def step(x, number):
            y = x * 2
            return y < number, number <= y, y > number, number >= y

        return step

    numbers = [1.0, 1.0, 2.0, 2, 0.0, -0.0, 0, 1 << 40, 1e300, float("inf"), float("nan"), True, -3, 3.0]
    run_both(make, [(x, number) for number in [*numbers, np.float32(3), "1", None] * 2])


OPERATED = {
    "times": lambda x: x * 2,
    "times a float": lambda x: x * 2.5,
    "less": lambda x: x - 1,
    "less a float": lambda x: x - 0.5,
    "plus": lambda x: x + 3,
    "parts": lambda x: x / 4.0,
    "numbers before": lambda x: 2 * x + (3 - x),
    "comparisons": lambda x: [x < 2, x <= 1, x > 0.5, x >= -2],
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATED)
def test_operators_beside_numbers_are_answered(name):
    """TensorFlow takes some numbers as they are, and makes tensors of others; known, neither runs its Python."""
    ops = "add_v2", "sub", "mul", "real_div", "less", "less_equal", "greater", "greater_equal"
    codes = {inspect.unwrap(getattr(gen_math_ops, op)).__code__ for op in ops}
    step = run_both(repeated(OPERATED[name]), [(X,), (X,), (X * 2.0,), (X,)])
    assert (step.stats().recorded, step.stats().followed, step.stats().diverged) == (1, 3, 0)
    assert not calls_of(codes, lambda: step(X))
    assert calls_of(codes, lambda: coexec.imperative()(step)(X))


@pytest.mark.parametrize("name", LEFT)
def test_left_to_tensorflow(name):
    """Results and errors are eager's, words included."""
    function, x = LEFT[name]
    run_both(repeated(function), [(x,), (x,), (x * 2,), (x,), (x,)])


def test_what_comes_out_is_what_went_in():
    """A cast to the dtype that a tensor has gives that very tensor."""

    @coexec.function
    def step(x):
        y = x * 2.0
        return tf.cast(y, tf.float32) is y, type(y) is LazyTensor, tf.cast(x, tf.float32) is x

    assert [step(X) for _ in range(3)][1:] == [(True, True, True)] * 2


def test_gradients():
    """Tapes hear of what is answered."""

    def make(decorate):
        w = tf.Variable(X)

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.cast(w, tf.float64) * tf.cast(x, tf.float64)
                z = tf.reduce_sum(tf.abs(y), axis=0) * tf.cast(tf.not_equal(x, 0.0), tf.float64)
                loss = tf.reduce_mean(tf.debugging.check_numerics(z, "z")) + tf.reduce_max(y)
            return loss, tape.gradient(loss, [w, x])

        return step

    step = run_both(make, [(X,), (X * 0.5,), (X + 1.0,), (X,), (-X,)])
    assert step.stats().followed == 4
    assert not step.stats().diverged


def test_numbers_that_change():
    """Python's numbers are what they are in each call, negative zeros and whole floats among them."""

    def make(decorate):
        @decorate
        def step(x, number):
            y = x * 2.0
            return (
                tf.math.divide_no_nan(y, tf.cast(number, tf.float32)),
                tf.equal(y, number),
                1.0 / (y * 0.0 + tf.cast(number, tf.float32)),
            )

        return step

    numbers = [1.0, 1.0, 2.0, 2, 0.0, -0.0, 0, 1e300, float("inf"), float("nan"), True, -3, 3.0, np.float32(3)]
    run_both(make, [(X, number) for number in numbers * 2])


@pytest.mark.parametrize("caught", [True, False])
def test_failures(caught):
    """`check_numerics` fails at its line, with eager's words, whoever hears of it."""

    def make(decorate):
        v, log = tf.Variable(0.0), []

        @decorate
        def step(x):
            y = tf.math.log(x * 1.0)
            v.assign_add(1.0)
            if caught:
                try:
                    y = tf.debugging.check_numerics(y, "its logarithm")
                except tf.errors.InvalidArgumentError as error:
                    log.append("its logarithm : Tensor had NaN" in error.message)
            else:
                y = tf.debugging.check_numerics(y, "its logarithm")
            v.assign_add(10.0)
            return y, list(log), v + 0.0

        return step

    good, bad = tf.constant([1.0, 2.0]), tf.constant([1.0, -2.0])
    (eager, step) = make(unchanged), make(coexec.function)
    for number, x in enumerate([good, good, good, bad, good, bad, good]):
        (one,), (other,) = outcomes(eager, [(x,)]), outcomes(step, [(x,)])
        if caught or x is good:  # the kernel's own error names a node
            assert_same(one, other, path=f"call {number}: ")


def test_other_threads_and_graphs():
    """Inside of a graph function, and on a thread that nobody follows, they are what they ever were."""

    def make(decorate):
        @tf.function
        def graph(x):
            return tf.reduce_sum(tf.cast(x, tf.int32)) + tf.cast(1.0, tf.int32), tf.equal(x, 1.0)

        @decorate
        def step(x):
            y = x * 2.0
            found = []
            thread = threading.Thread(target=lambda: found.append(tf.reduce_sum(tf.cast(X, tf.int32), 1)))
            thread.start()
            thread.join()
            return graph(y), found[0], tf.reduce_sum(y)

        return step

    run_both(make, [(X,), (X,), (X + 1.0,), (X,)])


def test_they_are_pickled_by_name():
    """And look like what they stand for."""
    for function in (tf.cast, tf.reduce_sum, tf.math.reduce_sum, tf.debugging.check_numerics):
        assert pickle.loads(pickle.dumps(function)) is function
    assert tf.reduce_sum is tf.math.reduce_sum
    assert list(inspect.signature(tf.reduce_sum).parameters) == ["input_tensor", "axis", "keepdims", "name"]
    assert tf.cast.__name__ == "cast"
