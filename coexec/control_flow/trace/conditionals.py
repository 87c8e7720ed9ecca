"""Branches: traces both paths of a running `if` statement of the program, for the device.

A statement that tests a tensor inside an expression counts as one, too: a conditional expression, `and`, `or`, a chain
of comparisons. Tracing starts where Python has just tested the tensor. The device returns what the statement assigns
to local variables or, if a path through it returns, the function's return value. All or nothing: if a path has effects,
or the paths differ by more than the values of tensors, the decision is left to Python.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.trace.read_guards import is_spec, is_tensor
from coexec.control_flow.trace.reads import Reads, staging
from coexec.control_flow.trace.statements import Statements, leaves_turn, returns
from coexec.control_flow.trace.values import CountedInt, Namespace, Undefined, unwrap_counted
from coexec.guards.pure_calls import is_number
from tracer.block import BRANCH, Block, steps_of
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.spec import RESOURCE, STRING, VARIANT, Spec, spec_of
from tracer.syntax import Decision, Simple, assigned_names, is_read, shared_names

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Tensor, Value
    from coexec.follow.device_control import FollowedCall

# The interpreter that traces statements; `recursion` replaces it by one that traces recursive functions.
interpreter: type[Statements] = Statements

_ASKED = "<asked>"  # the tested tensor's name in traced statements; not a valid Python name


class ResultAt(NamedTuple):
    """A result of the block, as a tensor."""

    number: int


class IntResult(NamedTuple):
    """A result of the block, as a Python int that was counted in a tensor."""

    number: int


class ArgumentAt(NamedTuple):
    """An argument of the block."""

    position: int


class NewList(NamedTuple):
    """A list that the block makes, and that has one name."""

    parts: tuple[Form, ...]


if TYPE_CHECKING:
    Form = ResultAt | IntResult | ArgumentAt | NewList | tuple["Form", ...] | Value  # how to build a value


class Vjp(Protocol):
    """A block's VJP: `forward` is run in place of the block, and returns `more` results for `record`."""

    forward: Block
    more: list[Spec]

    def record(self, run: FollowedCall, given: list[Tensor], results: list[LazyTensor]) -> None:
        """Records the block on tapes, with these arguments and results."""


@dataclass
class TracedBranch:
    """A traced branch, its guards, and how to apply its results."""

    block: Block
    reads: Reads
    names: dict[str, Form]  # the values afterwards of the names that it may change
    value: Form  # the function's return value, if `ends`
    ends: bool  # whether it returns from the function
    asked: int | None  # the argument that is the tested tensor, if no other is tested
    specs: list[Spec]
    room: int | None = field(default=None, kw_only=True)  # the argument that limits nested calls
    stops: bool = field(default=False, kw_only=True)  # whether the last result flags that all is left to Python
    # The results' VJPs, traced when first needed, by the watched arguments if those matter; or why there are none.
    vjps: dict[tuple[int, ...] | None, Vjp | str] = field(default_factory=dict, init=False)
    hands_on: bool = field(default=False, init=False)  # whether a result may be a tensor that is known otherwise
    is_shared: bool = field(default=False, init=False)  # whether it may be another result, too

    def parts(self) -> list[Block]:
        """Returns what was traced."""
        return [self.block]

    def arguments(self, local: dict[str, Value], asked: LazyTensor | None) -> list[Value] | None:
        """Returns the block's inputs; None if a guard fails."""
        arguments = self.reads.again(local)
        if arguments is None:
            return None
        if self.asked is not None:
            if not is_spec(asked, self.block.arguments[self.asked]):
                return None
            arguments[self.asked] = asked
        if self.room is not None:
            arguments[self.room] = tf.constant(_room_for_calls(), tf.int32)
        for value in arguments:
            if value is None:
                return None
        return arguments


def built(form: Form, results: list[LazyTensor], arguments: list[Value]) -> Value:
    """Builds a value of the form `form` from the block's results and arguments."""
    if isinstance(form, ResultAt):
        return results[form.number]
    if isinstance(form, IntResult):
        return int(results[form.number].resolve())
    if isinstance(form, ArgumentAt):
        return arguments[form.position]
    if isinstance(form, NewList):
        return [built(part, results, arguments) for part in form.parts]
    return tuple([built(part, results, arguments) for part in form]) if type(form) is tuple else form


