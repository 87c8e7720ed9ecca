"""Decisions: where a program asks for the truth of a tensor, and what is done for it on the device instead.

A decision is a read: Python waits, and goes its way. But where it decides whether a `while` loop goes on, the loop may
be written down and turn on the device, as far as its turns do nothing but compute. Then the local variables are set to
what they are after these turns, the test is answered as it stands there, and Python goes on from that. Where it decides
which way an `if` takes, both of which only compute, nobody waits at all (`branches`).
"""

from __future__ import annotations

import ast
import math
import statistics
import sys
import time
from functools import partial
from types import FrameType
from typing import Any

from coexec import account
from coexec.events import Kind, Ledger
from coexec.runtime import branches
from coexec.runtime.assertions import ASSERTIONS, assume, assume_statement
from coexec.runtime.callers import Calls, asks_for_caller, identity_is_asked, least, leaves_function
from coexec.runtime.contests import Contests
from coexec.runtime.passing import Passage, set_variables, variables_of
from coexec.runtime.sites import SAMPLES, Site
from coexec.runtime.structures import refuse_failures
from coexec.runtime.turns import Turns, adjoint_for, room_for
from coexec.staging.branches import StagedBranch, stage_branch
from coexec.staging.loops import Staged, appended_names, stage_loop
from coexec.staging.ranges import OVER, RangeTurns, StagedRange, stage_range, stage_range_turns
from coexec.staging.statements import LIMIT
from tracer.errors import Refused
from tracer.intercept import tape_is_empty
from tracer.lazy import LazyTensor
from tracer.location import Location, call_stack, is_entry, is_user
from tracer.private import EagerTensor
from tracer.syntax import Decision, Simple, decision_at

# How often a place decides before its loop is looked at: to write one down takes as long as some hundred operations.
patience: int = 16

MAX_PLACES = 4096
MAX_STAGED = 4  # ways in which a loop is written down: for tensors of other shapes, other Python values
MAX_STAGED_BRANCHES = 64  # the same of a branch, which may be one of a stack of layers
MAX_REFUSED = 16
MAX_AGAIN = 32
MAX_IDLE = 4  # times that a loop did not turn on the device, though it went on

# Who uses these looks at the variables of a running function, which are made anew here.
_LOOKING = frozenset({"locals", "vars", "eval", "exec", "dir", "_getframe"})


