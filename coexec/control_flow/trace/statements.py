"""Statements: interprets Python statements on symbolic tensors."""

from __future__ import annotations

import ast
import inspect
import types
from typing import TYPE_CHECKING

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.trace.expressions import Expressions
from coexec.control_flow.trace.reads import CONTAINERS, Reads, has_own_builtins
from coexec.control_flow.trace.values import (
    CountedInt,
    Namespace,
    Undefined,
    counted_as,
    is_one_kind,
    spec,
    unwrap_counted,
)
from tracer.block import COUNT, FLAG, LOOP, Block, WhileLoop
from tracer.errors import Refused
from tracer.functions import joined
from tracer.lazy import LazyTensor
from tracer.library import behind
from tracer.source import function_of
from tracer.syntax import assigned_names, shared_names

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from coexec.control_flow.program_types import Tensor, Value
    from tracer.source import Function
    from tracer.stage import Stage


class Break(Exception):
    """Leaves a loop over Python values."""


class Continue(Exception):
    """Ends an iteration."""


class Return(Exception):
    """Returns from a function."""

    def __init__(self, value: Value) -> None:
        self.value = value


class Statements(Expressions):
    """Interprets statements in a scope."""

    def __init__(self, reads: Reads) -> None:
        super().__init__(reads)
        self.reasons: list[str] = []  # why some paths were left to Python
        self.room: int | None = None  # which argument limits how deeply calls may nest, if one does

    def enclosed(self, block: Block) -> Block:
        """Returns the block to run in place of one that was traced here."""
        return block

    def run(self, statements: list[ast.stmt], scope: Namespace, ends: bool) -> None:
        """Interprets the statements that end an iteration or, if `ends`, a function.

        Raises `Break`, `Continue` or `Return` where they do, and `Refused` if Python must run them.
        """
        for n, statement in enumerate(statements):
            rest = statements[n + 1 :]
            if isinstance(statement, ast.If):
                truth = self.truth(statement.test, scope)
                if not isinstance(truth, LazyTensor):
                    return self.run((statement.body if truth else statement.orelse) + rest, scope, ends)
                if ends and returns(statement):
                    raise Return(
                        self.branched(
                            truth,
                            lambda s=statement, r=rest: self.returned(s.body + r, scope.branch()),
                            lambda s=statement, r=rest: self.returned(s.orelse + r, scope.branch()),
                        )
                    )
                if _continues([*statement.body, *statement.orelse]):
                    return self._part(truth, statement.body + rest, statement.orelse + rest, scope)
                self._part(truth, statement.body, statement.orelse, scope)
            else:
                method = getattr(self, f"_run_{type(statement).__name__.lower()}", None)
                if method is None:
                    raise Refused(f"{type(statement).__name__} is not supported")
                method(statement, scope)
        return None

    def returned(self, statements: list[ast.stmt], scope: Namespace) -> Value:
        """Interprets the statements that end a function; returns its return value."""
        try:
            self.run(statements, scope, True)
        except Return as returned:
            return returned.value
        return None

    # Paths that fork on a tensor.

    def _part(self, truth: LazyTensor, then: list[ast.stmt], other: list[ast.stmt], scope: Namespace) -> None:
        """Interprets both paths after a fork on a tensor; merges what they assign into the names of `scope`."""
        names = sorted(assigned_names([*then, *other]))
        lost = Undefined("it is assigned on one path only")
        paths: list[tuple[Stage, Collection[Value] | None, LazyTensor | bool | None]] = []
        for way in (then, other):
            stage, found, leave = self.apart(lambda way=way: self._way(way, scope.branch()))
            paths.append((stage, found and [found.get(name, lost) for name in names], leave))
        known = next((row for _, row, _ in paths if row is not None), None)
        if known is None:
            raise Refused(f"both ways are left to Python: {self.reasons[-1]}")
        for n, (_, row, _) in enumerate(paths):
            if row is None:
                stage, row, _ = self.apart(lambda: [_like(v) for v in known])
                paths[n] = stage, row, True
        scope.names.update(zip(names, self.joined(truth, paths), strict=True))  # type: ignore[arg-type]  # no None

    def _way(self, statements: list[ast.stmt], scope: Namespace) -> dict[str, Value] | None:
        """Interprets statements; returns the names afterwards, None if the path was refused or leaves the loop."""
        try:
            self.run(statements, scope, False)
        except Continue:
            pass
        except (Break, Return):
            self.reasons.append("it leaves the loop")
            return None
        except Refused as refused:
            self.reasons.append(str(refused))
            return None
        return scope.names

    # Statement handlers, named after the classes of the syntax tree.

    def _run_expr(self, statement: ast.Expr, scope: Namespace) -> None:
        self.evaluate(statement.value, scope)

    def _run_pass(self, statement: ast.Pass, scope: Namespace) -> None:
        pass

    def _run_break(self, statement: ast.Break, scope: Namespace) -> None:
        raise Break

    def _run_continue(self, statement: ast.Continue, scope: Namespace) -> None:
        raise Continue

    def _run_return(self, statement: ast.Return, scope: Namespace) -> None:
        raise Return(None if statement.value is None else self.evaluate(statement.value, scope))

    def _run_assert(self, statement: ast.Assert, scope: Namespace) -> None:
        if not __debug__:
            return
        truth = self.truth(statement.test, scope)
        if isinstance(truth, LazyTensor):
            self.reasons.append("an assertion may fail")
            self.leave_if(tf.logical_not(truth))
        elif not truth:
            raise Refused("an assertion fails")

    def _run_assign(self, statement: ast.Assign, scope: Namespace) -> None:
        value = self.evaluate(statement.value, scope)
        for target in statement.targets:
            self._assign(target, value, scope)

    def _run_annassign(self, statement: ast.AnnAssign, scope: Namespace) -> None:
        if statement.value is not None:
            self._assign(statement.target, self.evaluate(statement.value, scope), scope)

    def _run_augassign(self, statement: ast.AugAssign, scope: Namespace) -> None:
        if not isinstance(statement.target, ast.Name):
            raise Refused("an attribute or item is assigned to")
        left = self._name(ast.Name(statement.target.id, ast.Load()), scope)
        if type(left) in (list, dict):
            raise Refused("a list or dict is changed in place")
        if hasattr(type(left), _IN_PLACE[type(statement.op)]) and not isinstance(left, CountedInt):
            raise Refused(f"a {type(left).__name__} has its own way to be changed in place")
        fake = ast.BinOp(ast.Name(statement.target.id, ast.Load()), statement.op, statement.value)
        self._assign(statement.target, self._binop(fake, scope), scope)

    def _assign(self, target: ast.expr, value: Value, scope: Namespace) -> None:
        if isinstance(target, ast.Name):
            if target.id not in scope.local:
                raise Refused(f"{target.id!r} is not a local variable")
            scope.names[target.id] = value
            return
        if not isinstance(target, (ast.Tuple, ast.List)) or any(isinstance(t, ast.Starred) for t in target.elts):
            raise Refused("an attribute or item is assigned to")
        items = self.iterated(value)
        if len(items) != len(target.elts):
            raise Refused("a number of values that does not fit is unpacked")
        for part, item in zip(target.elts, items, strict=True):
            self._assign(part, item, scope)

    def _run_for(self, statement: ast.For, scope: Namespace) -> None:
        items = self.iterated(self.evaluate(statement.iter, scope))
        if len(items) > tuning.max_python_turns:
            raise Refused(f"a loop of more than {tuning.max_python_turns} turns")
        for item in items:
            self._assign(statement.target, item, scope)
            if self._turn(statement.body, scope):
                return
        self._behind(statement, scope)

    def _run_while(self, statement: ast.While, scope: Namespace) -> None:
        for _ in range(tuning.max_python_turns):
            testing = self.apart(lambda: self.truth(statement.test, scope))
            if testing[2] is not None:
                raise Refused("a way through the test is left to Python")
            if isinstance(testing[1], LazyTensor):
                return self._loop(statement, scope)
            if not testing[1]:
                return self._behind(statement, scope)
            if self._turn(statement.body, scope):
                return None
        raise Refused(f"a loop of more than {tuning.max_python_turns} turns")

    def _loop(self, statement: ast.While, scope: Namespace) -> None:
        """Traces a nested loop; if it does not run to its end, the enclosing iteration is left to Python."""
        assigned = sorted(assigned_names(statement.body))
        inner = scope.branch()
        names = [name for name in assigned if spec(scope.names.get(name)) is not None]
        starts = {name: self.stage.stand_in(unwrap_counted(scope.names[name])._out) for name in names}
        counted = [value for name in names if isinstance(value := scope.names[name], CountedInt)]
        inner.names.update({name: _as(scope.names[name], start, counted) for name, start in starts.items()})
        testing, truth, left = self.apart(lambda: self.truth(statement.test, inner))
        if left is not None:
            raise Refused("a way through the test is left to Python")
        test = testing.block([truth])
        turning, found, leave = self.apart(lambda: self._way(statement.body, inner))
        if found is None:
            raise Refused(self.reasons[-1])
        if self.grown(testing) or self.grown(turning):
            raise Refused("a list grows in a loop inside of the loop")
        for name in assigned:
            value, before = inner.names.get(name), scope.names.get(name)
            if name in starts and not is_one_kind(value, before):
                raise Refused(f"{name!r} is {spec(before)!r} before a turn and {spec(value)!r} after it")
            if name not in starts and name in scope.names and value is not before:
                raise Refused(f"{name!r} is a Python value that changes in a loop inside of the loop")
        with turning:
            flag = leave if leave is not None else tf.constant(False)
        body = turning.block([*(unwrap_counted(inner.names[name]) for name in names), flag])
        inputs, places = joined([testing, turning], list(starts.values()))
        inputs[: len(names)] = [unwrap_counted(scope.names[name]) for name in names]
        loop = WhileLoop(test, body, places[0], places[1], tuple(range(len(names))), tuning.max_device_turns)
        specs = [lazy._out.spec for lazy in starts.values()]
        *states, _, holds = self.stage.structure(LOOP, loop, inputs, [*specs, COUNT, FLAG])
        self.leave_if(holds)
        lost = Undefined("it has no value if the loop does not turn")
        scope.names.update({name: lost for name in assigned if name not in scope.names})
        grown = [value for name in names if isinstance(value := inner.names[name], CountedInt)]
        for name, state in zip(names, states, strict=True):
            scope.names[name] = _as(scope.names[name], state, counted, grown)
        self._behind(statement, scope)

    def _behind(self, statement: ast.For | ast.While, scope: Namespace) -> None:
        """Interprets the `else` of a nested loop."""
        if _continues(statement.orelse):
            raise Refused("`continue` behind a loop inside of the loop")
        self.run(statement.orelse, scope, False)

    def _turn(self, body: list[ast.stmt], scope: Namespace) -> bool:
        """Interprets one iteration of a loop over Python values; returns whether it leaves the loop."""
        try:
            self.run(body, scope, False)
        except Continue:
            pass
        except Break:
            return True
        return False

    # Comprehensions.

    def _listcomp(self, node: ast.ListComp, scope: Namespace) -> Value:
        made = self._comprehended(node, scope)
        self._own[id(made)] = made, self.stage
        return made

    def taken(self, function: Value, node: ast.Call, scope: Namespace) -> list[Value] | None:
        """Returns the items of a generator expression that a call consumes whole; None for other calls."""
        if len(node.args) != 1 or not isinstance(node.args[0], ast.GeneratorExp):
            return None
        return self._comprehended(node.args[0], scope) if any(function is f for f in (list, tuple, sum)) else None

    def _comprehended(self, node: ast.ListComp | ast.GeneratorExp, scope: Namespace) -> list[Value]:
        """Returns the items of a comprehension over Python values."""
        targets = assigned_names([part.target for part in node.generators])
        if any(isinstance(n, ast.NamedExpr) for n in ast.walk(node)) or any(part.is_async for part in node.generators):
            raise Refused("a comprehension does more than compute")
        names = {name: value for name, value in scope.names.items() if name not in targets}
        inner = Namespace(names, scope.namespace, scope.cells, scope.local | targets)
        made: list[Value] = []
        self._comprehend(node.generators, node.elt, scope, inner, made)
        return made

    def _comprehend(
        self, parts: list[ast.comprehension], item: ast.expr, around: Namespace, inner: Namespace, made: list[Value]
    ) -> None:
        if not parts:
            made.append(self.evaluate(item, inner))
            if len(made) > tuning.max_python_turns:
                raise Refused(f"a comprehension of more than {tuning.max_python_turns} items")
            return
        items = self.iterated(self.evaluate(parts[0].iter, around))  # the first one in the enclosing scope
        if len(items) > tuning.max_python_turns:
            raise Refused(f"a comprehension of more than {tuning.max_python_turns} items")
        for value in items:
            self._assign(parts[0].target, value, inner)
            if all(self._is_kept(test, inner) for test in parts[0].ifs):
                self._comprehend(parts[1:], item, inner, inner, made)

    def _is_kept(self, test: ast.expr, scope: Namespace) -> bool:
        truth = self.truth(test, scope)
        if isinstance(truth, LazyTensor):
            raise Refused("what a comprehension leaves out depends on a tensor")
        return bool(truth)

    # Calls of user functions.

    def inlined(self, function: types.FunctionType, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Inlines a call of a user function: its statements are interpreted here."""
        if behind(function) is not function and self.reads.place(function) is not None:  # `coexec.pure`
            function = self.reads.attribute(function, "__wrapped__", behind(function))
        tree, scope = self.entered(function, args, kwargs)
        if self.depth >= tuning.max_staged_depth:
            raise Refused("calls go too deep")
        self.depth += 1
        try:
            return self.carried_out(tree, scope)
        finally:
            self.depth -= 1

    def carried_out(self, tree: Function, scope: Namespace) -> Value:
        """Interprets a function's body; returns its return value."""
        return self.evaluate(tree.body, scope) if isinstance(tree, ast.Lambda) else self.returned(tree.body, scope)

    def entered(
        self, function: types.FunctionType, args: list[Value], kwargs: dict[str, Value]
    ) -> tuple[Function, Namespace]:
        """Returns the syntax tree of a user function that is called, and its initial names.

        Raises `Refused` if the function cannot be inlined; guards its code and defaults.
        """
        code = function.__code__
        if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise Refused(f"{function.__qualname__} is a generator")
        tree = function_of(code, function.__globals__)
        if has_own_builtins(function):
            raise Refused(f"{function.__qualname__} has builtins of its own")
        if tree is None:
            raise Refused(f"the source of {function.__qualname__} is not known")
        if self.reads.place(function) is None:
            raise Refused(f"{function.__qualname__} comes from where it cannot be guarded")
        if "__signature__" in vars(function):
            raise Refused(f"{function.__qualname__} says itself what it takes")
        if shared_names(code).intersection(code.co_cellvars):
            raise Refused(f"functions inside of {function.__qualname__} share its variables")
        self.reads.attribute(function, "__code__", code)
        if function.__kwdefaults__:
            raise Refused(f"{function.__qualname__} has defaults for keywords")
        defaults = self.reads.attribute(function, "__defaults__", function.__defaults__)
        for n in range(self.reads.length(defaults) if defaults else 0):
            self.reads.item(defaults, n)
        bound = self._ran(inspect.signature(function, follow_wrapped=False).bind, args, kwargs)
        given = set(bound.arguments)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name not in given and not isinstance(value, (int, float, bool, str, type(None))) and value != ():
                raise Refused(f"a default of {function.__qualname__} is no plain value")
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        local = frozenset((*code.co_varnames, *code.co_cellvars))
        return tree, Namespace(dict(bound.arguments), function.__globals__, cells, local)


_IN_PLACE: dict[type[ast.operator], str] = {
    ast.Add: "__iadd__", ast.Sub: "__isub__", ast.Mult: "__imul__", ast.Div: "__itruediv__", ast.MatMult: "__imatmul__",
    ast.FloorDiv: "__ifloordiv__", ast.Mod: "__imod__", ast.Pow: "__ipow__", ast.LShift: "__ilshift__",
    ast.RShift: "__irshift__", ast.BitAnd: "__iand__", ast.BitOr: "__ior__", ast.BitXor: "__ixor__",
}  # fmt: skip


def returns(statement: ast.stmt) -> bool:
    """Whether some path through this statement returns from the function."""
    return any(isinstance(n, ast.Return) for n in ast.walk(statement))


def _continues(statements: list[ast.stmt]) -> bool:
    """Whether some path through these statements continues with the next iteration of the enclosing loop."""
    return _leads_to((ast.Continue,), statements)


def leaves_turn(statements: list[ast.stmt]) -> bool:
    """Whether some path through these statements ends the iteration of the enclosing loop."""
    return _leads_to((ast.Break, ast.Continue), statements)


def _leads_to(kinds: tuple[type[ast.stmt], ...], statements: list[ast.stmt]) -> bool:
    ahead: list[ast.AST] = list(statements)
    while ahead:
        node = ahead.pop()
        if isinstance(node, kinds):
            return True
        inside = isinstance(node, (ast.For, ast.While))  # only its `else` belongs to the loop around it
        ahead.extend(node.orelse if inside else ast.iter_child_nodes(node))  # type: ignore[attr-defined]
    return False


def _as(value: Value, tensor: Tensor, before: list[CountedInt], after: Sequence[CountedInt] = ()) -> Value:
    """Returns the tensor that replaces `value` in a nested loop or behind it, as a counted number if `value` is one.

    `before`: the loop's counted numbers; `after`: the same after one iteration, if this is behind the loop. What an
    iteration adds, each may add; one that adds more than small numbers, the counted ones themselves, is refused.
    """
    if not isinstance(value, CountedInt):
        return tensor
    within = counted_as(tensor, *before)
    grown = max((each.bound for each in after), default=0) - within.bound
    return CountedInt(tensor, within.bound + max(grown, 0) * tuning.max_device_turns)


def _like(value: Value) -> Value:
    """Returns a placeholder of the same kind, for a path whose values are never used."""
    if isinstance(value, CountedInt):
        return counted_as(_like(value.tensor), value)
    held = spec(value)
    if held is None or type(value) in CONTAINERS:
        return value
    return tf.zeros(held.shape, held.dtype)
