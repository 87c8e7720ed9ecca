"""Assertions: checks of values, taken to hold until the segment that they are part of is carried out.

Eagerly each of TensorFlow's own (`tf.debugging.assert_less`, `tf.debugging.Assert`, ...), and each `assert`, reads
whether its condition holds, which would be a launch for each. Here the condition is noted as an operation that gives
nothing and may fail. Where it does not hold, no later write is done, and the assertion is made once more, on real
values: its error is eager's.
"""

from __future__ import annotations

from types import FrameType, FunctionType
from typing import Any

import numpy as np

from coexec.lowering.failures import ASSERTION
from coexec.runtime.notes import Note
from coexec.runtime.pending import is_urgent
from coexec.runtime.structures import issued
from tracer.block import FLAG
from tracer.errors import Refused
from tracer.inputs import small
from tracer.intercept import answering_handler
from tracer.lazy import LazyTensor, eager_constant
from tracer.location import Location, raise_at
from tracer.op import Const
from tracer.private import EagerTensor, binary_assert, is_resource_variable, plain_assert

# What asks for the truth of a condition, and raises without it, by its code.
ASSERTIONS: dict[Any, Any] = {function.__code__: function for function in (binary_assert, plain_assert)}

_PLAIN = (int, float, bool, complex, bytes, np.ndarray)


class _Unknown(Exception):
    """An argument that cannot be kept for later; never leaves this module."""


class _Same:
    """An object that is what it is, as an argument."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


class Assertion:
    """What a call of an assertion was given, tensors by their place in the segment: as slots are in a step."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: Any, arguments: list[Any]) -> None:
        self.function = function
        self.arguments = arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Assertion) and other.function is self.function and other.arguments == self.arguments

    __hash__ = None  # type: ignore[assignment]


def assume(run: Any, condition: LazyTensor, frame: FrameType) -> bool:
    """Takes it that an assertion holds, in whose frame its condition is asked for; returns whether that can be done.

    Raises what it raises eagerly if the program could catch that here, and it does not hold.
    """

    def described(cursor: Any) -> Assertion:
        given, code = frame.f_locals, frame.f_code
        if given.get("condition") is not condition:
            raise _Unknown
        arguments = [_described(given[name], cursor) for name in code.co_varnames[: code.co_argcount]]
        return Assertion(ASSERTIONS[code], arguments)

    return _noted(run, condition, described)


def assume_statement(run: Any, condition: LazyTensor, message: list[str]) -> bool:
    """The same of an `assert` statement, with its message, if it has one."""

    def described(cursor: Any) -> Assertion:
        return Assertion(_assert, [_described(condition, cursor), _described(message, cursor)])

    return _noted(run, condition, described)


def _assert(condition: Any, message: list[str]) -> None:
    if not condition:
        raise AssertionError(*message)


def _noted(run: Any, condition: LazyTensor, described: Any) -> bool:
    handler: Any = answering_handler()
    if run.recorder is not None or condition._out.spec is not FLAG or getattr(handler, "behind", handler) is not run:
        return False
    with run.lock:
        cursor = run.cursor
        if run._is_no_step(ASSERTION, ()) or condition._value is not None:
            return False
        if not 0 <= condition._key - cursor.base < cursor.step.end:
            return False
        try:
            assertion = described(cursor)
            step = issued(run, ASSERTION, (), (condition,), [])
        except (_Unknown, Refused):
            return False
        if step.assertion is None:
            step.assertion = assertion
        elif step.assertion != assertion:
            run.assertions[step] = assertion
        if step.risky is not False and is_urgent(run, step):
            run._launch_behind(step)
    return True


def fail(
    assertion: Assertion | None, real: list[Any], feeds: list[Any], location: Location, note: Note | None = None
) -> None:
    """Makes an assertion on the real tensors of a segment; raises its error, with a note, as from the user's line."""
    if assertion is None:  # an interrupt came as it was made
        return
    try:
        assertion.function(*[_filled(form, real, feeds) for form in assertion.arguments])
    except Exception as error:
        failure = (error if note is None else note.added_to(error)).with_traceback(None)
    else:
        return
    raise_at(failure, location)


def _described(value: Any, cursor: Any) -> Any:
    """Returns what stands for an argument until the segment is carried out: no tensor that is still to come."""
    kind = type(value)
    if value is None or kind is str:
        return value
    if kind is LazyTensor:
        const = value._out.const
        if const is not None:
            return const, value._out.spec
        if value._value is None:
            number = value._key - cursor.base
            if not 0 <= number < cursor.step.end:
                raise _Unknown
            return number
        value = value._value
    if isinstance(value, EagerTensor):
        return next((-1 - k for k, known in enumerate(cursor.externals) if known is value), None) or _Same(value)
    if kind is list or kind is tuple:
        return kind, [_described(v, cursor) for v in value]
    if (kind in _PLAIN or isinstance(value, np.generic)) and small(value):
        return Const(value)
    if kind is FunctionType or kind is np.ufunc or is_resource_variable(value):
        return _Same(value)
    raise _Unknown


def _filled(form: Any, real: list[Any], feeds: list[Any]) -> Any:
    """Returns the argument that `_described` has described."""
    if form is None or isinstance(form, str):
        return form
    if isinstance(form, int):
        return real[form] if form >= 0 else feeds[-1 - form]
    if isinstance(form, tuple):
        if isinstance(form[0], Const):
            return eager_constant(form[0].value, form[1])
        return form[0](_filled(item, real, feeds) for item in form[1])
    return form.value
