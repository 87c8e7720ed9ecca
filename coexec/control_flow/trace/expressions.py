"""Expressions: evaluates Python expressions on symbolic tensors.

Anything not known to be free of effects is refused, and so is anything that needs a tensor's value. The rest is
evaluated exactly as in Python, by calling the operators and TensorFlow functions themselves.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
import types
from functools import partial
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from coexec.control_flow.trace.keras_layers import is_plain_keras, note_call
from coexec.control_flow.trace.paths import Paths
from coexec.control_flow.trace.reads import CONTAINERS, Reads
from coexec.control_flow.trace.values import (
    VARIABLES,
    CountedInt,
    Namespace,
    Undefined,
    apply_to_counted,
    counts,
    is_safe,
    truth_of,
)
from coexec.guards.pure_calls import is_computing, is_number, plain_attribute, takes_tensors
from tracer.effects import Effects
from tracer.errors import Refused
from tracer.lazy import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coexec.control_flow.program_types import Tensor, Truth, Value
    from coexec.control_flow.trace.paths import Found
    from coexec.control_flow.trace.values import Operator

    Operand = Callable[[], Value]  # evaluates it

_BINARY: dict[type[ast.operator], Operator] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Operator] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Operator] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip

_OF_TENSORS = frozenset({"shape", "dtype", "ndim"})
_OF_SHAPES = frozenset({"rank", "ndims", "as_list", "num_elements"})
_OF_DTYPES = frozenset({"is_floating", "is_integer", "min", "max", "name", "size"})


class Expressions(Paths):
    """Evaluates expressions in a scope."""

    def __init__(self, reads: Reads) -> None:
        super().__init__(reads)
        self.depth = 0
        self.compared_numbers = False  # a chain of comparisons has compared two Python numbers

    def evaluate(self, node: ast.expr, scope: Namespace) -> Value:
        """Returns the value of an expression."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise Refused(f"{type(node).__name__} is not supported")
        return method(node, scope)

    def truth(self, node: ast.expr, scope: Namespace) -> Truth:
        """Returns the truth of an expression: a bool, or a tensor with one bool."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found = self.truth(node.operand, scope)
            return tf.logical_not(found) if isinstance(found, LazyTensor) else not found
        if isinstance(node, ast.BoolOp):
            return self._truth_of_all([(partial(self.truth, n, scope), _is_harmless(n)) for n in node.values], node.op)
        if isinstance(node, ast.Compare):
            return self._comparison(node, scope)
        return self.truth_of(self.evaluate(node, scope))

    def _truth_of_all(self, parts: Sequence[tuple[Callable[[], Truth], bool]], op: ast.boolop) -> Truth:
        """Combines truths as `and` or `or` do; after a tensor, only harmless operands are computed unconditionally."""
        decisive = isinstance(op, ast.Or)
        join = tf.logical_or if decisive else tf.logical_and
        found: Truth = not decisive
        for part, harmless in parts:
            if isinstance(found, LazyTensor) and not harmless:
                found = self.branched(found, *_ordered(decisive, lambda: tf.constant(decisive), partial(_tensor, part)))
                continue
            truth = part()
            if isinstance(truth, LazyTensor):
                found = join(found, truth) if isinstance(found, LazyTensor) else truth
            elif truth is decisive:  # whatever the tensors before it are
                return decisive
        return found

    def truth_of(self, value: Value) -> Truth:
        """Returns the truth of a value; for a container from outside, reads its length."""
        if type(value) in CONTAINERS and self.reads.place(value) is not None:
            return self.reads.length(value) > 0
        return truth_of(value)

    def _comparison(self, node: ast.Compare, scope: Namespace) -> Truth:
        left: list[Value] = [self.evaluate(node.left, scope)]

        def compared(op: ast.cmpop, operand: ast.expr) -> Truth:
            left.append(self.evaluate(operand, scope))
            self.compared_numbers |= len(node.ops) > 1 and not any(isinstance(v, LazyTensor) for v in left[-2:])
            return self._compared_truth(op, left[-2], left[-1])

        parts = [
            (partial(compared, *pair), all(map(_is_harmless, node.comparators[n:])))
            for n, pair in enumerate(zip(node.ops, node.comparators, strict=True))
        ]
        if not all(harmless for _, harmless in parts[1:]):
            return self.truth_of(self._chained(node, scope))
        return self._truth_of_all(parts, ast.And())

    def _chained(self, node: ast.Compare, scope: Namespace) -> Value:
        """Returns the value of a chain of comparisons: the first that is false, or the last."""

        def value_from(n: int, left: Value) -> Value:
            right = self.evaluate(node.comparators[n], scope)
            if not any(isinstance(v, LazyTensor) for v in (left, right)):
                self.compared_numbers = True
                if any(isinstance(v, CountedInt) for v in (left, right)):
                    raise Refused("what a comparison of Python numbers gives is kept")
            value = self._compared(node.ops[n], left, right)
            if n + 1 == len(node.ops):
                return value
            truth = self.truth_of(value)
            if isinstance(truth, LazyTensor):
                return self.branched(truth, lambda: value_from(n + 1, right), lambda: value)
            return value_from(n + 1, right) if truth else value

        return value_from(0, self.evaluate(node.left, scope))

    def _compared_truth(self, op: ast.cmpop, left: Value, right: Value) -> Truth:
        return self.truth_of(self._compared(op, left, right))

    def _compared(self, op: ast.cmpop, left: Value, right: Value) -> Value:
        """Returns the value of one comparison; refuses the identity of tensors, and `in` on other than plain values."""
        if isinstance(op, (ast.Is, ast.IsNot)):
            if isinstance(left, (LazyTensor, CountedInt)) and isinstance(right, (LazyTensor, CountedInt)):
                raise Refused("the identity of tensors is asked for")
            if type(left) in CONTAINERS and type(right) in CONTAINERS:
                raise Refused("the identity of containers is asked for")
            return (left is right) is isinstance(op, ast.Is)
        if isinstance(op, (ast.In, ast.NotIn)):
            items = list(right) if type(right) in CONTAINERS and self.reads.place(right) is None else None
            if items is None or not all(is_number(v) for v in (left, *items)):
                raise Refused("`in` is not supported here")
            return (left in items) is isinstance(op, ast.In)
        return self._applied(_COMPARE[type(op)], left, right)

    def _applied(self, function: Operator, *operands: Value) -> Value:
        """Applies an operator; refuses operands whose operators might have effects."""
        if any(isinstance(v, CountedInt) for v in operands):
            return apply_to_counted(function, operands)
        lists = [v for v in operands if type(v) is list]
        if any(self.reads.place(v) is not None for v in operands if type(v) in CONTAINERS) or not all(
            is_safe(v) for v in operands if not any(v is other for other in lists)
        ):
            raise Refused(f"{function.__name__} of values that are not supported")
        return self._ran(function, operands, {})

    def _ran(self, function: Callable[..., Found], args: Sequence[Value], kwargs: dict[str, Value]) -> Found:
        """Calls a function now; raises `Refused` for whatever it raises."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {str(error)[:120]}") from None

    # Expression handlers, named after the classes of the syntax tree.

    def _constant(self, node: ast.Constant, scope: Namespace) -> Value:
        return node.value

    def _name(self, node: ast.Name, scope: Namespace) -> Value:
        name = node.id
        if name.startswith("__") and not name.endswith("__"):
            raise Refused("a private name")
        if name in scope.local:
            if name not in scope.names:
                raise Refused(f"{name!r} has no value here")
            value = scope.names[name]
            if isinstance(value, Undefined):
                raise Refused(f"{name!r}: {value.reason}")
            return value
        if name in scope.cells:
            return self.reads.cell(scope.cells[name], name)
        return self.reads.name(scope.namespace, name)

    def _tuple(self, node: ast.Tuple, scope: Namespace) -> Value:
        return tuple(self._items(node.elts, scope))

    def _list(self, node: ast.List, scope: Namespace) -> Value:
        made = self._items(node.elts, scope)
        self._own[id(made)] = made, self.stage
        return made

    def _items(self, nodes: list[ast.expr], scope: Namespace) -> list[Value]:
        items: list[Value] = []
        for item in nodes:
            if isinstance(item, ast.Starred):
                items += self.iterated(self.evaluate(item.value, scope))
            else:
                items.append(self.evaluate(item, scope))
        return items

    def _slice(self, node: ast.Slice, scope: Namespace) -> Value:
        return slice(*(None if n is None else self.evaluate(n, scope) for n in (node.lower, node.upper, node.step)))

    def _binop(self, node: ast.BinOp, scope: Namespace) -> Value:
        left = self.evaluate(node.left, scope)
        return self._applied(_BINARY[type(node.op)], left, self.evaluate(node.right, scope))

    def _unaryop(self, node: ast.UnaryOp, scope: Namespace) -> Value:
        if isinstance(node.op, ast.Not):
            found = self.truth(node, scope)
            if isinstance(found, LazyTensor):
                raise Refused("`not` makes a Python value of a tensor")
            return found
        return self._applied(_UNARY[type(node.op)], self.evaluate(node.operand, scope))

    def _compare(self, node: ast.Compare, scope: Namespace) -> Value:
        if len(node.ops) == 1:
            operands = self.evaluate(node.left, scope), self.evaluate(node.comparators[0], scope)
            counted = any(isinstance(v, CountedInt) for v in operands)
            if counted and not any(isinstance(v, LazyTensor) for v in operands):
                raise Refused("what a comparison of Python numbers gives is kept")
            return self._compared(node.ops[0], *operands)
        return self._chained(node, scope)

    def _boolop(self, node: ast.BoolOp, scope: Namespace) -> Value:
        value = self.evaluate(node.values[0], scope)
        for other in node.values[1:]:
            truth = self.truth_of(value)
            stops = isinstance(node.op, ast.Or)
            if isinstance(truth, LazyTensor):
                kept, later = lambda value=value: value, partial(self.evaluate, other, scope)
                value = self.branched(truth, *_ordered(stops, kept, later))
            elif truth is stops:
                return value
            else:
                value = self.evaluate(other, scope)
        return value

    def _ifexp(self, node: ast.IfExp, scope: Namespace) -> Value:
        truth = self.truth(node.test, scope)
        if not isinstance(truth, LazyTensor):
            return self.evaluate(node.body if truth else node.orelse, scope)
        return self.branched(truth, lambda: self.evaluate(node.body, scope), lambda: self.evaluate(node.orelse, scope))

    def _attribute(self, node: ast.Attribute, scope: Namespace) -> Value:
        owner = self.evaluate(node.value, scope)
        name = node.attr
        if name.startswith("__") and not name.endswith("__"):
            raise Refused("a private name")  # a class changes it, and its source does not tell
        if isinstance(owner, LazyTensor):
            if name not in _OF_TENSORS:
                raise Refused(f"attribute {name!r} of a tensor")
            return getattr(owner, name)
        if isinstance(owner, (tf.TensorShape, tf.DType)):
            if name not in (_OF_SHAPES if isinstance(owner, tf.TensorShape) else _OF_DTYPES):
                raise Refused(f"attribute {name!r} of a {type(owner).__name__}")
            return getattr(owner, name)
        if isinstance(owner, VARIABLES) and name in _OF_TENSORS:
            return getattr(owner, name)
        if self.reads.place(owner) is None or type(owner) in CONTAINERS:
            raise Refused(f"attribute {name!r} of a value that is not supported")
        return self.reads.attribute(owner, name, plain_attribute(owner, name))

    def _subscript(self, node: ast.Subscript, scope: Namespace) -> Value:
        owner = self.evaluate(node.value, scope)
        index = self.evaluate(node.slice, scope)
        if isinstance(index, CountedInt):
            index = index.tensor
        if type(owner) in CONTAINERS:
            if not is_number(index) or isinstance(index, float):
                raise Refused("an index is not a plain one")
            if self.reads.place(owner) is not None:
                return self.reads.item(owner, index)
        elif not isinstance(owner, (LazyTensor, tf.TensorShape, *VARIABLES)):
            raise Refused("an item of a value that is not supported")
        return self._ran(operator.getitem, (owner, index), {})

    def _call(self, node: ast.Call, scope: Namespace) -> Value:
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "extend") and len(node.args) == 1:
            owner = self.evaluate(node.func.value, scope)
            if type(owner) is list and not node.keywords:
                given = self.evaluate(node.args[0], scope)
                for value in [given] if node.func.attr == "append" else self._extending(owner, given):
                    self._append(owner, value)
                return None
        function = self.evaluate(node.func, scope)
        taken = self.taken(function, node, scope)
        args = self._items(node.args, scope) if taken is None else [taken]
        kwargs: dict[str, Value] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise Refused("`**` in a call")
            if keyword.arg.startswith("__") and not keyword.arg.endswith("__"):
                raise Refused("a private name")
            kwargs[keyword.arg] = self.evaluate(keyword.value, scope)
        return self.call(function, args, kwargs)

    def _extending(self, owner: list[Value], given: Value) -> list[Value]:
        if given is owner or type(given) not in (list, tuple):
            raise Refused("a list is extended by what is not supported")
        return self.iterated(given)

    def call(self, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Calls a known pure function or a Keras layer, or inlines a user function; refuses any other."""
        if getattr(function, "__self__", None).__class__ in (tf.TensorShape,):
            return function(*args, **kwargs)
        if function is len and len(args) == 1 and type(args[0]) is list and self.lists is not None:
            place = self.reads.place(args[0])
            length = None if place is None else self.lists.length(place, self.rows.get(place))
            if length is not None:
                return length
        if is_computing(function):
            if not takes_tensors(function) and any(counts(v) for v in (*args, *kwargs.values())):
                raise Refused(f"{function.__name__} of a number that a loop counts")
            args = [self._passed(v) for v in args]
            return self._ran(function, args, {name: self._passed(v) for name, v in kwargs.items()})
        if isinstance(function, types.MethodType):
            if self.reads.place(function.__self__) is None:
                raise Refused("a method of a value that is not supported")
            return self.inlined(function.__func__, [function.__self__, *args], kwargs)  # type: ignore[arg-type]
        if isinstance(function, keras.layers.Layer):
            return self.layer(function, args, kwargs)
        if isinstance(function, types.FunctionType):
            return self.inlined(function, args, kwargs)
        if isinstance(inspect.getattr_static(type(function), "__call__", None), types.FunctionType):
            if self.reads.place(function) is None or "__call__" in vars(function):
                raise Refused("an object is called whose type is not supported")
            return self.call(self.reads.attribute(function, "__call__", function.__call__), args, kwargs)
        raise Refused(f"{getattr(function, '__qualname__', None) or type(function).__qualname__} is called")

    def layer(self, layer: keras.layers.Layer, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Calls a Keras layer while watching its effects; refuses it if it has any, or reads values of tensors.

        The layer must be built, and must run only Keras' own code. The attributes that it reads are guarded.
        """
        if self.reads.place(layer) is None or not layer.built or not is_plain_keras(layer):
            raise Refused(f"{layer.name} cannot be guarded, is not built yet, or runs code of the user's")
        given = [self._passed(v) for v in args], {name: self._passed(v) for name, v in kwargs.items()}
        self.reads.owned(layer)
        if sys.getprofile() is not None:
            raise Refused("a profiler runs")
        note_call(layer)
        effects = Effects([layer, *given[0], *given[1].values()])
        with effects:
            result = self._ran(layer, *given)
        if effects.reason is not None or effects.read:
            raise Refused(f"{layer.name} does more than compute: {effects.reason or 'it reads values'}")
        self.reads.ran(layer, effects.objects)
        return result

    def taken(self, function: Value, node: ast.Call, scope: Namespace) -> list[Value] | None:
        """Returns the items of a generator expression that a call consumes whole; None for other calls."""
        raise NotImplementedError

    def inlined(self, function: types.FunctionType, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Inlines a call of a user function."""
        raise NotImplementedError

    def _passed(self, value: Value) -> Value:
        """Converts an argument for a library function: a container from outside is read item by item."""
        if isinstance(value, CountedInt):
            return value.tensor
        if type(value) in (list, tuple):
            return type(value)([self._passed(v) for v in self.iterated(value)])
        if is_safe(value) or isinstance(value, (range, enumerate, zip, type)):
            return value
        raise Refused(f"a {type(value).__name__} is passed to a function")

    def iterated(self, value: Value) -> list[Value]:
        """Returns the items that a Python loop over a value would see."""
        if type(value) in (list, tuple) and self.reads.place(value) is not None:
            return [self.reads.item(value, n) for n in range(self.reads.length(value))]
        if isinstance(value, (list, tuple, range, enumerate, zip)):
            return list(value)
        if isinstance(value, LazyTensor):
            return self._ran(list, [value], {})
        raise Refused(f"a loop over a {type(value).__name__}")


def _ordered(stops: bool, kept: Operand, later: Operand) -> tuple[Operand, Operand]:
    """Returns what to evaluate if the left operand is true, and what if false; `stops`: for `or`, not `and`."""
    return (kept, later) if stops else (later, kept)


def _tensor(part: Callable[[], Truth]) -> Tensor:
    truth = part()
    return truth if isinstance(truth, LazyTensor) else tf.constant(truth)


def _is_harmless(node: ast.expr) -> bool:
    """Whether an expression may be computed where Python would not: it is cheap and cannot fail."""
    return not any(
        isinstance(n, (ast.Call, ast.Subscript)) or (isinstance(n, ast.BinOp) and isinstance(n.op, _DIVIDING))
        for n in ast.walk(node)
    )


_DIVIDING = (ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
