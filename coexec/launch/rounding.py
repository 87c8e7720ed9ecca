"""Rounding: tensors with perturbed last digits, as another order of summation or another kernel would yield.

How much a program's results change when every operation rounds differently is the precision to which its arithmetic
determines them: Monte Carlo arithmetic (Parker, 1997).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from tracer.graph import Step
from tracer.inputs import array_of
from tracer.intercept import make_constant
from tracer.private import EagerTensor

# The relative spacing of each type's values.
DIGIT = {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7, tf.float32: 2.0**-23, tf.float64: 2.0**-52}

# Operations that round, except on integers: sums of products. Those neither here nor below select, move, count or
# compare, and their results are not perturbed: a maximum is exactly one of its inputs.
RINGS = frozenset({
    "Add", "AddN", "AddV2", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "BiasAdd", "BiasAddGrad", "Conv2D",
    "Conv2DBackpropFilter", "Conv2DBackpropInput", "Conv3D", "Cumsum", "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNativeBackpropInput", "Einsum", "L2Loss", "MatMul", "Mul",
    "Prod", "SegmentSum", "Square", "SquaredDifference", "Sub", "Sum", "UnsortedSegmentSum",
})  # fmt: skip
# Operations that round whatever their inputs.
ROUNDING = frozenset({
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "AvgPool", "AvgPoolGrad", "Cos", "Cosh", "Cumprod",
    "Digamma", "Div", "DivNoNan", "Elu", "EluGrad", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "FusedBatchNormGradV3",
    "FusedBatchNormV3", "Inv", "InvGrad", "Lgamma", "Log", "Log1p", "LogSoftmax", "Mean", "Ndtri", "Pow", "RealDiv",
    "Reciprocal", "ReciprocalGrad", "ResizeBilinear", "ResizeBilinearGrad", "Rsqrt", "RsqrtGrad", "SegmentMean",
    "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sin", "Sinh", "Softmax", "SoftmaxCrossEntropyWithLogits", "Softplus",
    "SoftplusGrad", "Softsign", "SoftsignGrad", "SparseSoftmaxCrossEntropyWithLogits", "Sqrt", "SqrtGrad", "Tan",
    "Tanh", "TanhGrad", "Xdivy", "Xlog1py", "Xlogy",
})  # fmt: skip
# Those of them whose kernels subtract shares of one: their results have the absolute rounding of one.
SHARES = frozenset({"LogSoftmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"})


# Sums whose kernels may accumulate in `bfloat16`, but do not where a graph fuses them with others: the gradient of a
# bias, over 800 numbers, was 3 % off the true sum alone, and close to it when computed with the filter's.
SUMS = frozenset({"BiasAddGrad", "Cumsum", "L2Loss", "Mean", "SegmentSum", "Sum", "UnsortedSegmentSum"})


def otherwise_rounded(numbers: np.random.Generator) -> Callable[[Step, list[Any], list[Any]], list[Any]]:
    """Returns a function that perturbs the last digits of an operation's results, if it rounds."""

    def changed(step: Step, inputs: list[Any], results: list[Any]) -> list[Any]:
        if step.op in SUMS and results[0].dtype == tf.bfloat16 and isinstance(inputs[0], EagerTensor):
            return [summed_otherwise(results[0], inputs[0], numbers)]
        if step.op in RINGS:
            return [nudged(result, numbers, 1.0, keep_whole=True) for result in results]
        if step.op in ROUNDING:
            return [nudged(result, numbers, 1.0, least=float(step.op in SHARES)) for result in results]
        return results

    return changed


def summed_otherwise(result: Any, terms: Any, numbers: np.random.Generator) -> Any:
    """Returns sums as they may be if each partial sum is rounded to its type.

    Partial sums of n terms are about as large as the sum itself, or as the square root of n terms. Each of n roundings
    is off by up to half a last place of that, at random: in all, by half of it times the square root of n.
    """
    wide, array = array_of(result).astype(np.float64), array_of(terms).astype(np.float64)
    count = max(array.size / max(wide.size, 1), 1.0)
    with np.errstate(all="ignore"):
        size = np.abs(wide) + np.sqrt(count * np.mean(array * array))
        by = DIGIT[result.dtype] / 4 * np.sqrt(count) * size * numbers.uniform(-1.0, 1.0, wide.shape)
    return make_constant(np.where(np.isfinite(by), wide + by, wide).astype(array_of(result).dtype), result.dtype)


def nudged(
    tensor: Any,
    numbers: np.random.Generator,
    places: float | None = None,
    keep_whole: bool = False,
    least: float = 0.0,
) -> Any:
    """Returns a tensor of floats with each value moved by up to `places` units in the last place; others unchanged.

    `places`: `tuning.rounding_places` by default. `keep_whole` keeps integers. A value below `least` is moved as
    `least` would be.
    """
    if tensor.dtype not in DIGIT:
        return tensor
    array = array_of(tensor)
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):
        places = tuning.rounding_places if places is None else places
        by = places * DIGIT[tensor.dtype] * np.maximum(np.abs(wide), least) * numbers.uniform(-1.0, 1.0, array.shape)
    by = np.where(~np.isfinite(wide) | (keep_whole & (np.rint(wide) == wide)), 0.0, by)
    return make_constant((wide + by).astype(array.dtype), tensor.dtype)
