"""Checks: predicates that tell beforehand whether XLA will behave as an operation's kernel does."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from coexec.lowering.function_body import Body
from coexec.lowering.op_failures import DIVISIONS, NUMBERS_ONLY, SHIFTS
from coexec.lowering.xla.dynamic_slice import is_inside
from tracer.inputs import natural_enum
from tracer.nodedef import Symbol
from tracer.private import types_pb2

INT32 = int(types_pb2.DT_INT32)
FLOAT = int(types_pb2.DT_FLOAT)
DOUBLE = int(types_pb2.DT_DOUBLE)


def check(body: Body, op: str, inputs: list[Any], attrs: dict[str, Any]) -> Symbol | None:
    """Emits a scalar bool: whether XLA behaves on `inputs` as the kernel does; returns None if none can tell."""
    if op == "Cast":
        return _fits(body, body.symbol(inputs[0], FLOAT), tf.dtypes.as_dtype(attrs["DstT"]))
    if op == "Softmax":
        return body.all(body.compare("Less", inputs[0], np.inf))
    if op == "CheckNumerics":
        values = body.symbol(inputs[0], FLOAT)
        size = body.make("Abs", [values], values.spec.enum, values.spec.shape)
        return body.all(body.compare("Less", size, np.inf))
    if op in NUMBERS_ONLY:
        return body.all(body.compare("Equal", inputs[0], inputs[0]))
    if op in SHIFTS:
        return _in_range(body, inputs[1], tf.dtypes.as_dtype(_dtype(inputs)).size * 8, _dtype(inputs))
    if op in DIVISIONS:
        return body.all(body.compare("NotEqual", body.symbol(inputs[1], _dtype(inputs)), 0))
    if op == "GatherV2":
        if isinstance(inputs[2], Symbol):
            return None
        return _in_range(body, inputs[1], _shape(inputs[0])[int(inputs[2])])
    if op == "StridedSlice":
        return is_inside(body, inputs[0], inputs[1], attrs)
    if op == "ResourceGather":
        return _in_range(body, inputs[1], _shape(inputs[0])[attrs.get("batch_dims") or 0])
    if op in ("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"):
        return _in_range(body, inputs[1], _shape(inputs[0])[0])
    if op == "GatherNd" or op.startswith("TensorScatter"):
        depth = (_shape(inputs[1]) or (0,))[-1]
        return _in_range(body, inputs[1], _shape(inputs[0])[:depth]) if depth else None
    if op.startswith("UnsortedSegment"):
        if isinstance(inputs[2], Symbol):
            return None
        return body.all(body.compare("Less", body.symbol(inputs[1], INT32), int(inputs[2])))
    if op in ("RandomUniformInt", "StatelessRandomUniformIntV2"):
        between = inputs[-2:]
        least, limit = (body.symbol(v, _dtype(between)) for v in between)
        return body.compare("Less", least, limit)
    if op == "SparseSoftmaxCrossEntropyWithLogits":
        return _in_range(body, inputs[1], _shape(inputs[0])[1])
    return None


def _shape(value: Any) -> tuple[int, ...]:
    return value.spec.shape if isinstance(value, Symbol) else np.shape(value)


def _dtype(inputs: list[Any]) -> int:
    """Returns the dtype that all inputs share."""
    known = next((v.spec.enum for v in inputs if isinstance(v, Symbol)), None)
    return natural_enum(inputs[0]) if known is None else known


def _in_range(body: Body, indices: Any, size: int | tuple[int, ...], enum: int | None = None) -> Symbol:
    """Emits a scalar bool: whether all indices are in [0, size); a tuple is one size per position."""
    if not isinstance(indices, Symbol):
        indices = body.symbol(indices, natural_enum(indices) if enum is None else enum)
    most = indices.spec.dtype.max
    if np.min(size) > most:  # no index that the dtype can hold is too large
        return body.all(body.compare("GreaterEqual", indices, 0))
    below = [min(one, most) for one in size] if isinstance(size, tuple) else size
    inside = body.compare("GreaterEqual", indices, 0), body.compare("Less", indices, below)
    return body.all(body.both(*inside))


def _fits(body: Body, values: Symbol, dtype: tf.DType) -> Symbol:
    """Emits a scalar bool: whether all floats, truncated, fit this integer dtype."""
    wide = body.make("Cast", [values], DOUBLE, values.spec.shape, DstT=DOUBLE)
    # -1 < x < 0 becomes 0, also in unsigned types; the largest int64 is not a float64, but the next power of two is.
    above = body.compare("Greater", wide, float(dtype.min) - 1.0)
    below = body.compare("Less", wide, float(dtype.max) + (1.0 if dtype.size < 8 else 0.0))
    return body.all(body.both(above, below))
