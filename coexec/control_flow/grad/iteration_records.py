"""Iteration records: records each iteration of a loop that filled lists on tapes, with all of its results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from coexec.control_flow.grad.iteration_vjp import IterationVjp
from coexec.control_flow.grad.tape_records import backward_of
from coexec.follow.device_control import FollowedCall
from tracer.private import record

if TYPE_CHECKING:
    from coexec.control_flow.grad.block_vjp import Result
    from coexec.control_flow.program_types import Tensor
    from tracer.lazy import LazyTensor


class IterationRecords:
    """The iterations that a loop ran: its inputs, its states afterwards, and `rows` of states before each iteration.

    What is one tensor in Python, a state and a list's item for example, is one tensor here: tapes go by identity.
    """

    def __init__(
        self, run: FollowedCall, chain: IterationVjp, given: list[Tensor], states: list[LazyTensor],
        rows: list[LazyTensor], count: int,
    ) -> None:  # fmt: skip
        self._run, self._chain, self._given, self._turns = run, chain, given, count
        self._after = states[: chain.count]
        self._before = {n: unstacked(run, row, count) for n, row in zip(chain.saved, rows, strict=True)}
        grown = states[chain.count :]
        self._grown = [
            unstacked(run, buffer, int(filled.resolve()))
            for buffer, filled in zip(grown[::2], grown[1::2], strict=True)
        ]

    def record(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Records all iterations on tapes; returns the states afterwards, and the tensors for each list."""
        chain, lists = self._chain, [iter(rows) for rows in self._grown]
        states: dict[int, Tensor] = {n: self._given[chain.loop.states[n]] for n in self._before}
        taken: list[list[Tensor]] = [[] for _ in lists]
        for turn in range(self._turns):
            found = self._arguments(states)
            last = turn + 1 == self._turns
            for n in range(chain.count) if last else self._before:
                if n < chain.count:
                    behind = self._after[n] if last else self._before[n][turn + 1]
                    states[n] = _known(found, chain.turn.results[n], behind)
                elif not last:
                    states[n] = self._before[n][turn + 1]
            for number, result in zip(chain.taken, chain.turn.results[chain.count :], strict=True):
                taken[number].append(_known(found, result, next(lists[number])))
            self._tell(found)
        return [states[n] for n in range(chain.count)], taken

    def _arguments(self, states: dict[int, Tensor]) -> dict[int, Tensor]:
        """Returns the arguments of an iteration that its VJP needs, by slot."""
        loop = self._chain.loop
        numbers = {position: n for n, position in enumerate(loop.states)}
        found: dict[int, Tensor] = {}
        for a, position in enumerate(loop.body_inputs):
            n = numbers.get(position)
            if n is None:
                found[-1 - a] = self._given[position]
            elif n in states:
                found[-1 - a] = states[n]
        return found

    def _tell(self, found: dict[int, Tensor]) -> None:
        """Records an iteration's results on tapes, one by one, with the watched tensors that each depends on."""
        chain = self._chain
        arguments = [found.get(-1 - a, self._given[p]) for a, p in enumerate(chain.loop.body_inputs)]
        for number, link in enumerate(chain.links):
            given = [*arguments, *(found[slot] for slot in link.cuts)]
            connected = link.gradient.connected
            wanted = tuple([k for k, a in enumerate(connected) if record.should_record_backprop([given[a]])])
            if wanted:
                gradient = chain.part(number, wanted)
                inputs = [given[a] for a in gradient.connected]
                record.record_operation("Turn", [found[link.slot]], inputs, backward_of(self._run, gradient, given))


def _known(found: dict[int, Tensor], result: Result, tensor: Tensor) -> Tensor:
    """Returns the tensor that represents a result of an iteration: this one, unless `found` has one for the slot."""
    return found.setdefault(result, tensor) if isinstance(result, int) else tensor


def unstacked(run: FollowedCall, buffer: LazyTensor, count: int) -> list[Tensor]:
    """Returns the first `count` rows of a buffer, as tensors."""
    rows = buffer.resolve()
    return list(run.run_alone(lambda: tf.unstack(rows[:count]))) if count else []
