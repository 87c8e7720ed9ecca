"""Loops: traces a running `while` loop of the program for the device.

Tracing starts where Python has just evaluated the loop's test. The device returns the local variables as they are
before some later evaluation of the test, and the result of that: Python resumes from there as if it had run the
iterations itself. That need not be the end of the loop: the device stops before an iteration that is left to Python, as
it prints, returns or fails.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.trace.list_buffers import GrowingList, ListBuffers
from coexec.control_flow.trace.read_guards import is_spec, is_tensor
from coexec.control_flow.trace.reads import Reads, staging
from coexec.control_flow.trace.statements import Break, Continue, Return, Statements
from coexec.control_flow.trace.values import (
    CountedInt,
    Namespace,
    Undefined,
    form_of,
    is_one_kind,
    spec,
    unwrap_counted,
)
from coexec.guards.pure_calls import is_number
from tracer.block import COUNT, Block, WhileLoop
from tracer.errors import Refused
from tracer.intercept import make_constant
from tracer.lazy import LazyTensor
from tracer.op import same
from tracer.spec import RESOURCE, STRING, VARIANT, Spec, spec_of
from tracer.syntax import assigned_names, is_read, shared_names

if TYPE_CHECKING:
    from coexec.control_flow.grad.iteration_vjp import IterationVjp
    from coexec.control_flow.grad.loop_vjp import LoopVjp
    from coexec.control_flow.program_types import Tensor, Value


class LoopVariable(NamedTuple):
    """A local variable that iterations change: a tensor, a list or tuple of tensors, or a counted number."""

    name: str
    form: tuple[type, int] | None  # of a list or tuple: its type and length
    step: int | None  # of a counted number: what each iteration adds
    late: bool  # it has no value before the first iteration

    def join(self, tensors: Iterator[Tensor], before: Value, turns: int) -> Value:
        """Returns the variable's value after `turns` iterations; consumes its own of all states' `tensors`."""
        if self.form is not None:
            return self.form[0]([next(tensors) for _ in range(self.form[1])])
        tensor = next(tensors)
        return tensor if self.step is None else before + self.step * turns


@dataclass
class TracedLoop:
    """A traced loop, its guards, and how to apply its results."""

    loop: WhileLoop
    reads: Reads
    states: list[LoopVariable]
    constants: dict[str, Value]  # names that get the same Python value in each iteration
    inputs: tuple[Spec, ...]
    lists: list[GrowingList]  # their buffers and counts follow the states
    turn: Block | None  # an iteration's states and what it appends; None if iterations append differently
    taken: list[int]  # by appended tensor: the number of its list
    # Traced when first needed; or why there is none.
    vjp: LoopVjp | IterationVjp | str | None = field(default=None, init=False)
    hands_on: bool = field(default=False, init=False)  # whether a result may be a tensor that is known otherwise
    is_shared: bool = field(default=False, init=False)  # whether it may be another result, too

    def parts(self) -> list[WhileLoop]:
        """Returns what was traced."""
        return [self.loop]

    def arguments(self, local: dict[str, Value]) -> list[Value] | None:
        """Returns the loop's inputs; None if a guard fails."""
        arguments = self.reads.again(local)
        if arguments is None:
            return None
        positions = iter(self.loop.states)
        for state in self.states:
            if state.form is None and state.step is None and not state.late:
                position = next(positions)
                value = arguments[position] = local.get(state.name)
                if not is_spec(value, self.inputs[position]):
                    return None
                continue
            for value, position in zip(self._leaves(state, local), positions, strict=False):
                given = _given(value, self.inputs[position], state)
                if given is None:
                    return None
                arguments[position] = given
        for position in positions:  # of list buffers
            arguments[position] = _zeros(self.inputs[position])
        for grown in self.lists:
            held = local[grown.name]
            if any(local.get(state.name) is held for state in self.states):
                return None
            if grown.length is not None:
                arguments[-1 - grown.length._key] = tf.constant(len(held), tf.int32)
        for value in arguments:
            if value is None:
                return None
        return arguments

    def _leaves(self, state: LoopVariable, local: dict[str, Value]) -> list[Value]:
        value = local.get(state.name, _UNBOUND)
        if state.form is None:
            return [value]
        if state.late:
            return [value] * state.form[1]
        if type(value) in (list, tuple) and (type(value), len(value)) == state.form:
            return list(value)
        return [None] * state.form[1]


