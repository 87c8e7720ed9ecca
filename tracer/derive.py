"""Derive: outputs of a known node for new inputs, without recording.

TensorFlow's shape functions infer the specs for new shapes; operations on constants alone are folded by running them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tracer import intercept
from tracer.graph import DECIDES_AT_LENGTH, VALUE_SHAPED, Node, Variant, refusal
from tracer.inputs import SHAPE_OPS, foldable, indexes_known
from tracer.lazy import Output
from tracer.op import Const, array_in, signature_of
from tracer.rebuild import RESERVED, infer_outputs
from tracer.spec import Spec, spec_of
from tracer.windows import slides, window

# A node whose key has constants becomes a host op after this many variants: as many as a function may have sizes.
MAX_VALUES = 256
# An array that a shape seemed to depend on is data after so many values: as a constant it makes a path of each.
MAX_SHAPING = 4


def derive(node: Node, parts: tuple[Any, ...], outside: dict[Any, Spec], known: set[Any]) -> Variant | None:
    """Returns a new variant of `node` for these inputs; None if that takes running the operation.

    `outside` has the spec of each constant that Python passed in, by input number or (input, item); `known`: which of
    them are feeds of the segment. See `feed_changed`. If output shapes depend on values that are not known yet,
    the node becomes a host op (`node.host`).
    """
    variant = feed_changed(node, parts, outside, known)
    if variant is not None:
        return variant
    if len(node.variants) >= MAX_VALUES and any(_has_const(p) for p in parts):
        node.host = "the shape of its result depends on values that keep changing"
        return None
    variant = folded_variant(node, parts) or inferred_variant(node, parts)
    if variant is None:
        if infer_outputs(node.op, node.entry, node.attrs, parts) is not None:
            node.host = VALUE_SHAPED
        return None
    return _kept(node, variant)


def feed_changed(node: Node, parts: tuple[Any, ...], outside: dict[Any, Spec], known: set[Any]) -> Variant | None:
    """Returns the variant of `node` in which constants that changed, or are `known` feeds, are fed from now on.

    None if there are none, or an output shape depends on them. Two values suffice, though both have been recorded: an
    agent that chooses one of two actions, ten times in a call, would take a thousand paths, and so would its gradient.
    """
    if indexes_known(node.op, parts, outside):
        return None
    current = node.variants.get(parts)
    if current is not None and not known and (current.folded or len(node.variants) == 1):
        return None
    if current is not None and current.folded and _decides(current):
        return None
    constants = {path: const for path in outside if isinstance(const := _at(parts, path), Const)}
    changed = {path for path, const in constants.items() if _has_changed(node, parts, path, const)}
    node.data |= {path for path in changed & node.shaping if _keeps_changing(node, path)}
    shaping = node.shaping - (node.data - node.sizing)
    changed -= shaping
    for fed in (changed | (known & constants.keys()) - shaping, changed):
        if not fed or fed in node.specific:
            continue
        general = _generalised(parts, fed, outside)
        variant = node.variants.get(general) or inferred_variant(node, general) or _window(node, parts, general, fed)
        if variant is None or (_decides(variant) and not changed) or _refused(node, variant) is not None:
            node.specific |= {frozenset(fed)}
            continue
        node.fed |= fed
        if not variant.window:
            node.variants[general] = variant
        return variant
    return None


def _window(node: Node, parts: tuple[Any, ...], general: tuple[Any, ...], fed: set[Any]) -> Variant | None:
    specs = infer_outputs(node.op, node.entry, node.attrs, parts) if node.op == "StridedSlice" else None
    if specs is None or specs[0] is None or not slides(node, parts, fed, specs[0].shape):
        return None
    node.windows = {} if node.windows is None else node.windows
    return window(node, general, specs[0].shape)


def _kept(node: Node, variant: Variant) -> Variant | None:
    # The dtypes may differ from those of the recorded call.
    node.host = _refused(node, variant)
    if node.host is not None:
        return None
    node.variants[variant.key] = variant
    return variant


def _refused(node: Node, variant: Variant) -> str | None:
    return refusal(node.op, variant.key, tuple([out.spec for out in variant.outputs]))


def _at(parts: tuple[Any, ...], path: Any) -> Any:
    try:
        return parts[path[0]][path[1]] if isinstance(path, tuple) else parts[path]
    except IndexError:  # a list used to be longer
        return None


def _has_const(part: Any) -> bool:
    return any(_has_const(p) for p in part) if isinstance(part, tuple) else isinstance(part, Const)


def _has_changed(node: Node, parts: tuple[Any, ...], path: Any, const: Const) -> bool:
    """Returns whether a constant was another one where the operation was given the like.

    A function of TensorFlow's has several operations of one kind at one line of the program. Where that line runs more
    often than when it was recorded, turns alone tell them apart: a reshape of numbers is no other one of images.
    """
    for key in node.variants:
        before = _at(key, path)
        if isinstance(before, Const) and before != const and _are_alike(key, parts):
            return True
    return False


def _are_alike(one: Any, other: Any) -> bool:
    """Returns whether inputs have the same dtypes and ranks, and constants at the same places."""
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, Spec):
        return isinstance(other, Spec) and one.enum == other.enum and len(one.shape) == len(other.shape)
    if isinstance(other, Const):
        return np.ndim(one.value) == np.ndim(other.value)
    array = one.value  # of few integers the value may be known in one of them alone
    return isinstance(array, np.ndarray) and bool(array.dtype == other.dtype and array.ndim == len(other.shape))


def _keeps_changing(node: Node, path: Any) -> bool:
    """Returns whether a constant array has had many values of one shape."""
    values = [const.value for key in node.variants if isinstance(const := _at(key, path), Const)]
    shapes = [np.shape(value) for value in values if np.size(value) > 1]
    return any(shapes.count(shape) >= MAX_SHAPING for shape in set(shapes))


def _decides(variant: Variant) -> bool:
    """Returns whether all outputs are conditions, which Python most likely asks for at once."""
    return bool(variant.outputs) and all(out.spec.dtype.is_bool for out in variant.outputs)


def _generalised(parts: tuple[Any, ...], changed: set[Any], outside: dict[Any, Spec]) -> tuple[Any, ...]:
    general: list[Any] = []
    for i, part in enumerate(parts):
        if isinstance(part, tuple):
            general.append(tuple(outside[i, j] if (i, j) in changed else p for j, p in enumerate(part)))
        else:
            general.append(outside[i] if i in changed else part)
    return tuple(general)


def inferred_variant(node: Node, parts: tuple[Any, ...]) -> Variant | None:
    """Returns the variant that TensorFlow's shape functions infer; None if they do not know all shapes."""
    specs = infer_outputs(node.op, node.entry, node.attrs, parts)
    if specs is not None and node.op in RESERVED:
        specs = _with_reserved(node, specs)
    if specs is None or any(s is None for s in specs):
        return None
    values = shape_values(node, parts, specs)
    template = template_of(node, len(specs))
    if template == ():
        return None
    outputs = tuple(Output(s, v, node) for s, v in zip(specs, values, strict=True))
    return Variant(parts, outputs, template, ran=False)


