"""Slow path: the operations that TensorFlow's Python issues by name, as its C++ code does not take their arguments.

The error of an operation ends with `name: `, and the name that the program has given it, if any; that of an operation
issued by name, as `tf.gather` of a Keras variable or `tf.broadcast_to(x, (3, 2))`, does not.

Relies on the arguments that `TFE_Py_FastPathExecute` takes, as inputs and in lists of inputs: tensors, variables whose
`_handle` is a tensor, arrays, and Python's integers and floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.lazy import LazyTensor
from tracer.op import Signature
from tracer.private import EagerTensor, core, is_resource_variable

_TAKEN = (int, float, np.ndarray, EagerTensor, LazyTensor)


def name_in_errors(signature: Signature, name: Any, args: tuple[Any, ...]) -> str | None:
    """Returns the name with which the error of an operation with these arguments ends; None if it has no such end."""
    return None if is_issued_by_name(signature, args) else str(name if name is not None else "")


def is_issued_by_name(signature: Signature, args: tuple[Any, ...]) -> bool:
    """Returns whether an operation with these arguments takes TensorFlow's slow path."""
    return not all(
        _is_list_taken(value) if is_list else _is_taken(value)
        for value, is_list in zip(args, signature.lists, strict=False)
    )


def _is_taken(value: Any) -> bool:
    if issubclass(type(value), _TAKEN):
        return True
    return is_read_in_c(value)


def is_read_in_c(value: Any) -> bool:
    """Returns whether this is a variable that TensorFlow's C++ code reads itself; Keras' are not."""
    return type(getattr(value, "_handle", None)) is EagerTensor and is_resource_variable(value)


def _is_list_taken(values: Any) -> bool:
    if isinstance(values, tf.Tensor):
        return True
    return isinstance(values, Sequence) and all(map(_is_taken, values))


def named(error: Any, name: str | None) -> Exception:
    """Returns the program's error for one of the runtime's, with the operation's name."""
    if name is not None:
        error.message += f" name: {name}"
    failure: Exception = core._status_to_exception(error)
    return failure
