"""Bottleneck residual networks, with a place after each block for what the programs do there."""

from collections.abc import Sequence

import keras
import tensorflow as tf


class ConvNorm(keras.layers.Layer):
    """A convolution without a bias, its batch normalised."""

    def __init__(self, filters: int, kernel: int, strides: int = 1) -> None:
        super().__init__()
        self.convolution = keras.layers.Conv2D(
            filters, kernel, strides, padding="same", use_bias=False, kernel_initializer="he_normal"
        )
        self.norm = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)

    def call(self, x, training=False):
        return self.norm(self.convolution(x), training=training)


class Bottleneck(keras.layers.Layer):
    """Narrows, convolves, widens, and adds what came in."""

    def __init__(self, width: int, strides: int, project: bool) -> None:
        super().__init__()
        self.narrow, self.middle = ConvNorm(width, 1), ConvNorm(width, 3, strides)
        self.widen = ConvNorm(4 * width, 1)
        self.shortcut = ConvNorm(4 * width, 1, strides) if project else None

    def call(self, x, training=False):
        shortcut = x if self.shortcut is None else self.shortcut(x, training=training)
        x = tf.nn.relu(self.narrow(x, training=training))
        x = tf.nn.relu(self.middle(x, training=training))
        return tf.nn.relu(self.widen(x, training=training) + shortcut)


class ResNet(keras.Model):
    """A stem, stages of bottlenecks each half as large and twice as wide, and a classifier.

    `after_block(number, x, training)` may be overridden: it is given what each block made.
    """

    def __init__(self, stages: Sequence[int], width: int, classes: int, small_images: bool) -> None:
        super().__init__()
        self.stem = ConvNorm(width, 3) if small_images else ConvNorm(width, 7, 2)
        self.pool = None if small_images else keras.layers.MaxPooling2D(3, 2, padding="same")
        self.blocks = []
        for stage, blocks in enumerate(stages):
            for block in range(blocks):
                strides = 2 if stage and not block else 1
                self.blocks.append(Bottleneck(width * 2**stage, strides, project=not block))
        self.head = keras.layers.Dense(classes)

    def after_block(self, number, x, training):
        return x

    def features(self, x, training=False):
        x = tf.nn.relu(self.stem(x, training=training))
        if self.pool is not None:
            x = self.pool(x)
        for number, block in enumerate(self.blocks):
            x = self.after_block(number, block(x, training=training), training)
        return x

    def call(self, x, training=False):
        return self.head(tf.reduce_mean(self.features(x, training), (1, 2)))
