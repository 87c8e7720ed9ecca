"""Inputs for public functions: profiles of what a tensor may be, and what parameters of some name stand for."""

import functools
import inspect
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


def _floats(*shape: int, low: float = 0.1, high: float = 0.9, dtype: Any = np.float32) -> Callable[[Any], Any]:
    return lambda numbers: tf.constant(numbers.uniform(low, high, shape).astype(dtype))


def _wholes(*shape: int, high: int = 3, dtype: Any = np.int32) -> Callable[[Any], Any]:
    return lambda numbers: tf.constant(numbers.integers(0, high, shape).astype(dtype))


def _symmetric(numbers: Any) -> Any:
    half = numbers.normal(size=(3, 3))
    return tf.constant(half @ half.T + 3 * np.eye(3), tf.float32)


def _words(*shape: int) -> Callable[[Any], Any]:
    words = ["ab", "Cé", "12", "a b", ""]
    return lambda numbers: tf.constant(numbers.choice(words, shape))


def _complex(*shape: int) -> Callable[[Any], Any]:
    return lambda numbers: tf.constant((numbers.normal(size=shape) + 1j * numbers.normal(size=shape)), tf.complex64)


# What each parameter that is no option is given, in the order in which they are tried: the first two that eager takes
# are the two kinds of inputs of a function.
PROFILES: tuple[Callable[[Any], Any], ...] = (
    _floats(3, 4), _wholes(4), _words(3), _floats(3), _floats(4, 4, dtype=np.float64), _symmetric,
    _floats(2, 8, 8, 3), _wholes(3, 4, dtype=np.int64), lambda numbers: tf.constant(numbers.integers(0, 2, 4) > 0),
    lambda numbers: [tf.constant(numbers.normal(size=3), tf.float32) for _ in range(2)],
    _complex(4, 4), _wholes(8, 8, 3, high=255, dtype=np.uint8), _words(), _wholes(), _floats(),
    lambda numbers: tf.ragged.constant([numbers.normal(size=2).tolist(), [], [1.0]]),
    lambda numbers: tf.sparse.from_dense(numbers.integers(0, 2, (3, 3)) * 1.5),
    _complex(2, 4, 4, 4), _floats(2, 8, 3), _floats(1, 4, 4, 4, 2), _floats(64),
)  # fmt: skip

# What parameters of these names are given whatever the profile.
NAMED: dict[str, Any] = {
    "axis": 0, "axes": 1, "dtype": tf.float32, "shape": [2, 3], "size": [4, 4], "depth": 4, "k": 2, "perm": [1, 0],
    "num_segments": 3, "num_classes": 5, "num_buckets": 7, "paddings": [[1, 1], [0, 2]], "multiples": [2, 1],
    "lam": 0.5,
    "seed": (3, 4), "minlength": 4, "delta": 0.2, "num": 5, "pattern": "[a-c]+", "rewrite": "x", "key": [5, 6],
    "target_height": 6, "target_width": 5, "offset_height": 1, "offset_width": 2, "block_size": 2, "rate": 0.4,
    "separator": "-", "ngram_width": 2, "input_encoding": "UTF-8", "output_encoding": "UTF-16-BE", "errors": "replace",
    "frame_length": 8, "frame_step": 4, "window_length": 8, "clip_norm": 0.5, "clip_value_min": 0.2,
    "clip_value_max": 0.7, "lower": 0.2, "upper": 0.8, "max_delta": 0.2, "fill_value": 2.5, "diagonal": 1, "n": 4,
    "shift": 1, "repeats": 2, "gain": 2.0, "num_lower": 1, "num_upper": 1, "band_width": 1, "indices_or_sections": 2,
    "segment_ids": tf.constant([0, 0, 2]), "indices": tf.constant([0, 2]), "num_or_size_splits": 2, "pos": 0, "len": 2,
    "source": 0, "destination": -1, "axis1": 0, "axis2": 1, "q": 0.3, "pool_size": 2, "start": 1, "stop": 7,
    "decimals": 1,
    "mean": 0.5, "variance": 2.0, "num_samples": 3, "alpha": 1.5, "beta": 0.7, "counts": 4.0, "probabilities": 0.3,
    "method": "bilinear", "delimiter": "-", "new_height": 4, "new_width": 4, "out_type": tf.uint8,
    "x_min": 0.1, "x_max": 0.8, "min": 0.1, "max": 0.8, "ksize": 2, "strides": 1, "padding": "SAME",
    "central_fraction": 0.5,
    "contrast_factor": 0.7, "saturation_factor": 1.5, "jpeg_quality": 70, "gamma": 1.2, "negative_slope": 0.1,
}  # fmt: skip

# And another time.
AGAIN: dict[str, Any] = {
    "shape": [3], "seed": (5, 6), "num": 4, "key": [7, 8], "n": 3, "start": 2, "stop": 8, "depth": 5,
    "window_length": 6,
    "fill_value": 1.5, "lam": 0.7, "rate": 0.3, "alpha": 1.7, "mean": 0.2, "num_samples": 2,
}  # fmt: skip


def found(function: Callable[..., Any], name: str, again: bool = False) -> Iterator[CallArguments]:
    """Yields what to call a function with, by its signature: for each profile one set of arguments.

    `again`: the same, with other values.
    """
    parameters = _required(function)
    if parameters is None:
        return
    named = {**NAMED, **AGAIN} if again else NAMED
    for number, profile in enumerate(PROFILES):
        numbers = np.random.default_rng(zlib.crc32(f"{name} {number} {again}".encode()))
        yield (), {parameter: named[parameter] if parameter in named else profile(numbers) for parameter in parameters}
        if all(parameter in named for parameter in parameters):
            return


@functools.cache
def _required(function: Callable[..., Any]) -> tuple[str, ...] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter
    if any(p.kind is kinds.POSITIONAL_ONLY for p in parameters):
        return None
    named = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.default is kinds.empty and p.kind in named)
