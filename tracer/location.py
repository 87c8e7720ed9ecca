"""Location: where in the user's program an operation was issued."""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any, NamedTuple

import keras
import numpy
import tensorflow

from tracer.guards import is_guarded, start_of


class Frame(NamedTuple):
    """One user frame: the file, the function, the line, and the instruction's offset in the function."""

    file: str
    function: str
    line: int
    offset: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Location(NamedTuple):
    """The call-id stack (user frames, innermost first) and the iteration.

    The iteration counts how many times this very place has issued this very operation in the call before: it
    stands for the loop-id stack, and needs neither source nor a hook on jumps.
    """

    frames: tuple[Frame, ...]
    iteration: int

    def __str__(self) -> str:
        where = str(self.frames[0]) if self.frames else "outside of user code"
        return f"{where} (iteration {self.iteration})" if self.iteration else where


def _package_directory(module: Any) -> str:
    return os.path.dirname(os.path.abspath(module.__file__)) + os.sep


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_library_prefixes = [_package_directory(m) for m in (tensorflow, keras, numpy)] + [
    _HERE,
    os.path.join(os.path.dirname(os.path.dirname(_HERE)), "coexec", ""),
]

# By the code object's id: hashing a code object hashes its constants, which takes longer than the walk itself.
# The code object is kept in both so that its id stays its own.
_codes: dict[int, tuple[CodeType, bool]] = {}
_frames: dict[tuple[int, int], tuple[Frame, bool, CodeType]] = {}
# Of a library's code only this counts as a guard: Keras writes into an error which layer it came from.
_naming: set[int] = set()
_entries: set[int] = set()
MAX_CACHED = 20_000


def add_library(directory: str) -> None:
    """Makes the frames of the code in `directory` invisible to locations."""
    _library_prefixes.append(os.path.join(directory, ""))
    _forget()


def mark_entry(code: CodeType) -> None:
    """Makes the walk stop at frames that run `code`: what lies outside of it is not part of a location."""
    _entries.add(id(code))
    _codes[id(code)] = (code, False)


def is_entry(code: CodeType) -> bool:
    """Returns whether the walk stops at frames that run `code`."""
    return id(code) in _entries


def _forget() -> None:
    kept = {key: _codes[key] for key in _entries}
    _codes.clear()
    _frames.clear()
    _naming.clear()
    _codes.update(kept)


def is_user(code: CodeType) -> bool:
    """Returns whether frames of this code are part of locations: it belongs to none of the libraries."""
    found = _codes.get(id(code))
    if found is None:
        if len(_codes) > MAX_CACHED:
            _forget()
        name = code.co_filename
        user = not name.startswith("<frozen") and not any(name.startswith(p) for p in _library_prefixes)
        found = _codes[id(code)] = (code, user)
        if code.co_name == "error_handler" and name.endswith(os.path.join("src", "utils", "traceback_utils.py")):
            _naming.add(id(code))
    return found[1]


# What could happen to an exception on its way out: nothing, Keras notes which layer it came from, the user catches it.
FREE, NAMED, CAUGHT = range(3)


def call_stack() -> tuple[tuple[Frame, ...], int]:
    """Returns the running thread's user frames, and what could happen to an exception raised now.

    The frames are innermost first, up to the entry of the traced call.
    """
    stack = []
    guarded = FREE
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found = _codes.get(id(code))
        if found[1] if found is not None else is_user(code):
            key = (id(code), frame.f_lasti)
            known = _frames.get(key)
            if known is None:
                name = getattr(code, "co_qualname", code.co_name)
                place = Frame(code.co_filename, name, frame.f_lineno or 0, start_of(code, frame.f_lasti))
                known = _frames[key] = (place, is_guarded(code, frame.f_lasti, frame.f_globals), code)
            stack.append(known[0])
            if known[1]:
                guarded = CAUGHT
        elif id(code) in _naming:
            guarded = max(guarded, NAMED)
        elif id(code) in _entries:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(stack), guarded


def place_of() -> str:
    """Returns where user code is now, for people."""
    frames, _ = call_stack()
    return str(Location(frames, 0))


def raise_at(error: BaseException, location: Location) -> None:
    """Raises `error` with the user's line in its traceback: it was issued there, and fails only now."""
    if not location.frames:
        raise error
    place = location.frames[0]
    code = compile("\n" * (place.line - 1) + "raise error", place.file, "exec")
    exec(code.replace(co_name=place.function.rpartition(".")[2]), {"error": error})
