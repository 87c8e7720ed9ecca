"""Loop VJP: the backward pass through a traced loop.

The forward loop also saves those of its states before each iteration that the backward pass needs. The backward loop
recomputes (rematerializes) each iteration from those, and maps the cotangents of its results to cotangents of its
arguments. So an iteration takes the memory of its states, not of everything computed in it.

The same gradients exist as in eager mode: the number of iterations is known by then, and so is which inputs a result
depends on. A missing cotangent is never replaced by zeros, since zero times infinity would be NaN where eager computes
nothing. So the last iterations, of whose results fewer have cotangents, are traced separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.grad.block_vjp import (
    BlockVjp,
    ancestors,
    has_gradient,
    hides,
    issue_block,
    pruned,
    unwatched,
    used_arguments,
    vjp_of,
)
from tracer.block import COUNT, FLAG, LOOP, Block, WhileLoop, steps_of
from tracer.errors import Refused
from tracer.functions import joined
from tracer.spec import Spec, intern_spec
from tracer.stage import Stage

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Tensor

    Issue = Callable[[Block, list[Tensor]], list[Tensor]]  # issues a block with these arguments; returns its results

Live = tuple[int, ...]  # the numbers of the states that have a cotangent


class LoopVjp:
    """The VJP of a loop whose inputs have these specs; raises `Refused` if it cannot be traced.

    A cotangent is named by the number of its input or, for state n as it is after the last iteration, by -1 - n: a
    program may take the gradient of one result with respect to another that it was computed from.
    """

    def __init__(self, loop: WhileLoop, inputs: tuple[Spec, ...]) -> None:
        self.loop = loop
        self.inputs = inputs
        self.numbers = {position: n for n, position in enumerate(loop.states)}
        self.alike: dict[int, int] = {}  # states that iterations set to an input or another state, named as above
        self.cuts: dict[int, list[int]] = {}  # by state: the other new states that an iteration computes it from
        self.lives: dict[int, list[Live]] = {}  # by state: which have a cotangent, last iteration first
        self._gradients: dict[Live, BlockVjp] = {}
        self._last: dict[int, BlockVjp] = {}  # of the last iteration, by state
        self._savings: dict[int, WhileLoop] = {}
        self._blocks: dict[tuple[int, int, int, bool, tuple[int, ...]], Block] = {}
        unwatched(self._prepare)
        count = len(loop.body_inputs)
        gradients = [*self._gradients.values(), *self._last.values()]
        used = {loop.body_inputs[a] for g in gradients for a in used_arguments(g.block) if a < count}
        self.saved = tuple(n for n, position in enumerate(loop.states) if position in used)
        self.constants = tuple(sorted(used.difference(loop.states)))  # the other inputs that are needed
        self.size = sum(self._spec(n).size for n in self.saved)  # bytes per iteration
        self.steps = [s for g in gradients for step in g.block.steps for s in (step, *steps_of(step))]
        self.order = sorted(self.lives, key=lambda n: (len(ancestors(loop.body, loop.body.results[n])), n))
        # Inputs whose gradient is sparse: no tape may watch them.
        self.sparse = {loop.body_inputs[a] for g in self._gradients.values() for a in g.sparse}
        if not self.sparse.isdisjoint(loop.states):
            raise Refused("a gradient is sparse")

    def _spec(self, n: int) -> Spec:
        return self.inputs[self.loop.states[n]]

    def spec_of(self, place: int) -> Spec:
        """Returns the spec of the cotangent for an input, or for a state as it is afterwards."""
        return self.inputs[place] if place >= 0 else self._spec(-1 - place)

    def _prepare(self) -> None:
        """Traces the VJPs of one iteration; finds which states have cotangents, from the last iteration backwards."""
        body = self.loop.body
        states = [n for n in range(len(self.loop.states)) if has_gradient(self._spec(n))]
        for n in states:
            self._gradients[n,] = vjp_of(body, (n,), None)
        self._compare()
        if hides(body, {body.results[n] for n in states}):
            raise Refused("an `if` in it computes one result from another")
        for n in (n for n in states if n not in self.alike):
            behind = ancestors(body, body.results[n])
            cuts = self.cuts[n] = [m for m in states if m not in self.alike and body.results[m] in behind]
            slots = tuple([r for r in (body.results[m] for m in cuts) if isinstance(r, int)])
            self._last[n] = vjp_of(body, (n,), None, slots) if cuts else self._gradients[n,]
            lives = self.lives[n] = [(n,)]
            before = self._states(self._places(self._last[n], cuts))
            while before != lives[-1] or (cuts and len(lives) == 1):
                if before in lives[1:] or len(lives) > tuning.max_turns_apart:
                    raise Refused("what has a gradient changes from iteration to iteration")
                lives.append(before)
                if before and before not in self._gradients:
                    self._gradients[before] = vjp_of(body, before, None)
                before = self._states(self._reached(before))

    def _compare(self) -> None:
        """Finds results that are the same tensor as another result, or as an input of the iteration."""
        results = self.loop.body.results
        for n, result in enumerate(results[:-1]):
            if not isinstance(result, int):
                continue
            place = self.loop.body_inputs[-1 - result] if result < 0 else None
            if place is not None and self.numbers.get(place, n) == n:
                self.alike[n] = place
            elif result in results[:n]:
                self.alike[n] = -1 - results.index(result)
            elif place is not None:
                self._refuse_older(self.numbers[place])

    def _refuse_older(self, q: int) -> None:
        """Refuses a result that is state `q` from before the iteration, if others were computed from that, too."""
        results = self.loop.body.results
        made = results[q]
        others = [r for n, r in enumerate(results[:-1]) if n != q]
        used = any(made == other or made in ancestors(self.loop.body, other) for other in others)
        if used or not isinstance(made, int) or made < 0:
            raise Refused("it keeps a value of the turn before")

    # Dependence of results on inputs.

    def _places(self, gradient: BlockVjp, cuts: list[int]) -> set[int]:
        """Returns the names of the cotangents that an iteration computes."""
        count = len(self.loop.body_inputs)
        return {self.loop.body_inputs[a] if a < count else -1 - cuts[a - count] for a in gradient.connected}

    def _reached(self, live: Live) -> set[int]:
        """Returns the same for an iteration after which the `live` states have cotangents."""
        return {place for n in live for place in self._places(self._gradients[n,], [])}

    def _states(self, places: set[int]) -> Live:
        return tuple(sorted(self.numbers[p] for p in places if p in self.numbers))

    def _sums(self, n: int, turn: int) -> set[int]:
        """Returns the names, other than of states before it, that get a cotangent from state `n` in an iteration.

        `turn` counts iterations from the last one, which is 0.
        """
        places = self._reached(self._live(n, turn)) if turn else self._places(self._last[n], self.cuts[n])
        return {p for p in places if p not in self.numbers}

    def _live(self, n: int, turn: int) -> Live:
        """Returns which states have cotangents before the last `turn` iterations, for state `n`."""
        return self.lives[n][min(turn, len(self.lives[n]) - 1)]

    def connected(self, n: int, turns: int) -> list[int]:
        """Returns the names of the cotangents of state `n` through so many iterations, in order."""
        found = {p for turn in range(min(turns, len(self.lives[n]))) for p in self._sums(n, turn)}
        return sorted(found.union(self.loop.states[k] for k in self._live(n, turns)))

    # Forward.

    def saving(self, room: int) -> WhileLoop:
        """Returns the loop that also returns the `saved` states before each of at most `room` iterations."""
        if room not in self._savings:
            self._savings[room] = dataclasses.replace(self.loop, limit=room, saved=self.saved)
        return self._savings[room]

    def rows(self, room: int) -> list[Spec]:
        """Returns the specs of these saved states."""
        return [intern_spec(spec.enum, (room, *spec.shape)) for spec in map(self._spec, self.saved)]

    # Backward.

    def back(self, n: int, turns: int, room: int, wanted: tuple[int, ...]) -> Block:
        """Returns the block that maps the cotangent of state `n` to the `wanted` ones.

        It takes the constants, the `cuts` of the state, the saved states, the number of iterations, and the cotangent.
        """
        apart = min(turns, len(self.lives[n]) - 1)
        key = n, room, apart, turns > apart, wanted
        if key not in self._blocks:
            try:
                self._blocks[key] = self._written(n, room, apart, turns > apart, wanted)
            except Exception as error:
                raise Refused(f"its gradient cannot be emitted: {error}") from None
        return self._blocks[key]

    def _written(self, n: int, room: int, apart: int, loops: bool, wanted: tuple[int, ...]) -> Block:
        """Traces the block of `back`: `apart` iterations unrolled, then a loop over the others if `loops`."""
        stage = Stage()
        given: dict[int, Tensor] = {p: stage.argument(self.inputs[p]) for p in self.constants}
        given.update({-1 - m: stage.argument(self._spec(m)) for m in self.cuts[n]})
        rows = dict(zip(self.saved, [stage.argument(spec) for spec in self.rows(room)], strict=True))
        turn: Tensor = stage.argument(COUNT)
        backs: dict[int, Tensor] = {n: stage.argument(self._spec(n))}
        sums: dict[int, Tensor] = {}
        with stage:
            for number in range(apart):
                turn = tf.subtract(turn, 1)
                at = {**given, **{self.loop.states[k]: _row(v, turn) for k, v in rows.items()}}
                backs = self._step(n, number, at, backs, sums, lambda b, v: issue_block(stage, b, v))
            if loops and backs:
                added = sorted(p for p in self._sums(n, apart) if p in wanted)
                backs, sums = self._turning(stage, n, apart, added, given, rows, turn, backs, sums, room)
            found = {**sums, **{self.loop.states[k]: back for k, back in backs.items()}}
            return pruned(stage.block([found[p] for p in wanted]))

    def _turning(
        self, stage: Stage, n: int, apart: int, added: list[int], given: dict[int, Tensor], rows: dict[int, Tensor],
        turn: Tensor, backs: dict[int, Tensor], sums: dict[int, Tensor], room: int,
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:  # fmt: skip
        """Traces the loop over those iterations that have cotangents for the same states as the next one."""
        live = self._live(n, apart)
        zeros = {p: tf.zeros(self.inputs[p].shape, self.inputs[p].dtype) for p in added if p not in sums}
        states = [turn, *(backs[k] for k in live), *({**zeros, **sums}[p] for p in added)]
        starts = [stage.stand_in(state._out) for state in states]
        testing, turning = Stage(stage), Stage(stage)
        with testing:
            test = testing.block([tf.greater(starts[0], 0)])
        with turning:
            now = tf.subtract(starts[0], 1)
            inner = dict(zip(added, starts[1 + len(live) :], strict=True))
            at = {**given, **{self.loop.states[k]: _row(v, now) for k, v in rows.items()}}
            behind = dict(zip(live, starts[1:], strict=False))
            before = self._step(n, apart, at, behind, inner, lambda b, v: issue_block(turning, b, v))
            results = [now, *(before[k] for k in live), *(inner[p] for p in added), tf.constant(False)]
        body = pruned(turning.block(results))
        inputs, places = joined([testing, turning], starts)
        inputs[: len(states)] = states
        loop = WhileLoop(test, body, places[0], places[1], tuple(range(len(states))), room, True)
        specs = [state._out.spec for state in starts]
        _, *after = stage.structure(LOOP, loop, inputs, [*specs, COUNT, FLAG])[: len(states)]
        return dict(zip(live, after, strict=False)), {**sums, **dict(zip(added, after[len(live) :], strict=True))}

    def _step(
        self, n: int, turn: int, at: dict[int, Tensor], backs: dict[int, Tensor], sums: dict[int, Tensor],
        issue: Issue,
    ) -> dict[int, Tensor]:  # fmt: skip
        """Issues the VJP of one of the last iterations, whose inputs were `at`.

        Returns the cotangents of the states before it; adds those of constants to `sums`.
        """
        live, cuts = self._live(n, turn), [] if turn else self.cuts[n]
        gradient = self._gradients[live] if turn else self._last[n]
        places = [*self.loop.body_inputs, *(-1 - m for m in cuts)]
        results = issue(gradient.block, [*(at.get(p) for p in places), *(backs[k] for k in live)])
        before: dict[int, Tensor] = {}
        for a, back in zip(gradient.connected, results, strict=True):
            if places[a] in self.numbers:
                before[self.numbers[places[a]]] = back
            else:
                sums[places[a]] = tf.add(sums[places[a]], back) if places[a] in sums else back
        return before

    def again(
        self, n: int, turns: int, given: list[Tensor], after: list[Tensor], back: Tensor, wanted: tuple[int, ...],
        issue: Issue,
    ) -> list[Tensor]:  # fmt: skip
        """Runs the backward pass by issuing each iteration, forward and backward; returns the wanted cotangents."""
        ats = [{**dict(enumerate(given)), **{-1 - m: after[m] for m in self.cuts[n]}}]
        for _ in range(turns - 1):
            *states, _ = issue(self.loop.body, [ats[-1][p] for p in self.loop.body_inputs])
            ats.append({**ats[-1], **dict(zip(self.loop.states, states, strict=True))})
        backs, sums = {n: back}, dict[int, Any]()
        for turn, at in enumerate(reversed(ats)):
            backs = self._step(n, turn, at, backs, sums, issue) if backs else {}
        found = {**sums, **{self.loop.states[k]: b for k, b in backs.items()}}
        return [found[p] for p in wanted]


def _row(rows: Tensor, turn: Tensor) -> Tensor:
    """Returns the state that was saved before an iteration."""
    shape = rows._out.spec.shape[1:]
    begin = tf.raw_ops.Pack(values=[turn, *(tf.constant(0) for _ in shape)], axis=0)
    return tf.reshape(tf.raw_ops.Slice(input=rows, begin=begin, size=[1, *shape]), shape)
