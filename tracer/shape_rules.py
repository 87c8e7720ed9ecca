"""Shape rules: what shape common operations have, given dimensions that may be `Size`s.

TensorFlow's shape functions know numbers only: to compare what is derived for any size, an operation is inferred at a
dozen sizes and more. That took most of the time of making a path dynamic (by a profile of attention with its gradient);
most operations of a training step follow one of these rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracer.merge import SHAPED_BY_SHAPES

Dims = tuple[Any, ...]
# Operations that take inputs of one shape, which their output has, too.
_ALIKE = {
    "AddN", "EluGrad", "Identity", "LeakyReluGrad", "LogSoftmax", "Relu6Grad", "ReluGrad", "RsqrtGrad", "SigmoidGrad",
    "Softmax", "SoftplusGrad", "SqrtGrad", "TanhGrad",
}  # fmt: skip
# Of the operations whose shapes follow from shapes, those that broadcast.
_ELEMENTWISE = SHAPED_BY_SHAPES - _ALIKE - {"BatchMatMulV2", "BiasAddGrad", "L2Loss", "MatMul", "ReadVariableOp"}


def shape_of(op: str, attrs: tuple[Any, ...], shapes: list[Dims], axes: Any) -> Dims | None:
    """Returns the shape of an operation's one output; None if there is no rule, or it does not say.

    `attrs` are names and values in turn; `shapes` those of all inputs, and `axes` the numbers in the last one, if it is
    a constant.
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


_RULES: dict[str, Callable[[dict[str, Any], list[Dims], Any], Dims | None]] = {
    "MatMul": _matmul, "Max": _reduced, "Mean": _reduced, "Min": _reduced, "Prod": _reduced, "Sum": _reduced,
    "Transpose": _transposed,
}  # fmt: skip
