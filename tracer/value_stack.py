"""Value stack: the operands of a frame's next instruction, as seen by a trace function at an opcode event.

Relies on CPython 3.11: the offsets of a frame's function and stack pointer, beside those of `frame_slots`.
`available()` checks them on a frame with known values. While a trace function runs, the stack pointer is stored.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import sys
from types import CodeType, FrameType
from typing import Any

from tracer import hooks
from tracer.frame_slots import FRAME, POINTER, SLOTS

_FUNCTION, _STACKTOP = 0, 64  # byte offsets in a frame

hooks.Hooks(
    __name__,
    "`sys.settrace` on the calling thread",
    "a frame whose values are known shows where the interpreter keeps them; not where another trace function is set",
    "`available` is asked for the first time",
)

_pointer = ctypes.c_void_p.from_address
_count = ctypes.c_int.from_address
_object = ctypes.py_object.from_address

NULL: Any = type("NULL", (), {"__slots__": (), "__repr__": lambda self: "NULL"})()


def top(frame: FrameType, depth: int = 0) -> Any:
    """Returns the value `depth` below the top of the stack; `NULL` if there is none."""
    inner = _pointer(id(frame) + FRAME).value or 0
    place = inner + SLOTS + POINTER * (_count(inner + _STACKTOP).value - 1 - depth)
    return _object(place).value if _pointer(place).value else NULL


def local(frame: FrameType, number: int) -> Any:
    """Returns the content of one of the frame's fast locals, such as a cell; `NULL` if it is unbound."""
    inner = _pointer(id(frame) + FRAME).value or 0
    place = inner + SLOTS + POINTER * number
    return _object(place).value if _pointer(place).value else NULL


def function_of_frame(frame: FrameType) -> Any:
    """Returns the function object that a frame runs."""
    return _object((_pointer(id(frame) + FRAME).value or 0) + _FUNCTION).value


@functools.lru_cache(maxsize=4096)
def instructions(code: CodeType) -> dict[int, tuple[str, Any, Any]]:
    """Returns the name, argument and argument value of each instruction, by the offset of its opcode event.

    An instruction with `EXTENDED_ARG`s has its event at the first of them.
    """
    found: dict[int, tuple[str, Any, Any]] = {}
    first: int | None = None
    for each in dis.get_instructions(code):
        if each.opname == "EXTENDED_ARG":
            first = each.offset if first is None else first
            continue
        found[each.offset if first is None else first] = each.opname, each.arg, each.argval
        first = None
    return found


@functools.cache
def available() -> bool:
    """Returns whether the stack can be read in this interpreter."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11):
        return False
    if sys.gettrace() is not None:
        return False
    probe: list[Any] = [object(), object()]
    seen: list[Any] = []

    def probed(one: Any, other: Any) -> Any:
        return one is other

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not probed.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and instructions(frame.f_code)[frame.f_lasti][0] == "IS_OP":
            seen.extend((top(frame), top(frame, 1), local(frame, 0), function_of_frame(frame)))
        return trace

    sys.settrace(trace)
    try:
        probed(*probe)
    finally:
        sys.settrace(None)
    known = [probe[1], probe[0], probe[0], probed]
    return len(seen) == 4 and all(one is other for one, other in zip(seen, known, strict=True))


