"""Rewrites: operations emitted so that XLA keeps the kernels' values, with barriers to its algebraic simplifier.

Most operations alone have the kernel's result under XLA, but not combinations: XLA folds the constants of
`(x + 1e8) - 1e8`, replaces `log(exp(x))` by `x`, divides by multiplying with a reciprocal, and replaces `x + 0.0` by
`x`, which keeps a negative zero. These are exact for real numbers; with floats they change rounding and overflow.

Barriers on all results would also work, and were measured: compilation took twice as long, and chains of elementwise
operations ran 8 % slower. So they are placed only where a rule of the simplifier (XLA's `algebraic_simplifier.cc`)
would otherwise apply.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from coexec.lowering.function_body import Body
from coexec.lowering.xla.dynamic_slice import BEGINS, sliced
from tracer.nodedef import Symbol
from tracer.spec import Spec

# Operations whose constants are folded with their neighbours', or dropped as neutral elements.
_ARITHMETIC = frozenset({"Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "AddN"})

# Operations whose result is constant: always (None), or if this input is constant.
_FILLS = {"Const": 0, "ZerosLike": None, "OnesLike": None, "Fill": 1, "BroadcastTo": 0, "Tile": 0}

_POWERS = frozenset({"Exp", "Pow", "Sqrt", "Rsqrt", "Square", "RealDiv", "Div", "Reciprocal", "Inv"})

# By operation, the producers that the simplifier merges it with.
_MERGED: dict[str, frozenset[str]] = {
    **dict.fromkeys(_ARITHMETIC, frozenset(_FILLS)),
    **dict.fromkeys(("Mul", "RealDiv", "Div"), _POWERS.union(_FILLS)),
    **dict.fromkeys(("Reciprocal", "Inv", "Pow", "Exp"), _POWERS | {"Log"}),
    **dict.fromkeys(("Sqrt", "Rsqrt", "Log"), _POWERS | {"Mul"}),
    "Log1p": frozenset({"Expm1"}),
    "Expm1": frozenset({"Log1p"}),
}

# XLA multiplies by a cast truth value by selecting: zero where it is false, also of NaN and infinity.
_MASKING = frozenset({"Mul", "RealDiv", "Div", "MulNoNan", "DivNoNan"})

# Operations whose result is their input, and which XLA therefore drops; a reshape, if it leaves the shape.
_SAME = frozenset({"Identity", "StopGradient", "PreventGradient", "Snapshot", "Reshape"})

# Gradients at edge cases, as the kernels compute them. XLA's own are NaN for roots and reciprocals of zero, the steeper
# side of (s)elu at zero, and zero for an infinite cotangent of an input that relu cuts off, where the kernels' is NaN.
_ROOTS = frozenset({"SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad"})
_GRADIENTS = frozenset({"SeluGrad", "EluGrad", "ReluGrad", "Relu6Grad"})
_SCALE, _SCALE_ALPHA = 1.0507009873554805, 1.7580993408473768


def as_kernel(body: Body, op: str, inputs: list[Any], attrs: tuple[Any, ...], specs: list[Spec]) -> list[Symbol]:
    """Emits an operation so that XLA computes the kernel's result; returns its outputs, which have `specs`."""
    if op in BEGINS and isinstance(inputs[BEGINS[op]], Symbol):
        return [sliced(body, op, inputs, attrs, specs[0])]
    if not specs or not (specs[0].dtype.is_floating or specs[0].dtype.is_complex):
        return body.add(op, inputs, attrs, specs)
    if op in _ROOTS or op in _GRADIENTS:
        return [_gradient(body, op, *(body.symbol(v, specs[0].enum) for v in inputs))]
    if op == "Elu" or op == "Selu":
        return [_exponential(body, op, body.symbol(inputs[0], specs[0].enum))]
    if op == "Sign" and specs[0].dtype.is_floating:  # of negative zero: XLA gives negative zero, the kernel zero
        return [_without_negative_zeros(body, body.add(op, inputs, attrs, specs)[0])]
    if op == "TopKV2":  # XLA sorts 0.0 before -0.0; to the kernel they tie, and the lower index comes first
        values = body.symbol(inputs[0], specs[0].enum)
        indices = body.add(op, [_without_negative_zeros(body, values), inputs[1]], attrs, specs)[1]
        last = len(specs[0].shape) - 1
        gathered = [values, indices, last]
        return [body.make("GatherV2", gathered, specs[0].enum, specs[0].shape, batch_dims=last), indices]
    merged = _MERGED.get(op)
    if merged is None and op in _MASKING:
        merged = frozenset()
    if merged is None:
        return body.add(op, inputs, attrs, specs)
    outputs = body.add(op, [_kept_apart(body, op, i, merged, specs[0].enum) for i in inputs], attrs, specs)
    # Even behind a barrier, XLA drops a zero from a sum of one-element tensors.
    adds_zero = op in ("Add", "AddV2") and any(map(_is_zero, inputs))
    return [_without_negative_zeros(body, outputs[0])] if adds_zero else outputs


