"""What NumPy and Python make of tensors of a followed call: the class, dtype and shape of each are eager's."""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CONVERSIONS = [
    lambda t: t.__array__(),
    lambda t: t.__array__(np.float64),
    lambda t: t.__array__(dtype=None),
    lambda t: t.__array__(copy=True),  # TensorFlow's takes no such argument
    np.asarray,
    np.array,
    lambda t: np.array(t, np.float32),
    lambda t: np.asarray(t, dtype=object),
    lambda t: np.array(t, copy=True),
    lambda t: np.array([t, t]),
    lambda t: np.full(2, t),
    lambda t: np.add(t, t),
    np.float64,
    np.isnan,
]
DTYPES = [
    tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.uint8, tf.int32, tf.int64, tf.uint64, tf.bool,
    tf.complex64, tf.string,
]  # fmt: skip


def told(conversion, tensor):
    try:
        found = conversion(tensor)
    except Exception as error:
        return type(error).__name__, str(error)
    return type(found).__name__, str(getattr(found, "dtype", None)), getattr(found, "shape", None), str(found)


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_conversions_are_eagers(dtype, shape):
    def step(x):
        return [told(conversion, tf.reshape(tf.identity(x), shape)) for conversion in CONVERSIONS]

    items = ["a", "b"] if dtype is tf.string else [1, 0]
    x = tf.constant(items[: 2 if shape else 1]) if dtype is tf.string else tf.cast(items[: 2 if shape else 1], dtype)
    expected, followed = step(x), coexec.function(step)
    with testing.always_follow():
        for call in range(4):
            assert followed(x) == expected, f"call {call}"
    assert followed.stats().followed == 3, followed.explain()
