"""Convolutions of no elements, of which eager kernels return another shape than graphs' do."""

import keras
import pytest
import tensorflow as tf

from tests.coexec import run_both


def image(x, kernel):
    return tf.nn.conv2d(x, kernel, 1, "SAME")


def depthwise(x, kernel):
    return tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME")


def volume(x, kernel):
    return tf.nn.conv3d(x[tf.newaxis], kernel[tf.newaxis], [1] * 5, "SAME")[0]


@pytest.mark.parametrize("convolution", [image, depthwise, volume])
@pytest.mark.parametrize("empty", [{2, 5, 8}, set(range(9))], ids=["now and then", "always"])
def test_shapes_are_eagers(convolution, empty):
    def step(call):
        y = convolution(tf.ones([0 if call in empty else 2, 4, 4, 2]), tf.ones([2, 2, 2, 3]))
        return y.shape.as_list(), tf.shape(y), y * 2.0

    fn = run_both(lambda f: f(step), [(call,) for call in range(9)])
    assert fn.stats().followed >= 4


def test_a_layer_fails_as_it_does_eagerly():
    layer = keras.layers.Conv1D(3, 2, padding="same")
    layer.build((None, None, 2))

    def step(call):
        try:
            return layer(tf.ones([0 if call == 6 else 2, 4, 2]))
        except tf.errors.InvalidArgumentError as error:
            return str(error)

    run_both(lambda f: f(step), [(call,) for call in range(9)])
