"""Trace: what one call, or the rest of one, did."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tracer.lazy import LazyTensor
from tracer.op import OpCall, freeze
from tracer.private import EagerTensor

if TYPE_CHECKING:
    from tracer.graph import Node

_CONSTANTS = 1 << 64  # constants have no place in the call: these are named by object, with numbers that no others have
MAX_DEPTH = 8  # levels of containers that are described
ARRAY = "an array"  # the description of an array, which may have been converted to a tensor


class TensorName(NamedTuple):
    """Stands for a tensor in a description; see `name_of`."""

    name: int


class LibraryRun(NamedTuple):
    """A library call that was recorded: what it was given, its operations by their range in the trace, its result."""

    function: Any
    given: Any
    begin: int
    end: int
    result: Any


@dataclass
class Trace:
    """The op calls of one call in order; `start` is the last node followed before recording began, if any."""

    start: Node | None = None
    calls: list[OpCall] = field(default_factory=list)
    finished: bool = False  # whether the call returned rather than raised
    runs: list[LibraryRun] = field(default_factory=list)  # library calls that returned, those inside of others first
    in_turn: bool = True  # whether no operation began while another one ran


def name_of(tensor: Any) -> int | None:
    """Returns a number that no other tensor of the call has, and no eager tensor of another call; None for others."""
    kind = type(tensor)  # (the class that a lazy tensor names is that of eager ones)
    if kind is EagerTensor:
        return int(tensor._id)
    if kind is not LazyTensor:
        return None
    return -1 - int(tensor._key) if tensor._key >= 0 else -id(tensor) - _CONSTANTS


def described(value: Any, depth: int = 0) -> Any:
    """Returns a description of arguments or a result, with tensors by name and objects by weak reference.

    What has none, as a container of a container ... of a container, is equal to nothing.
    """
    name = name_of(value)
    if name is not None:
        return TensorName(name)
    kind = type(value)
    if kind is np.ndarray:
        return ARRAY
    if isinstance(value, (list, tuple, dict)):
        if depth >= MAX_DEPTH:
            return object()
        items = value.items() if isinstance(value, dict) else value
        return [kind, *[described(item, depth + 1) for item in items]]
    with contextlib.suppress(TypeError):
        return freeze(value)
    with contextlib.suppress(TypeError):
        return weakref.ref(value)
    return object()
