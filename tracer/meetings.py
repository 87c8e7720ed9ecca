"""Meetings: the lines at which ways meet that choices have parted, and the combinations of ways that calls took.

Behind a choice each way has steps of its own, up to the end of the segment. Where two choices are made in one call,
each way of the one is multiplied by those of the other, so segments are cut where ways meet: what lies between is then
learnt once for all combinations, and no longer compiled as a whole. (A SimCLR step with two choices for each of two
views took 20 calls to learn some of its 16 paths, at 1.2 to 2.5 times eager's.) But choices may go together, as where
batches are taken from either side in turn: then there are two ways, however many lines choose. So the cuts begin with
the fourth combination. (A step of RotatE, which replaces heads and tails in turn, takes 0.2 of eager's time as two
wholes, and 0.7 in four parts, whose gradient is none of one segment.)
"""

from __future__ import annotations

from typing import Any

from tracer.location import Frame

MANY_LINES = 2  # where there is one, its ways are few, and each is compiled as a whole
MANY_COMBINATIONS = 4
# Followed calls within which these come, and within which a line is reached by another way: a program that changes for
# good, as one that goes on to train more of its layers, or does something every hundredth call, makes no choices.
WITHIN = 12
MAX_LINES = 256  # noted of one call
MAX_COMBINATIONS = 16

# The ways by which a call came to lines, by line and how often it had come there.
Taken = dict[tuple[Any, int], int]


class Meetings:
    """Those of one function."""

    def __init__(self) -> None:
        self._lines: set[Any] = set()  # to which calls have come by several ways, with those of their callers
        self._call = 0
        self._taken: Taken = {}  # in that call, where it came by new steps
        self._times: dict[Any, int] = {}
        self._combinations: dict[int, Taken] = {}  # that differ from each other, by the calls that first took them
        self._cuts = False
        self._begins = False
        self.aside: list[Any] = []  # roots of the steps from before; memoized calls are kept there, to be moved

    def came_to(self, call: int, frames: tuple[Frame, ...], ways: dict[int, int], way: int) -> bool:
        """Notes the way by which a call came to a place by a new step, in the `ways` known so far, by their last calls.

        Returns whether to cut before it.
        """
        if call != self._call:
            self._end()
            self._call = call
        ways[way] = call
        line = (*(frame[:3] for frame in frames[:1]), *frames[1:])
        if len(self._taken) < MAX_LINES:
            times = self._times[line] = self._times.get(line, 0) + 1
            self._taken[line, times] = way
        # (A list, as calls on other threads may come there, too.)
        if len(ways) == 1 or sum(call - last <= WITHIN for last in list(ways.values())) == 1:
            return False
        self._lines.add(line)
        if not self._cuts and len(self._lines) >= MANY_LINES:
            recent = sum(call - first <= WITHIN for first in self._combinations)
            self._cuts = self._begins = recent >= MANY_COMBINATIONS
        return self._cuts

    def cut(self) -> bool:
        """Returns True: calls keep coming to a place by other ways, so they are cut where any meet, too."""
        if not self._cuts and len(self._lines) >= MANY_LINES:
            self._cuts = self._begins = True
        return True

    def begin(self) -> bool:
        """Returns whether calls are cut since the last one."""
        begins, self._begins = self._begins, False
        return begins

    def _end(self) -> None:
        """Notes the combination of ways that the last call took, if no earlier one took it."""
        taken, self._taken, self._times = self._taken, {}, {}
        if taken and not self._cuts and all(_differ(taken, other) for other in self._combinations.values()):
            if len(self._combinations) >= MAX_COMBINATIONS:
                del self._combinations[next(iter(self._combinations))]
            self._combinations[self._call] = taken


def _differ(one: Taken, other: Taken) -> bool:
    """Returns whether two calls came to a line by different ways."""
    return any(other.get(place, way) != way for place, way in one.items())
