"""Failures: which operations can fail depending on values, and which of them a predicate can check beforehand.

XLA drops the checks of eager kernels (measured on TensorFlow 2.21: `check_numerics`, assertions and out-of-range
indices pass silently), so an operation goes to XLA only if it cannot fail, or its check can be emitted as a predicate
(`xla/checks`).
"""

from __future__ import annotations

import numpy as np

from coexec.lowering.xla.dynamic_slice import picks
from tracer.graph import CONST, Step
from tracer.spec import Spec
from tracer.variable_ops import SPARSE_OPTIMIZER_OPS

# Given inputs of the recorded dtypes and shapes, these succeed whatever the values are.
TOTAL = frozenset(
    """
    Abs Acos Acosh Add AddN AddV2 All Angle Any ApproximateEqual ArgMax ArgMin Asin Asinh Atan Atan2 Atanh AvgPool
    AvgPoolGrad BatchMatMul BatchMatMulV2 BatchMatMulV3 BiasAdd BiasAddGrad Bitcast BitwiseAnd BitwiseOr BitwiseXor
    BroadcastArgs BroadcastGradientArgs BroadcastTo Cast Ceil ClipByValue Complex ComplexAbs Concat ConcatOffset
    ConcatV2 Conj ConjugateTranspose Const Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 Cos Cosh Cross Cumprod Cumsum CumulativeLogsumexp DeepCopy DepthToSpace
    DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Diag DiagPart Digamma
    DivNoNan Einsum Elu EluGrad EnsureShape Equal Erf Erfc Erfinv Exp ExpandDims Expm1 Fill Floor FusedBatchNorm
    FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 Greater
    GreaterEqual Identity IdentityN Igamma Igammac Imag Inv InvGrad Invert IsFinite IsInf IsNan
    L2Loss LRN LeakyRelu LeakyReluGrad Less LessEqual Lgamma LinSpace Log Log1p LogSoftmax LogicalAnd LogicalNot
    LogicalOr MatMul MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2
    MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 Max MaxPool MaxPoolGrad MaxPoolGradGrad Maximum Mean
    Min Minimum MirrorPad MirrorPadGrad Mul MulNoNan Multinomial Ndtri Neg NextAfter NoOp NotEqual OneHot OnesLike
    Pack Pad PadV2 Polygamma Pow PreventGradient Prod Qr Range Rank Real RealDiv Reciprocal ReciprocalGrad Relu Relu6
    Relu6Grad ReluGrad Reshape ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad Reverse
    ReverseV2 Rint Roll Round Rsqrt RsqrtGrad SelectV2 Select Selu SeluGrad Shape ShapeN Sigmoid
    SigmoidGrad Sign Sin Sinh Size Slice Snapshot Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign
    SoftsignGrad SpaceToDepth Split SplitV Sqrt SqrtGrad Square SquaredDifference Squeeze StopGradient StridedSlice
    StridedSliceGrad Sub Sum Tan Tanh TanhGrad TensorStridedSliceUpdate Tile TopK TopKV2 Transpose Unpack
    VariableShape Xdivy Xlog1py Xlogy
    ZerosLike Zeta ReadVariableOp AssignVariableOp AssignAddVariableOp AssignSubVariableOp ResourceApplyAdadelta
    ResourceApplyAdagradV2 ResourceApplyAdam ResourceApplyCenteredRMSProp ResourceApplyGradientDescent
    ResourceApplyKerasMomentum ResourceApplyMomentum ResourceApplyRMSProp ResourceStridedSliceAssign
    RandomStandardNormal RandomUniform RngReadAndSkip TruncatedNormal StatelessRandomGetKeyCounter StatelessRandomGetAlg
    StatelessRandomNormalV2 StatelessRandomUniformFullIntV2
    StatelessRandomUniformIntV2 StatelessRandomUniformV2
    """.split()  # noqa: SIM905  (one name a line would take five screens)
)

# By operation, the inputs that are positions or extents. Constants were in range when recorded, and still are; values
# computed at run time may not be.
POSITIONS: dict[str, tuple[int, ...]] = {
    "ArgMax": (1,), "ArgMin": (1,), "BroadcastTo": (1,), "Concat": (0,), "ConcatV2": (1,), "Cumprod": (1,),
    "Cumsum": (1,), "ExpandDims": (1,), "Fill": (0,), "LinSpace": (2,), "All": (1,), "Any": (1,), "Max": (1,),
    "Mean": (1,), "Min": (1,), "Prod": (1,), "Sum": (1,), "MatrixBandPart": (1, 2), "MatrixDiagPartV2": (1,),
    "MatrixDiagPartV3": (1,), "MatrixDiagV2": (1, 2, 3), "MatrixDiagV3": (1, 2, 3), "MatrixSetDiagV2": (2,),
    "MatrixSetDiagV3": (2,), "MirrorPad": (1,), "MirrorPadGrad": (1,), "OneHot": (1,), "Pad": (1,), "PadV2": (1,),
    "RandomUniformInt": (1, 2), "Range": (0, 1, 2), "Reshape": (1,), "ResizeBilinear": (1,),
    "ResizeNearestNeighbor": (1,), "ResizeNearestNeighborGrad": (1,),
    "ResourceStridedSliceAssign": (1, 2, 3), "ReverseV2": (1,), "Roll": (1, 2), "Slice": (1, 2), "Split": (0,),
    "SplitV": (1, 2), "StatelessRandomUniformIntV2": (4, 5), "StridedSlice": (1, 2, 3),
    "StridedSliceGrad": (0, 1, 2, 3), "TensorStridedSliceUpdate": (1, 2, 3), "Tile": (1,), "TopKV2": (1,),
    "Transpose": (1,), "ConjugateTranspose": (1,),
}  # fmt: skip

