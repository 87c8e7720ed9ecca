"""The message of an operation's error ends as eager's does: with `name: `, or not if it is issued by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec.testing import always_follow
from tests.coexec import run_both
from tracer.inputs import settle
from tracer.op import signature_of
from tracer.private import context as eager
from tracer.private import core, pywrap_tfe
from tracer.slow_path import is_issued_by_name

X = tf.ones([4, 3])
VARIABLE, KERAS_VARIABLE, DOUBLES = tf.Variable(X), keras.Variable(X), tf.Variable(tf.cast(X, tf.float64))
WRONG = (4, 9, 14)  # the calls that fail

PROGRAMS = {  # each is given two values that fit together, or do not
    "a shape": lambda n: tf.broadcast_to(X[0], (n(3, 2),)),
    "a shape, with a name": lambda n: tf.broadcast_to(X[0], (n(3, 2),), name="wide"),
    "a shape in a tensor": lambda n: tf.broadcast_to(X[0], tf.constant([n(3, 2)])),
    "a shape to reshape to": lambda n: tf.reshape(X, [n(3, 5), 4]),
    "a shape of a result": lambda n: keras.ops.scatter(tf.constant([[n(1, 9)]]), tf.constant([1.0]), (4,)),
    "a list": lambda n: tf.gather(X, [0, n(1, 9)]),
    "a tensor": lambda n: tf.gather(X, tf.constant([0, n(1, 9)])),
    "a tensor, with a name": lambda n: tf.gather(X, tf.constant([0, n(1, 9)]), axis=1, name="rows"),
    "an array": lambda n: tf.raw_ops.GatherV2(params=X, indices=np.array([0, n(1, 9)]), axis=0),
    "a number of NumPy's": lambda n: tf.raw_ops.GatherV2(params=X, indices=np.int64(n(1, 9)), axis=0),
    "a variable": lambda n: tf.gather(VARIABLE, tf.constant([0, n(1, 9)]), axis=1),
    "a variable of Keras'": lambda n: tf.gather(KERAS_VARIABLE, tf.constant([0, n(1, 9)])),
    "a variable of Keras', by Keras": lambda n: keras.ops.take(KERAS_VARIABLE, tf.constant([0, n(1, 9)]), axis=0),
    "a variable of Keras' in a list": lambda n: tf.concat([KERAS_VARIABLE, tf.ones([1, n(3, 2)])], 0),
    "an operator": lambda n: X + tf.ones([n(3, 2)]),
    "a division": lambda n: tf.constant([4]) // n(1, 0),
    "strings": lambda n: tf.strings.to_number([n("1", "one")]),
    "bounds": lambda n: tf.slice(X, [0, 0], [n(2, 7), 1]),
    "axes": lambda n: tf.transpose(X, [1, n(0, 3)]),
    "paddings": lambda n: tf.pad(X, [[n(1, -1), 0], [0, 0]]),
    "segments": lambda n: tf.math.unsorted_segment_sum(X, [0, 0, 1, n(1, 5)], 2),
    "rows that are written": lambda n: VARIABLE.scatter_nd_update([[n(1, 9)]], [[1.0, 1.0, 1.0]]),
    "another dtype than the operation takes": lambda n: tf.raw_ops.All(input=n(X > 0, X), axis=[0, 1]),
    "a variable of another dtype": lambda n: tf.where(n(X > 0, VARIABLE), [1.0, 2.0, 3.0], X),
    "variables of two dtypes": lambda n: tf.concat([KERAS_VARIABLE, n(VARIABLE, DOUBLES)], 0),
    "a tensor of another dtype": lambda n: tf.tensordot(X, n(X, tf.cast(X, tf.float64)), [[0], [0]]),
    "a check": lambda n: tf.debugging.check_numerics(tf.constant([n(1.0, np.nan)]), "no number"),
}


@pytest.mark.parametrize("taped", [False, True], ids=["plain", "taped"])
@pytest.mark.parametrize("wrong", [WRONG, (0, *WRONG)], ids=["later", "at once"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_operations(name, wrong, taped):
    program = PROGRAMS[name]

    def make(decorate):
        @decorate
        def step(i):
            def fit(right, other):
                return other if i in wrong else right

            if taped:
                with tf.GradientTape(persistent=True):
                    return program(fit)
            return program(fit)

        return step

    with always_follow():
        step = run_both(make, [(i,) for i in range(18)])
    assert step.stats().followed >= 8, step.explain()


def test_a_metric():
    """Weights that do not fit are broadcast to a shape in a tuple."""

    def make(decorate):
        metric = keras.metrics.BinaryIoU(target_class_ids=[0, 1], threshold=0.5)

        @decorate
        def step(i):
            weights = tf.ones([2 if i in WRONG else 3])
            metric.update_state(tf.constant([0.0, 1.0, 1.0]), tf.constant([0.1, 0.2, 0.9]), weights)
            return metric.result()

        return step

    with always_follow():
        step = run_both(make, [(i,) for i in range(18)])
    assert step.stats().regions >= 8, step.explain()


@pytest.mark.parametrize("read", [False, True], ids=["at the end", "where it is read"])
def test_a_layer_whose_lookup_fails(read):
    def make(decorate):
        layer = keras.layers.Embedding(5, 4, embeddings_initializer="ones", name="words")
        layer(tf.constant([0]))

        @decorate
        def step(ids):
            rows = layer(ids)
            return float(tf.reduce_sum(rows)) if read else rows

        return step

    with always_follow():
        step = run_both(make, [(tf.constant([0, 9 if i in WRONG else 1]),) for i in range(18)])
    assert step.stats().regions >= 8, step.explain()


VALUES = [
    1, 1.0, True, 1j, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), "text", b"bytes", None, X, X.numpy(),
    [1.0, 2.0], (1.0, 2.0), X.shape, VARIABLE, KERAS_VARIABLE,
]  # fmt: skip
LISTS = [[X, X], (X, 1.0), [X, [1.0]], [X, X.numpy()], [X, VARIABLE], [X, KERAS_VARIABLE], X, (1.0, 2.0), "ab"]


@pytest.mark.parametrize(
    ("op", "value"), [*(("Identity", v) for v in VALUES), *(("Pack", v) for v in LISTS)], ids=lambda v: type(v).__name__
)
def test_what_is_relied_on(op, value):
    """Which arguments TensorFlow's C++ code leaves to its Python."""
    ctx = eager.context()
    ctx.ensure_initialized()
    args = (value,) if op == "Identity" else (value, "axis", 0)
    leaves = False
    try:
        pywrap_tfe.TFE_Py_FastPathExecute(ctx, op, None, *args)
    except core._FallbackException:
        leaves = True
    except core._NotOkStatusException:
        pass
    assert is_issued_by_name(signature_of(op), args) == leaves
    if leaves and type(value) is tuple:
        assert not is_issued_by_name(signature_of(op), settle(signature_of(op), args))
