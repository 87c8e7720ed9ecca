"""Recursive functions: traces user functions whose recursion depends on a tensor, once each, with calls in them.

The form of its return value is found first, from the paths that make no recursive call. Its arguments are its tensors,
and the ints that differ between calls; everything else must be the same in all calls. Each call gets the number of
calls that may nest in it: once that is zero, everything is left to Python, which has its own recursion limit.
"""

from __future__ import annotations

import ast
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.grad.block_vjp import spec_in
from coexec.control_flow.trace.statements import Statements
from coexec.control_flow.trace.values import CountedInt, Namespace, counted_as, unwrap_counted
from coexec.guards.pure_calls import is_number
from tracer.block import CALL, COUNT, FLAG, Block, RecursiveCall, RecursiveFunction
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.op import same
from tracer.source import function_of
from tracer.spec import Spec
from tracer.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from coexec.control_flow.program_types import Tensor, Value
    from coexec.control_flow.trace.paths import Found, Row
    from coexec.control_flow.trace.reads import Reads
    from tracer.source import Function


class _Unknown(Refused):
    """The form of a call's return value is not known yet."""


class _Anew(Refused):
    """The function must be traced again, as one more of its ints differs between calls."""


class _Cycle(Exception):
    """A call of a function that is being interpreted: it calls itself through others."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code


@dataclass
class _Active:
    """A recursive function that is being traced."""

    code: types.CodeType
    tree: Function

    names: dict[str, Value]  # its arguments in the outermost call
    depth: int  # functions being interpreted around it
    counted: set[str] = field(default_factory=set)  # ints that differ between calls
    form: _Form = None  # the structure of its return value, with `_Leaf` for tensors
    specs: list[Spec] = field(default_factory=list)  # of those tensors
    captured: list[Tensor] = field(default_factory=list)  # tensors from enclosing stages, as further arguments
    recursion: RecursiveFunction = field(default_factory=RecursiveFunction)
    stage: Stage = None  # type: ignore[assignment]  # it and `room` are set where the function is traced
    room: LazyTensor = None  # type: ignore[assignment]
    called: bool = False  # whether it has called itself

    def leaves(self, names: dict[str, Value]) -> list[Tensor]:
        """Returns the tensors among a call's arguments, in order."""
        found: list[Tensor] = []
        for name, value in self.names.items():
            given = names.get(name)
            if _tensors(value) is not None:
                one, other = _tensors(value), _tensors(given)
                if other is None or type(given) is not type(value) or [*map(_spec, one or ())] != [*map(_spec, other)]:
                    raise Refused(f"{name!r} is another kind of value in a call of the function by itself")
                found += other
                if isinstance(value, CountedInt):
                    _check_growth(name, given, value)
            elif name in self.counted:
                if not isinstance(given, CountedInt) and (type(given) is not int or abs(given) >= 1 << 20):
                    raise Refused(f"{name!r} is no whole number in a call of the function by itself")
                found.append(given.tensor if isinstance(given, CountedInt) else tf.constant(given, tf.int32))
                _check_growth(name, given)
            elif given is not value and not (is_number(given) and is_number(value) and same(given, value)):
                if (type(given) is int or isinstance(given, CountedInt)) and type(value) is int:
                    self.counted.add(name)
                    raise _Anew
                raise Refused(f"{name!r} is another Python value in a call of the function by itself")
        return found


@dataclass(frozen=True)
class _Leaf:
    """A tensor in a function's return value."""

    number: int
    counted: bool


if TYPE_CHECKING:
    _Form = _Leaf | tuple["_Form", ...] | Value  # of a return value: a tensor, a tuple of forms, or a plain value


