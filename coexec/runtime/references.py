"""References: who else holds a lazy tensor. Relies on CPython's reference counts."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from tracer.lazy import LazyTensor

getrefcount = sys.getrefcount


class Reference(weakref.ref):
    """A weak reference that is never shared with one of the user's."""

    __slots__ = ()


def referenced(values: list[Any]) -> list[int]:
    """Returns the numbers of the tensors that somebody but `values` holds; there is none where it has None."""
    return [i for i, value in enumerate(values) if getrefcount(value) > _UNREFERENCED and value is not None]


def is_known(lazy: LazyTensor, holders: int, watched: bool) -> bool:
    """Returns whether somebody else knows this tensor, beside the `holders` that the way here accounts for.

    `watched`: tapes are alive, so who has asked for the tensor's number may ask again.
    """
    if getrefcount(lazy) > holders + 1 or (watched and lazy.has_id()):
        return True
    # The call keeps a weak reference of its own to each tensor that an operation made.
    return weakref.getweakrefcount(lazy) > (lazy._key >= 0)


def _calibrate() -> int:
    """Measures what `getrefcount` says inside `referenced` of an object that only the list holds."""
    global _UNREFERENCED
    values = [object() for _ in range(8)]
    for count in range(20):
        _UNREFERENCED = count
        if not referenced(values):
            return count
    raise RuntimeError("reference counts do not tell who holds an object")


_UNREFERENCED = 0
_UNREFERENCED = _calibrate()
