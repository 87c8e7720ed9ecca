"""Windows: slices of one size, followed wherever they are.

`rows[n : n + 8]` is given a start and an end whose values decide its shape, so each would be a path of its own. But a
batch has as many rows wherever it begins. So once both have changed and the size has not, both are fed, and a step of
that size matches what has it: Python says where, and so how large it is, when it asks for the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tracer.graph import Node, Variant
from tracer.lazy import LazyTensor, Output
from tracer.op import Const
from tracer.private import EagerTensor
from tracer.spec import Spec, intern_spec

MAX_SIZES = 64  # windows of one slice, each with a path of its own; others then run on their own

_PLACES = frozenset({1, 2})  # the inputs with the start and the end


def slides(node: Node, parts: tuple[Any, ...], fed: Iterable[Any], size: tuple[int, ...]) -> bool:
    """Returns whether a slice of this size is a window: whether the inputs `fed`, which changed, say where it is."""
    if node.op != "StridedSlice" or not _PLACES.issuperset(fed) or len(set(fed)) < len(_PLACES):
        return False
    if not isinstance(parts[3], Const) or not np.all(np.equal(parts[3].value, 1)):
        return False
    if node.windows is None and all(known.outputs[0].spec.shape != size for known in node.variants.values()):
        return False
    return size_of(node.attrs, parts[0].shape, parts[1].value, parts[2].value) == size


def size_of(
    attrs: Sequence[Any], shape: tuple[int, ...], begin: Sequence[int], end: Sequence[int]
) -> tuple[int, ...] | None:
    """Returns the shape of a slice, with steps of 1, of a tensor of this shape; None if it is none or unusual."""
    masks = dict(zip(attrs[::2], attrs[1::2], strict=True))
    if masks.get("ellipsis_mask") or masks.get("new_axis_mask"):
        return None
    from_start, to_end, single = (masks.get(name) or 0 for name in ("begin_mask", "end_mask", "shrink_axis_mask"))
    sizes: list[int] = []
    for n, dim in enumerate(shape):
        if n >= len(begin):
            sizes.append(dim)
        elif single >> n & 1:
            if not -dim <= begin[n] < dim:
                return None
        else:
            there = slice(None if from_start >> n & 1 else int(begin[n]), None if to_end >> n & 1 else int(end[n]))
            sizes.append(len(range(*there.indices(dim))))
    return tuple(sizes)


def size_at(
    node: Node | None, inputs: Sequence[Any], constant_of: Callable[[Any], Const | None]
) -> tuple[int, ...] | None:
    """Returns the size of the window that these inputs say, known by `constant_of`; None of other operations."""
    if node is None or node.windows is None or not all(type(v) in (LazyTensor, EagerTensor) for v in inputs[:3]):
        return None
    whole, *places = inputs[:3]
    shape = whole._out.spec.shape if type(whole) is LazyTensor else whole._shape_tuple()
    begin, end = (v._out.const if type(v) is LazyTensor else constant_of(v) for v in places)
    if begin is None or end is None or None in shape:
        return None
    return size_of(node.attrs, shape, begin.value, end.value)


def window(node: Node, parts: tuple[Any, ...], size: tuple[int, ...] | None) -> Variant | None:
    """Returns the variant of a node whose windows have this size, for inputs that are fed; None if there is none."""
    if size is None or node.windows is None or not isinstance(parts[1], Spec) or not isinstance(parts[2], Spec):
        return None
    variant = node.windows.get((parts, size))
    if variant is None and len(node.windows) < MAX_SIZES:
        output = Output(intern_spec(parts[0].enum, size), None, node)
        variant = node.windows[parts, size] = Variant(parts, (output,), -1, is_window=True)
    return variant
