"""Recursion: functions of the user's that call themselves on a tensor's say, written down once, with calls in them.

What such a function returns is found first, from the ways on which it does not call itself. Its tensors are arguments,
and so are the whole numbers that are others in the calls; everything else must be the same in all of them. Each call is
told how many may be inside of it: where that is not enough, all is left to Python, which knows its own limit.
"""

from __future__ import annotations

import ast
import types
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from coexec.staging.endings import calls_itself, ends_soon
from coexec.staging.lookups import is_number
from coexec.staging.statements import Statements
from coexec.staging.values import Scope, Whole, tensor_of
from tracer.block import CALL, COUNT, FLAG, Again, Recursion
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.op import freeze
from tracer.source import function_of
from tracer.spec import Spec
from tracer.stage import Stage

MOST = 12  # times that one is written down, until it is known what its calls have in common


class _Unknown(Refused):
    """What a call returns is not known yet."""


class _Anew(Refused):
    """The function must be written down once more, as more is known."""


class _Cycle(Exception):
    """A function is called that is being carried out: by way of others, it calls itself."""

    def __init__(self, code: Any) -> None:
        self.code = code


@dataclass
class _Active:
    """A function that is being written down."""

    code: Any
    tree: Any

    names: dict[str, Any]  # its arguments in the call from outside
    depth: int  # functions that are carried out around it
    counted: set[str] = field(default_factory=set)  # whole numbers that calls give otherwise
    form: Any = None  # what it returns, with `_Leaf` for tensors
    specs: list[Spec] = field(default_factory=list)  # of those
    captured: list[Any] = field(default_factory=list)  # tensors from outside that it takes besides
    recursion: Recursion = field(default_factory=Recursion)
    stage: Any = None
    room: Any = None
    called: bool = False  # whether it has called itself

    def leaves(self, names: dict[str, Any]) -> list[Any]:
        """Returns the tensors among arguments, in order."""
        found: list[Any] = []
        for name, value in self.names.items():
            given = names.get(name)
            if _tensors(value) is not None:
                one, other = _tensors(value), _tensors(given)
                if other is None or type(given) is not type(value) or [*map(_spec, one or ())] != [*map(_spec, other)]:
                    raise Refused(f"{name!r} is another kind of value in a call of the function by itself")
                found += other
            elif name in self.counted:
                if not isinstance(given, Whole) and (type(given) is not int or abs(given) >= 1 << 20):
                    raise Refused(f"{name!r} is no whole number in a call of the function by itself")
                found.append(given.tensor if isinstance(given, Whole) else tf.constant(given, tf.int32))
            elif given is not value and not (is_number(given) and is_number(value) and freeze(given) == freeze(value)):
                if (type(given) is int or isinstance(given, Whole)) and type(value) is int:
                    self.counted.add(name)
                    raise _Anew
                raise Refused(f"{name!r} is another Python value in a call of the function by itself")
        return found


@dataclass(frozen=True)
class _Leaf:
    """A tensor among what a function returns."""

    number: int
    counted: bool