def _gradient(body: Body, op: str, first: Symbol, second: Symbol) -> Symbol:
    """Emits the kernel's gradient formula; the inputs are (y, dy) for roots, (dy, y) for activations."""
    enum, shape = first.spec.enum, first.spec.shape

    def arithmetic(op: str, left: Any, right: Any) -> Symbol:
        return body.make(op, [left, right], enum, shape)

    if op in _ROOTS:
        y, dy = first, second
        if y.spec.dtype.is_complex:
            y = body.make("Conj", [y], enum, shape)
        if op == "SqrtGrad":
            slope = arithmetic("RealDiv", arithmetic("Mul", dy, 0.5), y)
        elif op == "RsqrtGrad":
            slope = arithmetic("Mul", arithmetic("Mul", arithmetic("Mul", dy, y), -0.5), arithmetic("Mul", y, y))
            slope = _without_negative_zeros(body, slope)
        else:
            slope = arithmetic("Mul", arithmetic("Mul", arithmetic("Mul", y, y), -1.0), dy)
        return body.select(body.compare("Equal", dy, 0.0), _zeros(body, dy), slope)
    dy, y = first, second
    if op in ("ReluGrad", "Relu6Grad"):
        passed = body.compare("Greater", y, 0.0)
        if op == "Relu6Grad":
            passed = body.both(passed, body.compare("Less", y, 6.0))
        return arithmetic("Mul", dy, barrier(body, body.make("Cast", [passed], enum, shape, DstT=enum)))
    added, scaled = (_SCALE_ALPHA, _SCALE) if op == "SeluGrad" else (1.0, 1.0)
    below = arithmetic("Mul", dy, arithmetic("AddV2", y, added))
    return body.select(body.compare("Less", y, 0.0), below, arithmetic("Mul", dy, scaled))


def _exponential(body: Body, op: str, x: Symbol) -> Symbol:
    """Emits elu or selu with `exp(x) - 1`, as the kernel does: 0 for tiny x, where XLA's own result is negative.

    A negative result would make `SeluGrad` take the steeper slope.
    """

    def arithmetic(op: str, left: Any, right: Any) -> Symbol:
        return body.make(op, [left, right], x.spec.enum, x.spec.shape)

    below = arithmetic("Sub", barrier(body, body.make("Exp", [x], x.spec.enum, x.spec.shape)), 1.0)
    above = x
    if op == "Selu":
        below, above = arithmetic("Mul", below, _SCALE_ALPHA), arithmetic("Mul", x, _SCALE)
    return body.select(body.compare("Less", x, 0.0), below, above)


def _kept_apart(body: Body, op: str, value: Any, merged: frozenset[str], enum: int) -> Any:
    """Returns an input behind a barrier if the simplifier would merge its producer with `op`."""
    if isinstance(value, list):
        return [_kept_apart(body, op, v, merged, enum) for v in value]
    if not isinstance(value, Symbol):
        return barrier(body, body.constant(value, enum)) if op in _ARITHMETIC else value
    source = _behind(value)
    masks = op in _MASKING and source.op == "Cast" and _is_true_or_false(source.inputs[0])
    return barrier(body, value) if masks or source.op in merged else value


def _behind(value: Symbol) -> Symbol:
    """Returns what a value is, but for operations that XLA drops."""
    while value.op in _SAME:
        before = value.inputs[0]
        if not isinstance(before, Symbol) or before.spec.shape != value.spec.shape:
            break
        value = before
    return value


def _is_true_or_false(value: Any) -> bool:
    return isinstance(value, Symbol) and value.spec.dtype == tf.bool


def constant(body: Body, value: Any, enum: int) -> Symbol:
    """Returns a tensor of a Python value, or a lifted constant, such that XLA keeps the signs of zeros."""
    symbol = body.constant(value, enum)
    # XLA turns [-0.0, 1.0, 2.0, ...] into an iota, which starts with 0.0.
    if symbol.op != "Const" or not symbol.spec.dtype.is_floating or len(symbol.spec.shape) != 1:
        return symbol
    array = np.asarray(value, np.float64)
    if not (array.size > 1 and np.signbit(array[0]) and np.array_equal(array, np.arange(array.size))):
        return symbol
    negative = barrier(body, body.constant(-np.asarray(value, symbol.spec.dtype.as_numpy_dtype), enum))
    return body.make("Neg", [negative], enum, symbol.spec.shape)


def barrier(body: Body, value: Symbol) -> Symbol:
    """Returns the value behind an optimisation barrier."""
    return body.add("XlaOptimizationBarrier", [[value]], (), [value.spec])[0]


def _is_zero(value: Any) -> bool:
    """Whether a value is known to hold only positive zeros."""
    if isinstance(value, Symbol):
        source = _FILLS.get(value.op)
        return value.op == "ZerosLike" or (source is not None and _is_zero(value.inputs[source]))
    return not np.any(value) and not np.any(np.signbit(np.real(value)))


def _without_negative_zeros(body: Body, value: Symbol) -> Symbol:
    return body.select(body.compare("Equal", value, 0.0), _zeros(body, value), value)


def _zeros(body: Body, like: Symbol) -> Symbol:
    return body.make("ZerosLike", [like], like.spec.enum, like.spec.shape)
