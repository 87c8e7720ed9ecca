"""Tensor visits: how CPython 3.11's garbage collector visits eager tensors, without changing them.

A tensor's attributes are kept without a dict until someone asks for its `__dict__`, or sets one more than fit.
TensorFlow (2.21) has the collector ask for it, too. CPython 3.11 collects in the middle of making an object: if making
that dict begins a collection, the collector makes another one of the same values. It is nobody's, is never freed, and
points to freed memory once the tensor has ended; the next full collection looks there, and the process crashes. Any
program may meet that; one whose tensors' attributes are compared at each call, as here, is likelier to.

So eager tensors are visited as instances of their base class are, a class in Python: attributes without making a dict
of them. Their shape, handle data and context are not visited: a cycle through these is not collected.

Relies on the layout of `PyTypeObject` (`tp_traverse` is the 23rd pointer from the head), on CPython 3.11 only. Before,
tensors have a dict or none; from 3.12 on, nothing is collected while an object is made.
"""

from __future__ import annotations

import ctypes
import sys

from tracer import hooks
from tracer.private import EagerTensor, ops

_TP_TRAVERSE = 23 * ctypes.sizeof(ctypes.c_void_p)
_MANAGED_DICT = 1 << 4  # the flag of classes whose instances have no dict at first


def _slot(kind: type) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(id(kind) + _TP_TRAVERSE)


class _Visits(hooks.Hooks):
    """The replacement of the function by which the collector visits a class's instances."""

    def __init__(self, kind: type, base: type, what: str, why: str) -> None:
        super().__init__(__name__, what, why, hooks.PROCESS)
        self._kind, self._base, self._before = kind, base, _slot(kind).value

    def install(self) -> None:
        """Has instances visited as those of the base class, which must be written in Python."""
        _slot(self._kind).value = _slot(self._base).value

    def uninstall(self) -> None:
        """Has them visited as before."""
        _slot(self._kind).value = self._before


class _InPython:
    """A class whose instances are visited by CPython's own function for classes in Python."""


def is_needed() -> bool:
    """Returns whether TensorFlow's function for visiting tensors has to be replaced, and can be."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11):
        return False
    known = _slot(_InPython).value
    return (
        known is not None
        and bool(EagerTensor.__flags__ & _MANAGED_DICT)
        and _slot(object).value is None
        and _slot(list).value not in (None, known)
        and _slot(ops._EagerTensorBase).value == known
        and _slot(EagerTensor).value not in (None, known)
    )


_visits = _Visits(
    EagerTensor,
    ops._EagerTensorBase,
    "`tp_traverse` of `EagerTensor`, on CPython 3.11",
    "a collection that begins while a tensor's `__dict__` is made does not make a second one, which crashes later",
)


def visit_without_change() -> None:
    """Has the collector visit eager tensors without making dicts of their attributes, where it would."""
    if is_needed():
        _visits.install()
