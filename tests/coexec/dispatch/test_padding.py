"""Arguments padded to few sizes: what comes out is what comes out without padding, and few programs are compiled."""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from tests.snapshots import assert_same, snapshot

WEIGHTS = tf.constant(np.random.default_rng(0).normal(size=(4, 3)), tf.float32)


def masked_mean(x, mask):
    scores = tf.nn.softmax(tf.matmul(x, WEIGHTS))
    for _ in range(4):
        scores = tf.tanh(scores * 2.0) + 0.1 * scores
    kept = scores * mask[:, None]
    return {"rows": scores, "mean": tf.reduce_sum(kept, 0) / tf.reduce_sum(mask), "all": [x, mask]}


def batch(n, kind=tf.constant):
    numbers = np.random.default_rng(n)
    return kind(numbers.normal(size=(n, 4)).astype("float32")), kind(np.ones(n, "float32"))


@pytest.mark.parametrize("kind", [tf.constant, np.asarray], ids=["tensors", "arrays"])
@pytest.mark.parametrize("below", [True, False])
def test_many_sizes(below, kind, backend):
    """Sixty sizes give what they give without padding; XLA compiles each bucket once, and two graphs serve all."""
    pad = coexec.dynamic(axis=0, buckets=[64, 16, 32])
    make = coexec.function(jit_compile=backend == "xla")
    step = make(pad(masked_mean)) if below else pad(make(masked_mean))
    for n in [*range(1, 61), *range(60, 0, -1)]:
        expected, found = masked_mean(*batch(n, kind)), step(*batch(n, kind))
        assert_same(snapshot(expected), snapshot(found), rtol=1e-5, atol=1e-6, path="")
    stats = step.stats()
    assert stats.calls == 120
    assert stats.followed >= 110, step.explain()
    assert stats.compiles <= (3 if backend == "xla" else 2)
    assert stats.launches >= 110


def test_gradients_flow_back_to_what_came_in():
    """A tape around the call sees padding and cutting."""
    step = coexec.dynamic(0, [8])(coexec.function(masked_mean))
    for _ in range(3):
        found = []
        for function in (masked_mean, step):
            x, mask = batch(5)
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = function(x, mask)
                loss = tf.reduce_sum(result["rows"][:, 0]) + tf.reduce_sum(result["mean"])
            found.append(tape.gradient(loss, x))
        np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)


def test_other_axes_other_types_and_names():
    """Only what is named is padded, of any dtype; what has fewer axes stays as it is."""

    @coexec.function
    @coexec.dynamic(axis=1, buckets=[4, 8], names=["words", "flags"])
    def step(words, table, flags=None, *, scale=1):
        return words, tf.concat([table, table], 1), flags, tf.shape(words)[1] * scale

    words, flags = tf.constant([["a", "b", "c"]]), tf.constant([[True, False, True]])
    for _ in range(3):
        given, table, marks, width = step(words, tf.ones((2, 3)), flags=flags, scale=2)
        assert given.numpy().tolist() == [[b"a", b"b", b"c"]]
        assert table.shape == (2, 6)
        assert marks.numpy().tolist() == [[True, False, True]]
        assert int(width) == 8
        assert step(words, tf.ones((2, 3)))[2] is None


def test_methods():
    """The instance is no argument to pad, and the function's own methods are there."""

    class Model:
        factor = 3.0

        @coexec.function
        @coexec.dynamic(axis=0, buckets=[8])
        def scale(self, x):
            """Scales."""
            return x * self.factor

    model = Model()
    for n in (3, 5, 8):
        np.testing.assert_array_equal(model.scale(tf.range(float(n))), 3.0 * np.arange(n))
    assert Model.scale.stats().calls == 3
    assert Model.scale.__doc__ == "Scales."
    assert "scale" in Model.scale.explain()


def test_no_tensors():
    """There is nothing to pad then."""
    assert coexec.dynamic(0, [4])(lambda x, y=2: x + y)(1, y=5) == 6


MESSAGES = {
    "too large": (
        lambda: coexec.dynamic(0, [4, 8])(masked_mean)(*batch(9)),
        "masked_mean was given 9 along axis 0; the largest bucket is 8\n"
        "  1. Give coexec.dynamic a bucket of 9 or more.",
    ),
    "different": (
        lambda: coexec.dynamic(0, [4])(masked_mean)(batch(3)[0], batch(2)[1]),
        "the arguments of masked_mean differ along axis 0, where they have [2, 3]\n"
        "  1. Name those that vary together: coexec.dynamic(axis, buckets, names=[...]).",
    ),
    "unknown": (
        lambda: coexec.dynamic(0, [4], names=["y"])(masked_mean),
        "masked_mean has no arguments ['y']; it has ['x', 'mask']",
    ),
    "no buckets": (
        lambda: coexec.dynamic(0, []),
        "dynamic takes an axis counted from 0 and sizes above 0, not axis=0, buckets=[]",
    ),
    "axis": (
        lambda: coexec.dynamic(-1, [4]),
        "dynamic takes an axis counted from 0 and sizes above 0, not axis=-1, buckets=[4]",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    """Errors say what was given, what was expected, and what to do."""
    run, message = MESSAGES[name]
    with pytest.raises(ValueError) as raised:
        run()
    assert str(raised.value) == message
