"""Assertion: a check that a segment assumes to pass, kept to be rerun on real values, so that it fails as in eager."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.launch.keras_error_context import Note
from tracer.faults import call, is_fault
from tracer.inputs import small
from tracer.lazy import LazyTensor, eager_constant
from tracer.location import Location, raise_at
from tracer.op import Const
from tracer.private import EagerTensor, is_resource_variable

_PLAIN = (int, float, bool, complex, bytes, np.ndarray)


class CannotDescribe(Exception):
    """Raised for an argument that cannot be stored; never leaves this module."""


class _ByIdentity:
    """An argument that is compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


class Assertion:
    """An assertion's function and arguments, with tensors as slots of the segment, like the slots of a step."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: Any, arguments: list[Any]) -> None:
        self.function = function
        self.arguments = arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Assertion) and other.function is self.function and other.arguments == self.arguments

    __hash__ = None  # type: ignore[assignment]

    def shown(self) -> list[Any]:
        """Returns what it takes beside the segment's tensors: constants as `Const`, eager tensors as they are."""
        return list(_shown(self.arguments))


def _shown(forms: list[Any]) -> Iterator[Any]:
    for form in forms:
        if isinstance(form, _ByIdentity):
            if isinstance(form.value, EagerTensor):
                yield form.value
        elif isinstance(form, tuple):
            if isinstance(form[0], Const):
                yield form[0]
            else:
                yield from _shown(form[1])


def fail(
    assertion: Assertion | None, real: list[Any], feeds: list[Any], location: Location, note: Note | None = None
) -> None:
    """Runs an assertion on a segment's real tensors; raises its error, with the note, as from the user's line."""
    if assertion is None:  # an interrupt came while it was being recorded
        return
    given = tuple([_filled(form, real, feeds) for form in assertion.arguments])
    try:
        call(assertion.function, given, {})
    except Exception as error:
        if is_fault(error):
            raise
        failure = (error if note is None else note.added_to(error, feeds)).with_traceback(None)
        if assertion.function.__module__.startswith("tensorflow."):  # its wrapper raises errors `from None`
            failure.__suppress_context__ |= tf.debugging.is_traceback_filtering_enabled()
    else:
        return
    try:
        raise_at(failure, location)
    finally:
        del failure  # else its traceback, and so all frames in it, would refer to itself


def described(value: Any, cursor: Any) -> Any:
    """Returns a form of an argument to keep until the segment has run, without lazy tensors.

    Raises `CannotDescribe` if there is none.
    """
    kind = type(value)
    if value is None or kind is str:
        return value
    if kind is LazyTensor:
        const = value._out.const
        if const is not None:
            place = None if value._value is None else cursor.place(value._value)
            return (const, value._out.spec) if place is None else -1 - place
        if value._value is None:
            number = value._key - cursor.base
            if not 0 <= number < cursor.step.end:
                raise CannotDescribe
            return number
        value = value._value
    if isinstance(value, EagerTensor):
        place = cursor.place(value)
        return _ByIdentity(value) if place is None else -1 - place
    if kind is list or kind is tuple:
        return kind, [described(v, cursor) for v in value]
    if (kind in _PLAIN or isinstance(value, np.generic)) and small(value):
        return Const(value)
    if kind is FunctionType or kind is np.ufunc or is_resource_variable(value):
        return _ByIdentity(value)
    raise CannotDescribe


def _filled(form: Any, real: list[Any], feeds: list[Any]) -> Any:
    """Returns the argument that `described` returned this form for."""
    if form is None or isinstance(form, str):
        return form
    if isinstance(form, int):
        return real[form] if form >= 0 else feeds[-1 - form]
    if isinstance(form, tuple):
        if isinstance(form[0], Const):
            return eager_constant(form[0].value, form[1])
        return form[0](_filled(item, real, feeds) for item in form[1])
    return form.value
