"""Step ranges: the steps of a segment between two places."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracer.cursor import Cursor
from tracer.graph import CONST, LIST, Step
from tracer.lazy import LazyTensor, Output
from tracer.location import PASSED
from tracer.op import Const, array_in


def steps_between(start: Step, end: Step) -> list[Step] | None:
    """Returns the steps after `start` up to `end`, in order; None if `start` is not an ancestor."""
    steps = []
    step: Step | None = end
    while step is not None and step is not start:
        steps.append(step)
        step = step.parent
    return None if step is None else steps[::-1]


def slots_of(step: Step) -> list[int]:
    """Returns the slots of a step's inputs, including those in lists, excluding constants."""
    slots = [slot for slot in step.slots if slot not in (CONST, LIST)]
    for listed, _ in step.lists.values():
        slots += [slot for slot in listed if slot != CONST]
    return slots


def constants_of(step: Step) -> list[Const]:
    """Returns the constants among a step's inputs, including those in lists."""
    return [*step.consts.values(), *(const for _, consts in step.lists.values() for const in consts.values())]


def slot_before(start: Step, value: Any, cursor: Cursor) -> int | None:
    """Returns the slot that an argument had in the running segment up to `start`; None if it had none."""
    if type(value) is LazyTensor and value._value is None and value._out.const is None:
        return int(value._key - cursor.base)
    place = cursor.place(value)
    return -1 - place if place is not None and place < start.external else None


def asks(steps: list[Step]) -> bool:
    """Returns whether one of them may fail inside a manager that has let errors pass so far."""
    return any(step.node.guarded == PASSED and step.risky is not False for step in steps if step.node)


def is_fed_the_same(before: list[Step], now: list[Step], feeds: Sequence[Any]) -> bool:
    """Returns whether operations are those of before, but that constants have become feeds of the same values.

    That is so once another call has given another value at their places.
    """

    def same(one: Step, other: Step) -> bool:
        if one.node is not other.node or len(one.slots) != len(other.slots) or one.lists or other.lists:
            return False
        for k, (known, slot) in enumerate(zip(one.slots, other.slots, strict=True)):
            if known == CONST == slot:
                fits = one.consts[k] == other.consts[k]
            elif known == CONST:
                fits = CONST < slot < 0 and gives(array_in(feeds[-1 - slot]), one.consts[k])
            else:
                fits = known == slot or (CONST < known < 0 and CONST < slot < 0)  # feeds are compared elsewhere
            if not fits:
                return False
        return True

    def gives(fed: Any, const: Const) -> bool:
        return Const(fed) == Const(np.asarray(const.value).astype(fed.dtype))  # the Python number became a tensor

    return len(before) == len(now) and all(map(same, before, now))


class Outputs:
    """The outputs of a segment up to the end of a range, by number.

    Looked up by bisection: a table per region would take more memory than the segment if it has many regions.
    """

    __slots__ = ("_firsts", "_start", "_steps")

    def __init__(self, start: Step, steps: list[Step]) -> None:
        self._start, self._steps = start, steps
        self._firsts = [step.first for step in steps]

    def __getitem__(self, number: int) -> Output:
        step = self._start
        if number >= step.end:
            step = self._steps[bisect.bisect(self._firsts, number) - 1]
        while step.first > number:
            assert step.parent is not None
            step = step.parent
        return step.outputs[number - step.first]
