"""Branches: an `if` that asks a tensor, taken on the device while Python goes on behind it.

Nobody waits: the statement is one more operation of the segment. The local variables are set to what it gives, and
Python is kept from running either way: the test of an `if` without `else` is answered by no, past another the frame
goes on at the statement behind it, as under a debugger, and a function that returns is left at once.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import tensorflow as tf

from coexec.lowering.failures import differs
from coexec.lowering.plan import recurses, selects
from coexec.runtime.backward import record_branch, record_reads, record_unwinding
from coexec.runtime.passing import set_variables
from coexec.runtime.structures import issue, read
from coexec.runtime.turns import is_watched
from coexec.staging.branches import StagedBranch, built
from coexec.staging.gradients import gradients_of, refuse_hidden
from coexec.staging.lookups import Held
from coexec.staging.ranges import OVER, StagedRange
from coexec.staging.unwinding import Unwinding
from tracer.block import BRANCH, CALL, FLAG, PACKED, Block, steps_of
from tracer.errors import Refused
from tracer.guards import is_guarded
from tracer.intercept import tape_is_empty
from tracer.location import is_entry
from tracer.syntax import Decision, Simple, line_of


class Returned(BaseException):
    """Leaves a function of the user's, for the one who called it: `run` of the controller."""

    def __init__(self, value: Any) -> None:
        self.value = value


def gradients_for(run: Any, staged: StagedBranch, arguments: list[Any]) -> Any:
    """Returns how to tell tapes of a branch, if there are any; where they cannot be told, why, or None."""
    if tape_is_empty():
        return ()
    if run.tapes.foreign:  # they may be accumulators, and others may ask them
        return None
    watched = None
    if any(map(recurses, staged.block.steps)):
        watched = tuple([k for k, v in enumerate(arguments) if is_watched([v])])
    if watched not in staged.gradients:
        try:
            staged.gradients[watched] = _gradients(staged.block, watched)
        except Refused as refused:
            staged.gradients[watched] = str(refused)
    return staged.gradients[watched]


def _gradients(block: Block, watched: tuple[int, ...] | None) -> Any:
    if watched is None:
        return gradients_of(block)
    if not watched:
        return ()
    if tf.config.list_physical_devices("GPU"):  # TensorFlow has no kernels there for what each call packs
        raise Refused("a function in it calls itself, and there is a GPU")
    refuse_hidden(block)
    unwinding = Unwinding(block, watched)
    for step in unwinding.steps:
        for inner in (step, *steps_of(step)):
            if difference := differs(inner.op or ""):
                raise Refused(f"{inner.op} {difference}")
    return unwinding


def refuse_branch(staged: StagedBranch, decision: Decision, frame: FrameType, local: dict[str, Any]) -> None:
    """Refuses a branch that Python cannot be kept from running."""
    if isinstance(decision.statement, Simple) and not staged.ends:
        return
    if not staged.ends:
        way_past(decision, frame.f_code, (*local, *staged.names))
        return
    if frame.f_back is None or not is_entry(frame.f_back.f_code):
        raise Refused("a way through it returns, to a caller that waits for that")
    if is_guarded(frame.f_code, frame.f_lasti, frame.f_globals):
        raise Refused("a way through it returns from within a `try` or `with`")


def way_past(decision: Decision, code: CodeType, bound: Iterable[str]) -> tuple[bool, int | None]:
    """Returns how to keep Python from running either way of an `if`: what to take the test for, and where to go on.

    `bound` holds the names of the variables that have a value there.
    """
    branch: Any = decision.statement
    chain = branch.test if isinstance(branch.test, ast.BoolOp) and not decision.mixed else None
    takes = chain is not None and isinstance(chain.op, ast.Or)  # else the other parts of the test would be asked
    if not branch.orelse and not takes and not decision.mixed:
        return False, None
    if decision.next is None:
        raise Refused("there is no one statement behind it")
    if (takes or decision.mixed) and branch.body[0].lineno == (branch.test.end_lineno or branch.test.lineno):
        raise Refused("its test and what it decides about are on one line")
    return takes, _line_to(decision.next, code, bound)


