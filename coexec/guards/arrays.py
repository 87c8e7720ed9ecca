"""Arrays: NumPy's among what a call reads, and NumPy's settings on which its functions depend.

An array is compared by content and layout. Its memory may be another's, too: what leads there is not followed.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from coexec.base.tuning import tuning
from tracer.errors import Refused

# Attributes that lead from an array to other memory than its own, if it is a view.
BEHIND = frozenset({"base", "data", "ctypes", "__array_interface__", "__array_struct__"})


def is_compared(value: Any) -> bool:
    """Returns whether an object is an array that is compared by content."""
    return type(value) is np.ndarray and value.nbytes <= tuning.max_compared_bytes and value.dtype.kind in "biufc"


def frozen(array: Any) -> tuple[Any, ...]:
    """Returns what `is_same` compares; raises `Refused` if the array's dtype has more to it."""
    if array.dtype.metadata:
        raise Refused("it reads an array whose dtype has metadata")
    return array.dtype, array.shape, array.strides, array.flags.num, array.tobytes()


def is_same(array: Any, dtype: Any, shape: Any, strides: Any, flags: int, content: bytes) -> bool:
    """Returns whether an array has this dtype, layout and content, and may be written to as then."""
    if type(array) is not np.ndarray or array.shape != shape or array.strides != strides or array.flags.num != flags:
        return False
    return bool(array.dtype == dtype and not array.dtype.metadata and array.tobytes() == content)


def settings() -> Any:
    """Returns what decides whether NumPy raises, warns or calls where numbers overflow or are divided by zero."""
    return np.geterr(), np.geterrcall(), [*warnings.filters], warnings.defaultaction  # type: ignore[attr-defined]


def printing() -> Any:
    """Returns how NumPy prints arrays and scalars."""
    return np.get_printoptions()
