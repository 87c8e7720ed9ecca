"""Rewrites: what XLA's algebraic simplifier would make of neighbouring operations, and the barriers that forbid it.

Each operation on its own gives under XLA what its kernel gives. Two together may not: XLA adds up the constants of
`(x + 1e8) - 1e8`, takes `log(exp(x))` for `x`, divides by multiplying with a reciprocal, and takes `x + 0.0` for `x`,
which turns a negative zero around. Exact for real numbers; with floats it overflows elsewhere, or no more.

Barriers on all results would do too, and were measured: compilation took twice as long, and chains of elementwise
operations ran 8 % slower. So they stand only where a rule of the simplifier (XLA's `algebraic_simplifier.cc`) would
otherwise apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.private import gen_xla_ops

# Operations whose constants are merged with those of their neighbours, or taken for neutral elements.
_ARITHMETIC = frozenset({"Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "AddN"})

# Results that are constants whatever they were made of.
_FILLS = frozenset({"ZerosLike", "OnesLike", "Fill", "BroadcastTo", "Tile"})

_POWERS = frozenset({"Exp", "Pow", "Sqrt", "Rsqrt", "Square", "RealDiv", "Div", "Reciprocal", "Inv"})

# By operation: whose results it is merged with.
_MERGED: dict[str, frozenset[str]] = {
    **dict.fromkeys(_ARITHMETIC, _FILLS),
    **dict.fromkeys(("Mul", "RealDiv", "Div"), _FILLS | _POWERS),
    **dict.fromkeys(("Reciprocal", "Inv", "Pow", "Exp"), _POWERS | {"Log"}),
    **dict.fromkeys(("Sqrt", "Rsqrt", "Log"), _POWERS | {"Mul"}),
    "Log1p": frozenset({"Expm1"}),
    "Expm1": frozenset({"Log1p"}),
}


# Gradients at zero, as the kernels compute them: XLA's own give NaN for the first, the steeper side for the others.
_SCALE, _SCALE_ALPHA = 1.0507009873554805, 1.7580993408473768
_AS_KERNELS: dict[str, Callable[..., Any]] = {
    "SqrtGrad": lambda y, dy: tf.where(tf.equal(dy, 0), tf.zeros_like(dy), dy * 0.5 / y),
    "SeluGrad": lambda dy, y: tf.where(y < 0, dy * (y + _SCALE_ALPHA), dy * _SCALE),
    "EluGrad": lambda dy, y: tf.where(y < 0, dy * (y + 1), dy),
}


def as_kernel(op: str, inputs: list[Any], dtype: tf.DType, make: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Returns what the operation that `make` adds gives under XLA, made such that it is what its kernel gives.

    `dtype` is that of the operation's first output.
    """
    if not (dtype.is_floating or dtype.is_complex):
        return make(inputs)
    if op in _AS_KERNELS:
        return [_AS_KERNELS[op](*inputs)]
    if op == "TopKV2":  # XLA's order has 0.0 before -0.0, which are equal: the first of them is first
        indices = make([_without_negative_zeros(tf.convert_to_tensor(inputs[0])), inputs[1]])[1]
        return [tf.gather(inputs[0], indices, batch_dims=indices.shape.rank - 1), indices]
    merged = _MERGED.get(op)
    if merged is None:
        return make(inputs)
    outputs = make([_kept_apart(op, i, merged, dtype) for i in inputs])
    # Behind a barrier, too, a zero is left out of a sum of single elements.
    adds_zero = op in ("Add", "AddV2") and any(map(_is_zero, inputs))
    return [_without_negative_zeros(outputs[0])] if adds_zero else outputs


def _kept_apart(op: str, value: Any, merged: frozenset[str], dtype: tf.DType) -> Any:
    if isinstance(value, list):
        return [_kept_apart(op, v, merged, dtype) for v in value]
    if not _is_symbolic(value):
        return _barrier(tf.convert_to_tensor(value, dtype)) if op in _ARITHMETIC else value
    return _barrier(value) if value.op.type in merged else value


def _barrier(value: Any) -> Any:
    """Returns a value that the compiler does not look into."""
    return gen_xla_ops.xla_optimization_barrier([value])[0]


def _is_symbolic(value: Any) -> bool:
    return tf.is_tensor(value) and not hasattr(value, "numpy")


def _is_zero(value: Any) -> bool:
    """Whether a value is known to hold nothing but positive zeros."""
    if _is_symbolic(value):
        if value.op.type == "ZerosLike":
            return True
        value = tf.get_static_value(value) if value.op.type in _FILLS else None
    return value is not None and not np.any(value) and not np.any(np.signbit(np.real(value)))


def _without_negative_zeros(value: Any) -> Any:
    return tf.where(tf.equal(value, 0), tf.zeros_like(value), value)