def way_into_else(loop: Any, code: CodeType, bound: Iterable[str]) -> int | None:
    """Returns where Python is to go on behind a loop over a range that was not left, if that has an `else`."""
    return _line_to(loop.orelse[0], code, bound) if loop.orelse else None


def _line_to(statement: ast.stmt, code: CodeType, bound: Iterable[str]) -> int:
    if sys.version_info >= (3, 12) and not set(code.co_varnames).issubset(bound):
        raise Refused("Python would give a value to variables that have none yet, where a frame goes on elsewhere")
    line = line_of(code, statement)
    if line is None:
        raise Refused("the statement behind it has no line of its own")
    return line


def take(
    staged: StagedBranch, arguments: list[Any], decision: Decision, frame: FrameType, local: dict[str, Any],
    lead: Any, results: list[Any],
) -> bool:  # fmt: skip
    """Takes a branch on the device, which has given `results`; returns what is to be answered, or leaves the function.

    `lead` has the frame go on elsewhere, or with other variables, from its next line on.
    """
    statement: Any = decision.statement
    if staged.ends:
        raise Returned(built(staged.value, results, arguments))
    if isinstance(statement, Simple):
        values, lines = _values(staged, results, arguments), range(statement.lineno, (statement.end_lineno or 0) + 1)
        return lead(decision.answer, lines=lines, values=values, called=staged.reads.called)
    taken, line = way_past(decision, frame.f_code, (*local, *staged.names))
    set_variables(frame, _values(staged, results, arguments))
    answer = taken is not decision.negated
    return answer if line is None else lead(answer, line=line, called=staged.reads.called)


def _values(staged: StagedBranch, results: list[Any], arguments: list[Any]) -> dict[str, Any]:
    return {name: built(form, results, arguments) for name, form in staged.names.items()}


def run_block(run: Any, staged: StagedBranch, arguments: list[Any], gradients: Any = ()) -> list[Any] | None:
    """Makes what was written down the next operation of a call that is followed; returns its results.

    None where all of it is left to Python. Tapes are told of it by `gradients`.
    """
    unwinding = gradients if isinstance(gradients, Unwinding) else None
    block, specs = staged.block, list(staged.specs)
    if unwinding is not None:
        block = unwinding.forward
        specs += [*(FLAG for _ in unwinding.asked), PACKED]
    given = [
        read(run, v.handle, spec) if type(v) is Held else v for v, spec in zip(arguments, block.arguments, strict=True)
    ]
    results = issue(run, CALL, ("structure", block), given, specs)
    if staged.stops:
        run.flush()
        if results[len(staged.specs) - 1].truth():
            return None
    if not tape_is_empty():
        record_reads(arguments, given)
        if unwinding is not None:
            record_unwinding(run, unwinding, given, results)
        else:
            record_branch(run, gradients, given, results)
    return results


def finish_range(
    run: Any, staged: StagedRange, arguments: list[Any], before: dict[str, Any]
) -> tuple[dict[str, Any] | None, int]:
    """Returns the variables behind a loop over a range, None if it stopped before its end, and its turns."""
    results = run_block(run, staged, arguments)
    if results is None:
        return None, 0
    after = {name: built(form, results, arguments) for name, form in staged.names.items()}
    if OVER in after:
        after[OVER] = after[OVER].truth()
    return after, staged.turns(before, after)


def described(staged: StagedBranch) -> str:
    """Returns in words how the device takes a branch."""
    if any(map(recurses, staged.block.steps)):
        return "{} is decided on the device, where functions call themselves"
    ways = [s.attrs[1] for s in staged.block.steps if s.op == BRANCH]
    how = "both ways are computed, and one is selected" if all(map(selects, ways)) else "only the way taken is run"
    return f"{{}} is decided on the device: {how}"
