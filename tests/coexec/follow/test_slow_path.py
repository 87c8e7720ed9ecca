"""Operations that TensorFlow's fast path refuses, as an attribute is a NumPy number: it issues them once more by name.

What it converts on the way, such as a variable, it converts twice.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.snapshots import assert_same, snapshot

CALLS = 10
ONE = np.int32(1)
RANDOM = np.random.default_rng(0)
IMAGE, SERIES, VOLUME = ((2, 8, 8, 3), (2, 8, 3), (2, 6, 6, 6, 2))


def numbers(*shape):
    return tf.constant(RANDOM.normal(size=shape), tf.float32)


def layer(kind, *args, **options):
    def make():
        keras.utils.set_random_seed(1)
        made = kind(*args, **options)
        return made, lambda: made.trainable_variables

    return make


def plain(function, *shapes):
    """Variables of these shapes, to which the function is applied behind its input."""
    held = [numbers(*shape) for shape in shapes]

    def make():
        variables = [tf.Variable(value) for value in held]
        return lambda x: function(x, *variables), lambda: variables

    return make


layers = keras.layers
PROGRAMS = {
    "convolution": (IMAGE, plain(lambda x, w: tf.nn.convolution(x, w, dilations=2), (3, 3, 3, 4))),
    "a series": (SERIES, plain(lambda x, w: tf.nn.convolution(x, w, dilations=[3]), (2, 3, 4))),
    "a volume": (VOLUME, plain(lambda x, w: tf.nn.convolution(x, w, dilations=2), (2, 2, 2, 2, 3))),
    "padded": (IMAGE, plain(lambda x, w: tf.nn.convolution(x, w, padding="SAME", dilations=[1, 2]), (3, 3, 3, 4))),
    "atrous": (IMAGE, plain(lambda x, w: tf.nn.atrous_conv2d(x, w, 2, "VALID"), (3, 3, 3, 4))),
    "pooled": (IMAGE, plain(lambda x, w: tf.nn.pool(x * w, [2, 2], "AVG", padding="VALID", dilations=[2, 2]), (3,))),
    "strides": (IMAGE, plain(lambda x, w: tf.nn.conv2d(x, w, [1, ONE, ONE, 1], "SAME"), (3, 3, 3, 4))),
    "two variables": (IMAGE, plain(
        lambda x, v, w: tf.nn.conv2d(v, w, [1, ONE, ONE, 1], "SAME") + tf.reduce_sum(x), IMAGE, (3, 3, 3, 4))),
    "one variable twice": (IMAGE, plain(
        lambda x, v: tf.nn.conv2d(v, v, [1, ONE, ONE, 1], "SAME") + tf.reduce_sum(x), (3, 3, 3, 3))),
    "one behind the other": (IMAGE, plain(lambda x, v, w: tf.nn.conv2d(
        tf.nn.conv2d(x, v, [1, ONE, ONE, 1], "SAME"), w, [1, ONE, ONE, 1], "SAME"), (3, 3, 3, 4), (1, 1, 4, 2))),
    "normalized": (IMAGE, plain(lambda x, v, scale, offset: tf.compat.v1.nn.fused_batch_norm(
        x * tf.nn.local_response_normalization(v), scale, offset, epsilon=0.1)[0], (1, 1, 1, 3), (3,), (3,))),
    "normalized behind it": (IMAGE, plain(lambda x, w, scale, offset: tf.compat.v1.nn.fused_batch_norm(
        tf.nn.conv2d(x, w, np.int64(1), "SAME"), scale, offset, epsilon=0.1)[0], (3, 3, 3, 4), (4,), (4,))),
    "parts": (SERIES, plain(lambda x, v: tf.add_n(tf.split(
        x * tf.quantization.fake_quant_with_min_max_args(v, -1, 1), 3, -1)), (8, 3))),
    "the largest": (SERIES, plain(lambda x, v: x + tf.math.top_k(
        tf.quantization.fake_quant_with_min_max_args(v, -1, 1), 1)[0], (8, 3))),
    "cropped": (IMAGE, plain(lambda x, v: tf.reduce_sum(x) + tf.image.crop_and_resize(
        v, [[0.0, 0.0, 1.0, 1.0]], [0], [2, 2], extrapolation_value=0), (1, 4, 4, 3))),
    "Conv1D": (SERIES, layer(layers.Conv1D, 4, 2, dilation_rate=2, padding="causal")),
    "Conv2D": (IMAGE, layer(layers.Conv2D, 4, 3, dilation_rate=2)),
    "Conv3D": (VOLUME, layer(layers.Conv3D, 3, 2, dilation_rate=2)),
    "DepthwiseConv2D": (IMAGE, layer(layers.DepthwiseConv2D, 3, dilation_rate=2)),
    "SeparableConv2D": (IMAGE, layer(layers.SeparableConv2D, 4, 3, dilation_rate=2)),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"regions": False}, {"batching": True}], ids=str)
@pytest.mark.parametrize("trains", [False, True], ids=["applied", "trained"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_followed(name, trains, options):
    shape, make = PROGRAMS[name]

    def step(function, variables):
        def called(x):
            if not trains:
                return function(x)
            with tf.GradientTape() as tape:
                y = function(x)
                loss = tf.reduce_mean(y * y)
            gradients = tape.gradient(loss, variables())
            for v, gradient in zip(variables(), gradients, strict=True):
                v.assign_sub(0.01 * gradient)
            return y, loss, gradients

        return called

    inputs = [numbers(*shape) for _ in range(CALLS)]
    sides = []
    for decorate in (lambda called: called, lambda called: coexec.function(called, **options)):
        function, variables = make()
        called = decorate(step(function, variables))
        with testing.always_follow(), testing.compile_everything():
            results = [snapshot((called(x), [v.numpy() for v in variables()])) for x in inputs]
        sides.append(results)
    for call, (one, other) in enumerate(zip(*sides, strict=True)):
        assert_same(one, other, rtol=1e-3, atol=1e-4, path=f"call {call}: ")
    assert called.stats().followed >= CALLS - 2, called.explain()
    assert called.stats().diverged <= 1, called.explain()
