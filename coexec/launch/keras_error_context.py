"""Notes: what Keras adds to an error about the layer call that raised it, for errors raised after that call.

Eagerly, an operation that fails inside a layer's `call` raises through the layer, which adds to the message how it was
called. Followed, it fails when its segment runs. So what Keras would add is determined when the operation is issued. It
names tensors by shape and dtype only, so the text is made once and cached by what it depends on.
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
from tracer.keras_packages import classes
from tracer.lazy import LazyTensor
from tracer.location import is_entry
from tracer.private import EagerTensor

_HOLE = "\0"  # stands for the error's message
_SCALARS = frozenset({int, float, bool, complex, type(None)})


class _Unknown(Exception):
    """Raised for an argument whose text cannot be predicted; never leaves this module."""


class Note:
    """What Keras adds to an error's message, and what that depends on: a layer's `call` and its arguments."""

    __slots__ = ("_after", "_before", "_form", "_function")

    def __init__(self, function: Any, form: Any, before: str, after: str) -> None:
        self._function = weakref.ref(function)
        self._form = form
        self._before, self._after = before, after

    def is_of(self, function: Any, form: Any) -> bool:
        """Returns whether this is the note for these."""
        return self._form == form and self._function() is function

    def added_to(self, failure: Exception) -> Exception:
        """Returns the error that Keras would raise in place of this one."""
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
        noted._keras_call_info_injected = True  # so that outer layers leave it alone
        noted.__suppress_context__ = True
        error: Exception = noted
        return error


def note_of(step: Step, notes: dict[Step, Note | None]) -> Note | None:
    """Returns the note for errors of this step; `notes`: those of this call that differ from the steps' own."""
    if step in notes:
        return notes[step]
    return step.notes[0] if step.notes else None


def take_note(notes: dict[Step, Any], step: Step) -> bool:
    """Determines what Keras would add to an error of `step`, the operation being issued.

    Stores it in the step, or in `notes` (of the running segment) if it differs from the step's.

    Returns False if that cannot be known beforehand, as it needs the `repr` of an argument.
    """
    frame = _layer_call()
    note = None
    if frame is not None:
        given = frame.f_locals
        function = given["fn"].__func__ if type(given["fn"]) is MethodType else given["fn"]
        if type(function) is not FunctionType and not isinstance(function, tf.types.experimental.PolymorphicFunction):
            return False
        try:
            form = given["object_name"], _form(given["args"]), _form(given["kwargs"])
        except (_Unknown, ValueError):  # ValueError: of an integer with too many digits
            return False
        note = next((known for known in step.notes or () if known is not None and known.is_of(function, form)), None)
        if note is None:
            text = _text(given, classes.injecting[id(frame.f_code)])
            if text is None:
                return False
            note = Note(function, form, *text)
            if step.notes and len(step.notes) < tuning.max_notes:
                step.notes.append(note)
    if step.notes is None:
        step.notes = [note]  # the first is the default for all calls
    elif note is not step.notes[0]:
        notes[step] = note
    return True


def _layer_call() -> FrameType | None:
    """Returns the frame in which Keras would annotate an error raised now, that of the innermost layer; or None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_entry(frame.f_code):
        if id(frame.f_code) in classes.injecting:
            return frame
        frame = frame.f_back
    return None


def _form(value: Any, depth: int = 0) -> Any:
    """Returns what Keras' text for an argument depends on; raises `_Unknown` if that is its `repr`."""
    kind = type(value)
    if kind is LazyTensor:
        if value._out.spec.open:
            raise _Unknown
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


def _text(given: dict[str, Any], inject: Any) -> tuple[str, str] | None:
    """Returns what Keras writes before and after a message, given its frame's locals; None if it fails."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise tf.errors.InvalidArgumentError(None, None, _HOLE)

    failing.__wrapped__ = given["fn"]  # type: ignore[attr-defined]  # for the signature
    failing.__name__ = given["fn"].__name__
    try:
        inject(failing, given["object_name"])(*given["args"], **given["kwargs"])
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # a cycle that would keep the call's tensors alive
        before, hole, after = getattr(error, "message", "").partition(_HOLE)
        return (before, after) if hole else None
    return None
