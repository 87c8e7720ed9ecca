"""Dependence: which results of a block have a gradient for which arguments, through its branches and recursive calls.

Such a pair is connected always, or on some paths only: then a flag says at run time whether it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tensorflow as tf

from coexec.control_flow.grad.block_vjp import Taped, has_gradient, input_of, issue_step, slots_of
from tracer.block import BRANCH, CALL, STRUCTURES, Block, Branch, RecursiveCall, RecursiveFunction, recursion_of
from tracer.errors import Refused
from tracer.graph import Step
from tracer.lazy import LazyTensor

if TYPE_CHECKING:
    from coexec.control_flow.grad.block_vjp import Result
    from coexec.control_flow.program_types import Tensor, Truth

    Flags = dict[int, dict[int | None, Truth]]  # by slot and argument: whether they are connected

Pairs = dict[tuple[int, int], bool]  # result and argument numbers: whether they are always connected


@dataclass
class _Function:
    """What is known of a recursive function."""

    active: set[int] = field(default_factory=set)
    pairs: Pairs = field(default_factory=dict)
    reach: Dependence = None  # type: ignore[assignment]  # set by its first call


class Dependences:
    """The dependences of a block of which these arguments are watched, and of the functions that it calls."""

    def __init__(self, block: Block, watched: tuple[int, ...]) -> None:
        self._links: dict[Block, dict[int, dict[int, bool]]] = {}
        self._functions: dict[RecursiveFunction, _Function] = {}
        self._strict = False  # first pass: what is connected at all; second pass: what always is
        for self._strict in (False, True):
            self._changed = True
            while self._changed:
                self._changed = False
                self.root = Dependence(self, block, set(watched), None)

    def function(self, recursion: RecursiveFunction) -> Dependence:
        """Returns the dependence of a function."""
        found: Dependence = self._functions[recursion].reach
        return found

    def pairs_of(self, recursion: RecursiveFunction) -> Pairs:
        """Returns which results of a function are connected to which of its arguments."""
        return self._functions[recursion].pairs

    def asked(self, recursion: RecursiveFunction) -> list[tuple[int, int]]:
        """Returns the pairs of a function that are connected on some paths only."""
        return sorted(pair for pair, always in self.pairs_of(recursion).items() if not always)

    def called(self, part: RecursiveFunction | RecursiveCall, active: set[int]) -> Pairs:
        """Notes a call of a function, of which `active` arguments depend on watched ones; returns its pairs."""
        recursion = recursion_of(part)
        known = self._functions.setdefault(recursion, _Function())
        if not active <= known.active:
            known.active |= active
            self._changed = True
        if isinstance(part, RecursiveFunction):
            assert part.block is not None
            known.reach = Dependence(self, part.block, set(known.active), part.guard)
            for pair, always in known.reach.pairs().items():
                if known.pairs.get(pair) is not (always if self._strict else True):
                    self._changed = self._changed or pair not in known.pairs or not always
                    known.pairs[pair] = always if self._strict else True
        return known.pairs

    def links(self, block: Block) -> dict[int, dict[int, bool]]:
        """Returns the arguments and structures' outputs that each slot has a gradient for, and whether that is dense.

        Found by a tape; only for slots that structures take, and for results.
        """
        if block not in self._links:
            self._links[block] = _links(block)
        return self._links[block]


class Dependence:
    """What in a block is connected to its `active` arguments, which are those that depend on watched tensors."""

    def __init__(self, reaches: Dependences, block: Block, active: set[int], guard: Branch | None) -> None:
        self.block = block
        self.active = sorted(k for k in active if has_gradient(block.arguments[k]))
        self.through: dict[Step, Pairs] = {}  # by structure: its outputs and inputs
        self.ways: dict[Step, list[Dependence]] = {}
        self._guard = guard
        self._links = reaches.links(block)
        self._at: dict[int, dict[int, bool]] = {-1 - k: {k: True} for k in self.active}
        for step in block.steps:
            if step.op not in STRUCTURES:
                continue
            behind = [self.of(slot) for slot in step.slots]
            pairs = self._through(reaches, step, {j for j, found in enumerate(behind) if found})
            self.through[step] = {pair: always for pair, always in pairs.items() if behind[pair[1]]}
            for (n, j), always in self.through[step].items():
                found = self._at.setdefault(step.first + n, {})
                for k, other in behind[j].items():
                    found[k] = found.get(k, False) or (always and other)

    def of(self, slot: Result) -> dict[int, bool]:
        """Returns the arguments that a slot is connected to, and whether it always is."""
        found: dict[int, bool] = {}
        for source in self.sources(slot):
            for k, always in self._at[source].items():
                found[k] = found.get(k, False) or always
        return found

    def sources(self, slot: Result) -> list[int]:
        """Returns the arguments and structures' outputs that a slot is computed from, as slots."""
        links = self._links.get(slot, {}) if isinstance(slot, int) else {}
        found = [source for source in links if source in self._at]
        if not all(links[source] for source in found):
            raise Refused("a gradient is sparse")
        return found

    def pairs(self) -> Pairs:
        """Returns which results are connected to which arguments."""
        return {(n, k): always for n, r in enumerate(self.block.results) for k, always in self.of(r).items()}

    def asked(self, step: Step) -> list[tuple[int, int]]:
        """Returns the pairs of a structure that are connected on some paths only."""
        return sorted(pair for pair, always in self.through[step].items() if not always)

    def is_guard(self, step: Step) -> bool:
        """Returns whether a branch is the check for room for one more call."""
        return self._guard is not None and step.attrs[1] is self._guard

    def _through(self, reaches: Dependences, step: Step, active: set[int]) -> Pairs:
        """Returns which outputs of a structure are connected to which of its `active` inputs."""
        part = step.attrs[1]
        if step.op == CALL and isinstance(part, (RecursiveFunction, RecursiveCall)):
            return reaches.called(part, active)
        if step.op != BRANCH:
            raise Refused("there is a loop in it")
        places = [[1 + place for place in given] for given in (part.then_inputs, part.other_inputs)]
        ways = self.ways[step] = [
            Dependence(reaches, block, {a for a, j in enumerate(given) if j in active}, None)
            for block, given in zip((part.then, part.other), places, strict=True)
        ]
        found = [
            {(n, given[a]): always for (n, a), always in way.pairs().items()}
            for way, given in zip(ways, places, strict=True)
        ]
        if self.is_guard(step):
            return found[1]
        both = found[0].keys() | found[1].keys()
        return {pair: all(pairs.get(pair, False) for pairs in found) for pair in both}


