"""Branch launch: runs an `if` or expression that tests a tensor on the device, while Python continues.

The statement becomes one more operation of the segment, and is recorded on tapes. Python waits only for one that may
stop early: a range loop, or a function that calls itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from coexec.control_flow.grad.block_vjp import vjps_of
from coexec.control_flow.grad.tape_records import BranchVjp, notify_of_reads, record_reads
from coexec.control_flow.run.frames import (
    Exit,
    answer_at_once,
    exit_for,
    is_decorated,
    line_of_exit,
    refuse_guarded,
    set_locals,
    way_past,
)
from coexec.control_flow.run.loop_launch import is_watched
from coexec.control_flow.trace.conditionals import TracedBranch, Vjp, built
from coexec.control_flow.trace.range_loops import OVER, TracedRange
from coexec.control_flow.trace.read_guards import VariableRead
from coexec.follow.device_control import EarlyReturn, FollowedCall
from coexec.follow.synthetic_ops import issue, read
from coexec.lowering.plan import recurses, selects
from tracer.block import BRANCH, CALL, Block
from tracer.errors import Refused
from tracer.intercept import tape_is_empty
from tracer.syntax import Decision, Simple

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Value
    from tracer.lazy import LazyTensor

    Lead = Callable[..., bool]  # `Moves.lead` of a frame, for a site

NO_EXIT = "a way through it returns, and the function has no `return` of nothing but variables to leave it by"


# Makes the VJP of a block with recursive calls, for the watched arguments; set by `recursion`.
make_recursion_vjp: Callable[[Block, tuple[int, ...]], Vjp] | None = None


def vjp_for(run: FollowedCall, staged: TracedBranch, arguments: list[Value]) -> Vjp | str | None:
    """Returns the VJP that records a branch on the running tapes; if that is impossible, the reason, or None."""
    if tape_is_empty():
        return BranchVjp(staged.block, [])
    if run.tapes.foreign:  # may be forward accumulators, or tapes that other code uses
        return None
    watched = None
    if any(map(recurses, staged.block.steps)):
        watched = tuple([k for k, v in enumerate(arguments) if is_watched([v])])
    if watched not in staged.vjps:
        try:
            staged.vjps[watched] = _vjp_of(staged.block, watched)
        except Refused as refused:
            staged.vjps[watched] = str(refused)
    return staged.vjps[watched]


def _vjp_of(block: Block, watched: tuple[int, ...] | None) -> Vjp:
    if not watched:
        return BranchVjp(block, [] if watched is not None else vjps_of(block))
    assert make_recursion_vjp is not None
    return make_recursion_vjp(block, watched)


def refuse_branch(
    staged: TracedBranch, decision: Decision, frame: FrameType, local: dict[str, Value], ways: list[Exit]
) -> None:
    """Refuses a branch that Python cannot be moved past; `ways` are the exits of the function."""
    bound = (*local, *staged.names)
    if not staged.ends:
        if isinstance(decision.statement, Simple):
            answer_at_once(decision.statement)
        else:
            way_past(decision, frame.f_code, bound)
        return
    refuse_guarded(frame)
    if not is_decorated(frame):
        way = exit_for(ways, staged.value)
        if way is None:
            raise Refused(NO_EXIT)
        line_of_exit(way, frame.f_code, (*bound, *([way.names] if isinstance(way.names, str) else way.names)))


def take(
    staged: TracedBranch, arguments: list[Value], decision: Decision, frame: FrameType, local: dict[str, Value],
    ways: list[Exit], lead: Lead, results: list[LazyTensor],
) -> bool:  # fmt: skip
    """Moves Python past a branch that returned `results`; returns the answer to its test.

    Raises `EarlyReturn` if the branch ends the decorated function. `lead` has the frame resume elsewhere, or with other
    variables, from its next line on.
    """
    statement = decision.statement
    if staged.ends:
        value = built(staged.value, results, arguments)
        if is_decorated(frame):
            raise EarlyReturn(value)
        return _leave(exit_for(ways, staged.value), value, frame, local, lead)
    values = _values(staged, results, arguments)
    if isinstance(statement, Simple):
        lines = range(statement.lineno, (statement.end_lineno or 0) + 1)
        return bool(lead(answer_at_once(statement), lines=lines, values=values))
    past = way_past(decision, frame.f_code, (*local, *staged.names))
    set_locals(frame, values)
    return past.answer if past.line is None else bool(lead(past.answer, line=past.line))


def _leave(way: Exit | None, value: Value, frame: FrameType, local: dict[str, Value], lead: Lead) -> bool:
    """Moves a frame to a `return` of variables, which are set to the value; returns the answer to its test."""
    assert way is not None  # else it was refused
    values = {way.names: value} if isinstance(way.names, str) else dict(zip(way.names, value, strict=True))
    line = line_of_exit(way, frame.f_code, (*local, *values))
    set_locals(frame, values)
    return way.answer if line is None else bool(lead(way.answer, line=line))


def _values(staged: TracedBranch, results: list[LazyTensor], arguments: list[Value]) -> dict[str, Value]:
    return {name: built(form, results, arguments) for name, form in staged.names.items()}


def run_block(
    run: FollowedCall, staged: TracedBranch, arguments: list[Value], vjp: Vjp | None = None
) -> list[LazyTensor] | None:
    """Issues a traced branch as the next operation of a followed call; returns its results.

    None if Python must run all of it. `vjp` records it on tapes.
    """
    block = staged.block if vjp is None else vjp.forward
    specs = [*staged.specs, *(() if vjp is None else vjp.more)]
    given = [
        read(run, v.handle, spec) if type(v) is VariableRead else v
        for v, spec in zip(arguments, block.arguments, strict=True)
    ]
    results = issue(run, CALL, ("structure", block), given, specs)
    if staged.stops:
        run.flush()
        if results[len(staged.specs) - 1].truth():
            return None
    notify_of_reads(arguments)
    if vjp is not None and not tape_is_empty():
        record_reads(arguments, given)
        vjp.record(run, given, results)
    return results


def finish_range(
    run: FollowedCall, staged: TracedRange, arguments: list[Value], before: dict[str, Value]
) -> tuple[dict[str, Value] | None, int]:
    """Returns the variables after a range loop, None if it stopped before its end; and its number of iterations."""
    results = run_block(run, staged, arguments)
    if results is None:
        return None, 0
    after = {name: built(form, results, arguments) for name, form in staged.names.items()}
    if OVER in after:
        after[OVER] = after[OVER].truth()
    return after, staged.turns(before, after)


def described(staged: TracedBranch) -> str:
    """Returns a description of how the device runs a branch; `{}` stands for the statement."""
    if any(map(recurses, staged.block.steps)):
        return "{} is decided on the device, where functions call themselves"
    ways = [s.attrs[1] for s in staged.block.steps if s.op == BRANCH]
    how = "both ways are computed, and one is selected" if all(map(selects, ways)) else "only the way taken is run"
    return f"{{}} is decided on the device: {how}"
