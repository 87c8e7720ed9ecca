"""Ranges: a running `for` loop over a range that an `if` on a tensor leaves, written down for the device.

It is entered at the `if`, whose only statement is `break`, and is written down to its end, be that the `break` or the
end of the range: behind both the program goes on at the same place, or, if there is an `else`, is told which it was.
All or nothing: Python's own iterator stays where it is.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import tensorflow as tf

from coexec.staging.branches import StagedBranch, form_of_value
from coexec.staging.loops import Staged, counted_names, stage_loop
from coexec.staging.reads import Reads, staging
from coexec.staging.statements import LIMIT, Statements
from coexec.staging.values import Scope, Whole, tensor_of
from tracer.block import COUNT
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.syntax import Decision, assigned_names, is_read, shared_names

# Names for statements; none of Python's can be like them.
_LAST, OVER, _TRUE = "<last>", "<over>", "<true>"


@dataclass
class StagedRange(StagedBranch):
    """A loop over a range that was written down; its last result says whether it has not come to its end."""

    loop: ast.For
    counters: dict[str, int]  # names that are counted, and by which argument they are given

    def parts(self) -> list[Any]:
        """Returns what was written down."""
        return [self.block]

    def arguments(self, local: dict[str, Any], asked: Any) -> list[Any] | None:
        """Returns what the block is to be given now; None if it is not what Python would run now."""
        last = _last(self.loop, local)
        given = {name: last if name == _LAST else local.get(name) for name in self.counters}
        if not all(type(v) is int and abs(v) < 1 << 28 for v in given.values()):
            return None
        arguments = self.reads.again(local)
        if arguments is None:
            return None
        for name, position in self.counters.items():
            arguments[position] = tf.constant(given[name], tf.int32)
        return arguments

    def turns(self, before: dict[str, Any], after: dict[str, Any]) -> int:
        """Returns how often the loop has gone on, from its variable before and after."""
        name = self.loop.target.id  # type: ignore[attr-defined]
        return (after.get(name, before[name]) - before[name]) // _step(self.loop)


def stage_range(decision: Decision, frame: FrameType, local: dict[str, Any]) -> StagedRange:
    """Writes down the rest of the loop that `frame` is in; raises `Refused` with the reason if that is Python's."""
    loop, ahead, behind = _parts(decision, frame, local)
    code, leaves = frame.f_code, decision.leaves
    assert leaves is not None
    target = loop.target.id  # type: ignore[attr-defined]  # `_is_left` has looked
    more = ast.Compare(ast.Name(target, ast.Load()), [ast.NotEq()], [ast.Name(_LAST, ast.Load())])
    step = _counting(target, _step(loop))
    over = ast.Assign([ast.Name(OVER, ast.Store())], ast.Name(_TRUE, ast.Load()))
    goes_on: list[ast.expr] = [ast.UnaryOp(ast.Not(), test) for test in (leaves.test, ast.Name(OVER, ast.Load()))]
    nodes: list[ast.stmt] = [
        ast.While(ast.BoolOp(ast.And(), goes_on), [*behind, ast.If(more, [step, *ahead], [over])], [])
    ]
    assigned = assigned_names(nodes)
    shared = assigned.intersection(shared_names(code))
    if shared:
        raise Refused(f"{', '.join(sorted(shared))}: shared with other functions")
    counted = {**counted_names(loop.body), target: _step(loop), _LAST: 0}
    reads = Reads()
    scope = Scope({}, frame.f_globals, {}, _local(code))
    counters: dict[str, int] = {}
    for name in counted:
        if name == _LAST or type(local.get(name)) is int:
            counters[name] = len(reads.stage.arguments)
            scope.names[name] = Whole(reads.stage.argument(COUNT))
    for name, value in local.items():
        if name not in counters and (name in assigned or is_read(nodes, name)):
            scope.names[name] = reads.local(name, value)
    before = dict(scope.names)
    with staging(reads):
        statements = Statements(reads)
        results: list[Any] = []
        names: dict[str, Any] = {}
        with reads.stage:
            scope.names[OVER], scope.names[_TRUE] = (reads.stage.constant(v, tf.bool) for v in (False, True))
            statements.run(nodes, scope, False)
            for name in sorted(assigned - (set() if loop.orelse else {OVER})):
                after = scope.names.get(name)
                if name in scope.names and after is not before.get(name):
                    try:
                        names[name] = form_of_value(after, reads, results)
                    except Refused as refused:
                        raise Refused(f"{name!r}: {refused}") from None
            if not isinstance(statements.leave, LazyTensor):
                raise Refused("it is no loop on tensors")
            results.append(statements.leave)
            block = reads.stage.block([tensor_of(v) for v in results])
        specs = [tensor_of(value)._out.spec for value in results]
    return StagedRange(block, reads, names, None, False, None, specs, loop, counters, stops=True)