def flag_of(reach: Dependence, flags: Flags, slot: Result, k: int | None) -> Truth:
    """Returns whether a slot is connected to an argument: a bool, or a tensor."""
    found: Truth = False
    for source in reach.sources(slot):
        found = either(found, flags.get(source, {}).get(k, False))
    return found


def either(one: Truth, other: Truth) -> Truth:
    """Returns whether either of two conditions holds, each a bool or a tensor."""
    if isinstance(one, bool) or one is other:
        return one or other if isinstance(one, bool) else one
    return (other or one) if isinstance(other, bool) else tf.logical_or(one, other)


def both(one: Truth, other: Truth) -> Truth:
    """Returns whether both of two conditions hold, each a bool or a tensor."""
    if isinstance(one, bool):
        return one and other
    return (other and one) if isinstance(other, bool) else tf.logical_and(one, other)


def _links(block: Block) -> dict[int, dict[int, bool]]:
    """Returns what `Dependences.links` does, by issuing the block's operations under a tape."""
    stage = Taped()
    given = [stage.argument(spec) for spec in block.arguments]
    values: dict[int, Tensor] = {-1 - k: v for k, v in enumerate(given)}
    structures = [step for step in block.steps if step.op in STRUCTURES]
    values.update(
        (step.first + n, stage.argument(out.spec)) for step in structures for n, out in enumerate(step.outputs)
    )
    sources = {slot: v for slot, v in values.items() if has_gradient(v._out.spec)}
    with stage:
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(list(sources.values()))
            for step in block.steps:
                if step.op not in STRUCTURES:
                    inputs = [input_of(step, i, slot, values) for i, slot in enumerate(step.slots)]
                    values.update((step.first + n, v) for n, v in enumerate(issue_step(stage, step, inputs)))
        found: dict[int, dict[int, bool]] = {}
        for slot in {s for s in (*block.results, *(s for step in structures for s in slots_of(step))) if s in values}:
            if slot in sources:
                found[slot] = {slot: True}
            elif has_gradient(values[slot]._out.spec):
                grads = tape.gradient(values[slot], list(sources.values()))
                pairs = zip(sources, grads, strict=True)
                found[slot] = {source: type(grad) is LazyTensor for source, grad in pairs if grad is not None}
    return found
