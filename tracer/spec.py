"""Spec: what is known of a tensor without its value.

Relies on `EagerTensor._datatype_enum`, `_shape_tuple` and `_handle_data`, and on the text of a handle, which names its
resource.
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

# Dtypes of shapes, axes and indices, whose values decide the shapes of other tensors.
INTEGERS = frozenset({types_pb2.DT_INT32, types_pb2.DT_INT64})

# Dtypes of values that may be known beforehand: those, and what comparing them gives.
FOLDED = INTEGERS | {types_pb2.DT_BOOL}


class Spec:
    """The dtype and exact shape of a tensor; for a resource also those of its variable.

    A spec with dimensions of None is `open`: that of a tensor whose size depends on values that are not computed yet
    (`open_sizes`). On paths for any size (`dynamic_paths`) no tensor of the program has such a spec.

    Specs are interned: equal specs are the same object as long as one of them is alive.
    """

    __slots__ = ("__weakref__", "_size", "dtype", "enum", "handle", "open", "shape", "tensor_shape")
    shape: tuple[int, ...]
    _size: int

    def __init__(self, enum: int, shape: tuple[int | None, ...], handle: Any) -> None:
        self.enum = enum
        self.shape = shape  # type: ignore[assignment]  # of none but paths for any size
        self.handle = handle
        self.dtype = tf.dtypes.as_dtype(enum)
        self.tensor_shape = tf.TensorShape(shape)
        self.open = self.__class__ is Spec and None in shape

    @property
    def size(self) -> int:
        """The size in bytes of such a tensor, or of a resource's variable; at least 1 per element.

        Open dimensions count as 1.
        """
        try:
            return self._size  # asked for several times for each operation of a segment
        except AttributeError:
            self._size = self._computed_size()
        return self._size

    def _computed_size(self) -> int:
        if self.handle is None:
            return math.prod([1 if size is None else size for size in self.shape]) * int(max(self.dtype.size, 1))
        return sum(math.prod(shape or ()) * int(max(tf.dtypes.as_dtype(enum).size, 1)) for enum, shape in self.handle)

    def __repr__(self) -> str:
        held = "" if self.handle is None else "<" + " ".join(_behind(*h) for h in self.handle) + ">"
        return f"{self.dtype.name}{held}{_dims(self.shape)}"

    def __reduce__(self) -> Any:
        return intern_spec, (self.enum, self.shape, self.handle)


def _dims(shape: tuple[int, ...] | None) -> str:
    return "[?]" if shape is None else f"[{','.join('?' if n is None else str(n) for n in shape)}]"


def _behind(enum: int, shape: tuple[int, ...] | None) -> str:
    return f"{tf.dtypes.as_dtype(enum).name}{_dims(shape)}"


_lock = threading.RLock()  # reentrant, as garbage collection may call this
_interned: weakref.WeakValueDictionary[Any, Spec] = weakref.WeakValueDictionary()
# Recently used specs: a lookup in a dictionary of weak references takes 7 us, and recording an operation makes three.
_recent: dict[Any, Spec] = {}
MAX_RECENT = 4096
# Specs of resources whose variable is known, by the handle's `_id`, which TensorFlow never reuses: what a handle says
# of its variable is a protocol message, which takes 6 us to read, several times for each variable in a recorded call.
_handles: dict[int, Spec] = {}
# The first handle seen of each resource, by the text that names it: what a copy of a handle (`tf.identity(v.handle)`, a
# function's result, a second `VarHandleOp` of one `shared_name`) reads and writes is known by the first one's id.
_firsts: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_first_ids: set[int] = set()  # as reading a handle's text takes 4 us


def first_handle(handle: Any) -> Any:
    """Returns the first handle seen of this resource that is still alive; for nearly all handles, itself."""
    if handle._id in _first_ids:
        return handle
    with _lock:
        named = str(handle).partition(', type="')[0]  # what follows is what this handle knows of its variable
        first = _firsts.setdefault(named, handle)
        if first is handle:
            if len(_first_ids) >= MAX_RECENT:
                _first_ids.clear()
            _first_ids.add(handle._id)
    return first


def intern_spec(enum: int, shape: tuple[Any, ...], handle: Any = None) -> Spec:
    """Returns the one `Spec` with this dtype enum, shape and handle description."""
    key = (enum, shape, handle)
    spec = _recent.get(key)
    if spec is None:
        with _lock:  # else two threads could intern different objects
            spec = _interned.get(key)
            if spec is None:
                spec = _interned[key] = Spec(enum, shape, handle)
        if len(_recent) >= MAX_RECENT:
            _recent.clear()
        _recent[key] = spec
    return spec


def describe_handle(tensor: Any) -> tuple[tuple[int, tuple[int, ...] | None], ...] | None:
    """Returns the dtype enum and shape of each value that a resource or variant holds; None if unknown.

    Copies of a resource's handle count as unknown, so that no segment takes one variable for two.
    """
    data = getattr(tensor, "_handle_data", None)
    if data is None or not data.is_set:
        return None
    if tensor._datatype_enum() == RESOURCE and first_handle(tensor) is not tensor:
        return None
    return tuple(
        (item.dtype, None if item.shape.unknown_rank else tuple(d.size for d in item.shape.dim))
        for item in data.shape_and_type
    )


def spec_of(tensor: Any) -> Spec:
    """Returns the spec of an eager or lazy tensor."""
    enum = tensor._datatype_enum()
    if enum != RESOURCE:
        return intern_spec(enum, tensor._shape_tuple(), describe_handle(tensor) if enum == VARIANT else None)
    spec = _handles.get(tensor._id)
    if spec is None:
        spec = intern_spec(enum, tensor._shape_tuple(), describe_handle(tensor))
        if spec.handle is not None:  # it is told only after the operation that makes the handle
            if len(_handles) >= MAX_RECENT:
                _handles.clear()
            _handles[tensor._id] = spec
    return spec
