"""The steps in TensorFlow and Keras."""

import keras
import numpy as np

from examples.bench.cases import Case, Program, keras_mlp, training, unrolled_lstm, while_loop

WORDS, LENGTH, HIDDEN, HEADS, LAYERS = 256, 64, 128, 4, 4  # of the GPT
WIDTHS, IMAGES, CLASSES = (16, 32, 64, 128), 32, 10  # of the ResNet: ResNet-18's blocks, a quarter as wide


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Eight sequences of tokens and the tokens behind each, `int32[8, LENGTH]`."""
    text = np.random.default_rng(0).integers(WORDS, size=(8, LENGTH + 1)).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def images() -> tuple[np.ndarray, np.ndarray]:
    """Sixteen images, `float32[16, 32, 32, 3]`, and their classes."""
    numbers = np.random.default_rng(0)
    shape = (16, IMAGES, IMAGES, 3)
    return numbers.normal(size=shape).astype(np.float32), numbers.integers(CLASSES, size=16).astype(np.int32)


def gpt() -> Program:
    """A small GPT: pre-norm blocks, attention to earlier tokens."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    text = keras.Input((LENGTH,), dtype="int32")
    places = layers.Embedding(LENGTH, HIDDEN)(keras.ops.arange(LENGTH))
    x = layers.Embedding(WORDS, HIDDEN)(text) + places
    for _ in range(LAYERS):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, HIDDEN // HEADS)(normed, normed, use_causal_mask=True)
        inner = layers.Dense(4 * HIDDEN, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(HIDDEN)(inner)
    return training(keras.Model(text, layers.Dense(WORDS)(layers.LayerNormalization()(x))), *tokens())


def resnet() -> Program:
    """A ResNet of eight basic blocks."""
    keras.utils.set_random_seed(0)
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
    return training(keras.Model(inputs, x), *images())


CASES = (
    Case("mlp", "MLP 20-64-64-10, 32 rows", keras_mlp, calls=4),
    Case("lstm", "LSTM cell 64, 20 steps in Python", unrolled_lstm, calls=3),
    Case("gpt", "GPT, 4 layers of 128, 8x64 tokens", gpt, calls=2),
    Case("resnet", "ResNet-18, a quarter as wide, 16 images", resnet, calls=2),
    Case("while-loop", "`while` on a tensor, 100 rounds", while_loop, calls=3),
)
