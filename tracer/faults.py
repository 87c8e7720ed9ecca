"""Faults: the runtime's own errors, distinguished from the program's by the frames they passed through.

An error is a fault if the runtime's own code raised it, or called a library that did. It is the program's if it comes
out of a function that merely does what the program asked for (marked `passes`), or has a class declared `meant`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, NoReturn, TypeVar

import tensorflow as tf

from tracer.errors import FailedTensor

_HERE = os.path.dirname(os.path.abspath(__file__))
OURS = (os.path.join(_HERE, ""), os.path.join(os.path.dirname(_HERE), "coexec", ""))

F = TypeVar("F", bound=Callable[..., Any])

_passing: set[CodeType] = set()
_meant: list[type[BaseException]] = [FailedTensor]


def passes(function: F) -> F:
    """Marks a function that calls the program, or TensorFlow on its behalf: errors out of it are the program's."""
    _passing.add(function.__code__)
    return function


def is_passing(code: CodeType) -> bool:
    """Returns whether this is the code of a function marked `passes`."""
    return code in _passing


def meant(kind: type[BaseException]) -> None:
    """Declares errors of this class the program's, wherever they are raised."""
    _meant.append(kind)


def is_fault(error: BaseException) -> bool:
    """Returns whether an error is the runtime's own."""
    if isinstance(error, tuple(_meant)) or not isinstance(error, Exception):
        return False
    innermost, at = None, error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename.startswith(OURS):
            innermost = at.tb_frame.f_code
        at = at.tb_next
    return innermost is not None and innermost not in _passing


def hide_frames(error: BaseException) -> None:
    """Takes the runtime's frames out of the traceback of a program's error, as TensorFlow does its own.

    A fault keeps them, and any error where the program has switched TensorFlow's filtering off.
    """
    if is_fault(error) or not tf.debugging.is_traceback_filtering_enabled():
        return
    kept, at = [], error.__traceback__
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith(OURS):
            kept.append(at)
        at = at.tb_next
    shown: TracebackType | None = None
    for at in reversed(kept):
        shown = TracebackType(shown, at.tb_frame, at.tb_lasti, at.tb_lineno)
    error.__traceback__ = shown


def absorbs(error: BaseException) -> bool:
    """Returns whether a call should continue after an error: if it is a fault and `COEXEC_DEBUG` is not set."""
    return is_fault(error) and os.environ.get("COEXEC_DEBUG", "0") in ("", "0")


@passes
def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function on the program's behalf."""
    return function(*args, **kwargs)


@passes
def reraise(error: BaseException) -> NoReturn:
    """Raises an error of the program's once more.

    Its traceback may have none of the frames left that it first came through (`hide_frames`, where a decorated function
    called another), so that whoever raised it would be taken for the one that failed.
    """
    raise error
