"""Ranges: traces a running `for` loop over a range, with an `if` on a tensor that breaks, for the device.

Tracing starts at the `if`, whose only statement is `break`, and covers the rest of the loop, up to the `break` or the
end of the range. The program resumes at the same place after either, unless the loop has an `else`: then a result says
which it was. All or nothing: Python's iterator cannot be advanced.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.trace.conditionals import TracedBranch, form_of_value
from coexec.control_flow.trace.reads import Reads, staging
from coexec.control_flow.trace.statements import Statements
from coexec.control_flow.trace.values import CountedInt, Namespace, unwrap_counted
from coexec.control_flow.trace.while_loops import TracedLoop, counted_names, trace_loop
from tracer.block import COUNT
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.syntax import Decision, assigned_names, is_read, shared_names

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Value
    from coexec.control_flow.trace.conditionals import Form
    from tracer.block import WhileLoop

_RANGE = range  # whatever a program puts in its place

# Names in traced statements; not valid Python names.
_LAST, OVER, _TRUE = "<last>", "<over>", "<true>"


@dataclass
class TracedRange(TracedBranch):
    """A traced loop over a range; its last result flags that it stopped before its end."""

    loop: ast.For
    counters: dict[str, int]  # counted names, and the argument that supplies each

    def arguments(self, local: dict[str, Value], asked: LazyTensor | None) -> list[Value] | None:
        """Returns the block's inputs; None if a guard fails."""
        last = _last(self.loop, local)
        given = {name: last if name == _LAST else local.get(name) for name in self.counters}
        if not all(type(v) is int and abs(v) < tuning.max_counted for v in given.values()):
            return None
        arguments = self.reads.again(local)
        if arguments is None:
            return None
        for name, position in self.counters.items():
            arguments[position] = tf.constant(given[name], tf.int32)
        return arguments

    def turns(self, before: dict[str, Value], after: dict[str, Value]) -> int:
        """Returns the number of iterations, from the local variables before and after."""
        name = self.loop.target.id  # type: ignore[attr-defined]
        return (after.get(name, before[name]) - before[name]) // _step(self.loop)  # type: ignore[no-any-return]


def trace_range(decision: Decision, frame: FrameType, local: dict[str, Value]) -> TracedRange:
    """Traces the rest of the loop that `frame` is in; raises `Refused` with the reason if it is left to Python."""
    loop, ahead, behind = _parts(decision, frame, local)
    code, leaves = frame.f_code, decision.leaves
    assert leaves is not None
    target = loop.target.id  # type: ignore[attr-defined]  # checked by `_is_left`
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
    scope = Namespace({}, frame.f_globals, {}, _local(code))
    counters: dict[str, int] = {}
    for name in counted:
        if name == _LAST or type(local.get(name)) is int:
            counters[name] = len(reads.stage.arguments)
            scope.names[name] = CountedInt(reads.stage.argument(COUNT))
    for name, value in local.items():
        if name not in counters and (name in assigned or is_read(nodes, name)):
            scope.names[name] = reads.local(name, value)
    before = dict(scope.names)
    with staging(reads):
        statements = Statements(reads)
        results: list[LazyTensor | CountedInt] = []
        names: dict[str, Form] = {}
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
            block = reads.stage.block([unwrap_counted(v) for v in results])
        specs = [unwrap_counted(value)._out.spec for value in results]
    return TracedRange(block, reads, names, None, False, None, specs, loop, counters, stops=True)


@dataclass
class RangeIterations:
    """A loop over a range, traced for tapes: the iterations up to the last number, and the rest of the last one."""

    turns: TracedLoop
    last: TracedLoop | None
    loop: ast.For
    hands_on: bool = field(default=False, init=False)  # whether a result may be a tensor that is known otherwise
    is_shared: bool = field(default=False, init=False)  # whether it may be another result, too

    def arguments(self, local: dict[str, Value], _: LazyTensor | None = None) -> list[Value] | None:
        """Returns the inputs of the iterations; None if a guard fails."""
        within = self.within(local)
        return None if within[_LAST] is None else self.turns.arguments(within)

    def parts(self) -> list[WhileLoop]:
        """Returns what was traced."""
        return [staged.loop for staged in (self.turns, self.last) if staged is not None]

    def within(self, local: dict[str, Value]) -> dict[str, Value]:
        """Returns the local variables of the traced loop: the program's, and the last number of the range."""
        return {**local, _LAST: _last(self.loop, local)}

    def without(self, local: dict[str, Value]) -> dict[str, Value]:
        """Returns those of the local variables that are the program's."""
        return {name: value for name, value in local.items() if name != _LAST}

    def is_at_last(self, local: dict[str, Value]) -> bool:
        """Returns whether the loop is at the last number of its range."""
        return local[self.loop.target.id] == _last(self.loop, local)  # type: ignore[attr-defined, no-any-return]


