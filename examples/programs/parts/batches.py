"""Batches without end, in an order that only the seed decides."""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf


def batches(rng: np.random.Generator, size: int, *arrays: np.ndarray) -> Iterator[tuple[tf.Tensor, ...]]:
    """Rows of all arrays alike, as tensors, each row once an epoch; an incomplete last batch is left out."""
    while True:
        order = rng.permutation(len(arrays[0]))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield tuple(tf.constant(array[rows]) for array in arrays)
