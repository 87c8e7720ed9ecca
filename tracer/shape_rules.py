"""Shape rules: what shape common operations have, given dimensions that may be `Size`s.

TensorFlow's shape functions know numbers only: to compare what is derived for any size, an operation is inferred at a
dozen sizes and more. That took most of the time of making a path dynamic (by a profile of attention with its gradient);
most operations of a training step follow one of these rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tracer.merge import SHAPED_BY_SHAPES

Dims = tuple[Any, ...]
# Operations that take inputs of one shape, which their output has, too.
_ALIKE = {
    "AddN", "EluGrad", "Identity", "LeakyReluGrad", "LogSoftmax", "Relu6Grad", "ReluGrad", "RsqrtGrad", "SigmoidGrad",
    "Softmax", "SoftplusGrad", "SqrtGrad", "StopGradient", "TanhGrad",
}  # fmt: skip
# Of the operations whose shapes follow from shapes, those that broadcast.
_ELEMENTWISE = SHAPED_BY_SHAPES - _ALIKE - {"BatchMatMulV2", "BiasAddGrad", "L2Loss", "MatMul", "ReadVariableOp"}
# Operations whose last input is a number, or numbers, that decide the shape; these may be `Size`s, too.
BY_NUMBERS = frozenset({"BroadcastTo", "ConcatV2", "ExpandDims", "GatherV2", "Reshape", "Tile", "UnsortedSegmentSum"})


def shape_of(op: str, attrs: tuple[Any, ...], shapes: list[Dims], axes: Any) -> Dims | None:
    """Returns the shape of an operation's one output; None if there is no rule, or it does not say.

    `attrs` are names and values in turn; `shapes` those of all inputs, and of the items of lists; `axes` the numbers in
    the last one, if it is a constant.
    """
    if op in _ELEMENTWISE:
        return _broadcast(shapes)
    if op in _ALIKE:
        return shapes[0] if len(set(shapes)) == 1 else None
    rule = _RULES.get(op)
    return None if rule is None else rule(dict(zip(attrs[::2], attrs[1::2], strict=True)), shapes, axes)


def _broadcast(shapes: list[Dims]) -> Dims | None:
    backwards = [shape[::-1] for shape in shapes]
    made = []
    for axis in range(max(map(len, shapes))):
        found = {shape[axis] for shape in backwards if axis < len(shape)} - {1}
        if len(found) > 1:
            return None
        made.append(found.pop() if found else 1)
    return tuple(made[::-1])


def _matmul(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    a, b = shapes
    a = a[::-1] if attrs.get("transpose_a") else a
    b = b[::-1] if attrs.get("transpose_b") else b
    return (a[0], b[1]) if a[1] == b[0] else None


def _reduced(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    shape = shapes[0]
    if axes is None or any(not -len(shape) <= axis < len(shape) for axis in axes):
        return None
    away = {axis % len(shape) for axis in axes}
    if attrs.get("keep_dims"):
        return tuple([1 if n in away else dim for n, dim in enumerate(shape)])
    return tuple([dim for n, dim in enumerate(shape) if n not in away])


def _transposed(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    shape = shapes[0]
    return None if axes is None or sorted(axes) != list(range(len(shape))) else tuple([shape[axis] for axis in axes])


def _broadcast_to(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    if axes is None or -1 in axes or _broadcast([shapes[0], tuple(axes)]) != tuple(axes):
        return None
    return tuple(axes)


def _concatenated(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    first, *others = shapes[:-1]
    if axes is None or not first or not -len(first) <= axes[0] < len(first):
        return None
    at = axes[0] % len(first)
    lengths = [shape[at] if len(shape) == len(first) else None for shape in (first, *others)]
    alike = all((*shape[:at], *shape[at + 1 :]) == (*first[:at], *first[at + 1 :]) for shape in others)
    if not alike or not all(length.__class__ is int for length in lengths):
        return None
    return (*first[:at], sum(length for length in lengths if length is not None), *first[at + 1 :])


def _expanded(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    shape = shapes[0]
    if axes is None or not -len(shape) - 1 <= axes[0] <= len(shape):
        return None
    at = axes[0] % (len(shape) + 1)
    return (*shape[:at], 1, *shape[at:])


def _gathered(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    shape, indices = shapes[:2]
    if axes is None or attrs.get("batch_dims") or not -len(shape) <= axes[0] < len(shape):
        return None
    at = axes[0] % len(shape)
    return (*shape[:at], *indices, *shape[at + 1 :])


def _product(dims: Iterable[Any]) -> tuple[int, Counter[Any]]:
    """Returns a product as a number, and how often each other dimension is in it."""
    number, others = 1, Counter[Any]()
    for dim in dims:
        if dim.__class__ is int:
            number *= dim
        else:
            others[dim] += 1
    return number, others


def _reshaped(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    """The rule of -1, too: what is left, if it is one dimension, or a number."""
    if axes is None:
        return None
    number, others = _product(shapes[0])
    known, away = _product([dim for dim in axes if dim.__class__ is not int or dim != -1])
    if -1 not in axes:
        return tuple(axes) if (known, away) == (number, others) else None
    if known <= 0 or number % known or away - others or axes.count(-1) > 1:
        return None
    left = list((others - away).elements())
    if len(left) > 1 or (left and number != known):
        return None
    return tuple([(left[0] if left else number // known) if dim == -1 else dim for dim in axes])


def _segments(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    data, ids = shapes[:2]
    return None if axes is None or data[: len(ids)] != ids else (axes[0], *data[len(ids) :])


def _tiled(attrs: dict[str, Any], shapes: list[Dims], axes: Any) -> Dims | None:
    if axes is None or -1 in axes or len(axes) != len(shapes[0]):
        return None
    pairs = list(zip(shapes[0], axes, strict=True))
    if any(dim.__class__ is not int and times != 1 and dim != 1 for dim, times in pairs):
        return None
    if any(times.__class__ is not int and dim != 1 for dim, times in pairs):
        return None
    return tuple([times if dim == 1 else dim if times == 1 else dim * times for dim, times in pairs])


_RULES: dict[str, Callable[[dict[str, Any], list[Dims], Any], Dims | None]] = {
    "BroadcastTo": _broadcast_to, "ConcatV2": _concatenated, "ExpandDims": _expanded, "GatherV2": _gathered,
    "MatMul": _matmul, "Max": _reduced, "Mean": _reduced, "Min": _reduced, "Prod": _reduced, "Reshape": _reshaped,
    "Sum": _reduced, "Tile": _tiled, "Transpose": _transposed, "UnsortedSegmentSum": _segments,
}  # fmt: skip