class RecursiveStatements(Statements):
    """Interprets statements that may call recursive functions."""

    def __init__(self, reads: Reads) -> None:
        super().__init__(reads)
        self._active: dict[types.CodeType, _Active] = {}
        self._plain: dict[types.CodeType, str] = {}  # code that is inlined, and why
        self._pending: list[LazyTensor | None] = []  # `leave` of the enclosing paths
        self._path: list[types.CodeType] = []  # the code of functions being interpreted
        self._guesses = False  # whether recursive calls are skipped, to find the return value's form

    def enclosed(self, block: Block) -> Block:
        """Wraps a block with recursive calls as a function: if a check in it fails, all of it is left to Python."""
        if self.room is None:
            return block
        stage = Stage()
        given = [stage.argument(spec) for spec in block.arguments]
        specs = [spec_in(block, result) for result in block.results]
        return stage.block(stage.structure(CALL, RecursiveFunction(block), given, specs))

    def inlined(self, function: types.FunctionType, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Calls a user function, as a recursive one if it calls itself."""
        code = function.__code__
        active = self._active.get(code)
        if active is not None:
            return self._again(active, self.entered(function, args, kwargs)[1].names)
        if any(code is other for other in self._path) and code not in self._plain and self.lists is None:
            raise _Cycle(code)
        calls = _calls_itself(code, function.__globals__)
        if self.lists is not None or code in self._plain or not calls:
            before = self.stage.last, self.leave, len(self.reasons)
            try:
                return self._inlined(function, args, kwargs)
            except _Cycle as cycle:
                if cycle.code is not code:
                    raise
            self.stage.forget(before[0])
            self.leave = before[1]
            del self.reasons[before[2] :]
        leave, reasons, guesses = self.leave, list(self.reasons), self._guesses
        try:
            self._guesses = False  # of an outer function, in which this one is called
            return self._called(code, *self.entered(function, args, kwargs))
        except Refused as refused:
            self._plain[code] = str(refused)
            self.leave, self.reasons = leave, reasons
        finally:
            self._guesses = guesses
            self._active.pop(code, None)
        try:
            return self._inlined(function, args, kwargs)
        except Refused as refused:
            raise Refused(f"{function.__qualname__} calls itself: {self._plain[code] or refused}") from None

    def _inlined(self, function: types.FunctionType, args: list[Value], kwargs: dict[str, Value]) -> Value:
        self._path.append(function.__code__)
        try:
            return super().inlined(function, args, kwargs)
        finally:
            self._path.pop()

    def _called(self, code: types.CodeType, tree: Function, scope: Namespace) -> Value:
        """Traces a function until its form, its ints that differ and captured tensors are stable; issues the call.

        Returns the call's value. Raises `Refused` if that takes too many attempts, or if some path is left to Python.
        """
        active = self._active[code] = _Active(code, tree, scope.names, len(self._path))
        reasons = list(self.reasons)
        for _ in range(tuning.max_recursion_stagings):
            counted = len(active.counted)
            try:
                if active.form is None:
                    self._guesses = True
                    try:
                        self._take_form(active, self._write(active, tree, scope)[0])
                    finally:
                        self._guesses, self.reasons = False, list(reasons)
                    if not active.called:
                        raise Refused("it does not call itself on the way")
                value, leave, captured = self._write(active, tree, scope)
            except _Anew:
                pass
            if len(active.counted) > counted:  # some path may have been left to Python for it
                active.form, self.reasons = None, list(reasons)
                continue
            if len(captured) != len(active.captured) or any(
                a is not b for a, b in zip(captured, active.captured, strict=True)
            ):
                active.captured = captured
                continue
            before = active.form, list(active.specs)
            leaves = self._take_form(active, value)
            if (active.form, active.specs) != before:
                raise Refused("it returns other kinds of values on some ways")
            if len(self.reasons) > len(reasons):
                raise Refused(self.reasons[-1])
            active.recursion.block = active.stage.block([*leaves, leave])
            del self._active[code]
            return self._issued(active, active.leaves(scope.names), self._room(), active.recursion)
        raise Refused("its calls have too little in common")

    def _room(self) -> LazyTensor:
        """Returns the argument that limits how deeply calls may nest, which the first such call adds."""
        if self.room is None:
            self.room = len(self.reads.stage.arguments)
            self.reads.stage.argument(COUNT)
        return self.reads.stage.arguments[self.room]

    def _write(
        self, active: _Active, tree: Function, scope: Namespace
    ) -> tuple[Value, LazyTensor | None, list[Tensor]]:
        """Traces the function; returns its value, `leave`, and the tensors that it captured."""
        outer, leave, rows, pending = self.stage, self.leave, self.rows, self._pending
        self.stage = active.stage = Stage(outer)
        self.leave, self._pending = None, []
        try:
            with self.stage as stage:
                inner = Namespace(dict(scope.names), scope.namespace, scope.cells, scope.local)
                for name, value in active.names.items():
                    given = _tensors(value)
                    if given is not None:
                        made = [stage.argument(v._out.spec) for v in given]
                        inner.names[name] = made[0] if isinstance(value, LazyTensor) else tuple(made)
                        if isinstance(value, CountedInt):
                            inner.names[name] = CountedInt(made[0], _bound_within(value))
                    elif name in active.counted:
                        inner.names[name] = CountedInt(stage.argument(COUNT), _bound_within())
                active.room = stage.argument(COUNT)
                count = len(stage.arguments)
                for tensor in active.captured:
                    stage.own(tensor)
                stopped = tf.less_equal(active.room, 0)
                if self._guesses:
                    return self.carried_out(tree, inner), None, []
                body = self.apart(lambda: self._flat(active, self.carried_out(tree, inner)))
                zeros = self.apart(lambda: [tf.zeros(spec.shape, spec.dtype) for spec in active.specs])
                found = self.joined(stopped, [(zeros[0], zeros[1], True), body])
                active.recursion.guard = stage.last.attrs[1]
                return self._built(active.form, found), self.leave, stage.given[count:]
        finally:
            self.stage, self.leave, self.rows, self._pending = outer, leave, rows, pending

    def apart(self, function: Callable[..., Found]) -> tuple[Stage, Found, LazyTensor | None]:
        """Traces `function` into a stage of its own; returns that stage, the function's result, and `leave`."""
        self._pending.append(self.leave)
        try:
            return super().apart(function)
        finally:
            self._pending.pop()

    def _again(self, active: _Active, names: dict[str, Value]) -> Value:
        """Issues a recursive call of a function that is being traced; returns its value."""
        active.called = True
        leaves = active.leaves(names)
        if self._guesses:
            raise _Unknown("what it returns is not known")
        room = tf.subtract(active.room, 1 + len(self._path) - active.depth)
        for deep in (*self._pending, self.leave):
            if isinstance(deep, LazyTensor):  # else calls that call twice would fail one by one, exponentially many
                room = tf.where(deep, tf.constant(0), room)
        return self._issued(active, leaves, room, RecursiveCall(active.recursion))

    def _issued(
        self, active: _Active, leaves: list[Tensor], room: Tensor, part: RecursiveFunction | RecursiveCall
    ) -> Value:
        """Issues a call; if calls nest too deeply, the iteration is left to Python. Returns the call's value."""
        given = [*leaves, room, *active.captured]
        *found, deep = self.stage.structure(CALL, part, given, [*active.specs, FLAG])
        self.leave_if(deep)
        return self._built(active.form, found)

    def merged(self, truth: LazyTensor, then: Row, other: Row) -> list[Value]:
        """Merges two paths; a Python int becomes counted where the other path has a counted number."""
        ones = [_counted(a, b) for a, b in zip(then[1], other[1], strict=True)]
        twos = [_counted(b, a) for a, b in zip(ones, other[1], strict=True)]
        return super().merged(truth, (then[0], ones), (other[0], twos))

    # Return values.

    def _take_form(self, active: _Active, value: Value) -> list[LazyTensor | None]:
        """Sets `active.form` and `active.specs` to those of a return value; returns its tensors."""
        active.specs = []
        leaves: list[LazyTensor | None] = []

        def taken(part: Value) -> _Form:
            if type(part) is tuple and self.reads.place(part) is None:
                return tuple([taken(p) for p in part])
            tensor = unwrap_counted(part)
            if isinstance(tensor, LazyTensor):
                leaves.append(tensor)
                active.specs.append(tensor._out.spec)
                return _Leaf(len(leaves) - 1, isinstance(part, CountedInt))
            if type(part) is int and self._guesses and abs(part) < 1 << 20:  # other paths may return other ints
                leaves.append(None)
                active.specs.append(COUNT)
                return _Leaf(len(leaves) - 1, True)
            if is_number(part):
                return part
            raise Refused(f"it returns a {type(part).__name__}")

        active.form = taken(value)
        return leaves

    def _flat(self, active: _Active, value: Value) -> list[Tensor]:
        """Returns the tensors in what a path returns."""
        found: list[Tensor] = []

        def taken(form: _Form, part: Value) -> None:
            if type(form) is tuple:
                if type(part) is not tuple or len(part) != len(form):
                    raise Refused("it returns other kinds of values on some ways")
                for inner in zip(form, part, strict=True):
                    taken(*inner)
            elif isinstance(form, _Leaf):
                if form.counted and type(part) is int and abs(part) < 1 << 20:
                    part = CountedInt(tf.constant(part, tf.int32))
                if isinstance(part, CountedInt) and part.bound > tuning.max_counted:
                    # What calls return may add up over any number of calls; their callers rely on the bound.
                    self.leave_if(tf.greater(tf.abs(part.tensor), tuning.max_counted))
                if not isinstance(unwrap_counted(part), LazyTensor) or isinstance(part, CountedInt) is not form.counted:
                    raise Refused("it returns other kinds of values on some ways")
                found.append(unwrap_counted(part))
            elif not is_number(part) or not same(part, form):
                raise Refused("it returns other Python values on some ways")

        taken(active.form, value)
        return found

    def _built(self, form: _Form, found: list[Tensor]) -> Value:
        if type(form) is tuple:
            return tuple([self._built(part, found) for part in form])
        if isinstance(form, _Leaf):
            return CountedInt(found[form.number]) if form.counted else found[form.number]
        return form

    # While the form of the return value is unknown.

    def branched(self, truth: LazyTensor, then: Callable[..., Value], other: Callable[..., Value]) -> Value:
        """Evaluates both branches to a value; while recursive calls are skipped, uses those that make none."""
        if not self._guesses:
            return super().branched(truth, then, other)
        found = []
        for way in (then, other):
            try:
                found.append(self.apart(way)[1])
            except _Unknown as unknown:
                refused = unknown
        if not found:
            raise refused
        return _dummy(found[0])


def _dummy(value: Value) -> Value:
    if type(value) is tuple:
        return tuple([_dummy(part) for part in value])
    if isinstance(value, CountedInt):
        return counted_as(_dummy(value.tensor), value)
    return tf.zeros(value._out.spec.shape, value._out.spec.dtype) if isinstance(value, LazyTensor) else value


def _tensors(value: Value) -> list[LazyTensor] | None:
    """Returns the tensors that make up an argument; None if it is anything else."""
    if isinstance(value, (LazyTensor, CountedInt)):
        return [unwrap_counted(value)]
    if type(value) is tuple and value and all(isinstance(v, LazyTensor) for v in value):
        return list(value)
    return None


def _bound_within(value: CountedInt | None = None) -> int:
    """Returns the bound of a counted argument in all calls; `value`: it in the outermost, if it is counted there."""
    return tuning.max_counted + (value.bound if value is not None else tuning.max_counted)


def _check_growth(name: str, given: Value, value: CountedInt | None = None) -> None:
    """Refuses a counted argument that grows from call to call by more than small numbers: its bound holds for all."""
    grown = given.bound - _bound_within(value) if isinstance(given, CountedInt) else 0
    if grown * tuning.max_recursion > tuning.max_counted:
        raise Refused(f"{name!r} may exceed int32 in a call of the function by itself")


def _spec(tensor: LazyTensor) -> Spec:
    spec = tensor._out.spec
    return spec


def _counted(value: Value, other: Value) -> Value:
    """Returns a value with its Python ints as counted numbers where the other value has some."""
    if type(value) is tuple and type(other) is tuple and len(value) == len(other):
        parts = tuple([_counted(*pair) for pair in zip(value, other, strict=True)])
        return value if all(a is b for a, b in zip(value, parts, strict=True)) else parts
    if type(value) is int and isinstance(other, CountedInt) and abs(value) < 1 << 20:
        return CountedInt(tf.constant(value, tf.int32))
    return value


def _calls_itself(code: types.CodeType, namespace: dict[str, Value]) -> bool:
    """Returns whether a function calls something of its own name; `namespace` holds its globals."""
    tree, name = function_of(code, namespace), code.co_name
    return tree is not None and any(
        isinstance(n, ast.Call) and name in (getattr(n.func, "id", None), getattr(n.func, "attr", None))
        for n in ast.walk(tree)
    )
