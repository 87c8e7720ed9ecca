"""Turns: a loop that was written down, carried out on the device for a program that waits for it.

Where tapes watch what it works on, it gives out besides what the way back through it needs, in room for as many
turns as have been seen so far. The device stops where that is full; what is left is Python's, or the device's in turn.
"""

from __future__ import annotations

from typing import Any

from coexec.lowering.failures import differs
from coexec.runtime.backward import Saved, record_loop, record_reads
from coexec.runtime.chains import Links
from coexec.runtime.lists import hand_over, parts_of
from coexec.runtime.structures import issue, read
from coexec.staging.adjoints import Adjoint
from coexec.staging.chains import Chain
from coexec.staging.lookups import Held
from coexec.staging.loops import Staged
from tracer.block import COUNT, FLAG, LOOP
from tracer.errors import Refused
from tracer.intercept import tape_is_empty
from tracer.private import record

FEWEST = 8  # turns that there is room for
MAX_ROOM = 1 << 28  # bytes that are saved in one launch

Way = Adjoint | Chain  # back through a loop


class Turns:
    """What a loop has done on the device, from these arguments on: `count` turns, and whether it `goes_on` then."""

    def __init__(self, run: Any, staged: Staged, arguments: list[Any], adjoint: Way | None, room: int) -> None:
        self.staged, self.adjoint = staged, adjoint
        self._run, self._arguments = run, arguments
        self._loop = staged.loop if adjoint is None else adjoint.saving(room)
        self._given = [
            read(run, v.handle, spec) if type(v) is Held else v
            for v, spec in zip(arguments, staged.inputs, strict=True)
        ]
        states = [staged.inputs[k] for k in self._loop.states]
        specs = [*states, COUNT, FLAG, *(adjoint.rows(room) if adjoint is not None else ())]
        found = issue(run, LOOP, ("structure", self._loop), self._given, specs)
        run.flush()
        self._states, self._turned, holds = found[: len(states)], found[len(states)], found[len(states) + 1]
        self._rows = found[len(states) + 2 :]
        self.count, self.goes_on = int(self._turned.resolve()._numpy()), bool(holds.resolve()._numpy())
        if adjoint is not None and self.count:  # what is one tensor in Python is one here: tapes know it by that
            for n, place in adjoint.alike.items():
                self._states[n] = self._given[place] if place >= 0 else self._states[-1 - place]
        self._taken: list[list[Any]] | None = None  # what lists get, where tapes know the tensors
        self.has_widened = False  # whether there is more room another time

    @property
    def is_full(self) -> bool:
        """Whether there was no room for more."""
        return self.adjoint is not None and self.count == self._loop.limit and self.goes_on

    @property
    def lists_are_full(self) -> bool:
        """Whether the loop may have stopped as some list had no room for more."""
        counts = self._states[len(self._states) - 2 * len(self.staged.lists) :][1::2]
        rooms = [grown.before[0]._out.spec.shape[0] for grown in self.staged.lists]
        return self.goes_on and any(
            2 * int(count.resolve()) > room for count, room in zip(counts, rooms, strict=True)
        )

    def record(self) -> None:
        """Tells tapes of the turns."""
        if self.adjoint is not None and self.count:
            record_reads(self._arguments, self._given)
            if isinstance(self.adjoint, Chain):
                links = Links(self._run, self.adjoint, self._given, self._states, self._rows, self.count)
                self._states[: self.adjoint.count], self._taken = links.record()
                return
            saved = Saved(self._given, self.count, self._turned, self._rows, self._loop.limit)
            record_loop(self._run, self.adjoint, self._states, saved)

    def after(self, before: dict[str, Any]) -> dict[str, Any]:
        """Returns what the local variables are by then that the turns change."""
        if not self.count:
            return {}
        tensors = iter(self._states)
        after = {s.name: s.join(tensors, before.get(s.name), self.count) for s in self.staged.states}
        return {**after, **self.staged.constants}

    def hand_over(self, variables: dict[str, Any]) -> int:
        """Appends what has grown to the lists that the variables hold; returns by how many at most."""
        lists = self.staged.lists
        if not lists:
            return 0
        if self._taken is not None:
            return hand_over([(variables[g.name], taken) for g, taken in zip(lists, self._taken, strict=True)])
        grown = self._states[len(self._states) - 2 * len(lists) :]
        return hand_over(parts_of(self._run, lists, grown, variables))


def adjoint_for(staged: Staged, arguments: list[Any]) -> Way | str | None:
    """Returns the way back through a loop, if some tape watches what it is given; where there is none, says why."""
    if tape_is_empty() or not is_watched(arguments):
        return None
    if staged.adjoint is None:
        try:
            staged.adjoint = _way_back(staged)
            for step in staged.adjoint.steps:
                if difference := differs(step.op or ""):
                    raise Refused(f"{step.op} {difference}")
        except Refused as refused:
            staged.adjoint = str(refused)
    adjoint: Way | str = staged.adjoint
    if not isinstance(adjoint, str) and is_watched([arguments[k] for k in adjoint.sparse]):
        return "a gradient is sparse"
    return adjoint


def _way_back(staged: Staged) -> Way:
    if not staged.lists:
        return Adjoint(staged.loop, staged.inputs)
    if staged.turn is None:
        raise Refused("a list grows in some turns otherwise than in others")
    return Chain(staged.loop, staged.inputs, staged.turn, staged.taken)


def room_for(adjoint: Way | None, turns: int, most: int) -> int:
    """Returns for how many turns there is to be room, where so many have been seen: no more than `most`."""
    if adjoint is None:
        return most
    room = FEWEST
    while room < turns:
        room *= 2
    return max(min(room, most, MAX_ROOM // max(adjoint.size, 1)), 1)


def is_watched(values: list[Any]) -> bool:
    """Returns whether some tape watches one of these; a variable, once it is read."""
    if any(type(v) is Held and v.variable.trainable for v in values):
        return True
    return bool(values) and record.should_record_backprop([v.handle if type(v) is Held else v for v in values])
