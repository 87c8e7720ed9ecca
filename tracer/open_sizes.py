"""Open sizes: results whose size depends on values, and which are followed although it is not known yet.

An optimizer adds up the rows of a gradient that belong to one row of a table, and how many rows that leaves depends on
the batch. Were their number known, each would be a path of its own, behind an operation on its own. But nobody asks for
it: the rows are scattered into variables. So such results have a dimension of None, and so has what is computed from
them, as far as TensorFlow's shape functions tell the rank. Whoever does ask has them computed, and from the next call
on the operation runs on its own, as its node is `sized`. Not under tapes, which record shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tracer.derive import shape_values, template_of
from tracer.graph import VALUE_SHAPED, Node, Step, Variant, has_open, refusal
from tracer.lazy import Output
from tracer.op import Const
from tracer.rebuild import infer_outputs

# Where sizes are left open. Elements that a mask picks (`Where`) are no such place: what follows asks for their number.
_OPENING = frozenset({"Unique", "UniqueV2"})

MAX_KNOWN = 3  # values of a few integers, each with a path of its own

# Operations that are given how many results to make.
_COUNTED = frozenset({"UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd", "UnsortedSegmentSum"})


def is_opening(node: Node) -> bool:
    """Returns whether a node's results may have open sizes."""
    return node.op in _OPENING and node.host == VALUE_SHAPED and not node.sized


def opens_anew(node: Node, parts: tuple[Any, ...]) -> bool:
    """Has a node's results be of open sizes from now on, if it is given few integers that keep changing; returns if so.

    Few integers count as a shape: their values are part of the path. So were the rows that a small batch looks up.
    """
    if node.op not in _OPENING or node.host is not None or parts in node.variants or not isinstance(parts[0], Const):
        return False
    if sum(isinstance(known[0], Const) for known in node.variants) < MAX_KNOWN:
        return False
    node.host = VALUE_SHAPED
    node.fed |= {0}
    return True


def open_variant(node: Node, parts: tuple[Any, ...]) -> Variant | None:
    """Returns the variant of a node for inputs, or with results, of open sizes; None if a segment cannot contain it."""
    variant = node.opens.get(parts)
    if variant is not None:
        return variant
    specs = infer_outputs(node.op, node.entry, node.attrs, parts, opens=True)
    if specs is None or any(spec is None for spec in specs) or refusal(node.op, parts, specs) is not None:
        return None
    template = template_of(node, len(specs))
    if template == ():
        return None
    values = [None] * len(specs) if has_open(parts) else shape_values(node, parts, specs)
    outputs = tuple(Output(s, v, node) for s, v in zip(specs, values, strict=True))
    variant = node.opens[parts] = Variant(parts, outputs, template, is_open=True)
    return variant


def leads_to(node: Node, last: Step, given: set[int]) -> bool:
    """Returns whether an operation is given the number of its results, and that depends on an open size.

    `last` is the segment's last step, `given` the numbers of the tensors among its inputs.
    """
    return node.op in _COUNTED and not node.sized and next(_sources(last, given), None) is not None


def close(last: Step, wanted: set[int]) -> bool:
    """Has the sizes that some tensors of a segment depend on be known from the next call on; returns if any are open.

    `last` is the segment's last step, `wanted` the numbers of the tensors.
    """
    found = False
    for step in list(_sources(last, wanted)) if last.opened else ():
        assert step.node is not None
        assert step.parent is not None
        found = step.node.sized = True
        step.parent.next = [other for other in step.parent.next if other is not step]
        step.parent.hot = None
    return found


def _sources(last: Step, wanted: set[int]) -> Iterator[Step]:
    """Yields the steps that have opened the sizes on which these tensors may depend."""
    ahead = set(wanted)
    step: Step | None = last
    while step is not None and step.parent is not None and ahead:  # latest steps first
        mine = {number for number in ahead if number >= step.first}
        if mine:
            ahead -= mine
            if step.open and step.op in _OPENING:
                yield step
            ahead.update(slot for slot in step.slots if slot >= 0)
            ahead.update(slot for listed, _ in step.lists.values() for slot in listed if slot >= 0)
        step = step.parent
