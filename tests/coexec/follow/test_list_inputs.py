"""Lists given where an operation takes one tensor: of the dtype that TensorFlow's C++ side makes of them."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

from coexec import testing
from tests.coexec import run_both

T = tf.constant

OPERATIONS = {
    "FFT": lambda v: tf.signal.fft(v),
    "Conj": lambda v: tf.raw_ops.Conj(input=v),
    "Real": lambda v: tf.raw_ops.Real(input=v),
    "ComplexAbs": lambda v: tf.raw_ops.ComplexAbs(x=v),
    "Sum": lambda v: tf.raw_ops.Sum(input=[[1.0, 2.0]], axis=v),
    "OneHot": lambda v: tf.raw_ops.OneHot(indices=v, depth=3, on_value=1.0, off_value=0.0),
    "Fill": lambda v: tf.raw_ops.Fill(dims=v, value=1.0),
    "Abs": lambda v: tf.raw_ops.Abs(x=v),
    "AddV2": lambda v: tf.raw_ops.AddV2(x=v, y=T([1.0, 2.0])),
    "MatrixDiagV3": lambda v: tf.raw_ops.MatrixDiagV3(diagonal=v, k=0, num_rows=-1, num_cols=-1, padding_value=0.0),
}

LISTS = {
    "floats": [1.0, 2.0], "integers": [1, 0], "bools": [True, False], "nothing": [], "nested": [[0.5], [1.5]],
    "float tensors": [T(1.0), T(2.0)], "integer tensors": [T(1), T(0)], "long tensors": [T(1, tf.int64), 1],
    "double tensors": [T(1.0, tf.float64), 2.0], "nested tensors": [[T(0.5)], [T(1.5)]], "tensors and 2": [T(1.0), 2],
    "NumPy's doubles": [np.float64(1.5)], "NumPy's floats": [np.float32(1.5)], "NumPy's longs": [np.int64(1)],
    "large": [2**40],
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_dtypes(name):
    """Whatever TensorFlow takes: an attribute's default dtype is a wish, which what is in the list may not fit."""
    operation, taken, launches = OPERATIONS[name], 0, 0
    for kind, value in LISTS.items():
        try:
            operation(value)
        except (tf.errors.OpError, TypeError, ValueError):
            continue
        taken += 1
        with testing.compile_everything():
            step = run_both(lambda decorate, v=value: decorate(lambda: operation(v)), [()] * 4, jit_compile=False)
        assert step.stats().followed == 3, kind
        launches += step.stats().launches  # some results are constants
    assert taken >= 4
    assert launches > 0


@pytest.mark.parametrize("name", ["FFT", "Abs"])
def test_gradients(name):
    """They go through the list, and through the cast behind it."""

    def make(decorate):
        @decorate
        def step(a, b):
            with tf.GradientTape() as tape:
                tape.watch([a, b])
                result = OPERATIONS[name]([a, b])
            return tape.gradient(result, [a, b])

        return step

    step = run_both(make, [(T(1.0), T(2.0)), (T(-0.5), T(3.0))] * 3)
    assert step.stats().followed == 5


def test_a_list_before_an_operation_that_is_a_tensor_elsewhere():
    """Packing it comes before the operation, also where that runs on its own for other inputs, as with strings."""

    def make(decorate):
        return decorate(lambda value, shape: tf.ensure_shape(value, shape))

    calls = [([tf.ones(3), tf.ones(3)], [2, 3]), (T(["a", "b", "c"]), [3])] * 4
    with testing.compile_everything():
        step = run_both(make, calls, jit_compile=False)
    assert step.stats().followed >= 6


@pytest.mark.parametrize("operation", [tf.shape_n, tf.raw_ops.AddN, tf.raw_ops.ConcatV2], ids=lambda o: o.__name__)
def test_a_tensor_in_place_of_a_list(operation):
    """It is the list of its rows, which are operations before this one, also where ways come together."""
    extra = {"axis": 0} if operation is tf.raw_ops.ConcatV2 else {}
    (name,) = {"input", "inputs", "values"} & set(inspect.signature(operation).parameters)

    def make(decorate):
        @decorate
        def step(rows):
            if rows.dtype == tf.int32:
                rows = tf.cast(rows, tf.float32) * 2.0
            return operation(**{name: rows}, **extra), operation(**{name: rows + 1.0}, **extra)

        return step

    given = T(np.arange(12, dtype=np.float32).reshape([3, 4])), T([[1, 2], [3, 4]])
    with testing.compile_everything():
        step = run_both(make, [(given[turn],) for turn in (0, 1, 0, 1, 0, 1, 1, 0)], jit_compile=False)
    stats = step.stats()
    assert stats.followed + stats.diverged >= 6
    assert stats.launches > 0
