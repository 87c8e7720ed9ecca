"""Step ranges: the steps of a segment between two places."""

from __future__ import annotations

import bisect

from tracer.graph import CONST, LIST, Step
from tracer.lazy import Output
from tracer.op import Const


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
