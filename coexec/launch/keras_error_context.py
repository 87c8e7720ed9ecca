"""Notes: what Keras adds to an error about the layer call that raised it, for errors raised after that call.

Eagerly, an operation that fails inside a layer's `call` raises through the layer, which adds to the message how it was
called. Followed, it fails when its segment runs. So what Keras would add is determined when the operation is issued. It
names tensors by shape and dtype only, so the text is made once and cached by what it depends on. On a path for any
size, a note has the places of tensors instead, and the text is made where the operation fails, of that call's shapes.
"""

from __future__ import annotations

import inspect
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import FrameType, FunctionType, MethodType
from typing import Any

import tensorflow as tf

from coexec.base.tuning import tuning
from tracer.cursor import Cursor
from tracer.graph import Step
from tracer.keras_packages import classes
from tracer.lazy import LazyTensor, Output, new_lazy
from tracer.location import is_entry
from tracer.private import EagerTensor
from tracer.sizes import settled
from tracer.spec import intern_spec

_HOLE = "\0"  # stands for the error's message
_SCALARS = frozenset({int, float, bool, complex, type(None)})


class _Unknown(Exception):
    """Raised for an argument whose text cannot be predicted; never leaves this module."""


class Note:
    """What Keras adds to an error's message, and what that depends on: a layer's `call` and its arguments."""

    __slots__ = ("_form", "_function", "_text")

    def __init__(self, function: Any, form: Any, text: tuple[str, str]) -> None:
        """`text`: what Keras writes before and after the message."""
        self._function = weakref.ref(function)
        self._form = form
        self._text = text

    def text(self, feeds: Sequence[Any]) -> tuple[str, str]:
        """Returns what Keras writes before and after the message in a call with these feeds."""
        return self._text

    def is_of(self, function: Any, form: Any) -> bool:
        """Returns whether this is the note for these."""
        return self._form == form and self._function() is function

    def added_to(self, failure: Exception, feeds: Sequence[Any]) -> Exception:
        """Returns the error that Keras would raise in place of this one; `feeds`: those of the segment that failed."""
        noted: Any
        before, after = self.text(feeds)
        if isinstance(failure, tf.errors.OpError):
            message = f"{before}{failure.message}{after}"
            noted = type(failure)(failure.node_def, failure.op, message, failure.error_code)
        else:
            message = f"{before}{failure.args[0] if failure.args else ''}{after}"
            try:
                noted = type(failure)(message)
            except TypeError:
                noted = RuntimeError(message)
        noted._keras_call_info_injected = True  # so that outer layers leave it alone
        noted.__suppress_context__ = True
        error: Exception = noted
        return error


class SizedNote(Note):
    """A note of an operation on a path for any size: what was given, with the places of tensors in the segment."""

    __slots__ = ("_given", "_inject")

    def __init__(self, function: Any, form: Any, text: tuple[str, str], given: dict[str, Any], inject: Any) -> None:
        super().__init__(function, form, text)
        self._given, self._inject = given, inject

    def text(self, feeds: Sequence[Any]) -> tuple[str, str]:
        """Returns what Keras writes before and after the message in a call with these feeds."""

        def tensor(place: Any) -> LazyTensor:
            if isinstance(place, Output):
                return new_lazy(settled(place, feeds), -1, None)
            enum, shape = (feeds[place]._datatype_enum(), feeds[place]._shape_tuple()) if type(place) is int else place
            return new_lazy(Output(intern_spec(enum, shape)), -1, None)

        args, kwargs = (_mapped(self._given[name], _Place, lambda v: tensor(v.of)) for name in ("args", "kwargs"))
        return _text({**self._given, "args": args, "kwargs": kwargs}, self._inject) or self._text


class _Place:
    """Stands in for a tensor: an output of the segment, a feed's number, or a dtype enum and shape."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of


def note_of(step: Step, notes: dict[Step, Note | None]) -> Note | None:
    """Returns the note for errors of this step; `notes`: those of this call that differ from the steps' own."""
    if step in notes:
        return notes[step]
    return step.notes[0] if step.notes else None


