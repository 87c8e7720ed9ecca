"""Dynamic slices: slices whose start is a run-time value, lowered to XLA's dynamic slice operations.

TensorFlow's own lowering of `Slice` and `StridedSlice` makes XLA recompile for each start that it can resolve.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coexec.lowering.function_body import BOOL, Body
from tracer.graph import CONST, Step
from tracer.nodedef import Symbol
from tracer.spec import Spec

# By operation, the input that holds the start.
BEGINS = {"Slice": 1, "StridedSlice": 1, "StridedSliceGrad": 1}

_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def picks(step: Step) -> bool:
    """Returns whether an operation takes one row or element (`x[n]`, `x[:, n]`) at a run-time index."""
    if step.op != "StridedSlice" or step.slots[1] == CONST or 3 not in step.consts or step.variant is None:
        return False
    attrs = dict(zip(step.attrs[::2], step.attrs[1::2], strict=True))
    begin, end, ellipsis, new, shrink = (attrs.get(mask) or 0 for mask in _MASKS)
    every = (1 << step.variant.key[1].shape[0]) - 1
    whole = begin == end == every & ~shrink and not ellipsis and not new
    return bool(whole and np.all(np.asarray(step.consts[3].value) == 1))


def is_inside(body: Body, value: Any, begin: Symbol, attrs: dict[str, Any]) -> Symbol:
    """Emits a scalar bool: whether the index of an operation accepted by `picks` is in range."""
    dims, taken = _taken(np.shape(value) if not isinstance(value, Symbol) else value.spec.shape, begin, attrs)
    below = [dim if one else begin.spec.dtype.max for dim, one in zip(dims, taken, strict=True)]
    above = [-dim if one else begin.spec.dtype.min for dim, one in zip(dims, taken, strict=True)]
    return body.all(body.both(body.compare("GreaterEqual", begin, above), body.compare("Less", begin, below)))


def sliced(body: Body, op: str, inputs: list[Any], attrs: tuple[Any, ...], spec: Spec) -> Symbol:
    """Emits one of the operations in `BEGINS` as a dynamic slice or update; returns its output, of this spec."""
    begin: Symbol = inputs[1]
    if op == "Slice":
        given = [body.symbol(inputs[0], spec.enum), begin, inputs[2]]
        return body.make("XlaDynamicSlice", given, spec.enum, spec.shape)
    masks = dict(zip(attrs[::2], attrs[1::2], strict=True))
    whole = spec.shape if op == "StridedSliceGrad" else body.symbol(inputs[0], spec.enum).spec.shape
    dims, taken = _taken(whole, begin, masks)
    enum, shape, rank = begin.spec.enum, begin.spec.shape, len(whole)
    wrapped = body.make("AddV2", [begin, list(dims)], enum, shape)
    place = body.select(body.compare("Less", begin, 0), wrapped, begin)
    zeros = body.make("ZerosLike", [begin], enum, shape)
    moved = [not (masks.get("begin_mask") or 0) >> n & 1 for n in range(len(dims))] if op == "StridedSlice" else taken
    place = body.select(body.constant(np.asarray(moved), BOOL), place, zeros)
    if rank > len(dims):
        place = body.make("Pad", [place, [[0, rank - len(dims)]]], enum, (rank,))
    sizes = [1 if n < len(taken) and taken[n] else dim for n, dim in enumerate(whole)]
    if op == "StridedSlice":
        left = iter(spec.shape)
        sizes = [1 if n < len(taken) and taken[n] else next(left) for n in range(rank)]
        part = body.make("XlaDynamicSlice", [body.symbol(inputs[0], spec.enum), place, sizes], spec.enum, tuple(sizes))
        return body.make("Reshape", [part, list(spec.shape)], spec.enum, spec.shape)
    zero = body.constant(np.zeros((), spec.dtype.as_numpy_dtype), spec.enum)
    room = body.make("Fill", [list(whole), zero], spec.enum, whole)
    part = body.make("Reshape", [body.symbol(inputs[4], spec.enum), sizes], spec.enum, tuple(sizes))
    return body.make("XlaDynamicUpdateSlice", [room, part, place], spec.enum, whole)


def _taken(whole: tuple[int, ...], begin: Symbol, attrs: dict[str, Any]) -> tuple[tuple[int, ...], list[bool]]:
    """Returns the dimensions that the index covers, and for each whether it selects a single element."""
    count = begin.spec.shape[0]
    return whole[:count], [bool((attrs.get("shrink_axis_mask") or 0) >> n & 1) for n in range(count)]
