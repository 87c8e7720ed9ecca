"""Shape sources: operations whose values decide which shapes come later, found behind the first that they decided.

Such an operation runs at once from the next call on, if it and those before it need nothing that is pending. Then what
it decides is known without a cut: a number of segments is a constant, the indices of true elements are a feed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracer.derive import folded_variant, inferred_variant
from tracer.graph import DECIDES, DECIDES_AT_LENGTH, RISKY, VALUE_SHAPED, Node, Step, Variant, refusal
from tracer.host_ops import is_apart
from tracer.inputs import part_of, python_spec, shape_like, small
from tracer.intercept import as_constant
from tracer.lazy import LazyTensor
from tracer.op import signature_of
from tracer.private import EagerTensor, types_pb2
from tracer.spec import INTEGERS, STRING, spec_of

# At most this many operations run at once so that one other need not wait: each runs by itself, as it does eagerly.
MAX_DECIDING = 24
# Of these, at most so many with other numbers than integers: more of them are most likely what the program is about.
MAX_FLOATS = 4

# An operation that had to wait this often, and is not decided early by then, most likely never is.
MAX_WAITS = 8

Kept = Callable[[Step], "set[Step]"]

_WHOLE = INTEGERS | {STRING, types_pb2.DT_BOOL, types_pb2.DT_UINT8, types_pb2.DT_INT8}


def decide_early(step: Step, args: tuple[Any, ...], base: int, made: dict[int, Node | None], kept: Kept) -> None:
    """Has what `step` waits for run at once from the next call on, if that needs nothing else that is pending.

    `step` runs on its own; `base` is the key of the first tensor of the segment that has been carried out for it,
    `made` has the tensors of operations on their own, `kept` returns the steps that have to stay in it.
    """
    node, before = step.node, step.parent
    signature = signature_of(step.op or "")
    if node is None or before is None or signature is None or node.entry != "fast" or node.waits >= MAX_WAITS:
        return
    node.waits += 1
    inputs = args[: len(signature.inputs)]
    known = None
    if node.host == VALUE_SHAPED:
        try:
            given = tuple(_part(node.op, i, v, args, False) for i, v in enumerate(inputs))
            if (settled := _known(node, given)) is not None:  # what decides it was not known when it was recorded
                _joins(step, settled)
                return
            parts = tuple(_part(node.op, i, v, args) for i, v in enumerate(inputs))
            known = _known(node, parts)
        except (TypeError, ValueError, OverflowError):
            return
    tensors = [v for value in inputs for v in (value if isinstance(value, (list, tuple)) else (value,))]
    if known is not None:
        tensors = [v for v in tensors if isinstance(v, EagerTensor) and v._datatype_enum() in INTEGERS and _small(v)]
    wanted = {
        v._key - base
        for v in tensors
        if type(v) is LazyTensor and v._out.const is None and 0 <= v._key - base < before.end
    }  # fmt: skip
    makers = [made[v._id] for v in tensors if type(v) is EagerTensor and v._id in made] if known is not None else []
    makers = [maker for maker in makers if maker is not None and not maker.decides]
    if known is None and not is_apart(node.op):
        return
    floats = MAX_FLOATS if node.host in (VALUE_SHAPED, DECIDES, DECIDES_AT_LENGTH) else 0
    chain = _chain(before, wanted, floats, kept)
    if chain is None or not (makers or any(found.node is not None and found.node.host is None for found in chain)):
        return
    for maker in makers:
        maker.decides = True  # type: ignore[union-attr]
    for found in chain:
        _run_at_once(found, DECIDES)
        if known is not None and any(found.first <= n < found.end for n in wanted):
            found.node.decides = True  # type: ignore[union-attr]
    if known is not None:
        _joins(step, known)


def _joins(step: Step, known: Variant) -> None:
    """Has an operation be part of segments from the next call on, as this variant."""
    node, before = step.node, step.parent
    assert node is not None
    assert before is not None
    node.host = None
    node.variants.setdefault(known.key, known)
    before.next = [other for other in before.next if other is not step]  # it would be found first, on its own
    before.hot = None


def fail_early(step: Step, kept: Kept) -> None:
    """Has an operation whose failure could be caught run at once from the next call on, if it needs nothing pending."""
    if step.node is None or step.node.waits >= MAX_WAITS:
        return
    step.node.waits += 1
    chain = _chain(step, set(range(step.first, step.end)), 0, kept)
    for found in chain or ():
        _run_at_once(found, RISKY if found is step else DECIDES)


def _run_at_once(step: Step, why: str) -> None:
    node, before = step.node, step.parent
    assert node is not None
    assert before is not None
    node.host = why
    before.next = [other for other in before.next if other.node is not node]
    before.hot = None


def _small(tensor: Any) -> bool:
    return shape_like(tensor.resolve() if type(tensor) is LazyTensor else tensor) is not None


def _known(node: Node, parts: tuple[Any, ...]) -> Variant | None:
    """Returns the variant for these inputs, if shape functions tell it and segments may contain it."""
    known = folded_variant(node, parts) or inferred_variant(node, parts)
    if known is not None and refusal(node.op, parts, tuple([out.spec for out in known.outputs])) is not None:
        return None
    return known


def _part(op: str, i: int, value: Any, args: tuple[Any, ...], now: bool = True) -> Any:
    """Returns an input's part of a variant key, in which small integers are constants: their values are known now.

    If not `now`, only those of constants are.
    """
    signature = signature_of(op)
    assert signature is not None
    if isinstance(value, (list, tuple)) and signature.lists[i]:
        return tuple(_part(op, i, v, args, now) for v in value)
    if isinstance(value, EagerTensor) and not now:
        return part_of(value._out.const if type(value) is LazyTensor else None, spec_of(value), op)
    if isinstance(value, EagerTensor):
        const = value._out.const if type(value) is LazyTensor else None
        return part_of(const or shape_like(value.resolve() if type(value) is LazyTensor else value), spec_of(value), op)
    spec = python_spec(signature, i, args, value)
    return part_of(as_constant(value, spec) if small(value) else None, spec, op)


def _chain(last: Step, wanted: set[int], floats: int, kept: Kept) -> list[Step] | None:
    """Returns the steps, latest first, that make these tensors of their segment; None if they cannot run at once.

    `floats`: how many of them may make other numbers than integers.
    """
    chain: list[Step] = []
    ahead = set(wanted)
    step: Step | None = last
    while step is not None and step.parent is not None and ahead:
        mine = {n for n in ahead if n >= step.first}
        if mine:
            ahead -= mine
            if step.variant is None or step.node is None or not step.fast or step.seeded or not _computes(step):
                return None
            floats -= any(out.spec.enum not in _WHOLE for out in step.outputs)
            chain.append(step)
            if len(chain) > MAX_DECIDING or floats < 0:
                return None
            ahead.update(slot for slot in step.slots if slot >= 0)
            ahead.update(slot for listed, _ in step.lists.values() for slot in listed if slot >= 0)
        step = step.parent
    return None if chain and not kept(last).isdisjoint(chain) else chain


def _computes(step: Step) -> bool:
    signature = signature_of(step.op or "")
    return signature is not None and not signature.stateful and is_apart(step.op or "")
