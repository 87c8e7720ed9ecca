"""What operations are given besides tensors is converted, or refused, as eagerly: also at a place that knows another.

Each step applies functions of a batch, a variable and Keras' variable at one line; an error is a result.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec import testing
from tests.coexec import run_both

SHAPE, ONE, ONE_64 = tf.TensorShape([2]), tf.constant(1), tf.constant(1, tf.int64)

# Functions of a batch of floats, one of integers, a variable of floats, one of integers, and one of Keras'.
STEPS = {
    "attributes that are tensors": [
        lambda x, n, v, m, k: tf.one_hot(n, 3, axis=np.uint8(0)),
        lambda x, n, v, m, k: tf.one_hot(m, 3, axis=np.uint8(0)),
        lambda x, n, v, m, k: tf.one_hot(n, 3, axis=False),
        lambda x, n, v, m, k: tf.one_hot(n, 3, axis=0.0),
        lambda x, n, v, m, k: tf.one_hot(m, 3, axis=np.float32(0.0)),
        lambda x, n, v, m, k: tf.one_hot(n, 3, axis=ONE),
        lambda x, n, v, m, k: tf.one_hot(m, 3, axis=ONE),
        lambda x, n, v, m, k: tf.one_hot(n, 3, axis=ONE_64),
        lambda x, n, v, m, k: tf.one_hot(n, 3, axis=m[0] * 0),
        lambda x, n, v, m, k: tf.one_hot(n, 3, axis=tf.Variable(1)),
    ],
    "a variable beside numbers": [lambda x, n, v, m, k, by=by: tf.minimum(by, v)
                                  for by in (2.0, np.int64(2), 2, np.float32(2), True, [2.0, 1.0], (2, 1))],
    "the other way": [lambda x, n, v, m, k, by=by: tf.subtract(v, by)
                      for by in (2.0, np.int64(2), 2, np.float64(2), (2, 1), [2.0, 1.0], SHAPE)],
    "lists before a variable": [lambda x, n, v, m, k, by=by: tf.subtract(by, v)
                                for by in ((2, 1), [2.0, 1.0], np.array([1, 2]), [np.float64(1), 2.0])],
    "a condition that is a list": [lambda x, n, v, m, k, by=by: tf.where([True, False], by, v)
                                   for by in (2, 2.0, np.float64(2), True, np.array([1, 2]), np.float32([1, 2]))],
    "a variable of Keras": [
        lambda x, n, v, m, k: n - k, lambda x, n, v, m, k: n * k, lambda x, n, v, m, k: n**k,
        lambda x, n, v, m, k: n // k, lambda x, n, v, m, k: m - k, lambda x, n, v, m, k: n + k,
        lambda x, n, v, m, k: x - k, lambda x, n, v, m, k: k - n, lambda x, n, v, m, k: n / k,
        lambda x, n, v, m, k: tf.tile(k, [2]), lambda x, n, v, m, k: tf.concat([x, k], 0),
        lambda x, n, v, m, k: tf.concat([n, k], 0), lambda x, n, v, m, k: tf.stack([k, x]),
    ],
    "a comparison": [lambda x, n, v, m, k, by=by: x == by for by in (SHAPE, 2.0, None, "text", [1.0, 2.0], (1, 2))]
    + [lambda x, n, v, m, k: x == v, lambda x, n, v, m, k: v == x, lambda x, n, v, m, k: x != k],
    "complex numbers": [
        lambda x, n, v, m, k: tf.signal.fft(tf.complex(x, x)),
        lambda x, n, v, m, k: tf.signal.fft([1.0 + 2.0j, 3.0j]),
        lambda x, n, v, m, k: tf.signal.ifft(np.complex64([1.0 + 2.0j, 3.0j])),
        lambda x, n, v, m, k: tf.math.real([1.0 + 2.0j, 3.0j]),
        lambda x, n, v, m, k: tf.math.angle(1.0 + 2.0j),
    ],
}  # fmt: skip


def applied(function, *given):
    try:
        return function(*given)
    except (ValueError, TypeError, AttributeError, tf.errors.OpError) as error:
        return type(error).__name__, str(error)[:60]


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=str)
@pytest.mark.parametrize("forced", [False, True], ids=["as it pays", "always"])
@pytest.mark.parametrize("name", STEPS)
def test_as_eagerly(name, forced, options):
    def make(decorate):
        v, m, k = tf.Variable([1.0, 3.0]), tf.Variable([2, 0]), keras.Variable([1.0, 3.0])

        @decorate
        def step(x, n):
            v.assign(x)
            m.assign(n)
            return [applied(function, x * 2.0, n + 0, v, m, k) for function in STEPS[name]]

        return step

    calls = [(tf.constant([1.0 + n, 2.0]), tf.constant([n % 3, 1])) for n in range(8)]
    if forced:
        with testing.always_follow(), testing.compile_everything():
            step = run_both(make, calls, **options)
        assert step.stats().followed >= 4, step.explain()
    else:
        run_both(make, calls, **options)
