"""Notes: what Keras writes into an error about the layer call that it came from, where that call is over by then.

Eagerly, an operation that fails inside of a layer's `call` raises through the layer, which adds to the message how it
was called. Followed, it fails when its segment is carried out. So what Keras would add is found when the operation is
issued. It names tensors by shape and dtype alone: the text is made once, and what it follows from is compared.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from types import FrameType, FunctionType, MethodType
from typing import Any

import tensorflow as tf

from coexec.base.tuning import tuning
from tracer.graph import Step
from tracer.lazy import LazyTensor
from tracer.location import is_entry
from tracer.private import EagerTensor, inject_argument_info, injecting_code

_HOLE = "\0"  # where the message of the error goes
_SCALARS = frozenset({int, float, bool, complex, type(None)})


class _Unknown(Exception):
    """An argument that Keras would write down in words of its own; never leaves this module."""


class Note:
    """What Keras adds to the message of an error, and what that follows from: a layer's `call`, and its arguments."""

    __slots__ = ("_after", "_before", "_form", "_function")

    def __init__(self, function: Any, form: Any, before: str, after: str) -> None:
        self._function = weakref.ref(function)
        self._form = form
        self._before, self._after = before, after

    def is_of(self, function: Any, form: Any) -> bool:
        """Returns whether it is what Keras adds for these."""
        return self._form == form and self._function() is function

    def added_to(self, failure: Exception) -> Exception:
        """Returns the error that Keras makes of this one."""
        noted: Any
        if isinstance(failure, tf.errors.OpError):
            message = f"{self._before}{failure.message}{self._after}"
            noted = type(failure)(failure.node_def, failure.op, message, failure.error_code)
        else:
            message = f"{self._before}{failure.args[0] if failure.args else ''}{self._after}"
            try:
                noted = type(failure)(message)
            except TypeError:
                noted = RuntimeError(message)
        noted._keras_call_info_injected = True  # layers further out leave it as it is
        noted.__suppress_context__ = True
        error: Exception = noted
        return error


def note_of(step: Step, notes: dict[Step, Note | None]) -> Note | None:
    """Returns what Keras adds to an error of this step; `notes`: where that is something else in this call."""
    if step in notes:
        return notes[step]
    return step.notes[0] if step.notes else None


def take_note(notes: dict[Step, Any], step: Step) -> bool:
    """Finds what Keras would write into an error of the operation that is issued now, which is `step`.

    It is kept with the step; in `notes`, those of the running segment, where it differs from that.

    Returns False if that cannot be told beforehand: an argument would be asked for its `repr`.
    """
    frame = _layer_call()
    note = None
    if frame is not None:
        given = frame.f_locals
        function = given["fn"].__func__ if type(given["fn"]) is MethodType else given["fn"]
        if type(function) is not FunctionType:
            return False
        try:
            form = given["object_name"], _form(given["args"]), _form(given["kwargs"])
        except (_Unknown, ValueError):  # of an integer with too many digits
            return False
        note = next((known for known in step.notes or () if known is not None and known.is_of(function, form)), None)
        if note is None:
            text = _text(given)
            if text is None:
                return False
            note = Note(function, form, *text)
            if step.notes and len(step.notes) < tuning.max_notes:
                step.notes.append(note)
    if step.notes is None:
        step.notes = [note]  # the first is what it is unless a call says otherwise
    elif note is not step.notes[0]:
        notes[step] = note
    return True


def _layer_call() -> FrameType | None:
    """Returns the frame in which Keras would note an error of what is issued now: that of the innermost layer."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_entry(frame.f_code):
        if frame.f_code is injecting_code:
            return frame
        frame = frame.f_back
    return None


def _form(value: Any, depth: int = 0) -> Any:
    """Returns what Keras' words for an argument follow from."""
    kind = type(value)
    if kind is LazyTensor:
        return value._out.spec.enum, value._out.spec.shape
    if kind is EagerTensor:
        return value._datatype_enum(), value._shape_tuple()
    if kind in _SCALARS or ((kind is str or kind is bytes) and len(value) <= tuning.note_length):
        return repr(value)
    if depth < tuning.note_depth and (kind is list or kind is tuple):
        return kind, tuple([_form(v, depth + 1) for v in value])
    if depth < tuning.note_depth and kind is dict and all(type(name) is str for name in value):
        return kind, tuple([(name, _form(v, depth + 1)) for name, v in value.items()])
    raise _Unknown


def _text(given: dict[str, Any]) -> tuple[str, str] | None:
    """Returns what Keras writes before and behind a message, from what its frame holds; None if it cannot."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise tf.errors.InvalidArgumentError(None, None, _HOLE)

    failing.__wrapped__ = given["fn"]  # type: ignore[attr-defined]  # whose signature it is
    failing.__name__ = given["fn"].__name__
    try:
        inject_argument_info(failing, given["object_name"])(*given["args"], **given["kwargs"])
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they are a cycle, and would hold the call's tensors
        before, hole, after = getattr(error, "message", "").partition(_HOLE)
        return (before, after) if hole else None
    return None
