"""Derive: what a known node does with inputs that it has not had before, without a recording.

TensorFlow's own shape functions answer for new shapes; operations on constants alone are carried out on the spot.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tracer import intercept
from tracer.graph import Node, Variant
from tracer.inputs import SHAPE_OPS, foldable
from tracer.lazy import Output
from tracer.op import Const, signature_of
from tracer.rebuild import infer_outputs
from tracer.spec import Spec, spec_of

# A node whose constants have had this many values runs on its own from then on: as many sizes as a function may have.
MAX_VALUES = 256


def derive(node: Node, parts: tuple[Any, ...], outside: dict[Any, Spec]) -> Variant | None:
    """Returns a new variant of `node` for these inputs; None if only running it can tell.

    `outside` names the constants that Python handed in, by input number, or by input and item number: those that have
    changed are fed from now on, if no shape depends on them. Where the outputs' shapes depend on values that are still
    to come, the node becomes one that runs on its own (`node.host`).
    """
    changed = {path for path in outside if path not in node.shaping and _has_changed(node, path, _at(parts, path))}
    if changed:
        general = _generalised(parts, changed, outside)
        variant = node.variants.get(general) or inferred_variant(node, general)
        if variant is not None:
            node.fed |= changed
            return _kept(node, variant)
    if len(node.variants) >= MAX_VALUES and any(_has_const(p) for p in parts):
        node.host = "the shape of its result depends on values that keep changing"
        return None
    variant = folded_variant(node, parts) or inferred_variant(node, parts)
    if variant is None:
        if infer_outputs(node.op, node.entry, node.attrs, parts) is not None:
            node.host = "the shape of its result depends on values"
        return None
    return _kept(node, variant)


def _kept(node: Node, variant: Variant) -> Variant:
    node.variants[variant.key] = variant
    return variant


def _at(parts: tuple[Any, ...], path: Any) -> Any:
    try:
        return parts[path[0]][path[1]] if isinstance(path, tuple) else parts[path]
    except IndexError:  # a list was longer before
        return None


def _has_const(part: Any) -> bool:
    return any(_has_const(p) for p in part) if isinstance(part, tuple) else isinstance(part, Const)


def _has_changed(node: Node, path: Any, const: Any) -> bool:
    before = [_at(key, path) for key in node.variants]
    return isinstance(const, Const) and any(isinstance(b, Const) and b != const for b in before)


def _generalised(parts: tuple[Any, ...], changed: set[Any], outside: dict[Any, Spec]) -> tuple[Any, ...]:
    general: list[Any] = []
    for i, part in enumerate(parts):
        if isinstance(part, tuple):
            general.append(tuple(outside[i, j] if (i, j) in changed else p for j, p in enumerate(part)))
        else:
            general.append(outside[i] if i in changed else part)
    return tuple(general)


def inferred_variant(node: Node, parts: tuple[Any, ...]) -> Variant | None:
    """Returns what TensorFlow's shape functions say of these inputs; None if they cannot tell."""
    specs = infer_outputs(node.op, node.entry, node.attrs, parts)
    if specs is None or any(s is None for s in specs):
        return None
    values: list[Const | None] = [None] * len(specs)
    if node.op in SHAPE_OPS:
        values = [_shape_value(node.op, part, spec) for part, spec in zip(_flat(parts), specs, strict=True)]
    template = _template(node, len(specs))
    if template == ():
        return None
    return Variant(parts, tuple(Output(s, v, node) for s, v in zip(specs, values, strict=True)), template)


def _flat(parts: tuple[Any, ...]) -> list[Any]:
    return [p for part in parts for p in (part if isinstance(part, tuple) else (part,))]


def _shape_value(op: str, part: Any, spec: Spec) -> Const | None:
    if isinstance(part, Const):
        shape = np.shape(part.value)
    elif op == "VariableShape":
        shape = part.handle[0][1]
    else:
        shape = part.shape
    value = {"Size": lambda: math.prod(shape), "Rank": lambda: len(shape)}.get(op, lambda: shape)()
    return Const(np.asarray(value, dtype=spec.dtype.as_numpy_dtype))


def _template(node: Node, count: int) -> Any:
    """Returns the form of a result of `count` tensors; () if it is not known."""
    for variant in node.variants.values():
        if len(variant.outputs) == count:
            return variant.template
    signature = signature_of(node.op)
    if signature is not None and signature.output_lists == (True,):
        return list(range(count))
    if signature is not None and count and not any(signature.output_lists):
        return -1 if count == 1 else list(range(count))
    return ()


def _given(const: Const) -> Any:
    """Returns a constant for TensorFlow, which might choose another dtype for an array than it had as a tensor."""
    return intercept.make_constant(const.value, None) if isinstance(const.value, np.ndarray) else const.value


def folded_variant(node: Node, parts: tuple[Any, ...]) -> Variant | None:
    """Returns what comes of constants alone, after running the operation on them; None if values are to come."""
    signature = signature_of(node.op)
    assert signature is not None
    if node.entry != "fast" or signature.stateful or not all(isinstance(p, Const) for p in _flat(parts)):
        return None
    with intercept.handling(None):
        try:
            inputs = [[*map(_given, part)] if isinstance(part, tuple) else _given(part) for part in parts]
            result = intercept.run_fast(node.op, None, (*inputs, *node.attrs))
        except Exception:  # it fails with these values: the running program shall see how
            return None
    tensors = intercept.flat_outputs(result)
    specs = tuple(spec_of(t) for t in tensors)
    if not foldable(node.op, False, parts, specs):
        return None
    values = [Const(np.asarray(t._numpy_internal())) for t in tensors]
    outputs = tuple(Output(s, v, node) for s, v in zip(specs, values, strict=True))
    return Variant(parts, outputs, intercept.template_of(result))