class Functions(Statements):
    """Carries out statements that may call functions which call themselves."""

    def __init__(self, reads: Any) -> None:
        super().__init__(reads)
        self.room: int | None = None  # which argument says how many calls may be inside of each other
        self._active: dict[Any, _Active] = {}
        self._plain: dict[Any, str] = {}  # code that is carried out where it is called, and why
        self._pending: list[Any] = []  # `leave` of the paths around the one that is written down
        self._callees: list[str | None] = []  # what is called, by the names in the calls that are under way
        self._path: list[tuple[Any, Any, str | None]] = []  # functions that are carried out: code, syntax, called as
        self._guesses = False  # whether calls of a function by itself are left out

    def inlined(self, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function of the user's."""
        code = function.__code__
        name = self._callees[-1] if self._callees else None
        active = self._active.get(code)
        if active is not None:
            self._refuse_detour(active, name)
            return self._again(active, self.entered(function, args, kwargs)[1].names)
        if any(code is other for other, _, _ in self._path) and code not in self._plain and self.lists is None:
            raise _Cycle(code)
        calls = calls_itself(code, function.__globals__)
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
            self._guesses = False  # of another function, in which this one is called
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

    def _inlined(self, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
        code = function.__code__
        self._path.append((code, function_of(code, function.__globals__), self._callees[-1] if self._callees else None))
        try:
            return super().inlined(function, args, kwargs)
        finally:
            self._path.pop()

    def _refuse_detour(self, active: _Active, name: str | None) -> None:
        """Refuses a call of a function by itself if Python, carrying it out for nothing, might not come to its end."""
        way = [(active.code, active.tree, name), *self._path[active.depth :]]
        names = {code.co_name for code, _, _ in way}
        if any(code.co_name != called for code, _, called in way):
            raise Refused("it calls itself by another name")
        if not all(ends_soon(tree, names) for _, tree, _ in way):
            raise Refused("it calls itself by way of another function, and which way ends it is not plain to see")

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        self._callees.append(getattr(node.func, "id", getattr(node.func, "attr", None)))
        try:
            return super()._call(node, scope)
        finally:
            self._callees.pop()

    def _called(self, code: Any, tree: Any, scope: Scope) -> Any:
        if not ends_soon(tree, {code.co_name}):
            raise Refused("which way ends it is not plain to see")
        active = self._active[code] = _Active(code, tree, scope.names, len(self._path))
        reasons = list(self.reasons)
        for _ in range(MOST):
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
            if len(active.counted) > counted:  # some way may have taken it for a reason to leave it to Python
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

    def _room(self) -> Any:
        if self.room is None:
            self.room = len(self.reads.stage.arguments)
            self.reads.stage.argument(COUNT)
        return self.reads.stage.arguments[self.room]

    def _write(self, active: _Active, tree: Any, scope: Scope) -> tuple[Any, Any, list[Any]]:
        """Writes the function down; returns what it returns, whether there was no room, and what it has captured."""
        outer, leave, rows, pending = self.stage, self.leave, self.rows, self._pending
        self.stage = active.stage = Stage(outer)
        self.leave, self._pending = None, []
        try:
            with self.stage as stage:
                inner = Scope(dict(scope.names), scope.namespace, scope.cells, scope.local)
                for name, value in active.names.items():
                    given = _tensors(value)
                    if given is not None:
                        made = [stage.argument(v._out.spec) for v in given]
                        inner.names[name] = made[0] if isinstance(value, LazyTensor) else tuple(made)
                        inner.names[name] = Whole(made[0]) if isinstance(value, Whole) else inner.names[name]
                    elif name in active.counted:
                        inner.names[name] = Whole(stage.argument(COUNT))
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

    def apart(self, function: Any) -> tuple[Stage, Any, Any]:
        """Runs what writes operations down in a stage of its own; returns that, what came of it, and `leave`."""
        self._pending.append(self.leave)
        try:
            return super().apart(function)
        finally:
            self._pending.pop()

    def _again(self, active: _Active, names: dict[str, Any]) -> Any:
        """Calls a function that is being written down, by itself."""
        active.called = True
        leaves = active.leaves(names)
        if self._guesses:
            raise _Unknown("what it returns is not known")
        room = tf.subtract(active.room, 1 + len(self._path) - active.depth)
        for deep in (*self._pending, self.leave):
            if isinstance(deep, LazyTensor):  # else two calls, each of two calls, would find out each for itself
                room = tf.where(deep, tf.constant(0), room)
        return self._issued(active, leaves, room, Again(active.recursion))

    def _issued(self, active: _Active, leaves: list[Any], room: Any, part: Any) -> Any:
        given = [*leaves, room, *active.captured]
        *found, deep = self.stage.structure(CALL, part, given, [*active.specs, FLAG])
        self.leave_if(deep)
        return self._built(active.form, found)

    # What is returned.

    def _take_form(self, active: _Active, value: Any) -> list[Any]:
        active.specs = []
        leaves: list[Any] = []

        def taken(part: Any) -> Any:
            if type(part) is tuple and self.reads.place(part) is None:
                return tuple([taken(p) for p in part])
            tensor = tensor_of(part)
            if isinstance(tensor, LazyTensor):
                leaves.append(tensor)
                active.specs.append(tensor._out.spec)
                return _Leaf(len(leaves) - 1, isinstance(part, Whole))
            if type(part) is int and self._guesses and abs(part) < 1 << 20:  # others may be returned elsewhere
                leaves.append(None)
                active.specs.append(COUNT)
                return _Leaf(len(leaves) - 1, True)
            if is_number(part):
                return part
            raise Refused(f"it returns a {type(part).__name__}")

        active.form = taken(value)
        return leaves

    def _flat(self, active: _Active, value: Any) -> list[Any]:
        """Returns the tensors in what a way returns."""
        found: list[Any] = []

        def taken(form: Any, part: Any) -> None:
            if type(form) is tuple:
                if type(part) is not tuple or len(part) != len(form):
                    raise Refused("it returns other kinds of values on some ways")
                for inner in zip(form, part, strict=True):
                    taken(*inner)
            elif isinstance(form, _Leaf):
                if form.counted and type(part) is int and abs(part) < 1 << 20:
                    part = Whole(tf.constant(part, tf.int32))
                if not isinstance(tensor_of(part), LazyTensor) or isinstance(part, Whole) is not form.counted:
                    raise Refused("it returns other kinds of values on some ways")
                found.append(tensor_of(part))
            elif not is_number(part) or freeze(part) != freeze(form):
                raise Refused("it returns other Python values on some ways")

        taken(active.form, value)
        return found

    def _built(self, form: Any, found: list[Any]) -> Any:
        if type(form) is tuple:
            return tuple([self._built(part, found) for part in form])
        if isinstance(form, _Leaf):
            return Whole(found[form.number]) if form.counted else found[form.number]
        return form

    # While it is found out what is returned.

    def branched(self, truth: LazyTensor, then: Any, other: Any) -> Any:
        """Evaluates both ways to a value; while calls of a function by itself are left out, those that have none."""
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


def _dummy(value: Any) -> Any:
    if type(value) is tuple:
        return tuple([_dummy(part) for part in value])
    if isinstance(value, Whole):
        return Whole(_dummy(value.tensor))
    return tf.zeros(value._out.spec.shape, value._out.spec.dtype) if isinstance(value, LazyTensor) else value


def _tensors(value: Any) -> list[Any] | None:
    """Returns the tensors that an argument consists of; None if it is something else."""
    if isinstance(value, (LazyTensor, Whole)):
        return [tensor_of(value)]
    if type(value) is tuple and value and all(isinstance(v, LazyTensor) for v in value):
        return list(value)
    return None


def _spec(tensor: Any) -> Spec:
    spec: Spec = tensor._out.spec
    return spec
