"""Decisions: the places where a program tests a tensor's truth value, and what the device does there instead.

By default a decision is a fetch: Python waits for the value, and branches. But if it is the test of a `while` loop, the
loop may be traced and iterate on the device, as long as its iterations have no effects. Then the local variables are
set to their values after these iterations, the test gets the answer that is right there, and Python resumes from that.
If it selects a branch of an `if`, and neither branch has effects, Python need not wait at all (`branch_launch`).
"""

from __future__ import annotations

import ast
import math
import statistics
import sys
import time
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from coexec.base.stats import EventLog, Kind
from coexec.base.tuning import tuning
from coexec.control_flow.run import branch_launch
from coexec.control_flow.run.frames import (
    Callers,
    Moves,
    exits,
    identity_is_asked,
    is_decorated,
    locals_of,
    looks_at_variables,
    may_move,
    set_locals,
    way_into_else,
)
from coexec.control_flow.run.identity import (
    Watchers,
    gives_twice,
    hands_on,
    hands_on_any,
    lists_what_it_is_given,
    may_be_asked,
)
from coexec.control_flow.run.loop_launch import LoopRun, room_for, vjp_for
from coexec.control_flow.run.placement import Placements
from coexec.control_flow.run.sites import Site
from coexec.control_flow.trace.check_failures import refuse_failures
from coexec.control_flow.trace.conditionals import TracedBranch, trace_branch
from coexec.control_flow.trace.range_loops import (
    OVER,
    RangeIterations,
    TracedRange,
    means_range,
    trace_range,
    trace_range_iterations,
)
from coexec.control_flow.trace.read_guards import is_tensor
from coexec.control_flow.trace.reads import has_own_builtins
from coexec.control_flow.trace.statements import returns
from coexec.control_flow.trace.while_loops import TracedLoop, appended_names, trace_loop
from coexec.follow.device_control import FollowedCall
from tracer.errors import Refused
from tracer.intercept import tape_is_empty
from tracer.lazy import LazyTensor, has_attributes
from tracer.location import Location, call_stack, is_user
from tracer.syntax import Decision, Simple, decision_at, names_read

if TYPE_CHECKING:
    from collections.abc import Callable

    from coexec.control_flow.program_types import Value
    from coexec.control_flow.run.sites import Staged

    _Traced = TypeVar("_Traced", bound=Staged)


