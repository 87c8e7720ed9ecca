"""Recursion without end: its error says what it says eagerly, though it is the runtime's Python that gets too deep."""

from __future__ import annotations

import os

from tracer.effects import is_of_the_standard_library
from tracer.location import is_user

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(os.path.join(_ROOT, package, "") for package in ("coexec", "tracer"))
_EXCEEDED = "maximum recursion depth exceeded"


def reword(error: RecursionError) -> None:
    """Gives an error eager's words, if it was the runtime's own Python that went too deep.

    Python says in them what it was about to do. Here that may be anything, a comparison, say; where TensorFlow's Python
    ends, it calls into C++.
    """
    mine = False
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if code.co_filename.startswith(_OWN):
            mine = True
        elif is_user(code) and not is_of_the_standard_library(frame.tb_frame):
            mine = False
        frame = frame.tb_next
    if mine and str(error).startswith(_EXCEEDED):
        error.args = (f"{_EXCEEDED} while calling a Python object",)