def _given(value: Value, spec: Spec, state: LoopVariable) -> Tensor | None:
    """Returns a state's initial value, from the variable's; None if that is not of the traced kind."""
    if state.late:
        return _zeros(spec) if value is _UNBOUND else None
    if state.step is not None:
        if type(value) is not int or abs(value) + tuning.max_device_turns * abs(state.step) >= tuning.max_counted:
            return None
        return tf.constant(value, tf.int32)
    if not is_tensor(value) or value._datatype_enum() != spec.enum or value._shape_tuple() != spec.shape:
        return None
    return value


@functools.lru_cache(maxsize=256)
def _zeros(spec: Spec) -> Tensor:
    """Returns the initial value of a state that nothing reads before the first iteration."""
    return make_constant(np.zeros(spec.shape, spec.dtype.as_numpy_dtype), spec.dtype)


_UNBOUND = object()


def trace_loop(
    statement: ast.While,
    frame: FrameType,
    local: dict[str, Value],
    *,
    rows: int | None = None,
    besides: frozenset[str] = frozenset(),
) -> TracedLoop:
    """Traces the loop that `frame` is in; raises `Refused` with the reason if it must be left to Python.

    Lists may grow in it by `rows` at a time (`tuning.list_rows` by default). `besides` names local variables that exist
    only in the statement.
    """
    code = frame.f_code
    assigned = assigned_names(statement.body)
    if assigned_names([statement.test]):
        raise Refused("the test assigns to a name")
    shared = assigned.intersection(shared_names(code))
    if shared:
        raise Refused(f"{', '.join(sorted(shared))}: shared with other functions")
    if not assigned.issubset(besides.union(code.co_varnames, code.co_cellvars)):
        raise Refused("the loop assigns to names that are not local")
    reads = Reads()
    names = besides.union(code.co_varnames, code.co_cellvars, code.co_freevars)
    scope = Namespace({}, frame.f_globals, {}, names)
    counted = counted_names(statement.body)
    starts: dict[str, list[LazyTensor]] = {}
    for name in sorted(assigned):
        value = local.get(name, _UNBOUND)
        tensors = list(value) if type(value) in (list, tuple) else [value]
        if tensors and all(map(is_tensor, tensors)):
            starts[name] = [reads.stage.argument(_fixed(v, name)) for v in tensors]
            scope.names[name] = starts[name][0] if tensors[0] is value else type(value)(starts[name])
        elif name in counted and type(value) is int:
            starts[name] = [reads.stage.argument(COUNT)]
            scope.names[name] = CountedInt(starts[name][0])
        elif value is not _UNBOUND:
            scope.names[name] = reads.local(name, value)
    for name, value in local.items():
        if name not in assigned and is_read([statement], name):
            scope.names[name] = reads.local(name, value)
    with staging(reads):
        return _write(statement, reads, scope, starts, assigned, counted, tuning.list_rows if rows is None else rows)


