"""Gradients: gradient functions of TensorFlow's that read values, and are called otherwise while a handler answers.

That of `x[i]` reads the positions, only to pass their values on as arrays; that of `tf.slice` computes from them how
much to pad, which a shape depends on. A gradient whose Python reads a value that changes (the action that a policy has
drawn) can be neither memoized nor skipped; given the tensors themselves, one operation does the same, and nothing is
read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tracer import hooks
from tracer.faults import absorbs, passes
from tracer.intercept import answering_handler
from tracer.private import GradientRegistry, ops

_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


@passes
def _of_strided_slice(op: Any, gradient: Any) -> list[Any]:
    begin, end, strides = op.inputs[1:]
    shape = tf.shape(op.inputs[0], out_type=begin.dtype)
    masks = {name: op.get_attr(name) for name in _MASKS}
    made = tf.raw_ops.StridedSliceGrad(shape=shape, begin=begin, end=end, strides=strides, dy=gradient, **masks)
    return [made, None, None, None]


@passes
def _of_slice(op: Any, gradient: Any) -> list[Any]:
    begin = op.inputs[1]
    shape, size = (tf.shape(tensor, out_type=begin.dtype) for tensor in (op.inputs[0], op.outputs[0]))
    end, strides = begin + size, tf.ones_like(begin)
    made = tf.raw_ops.StridedSliceGrad(shape=shape, begin=begin, end=end, strides=strides, dy=gradient)
    return [made, None, None]


_GRADIENTS: dict[str, Callable[[Any, Any], list[Any]]] = {"Slice": _of_slice, "StridedSlice": _of_strided_slice}


def _finding(lookup: Any) -> Any:
    @passes
    @functools.wraps(lookup)
    def find(self: Any, name: str) -> Any:
        found = lookup(self, name)
        own = _GRADIENTS.get(name)
        if own is None or self is not ops.gradient_registry or found is not _THEIRS[name]:
            return found
        try:
            return found if answering_handler() is None else own
        except Exception as error:
            if not absorbs(error):
                raise
        return found

    return find


_THEIRS = {name: ops.gradient_registry.lookup(name) for name in _GRADIENTS}  # a program may replace them

_hooks = hooks.HookSet(
    __name__,
    "`Registry.lookup`, for the gradients of operations",
    "the gradient of a slice gets its positions as tensors, whose values it would read",
    hooks.PROCESS,
)
_hooks.add(GradientRegistry, "lookup", _finding(GradientRegistry.lookup))


def install() -> None:
    """Installs the look-up for good."""
    if not _hooks.users:
        _hooks.hold()
