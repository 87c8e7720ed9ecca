"""Iteration VJP: the backward pass through a loop that fills lists, iteration by iteration.

The program holds the appended tensors, and may take gradients of any of them with respect to any other. So each
iteration is recorded on tapes separately, with all of its results, as eager would have recorded its operations.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from coexec.control_flow.grad.block_vjp import (
    BlockVjp,
    ancestors,
    has_gradient,
    hides,
    pruned,
    spec_in,
    unwatched,
    used_arguments,
    vjp_of,
)
from tracer.block import Block, WhileLoop, steps_of
from tracer.errors import Refused
from tracer.spec import Spec, intern_spec


class ValueVjp(NamedTuple):
    """One value that an iteration computes, and its gradient, for the iteration's arguments and for the cuts."""

    slot: int
    cuts: tuple[int, ...]  # other such values that it is computed from, taken as given
    gradient: BlockVjp


class IterationVjp:
    """The VJP of a loop's iterations; `turn` is the block of one, which returns the states and what is appended.

    Raises `Refused` if it cannot be traced.
    """

    def __init__(self, loop: WhileLoop, inputs: tuple[Spec, ...], turn: Block, taken: list[int]) -> None:
        self.loop = loop
        self.inputs = inputs
        self.turn = turn
        self.taken = taken  # to which list each of the last results is appended, in order
        self.count = len(turn.results) - len(taken)  # states; the remaining ones belong to lists
        self.links: list[ValueVjp] = []
        self.alike: dict[int, int] = {}
        self._parts: dict[tuple[int, tuple[int, ...]], BlockVjp] = {}
        self._savings: dict[int, WhileLoop] = {}
        unwatched(self._prepare)
        count = len(loop.body_inputs)
        used = {loop.body_inputs[a] for link in self.links for a in used_arguments(link.gradient.block) if a < count}
        self.saved = tuple(
            n for n, position in enumerate(loop.states)
            if position in used or (n < self.count and has_gradient(inputs[position]))
        )  # fmt: skip
        self.size = sum(self._spec(n).size for n in self.saved)  # bytes per iteration
        self.steps = [s for link in self.links for step in link.gradient.block.steps for s in (step, *steps_of(step))]
        # Inputs whose gradient is sparse: no tape may watch them.
        self.sparse = {
            loop.body_inputs[a] if a < count else -1 for link in self.links for a in link.gradient.sparse
        }  # fmt: skip
        if not self.sparse.isdisjoint((-1, *loop.states)):
            raise Refused("a gradient is sparse")

    def _spec(self, n: int) -> Spec:
        return self.inputs[self.loop.states[n]]

    def _prepare(self) -> None:
        """Traces a VJP for each value that an iteration computes; the values before it are its cuts."""
        turn = self.turn
        made = {r for r in turn.results if isinstance(r, int) and r >= 0 and has_gradient(spec_in(turn, r))}
        if hides(turn, made):
            raise Refused("an `if` in it computes one result from another")
        behind = {slot: ancestors(turn, slot) for slot in made}
        for slot in sorted(made, key=lambda slot: (len(behind[slot]), slot)):
            cuts = tuple([link.slot for link in self.links if link.slot in behind[slot]])
            gradient = vjp_of(turn, (turn.results.index(slot),), None, cuts)
            self.links.append(ValueVjp(slot, cuts, gradient))

    def part(self, number: int, wanted: tuple[int, ...]) -> BlockVjp:
        """Returns a link's gradient for some of its `connected` arguments, given by their index among those."""
        gradient = self.links[number].gradient
        if len(wanted) == len(gradient.connected):
            return gradient
        known = self._parts.get((number, wanted))
        if known is None:
            results = tuple([gradient.block.results[k] for k in wanted])
            block = pruned(dataclasses.replace(gradient.block, results=results))
            known = BlockVjp(block, tuple([gradient.connected[k] for k in wanted]))
            self._parts[number, wanted] = known
        return known

    def saving(self, room: int) -> WhileLoop:
        """Returns the loop that also returns the `saved` states before each of at most `room` iterations."""
        if room not in self._savings:
            self._savings[room] = dataclasses.replace(self.loop, limit=room, saved=self.saved)
        return self._savings[room]

    def rows(self, room: int) -> list[Spec]:
        """Returns the specs of these saved states."""
        return [intern_spec(spec.enum, (room, *spec.shape)) for spec in map(self._spec, self.saved)]