def trace_range_iterations(decision: Decision, frame: FrameType, local: dict[str, Value], rows: int) -> RangeIterations:
    """Traces the rest of the loop that `frame` is in as iterations; raises `Refused` if it is left to Python.

    Lists may grow in it by `rows`, which must hold all that is appended, as Python's iterator cannot be advanced.
    """
    loop, ahead, behind = _parts(decision, frame, local)
    assert decision.leaves is not None
    target = loop.target.id  # type: ignore[attr-defined]
    more = ast.Compare(ast.Name(target, ast.Load()), [ast.NotEq()], [ast.Name(_LAST, ast.Load())])
    goes_on = ast.UnaryOp(ast.Not(), decision.leaves.test)
    turn = [*behind, _counting(target, _step(loop)), *ahead, _counting(_LAST, 0)]
    within, besides = {**local, _LAST: _last(loop, local)}, frozenset((_LAST,))
    turns = trace_loop(
        ast.While(ast.BoolOp(ast.And(), [goes_on, more]), turn, []), frame, within, rows=rows, besides=besides
    )
    last = None
    if loop.orelse or not all(isinstance(statement, ast.Pass) for statement in behind):
        last = trace_loop(
            ast.While(goes_on, [*behind, _counting(target, 0)], []), frame, within, rows=rows, besides=besides
        )
        last.loop = replace(last.loop, limit=1)
    if last is not None and any(grown.length is not None for grown in last.lists):
        raise Refused("the length of a list is asked for that grows in it")
    return RangeIterations(turns, last, loop)


def _counting(name: str, step: int) -> ast.stmt:
    return ast.AugAssign(ast.Name(name, ast.Store()), ast.Add(), ast.Constant(step))


def _parts(
    decision: Decision, frame: FrameType, local: dict[str, Value]
) -> tuple[ast.For, list[ast.stmt], list[ast.stmt]]:
    """Returns the loop, and the statements of its body before and after the one that breaks."""
    loop, code = decision.statement, frame.f_code
    assert isinstance(loop, ast.For)
    if not means_range(frame) or "range" in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        raise Refused("`range` is not Python's")
    if _last(loop, local) is None:
        raise Refused("the range is not one of numbers that can be looked up")
    number = next(n for n, statement in enumerate(loop.body) if statement is decision.leaves)
    return loop, loop.body[:number], loop.body[number + 1 :]


def means_range(frame: FrameType) -> bool:
    """Returns whether the global name `range` is Python's in the code of a frame."""
    return "range" not in frame.f_globals and vars(builtins).get("range") is _RANGE


def _local(code: CodeType) -> frozenset[str]:
    return frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars, _LAST, OVER, _TRUE))


def _last(loop: ast.For, local: dict[str, Value]) -> int | None:
    """Returns the last number of the loop's range; None if the range or the place in it is unknown."""
    values = [
        local.get(a.id) if isinstance(a, ast.Name) else ast.literal_eval(a)
        for a in loop.iter.args[:2]  # type: ignore[attr-defined]
    ]
    now = local.get(loop.target.id)  # type: ignore[attr-defined]
    if not all(type(v) is int for v in (*values, now)):
        return None
    numbers = range(*values, _step(loop)) if len(values) == 2 else range(*values)  # type: ignore[arg-type, call-overload]
    return numbers[-1] if now in numbers and len(numbers) < tuning.max_device_turns else None


def _step(loop: ast.For) -> int:
    args = loop.iter.args  # type: ignore[attr-defined]
    return int(ast.literal_eval(args[2])) if len(args) == 3 else 1
