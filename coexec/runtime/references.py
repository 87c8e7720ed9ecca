"""References: who else holds a lazy tensor. Relies on CPython's reference counts."""

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


class Reference(weakref.ref):
    """A weak reference that is never shared with one of the user's."""

    __slots__ = ()


def referenced(values: list[Any]) -> list[int]:
    """Returns the numbers of the tensors that somebody but `values` holds; there is none where it has None."""
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


def is_known(lazy: LazyTensor, holders: int, watched: bool) -> bool:
    """Returns whether somebody else knows this tensor, beside the `holders` that the way here accounts for.

    `watched`: tapes are alive, so who has asked for the tensor's number may ask again.
    """
    if getrefcount(lazy) > holders + 1 or (watched and lazy.has_id()):
        return True
    # The call keeps a weak reference of its own to each tensor that an operation made.
    return getweakrefcount(lazy) > (lazy._key >= 0)


def _calibrate(threshold: str, find: Callable[[list[Any]], list[int]]) -> None:
    """Sets a threshold to what `getrefcount` says, inside of `find`, of an object that only the list holds."""
    values = [object() for _ in range(8)]
    for count in range(20):
        globals()[threshold] = count
        if not find(values):
            return
    raise RuntimeError("reference counts do not tell who holds an object")


_UNREFERENCED = _UNREFERENCED_ITEM = 0
_calibrate("_UNREFERENCED", referenced)
_calibrate("_UNREFERENCED_ITEM", lambda values: _still_referenced(values, list(range(len(values)))))
