"""Branches: a running `if` statement of the user's, written down for the device with both of its ways.

So is a statement in whose midst an expression asks: a conditional one, `and`, `or`, a chain of comparisons.
It is entered where Python has just asked for the truth of its test. What the device gives back is what the statement
assigns to local variables, or, where a way through it returns, what the function returns. All of it or nothing: where
some way does more than compute, or the ways differ by more than the values of tensors, the decision is Python's.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf

from coexec.staging.lookups import is_number, is_spec
from coexec.staging.reads import Reads, staging
from coexec.staging.recursion import Functions
from coexec.staging.statements import leaves_turn, returns
from coexec.staging.values import Missing, Scope, Whole, tensor_of
from tracer.block import BRANCH, Block, steps_of
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.private import EagerTensor
from tracer.spec import RESOURCE, STRING, VARIANT, Spec, spec_of
from tracer.syntax import Decision, Simple, assigned_names, comprehensions_of, is_read, shared_names

MARGIN = 100  # calls that Python is left for what is called by the last
MOST_CALLS = 3000  # on the device inside of each other

_ASKED = "<asked>"  # the name of the tensor that was asked, for statements; none of Python's can have it


class Made(NamedTuple):
    """A tensor that comes out of the block."""

    number: int


class Number(NamedTuple):
    """A Python number, which has been counted in a tensor that comes out."""

    number: int


class Given(NamedTuple):
    """A tensor that goes into it."""

    position: int


class Listed(NamedTuple):
    """A list that is made there, and known by one name."""

    parts: tuple[Any, ...]


@dataclass
class StagedBranch:
    """A branch that was written down, and what to do with it where it comes again."""

    block: Block
    reads: Reads
    names: dict[str, Any]  # what the names are afterwards that it may change
    value: Any  # what the function returns, if it does
    ends: bool  # whether it does
    asked: int | None  # which argument is the tensor that was asked, if it alone decides
    specs: list[Spec]
    room: int | None = field(default=None, kw_only=True)  # which argument says how many calls may be in each other
    stops: bool = field(default=False, kw_only=True)  # whether the last result says that all of it is Python's
    # Once tapes have asked: the results' gradients, by the arguments watched if that matters; or why there are none.
    gradients: dict[Any, Any] = field(default_factory=dict, init=False)

    def arguments(self, local: dict[str, Any], asked: Any) -> list[Any] | None:
        """Returns what the block is to be given now; None if it is not what Python would run now."""
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


def built(form: Any, results: list[Any], arguments: list[Any]) -> Any:
    """Returns a value that a branch gives."""
    if isinstance(form, Made):
        return results[form.number]
    if isinstance(form, Number):
        return int(results[form.number].resolve())
    if isinstance(form, Given):
        return arguments[form.position]
    if isinstance(form, Listed):
        return [built(part, results, arguments) for part in form.parts]
    return tuple([built(part, results, arguments) for part in form]) if type(form) is tuple else form


def stage_branch(decision: Decision, asked: Any, frame: FrameType, local: dict[str, Any]) -> StagedBranch:
    """Writes down the branch that `frame` is at; raises `Refused` with the reason if it must stay Python's.

    A branch through which a way returns is written down with all that the function does behind it.
    """
    branch: Any = decision.statement
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
    reads.called |= comprehensions_of(code)
    scope = Scope({}, frame.f_globals, {}, frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars, _ASKED)))
    for name, value in local.items():
        if is_read(nodes, name) or (not simple and name in assigned and name not in _settled(branch)):
            known = scope.names[name] = reads.local(name, value)
            if type(known) is tuple and name in assigned and all(isinstance(v, EagerTensor) for v in known):
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
    nodes: list[Any], reads: Reads, scope: Scope, before: Any, assigned: set[str], ends: bool, asked: int | None
) -> StagedBranch:
    statements = Functions(reads)
    results: list[Any] = []
    names: dict[str, Any] = {}
    value: Any = None
    lists: dict[int, list[Any]] = {}
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
        block = reads.stage.block([tensor_of(value) for value in results])
    if not results or not any(inner.op == BRANCH for step in block.steps for inner in (step, *steps_of(step))):
        raise Refused("no tensor decides about tensors")
    specs = [tensor_of(value)._out.spec for value in results]
    stops = statements.leave is not None
    return StagedBranch(block, reads, names, value, ends, asked, specs, room=statements.room, stops=stops)


def form_of_value(value: Any, reads: Reads, results: list[Any], lists: dict[int, list[Any]] | None = None) -> Any:
    """Returns how to build a value from what the block gives, which is added to `results`.

    So are lists that were made there, to `lists`, where that is given: each of them once, as two would be two.
    """
    if isinstance(value, Missing):
        raise Refused(value.reason)
    if isinstance(value, LazyTensor):
        position = next((n for n, given in enumerate(reads.stage.arguments) if given is value), None)
        if position is not None:
            return Given(position)
        if value._out.spec.enum in (RESOURCE, STRING, VARIANT):
            raise Refused("it cannot be compiled")
        if not any(value is known for known in results):
            results.append(value)
        return Made(next(n for n, known in enumerate(results) if known is value))
    if isinstance(value, Whole):
        results.append(value)
        return Number(len(results) - 1)
    if type(value) is tuple and reads.place(value) is None:
        return tuple([form_of_value(part, reads, results, lists) for part in value])
    if type(value) is list and lists is not None and reads.place(value) is None:
        if id(value) in lists:
            raise Refused("one list is known in two ways")
        lists[id(value)] = value
        return Listed(tuple([form_of_value(part, reads, results, lists) for part in value]))
    if is_number(value):
        return value
    raise Refused(f"it becomes a {type(value).__name__}")


def _settled(branch: ast.If) -> set[str]:
    """Returns names to which both ways assign at once: what they were before is of no interest."""
    ways = [
        {t.id for s in way if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
        for way in (branch.body, branch.orelse)
    ]
    return ways[0] & ways[1]


def _room_for_calls() -> int:
    """Returns how many calls Python would still take inside of each other, and some less."""
    frame: FrameType | None = sys._getframe()
    room = sys.getrecursionlimit() - MARGIN
    while frame is not None:
        room, frame = room - 1, frame.f_back
    return max(min(room, MOST_CALLS), 0)


_UNBOUND = object()
