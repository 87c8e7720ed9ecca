"""Op call: one executed TensorFlow operation, and the signature from its definition."""

from __future__ import annotations

import functools
import re
import struct
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tracer.location import Location
from tracer.private import op_def_registry
from tracer.spec import Spec


class Const:
    """An input that always equals `value` where it occurs: a Python value, or integers folded from shapes.

    Equality means same type and same bits: 0.0 is not -0.0, 1 is not True.
    """

    __slots__ = ("_key", "value")

    def __init__(self, value: Any, given: Any = None) -> None:
        """`given` is the program's own value, if TensorFlow converted it to another one."""
        self.value = _copied(value)
        self._key = freeze(value if given is None else given)

    def holds(self, value: Any) -> bool:
        """Returns whether `value` equals this constant."""
        mine = self.value
        kind = mine.__class__
        if value is mine and kind is not list and kind is not float:
            return True
        if value.__class__ is not kind:  # NumPy's double may have become a float
            return isinstance(value, np.generic) and isinstance(mine, np.generic) and bool(freeze(value) == self._key)
        if kind is int or kind is bool or kind is str or kind is bytes:
            return bool(value == mine)
        return bool(freeze(value) == self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Const({self.value!r})"


# The numbers of a function: its own, and a backward function has that of the function it belongs to in front of it.
_INSTANCE = re.compile(r"(?:_\d+)+$")


class Structure:
    """An operation attribute compared by identity."""

    __slots__ = ()


class OpCall(NamedTuple):
    """One executed operation: what ran, on what, with which result, and where it was issued."""

    op: str
    entry: str  # entry point of TensorFlow's runtime that issued it: "fast" or "execute"
    name: Any
    attrs: tuple[Any, ...]
    parts: tuple[Any, ...]  # per input, what its outputs depend on: Spec, Const, or a tuple of those for a list
    sources: tuple[str, ...]  # per input, where it came from, for display only
    outputs: tuple[Spec, ...]
    values: tuple[Const | None, ...]  # outputs folded from shapes and constants
    template: Any
    location: Location
    guarded: int  # whether the program could catch its failure (see `location`)
    numbers: dict[Any, Const]  # constants whose values `parts` does not have, by input or (input, item)
    host: str | None = None  # why this is a host op, for example that it failed
    taken: tuple[Any, ...] = ()  # per input, the name of its tensor; None for a Python value, a tuple for a list
    made: tuple[int, ...] = ()  # the names of its results (see `trace.name_of`)


_double, _two_doubles = struct.Struct("d").pack, struct.Struct("dd").pack


def freeze(value: Any) -> Any:
    """Returns a hashable form of a value; two are equal exactly if an operation treats the values alike.

    That means same type and same bits: 0.0 is not -0.0, and NaNs differ by sign and payload. Raises `TypeError` for a
    value that cannot be compared by value.
    """
    kind = value.__class__
    if kind is str or kind is bytes or value is None:
        return value
    if kind is bool or kind is int:
        return (kind, value)
    if kind is float:
        return (kind, _double(value))
    if kind is complex:
        return (kind, _two_doubles(value.real, value.imag))
    if kind is list or kind is tuple:  # (every other item of attributes is a name)
        return (kind, tuple([v if v.__class__ is str else freeze(v) for v in value]))
    if isinstance(value, list):  # Keras has a list class of its own
        return (list, tuple([freeze(v) for v in value]))
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return (kind, value.shape, freeze(value.tolist()))  # the shape, since a list of no items has lost it
        # The base class's `tobytes` omits a masked array's mask. Several dtypes have the `str` "<V1".
        return (kind, value.dtype, value.shape, np.ndarray.tobytes(value))
    if isinstance(value, np.generic):
        return (kind, value.dtype, value.tobytes())
    if isinstance(value, (tf.DType, tf.TensorShape)):
        return (kind, repr(value))
    if isinstance(value, np.dtype):
        return (kind, value)
    if isinstance(value, Structure):
        return value
    raise TypeError(f"a value of type {kind.__name__} cannot be compared by value")


def same(one: Any, other: Any) -> bool:
    """Returns whether two Python values are the same to TensorFlow; one that cannot be frozen equals only itself."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(freeze(one) == freeze(other))
    except TypeError:
        return False


def array_in(tensor: Any) -> np.ndarray[Any, Any]:
    """Returns the value of an eager tensor as an array."""
    return as_array(tensor._numpy_internal())


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Returns a tensor's value, as TensorFlow returns it, as an array; a scalar string as an object array of shape ().

    NumPy's own dtype for bytes would strip trailing NULs.
    """
    if isinstance(value, bytes):
        array = np.empty((), object)
        array[()] = value
        return array
    return np.asarray(value)


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # the program may write to it
        return value.copy()
    if isinstance(value, list):
        return [_copied(v) for v in value]
    if value.__class__ is tuple:
        return tuple([_copied(v) for v in value])
    return value


_ATOMS = frozenset({str, int, bool, float, bytes})


def copied_attrs(attrs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the attributes with lists and arrays copied, since the caller may change those later."""
    return tuple([a if a.__class__ in _ATOMS else _copied(a) for a in attrs])


# Issued by finalizers whenever Python collects garbage, so not part of what the program does.
FINALIZERS = frozenset(
    {"DestroyResourceOp", "DeleteIterator", "DeleteMultiDeviceIterator", "DeleteMemoryCache",
     "DeleteRandomSeedGenerator"}
)  # fmt: skip


# Declared stateful to keep them in graphs; their only effect is to fail.
_FAILING = frozenset({"CheckNumerics", "CheckNumericsV2"})


class Signature(NamedTuple):
    """The inputs and outputs of an op definition."""

    inputs: tuple[str, ...]  # argument names
    lists: tuple[bool, ...]  # which of them are lists
    types: tuple[str, ...]  # the attribute that is the dtype of each, or ""
    output_lists: tuple[bool, ...]
    stateful: bool
    definition: Any


@functools.cache
def signature_of(op: str) -> Signature | None:
    """Returns the signature of a registered operation; None for other names, which are those of functions."""
    definition = op_def_registry.get(op)
    if definition is None:
        return None

    def is_list(arg: Any) -> bool:
        return bool(arg.number_attr or arg.type_list_attr)

    stateful = definition.is_stateful and op not in _FAILING
    return Signature(
        inputs=tuple(a.name for a in definition.input_arg),
        lists=tuple(is_list(a) for a in definition.input_arg),
        types=tuple(a.type_attr for a in definition.input_arg),
        output_lists=tuple(is_list(a) for a in definition.output_arg),
        # An op with a seed draws new numbers on each run, even if it is declared stateless.
        stateful=stateful or any(attr.name == "seed2" for attr in definition.attr),
        definition=definition,
    )


def complete_attrs(op: str, attrs: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `attrs` with the attributes that the inputs imply appended, as gradient functions expect them.

    `inputs` holds a dtype enum per argument, or a tuple of dtype enums for a list.
    """
    signature = signature_of(op)
    assert signature is not None
    given = set(attrs[::2])
    derived: list[Any] = []

    def add(name: str, value: Any) -> None:
        if name and name not in given:
            given.add(name)
            derived.extend((name, value))

    for arg, value in zip(signature.definition.input_arg, inputs, strict=True):
        if isinstance(value, tuple):
            add(arg.number_attr, len(value))
            add(arg.type_list_attr, list(value))
            if value:
                add(arg.type_attr, value[0])
        else:
            add(arg.type_attr, value)
    return attrs + tuple(derived)


@functools.lru_cache(4096)
def plain_name(op: Any) -> str:
    """Returns an operation's name as text; a function's name without the numbers of the instance at its end."""
    name = op.decode() if isinstance(op, bytes) else op
    return name if signature_of(name) is not None else _INSTANCE.sub("", name)


def function_name(op: Any) -> str | None:
    """Returns a function's name, with its numbers; None for an operation."""
    name = op.decode() if isinstance(op, bytes) else str(op)
    return None if op_def_registry.get(name) is not None else name
