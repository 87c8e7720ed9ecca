"""Synthetic operations: operations that the program did not issue, inserted as the next ones of a followed call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coexec.follow.device_control import FollowedCall
from tracer.block import LOOP, STRUCTURES, steps_of
from tracer.cursor import Cursor
from tracer.errors import Refused
from tracer.graph import Step, Variant
from tracer.lazy import LazyTensor, Output
from tracer.location import Location, call_stack
from tracer.spec import Spec, spec_of


def read(run: FollowedCall, handle: Any, held: Spec) -> LazyTensor:
    """Reads a variable that holds a tensor of a spec, as the next operation of a followed call."""
    return issue(run, "ReadVariableOp", ("dtype", held.enum), (handle,), [held])[0]


def issue(
    run: FollowedCall, op: str, attrs: tuple[Any, ...], inputs: Sequence[Any], specs: list[Any]
) -> list[LazyTensor]:
    """Inserts an operation as the next one of a followed call; returns its lazy tensors.

    Raises `Refused` if the cursor does not accept it.
    """
    with run.lock:
        if run.flight is not None:
            run.flush()
        step = next_step(run.cursor, op, attrs, tuple(inputs), specs)
        step.risky = False  # a loop stops before a failing iteration, and functions that may fail are not inlined
        return run.answer(step)  # in the order of `specs`: none is a list


def next_step(cursor: Cursor, op: str, attrs: tuple[Any, ...], inputs: tuple[Any, ...], specs: list[Any]) -> Step:
    """Moves the cursor over an operation that the program did not issue, or raises `Refused`; needs the call's lock."""
    if cursor.step.dynamic:
        raise Refused("its path is for any size")
    step = cursor.advance(op, inputs, attrs)
    if step is None:
        frames, guarded = call_stack()
        location = Location(frames, cursor.counts()[frames, op])
        node = cursor.graph.add(op, "execute", attrs, location)
        node.guarded = max(node.guarded, guarded)
        node.inputs = node.inputs or [frozenset()] * len(inputs)
        key = tuple(v._out.spec if type(v) is LazyTensor else spec_of(v) for v in inputs)
        if key not in node.variants:
            outputs = tuple(Output(spec, None, node) for spec in specs)
            node.variants[key] = Variant(key, outputs, list(range(len(specs))))
        step = cursor.adopt("execute", op, inputs, attrs, ())
        if step is None:
            raise Refused(f"it cannot be followed: {cursor.mismatch}")
        if op in STRUCTURES:  # a loop is always worth a launch
            step.live += max(len(steps_of(step)), 8 if op == LOOP else 0)
    if step.host:  # it would not be part of a segment
        raise Refused("it has been traced in too many ways")
    return step