def _write(
    statement: ast.While,
    reads: Reads,
    scope: Namespace,
    starts: dict[str, list[LazyTensor]],
    assigned: set[str],
    counted: dict[str, int],
    rows: int,
) -> TracedLoop:
    """Traces the loop in `scope`; `starts` holds the initial states' arguments by name, `counted` the steps by name."""
    statements = Statements(reads)
    lists = statements.lists = ListBuffers(reads, rows, appended_names(statement.body))
    before = dict(scope.names)

    def test() -> LazyTensor:
        truth = statements.truth(statement.test, scope)
        if not isinstance(truth, LazyTensor):
            raise Refused("the test is no tensor's")
        return truth

    testing, truth, left = statements.apart(test)
    if left is not None or statements.grown(testing):
        raise Refused("a way through the test is left to Python")
    if statements.compared_numbers:
        raise Refused("a chain of comparisons in the test compares numbers of Python's")
    test_block = testing.block([truth])

    def body() -> LazyTensor | None:
        try:
            statements.run(statement.body, scope, False)
        except Continue:
            pass
        except (Break, Return):
            raise Refused("the first turn ends the loop") from None
        return statements.leave

    turning, _, leave = statements.apart(body)
    states, results, constants = [], [], {}
    for name in sorted(assigned):
        value = scope.names.get(name, Undefined("it is not assigned in each turn"))
        if isinstance(value, Undefined):
            raise Refused(f"{name!r}: {value.reason}")
        old = before.get(name, _UNBOUND)
        form = form_of(value)
        leaves = list(value) if form else [value]
        if spec(leaves[0]) is None:
            if old is not _UNBOUND and old is not value and not _same(old, value):
                raise Refused(f"{name!r} is a Python value that changes in the loop")
            if not is_number(value):
                raise Refused(f"{name!r} is a {type(value).__name__}")
            constants[name] = value
            continue
        if old is _UNBOUND:
            starts[name] = [reads.stage.argument(leaf._out.spec) for leaf in map(unwrap_counted, leaves)]
        elif name not in starts:
            raise Refused(f"{name!r} becomes a tensor in the loop")
        elif form != form_of(old) or not all(map(is_one_kind, leaves, list(old) if form else [old])):
            raise Refused(f"{name!r} is {_shown(old)} before a turn and {_shown(value)} after it")
        if form and any(isinstance(leaf, CountedInt) for leaf in leaves):
            raise Refused(f"{name!r} holds a number that the loop counts")
        if type(value) is list and any(value is other for other in before.values()):
            raise Refused(f"{name!r} is a list from before the turn")
        step = counted[name] if isinstance(value, CountedInt) and old is not _UNBOUND else None
        if isinstance(value, CountedInt) and step is None:
            raise Refused(f"{name!r} is a number that depends on one that the loop counts")
        states.append(LoopVariable(name, form, step, old is _UNBOUND))
        results += [unwrap_counted(leaf) for leaf in leaves]
    growing = lists.settled()
    results += [unwrap_counted(value) for place, _ in growing for value in statements.grown(turning)[place]]
    if not results:
        raise Refused("the loop changes no tensor")
    kept = [scope.names[state.name] for state in states if state.form and state.form[0] is list]
    if len({id(value) for value in kept}) < len(kept):
        raise Refused("two names are one list")
    with turning:
        results.append(leave if leave is not None else tf.constant(False))
    taken = lists.taken_in(turning, growing)
    turn = turning.block([*results, *(value for _, value in taken or ())])
    body_block = replace(turn, results=turn.results[: len(results)])
    count = len(results) - 1 - 2 * len(growing)
    turn = replace(turn, results=(*turn.results[:count], *turn.results[len(results) :]))
    inputs = reads.stage.arguments
    position = {id(lazy): n for n, lazy in enumerate(inputs)}
    loop = WhileLoop(
        test_block,
        body_block,
        tuple(position[id(g)] for g in testing.given),
        tuple(position[id(g)] for g in turning.given),
        (
            *(position[id(lazy)] for state in states for lazy in starts[state.name]),
            *(position[id(unwrap_counted(value))] for _, grown in growing for value in grown.before),
        ),
        tuning.max_device_turns,
    )
    specs, grown = tuple(lazy._out.spec for lazy in inputs), [g for _, g in growing]
    taken_by = [number for number, _ in taken or ()]
    return TracedLoop(loop, reads, states, constants, specs, grown, turn if taken is not None else None, taken_by)


def _shown(value: Value) -> str:
    return repr(spec(value) or f"a {type(value).__name__}")


def _same(one: Value, other: Value) -> bool:
    return is_number(one) and is_number(other) and same(one, other)


def _fixed(tensor: Tensor, name: str) -> Spec:
    found = spec_of(tensor)
    if found.enum in (RESOURCE, STRING, VARIANT):
        raise Refused(f"{name!r} cannot be compiled")
    return found


def appended_names(body: list[ast.stmt]) -> set[str]:
    """Returns the names on which `append` or `extend` is called."""
    return {
        n.func.value.id for s in body for n in ast.walk(s)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("append", "extend")
        and isinstance(n.func.value, ast.Name)
    }  # fmt: skip


def counted_names(body: list[ast.stmt]) -> dict[str, int]:
    """Returns the names that each iteration increments by a constant int, and that nothing else assigns to."""
    found: dict[str, int] = {}
    targets = [n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    for statement in body:
        if any(isinstance(n, ast.Continue) for n in ast.walk(statement)):
            break  # after this, an iteration may end before the increment
        if (
            isinstance(statement, ast.AugAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(statement.op, (ast.Add, ast.Sub))
            and isinstance(statement.value, ast.Constant)
            and type(statement.value.value) is int
            and abs(statement.value.value) < 1 << 10
            and targets.count(statement.target.id) == 1
        ):
            step = statement.value.value
            found[statement.target.id] = step if isinstance(statement.op, ast.Add) else -step
    return found
