"""Frame slots: the memory of a running frame, which holds its variables and, behind them, its value stack.

Relies on the layout of frames in CPython 3.11 to 3.13, which is tested at import; with any other layout, `READABLE` is
false, and no other function of this file may be called.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import sys
from collections.abc import Iterator
from types import BuiltinMethodType, CellType, CodeType, FrameType, MethodType
from typing import Any

FRAME, SLOTS = 24, 72  # byte offsets: of the frame's address in a frame object, of the variables and stack in a frame
POINTER = ctypes.sizeof(ctypes.c_void_p)
_METHODS = frozenset({id(MethodType), id(BuiltinMethodType)})
_MOST_REFERENCES = 1 << 30  # more is no count, but what the allocator or another object keeps there

_word = ctypes.c_void_p.from_address


def variables_of(code: CodeType) -> int:
    """Returns the number of slots of a frame's variables, which precede its value stack."""
    return len({*code.co_varnames, *code.co_cellvars}) + len(code.co_freevars)


def address_of(frame: FrameType, place: int) -> int:
    """Returns the address of the object in a slot; 0 for a variable that is unbound."""
    return _slot(frame, place).value or 0


def item_of(frame: FrameType, place: int) -> Any:
    """Returns the object in a slot; the slot must hold one."""
    return ctypes.cast(address_of(frame, place), ctypes.py_object).value


def method_of(frame: FrameType, place: int) -> MethodType | BuiltinMethodType | None:
    """Returns the bound method in a slot of the value stack; None if what is there is no such method that is alive.

    A frame that an error leaves drops its operands one by one, and what is freed by that may run code, a generator's
    cleanup or a weak reference's callback. The frame's instruction does not show it, nor do its slots: those dropped
    keep their addresses. So the memory is looked at before it is taken for an object; freed, its reference count is 0.
    """
    address = address_of(frame, place)
    if not address or _word(address + POINTER).value not in _METHODS:
        return None
    return item_of(frame, place) if 0 < (_word(address).value or 0) <= _MOST_REFERENCES else None


def variable_of(frame: FrameType, name: str) -> Any:
    """Returns the value of one of a frame's variables; raises `KeyError` if it is unbound.

    Leaves nothing behind: up to CPython 3.12, the dict that `f_locals` gives stays in the frame, and keeps all values.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return frame.f_locals[name]  # its namespace itself
    names = list(dict.fromkeys((*code.co_varnames, *code.co_cellvars, *code.co_freevars)))
    if name not in names or not address_of(frame, names.index(name)):
        raise KeyError(name)
    value = item_of(frame, names.index(name))
    if isinstance(value, CellType) and (name in code.co_cellvars or name in code.co_freevars):
        try:
            return value.cell_contents
        except ValueError:
            raise KeyError(name) from None
    return value


@contextlib.contextmanager
def jumping(frame: FrameType) -> Iterator[None]:
    """Has a write to `f_lineno` leave unbound variables unbound.

    From CPython 3.12 on, it binds them to None, with a warning. So they are while it is made: None is immortal there,
    and needs no reference counts.
    """
    unbound: list[ctypes.c_void_p] = []
    if sys.version_info >= (3, 12):
        unbound = [slot for n in range(variables_of(frame.f_code)) if not (slot := _slot(frame, n)).value]
    try:
        for slot in unbound:
            slot.value = id(None)
        yield
    finally:
        for slot in unbound:
            slot.value = None


def _slot(frame: FrameType, place: int) -> ctypes.c_void_p:
    start = _word(id(frame) + FRAME).value or 0
    return _word(start + SLOTS + place * POINTER)


def _try_out() -> bool:
    """Returns whether variables and the value stack are where they should be; dereferences no object found there."""

    def left(*_: Any) -> None: ...

    class Leaves:
        def __get__(self, *_: Any) -> Any:
            return left

    class Manager:
        __exit__ = Leaves()

        def __enter__(self) -> None: ...

    cell = 0

    def inside(place: int) -> bool:
        with Manager():
            for _ in (cell,):
                with Manager():
                    frame = sys._getframe()
                    names, first = frame.f_code.co_varnames, variables_of(frame.f_code)
                    if address_of(frame, names.index("place")) != id(place) or address_of(frame, names.index("later")):
                        return False
                    return [address_of(frame, first + n) == id(left) for n in range(3)] == [True, False, True]
        later = place
        return bool(later)

    return sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 13) and inside(0)


READABLE = _try_out()
