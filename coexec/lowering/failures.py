"""Failures: which operations can fail on the values they are given, and how to tell beforehand.

XLA drops the checks that eager kernels make (measured on TensorFlow 2.21: `check_numerics`, assertions and
out-of-range indices pass in silence), so a segment goes to XLA only if each of its operations cannot fail, or its
check can be written down as a predicate.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Given inputs of the recorded dtypes and shapes, these succeed whatever the values are.
TOTAL = frozenset(
    """
    Abs Acos Acosh Add AddN AddV2 All Angle Any ApproximateEqual ArgMax ArgMin Asin Asinh Atan Atan2 Atanh AvgPool
    AvgPoolGrad BatchMatMul BatchMatMulV2 BatchMatMulV3 BiasAdd BiasAddGrad Bitcast BitwiseAnd BitwiseOr BitwiseXor
    BroadcastArgs BroadcastGradientArgs BroadcastTo Cast Ceil ClipByValue Complex ComplexAbs Concat ConcatOffset
    ConcatV2 Conj ConjugateTranspose Const Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 Cos Cosh Cross Cumprod Cumsum CumulativeLogsumexp DeepCopy DepthToSpace
    DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Diag DiagPart Digamma
    DivNoNan Einsum Elu EluGrad EmptyLike Equal Erf Erfc Erfinv Exp ExpandDims Expm1 Fill Floor FusedBatchNorm
    FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 Greater
    GreaterEqual Identity IdentityN Igamma Igammac Imag Inv InvGrad Invert InvertPermutation IsFinite IsInf IsNan
    L2Loss LRN LeakyRelu LeakyReluGrad Less LessEqual Lgamma LinSpace Log Log1p LogSoftmax LogicalAnd LogicalNot
    LogicalOr MatMul MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2
    MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 Max MaxPool MaxPoolGrad MaxPoolGradGrad Maximum Mean
    Min Minimum MirrorPad MirrorPadGrad Mul MulNoNan Multinomial Ndtri Neg NextAfter NoOp NotEqual OneHot OnesLike
    Pack Pad PadV2 Polygamma Pow PreventGradient Prod Qr Range Rank Real RealDiv Reciprocal ReciprocalGrad Relu Relu6
    Relu6Grad ReluGrad Reshape ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad Reverse
    ReverseV2 RightShift LeftShift Rint Roll Round Rsqrt RsqrtGrad SelectV2 Select Selu SeluGrad Shape ShapeN Sigmoid
    SigmoidGrad Sign Sin Sinh Size Slice Snapshot Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign
    SoftsignGrad SpaceToDepth Split SplitV Sqrt SqrtGrad Square SquaredDifference Squeeze StopGradient StridedSlice
    StridedSliceGrad Sub Sum Tan Tanh TanhGrad TensorStridedSliceUpdate Tile TopK TopKV2 Transpose Unpack
    UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum VariableShape Xdivy Xlog1py Xlogy
    ZerosLike Zeta ReadVariableOp AssignVariableOp AssignAddVariableOp AssignSubVariableOp
    StatelessRandomGetKeyCounter StatelessRandomGetAlg StatelessRandomUniformFullIntV2 FakeQuantWithMinMaxVars
    """.split()  # noqa: SIM905  (one name a line would take five screens)
)

# With integer operands these divide, and eager kernels refuse a zero.
DIVISIONS = frozenset({"Div", "FloorDiv", "FloorMod", "Mod", "TruncateDiv", "TruncateMod"})

# XLA has random bits of its own where it generates numbers, so these keep to the kernels that eager uses.
RANDOM = frozenset(
    {"StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2", "StatelessRandomUniformIntV2",
     "StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal", "StatelessRandomUniformInt",
     "StatelessMultinomial", "StatelessShuffle"}
)  # fmt: skip

INTEGER_POWER = frozenset({"Pow"})


def can_fail(op: str, dtype: Any = None) -> bool:
    """Returns whether `op` may fail on some values; `dtype` is that of its first output, where it matters."""
    if op in DIVISIONS or op in INTEGER_POWER:
        return dtype is None or bool(dtype.is_integer)
    return op not in TOTAL and op not in RANDOM


def check(op: str, inputs: list[Any], attrs: dict[str, Any]) -> Any:
    """Returns a scalar bool tensor, true if `op` succeeds on `inputs`; None if that cannot be said beforehand."""
    if op in DIVISIONS:
        return tf.reduce_all(tf.not_equal(inputs[1], 0))
    if op == "GatherV2":
        axis = int(tf.get_static_value(inputs[2])) if tf.get_static_value(inputs[2]) is not None else None
        return None if axis is None else _in_range(inputs[1], tf.convert_to_tensor(inputs[0]).shape[axis])
    if op == "ResourceGather":
        return _in_range(inputs[1], inputs[0].shape[attrs.get("batch_dims") or 0])
    if op in ("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"):
        return _in_range(inputs[1], inputs[0].shape[0])
    if op == "SparseSoftmaxCrossEntropyWithLogits":
        return _in_range(inputs[1], inputs[0].shape[1])
    return None


def _in_range(indices: Any, size: int) -> Any:
    indices = tf.convert_to_tensor(indices)
    return tf.reduce_all((indices >= 0) & (indices < tf.cast(size, indices.dtype)))
