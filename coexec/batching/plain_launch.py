"""Plain launches: a block carried out as the program would have, instance by instance, with TensorFlow's operations.

For what a rule gets wrong, and to find out: the first batch of each kind is compared with this, in its first and last
instance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from coexec.batching.buffers import SHIFT, Buffers
from coexec.batching.rules import CONSTANT, SHARED
from coexec.batching.schedule import Group, GroupBlock
from tracer.intercept import flat_outputs, make_constant, run_fast
from tracer.op import signature_of


def launch_plainly(block: GroupBlock, buffers: Buffers) -> None:
    """Carries out a block, one instance of an operation after the other."""
    for group in block.groups:
        kind = group.kind
        rows = [_run(group, row, buffers) for row in range(group.count)]
        for n in range(len(kind.outputs)):
            values = [row[n] for row in rows]
            buffers.values[group.first + n] = values[0] if kind.alone else tf.stack(values)


def wrong_groups(block: GroupBlock, buffers: Buffers) -> list[Group]:
    """Returns the groups of a launched block, of kinds not compared before, whose values are not their operation's."""
    found = []
    for group in block.groups:
        kind = group.kind
        if kind.checked:
            continue
        kind.checked = True
        for row in {0, group.count - 1}:
            expected = _run(group, row, buffers)
            for n, value in enumerate(expected):
                made = buffers.values[group.first + n]
                if not _agree(value, made if kind.alone else buffers.at((group.first + n) << SHIFT | row)):
                    found.append(group)
                    break
    return found


def _run(group: Group, row: int, buffers: Buffers) -> list[Any]:
    """Returns what the operation of one instance returns."""
    kind = group.kind
    keys, shared = iter(group.inputs), iter(group.shared)
    values: list[Any] = []
    for operand in kind.call.operands:
        if operand.mode == CONSTANT:
            value = operand.value
            values.append(make_constant(value, operand.spec.dtype))
        elif operand.mode == SHARED or kind.alone:
            values.append(buffers.at(next(shared)))
        else:
            key = next(keys)[row]
            values.append([buffers.at(k) for k in key] if isinstance(key, list) else buffers.at(key))
    op = kind.call.op
    signature = signature_of(op)
    assert signature is not None
    if any(signature.lists) and not isinstance(values[0], list):  # the list is the first input
        items = len(values) - len(signature.inputs) + 1
        values = [values[:items], *values[items:]]
    attrs = kind.attrs
    if op == "ResourceGather":  # the variable's value is given
        op, values, attrs = "GatherV2", [*values, 0], ("batch_dims", 0)
    return flat_outputs(run_fast(op, None, (*values, *attrs)))


def _agree(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.dtype.is_floating:
        return bool(np.array_equal(one.numpy(), other.numpy()))
    exact, found = (np.asarray(v.numpy(), np.float64) for v in (one, other))
    finite = np.abs(exact[np.isfinite(exact)])
    loose = one.dtype.size < 4
    scale = float(finite.max()) if finite.size else 0.0
    return bool(np.allclose(found, exact, 1e-2 if loose else 1e-3, (1e-2 if loose else 1e-5) * scale, equal_nan=True))