class Decisions:
    """The decisions of one function's calls."""

    def __init__(self, ledger: Ledger, on_device: bool) -> None:
        self.ledger = ledger
        self.on_device = on_device
        self._sites: dict[Any, Site] = {}  # by code and statement
        self._places: dict[tuple[int, int], tuple[Site, Decision | None]] = {}  # by code and instruction
        self._passage = Passage()
        self._calls = Calls()
        self.contests = Contests(ledger)

    def decide(self, run: Any, lazy: LazyTensor, frame: FrameType) -> bool:
        """Returns the truth of a tensor for which the code of `frame` asks; the loop that asks may have turned."""
        if frame.f_code in ASSERTIONS and assume(run, lazy, frame):
            return True
        if not self.on_device:
            self.ledger.count("decisions")
            return lazy.truth()
        key = id(frame.f_code), frame.f_lasti
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= MAX_PLACES:
                self.clear()
            place = self._places[key] = self._new(frame)
        site, decision = place
        if self._passage.answers and (known := self._passage.answer(frame, site, decision)) is not None:
            return known
        self.ledger.count("decisions")
        if decision is not None and isinstance(decision.statement, ast.For) and not tape_is_empty():
            site = site.under_tapes()
        site.seen += 1
        if decision is None:
            return lazy.truth()
        if isinstance(decision.statement, ast.Assert):
            return self._assume(site, decision.statement, run, lazy) if self._may(run) else lazy.truth()
        if site.reason is None and site.seen > patience and run.recorder is None and self._may(run):
            try:
                if isinstance(decision.statement, (ast.If, Simple)):
                    around = self._asks_for_caller(site, decision, frame)
                    answer = self._take_around(site, decision, run, lazy, frame) if around else None
                    if answer is None and not (around and leaves_function(decision)):
                        answer = self._take(site, decision, run, lazy, frame)
                elif isinstance(decision.statement, ast.For):
                    answer = self._finish(site, decision, run, frame)
                else:
                    answer = self._turn(site, decision, run, lazy, frame)
            except Refused as refused:
                self._leave(site, str(refused))
                answer = None
            if answer is not None:
                site.before = 0.0
                return answer
        truth = lazy.truth()
        site.went_on(truth is not decision.negated)
        return truth

    def clear(self) -> None:
        """Forgets all that was learnt."""
        self._sites.clear()
        self._places.clear()
        self.contests.clear()

    def _new(self, frame: FrameType) -> tuple[Site, Decision | None]:
        code = frame.f_code
        if not is_user(code):
            return Site(code, None, reason="a library asks"), None
        decision = decision_at(code, frame.f_lasti, frame.f_globals)
        if decision is None:
            reason = "it is no test of a statement, or the source is not known"
            self.ledger.cause(Kind.DECISION, f"an expression is decided by Python: {reason}", _place())
            return Site(code, None, reason=reason), None
        site = self._sites.setdefault((id(code), id(decision.statement)), Site(code, decision.statement))
        if _LOOKING.intersection(code.co_names):
            self._leave(site, "the function looks at its own variables")
        elif isinstance(decision.statement, (ast.If, Simple)) and identity_is_asked(frame):
            self._leave(site, "the function asks whether two values are one object")
        return site, decision

    def _may(self, run: Any) -> bool:
        return sys.gettrace() is None and run.forced < 0

    def _take(self, site: Site, decision: Decision, run: Any, lazy: LazyTensor, frame: FrameType) -> bool | None:
        """Takes a branch on the device; returns what its test is to be taken for, None if that is for Python to see."""
        if site.deep == id(run) or self.contests.leaves(run, site):
            return None
        variables = variables_of(frame)

        def stage() -> StagedBranch:
            staged = stage_branch(decision, lazy, frame, variables)
            refuse_failures(staged.block, checked=False)
            branches.refuse_branch(staged, decision, frame, variables)
            return staged

        found = self._find(site, variables, stage, lambda staged: branches.described(staged).format(site.noun), lazy)
        if found is None:
            return None
        staged, arguments = found
        gradients = branches.gradients_for(run, staged, arguments)
        if gradients is None or isinstance(gradients, str):
            if gradients is not None:
                self.ledger.cause(Kind.DECISION, f"{site.left} under a tape: {gradients}", _place())
            return None
        results = branches.run_block(run, staged, arguments, gradients)
        if results is None:
            site.deep = id(run)
            site.idle += 1
            if site.idle >= MAX_IDLE:
                self._leave(site, "it was left to Python each time")
            return None
        site.idle = 0
        if not staged.stops:
            self.contests.begin(run, site, _place)
        self.ledger.count(decisions_on_device=1)
        lead = partial(self._passage.lead, frame, site)
        return branches.take(staged, arguments, decision, frame, variables, lead, results)

    def _asks_for_caller(self, site: Site, decision: Decision, frame: FrameType) -> bool:
        if frame.f_back is None or is_entry(frame.f_back.f_code):
            return False
        if site.for_caller is None:
            site.for_caller = asks_for_caller(decision, frame.f_code, frame.f_globals)
        return site.for_caller

    def _take_around(self, asks: Site, decision: Decision, run: Any, lazy: LazyTensor, frame: FrameType) -> bool | None:
        """Takes a statement on the device in whose midst a function was called that asks, and returns on a way."""
        callers = list(self._calls.around(frame))
        if not callers and None not in asks.refused:
            asks.refused[None] = "no assignment or `return` on lines of its own has called it"
            self.ledger.cause(Kind.DECISION, f"{asks.left}: {asks.refused[None]}", _place())
        for caller, call in callers:
            key = id(caller.f_code), id(call.statement)
            site = self._sites.get(key)
            if site is None:
                site = self._sites[key] = Site(caller.f_code, call.statement)
                if _LOOKING.intersection(caller.f_code.co_names) or identity_is_asked(frame):
                    self._leave(site, "the function looks at its own variables, or asks if two values are one object")
            if site.reason is not None or site.deep == id(run):
                continue
            if self.contests.leaves(run, site):
                return None
            called = {caller.f_code, frame.f_code}
            answer = self._take(site, call._replace(answer=least(decision, called)), run, lazy, caller)
            if answer is not None:
                return answer
        return None

    def _assume(self, site: Site, statement: ast.Assert, run: Any, lazy: LazyTensor) -> bool:
        """Returns the truth of an assertion: it is taken to hold where it is found out before anybody could tell."""
        message: list[Any] = [] if statement.msg is None else [getattr(statement.msg, "value", None)]
        if site.reason is None and all(type(part) is str for part in message):
            if assume_statement(run, lazy, message):
                self.ledger.count(decisions_on_device=1)
                return True
        else:
            self._leave(site, "its message is computed")
        return lazy.truth()

    def _turn(self, site: Site, decision: Decision, run: Any, lazy: LazyTensor, frame: FrameType) -> bool | None:
        """Lets the loop turn on the device; returns what its test is to be taken for, None if it has not turned."""
        if not self._may_tell(site, run):
            return None
        variables = variables_of(frame)

        def stage() -> Staged:
            staged = stage_loop(site.statement, frame, variables, rows=site.rows)
            refuse_failures(staged.loop)
            return staged

        found = self._find(site, variables, stage, lambda _: "a `while` loop turns on the device")
        if found is None:
            return None
        staged, arguments = found
        began = time.perf_counter()
        turns = self._turns(site, run, staged, arguments)
        if turns is None:
            return None
        if turns.count == 0:
            truth = lazy.truth()
            site.idle += truth is not decision.negated
            if site.idle >= MAX_IDLE:
                self._leave(site, "its turns were left to Python each time")
            return truth
        site.idle = 0
        if turns.adjoint is not None:
            turns.record()
        after = turns.after(variables)
        most = turns.hand_over(variables)
        set_variables(frame, after)
        if 2 * most > site.rows and site.rows < LIMIT:
            site.rows *= 2
            site.staged.remove(staged)
        self.ledger.count(decisions_on_device=turns.count)
        self._account(site, (time.perf_counter() - began) / turns.count)
        answer = turns.goes_on is not decision.negated
        return self._passage.lead(frame, site, True) if answer and decision.compares_on else answer

    def _may_tell(self, site: Site, run: Any) -> bool:
        """Whether tapes can be told of turns, if there are any: those of others may be accumulators."""
        return tape_is_empty() or (not run.tapes.foreign and site.untold < MAX_AGAIN)

    def _turns(self, site: Site, run: Any, staged: Staged, arguments: list[Any]) -> Turns | None:
        """Returns what a loop has done on the device, where tapes can be told of that."""
        adjoint = adjoint_for(staged, arguments)
        if isinstance(adjoint, str):
            site.untold += 1
            self.ledger.cause(Kind.DECISION, f"{site.left} under a tape: {adjoint}", _place())
            return None
        most = staged.loop.limit
        room = room_for(adjoint, site.longest, most)
        turns = Turns(run, staged, arguments, adjoint, room)
        if adjoint is None:
            site.longest = max(site.longest, turns.count)
            return turns
        site.longest = max(site.longest, turns.count * (2 if turns.is_full else 1))
        turns.has_widened = turns.is_full and room_for(adjoint, site.longest, most) > room
        return turns

    def _finish(self, site: Site, decision: Decision, run: Any, frame: FrameType) -> bool | None:
        """Lets a loop over a range turn on the device to its end; returns that it is left, None if Python must turn."""
        if not self._may_tell(site, run) or self.contests.leaves(run, site):
            return None
        variables = variables_of(frame)
        told = not tape_is_empty() or bool(appended_names(site.statement.body))

        def stage() -> StagedRange | RangeTurns:
            if told:
                staged: StagedRange | RangeTurns = stage_range_turns(decision, frame, variables, site.rows)
            else:
                staged = stage_range(decision, frame, variables)
            for part in staged.parts():
                refuse_failures(part)
            branches.way_into_else(decision.statement, frame.f_code, variables)
            return staged

        found = self._find(site, variables, stage, lambda _: "a `for` loop turns on the device", None)
        if found is None:
            return None
        staged, arguments = found
        if told:
            after, turned = self._finish_told(site, run, staged, arguments, variables)
        else:
            after, turned = branches.finish_range(run, staged, arguments, variables)
        if after is None:
            site.idle += turned == 0
            if site.idle >= MAX_IDLE:
                self._leave(site, "it was left to Python each time")
            return None
        site.idle = 0
        self.contests.begin(run, site, _place)
        self.ledger.count(decisions_on_device=1 + turned)
        is_over = after.pop(OVER, False)  # rather than left
        set_variables(frame, after)
        if is_over:
            line = branches.way_into_else(decision.statement, frame.f_code, variables)
            return self._passage.lead(frame, site, decision.negated, line=line)
        return not decision.negated

    def _finish_told(
        self, site: Site, run: Any, staged: RangeTurns, arguments: list[Any], before: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, int]:
        """Does so as tapes can be told of it; of a loop that has stopped as there was no more room, gives its turns."""
        first = self._turns(site, run, staged.turns, arguments)
        if first is not None and first.lists_are_full and site.rows < LIMIT:
            site.rows *= 2
            site.staged.clear()
            return None, 1
        if first is None or first.goes_on:
            return None, first.count if first is not None and first.has_widened else 0
        first.record()
        local = staged.within(before)
        after = first.after(local)
        local.update(after)
        last: Turns | None = None
        if staged.last is not None and staged.is_at_last(local):
            again = staged.last.arguments(local)
            last = None if again is None else self._turns(site, run, staged.last, again)
            if last is None or (last.count == 0 and last.goes_on):
                return None, 0
            last.record()
            after.update(last.after(local))
        for turns in (first, *([last] if last is not None else [])):
            turns.hand_over(before)
        if staged.loop.orelse and last is not None and last.count:
            after[OVER] = True
        return staged.without(after), first.count + (last.count if last is not None else 0)

    def _find(self, site: Site, variables: dict[str, Any], stage: Any, described: Any, *asked: Any) -> Any:
        """Returns the statement as it was written down, and what it is to be given; None if it stays with Python."""
        for _ in site.staged:  # in turn: layers come in order
            staged = site.staged.pop(0)
            site.staged.append(staged)
            arguments = staged.arguments(variables, *asked)
            if arguments is not None:
                return staged, arguments
        most = MAX_STAGED if isinstance(site.statement, (ast.While, ast.For)) else MAX_STAGED_BRANCHES
        if len(site.staged) >= most or len(site.refused) >= MAX_REFUSED:
            self._leave(site, "what it relies on keeps changing")
            return None
        kinds = tuple((name, _kind(value)) for name, value in sorted(variables.items()))
        if kinds in site.refused and kinds in site.retried:
            site.again += 1
            if site.again >= MAX_AGAIN and not site.staged:  # looking is not for nothing
                self._leave(site, site.refused[kinds])
            return None
        if kinds in site.refused:  # once more: a layer that is new changes with its first call
            site.retried.add(kinds)
        try:
            staged = stage()
            arguments = staged.arguments(variables, *asked)
            if arguments is None:
                raise Refused("what it relies on cannot be looked up again")
        except (Refused, Exception) as refused:  # whatever is not understood, Python does
            site.refused[kinds] = str(refused)
            self.ledger.cause(Kind.DECISION, f"{site.left}: {refused}", _place())
            return None
        site.staged.append(staged)
        self.ledger.cause(Kind.DECISION, described(staged), _place())
        return staged, arguments

    def _account(self, site: Site, seconds: float) -> None:
        """Leaves a loop to Python whose turns take longer on the device."""
        site.device.append(seconds)
        if len(site.device) < SAMPLES:
            return
        if len(site.python) >= SAMPLES // 2 and not math.isinf(account.doubtful):
            ours, theirs = statistics.median(site.device), statistics.median(site.python)
            if ours > theirs:
                self._leave(site, f"a turn took {1000 * ours:.2f} ms on the device, {1000 * theirs:.2f} in Python")
        site.device.clear()

    def _leave(self, site: Site, reason: str) -> None:
        site.leave(reason)
        self.ledger.cause(Kind.DECISION, f"{site.left}: {reason}", _place())


def _kind(value: Any) -> Any:
    if isinstance(value, (bool, str, type(None))):
        return type(value), value
    if isinstance(value, (int, float)):  # which may count the turns
        return type(value)
    return (value.dtype, value._shape_tuple()) if isinstance(value, EagerTensor) else id(value)


def _place() -> str:
    return str(Location(call_stack()[0], 0))