def take_note(notes: dict[Step, Any], step: Step, cursor: Cursor) -> bool:
    """Determines what Keras would add to an error of `step`, the operation being issued, to which `cursor` has moved.

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

        def place(tensor: Any) -> Any:
            return _place_of(tensor, cursor) if step.dynamic else _spec_of(tensor)

        try:
            form = given["object_name"], _form(given["args"], place), _form(given["kwargs"], place)
        except (_Unknown, ValueError):  # ValueError: of an integer with too many digits
            return False
        note = next((known for known in step.notes or () if known is not None and known.is_of(function, form)), None)
        if note is None:
            inject = classes.injecting[id(frame.f_code)]
            given = {**given, "signature": inspect.signature(given["fn"]), "name": given["fn"].__name__}
            text = _text(given, inject)
            if text is None:
                return False
            if step.dynamic:
                kept = {name: given[name] for name in ("signature", "name", "object_name")}
                for name in ("args", "kwargs"):
                    kept[name] = _mapped(given[name], _TENSORS, lambda v: _Place(place(v)))
                note = SizedNote(function, form, text, kept, inject)
            else:
                note = Note(function, form, text)
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


_TENSORS = LazyTensor, EagerTensor


def _spec_of(tensor: Any) -> Any:
    """Returns what Keras' text for a tensor depends on; raises `_Unknown` if that is not known yet."""
    if type(tensor) is EagerTensor:
        return tensor._datatype_enum(), tensor._shape_tuple()
    if tensor._out.spec.open:
        raise _Unknown
    return tensor._out.spec.enum, tensor._out.spec.shape


def _place_of(tensor: Any, cursor: Cursor) -> Any:
    """Returns the same on a path for any size: an output of the segment or a feed's number, as their shapes differ."""
    if type(tensor) is LazyTensor and tensor._key >= cursor.base:
        step: Step | None = cursor.step
        while step is not None and step.first > tensor._key - cursor.base:
            step = step.parent
        if step is not None:
            return step.outputs[tensor._key - cursor.base - step.first]
    feed = cursor.place(tensor._value if type(tensor) is LazyTensor else tensor)
    return _spec_of(tensor) if feed is None else feed


def _form(value: Any, place: Callable[[Any], Any], depth: int = 0) -> Any:
    """Returns what Keras' text for an argument depends on, by `place` of tensors; raises `_Unknown` for a `repr`."""
    kind = type(value)
    if kind in _TENSORS:
        return place(value)
    if kind in _SCALARS or ((kind is str or kind is bytes) and len(value) <= tuning.note_length):
        return repr(value)
    if depth < tuning.note_depth and (kind is list or kind is tuple):
        return kind, tuple([_form(v, place, depth + 1) for v in value])
    if depth < tuning.note_depth and kind is dict and all(type(name) is str for name in value):
        return kind, tuple([(name, _form(v, place, depth + 1)) for name, v in value.items()])
    raise _Unknown


def _mapped(value: Any, kinds: Any, function: Callable[[Any], Any]) -> Any:
    """Returns an argument that has a form with `function` applied to what is of these kinds."""
    if isinstance(value, kinds):
        return function(value)
    if type(value) is dict:
        return {name: _mapped(v, kinds, function) for name, v in value.items()}
    return type(value)([_mapped(v, kinds, function) for v in value]) if type(value) in (list, tuple) else value


def _text(given: dict[str, Any], inject: Any) -> tuple[str, str] | None:
    """Returns what Keras writes before and after a message; None if it fails.

    `given`: the arguments and the layer's name, of its frame's locals, and the name and signature of the function.
    """

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise tf.errors.InvalidArgumentError(None, None, _HOLE)

    failing.__signature__ = given["signature"]  # type: ignore[attr-defined]
    failing.__name__ = given["name"]
    try:
        inject(failing, given["object_name"])(*given["args"], **given["kwargs"])
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # a cycle that would keep the call's tensors alive
        before, hole, after = getattr(error, "message", "").partition(_HOLE)
        return (before, after) if hole else None
    return None
