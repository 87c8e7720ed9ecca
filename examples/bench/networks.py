"""Networks that are larger than a few layers, and the batches that they are trained on."""

import keras
import numpy as np

from examples.programs.parts.bert import Bert

WORDS, LENGTH, HIDDEN, HEADS, LAYERS = 256, 64, 128, 4, 4  # of the GPT
WIDTHS, IMAGES, CLASSES = (16, 32, 64, 128), 32, 10  # of the ResNet: ResNet-18's blocks, a quarter as wide
TEXT = 32  # tokens of a text that BERT classifies


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Eight sequences of tokens and the tokens behind each, `int32[8, LENGTH]`."""
    text = np.random.default_rng(0).integers(WORDS, size=(8, LENGTH + 1)).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def images() -> tuple[np.ndarray, np.ndarray]:
    """Sixteen images, `float32[16, 32, 32, 3]`, and their classes."""
    numbers = np.random.default_rng(0)
    shape = (16, IMAGES, IMAGES, 3)
    return numbers.normal(size=shape).astype(np.float32), numbers.integers(CLASSES, size=16).astype(np.int32)


def gpt() -> keras.Model:
    """A small GPT: pre-norm blocks, attention to earlier tokens."""
    layers = keras.layers
    text = keras.Input((LENGTH,), dtype="int32")
    places = layers.Embedding(LENGTH, HIDDEN)(keras.ops.arange(LENGTH))
    x = layers.Embedding(WORDS, HIDDEN)(text) + places
    for _ in range(LAYERS):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, HIDDEN // HEADS)(normed, normed, use_causal_mask=True)
        inner = layers.Dense(4 * HIDDEN, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(HIDDEN)(inner)
    return keras.Model(text, layers.Dense(WORDS)(layers.LayerNormalization()(x)))


def resnet() -> keras.Model:
    """A ResNet of eight basic blocks."""
    layers = keras.layers

    def normed(x: keras.KerasTensor, width: int, kernel: int, strides: int = 1) -> keras.KerasTensor:
        return layers.BatchNormalization()(layers.Conv2D(width, kernel, strides, "same", use_bias=False)(x))

    inputs = keras.Input((IMAGES, IMAGES, 3))
    x = layers.ReLU()(normed(inputs, WIDTHS[0], 3))
    for stage, width in enumerate(WIDTHS):
        for block in range(2):
            strides = 2 if stage and not block else 1
            shortcut = normed(x, width, 1, strides) if strides == 2 else x
            x = normed(layers.ReLU()(normed(x, width, 3, strides)), width, 3)
            x = layers.ReLU()(layers.Add()([x, shortcut]))
    x = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, x)


class Classifier(keras.Model):
    """BERT without dropout, and a dense layer on what it makes of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = Bert(vocabulary=1000, length=TEXT, hidden=HIDDEN, layers=2, heads=2, dropout=0.0)
        self.head = keras.layers.Dense(CLASSES)

    def call(self, tokens, training=False):
        _, pooled = self.bert((tokens, keras.ops.zeros_like(tokens)), training=training)
        return self.head(pooled)


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Sixteen texts, `int32[16, TEXT]`, and their classes."""
    numbers = np.random.default_rng(0)
    return numbers.integers(1, 1000, size=(16, TEXT)).astype(np.int32), numbers.integers(CLASSES, size=16)

