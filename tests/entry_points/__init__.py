"""Entry points: every way known by which a tensor gets from Python into TensorFlow's C++, NumPy or Python's own C code.

`ENTRY_POINTS` has functions of a `Tensors`: each hands such tensors in, and returns what came out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

ENTRY_POINTS: dict[str, Callable[["Tensors"], Any]] = {}


@dataclasses.dataclass
class Tensors:
    """What a call has computed of its argument, by kind: lazy tensors where it is followed."""

    floats: Any  # [3, 6, 9, 12]
    matrix: Any  # the same, as 2 x 2
    two: Any  # int32
    pair: Any  # int64: [0, 1]
    true: Any
    number: Any  # float32 scalar: 3
    directory: str  # that it may write to


def tensors_of(x: Any, directory: str) -> Tensors:
    """Computes them of [1, 2, 3, 4]."""
    floats = x * 3.0
    two = tf.cast(x[1], tf.int32)
    pair = tf.cast(x[:2], tf.int64) - 1
    return Tensors(floats, tf.reshape(floats, [2, 2]), two, pair, x[0] > 0.0, floats[0], directory)


def entry_point(function: Callable[[Tensors], Any]) -> Callable[[Tensors], Any]:
    """Lists a function among the entry points."""
    assert function.__name__ not in ENTRY_POINTS
    ENTRY_POINTS[function.__name__] = function
    return function


def refusal(function: Callable[[], Any]) -> Any:
    """Returns what the function does, be it an error."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__, str(error).split(" at 0x")[0]


# Imported for what they list.
from tests.entry_points import data, graphs, objects, python  # noqa: E402

__all__ = ["ENTRY_POINTS", "Tensors", "data", "graphs", "objects", "python", "refusal", "tensors_of"]
