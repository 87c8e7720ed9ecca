"""Values: what Python values and tensors are while a statement is written down."""

from __future__ import annotations

import operator
import types
from typing import Any

import keras
import tensorflow as tf

from coexec.staging.lookups import is_number
from coexec.staging.reads import CONTAINERS
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.op import freeze
from tracer.spec import Spec

_COMPARISONS: tuple[Any, ...] = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
VARIABLES = (tf.Variable, keras.Variable)
_COUNTING: tuple[Any, ...] = (operator.add, operator.sub, operator.neg)


class Whole:
    """A whole number of Python's that a loop counts, as an int32 tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Missing:
    """A name that has no value on some path, or values that are not of one kind."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Scope:
    """The names of a running function: its own, and where it finds the others."""

    def __init__(self, names: dict[str, Any], namespace: dict[str, Any], cells: dict[str, Any], local: Any) -> None:
        self.names = names
        self.namespace = namespace
        self.cells = cells
        self.local = local  # which names are local

    def branch(self) -> Scope:
        """Returns a copy, for what happens on one of several paths."""
        return Scope(dict(self.names), self.namespace, self.cells, self.local)


def spec(value: Any) -> Spec | None:
    """Returns the spec of a tensor, or of what stands for a Python number; None of others."""
    value = tensor_of(value)
    return value._out.spec if isinstance(value, LazyTensor) else None


def tensor_of(value: Any) -> Any:
    """Returns the tensor that stands for a number which a loop counts; other values as they are."""
    return value.tensor if isinstance(value, Whole) else value


def form_of(value: Any) -> tuple[type, int] | None:
    """Returns the type and length of a list or tuple that holds nothing but tensors; None of other values."""
    if type(value) in (list, tuple) and value and all(spec(v) is not None for v in value):
        return type(value), len(value)
    return None


def is_one_kind(one: Any, other: Any) -> bool:
    """Returns whether two values are tensors of the same dtype and shape, or numbers that a loop counts."""
    return spec(one) is not None and spec(one) is spec(other) and isinstance(one, Whole) is isinstance(other, Whole)


def alike(one: Any, other: Any) -> Any:
    """Returns the value that two paths agree on; a `Missing` with the reason where they do not."""
    if one is other:
        return one
    if isinstance(one, Missing) or isinstance(other, Missing):
        return one if isinstance(one, Missing) else other
    if is_number(one) and is_number(other) and freeze(one) == freeze(other):
        return one
    kinds = [f"a {type(v).__name__}" if spec(v) is None else repr(spec(v)) for v in (one, other)]
    return Missing(f"it is {kinds[0]} on one path and {kinds[1]} on the other")


def truth_of(value: Any) -> Any:
    """Returns what Python takes a value for: a bool, or a tensor with one bool."""
    value = tensor_of(value)
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


def on_wholes(function: Any, operands: tuple[Any, ...]) -> Any:
    """Computes with a number that a loop counts, as Python would with the number."""
    others = [v for v in operands if not isinstance(v, Whole)]
    compares = function in _COMPARISONS
    if all(type(v) is int and abs(v) < 1 << 20 for v in others):
        if not compares and function not in _COUNTING:
            raise Refused(f"{function.__name__} of a number that a loop counts")
        result = function(*(tensor_of(v) for v in operands))
        return result if compares else Whole(result)
    if len(others) == 1 and isinstance(others[0], LazyTensor):
        dtype = others[0].dtype
        if not (dtype.is_floating or dtype in (tf.int32, tf.int64)):
            raise Refused("a number that a loop counts meets a tensor of a small dtype")
        return function(*(tf.cast(v.tensor, dtype) if isinstance(v, Whole) else v for v in operands))
    raise Refused("a number that a loop counts meets a value that is not understood")


def is_safe(value: Any) -> bool:
    """Returns whether operators and functions do with a value what they are known for."""
    return isinstance(value, (LazyTensor, *VARIABLES)) or is_number(value) or type(value) is tuple


def counts(value: Any) -> bool:
    """Returns whether this is a number that a loop counts, or holds one."""
    return isinstance(value, Whole) or (type(value) in (list, tuple) and any(map(counts, value)))


def plain_attribute(owner: Any, name: str) -> Any:
    """Returns an attribute that nothing computes: of an object's dictionary, its class, or a module."""
    found: Any
    if isinstance(owner, types.ModuleType):
        if name not in vars(owner) and not owner.__name__.startswith(("tensorflow", "keras")):
            raise Refused(f"{owner.__name__} computes {name!r}")
        try:
            return getattr(owner, name)  # TensorFlow's modules load parts of themselves when they are asked for
        except AttributeError:
            raise Refused(f"{owner.__name__} has no {name!r}") from None
    if type(owner) is type:  # a class: what it says itself, or one that it derives from
        found = next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None)
        if found is None or hasattr(type(found), "__get__"):
            raise Refused(f"attribute {name!r} of {owner.__qualname__} is computed")
        return found
    kind = type(owner)
    computed: Any = kind.__getattribute__
    if computed is not object.__getattribute__:
        raise Refused(f"attributes of a {kind.__qualname__} are computed")
    held: dict[str, Any] = getattr(owner, "__dict__", {})
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    if isinstance(found, types.FunctionType) and name not in held:
        return getattr(owner, name)
    if name in held and not hasattr(type(found), "__set__"):
        return held[name]
    if found is not None and not hasattr(type(found), "__get__"):
        return found
    raise Refused(f"attribute {name!r} of a {kind.__qualname__} is computed")

