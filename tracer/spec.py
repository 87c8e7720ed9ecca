"""Spec: what is known of a tensor without its value.

Relies on `EagerTensor._datatype_enum`, `_shape_tuple` and `_handle_data` (TensorFlow 2.21).
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import tensorflow as tf

from tracer.private import types_pb2

RESOURCE = types_pb2.DT_RESOURCE
VARIANT = types_pb2.DT_VARIANT
STRING = types_pb2.DT_STRING

# int32 and int64 carry shapes, axes and indices: their values decide the shape of other tensors.
INTEGERS = frozenset({types_pb2.DT_INT32, types_pb2.DT_INT64})


class Spec:
    """The dtype and exact shape of a tensor; for a resource also those of the variable behind it.

    Specs are interned: equal specs are the same object as long as one of them lives.
    """

    __slots__ = ("__weakref__", "dtype", "enum", "handle", "shape", "tensor_shape")

    def __init__(self, enum: int, shape: tuple[int, ...], handle: Any) -> None:
        self.enum = enum
        self.shape = shape
        self.handle = handle
        self.dtype = tf.dtypes.as_dtype(enum)
        self.tensor_shape = tf.TensorShape(shape)

    @property
    def size(self) -> int:
        """How many bytes such a tensor has (1 an element where that differs), or what is behind a resource."""
        if self.handle is None:
            return math.prod(self.shape) * max(self.dtype.size, 1)
        return sum(math.prod(shape or ()) * max(tf.dtypes.as_dtype(enum).size, 1) for enum, shape in self.handle)

    def __repr__(self) -> str:
        held = "" if self.handle is None else "<" + " ".join(_behind(*h) for h in self.handle) + ">"
        return f"{self.dtype.name}{held}{_dims(self.shape)}"

    def __reduce__(self) -> Any:
        return intern_spec, (self.enum, self.shape, self.handle)


def _dims(shape: tuple[int, ...] | None) -> str:
    return "[?]" if shape is None else f"[{','.join(map(str, shape))}]"


def _behind(enum: int, shape: tuple[int, ...] | None) -> str:
    return f"{tf.dtypes.as_dtype(enum).name}{_dims(shape)}"


_lock = threading.RLock()  # a collection of garbage inside may come here again
_interned: weakref.WeakValueDictionary[Any, Spec] = weakref.WeakValueDictionary()


def intern_spec(enum: int, shape: tuple[int, ...], handle: Any = None) -> Spec:
    """Returns the one `Spec` with this dtype enum, shape and handle description."""
    key = (enum, shape, handle)
    spec = _interned.get(key)
    if spec is None:
        with _lock:  # two threads with one each would never again agree on what they see
            spec = _interned.get(key)
            if spec is None:
                spec = _interned[key] = Spec(enum, shape, handle)
    return spec


def describe_handle(tensor: Any) -> tuple[tuple[int, tuple[int, ...] | None], ...] | None:
    """Returns the dtype enum and shape of each value behind a resource or variant; None where that is unknown."""
    data = getattr(tensor, "_handle_data", None)
    if data is None or not data.is_set:
        return None
    return tuple(
        (item.dtype, None if item.shape.unknown_rank else tuple(d.size for d in item.shape.dim))
        for item in data.shape_and_type
    )


def spec_of(tensor: Any) -> Spec:
    """Returns the spec of an eager or lazy tensor."""
    enum = tensor._datatype_enum()
    handle = describe_handle(tensor) if enum in (RESOURCE, VARIANT) else None
    return intern_spec(enum, tensor._shape_tuple(), handle)
