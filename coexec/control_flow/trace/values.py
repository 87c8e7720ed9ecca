"""Values: the Python values and tensors that a statement handles while it is traced."""

from __future__ import annotations

import operator
import types
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.trace.reads import CONTAINERS
from coexec.guards.pure_calls import is_number
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.op import same
from tracer.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from coexec.control_flow.program_types import Tensor, Truth, Value

    Operator = Callable[..., Value]  # of one or two operands

_COMPARISONS: tuple[Operator, ...] = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
VARIABLES = (tf.Variable, keras.Variable)
_COUNTING: tuple[Operator, ...] = (operator.add, operator.sub, operator.neg)


class CountedInt:
    """A Python int that a loop counts, as an int32 tensor.

    Python's have no end, so what is computed from it is refused where it might exceed int32. `bound` is its largest
    absolute value.
    """

    def __init__(self, tensor: Tensor, bound: int | None = None) -> None:
        self.tensor = tensor
        self.bound = tuning.max_counted if bound is None else bound
        if self.bound >= 1 << 31:
            raise Refused("a number that a loop counts may exceed int32")


class Undefined:
    """A name without a value on some path, or whose values on two paths cannot be merged."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Namespace:
    """The names of a running function: its local ones, and where it looks up others."""

    def __init__(
        self,
        names: dict[str, Value],
        namespace: dict[str, Value],
        cells: dict[str, types.CellType],
        local: frozenset[str],
    ) -> None:
        self.names = names
        self.namespace = namespace
        self.cells = cells
        self.local = local  # which names are local

    def branch(self) -> Namespace:
        """Returns a copy, for one of several paths."""
        return Namespace(dict(self.names), self.namespace, self.cells, self.local)


def spec(value: Value) -> Spec | None:
    """Returns the spec of a tensor, or of the tensor behind a counted number; None for other values."""
    value = unwrap_counted(value)
    return value._out.spec if isinstance(value, LazyTensor) else None


def unwrap_counted(value: Value) -> Value:
    """Returns the tensor behind a counted number; other values unchanged."""
    return value.tensor if isinstance(value, CountedInt) else value


def counted_as(tensor: Tensor, *values: Value) -> Value:
    """Returns the tensor that replaces these values, each of them for all that is known; counted if they are."""
    bounds = [value.bound for value in values if isinstance(value, CountedInt)]
    return CountedInt(tensor, max(bounds)) if bounds else tensor


def form_of(value: Value) -> tuple[type, int] | None:
    """Returns the type and length of a non-empty list or tuple of tensors only; None for other values."""
    if type(value) in (list, tuple) and value and all(spec(v) is not None for v in value):
        return type(value), len(value)
    return None


def is_one_kind(one: Value, other: Value) -> bool:
    """Returns whether two values are both tensors, or both counted numbers, of the same dtype and shape."""
    counted = isinstance(one, CountedInt), isinstance(other, CountedInt)
    return spec(one) is not None and spec(one) is spec(other) and counted[0] is counted[1]


def alike(one: Value, other: Value) -> Value:
    """Returns the value that two paths agree on; if they do not, an `Undefined` with the reason."""
    if one is other:
        return one
    if isinstance(one, Undefined) or isinstance(other, Undefined):
        return one if isinstance(one, Undefined) else other
    if is_number(one) and is_number(other) and same(one, other):
        return one
    kinds = [f"a {type(v).__name__}" if spec(v) is None else repr(spec(v)) for v in (one, other)]
    return Undefined(f"it is {kinds[0]} on one path and {kinds[1]} on the other")


def truth_of(value: Value) -> Truth:
    """Returns the truth of a value: a bool, or a tensor with one bool."""
    value = unwrap_counted(value)
    if isinstance(value, LazyTensor):
        if value._out.const is not None:
            return bool(value._out.const.value)
        if value._out.spec.tensor_shape.num_elements() != 1:
            raise Refused("the truth of several elements is asked for")
        if value._out.spec.shape:
            value = tf.reshape(value, [])
        return value if value.dtype is tf.bool else tf.not_equal(value, tf.zeros([], value.dtype))
    if is_number(value) or (type(value) in CONTAINERS):
        return bool(value)
    if isinstance(value, (types.FunctionType, types.ModuleType)):
        return True
    raise Refused(f"the truth of a {type(value).__name__} is asked for")


def apply_to_counted(function: Operator, operands: tuple[Value, ...]) -> Value:
    """Applies an operator to operands that include counted numbers, as Python would to the ints; or refuses."""
    others = [v for v in operands if not isinstance(v, CountedInt)]
    compares = function in _COMPARISONS
    if all(type(v) is int and abs(v) < 1 << 20 for v in others):
        if not compares and function not in _COUNTING:
            raise Refused(f"{function.__name__} of a number that a loop counts")
        result = function(*(unwrap_counted(v) for v in operands))
        if compares:
            return result
        return CountedInt(result, sum(v.bound if isinstance(v, CountedInt) else abs(v) for v in operands))
    if len(others) == 1 and isinstance(others[0], LazyTensor):
        dtype = others[0].dtype
        if not (dtype.is_floating or dtype in (tf.int32, tf.int64)):
            raise Refused("a number that a loop counts meets a tensor of a small dtype")
        return function(*(tf.cast(v.tensor, dtype) if isinstance(v, CountedInt) else v for v in operands))
    raise Refused("a number that a loop counts meets a value that is not supported")


def is_safe(value: Value) -> bool:
    """Returns whether operators and functions on this value do only what they are known to do."""
    return isinstance(value, (LazyTensor, *VARIABLES)) or is_number(value) or type(value) is tuple


def counts(value: Value) -> bool:
    """Returns whether this is a counted number, or holds one."""
    return isinstance(value, CountedInt) or (type(value) in (list, tuple) and any(map(counts, value)))
