"""References: whether a lazy tensor, or a tape, is referenced from elsewhere.

Relies on CPython's reference counts. How many references the check itself holds (the list, the loop variable, the
call's arguments) depends on the version of CPython, so the thresholds are calibrated at import, here and nowhere else.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from tracer.lazy import LazyTensor
from tracer.private import EagerTensor, cpp_shape_inference_pb2

getrefcount = sys.getrefcount
getweakrefcount = weakref.getweakrefcount

# What a tensor's attributes may hold besides lazy tensors without making it `telling`.
_SILENT = (EagerTensor, bool, int, float, str, type(None), cpp_shape_inference_pb2.CppShapeInferenceResult.HandleData)


class Reference(weakref.ref[LazyTensor]):
    """A weak reference that is never shared with the user's (a subclass is not cached)."""

    __slots__ = ()


def referenced(values: list[Any]) -> list[int]:
    """Returns the indices of the objects in `values` that are referenced from elsewhere; None entries do not count."""
    return [i for i, value in enumerate(values) if value is not None and getrefcount(value) > _UNREFERENCED]


def present(values: list[Any]) -> list[int]:
    """Returns the indices of the entries that are not None, which are few: most tensors are not needed."""
    return [i for i, value in enumerate(values) if value is not None]


def let_go(values: list[Any], numbers: list[int]) -> list[int]:
    """Sets those of these entries to None that only `values` references; returns the indices of the rest.

    Repeats until nothing changes: an unreferenced tensor may hold others, as Keras stores an activation's inputs on it.
    """
    while True:
        held = _still_referenced(values, numbers)
        if len(held) == len(numbers):
            return held
        for i in set(numbers).difference(held):
            values[i] = None
        numbers = held


def _still_referenced(values: list[Any], numbers: list[int]) -> list[int]:
    return [i for i in numbers if getrefcount(values[i]) > _UNREFERENCED_ITEM]


def telling(values: list[Any], numbers: list[int]) -> list[LazyTensor]:
    """Returns the tensors whose deallocation may run user code, by weak references or by objects that only they hold.

    That code may issue operations, which a call cannot handle while it runs others. The call's own weak references are
    not made yet.
    """
    return [v for i in numbers if getweakrefcount(v := values[i]) or (v.__dict__ and not _holds_tensors(v))]


def _holds_tensors(lazy: LazyTensor) -> bool:
    return all(type(held) is LazyTensor or isinstance(held, _SILENT) for held in lazy.__dict__.values())


def is_known(lazy: LazyTensor, places: int, watched: bool) -> bool:
    """Returns whether a tensor has references besides one variable of the caller and so many `places`.

    `watched`: tapes are alive, so one that has used the tensor's id may look it up again.
    """
    if getrefcount(lazy) > _ARGUMENT + places or (watched and lazy.has_id()):
        return True
    # The call holds one weak reference to each tensor that is an operation's output.
    return getweakrefcount(lazy) > (lazy._key >= 0)


def is_held(value: Any, places: int) -> bool:
    """Returns whether an object has references besides one variable of the caller and so many `places`."""
    return getrefcount(value) > _HELD + places


# Calibration: each threshold is the `getrefcount` of an otherwise unreferenced object in the one function that uses it.


def _calibrate(threshold: str, finds: Callable[[], object]) -> None:
    """Sets a threshold to the smallest value with which its function finds no other reference to fresh objects."""
    for count in range(20):
        globals()[threshold] = count
        if not finds():
            return
    raise RuntimeError("reference counts do not tell who holds an object")


class _StandIn:
    """A stand-in for a lazy tensor with what `is_known` uses of it."""

    __slots__ = ("__weakref__", "_key")

    def __init__(self) -> None:
        self._key = -1


def _objects() -> list[Any]:
    return [object() for _ in range(8)]


def _argument() -> bool:
    lazy: Any = _StandIn()
    return is_known(lazy, 0, False)


def _fresh() -> bool:
    value: Any = (object(),)
    return is_held(value, 0)


_UNREFERENCED = _UNREFERENCED_ITEM = _ARGUMENT = _HELD = 0
_calibrate("_UNREFERENCED", lambda: referenced(_objects()))
_calibrate("_UNREFERENCED_ITEM", lambda: _still_referenced(_objects(), list(range(8))))
_calibrate("_ARGUMENT", _argument)
_calibrate("_HELD", _fresh)
