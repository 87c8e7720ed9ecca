"""Chains: the way back through a loop that fills lists, turn by turn.

What has been appended is the program's: it may ask for the gradient of any of it, and for any of it. So tapes are told
of each turn by itself, with all that it gives, as eager would have told them of the turn's operations.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from coexec.staging.gradients import (
    Gradient,
    ancestors,
    gradient_of,
    has_gradient,
    hides,
    pruned,
    spec_in,
    unwatched,
    used_arguments,
)
from tracer.block import Block, Loop, steps_of
from tracer.errors import Refused
from tracer.spec import Spec, intern_spec


class Link(NamedTuple):
    """One thing that a turn computes, and its gradient: for the turn's arguments, and for what is cut off."""

    slot: int
    cuts: tuple[int, ...]  # other things that are given, and that it is computed from
    gradient: Gradient


class Chain:
    """How to go back through a loop, of which `turn` gives the states and what is appended.

    Raises `Refused` if that cannot be written down.
    """

    def __init__(self, loop: Loop, inputs: tuple[Spec, ...], turn: Block, taken: list[int]) -> None:
        self.loop = loop
        self.inputs = inputs
        self.turn = turn
        self.taken = taken  # to which list the last results are appended, in order
        self.count = len(turn.results) - len(taken)  # states; those behind them are of lists
        self.links: list[Link] = []
        self.alike: dict[int, int] = {}
        self._parts: dict[tuple[int, tuple[int, ...]], Gradient] = {}
        self._savings: dict[int, Loop] = {}
        unwatched(self._prepare)
        count = len(loop.body_inputs)
        used = {loop.body_inputs[a] for link in self.links for a in used_arguments(link.gradient.block) if a < count}
        self.saved = tuple(
            n for n, position in enumerate(loop.states)
            if position in used or (n < self.count and has_gradient(inputs[position]))
        )  # fmt: skip
        self.size = sum(self._spec(n).size for n in self.saved)  # bytes that each turn takes
        self.steps = [s for link in self.links for step in link.gradient.block.steps for s in (step, *steps_of(step))]
        # Inputs for which eager would give no tensors: tapes may not ask for them.
        self.sparse = {
            loop.body_inputs[a] if a < count else -1 for link in self.links for a in link.gradient.sparse
        }  # fmt: skip
        if not self.sparse.isdisjoint((-1, *loop.states)):
            raise Refused("a gradient is sparse")

    def _spec(self, n: int) -> Spec:
        return self.inputs[self.loop.states[n]]

    def _prepare(self) -> None:
        turn = self.turn
        made = {r for r in turn.results if isinstance(r, int) and r >= 0 and has_gradient(spec_in(turn, r))}
        if hides(turn, made):
            raise Refused("an `if` in it computes one result from another")
        behind = {slot: ancestors(turn, slot) for slot in made}
        for slot in sorted(made, key=lambda slot: (len(behind[slot]), slot)):
            cuts = tuple([link.slot for link in self.links if link.slot in behind[slot]])
            gradient = gradient_of(turn, (turn.results.index(slot),), None, cuts)
            self.links.append(Link(slot, cuts, gradient))

    def part(self, number: int, wanted: tuple[int, ...]) -> Gradient:
        """Returns a link's gradient for some of what it has a gradient for, by their numbers among that."""
        gradient = self.links[number].gradient
        if len(wanted) == len(gradient.connected):
            return gradient
        known = self._parts.get((number, wanted))
        if known is None:
            results = tuple([gradient.block.results[k] for k in wanted])
            block = pruned(dataclasses.replace(gradient.block, results=results))
            known = Gradient(block, tuple([gradient.connected[k] for k in wanted]))
            self._parts[number, wanted] = known
        return known

    def saving(self, room: int) -> Loop:
        """Returns the loop that gives out besides what `saved` states were before each turn, of `room` at most."""
        if room not in self._savings:
            self._savings[room] = dataclasses.replace(self.loop, limit=room, saved=self.saved)
        return self._savings[room]

    def rows(self, room: int) -> list[Spec]:
        """Returns the specs of what it gives out besides."""
        return [intern_spec(spec.enum, (room, *spec.shape)) for spec in map(self._spec, self.saved)]
