"""Sites: what is known of an operation on certain shared tensors, found by a key of what it was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.batching.buffers import Buffers, shared_key
from coexec.batching.kinds import Folded, OpKind, kind_of
from coexec.batching.positions import Positions
from coexec.batching.programs import Program
from coexec.batching.rules import CONSTANT, MANY, ROW, SHARED, Operand
from coexec.batching.schedule import Group
from tracer.inputs import python_spec
from tracer.lazy import LazyTensor
from tracer.op import Signature, array_in, freeze
from tracer.private import EagerTensor
from tracer.spec import RESOURCE, describe_handle, spec_of


class Knowledge:
    """What the batched calls of a function have learnt: kinds of operations, and programs."""

    def __init__(self) -> None:
        self.kinds: dict[Any, OpKind | Folded | None] = {}
        self.programs: dict[Any, Program] = {}
        self.positions = Positions()

    def refuse(self, kind: OpKind) -> None:
        """Never batches a kind again."""
        kind.wrong = True
        for key, known in self.kinds.items():
            if known is kind:
                self.kinds[key] = None

    def tidy_up(self) -> None:
        """Forgets everything if it has become too much."""
        if len(self.kinds) > tuning.batching_kinds or len(self.programs) > tuning.batching_programs:
            self.kinds, self.programs, self.positions = {}, {}, Positions()


class BatchSite:
    """A kind at a place of the program, on certain shared tensors under certain tapes, and its groups by depth."""

    __slots__ = ("code", "groups", "kind", "shared", "tapes")

    def __init__(self, kind: OpKind | Folded, shared: tuple[int, ...], tapes: tuple[int, ...], code: int) -> None:
        self.kind = kind
        self.code = code  # the id of the code that issues it
        self.shared = shared
        self.tapes = tapes
        self.groups: dict[int, Group] = {}


def in_range(indexed: tuple[int, int, int], args: tuple[Any, ...]) -> bool:
    """Returns whether the indices of an operation are known, and in range: it fails for others."""
    at, of, axis = indexed
    value = args[at]
    if type(value) is LazyTensor:
        if value._out.const is None:
            return False
        indices = value._out.const.value
    elif type(value) is EagerTensor:
        indices = array_in(value)
    elif isinstance(value, (int, list, tuple, np.ndarray, np.generic)):
        indices = value
    else:
        return False
    other = args[of]
    if type(other) is EagerTensor and other._datatype_enum() == RESOURCE:
        held = describe_handle(other)
        shape = held[0][1] if held else None
    else:
        shape = tuple(other.shape) if isinstance(other, tf.Tensor) else None
    if not shape:
        return False
    indices = np.asarray(indices)
    return bool(indices.dtype.kind in "iu" and indices.size and indices.min() >= 0 and indices.max() < shape[axis])


def site_of(
    knowledge: Knowledge, buffers: Buffers, op: str, args: tuple[Any, ...], signature: Signature, key: list[Any],
    may_learn: bool,
) -> BatchSite | None:  # fmt: skip
    """Returns the site of a key; None if the operation cannot be batched."""
    tapes = key[1]
    count = len(signature.inputs)
    operands: list[Any] = []
    outside: list[Any] = []
    shared: list[int] = []
    general: list[Any] = [op]

    def one(part: Any, value: Any) -> Operand:
        if type(part) is int:
            shared.append(part)
            spec = buffers.specs[shared_key(part)]
            general.append((SHARED, spec))
            return Operand(SHARED, spec)
        # A sum of many takes any number.
        general.append(part[:2] if op == "AddN" and type(part) is tuple and part[0] is MANY else part)
        if type(part) is tuple:
            if part[0] is MANY:
                return Operand(MANY, part[1], None, part[2])
            if isinstance(value, EagerTensor) and type(value) is not LazyTensor:  # structural
                return Operand(CONSTANT, spec_of(value), array_in(value))
            spec = python_spec(signature, len(operands), args, value)
            return Operand(CONSTANT, spec, value)
        const = getattr(part, "const", None)
        return Operand(ROW, part) if const is None else Operand(CONSTANT, part.spec, const.value)

    for at in range(count):
        part, value = key[4 + at], args[at]
        outside.append(None)
        if signature.lists[at]:
            if part[0] is MANY:
                operands.append([one(part, None)])
            else:
                operands.append([one(p, v) for p, v in zip(part, value, strict=True)])
            continue
        operands.append(one(part, value))
        if op == "ResourceGather" and at == 0:
            outside[-1] = spec_of(value)
            general.append(outside[-1])
    attrs = args[count:]
    try:
        general.append(freeze(attrs))
        place = tuple(general)
        known = place in knowledge.kinds
    except TypeError:
        return None
    if not known:
        if not may_learn:
            return None
        number = len(knowledge.kinds)
        knowledge.kinds[place] = kind_of(number, op, attrs, operands, outside)
    found = knowledge.kinds[place]
    return None if found is None else BatchSite(found, tuple(shared), tapes, key[2])
