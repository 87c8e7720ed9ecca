"""The two photographs that scikit-learn ships, and pieces of them."""

import functools
import importlib.resources

import numpy as np
import tensorflow as tf


@functools.cache
def photographs() -> list[np.ndarray]:
    """A temple and a flower: `float32[427, 640, 3]`, in [0, 1]."""
    # TensorFlow's decoder: scikit-learn's loader wants one more package.
    files = importlib.resources.files("sklearn.datasets.images")
    names = ("china.jpg", "flower.jpg")
    return [tf.io.decode_jpeg((files / name).read_bytes()).numpy().astype(np.float32) / 255 for name in names]


def piece(rng: np.random.Generator, size: int) -> tuple[np.ndarray, int]:
    """A random square of one of the photographs, and the photograph's number."""
    number = int(rng.integers(2))
    photograph = photographs()[number]
    top, left = (int(rng.integers(length - size + 1)) for length in photograph.shape[:2])
    return photograph[top : top + size, left : left + size], number
