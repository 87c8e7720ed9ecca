"""Assertions: checks of values, assumed to pass until the segment that they are part of runs.

Eagerly each of TensorFlow's own (`tf.debugging.assert_less`, `tf.debugging.Assert`, ...), and each `assert`, reads the
value of its condition, which would cost a launch each. Here the condition is recorded as an operation without outputs
that may fail. If it does, no later write is performed, and the assertion is rerun on real values: its error is eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from coexec.follow.call_state import CallState
from coexec.follow.flush import admit, launch_behind, settle_risk
from coexec.follow.synthetic_ops import next_step
from coexec.follow.unwatched import answers
from coexec.launch.assertion import Assertion, CannotDescribe, described
from coexec.lowering.op_failures import ASSERTION
from tracer.block import FLAG
from tracer.cursor import Cursor
from tracer.errors import Refused
from tracer.faults import passes
from tracer.intercept import answering_handler
from tracer.lazy import LazyTensor
from tracer.private import binary_assert, plain_assert

# TensorFlow's functions that test a condition and raise if it is false, by their code.
ASSERTIONS: dict[Any, Any] = {function.__code__: function for function in (binary_assert, plain_assert)}


def assume(run: CallState, condition: LazyTensor, frame: FrameType) -> bool:
    """Assumes that the assertion running in `frame` passes; returns False if that is impossible.

    If the program could catch its error here, runs it now, and raises what it raises eagerly.
    """

    def describe(cursor: Cursor) -> Assertion:
        given, code = frame.f_locals, frame.f_code
        if given.get("condition") is not condition:
            raise CannotDescribe
        arguments = [described(given[name], cursor) for name in code.co_varnames[: code.co_argcount]]
        return Assertion(ASSERTIONS[code], arguments)

    return _noted(run, condition, describe)


def assume_statement(run: CallState, condition: LazyTensor, message: list[str]) -> bool:
    """The same for an `assert` statement, with its message, if any."""

    def describe(cursor: Cursor) -> Assertion:
        return Assertion(_assert, [described(condition, cursor), described(message, cursor)])

    return _noted(run, condition, describe)


@passes
def _assert(condition: Any, message: list[str]) -> None:
    if not condition:
        raise AssertionError(*message)


def _noted(run: CallState, condition: LazyTensor, describe: Callable[[Cursor], Assertion]) -> bool:
    """Makes an assertion the next operation of the call; returns False if that is impossible."""
    if run.recorder is not None or condition._out.spec is not FLAG or not answers(answering_handler(), run):
        return False
    with run.lock:
        cursor = run.cursor
        if not admit(run, ASSERTION, ()) or condition._value is not None:
            return False
        if not 0 <= condition._key - cursor.base < cursor.step.end:
            return False
        try:
            assertion = describe(cursor)
            step = next_step(cursor, ASSERTION, (), (condition,), [])
        except (CannotDescribe, Refused):
            return False
        if step.assertion is None:
            step.assertion = assertion
        elif step.assertion != assertion:
            run.assertions[step] = assertion
        if step.risky is not False and settle_risk(run, step):
            launch_behind(run, step)
    return True