def _with_reserved(node: Node, specs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `specs`, with reserved outputs as the kernel returned them if those had at most one element.

    The size of a real workspace (cuDNN's) depends on the inputs in a way that only the kernel knows.
    """
    known: dict[int, Spec | None] = dict.fromkeys(RESERVED[node.op])
    for variant in node.variants.values():
        known.update({n: variant.outputs[n].spec for n in known if math.prod(variant.outputs[n].spec.shape or ()) <= 1})
    return tuple(known.get(n, spec) for n, spec in enumerate(specs))


def _flat(parts: tuple[Any, ...]) -> list[Any]:
    return [p for part in parts for p in (part if isinstance(part, tuple) else (part,))]


def _shape_value(op: str, part: Any, spec: Spec) -> Const | None:
    if isinstance(part, Const):
        shape = np.shape(part.value)
    elif op == "VariableShape":
        shape = part.handle[0][1]
    else:
        shape = part.shape
    value: Any = math.prod(shape) if op == "Size" else len(shape) if op == "Rank" else shape
    return Const(np.asarray(value, dtype=spec.dtype.as_numpy_dtype))


def shape_values(node: Node, parts: tuple[Any, ...], specs: tuple[Spec, ...]) -> list[Const | None]:
    """Returns the values of an operation's results that follow from shapes alone, None for others."""
    if node.op in SHAPE_OPS:
        return [_shape_value(node.op, part, spec) for part, spec in zip(_flat(parts), specs, strict=True)]
    return [None] * len(specs)


def template_of(node: Node, count: int) -> Any:
    """Returns the structure of a result of `count` tensors; () if unknown."""
    for variant in node.variants.values():
        if len(variant.outputs) == count:
            return variant.template
    signature = signature_of(node.op)
    if signature is not None and signature.output_lists == (True,):
        return list(range(count))
    if signature is not None and count and not any(signature.output_lists):
        return -1 if count == 1 else list(range(count))
    return ()


def folded(node: Node, parts: tuple[Any, ...]) -> Variant | None:
    """Returns the variant of a deciding node that is given constants alone; None if it must run, now and later."""
    variant = folded_variant(node, parts) if len(node.variants) < MAX_VALUES else None
    if variant is not None:
        node.variants[variant.key] = variant
    else:
        node.host = DECIDES_AT_LENGTH
    return variant


def _given(const: Const) -> Any:
    """Returns a constant as an input; an array as a tensor, since TensorFlow might convert it to another dtype."""
    return intercept.make_constant(const.value, None) if isinstance(const.value, np.ndarray) else const.value


def folded_variant(node: Node, parts: tuple[Any, ...]) -> Variant | None:
    """Returns the variant of a stateless operation on constants alone, by running it; None for any other."""
    signature = signature_of(node.op)
    assert signature is not None
    if node.entry != "fast" or signature.stateful or not all(isinstance(p, Const) for p in _flat(parts)):
        return None
    with intercept.handling(None):
        try:
            inputs = [[*map(_given, part)] if isinstance(part, tuple) else _given(part) for part in parts]
            result = intercept.run_fast(node.op, None, (*inputs, *node.attrs))
        except Exception:  # let the program see it fail
            return None
    tensors = intercept.flat_outputs(result)
    specs = tuple(spec_of(t) for t in tensors)
    if not foldable(node.op, False, parts, specs):
        return None
    values = [Const(array_in(t)) for t in tensors]
    outputs = tuple(Output(s, v, node) for s, v in zip(specs, values, strict=True))
    return Variant(parts, outputs, intercept.template_of(result))
