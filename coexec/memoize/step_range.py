"""Stretches: the steps of a segment between two places."""

from __future__ import annotations

import bisect

from tracer.graph import CONST, LIST, Step
from tracer.lazy import Output
from tracer.op import Const


def steps_between(start: Step, end: Step) -> list[Step] | None:
    """Returns the steps behind `start` up to `end`, in order; None if there is no way."""
    steps = []
    step: Step | None = end
    while step is not None and step is not start:
        steps.append(step)
        step = step.parent
    return None if step is None else steps[::-1]


def slots_of(step: Step) -> list[int]:
    """Returns where the inputs of a step come from, those in lists included; constants excluded."""
    slots = [slot for slot in step.slots if slot not in (CONST, LIST)]
    for listed, _ in step.lists.values():
        slots += [slot for slot in listed if slot != CONST]
    return slots


def constants_of(step: Step) -> list[Const]:
    """Returns the constants among the inputs of a step, those in lists included."""
    return [*step.consts.values(), *(const for _, consts in step.lists.values() for const in consts.values())]


class Outputs:
    """The outputs of a segment up to the end of a stretch, by their numbers.

    A table for each region of a segment with many would take more than the segment itself.
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