@dataclass
class RangeTurns:
    """A loop over a range as tapes can be told of it: its turns up to the last number, and what that still takes."""

    turns: Staged
    last: Staged | None
    loop: ast.For

    def arguments(self, local: dict[str, Any], _: Any = None) -> list[Any] | None:
        """Returns what the turns are to be given now; None if they are not those that Python would run now."""
        within = self.within(local)
        return None if within[_LAST] is None else self.turns.arguments(within)

    def parts(self) -> list[Any]:
        """Returns what was written down."""
        return [staged.loop for staged in (self.turns, self.last) if staged is not None]

    def within(self, local: dict[str, Any]) -> dict[str, Any]:
        """Returns the local variables as the loop sees them: with the last number of the range."""
        return {**local, _LAST: _last(self.loop, local)}

    def without(self, local: dict[str, Any]) -> dict[str, Any]:
        """Returns the variables that the program knows."""
        return {name: value for name, value in local.items() if name != _LAST}

    def is_at_last(self, local: dict[str, Any]) -> bool:
        """Returns whether the loop is at its last number."""
        return local[self.loop.target.id] == _last(self.loop, local)  # type: ignore[attr-defined]


def stage_range_turns(decision: Decision, frame: FrameType, local: dict[str, Any], rows: int) -> RangeTurns:
    """Writes down the rest of the loop that `frame` is in, as turns; raises `Refused` if that is Python's.

    Lists may grow in it by so many `rows`: all of what they take, as Python's own iterator stays where it is.
    """
    loop, ahead, behind = _parts(decision, frame, local)
    assert decision.leaves is not None
    target = loop.target.id  # type: ignore[attr-defined]
    more = ast.Compare(ast.Name(target, ast.Load()), [ast.NotEq()], [ast.Name(_LAST, ast.Load())])
    goes_on = ast.UnaryOp(ast.Not(), decision.leaves.test)
    turn = [*behind, _counting(target, _step(loop)), *ahead, _counting(_LAST, 0)]
    within, besides = {**local, _LAST: _last(loop, local)}, frozenset((_LAST,))
    turns = stage_loop(
        ast.While(ast.BoolOp(ast.And(), [goes_on, more]), turn, []), frame, within, rows=rows, besides=besides
    )
    last = None
    if loop.orelse or not all(isinstance(statement, ast.Pass) for statement in behind):
        last = stage_loop(
            ast.While(goes_on, [*behind, _counting(target, 0)], []), frame, within, rows=rows, besides=besides
        )
        last.loop = replace(last.loop, limit=1)
    if last is not None and any(grown.length is not None for grown in last.lists):
        raise Refused("the length of a list is asked for that grows in it")
    return RangeTurns(turns, last, loop)


def _counting(name: str, step: int) -> ast.stmt:
    return ast.AugAssign(ast.Name(name, ast.Store()), ast.Add(), ast.Constant(step))


def _parts(
    decision: Decision, frame: FrameType, local: dict[str, Any]
) -> tuple[ast.For, list[ast.stmt], list[ast.stmt]]:
    """Returns the loop, and the statements in front of the one that leaves it, and behind."""
    loop, code = decision.statement, frame.f_code
    assert isinstance(loop, ast.For)
    if "range" in frame.f_globals or vars(builtins).get("range") is not range or "range" in code.co_varnames:
        raise Refused("`range` is not Python's")
    if _last(loop, local) is None:
        raise Refused("the range is not one of numbers that can be looked up")
    number = next(n for n, statement in enumerate(loop.body) if statement is decision.leaves)
    return loop, loop.body[:number], loop.body[number + 1 :]


def _local(code: CodeType) -> frozenset[str]:
    return frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars, _LAST, OVER, _TRUE))


def _last(loop: ast.For, local: dict[str, Any]) -> int | None:
    """Returns the last number of the loop's range, from its place in it; None if that is not known."""
    values = [
        local.get(a.id) if isinstance(a, ast.Name) else ast.literal_eval(a)
        for a in loop.iter.args[:2]  # type: ignore[attr-defined]
    ]
    now = local.get(loop.target.id)  # type: ignore[attr-defined]
    if not all(type(v) is int for v in (*values, now)):
        return None
    numbers = range(*values, _step(loop)) if len(values) == 2 else range(*values)  # type: ignore[arg-type, call-overload]
    return numbers[-1] if now in numbers and len(numbers) < LIMIT else None


def _step(loop: ast.For) -> int:
    args = loop.iter.args  # type: ignore[attr-defined]
    return int(ast.literal_eval(args[2])) if len(args) == 3 else 1
