"""Loop launch: runs a traced loop on the device, while Python waits for it.

If tapes watch its inputs, it also returns the residuals for its backward pass, with room for as many iterations as were
seen so far. When that is full the device stops; the rest is left to Python, or to the device's next run.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from coexec.base.tuning import tuning
from coexec.control_flow.grad.iteration_records import IterationRecords, unstacked
from coexec.control_flow.grad.iteration_vjp import IterationVjp
from coexec.control_flow.grad.loop_vjp import LoopVjp
from coexec.control_flow.grad.tape_records import SavedStates, notify_of_reads, record_loop, record_reads
from coexec.control_flow.run.identity import handed_on
from coexec.control_flow.trace.list_buffers import GrowingList
from coexec.control_flow.trace.read_guards import VariableRead
from coexec.control_flow.trace.while_loops import TracedLoop
from coexec.follow.device_control import FollowedCall
from coexec.follow.synthetic_ops import issue, read
from coexec.lowering.op_failures import differs
from tracer.block import COUNT, FLAG, LOOP
from tracer.errors import Refused
from tracer.intercept import tape_is_empty
from tracer.private import record

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Tensor, Value
    from tracer.lazy import LazyTensor

Way = LoopVjp | IterationVjp  # the backward pass of a loop


class LoopRun:
    """A run of a loop on the device, from these arguments: `count` iterations, and whether the loop `goes_on` then."""

    def __init__(
        self, run: FollowedCall, staged: TracedLoop, arguments: list[Value], vjp: Way | None, room: int
    ) -> None:
        self.staged, self.vjp = staged, vjp
        self._run, self._arguments = run, arguments
        self._loop = staged.loop if vjp is None else vjp.saving(room)
        self._given = [
            read(run, v.handle, spec) if type(v) is VariableRead else v
            for v, spec in zip(arguments, staged.inputs, strict=True)
        ]
        states = [staged.inputs[k] for k in self._loop.states]
        specs = [*states, COUNT, FLAG, *(vjp.rows(room) if vjp is not None else ())]
        found = issue(run, LOOP, ("structure", self._loop), self._given, specs)
        run.flush()
        self._states, self._turned, holds = found[: len(states)], found[len(states)], found[len(states) + 1]
        self._rows = found[len(states) + 2 :]
        self.count, self.goes_on = int(self._turned.resolve()._numpy()), bool(holds.resolve()._numpy())
        same = handed_on(staged.loop, self.count) if self.count else {}
        alike = vjp.alike if vjp is not None and self.count else {}
        for n, place in alike.items():  # what is one tensor in Python must be one here: tapes go by identity
            self._states[n] = self._given[place] if place >= 0 else self._states[-1 - place]
        # Whether tapes would have to be told that a result is what came in, after as many iterations as these, or that
        # it is one of the tensors as which a variable was read: each read makes another.
        reads = {place for place in same.values() if type(arguments[place]) is VariableRead}
        self.is_untold = vjp is not None and any(alike.get(n) != k or k in reads for n, k in same.items())
        for n, place in same.items():
            if vjp is None and place not in reads:
                self._states[n] = self._arguments[place]
        self._taken: list[list[Tensor]] | None = None  # what to append to each list, if recorded on tapes
        self.has_widened = False  # whether the next run will have more room

    @property
    def is_full(self) -> bool:
        """Whether it stopped for lack of room for saved states."""
        return self.vjp is not None and self.count == self._loop.limit and self.goes_on

    @property
    def lists_are_full(self) -> bool:
        """Whether it may have stopped for lack of room in a list's buffer."""
        counts = self._states[len(self._states) - 2 * len(self.staged.lists) :][1::2]
        rooms = [grown.before[0]._out.spec.shape[0] for grown in self.staged.lists]
        return self.goes_on and any(2 * int(count.resolve()) > room for count, room in zip(counts, rooms, strict=True))

    def record(self) -> None:
        """Records the iterations on tapes, and their reads with watchers."""
        if self.count:
            notify_of_reads(self._arguments)
        if self.vjp is not None and self.count:
            record_reads(self._arguments, self._given)
            if isinstance(self.vjp, IterationVjp):
                links = IterationRecords(self._run, self.vjp, self._given, self._states, self._rows, self.count)
                self._states[: self.vjp.count], self._taken = links.record()
                return
            saved = SavedStates(self._given, self.count, self._turned, self._rows, self._loop.limit)
            record_loop(self._run, self.vjp, self._states, saved)

    def after(self, before: dict[str, Value]) -> dict[str, Value]:
        """Returns the values of the local variables that the iterations change."""
        if not self.count:
            return {}
        tensors = iter(self._states)
        after = {s.name: s.join(tensors, before.get(s.name), self.count) for s in self.staged.states}
        held = [value for s in self.staged.states if type(value := before.get(s.name)) is tuple]
        for name, value in after.items():
            if held and type(value) is tuple:  # handed on as a whole, it is the same one
                after[name] = next((each for each in held if _are_same(each, value)), value)
        return {**after, **self.staged.constants}

    def hand_over(self, variables: dict[str, Value]) -> int:
        """Appends the grown rows to the lists that the variables hold; returns the largest number of rows."""
        lists = self.staged.lists
        if not lists:
            return 0
        if self._taken is not None:
            return _hand_over([(variables[g.name], taken) for g, taken in zip(lists, self._taken, strict=True)])
        grown = self._states[len(self._states) - 2 * len(lists) :]
        return _hand_over(_parts_of(self._run, lists, grown, variables))