# TensorFlow's shape functions accept these at sizes at which their kernels fail: a slice beyond the end, the largest of
# no elements, a reflection of more rows than there are. What has succeeded at some sizes may fail at others.
SIZED = frozenset(
    """
    ArgMax ArgMin AvgPoolGrad BroadcastTo Conv2DBackpropFilter Conv2DBackpropInput Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput MatrixBandPart
    MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2
    MatrixSetDiagV3 MaxPoolGrad MaxPoolGradGrad MirrorPad MirrorPadGrad Multinomial ResizeBilinear ResizeBilinearGrad
    ResizeNearestNeighbor ResizeNearestNeighborGrad ResourceStridedSliceAssign Slice SplitV TensorStridedSliceUpdate
    """.split()  # noqa: SIM905
)

# Integer division: eager kernels raise on a zero divisor.
DIVISIONS = frozenset({"Div", "FloorDiv", "FloorMod", "Mod", "TruncateDiv", "TruncateMod"})

# XLA draws other numbers than the kernels, and `xla/philox` has no lowering that reproduces theirs.
RANDOM = frozenset(
    {"TruncatedNormal", "StatelessTruncatedNormalV2", "StatelessRandomUniform", "StatelessRandomNormal",
     "StatelessTruncatedNormal", "StatelessRandomUniformInt", "StatelessMultinomial", "StatelessShuffle"}
)  # fmt: skip

# XLA's tails differ: `ndtri` of 1e-30 is -11.5 in the kernel, minus infinity under XLA; `igammac` at zero is NaN in the
# kernel, 1 under XLA; `polygamma(1.0, inf)` is zero in the kernel, NaN under XLA.
TAILS = frozenset({"Igamma", "Igammac", "Ndtri", "Polygamma", "Zeta"})

# XLA has no kernels for these (a test compares this with TensorFlow's registry).
WITHOUT_KERNEL = SPARSE_OPTIMIZER_OPS | {"DeepCopy", "InvGrad", "ResizeNearestNeighborGrad", "TopK"}

# An assertion whose condition is not fetched: takes the condition, has no outputs, fails if it is false.
ASSERTION = "Assert"

# These may fail, and `checks.check` emits a predicate that tells beforehand whether they will.
CHECKED = frozenset(
    {ASSERTION, "CheckNumerics", "GatherNd", "GatherV2", "RandomUniformInt", "ResourceGather", "ResourceScatterAdd",
     "ResourceScatterSub", "ResourceScatterUpdate", "SparseSoftmaxCrossEntropyWithLogits",
     "StatelessRandomUniformIntV2", "TensorScatterAdd", "TensorScatterMax", "TensorScatterMin", "TensorScatterSub",
     "TensorScatterUpdate", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd", "UnsortedSegmentSum"}
)  # fmt: skip

# XLA and the kernels disagree on NaN inputs (and on infinity for `Softmax`).
NUMBERS_ONLY = frozenset({"ArgMax", "ArgMin", "CumulativeLogsumexp", "MaxPool", "Softmax", "TopKV2"})

# Shifts by the width or more, or by a negative amount, have other results under XLA.
SHIFTS = frozenset({"LeftShift", "RightShift"})


def can_fail(step: Step) -> bool:
    """Returns whether an operation may fail on some values of its non-constant inputs."""
    op = step.op or ""
    if step.variant is not None and step.variant.folded:  # it has run, on the same constants
        return False
    if step.window:  # its place is known where it is followed
        return False
    if step.open:  # sizes may not fit
        return True
    if op in DIVISIONS and 1 in step.consts and np.all(step.consts[1].value):
        return False
    if op in DIVISIONS or op == "Pow":
        return bool(step.outputs[0].spec.dtype.is_integer)
    if op in POSITIONS:
        return any(step.slots[i] != CONST for i in POSITIONS[op] if i < len(step.slots))
    return op not in TOTAL and op not in RANDOM and op not in SHIFTS


def is_unproven(step: Step) -> bool:
    """Returns whether an operation may fail as it has not run on such dtypes and sizes; `can_fail` is about values."""
    variant = step.variant
    if variant is None or variant.folded:
        return False
    if step.op in SIZED and (step.dynamic or not variant.ran):
        return True
    return not variant.ran and step.node is not None and not step.node.has_run(variant)


def differs(op: str) -> str | None:
    """Returns how XLA's result differs from the kernel's, if no rewrite or predicate helps; None otherwise."""
    if op in WITHOUT_KERNEL:
        return "has no kernel that XLA compiles"
    if op in RANDOM:
        return "draws other numbers under XLA than eagerly"
    return "gives other values under XLA than eagerly" if op in TAILS else None


def needs_check(step: Step) -> bool:
    """Returns whether a predicate (`checks.check`) must confirm that XLA behaves as the kernel does."""
    if step.op in NUMBERS_ONLY and _is_floating(step) and not can_fail(step):
        return True
    if picks(step) and not step.window:
        return True
    return _overflows(step) or step.op in SHIFTS or (can_fail(step) and (step.op in DIVISIONS or step.op in CHECKED))


def _overflows(step: Step) -> bool:
    """Whether this casts floats to integers: out of range, kernels wrap around and XLA saturates."""
    if step.op != "Cast" or not step.outputs[0].spec.dtype.is_integer:
        return False
    return _is_floating(step)


def _is_floating(step: Step) -> bool:
    """Whether the first input is floating-point or complex."""
    assert step.variant is not None
    source = step.variant.key[0]
    return isinstance(source, Spec) and (source.dtype.is_floating or source.dtype.is_complex)
