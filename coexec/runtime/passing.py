"""Passing: how Python is led past what the device has done: a running function goes on somewhere, with variables.

Relies on what debuggers use: the local trace function of a frame, which hears of each line that the frame comes to, may
set the frame's line there, and its variables.
"""

from __future__ import annotations

import ctypes
import sys
from types import FrameType
from typing import Any

from coexec.runtime.callers import least
from tracer.location import is_user


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Returns the variables of a running function."""
    variables = frame.f_locals
    found = dict(variables)
    if _COPIED:
        variables.clear()
    return found


def set_variables(frame: FrameType, values: dict[str, Any]) -> None:
    """Sets local variables of a running function; those that are shared with others must not be among them."""
    variables = frame.f_locals
    if not _COPIED:
        variables.update(values)
        return
    variables.clear()  # only what is there is written back: the others are what they are by now
    variables.update(values)
    _write_back(frame, 0)
    variables.clear()


_COPIED = sys.version_info < (3, 13)  # the dict is a copy, which the frame keeps and all that is in it


_write_back = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_int)(("PyFrame_LocalsToFast", ctypes.pythonapi))


class Passage:
    """The frames that are on their way past a statement, and what they are told if they ask on that way."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[Any, bool, Any]] = {}  # by the id of the frame: who may ask, what they are told

    def answer(self, frame: FrameType, site: Any, decision: Any) -> bool | None:
        """Returns what a frame is told that asks on its way, or on that of one that has called it; None if on none.

        What is called there has been written down and does nothing but compute; nothing of it is kept.
        """
        if not self.answers or sys.gettrace() is not _nothing:
            return None
        found = self.answers.get(id(frame))
        if found is not None:
            return found[1] if found[0] is site else None
        called = set()
        at: FrameType | None = frame
        while at is not None and id(at) not in self.answers:
            if is_user(at.f_code):
                called.add(at.f_code)
            at = at.f_back
        if at is None or not called.issubset(self.answers[id(at)][2]):
            return None
        return least(decision, self.answers[id(at)][2])

    def lead(
        self, frame: FrameType, site: Any, answer: bool, lines: range = range(0), line: int | None = None,
        values: dict[str, Any] | None = None, called: Any = (),
    ) -> bool:  # fmt: skip
        """Returns `answer`, as all that is asked at `site` until the frame comes to a line that is not in `lines`.

        There its variables are set, and it goes on at `line`. What functions ask of this code that are `called` until
        then is answered so that they end soon.
        """
        before = frame.f_trace

        def tracing(at: FrameType, event: str, _: Any) -> Any:
            if event == "line" and at.f_lineno not in lines:
                try:
                    if line is not None:
                        at.f_lineno = line  # type: ignore[misc]  # only while a line is traced
                    if values:
                        at.f_locals.update(values)  # written back behind this call
                finally:
                    end()
                return None
            if event in ("exception", "return"):  # an interrupt, say: the statement does not come to its end
                end()
                return None
            return tracing

        def end() -> None:
            sys.settrace(None)
            frame.f_trace = before
            self.answers.pop(id(frame), None)

        self.answers[id(frame)] = site, answer, called
        frame.f_trace = tracing
        sys.settrace(_nothing)
        return answer


def _nothing(*_: Any) -> None:
    """Traces no other function."""