def vjp_for(staged: TracedLoop, arguments: list[Value]) -> Way | str | None:
    """Returns a loop's VJP if some tape watches its inputs, else None; if it has no VJP, the reason."""
    if tape_is_empty() or not is_watched(arguments):
        return None
    if staged.vjp is None:
        try:
            staged.vjp = _trace_vjp(staged)
            for step in staged.vjp.steps:
                if difference := differs(step.op or ""):
                    raise Refused(f"{step.op} {difference}")
        except Refused as refused:
            staged.vjp = str(refused)
    vjp: Way | str = staged.vjp
    if not isinstance(vjp, str) and is_watched([arguments[k] for k in vjp.sparse]):
        return "a gradient is sparse"
    return vjp


def _trace_vjp(staged: TracedLoop) -> Way:
    if not staged.lists:
        return LoopVjp(staged.loop, staged.inputs)
    if staged.turn is None:
        raise Refused("a list grows in some turns otherwise than in others")
    return IterationVjp(staged.loop, staged.inputs, staged.turn, staged.taken)


def room_for(vjp: Way | None, turns: int, most: int) -> int:
    """Returns how many iterations to make room for after `turns` were seen, within `most` and the memory limit."""
    if vjp is None:
        return most
    room = tuning.min_turn_room
    while room < turns:
        room *= 2
    return max(min(room, most, tuning.max_turn_bytes // max(vjp.size, 1)), 1)


def is_watched(values: list[Value]) -> bool:
    """Returns whether some tape watches one of these values, or will once it is read, as with trainable variables."""
    if any(type(v) is VariableRead and v.variable.trainable for v in values):
        return True
    return bool(values) and record.should_record_backprop([v.handle if type(v) is VariableRead else v for v in values])


def _parts_of(
    run: FollowedCall, lists: list[GrowingList], tensors: list[LazyTensor], variables: dict[str, Value]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Returns the lists that the variables hold, each with its new rows.

    `tensors` are each list's buffer and its number of filled rows.
    """
    found: list[tuple[list[Tensor], list[Tensor]]] = []
    for grown, buffer, count in zip(lists, tensors[::2], tensors[1::2], strict=True):
        found.append((variables[grown.name], unstacked(run, buffer, int(count.resolve()))))
    return found


def _are_same(one: tuple[Value, ...], other: tuple[Value, ...]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _hand_over(parts: list[tuple[list[Tensor], list[Tensor]]]) -> int:
    """Appends its tensors to each list; returns the largest number of them."""
    for held, tensors in parts:
        held.extend(tensors)
    return max((len(tensors) for _, tensors in parts), default=0)
