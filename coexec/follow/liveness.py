"""References: who else holds a lazy tensor, or a tape.

Relies on CPython's reference counts. How many of them the way to the question accounts for (the list, the loop's
variable, the call's arguments) depends on the version of CPython: it is found out at import, here and nowhere else.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from tracer.lazy import LazyTensor
from tracer.private import EagerTensor

getrefcount = sys.getrefcount
getweakrefcount = weakref.getweakrefcount

# What a tensor may hold besides lazy ones without being `telling`.
_SILENT = (EagerTensor, bool, int, float, str, type(None))


class Reference(weakref.ref[LazyTensor]):
    """A weak reference that is never shared with one of the user's."""

    __slots__ = ()


def referenced(values: list[Any]) -> list[int]:
    """Returns the numbers of the objects that somebody but `values` holds; there is none where it has None."""
    return [i for i, value in enumerate(values) if value is not None and getrefcount(value) > _UNREFERENCED]


def present(values: list[Any]) -> list[int]:
    """Returns the numbers of the tensors that are there at all; most were made for nobody, and are not."""
    return [i for i, value in enumerate(values) if value is not None]


def let_go(values: list[Any], numbers: list[int]) -> list[int]:
    """Replaces by None what nobody but `values` holds, of these; returns the numbers of the tensors that are left.

    A tensor that nobody wants may hold others: Keras notes on an activation what it was made of.
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
    """Returns the tensors whose end user code may hear of, by weak references or by objects that only they hold.

    It may issue operations, for which a call is not ready while it carries out others. The call itself has no
    references to them yet.
    """
    return [v for i in numbers if getweakrefcount(v := values[i]) or (v.__dict__ and not _holds_tensors(v))]


def _holds_tensors(lazy: LazyTensor) -> bool:
    return all(type(held) is LazyTensor or isinstance(held, _SILENT) for held in lazy.__dict__.values())


def is_known(lazy: LazyTensor, places: int, watched: bool) -> bool:
    """Returns whether somebody else knows this tensor than one variable of the caller and so many `places`.

    `watched`: tapes are alive, so who has asked for the tensor's number may ask again.
    """
    if getrefcount(lazy) > _ARGUMENT + places or (watched and lazy.has_id()):
        return True
    # The call keeps a weak reference of its own to each tensor that an operation made.
    return getweakrefcount(lazy) > (lazy._key >= 0)


# Calibration: each threshold is what `getrefcount` says, in the one function that compares with it, of an object that
# nobody else holds.


def _calibrate(threshold: str, finds: Callable[[], object]) -> None:
    """Sets a threshold to the smallest value with which its function finds no other holder, as there is none."""
    for count in range(20):
        globals()[threshold] = count
        if not finds():
            return
    raise RuntimeError("reference counts do not tell who holds an object")


class _StandIn:
    """What `is_known` looks at of a lazy tensor."""

    __slots__ = ("__weakref__", "_key")

    def __init__(self) -> None:
        self._key = -1


def _objects() -> list[Any]:
    return [object() for _ in range(8)]


def _argument() -> bool:
    lazy: Any = _StandIn()
    return is_known(lazy, 0, False)


_UNREFERENCED = _UNREFERENCED_ITEM = _ARGUMENT = 0
_calibrate("_UNREFERENCED", lambda: referenced(_objects()))
_calibrate("_UNREFERENCED_ITEM", lambda: _still_referenced(_objects(), list(range(8))))
_calibrate("_ARGUMENT", _argument)