class Decisions:
    """The decisions of one co-executed function's calls."""

    def __init__(self, ledger: EventLog, by_itself: bool = False) -> None:
        """`by_itself`: nobody asked for decisions on the device, so nothing may differ."""
        self.ledger = ledger
        self._by_itself = by_itself  # then only `while` loops are the device's: no frame goes on elsewhere for them
        self.are_idle = by_itself  # whether the device has taken none so far, so that calls are followed as without
        self._sites: dict[tuple[int, int, int], Site] = {}  # by code, statement and globals
        self._places: dict[tuple[int, int, int], tuple[Site, Decision | None]] = {}  # by code, instruction and globals
        self._moves = Moves()
        self._callers = Callers()
        self.placements = Placements(ledger)
        self.watchers = Watchers()

    def decide(self, run: FollowedCall, lazy: LazyTensor, frame: FrameType) -> bool:
        """Returns the truth value of a tensor that the code of `frame` tests; its loop may have run on the device."""
        key = id(frame.f_code), frame.f_lasti, id(frame.f_globals)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= tuning.max_decisions:
                self.clear()
            place = self._places[key] = self._new(frame)
        site, decision = place
        if (known := self._moves.answer(frame, site)) is not None:
            return known
        self.ledger.count("decisions")
        if decision is not None and isinstance(decision.statement, ast.For) and not tape_is_empty():
            site = site.under_tapes()
        site.seen += 1
        if decision is None or (self._by_itself and not isinstance(decision.statement, ast.While)):
            return lazy.truth()
        if isinstance(decision.statement, ast.Assert):
            return self._assume(site, decision.statement, run, lazy) if self._may(run) else lazy.truth()
        if site.reason is None and site.seen > self._patience() and run.recorder is None and self._may(run):
            try:
                if isinstance(decision.statement, (ast.If, Simple)):
                    if not returns(decision.statement) or is_decorated(frame) or site.exits:
                        answer = self._take(site, decision, run, lazy, frame)
                    else:
                        answer = self._take_around(site, run, lazy, frame)
                elif isinstance(decision.statement, ast.For):
                    answer = self._run_range(site, decision, run, frame)
                else:
                    answer = self._run_loop(site, decision, run, lazy, frame)
            except Refused as refused:
                self._leave_to_python(site, str(refused))
                answer = None
            if answer is not None:
                site.before = 0.0
                self.are_idle = False
                return answer
        truth = lazy.truth()
        site.went_on(truth is not decision.negated)
        return truth

    def wait(self, lazy: LazyTensor) -> bool:
        """Returns a tensor's truth value, for which Python waits."""
        self.ledger.count("decisions")
        return lazy.truth()

    def clear(self) -> None:
        """Clears everything learnt."""
        self._sites.clear()
        self._places.clear()
        self.placements.clear()

    def _new(self, frame: FrameType) -> tuple[Site, Decision | None]:
        """Returns the site of the statement that `frame` is in, with a `reason` if the device can never decide it."""
        code, space = frame.f_code, frame.f_globals
        if not is_user(code):
            return Site(code, None, space, reason="a library asks"), None
        decision = decision_at(code, frame.f_lasti, space)
        if decision is None:
            reason = "it is no test of a statement, or the source is not known"
            self.ledger.cause(Kind.DECISION, f"an expression is decided by Python: {reason}", _location())
            return Site(code, None, space, reason=reason), None
        key = id(code), id(decision.statement), id(space)
        site = self._sites.setdefault(key, Site(code, decision.statement, space))
        if looks_at_variables(code):
            self._leave_to_python(site, "the function looks at its own variables")
        elif has_own_builtins(frame):
            self._leave_to_python(site, "the function has builtins of its own")
        elif isinstance(decision.statement, (ast.If, Simple)):
            if identity_is_asked(frame):
                self._leave_to_python(site, "the function asks whether two values are one object")
            if returns(decision.statement):
                site.exits = exits(decision, frame)
        return site, decision

    def _patience(self) -> int:
        return tuning.decision_patience_known if self._by_itself else tuning.decision_patience

    def _may(self, run: FollowedCall) -> bool:
        return may_move() and run.forced < 0 and not (self._by_itself and sys.getprofile() is not None)

    def _take(
        self, site: Site, decision: Decision, run: FollowedCall, lazy: LazyTensor, frame: FrameType
    ) -> bool | None:
        """Runs a branch on the device; returns the answer to its test, or None if Python must decide."""
        if site.deep == id(run) or self.placements.leaves(run, site):
            return None
        variables = locals_of(frame)

        def stage() -> TracedBranch:
            staged = trace_branch(decision, lazy, frame, variables)
            refuse_failures(staged.block, checked=False)
            branch_launch.refuse_branch(staged, decision, frame, variables, site.exits)
            return staged

        found = self._find(
            run, site, frame, variables, stage, lambda staged: branch_launch.described(staged).format(site.noun), lazy
        )
        if found is None:
            return None
        staged, arguments = found
        vjp = branch_launch.vjp_for(run, staged, arguments)
        if vjp is None or isinstance(vjp, str):
            if vjp is not None:
                self.ledger.cause(Kind.DECISION, f"{site.left} under a tape: {vjp}", _location())
            return None
        results = branch_launch.run_block(run, staged, arguments, vjp)
        if results is None:
            site.deep = id(run)
            site.idle += 1
            if site.idle >= tuning.max_stage_idle:
                self._leave_to_python(site, "it was left to Python each time")
            return None
        site.idle = 0
        if not staged.stops:
            self.placements.begin(run, site, _location)
        self.ledger.count(decisions_on_device=1)
        lead = partial(self._moves.lead, frame, site)
        return branch_launch.take(staged, arguments, decision, frame, variables, site.exits, lead, results)

    def _take_around(self, asks: Site, run: FollowedCall, lazy: LazyTensor, frame: FrameType) -> bool | None:
        """Runs the decorated function's `return` on the device, whose expression called the function that tests.

        Raises `EarlyReturn` if it does; returns None if Python must decide.
        """
        caller = self._callers.returning(frame)
        if caller is None:
            if None not in asks.refused:
                asks.refused[None] = branch_launch.NO_EXIT
                self.ledger.cause(Kind.DECISION, f"{asks.left}: {asks.refused[None]}", _location())
            return None
        around, call = caller
        key = id(around.f_code), id(call.statement), id(around.f_globals)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(around.f_code, call.statement, around.f_globals)
            if looks_at_variables(around.f_code) or identity_is_asked(frame):
                why = "the function looks at its own variables, or asks if two values are one object"
                self._leave_to_python(site, why)
            elif has_own_builtins(around):
                self._leave_to_python(site, "the function has builtins of its own")
        return None if site.reason is not None else self._take(site, call, run, lazy, around)

    def _assume(self, site: Site, statement: ast.Assert, run: FollowedCall, lazy: LazyTensor) -> bool:
        """Returns the truth of an assertion; assumes that it holds if a failure would surface before it mattered."""
        message: list[Value] = [] if statement.msg is None else [getattr(statement.msg, "value", None)]
        if site.reason is None and all(type(part) is str for part in message):
            if run.assume(lazy, message):
                self.ledger.count(decisions_on_device=1)
                return True
        else:
            self._leave_to_python(site, "its message is computed")
        return lazy.truth()

    def _run_loop(
        self, site: Site, decision: Decision, run: FollowedCall, lazy: LazyTensor, frame: FrameType
    ) -> bool | None:
        """Runs iterations of the loop on the device; returns the answer to its test, None if Python must decide."""
        if not self._can_record(site, run) or (self._by_itself and decision.compares_on):  # that takes a trace function
            return None
        variables = locals_of(frame)

        def stage() -> TracedLoop:
            staged = trace_loop(site.statement, frame, variables, rows=site.rows)  # type: ignore[arg-type]
            refuse_failures(staged.loop)
            return staged

        found = self._find(run, site, frame, variables, stage, lambda _: "a `while` loop turns on the device")
        if found is None:
            return None
        staged, arguments = found
        began = time.perf_counter()
        turns = self._launch_loop(site, run, staged, arguments)
        if turns is None:
            return None
        if turns.count == 0 or turns.is_untold:
            truth = lazy.truth()
            site.idle += truth is not decision.negated
            if site.idle >= tuning.max_stage_idle:
                self._leave_to_python(site, "its turns were left to Python each time")
            return truth
        site.idle = 0
        if turns.vjp is not None:
            turns.record()
        after = turns.after(variables)
        # Before anything of the program's is set: if this fails, Python runs the loop from where it is.
        self.ledger.count(decisions_on_device=turns.count)
        self._compare_times(site, (time.perf_counter() - began) / turns.count)
        most = turns.hand_over(variables)
        set_locals(frame, after)
        if 2 * most > site.rows and site.rows < tuning.max_device_turns:
            site.rows *= 2
            site.staged.remove(staged)
        answer = turns.goes_on is not decision.negated
        return self._moves.lead(frame, site, True) if answer and decision.compares_on else answer

    def _can_record(self, site: Site, run: FollowedCall) -> bool:
        """Whether the running tapes, if any, can record iterations: foreign ones may be forward accumulators."""
        return tape_is_empty() or (not run.tapes.foreign and site.untold < tuning.max_stage_again)

    def _launch_loop(self, site: Site, run: FollowedCall, staged: TracedLoop, arguments: list[Value]) -> LoopRun | None:
        """Runs a loop on the device; returns the run, or None if it cannot be recorded on tapes."""
        vjp = vjp_for(staged, arguments)
        if isinstance(vjp, str):
            site.untold += 1
            self.ledger.cause(Kind.DECISION, f"{site.left} under a tape: {vjp}", _location())
            return None
        most = staged.loop.limit
        room = room_for(vjp, site.longest, most)
        turns = LoopRun(run, staged, arguments, vjp, room)
        if vjp is None:
            site.longest = max(site.longest, turns.count)
            return turns
        site.longest = max(site.longest, turns.count * (2 if turns.is_full else 1))
        turns.has_widened = turns.is_full and room_for(vjp, site.longest, most) > room
        return turns

    def _run_range(self, site: Site, decision: Decision, run: FollowedCall, frame: FrameType) -> bool | None:
        """Runs a range loop on the device to its end; returns the answer that leaves it, None if Python must run it."""
        if not self._can_record(site, run) or self.placements.leaves(run, site) or not means_range(frame):
            return None
        variables = locals_of(frame)
        told = not tape_is_empty() or bool(appended_names(site.statement.body))  # type: ignore[union-attr]

        def stage() -> TracedRange | RangeIterations:
            if told:
                staged: TracedRange | RangeIterations = trace_range_iterations(decision, frame, variables, site.rows)
            else:
                staged = trace_range(decision, frame, variables)
            for part in staged.parts():
                refuse_failures(part)
            way_into_else(decision.statement, frame.f_code, variables)  # type: ignore[arg-type]
            return staged

        found = self._find(run, site, frame, variables, stage, lambda _: "a `for` loop turns on the device", None)
        if found is None:
            return None
        staged, arguments = found
        if told:
            after, turned = self._run_range_taped(site, run, staged, arguments, variables)  # type: ignore[arg-type]
        else:
            after, turned = branch_launch.finish_range(run, staged, arguments, variables)  # type: ignore[arg-type]
        if after is None:
            site.idle += turned == 0
            if site.idle >= tuning.max_stage_idle:
                self._leave_to_python(site, "it was left to Python each time")
            return None
        site.idle = 0
        self.placements.begin(run, site, _location)
        self.ledger.count(decisions_on_device=1 + turned)
        is_over = after.pop(OVER, False)  # rather than left by `break`
        set_locals(frame, after)
        if is_over:
            line = way_into_else(decision.statement, frame.f_code, variables)  # type: ignore[arg-type]
            return self._moves.lead(frame, site, decision.negated, line=line)
        return not decision.negated

    def _run_range_taped(
        self, site: Site, run: FollowedCall, staged: RangeIterations, arguments: list[Value], before: dict[str, Value]
    ) -> tuple[dict[str, Value] | None, int]:
        """Does so as iterations that tapes can record.

        Returns the variables afterwards, None if Python must run the loop; and the number of iterations, which is not 0
        if the loop stopped for lack of room.
        """
        first = self._launch_loop(site, run, staged.turns, arguments)
        if first is not None and first.lists_are_full and site.rows < tuning.max_device_turns:
            site.rows *= 2
            site.staged.clear()
            return None, 1
        if first is None or first.goes_on or first.is_untold:
            return None, first.count if first is not None and first.has_widened else 0
        first.record()
        local = staged.within(before)
        after = first.after(local)
        local.update(after)
        last: LoopRun | None = None
        if staged.last is not None and staged.is_at_last(local):
            again = staged.last.arguments(local)
            last = None if again is None else self._launch_loop(site, run, staged.last, again)
            if last is None or (last.count == 0 and last.goes_on) or last.is_untold:
                return None, 0
            last.record()
            after.update(last.after(local))
        for turns in (first, *([last] if last is not None else [])):
            turns.hand_over(before)
        if staged.loop.orelse and last is not None and last.count:
            after[OVER] = True
        return staged.without(after), first.count + (last.count if last is not None else 0)

    def _find(
        self, run: FollowedCall, site: Site, frame: FrameType, variables: dict[str, Value],
        stage: Callable[[], _Traced], described: Callable[[_Traced], str], *asked: LazyTensor | None,
    ) -> tuple[_Traced, list[Value]] | None:  # fmt: skip
        """Returns a traced statement whose guards hold, and its arguments; traces it if need be; None if refused."""
        for _ in site.staged:  # rotated, as layers run in order
            staged: _Traced = site.staged.pop(0)  # type: ignore[assignment]  # a site's are of one kind
            site.staged.append(staged)
            arguments = staged.arguments(variables, *asked)
            if arguments is not None:
                return None if self._is_noticed(run, site, staged, arguments, frame) else (staged, arguments)
        most = tuning.max_staged if isinstance(site.statement, (ast.While, ast.For)) else tuning.max_staged_branches
        if len(site.staged) >= most or len(site.refused) >= tuning.max_stage_refused:
            self._leave_to_python(site, "what it relies on keeps changing")
            return None
        kinds = tuple((name, _kind(value)) for name, value in sorted(variables.items()))
        if kinds in site.refused and kinds in site.retried:
            site.again += 1
            if site.again >= tuning.max_stage_again and not site.staged:  # with traces, it pays to go on checking
                self._leave_to_python(site, site.refused[kinds])
            return None
        if kinds in site.refused:  # retried once: the first call of a new layer changes it
            site.retried.add(kinds)
        try:
            staged = stage()
            arguments = staged.arguments(variables, *asked)
            if arguments is None:
                raise Refused("what it depends on cannot be guarded")
        except (Refused, Exception) as refused:  # anything not understood is left to Python
            site.refused[kinds] = str(refused)
            self.ledger.cause(Kind.DECISION, f"{site.left}: {refused}", _location())
            return None
        seen = names_read(frame.f_code, frame.f_globals, site.statement)
        staged.is_shared = gives_twice(staged, seen) or (self._by_itself and lists_what_it_is_given(staged))
        staged.hands_on = staged.is_shared or any(map(hands_on, staged.parts()))
        site.staged.append(staged)
        if self._is_noticed(run, site, staged, arguments, frame):
            return None
        self.ledger.cause(Kind.DECISION, described(staged), _location())
        return staged, arguments

    def _is_noticed(
        self, run: FollowedCall, site: Site, staged: Staged, arguments: list[Value], frame: FrameType
    ) -> bool:
        """Whether the program may tell what comes out of a statement from what it was given; `explain()` says so."""
        if any(map(has_attributes, arguments)):  # a mask of Keras', for example: what is traced has none
            self.ledger.cause(Kind.DECISION, f"{site.left}: a tensor that it reads has attributes", _location())
            return True
        if not staged.hands_on:
            return False
        is_known_outside = self._by_itself and (staged.is_shared or hands_on_any(staged.parts(), arguments, run))
        if not (is_known_outside or may_be_asked(frame) or self.watchers.elsewhere(frame)):
            return False
        reason = "a tensor that it hands on may be asked for its identity, or watched by a tape, later on"
        self.ledger.cause(Kind.DECISION, f"{site.left}: {reason}", _location())
        return True

    def _compare_times(self, site: Site, seconds: float) -> None:
        """Leaves a loop to Python if its iterations take longer on the device."""
        site.device.append(seconds)
        if len(site.device) < tuning.decision_samples:
            return
        if len(site.python) >= tuning.decision_samples // 2 and not math.isinf(tuning.doubt_before_timing):
            ours, theirs = statistics.median(site.device), statistics.median(site.python)
            took = f"a turn took {1000 * ours:.3g} ms on the device, {1000 * theirs:.3g} in Python"
            if ours > theirs:
                self._leave_to_python(site, took)
            elif not site.contested:  # said once
                site.contested = True
                self.ledger.cause(Kind.DECISION, f"{site.taken}: {took}", _location())
        site.device.clear()

    def _leave_to_python(self, site: Site, reason: str) -> None:
        site.leave(reason)
        self.ledger.cause(Kind.DECISION, f"{site.left}: {reason}", _location())


def _kind(value: Value) -> object:
    kind = type(value)
    if kind in (bool, str, type(None)):
        return kind, value
    if kind in (int, float):  # may count iterations
        return kind
    return (value.dtype, value._shape_tuple()) if is_tensor(value) else id(value)


def _location() -> str:
    return str(Location(call_stack()[0], 0))
