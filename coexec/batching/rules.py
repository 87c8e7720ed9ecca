"""Rules: how an operation on one instance becomes an operation on many, stacked along a new first axis.

A rule is given one value per input: a *row* input has all instances' tensors, stacked (`[n, *shape]`); a *shared* input
is the same tensor for all of them; a *constant* is a Python or NumPy value; *many* is a list input whose items have one
shape, stacked twice (`[n, items, *shape]`). It returns the stacked outputs. It adds no operation per instance, and
everything it calls is an operation of TensorFlow, so that the gradient is TensorFlow's own.

`RULES` lists what has a rule. None of it fails on values, but for `INDEXED`, whose indices are compared beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.op import signature_of
from tracer.spec import Spec

ROW, SHARED, CONSTANT, MANY = "row", "shared", "constant", "many"


class Operand:
    """What is known of one input of a kind: its mode, its spec, and the value of a constant."""

    __slots__ = ("items", "mode", "spec", "value")

    def __init__(self, mode: str, spec: Spec, value: Any = None, items: int = 0) -> None:
        self.mode = mode
        self.spec = spec
        self.value = value
        self.items = items  # of a list input: how many there are


class RuleCall:
    """One kind of operation, as a rule sees it."""

    __slots__ = ("attrs", "op", "operands", "shapes")

    def __init__(self, op: str, operands: list[Operand], attrs: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
        self.op = op
        self.operands = operands
        self.attrs = attrs
        self.shapes = shapes  # of the outputs, of one instance

    def constant(self, i: int) -> Any:
        """Returns the value of a constant input as an array."""
        return np.asarray(self.operands[i].value)

    def rank(self, i: int) -> int:
        """Returns the rank of an input, of one instance."""
        return len(self.operands[i].spec.shape)


Rule = Callable[[RuleCall, list[Any]], list[Any]]


def _raw(call: RuleCall, values: list[Any]) -> Any:
    signature = signature_of(call.op)
    assert signature is not None
    result = getattr(tf.raw_ops, call.op)(**dict(zip(signature.inputs, values, strict=True)), **call.attrs)
    return result


def _aligned(call: RuleCall, values: list[Any]) -> list[Any]:
    """Returns the values so that broadcasting works as it does for one instance."""
    rank = max(len(operand.spec.shape) for operand in call.operands)
    aligned = []
    for operand, value in zip(call.operands, values, strict=True):
        shape = operand.spec.shape
        if operand.mode == ROW and len(shape) < rank:
            value = tf.reshape(value, [-1, *[1] * (rank - len(shape)), *shape])
        elif operand.mode == CONSTANT:
            value = tf.constant(operand.value, operand.spec.dtype)
        aligned.append(value)
    return aligned


def _elementwise(call: RuleCall, values: list[Any]) -> list[Any]:
    return [_raw(call, _aligned(call, values))]


def _of_one_shape(call: RuleCall, values: list[Any]) -> list[Any]:
    shape = tf.shape(next(v for v, o in zip(values, call.operands, strict=True) if o.mode == ROW))
    rows = zip(_aligned(call, values), call.operands, strict=True)
    return [_raw(call, [v if o.mode == ROW else tf.broadcast_to(v, shape) for v, o in rows])]


def _reshaped(call: RuleCall, values: list[Any]) -> list[Any]:
    return [tf.reshape(values[0], [-1, *call.shapes[0]])]


def _stopped(call: RuleCall, values: list[Any]) -> list[Any]:
    return [tf.stop_gradient(values[0])]


def _matmul(call: RuleCall, values: list[Any]) -> list[Any]:
    a, b = values
    one, other = call.operands
    turned, other_turned = bool(call.attrs.get("transpose_a")), bool(call.attrs.get("transpose_b"))
    if one.mode == ROW and other.mode == SHARED and not turned:
        product = tf.matmul(tf.reshape(a, [-1, one.spec.shape[1]]), b, transpose_b=other_turned)
        return [tf.reshape(product, [-1, *call.shapes[0]])]
    return [tf.raw_ops.BatchMatMulV2(x=a, y=b, adj_x=turned, adj_y=other_turned)]


def _batch_matmul(call: RuleCall, values: list[Any]) -> list[Any]:
    a, b = _aligned(call, values)
    adjoint = bool(call.attrs.get("adj_x")), bool(call.attrs.get("adj_y"))
    return [tf.raw_ops.BatchMatMulV2(x=a, y=b, adj_x=adjoint[0], adj_y=adjoint[1])]


def _bias_add(call: RuleCall, values: list[Any]) -> list[Any]:
    x, bias = _aligned(call, values)
    return [x + bias]


def _axes(call: RuleCall, i: int, rank: int) -> list[int]:
    return [int(axis) % rank + 1 if rank else 1 for axis in call.constant(i).ravel()]


def _reduced(call: RuleCall, values: list[Any]) -> list[Any]:
    function = getattr(tf, "reduce_" + call.op.lower())
    axes = _axes(call, 1, call.rank(0)) if call.rank(0) else []
    return [function(values[0], axes, keepdims=bool(call.attrs.get("keep_dims")))]


def _arg(call: RuleCall, values: list[Any]) -> list[Any]:
    function = tf.argmax if call.op == "ArgMax" else tf.argmin
    (axis,) = _axes(call, 1, call.rank(0))
    return [function(values[0], axis, output_type=call.attrs.get("output_type") or tf.int64)]


def _items(call: RuleCall, values: list[Any], count: int) -> list[Any]:
    """Returns the items of a list input, all as rows."""
    first = next(v for v, o in zip(values, call.operands, strict=True) if o.mode == ROW)
    items = []
    for operand, value in zip(call.operands[:count], values[:count], strict=True):
        if operand.mode == SHARED:
            value = tf.broadcast_to(value, tf.concat([tf.shape(first)[:1], operand.spec.shape], 0))
        items.append(value)
    return items


def _concat(call: RuleCall, values: list[Any]) -> list[Any]:
    rank = call.rank(0)
    axis = int(call.operands[-1].value) % rank
    if call.operands[0].mode == MANY:  # [n, items, ...]: the items go in front of the axis
        order = [0, *range(2, 2 + axis), 1, *range(2 + axis, 2 + rank)]
        return [tf.reshape(tf.transpose(values[0], order) if axis else values[0], [-1, *call.shapes[0]])]
    return [tf.concat(_items(call, values, len(values) - 1), axis + 1)]


def _packed(call: RuleCall, values: list[Any]) -> list[Any]:
    rank = call.rank(0)
    axis = int(call.attrs.get("axis") or 0) % (rank + 1)
    if call.operands[0].mode == MANY:
        order = [0, *range(2, 2 + axis), 1, *range(2 + axis, 2 + rank)]
        return [tf.transpose(values[0], order) if axis else values[0]]
    return [tf.stack(_items(call, values, len(values)), axis + 1)]


def _added(call: RuleCall, values: list[Any]) -> list[Any]:
    if call.operands[0].mode == MANY:
        return [tf.reduce_sum(values[0], 1)]
    return [tf.add_n(_items(call, values, len(values)))]


def _unpacked(call: RuleCall, values: list[Any]) -> list[Any]:
    axis = int(call.attrs.get("axis") or 0) % call.rank(0)
    return list(tf.raw_ops.Unpack(value=values[0], num=call.attrs["num"], axis=axis + 1))


def _split(call: RuleCall, values: list[Any]) -> list[Any]:
    (axis,) = _axes(call, 0, call.rank(1))
    return list(tf.raw_ops.Split(axis=axis, value=values[1], num_split=call.attrs["num_split"]))


def _split_by_sizes(call: RuleCall, values: list[Any]) -> list[Any]:
    (axis,) = _axes(call, 2, call.rank(0))
    sizes = [shape[axis - 1] for shape in call.shapes]
    return list(tf.raw_ops.SplitV(value=values[0], size_splits=sizes, axis=axis, num_split=len(sizes)))


def _transposed(call: RuleCall, values: list[Any]) -> list[Any]:
    return [tf.transpose(values[0], [0, *_axes(call, 1, call.rank(0))])]


def _strided(call: RuleCall, values: list[Any]) -> list[Any]:
    begin, end, strides = ([first, *call.constant(i).tolist()] for i, first in ((1, 0), (2, 0), (3, 1)))
    masks = {
        name: int(call.attrs.get(name) or 0) << 1 | (name in ("begin_mask", "end_mask"))
        for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    }
    return [tf.raw_ops.StridedSlice(input=values[0], begin=begin, end=end, strides=strides, **masks)]


def _sliced(call: RuleCall, values: list[Any]) -> list[Any]:
    return [tf.slice(values[0], [0, *call.constant(1).tolist()], [-1, *call.constant(2).tolist()])]


def _gathered(call: RuleCall, values: list[Any]) -> list[Any]:
    if call.operands[0].mode == SHARED:
        return [tf.gather(values[0], values[1])]
    return [tf.gather(values[0], values[1], axis=1, batch_dims=1)]


def _tiled(call: RuleCall, values: list[Any]) -> list[Any]:
    return [tf.tile(values[0], [1, *call.constant(1).tolist()])]


def _padded(call: RuleCall, values: list[Any]) -> list[Any]:
    value = call.operands[2].value if len(call.operands) > 2 else 0
    return [tf.pad(values[0], [[0, 0], *call.constant(1).tolist()], constant_values=value)]


def _broadcast(call: RuleCall, values: list[Any]) -> list[Any]:
    shape, inner = call.shapes[0], call.operands[0].spec.shape
    value = tf.reshape(values[0], [-1, *[1] * (len(shape) - len(inner)), *inner])
    return [tf.broadcast_to(value, tf.concat([tf.shape(value)[:1], shape], 0))]


def _crossed_sparse(call: RuleCall, values: list[Any]) -> list[Any]:
    features = tf.reshape(values[0], [-1, call.operands[0].spec.shape[1]])
    labels = tf.reshape(values[1], [-1])
    loss, back = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=features, labels=labels)
    return [tf.reshape(loss, [-1, *call.shapes[0]]), tf.reshape(back, [-1, *call.shapes[1]])]


def _crossed(call: RuleCall, values: list[Any]) -> list[Any]:
    flat = [tf.reshape(value, [-1, call.operands[0].spec.shape[1]]) for value in values]
    loss, back = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=flat[0], labels=flat[1])
    return [tf.reshape(loss, [-1, *call.shapes[0]]), tf.reshape(back, [-1, *call.shapes[1]])]


def _halved_squares(call: RuleCall, values: list[Any]) -> list[Any]:
    return [tf.reduce_sum(tf.square(values[0]), list(range(1, call.rank(0) + 1))) / 2]


_UNARY = """
    Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil Cos Cosh Elu Erf Erfc Exp Expm1 Floor Inv Reciprocal IsFinite IsInf
    IsNan LeakyRelu Lgamma Log Log1p LogicalNot Neg OnesLike Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh
    Softplus Softsign Sqrt Square Tan Tanh ZerosLike Identity PreventGradient
    """.split()  # noqa: SIM905
_BINARY = """
    Add AddV2 Atan2 Equal Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mul MulNoNan DivNoNan
    NotEqual Pow RealDiv SelectV2 SquaredDifference Sub Xdivy Xlogy
    """.split()  # noqa: SIM905
# These take two tensors of one shape, and do not broadcast.
_GRADIENTS = """
    EluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SigmoidGrad SoftplusGrad SqrtGrad TanhGrad
    """.split()  # noqa: SIM905

# By operation: its rule, and which inputs are sizes, axes and positions, that a rule takes as constants only.
RULES: dict[str, tuple[Rule, tuple[int, ...]]] = {
    **dict.fromkeys(_UNARY, (_elementwise, ())),
    **dict.fromkeys(_BINARY, (_elementwise, ())),
    **dict.fromkeys(_GRADIENTS, (_of_one_shape, ())),
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"), (_reduced, (1,))),
    **dict.fromkeys(("ArgMax", "ArgMin"), (_arg, (1,))),
    "Softmax": (_elementwise, ()), "LogSoftmax": (_elementwise, ()),
    "Reshape": (_reshaped, (1,)), "ExpandDims": (_reshaped, (1,)), "Squeeze": (_reshaped, ()),
    "StopGradient": (_stopped, ()),
    "MatMul": (_matmul, ()), "BatchMatMulV2": (_batch_matmul, ()), "BiasAdd": (_bias_add, ()),
    "ConcatV2": (_concat, (1,)), "Pack": (_packed, ()), "AddN": (_added, ()), "Unpack": (_unpacked, ()),
    "Split": (_split, (0,)), "SplitV": (_split_by_sizes, (1, 2)), "Transpose": (_transposed, (1,)),
    "StridedSlice": (_strided, (1, 2, 3)), "Slice": (_sliced, (1, 2)),
    "GatherV2": (_gathered, (2,)), "ResourceGather": (_gathered, ()),
    "Tile": (_tiled, (1,)), "Pad": (_padded, (1,)), "PadV2": (_padded, (1, 2)), "BroadcastTo": (_broadcast, (1,)),
    "SparseSoftmaxCrossEntropyWithLogits": (_crossed_sparse, ()),
    "SoftmaxCrossEntropyWithLogits": (_crossed, ()), "L2Loss": (_halved_squares, ()),
}  # fmt: skip

# Inputs that are indices, and which input they index (by which axis): the operation fails for others.
INDEXED = {"GatherV2": (1, 0, 0), "ResourceGather": (1, 0, 0), "SparseSoftmaxCrossEntropyWithLogits": (1, 0, -1)}

_FLOATS_ONLY = frozenset({"Pow", "RealDiv", "Xdivy", "Xlogy", "DivNoNan", "MulNoNan", "Reciprocal", "Inv"})
_DTYPES = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.bool, tf.uint8, tf.int8})


def fits(call: RuleCall) -> bool:
    """Returns whether the rule of an operation holds for operands of these modes and shapes."""
    operands = call.operands
    if any(operand.spec.dtype not in _DTYPES or 0 in operand.spec.shape for operand in operands):
        return False
    if not all(math.prod(shape) for shape in call.shapes):
        return False
    op, rows = call.op, [operand.mode == ROW for operand in operands]
    if op in _FLOATS_ONLY and not operands[0].spec.dtype.is_floating:
        return False
    constants = RULES[op][1] if op != "ConcatV2" else (len(operands) - 1,)
    if any(operands[i].mode != CONSTANT for i in constants):
        return False
    if op in ("MatMul", "BatchMatMulV2"):
        return not any(o.mode == CONSTANT for o in operands) and operands[0].spec.dtype.is_floating
    if op == "BiasAdd":
        return call.attrs.get("data_format") in (None, "NHWC", b"NHWC")
    if op in ("GatherV2", "ResourceGather"):
        if call.attrs.get("batch_dims") or (len(operands) > 2 and int(call.constant(2)) % max(call.rank(0), 1)):
            return False
        return rows[1] and (rows[0] or operands[0].mode == SHARED)
    if op in ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"):
        same = op[:2] == "Sp" or operands[0].spec.shape == operands[1].spec.shape
        return all(rows) and same
    if op in ("ConcatV2", "Pack", "AddN"):
        return all(o.mode != CONSTANT for o in (operands[:-1] if op == "ConcatV2" else operands))
    if op in ("ArgMax", "ArgMin", "Softmax", "LogSoftmax", "SplitV", "Split", "Unpack") and not max(map(len, (
        operand.spec.shape for operand in operands))):  # fmt: skip
        return False
    if RULES[op][0] is _of_one_shape:
        return any(rows) and operands[0].spec.shape == operands[1].spec.shape
    if RULES[op][0] is not _elementwise:
        return all(r for i, r in enumerate(rows) if i not in constants)
    return True
