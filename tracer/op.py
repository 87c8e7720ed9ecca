"""Op call: one executed TensorFlow operation, and what its definition says of it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tracer.location import Location
from tracer.private import op_def_registry
from tracer.spec import Spec


class Const:
    """An input that is a Python value, or an integer tensor that follows from shapes: always `value` at its place.

    Equal means: the same type, and the same value to the last bit (0.0 is not -0.0, 1 is not True).
    """

    __slots__ = ("_key", "value")

    def __init__(self, value: Any, given: Any = None) -> None:
        """`given` is what the program says for it, if that is not what TensorFlow makes of it."""
        self.value = value.copy() if isinstance(value, np.ndarray) else _copied(value)
        self._key = freeze(value if given is None else given)

    def holds(self, value: Any) -> bool:
        """Returns whether `value` is this constant."""
        mine = self.value
        kind = mine.__class__
        if value is mine and kind is not list and kind is not float:
            return True
        if value.__class__ is not kind:
            return False
        if kind is int or kind is bool or kind is str or kind is bytes:
            return bool(value == mine)
        return bool(freeze(value) == self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Const({self.value!r})"


class Structure:
    """An attribute of an operation that is equal to nothing but itself."""

    __slots__ = ()


class OpCall(NamedTuple):
    """One executed operation: what ran, on what, with which result, and where it was issued."""

    op: str
    entry: str  # the way it was issued: "fast" or "execute" (the two entry points of TensorFlow's runtime)
    name: Any
    attrs: tuple[Any, ...]
    parts: tuple[Any, ...]  # per input what matters of it: Spec, Const, or a tuple of those for a list
    sources: tuple[str, ...]  # per input where it came from, for people
    outputs: tuple[Spec, ...]
    values: tuple[Const | None, ...]  # outputs that follow from shapes and constants alone
    template: Any
    location: Location
    guarded: int  # whether somebody could catch its failure (see `location`)
    host: str | None = None  # why it cannot be followed but must run at its place: it failed, say


def freeze(value: Any) -> Any:
    """Returns a hashable stand-in that is equal exactly where two values are the same for an operation."""
    kind = value.__class__
    if kind is str or kind is bytes or value is None:
        return value
    if kind is bool or kind is int:
        return (kind, value)
    if kind is float or kind is complex:
        return (kind, repr(value))
    if kind is list or kind is tuple:
        return (kind, tuple([freeze(v) for v in value]))
    if isinstance(value, list):  # Keras keeps lists of a class of its own
        return (list, tuple([freeze(v) for v in value]))
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return (kind, value.shape, freeze(value.tolist()))  # lists say no shape where there is nothing in them
        return (kind, value.dtype, value.shape, value.tobytes())  # a dtype's `str` is "<V1" for several
    if isinstance(value, np.generic):
        return (kind, value.dtype, value.tobytes())
    if isinstance(value, (tf.DType, tf.TensorShape)):
        return (kind, repr(value))
    if isinstance(value, Structure):
        return value
    raise TypeError(f"a value of type {kind.__name__} cannot be compared by value")


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(v) for v in value]
    if value.__class__ is tuple:
        return tuple([_copied(v) for v in value])
    return value


def copied_attrs(attrs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the attributes with their lists copied: the caller may change those later."""
    return tuple([_copied(a) for a in attrs])


# Issued by finalizers, whenever Python collects garbage: no part of what the program does.
FINALIZERS = frozenset(
    {"DestroyResourceOp", "DeleteIterator", "DeleteMultiDeviceIterator", "DeleteMemoryCache",
     "DeleteRandomSeedGenerator"}
)  # fmt: skip


# These are said to have a state, so that graphs keep them, and do nothing but fail.
_FAILING = frozenset({"CheckNumerics", "CheckNumericsV2"})


class Signature(NamedTuple):
    """What an op's definition says of its inputs and outputs."""

    inputs: tuple[str, ...]  # the arguments' names
    lists: tuple[bool, ...]  # which of them are lists
    output_lists: tuple[bool, ...]
    stateful: bool
    definition: Any


@functools.cache
def signature_of(op: str) -> Signature | None:
    """Returns the signature of a registered operation, or None (functions have names that are no operations)."""
    definition = op_def_registry.get(op)
    if definition is None:
        return None

    def is_list(arg: Any) -> bool:
        return bool(arg.number_attr or arg.type_list_attr)

    stateful = definition.is_stateful and op not in _FAILING
    return Signature(
        inputs=tuple(a.name for a in definition.input_arg),
        lists=tuple(is_list(a) for a in definition.input_arg),
        output_lists=tuple(is_list(a) for a in definition.output_arg),
        # What takes a seed gets another one each time, also where it is said to have no state.
        stateful=stateful or any(attr.name == "seed2" for attr in definition.attr),
        definition=definition,
    )


def complete_attrs(op: str, attrs: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `attrs` with those appended that follow from the inputs, as the gradient functions expect them.

    `inputs` holds for each argument a dtype enum, or a tuple of dtype enums where the argument is a list.
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


def plain_name(op: Any) -> str:
    """Returns an operation's name as text; a function's without the number that tells its instances apart."""
    name = op.decode() if isinstance(op, bytes) else op
    return name if signature_of(name) is not None else name.rstrip("0123456789").rstrip("_")
