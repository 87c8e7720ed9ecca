"""Python values as arguments: they become tensors of eager's dtypes, by themselves and beside one another."""

import operator

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing

X = [[1.0, 2.0], [3.0, 4.0]]
KINDS = {
    "int": 1,
    "float": 1.5,
    "bool": True,
    "ints": [1, 2],
    "floats": (1.0, 2.5),
    "bools": [True, False],
    "mixed": [1, 2.5],
    "none": [],
    "range": range(2),
    "int8": np.int8(1),
    "float64": np.float64(1.5),
    "array of bools": np.array([True, False]),
    "array of uint16": np.array([1, 0], np.uint16),
    "array of float64": np.array([1.0, 0.0]),
    "NumPy's bools": [np.bool_(True), np.bool_(False)],
    "tensor": tf.constant([1.0, 2.0]),
    "int64": tf.constant([1, 0], tf.int64),
    "tensors": [tf.constant(1.0), tf.constant(2.0)],
    "variable": tf.Variable([1.0, 2.0]),
}
OPERATIONS = {  # looked up as they are called, as programs do, so that they are answered where that is possible
    "add": lambda a, b: tf.add(a, b),
    "multiply": lambda a, b: tf.multiply(a, b),
    "pow": lambda a, b: tf.pow(a, b),
    "maximum": lambda a, b: tf.maximum(a, b),
    "floordiv": lambda a, b: tf.math.floordiv(a, b),
    "equal": lambda a, b: tf.equal(a, b),
    "less": lambda a, b: tf.less(a, b),
    "logical_and": lambda a, b: tf.logical_and(a, b),
    "bitwise_and": lambda a, b: tf.bitwise.bitwise_and(a, b),
    "where": lambda a, b: tf.where([True, False], a, b),
    "stack": lambda a, b: tf.stack([a, b]),
    "one_hot": lambda a, b: tf.one_hot(a, 3, b),
    "fill": lambda a, b: tf.fill(a, b),
    "tile": lambda a, b: tf.tile(a, b),
    "reshape": lambda a, b: tf.reshape(a, b),
    "broadcast_to": lambda a, b: tf.broadcast_to(a, b),
    "reduce_sum": lambda a, b: tf.reduce_sum(a, axis=b),
    "gather": lambda a, b: tf.gather(a, b),
    "clip_by_value": lambda a, b: tf.clip_by_value(X, a, b),
    "roll": lambda a, b: tf.roll(X, a, b),
}  # fmt: skip


def outcome(operation, a, b):
    try:
        result = operation(a, b)
    except Exception:
        return "raises"  # its class may depend on which numbers TensorFlow has cached as tensors
    return result.dtype, result.shape, result


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_pair_of_kinds(name):
    operation = OPERATIONS[name]

    def step():
        return {(a, b): outcome(operation, one, other) for a, one in KINDS.items() for b, other in KINDS.items()}

    expected, followed = step(), coexec.function(step)
    for call in range(3):
        for pair, result in followed().items():
            wanted = expected[pair]
            assert (result == "raises") == (wanted == "raises"), (call, pair)
            if wanted != "raises":
                assert result[:2] == wanted[:2], (call, pair)
                np.testing.assert_array_equal(result[2], wanted[2], err_msg=f"{call} {pair}")


ALONE = {
    "multiply": lambda: tf.multiply(1.5, [1, 2]),
    "maximum": lambda: tf.maximum(0.5, (1, 2)),
    "pow": lambda: tf.pow(2.0, range(3)),
    "where": lambda: tf.where([True, False], 0.5, [1, 2]),
    "equal": lambda: tf.equal(1.0, [1, 2]),
    "tensors": lambda: tf.multiply(1, [tf.constant(1.0), tf.constant(2.0)]),
    "empty": lambda: tf.multiply(1, []),
    "bools": lambda: tf.equal(True, [tf.constant(1.0), tf.constant(2.0)]),
}


@pytest.mark.parametrize("name", ALONE)
def test_the_first_value_decides_where_calls_are_followed(name):
    wanted, step = ALONE[name](), coexec.function(ALONE[name])
    with testing.always_follow():
        for _ in range(6):
            result = step()
            assert result.dtype == wanted.dtype
            np.testing.assert_array_equal(result, wanted)
    assert step.stats().followed == 5


@pytest.mark.parametrize("dtype", [bool, "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_labels_of_any_dtype(dtype):
    labels = np.array([1, 0]).astype(dtype)
    step = coexec.function(lambda: tf.one_hot(labels, 3))
    with testing.always_follow():
        for _ in range(6):
            np.testing.assert_array_equal(step(), tf.one_hot(labels, 3))
    assert step.stats().followed == 5


BESIDE = {
    **OPERATIONS,
    "not_equal": lambda a, b: tf.not_equal(a, b),
    "divide": lambda a, b: tf.divide(a, b),
    "subtract": lambda a, b: tf.subtract(a, b),
    "concat": lambda a, b: tf.concat([a, b], 0),
    "add_n": lambda a, b: tf.add_n([a, b]),
    "operator +": operator.add,
    "operator ==": operator.eq,
    "operator //": operator.floordiv,
}  # fmt: skip
VARIABLES = {
    "float32": (tf.Variable([1.0, 2.0]), tf.constant([1.0, 2.0])),
    "int32": (tf.Variable([1, 2]), tf.constant([1, 2])),
    "of Keras": (keras.Variable([1.0, 2.0]), tf.constant([1.0, 2.0])),
}


def is_same(result, wanted):
    if "raises" in (result, wanted):
        return result == wanted
    np.testing.assert_array_equal(result[2], wanted[2])
    return result[:2] == wanted[:2]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", VARIABLES)
@pytest.mark.parametrize("name", BESIDE)
def test_every_kind_beside_a_variable_that_is_read_there(name, dtype, first):
    """Earlier calls have a tensor beside the variable, so that its read is what is expected."""
    variable, alike = VARIABLES[dtype]

    def step(other):
        return outcome(BESIDE[name], *((variable, other) if first else (other, variable)))

    expected, usual = {kind: step(other) for kind, other in KINDS.items()}, step(alike)
    for kind, other in KINDS.items():
        followed = coexec.function(step)
        with testing.always_follow():
            cases = 3 * [(alike, usual)] + 2 * [(other, expected[kind])] + [(alike, usual)]
            for call, (given, wanted) in enumerate(cases):
                assert is_same(followed(given), wanted), (kind, call)
        assert usual == "raises" or followed.stats().followed >= 2, kind


def test_an_error_of_the_conversion_is_no_fault():
    """TensorFlow has no kernel that makes a range of int8."""

    def step():
        total = tf.reduce_sum(X)
        return outcome(lambda a, b: tf.less(a, b), np.int8(1), range(2)), total

    wanted, followed = step(), coexec.function(step)
    with testing.always_follow():
        for _ in range(4):
            result, total = followed()
            assert (result, float(total)) == (wanted[0], 10.0)
    assert followed.stats().followed == 3