def trace_branch(decision: Decision, asked: LazyTensor, frame: FrameType, local: dict[str, Value]) -> TracedBranch:
    """Traces the branch that `frame` is at; raises `Refused` with the reason if it must be left to Python.

    If some path of the branch returns, the rest of the function is traced with it.
    """
    branch: ast.If = decision.statement  # type: ignore[assignment]  # or `simple`
    code, simple = frame.f_code, isinstance(branch, Simple)
    if leaves_turn([branch]):
        raise Refused("a way through it ends the turn of a loop")
    ends = returns(branch)
    if ends and decision.rest is None and not simple:
        raise Refused("a way through it returns from within a loop or a `with` or `try`")
    nodes: list[ast.stmt] = [branch, *(decision.rest or ())] if ends else [branch]
    assigned = assigned_names(nodes) - (frozenset() if ends else decision.unread)
    shared = assigned_names(nodes).intersection(shared_names(code))
    if shared:
        raise Refused(f"{', '.join(sorted(shared))}: shared with other functions")
    reads = Reads()
    scope = Namespace(
        {}, frame.f_globals, {}, frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars, _ASKED))
    )
    for name, value in local.items():
        if is_read(nodes, name) or (not simple and name in assigned and name not in _settled(branch)):
            known = scope.names[name] = reads.local(name, value)
            if type(known) is tuple and name in assigned and all(map(is_tensor, known)):
                scope.names[name] = tuple([reads.item(known, n) for n in range(reads.length(known))])
    before = dict(scope.names)
    position = None
    if not decision.asks_often:
        position = len(reads.stage.arguments)
        scope.names[_ASKED] = reads.stage.argument(spec_of(asked))
        test: ast.expr = ast.Name(_ASKED, ast.Load())
        test = ast.UnaryOp(ast.Not(), test) if decision.negated else test
        nodes[0] = ast.If(test, branch.body, branch.orelse)
    with staging(reads):
        return _write(nodes, reads, scope, before, assigned, ends, position)


def _write(
    nodes: list[ast.stmt],
    reads: Reads,
    scope: Namespace,
    before: dict[str, Value],
    assigned: set[str],
    ends: bool,
    asked: int | None,
) -> TracedBranch:
    """Traces the statements in `scope`; `before` holds its initial names, `asked` is the tested tensor's argument."""
    statements = interpreter(reads)
    results: list[LazyTensor | CountedInt] = []
    names: dict[str, Form] = {}
    value: Form = None
    lists: dict[int, list[Value]] = {}
    with reads.stage:
        if ends:
            value = statements.returned(nodes, scope)
        else:
            statements.run(nodes, scope, False)
        if statements.leave is not None and (statements.room is None or statements.reasons):
            raise Refused(statements.reasons[-1] if statements.reasons else "a loop in it may be left to Python")
        if ends:
            value = form_of_value(value, reads, results, lists)
        else:
            for name in sorted(assigned):
                after = scope.names.get(name)
                if name in scope.names and after is not before.get(name, _UNBOUND):
                    try:
                        names[name] = form_of_value(after, reads, results, lists)
                    except Refused as refused:
                        raise Refused(f"{name!r}: {refused}") from None
        if statements.leave is not None:  # the last result
            results.append(statements.leave)
        block = reads.stage.block([unwrap_counted(value) for value in results])
    if not results or not any(inner.op == BRANCH for step in block.steps for inner in (step, *steps_of(step))):
        raise Refused("no tensor decides about tensors")
    block = statements.enclosed(block)
    specs = [unwrap_counted(value)._out.spec for value in results]
    stops = statements.leave is not None
    return TracedBranch(block, reads, names, value, ends, asked, specs, room=statements.room, stops=stops)


def form_of_value(
    value: Value,
    reads: Reads,
    results: list[LazyTensor | CountedInt],
    lists: dict[int, list[Value]] | None = None,
) -> Form:
    """Returns how to build a value from the block's results; appends the tensors that it needs to `results`.

    With `lists`, lists that the block makes are allowed and added there, by id; a second name for one is refused, as
    each name would get a list of its own. Raises `Refused` for all other values.
    """
    if isinstance(value, Undefined):
        raise Refused(value.reason)
    if isinstance(value, LazyTensor):
        position = next((n for n, given in enumerate(reads.stage.arguments) if given is value), None)
        if position is not None:
            return ArgumentAt(position)
        if value._out.spec.enum in (RESOURCE, STRING, VARIANT):
            raise Refused("it cannot be compiled")
        if not any(value is known for known in results):
            results.append(value)
        return ResultAt(next(n for n, known in enumerate(results) if known is value))
    if isinstance(value, CountedInt):
        results.append(value)
        return IntResult(len(results) - 1)
    if type(value) is tuple and reads.place(value) is None:
        return tuple([form_of_value(part, reads, results, lists) for part in value])
    if type(value) is list and lists is not None and reads.place(value) is None:
        if id(value) in lists:
            raise Refused("one list is known in two ways")
        lists[id(value)] = value
        return NewList(tuple([form_of_value(part, reads, results, lists) for part in value]))
    if is_number(value):
        return value
    raise Refused(f"it becomes a {type(value).__name__}")


def _settled(branch: ast.If) -> set[str]:
    """Returns names that both paths assign unconditionally: their previous values do not matter."""
    ways = [
        {t.id for s in way if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
        for way in (branch.body, branch.orelse)
    ]
    return ways[0] & ways[1]


def _room_for_calls() -> int:
    """Returns how many more nested calls Python would allow, less a margin."""
    frame: FrameType | None = sys._getframe()
    room = sys.getrecursionlimit() - tuning.recursion_margin
    while frame is not None:
        room, frame = room - 1, frame.f_back
    return max(min(room, tuning.max_recursion), 0)


_UNBOUND = object()
