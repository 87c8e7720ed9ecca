"""The public functions, by name: each function once, under the first of its names."""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

MODULES = (
    "tf.strings", "tf.io", "tf.io.gfile", "tf.ragged", "tf.sparse", "tf.sets", "tf.image", "tf.signal", "tf.linalg",
    "tf.linalg.experimental", "tf.math", "tf.math.special", "tf.nn", "tf.nn.experimental", "tf.bitwise",
    "tf.random", "tf.random.experimental", "tf.quantization", "tf.nest", "tf.audio", "tf.debugging",
    "tf.experimental.numpy", "tf.experimental.numpy.random", "tf.dtypes", "tf.train", "tf.summary", "tf",
    "keras.ops", "keras.random", "keras.activations", "keras.losses", "keras.metrics",
)  # fmt: skip


def functions() -> dict[str, Callable[..., Any]]:
    """Returns all public functions of the modules."""
    found, seen = {}, set()
    for module in MODULES:
        first, *rest = module.split(".")
        where: Any = functools.reduce(getattr, rest, {"tf": tf, "keras": keras}[first])
        for name in sorted(dir(where)):
            value = None if name.startswith("_") else getattr(where, name, None)
            if callable(value) and not inspect.isclass(value) and id(value) not in seen:
                seen.add(id(value))
                found[f"{module}.{name}"] = value
    return found


def by_name(name: str) -> Any:
    """Returns what a dotted name stands for."""
    return operator.attrgetter(name.partition(".")[2])({"tf": tf, "keras": keras}[name.partition(".")[0]])
