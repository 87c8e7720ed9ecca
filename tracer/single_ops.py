"""Single operations: functions of TensorFlow's that hand what they are given to one operation, answered like `answers`.

`tf.sqrt(x)` passes four functions of Python (a traceback filter, two dispatchers, a generated wrapper) before the
operation is issued, `tf.sigmoid(x)` a name scope and a conversion as well. Nothing in them depends on more than the
kinds of the arguments, so a handler that expects the operation may be asked at once.

Each answer gives exactly the inputs and attributes that TensorFlow's function would. What else comes (arrays, ragged
tensors, tensors in shapes) is left to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.faults import passes
from tracer.handler import Handler
from tracer.lazy import LazyTensor
from tracer.operators import operand_of
from tracer.private import EagerTensor, record
from tracer.variables import plain_variable, value_of

_NUMBERS = frozenset({int, float})
_OTHERS = (tf.variant, tf.resource)


def _is_tensor(value: Any) -> bool:
    kind = type(value)
    return kind is LazyTensor or kind is EagerTensor


def _are_integers(value: Any) -> bool:
    kind = type(value)
    return kind is int or ((kind is list or kind is tuple) and all(type(item) is int for item in value))


def _unary(op: str, path: str, applies: Callable[[Any], bool] | None = None) -> Callable[..., Any]:
    """Answers a function of one tensor or variable; `applies`: whether it issues `op` for this dtype."""
    original = functools.reduce(getattr, path.split("."), tf)

    @passes
    def unary(handler: Handler, x: Any = None, name: Any = None) -> Any:
        kind = type(x)
        if kind is LazyTensor or kind is EagerTensor:
            return handler.expected(op, (x,)) if applies is None or applies(x.dtype) else None
        variable = plain_variable(x)
        if variable is None or (applies is not None and not applies(variable._dtype)):
            return None
        value = value_of(variable, handler)
        if value is None:
            return None
        result = handler.expected(op, (value,))
        return original(value, name) if result is None else result  # the variable has been read

    return unary


def _binary(op: str, path: str, converts: bool = False) -> Callable[..., Any]:
    """Answers a function of two tensors, variables or numbers.

    `converts`: whether TensorFlow converts a number on the right to the dtype of the left side first; else C++ does.
    """
    original = functools.reduce(getattr, path.split("."), tf)

    @passes
    def binary(handler: Handler, x: Any = None, y: Any = None, name: Any = None) -> Any:
        left, right = x, y
        if not _is_tensor(x):
            if type(x) in _NUMBERS:
                if converts or not _is_tensor(y):
                    return None
            else:
                variable = plain_variable(x)
                if variable is None or not (_is_tensor(y) or type(y) in _NUMBERS):
                    return None
                left = value_of(variable, handler)
                if left is None:
                    return None
        if not _is_tensor(y) and (converts or type(y) not in _NUMBERS):
            right = operand_of(left, y, handler)
            if right is None:
                return None if left is x else original(left, y, name)
        result = handler.expected(op, (left, right))
        if result is None and (left is not x or (right is not y and type(y) not in _NUMBERS)):
            return original(left, right, name)
        return result

    return binary


def _floating(dtype: Any) -> bool:
    return bool(dtype.is_floating)


def _real(dtype: Any) -> bool:
    return not dtype.is_complex


def _quotient(handler: Handler, x: Any = None, y: Any = None, name: Any = None) -> Any:
    if name is not None or not _is_tensor(x) or not x.dtype.is_floating:
        return None
    if _is_tensor(y):
        return handler.expected("RealDiv", (x, y)) if y.dtype is x.dtype else None
    if type(y) not in _NUMBERS:
        return None
    divisor = operand_of(x, y, handler)
    return None if divisor is None else handler.expected("RealDiv", (x, divisor))


def _of_last_axis(op: str) -> Callable[..., Any]:
    def answer(handler: Handler, logits: Any = None, axis: Any = None, name: Any = None) -> Any:
        if not _is_tensor(logits):
            return None
        if axis is not None and (type(axis) is not int or (axis != -1 and axis != len(logits._shape_tuple()) - 1)):
            return None
        return handler.expected(op, (logits,))

    return answer


def _leaky_relu(handler: Handler, features: Any = None, alpha: Any = 0.2, name: Any = None) -> Any:
    if not _is_tensor(features) or not features.dtype.is_floating or type(alpha) is not float:
        return None
    return handler.expected("LeakyRelu", (features, "alpha", alpha))


def _reshape(handler: Handler, tensor: Any = None, shape: Any = None, name: Any = None) -> Any:
    if not _is_tensor(tensor) or not (_are_integers(shape) or _is_tensor(shape)):
        return None
    return handler.expected("Reshape", (tensor, shape))


def _expand_dims(handler: Handler, input: Any = None, axis: Any = None, name: Any = None) -> Any:
    if not _is_tensor(input) or type(axis) is not int:
        return None
    return handler.expected("ExpandDims", (input, axis))


def _squeeze(handler: Handler, input: Any = None, axis: Any = None, name: Any = None) -> Any:
    if not _is_tensor(input) or not (axis is None or _are_integers(axis)):
        return None
    return handler.expected("Squeeze", (input, "squeeze_dims", [axis] if type(axis) is int else axis))


def _concat(handler: Handler, values: Any = None, axis: Any = None, name: Any = None) -> Any:
    kind = type(values)
    if (kind is not list and kind is not tuple) or len(values) < 2 or type(axis) is not int:
        return None
    return handler.expected("ConcatV2", (values, axis)) if all(map(_is_tensor, values)) else None


def _stack(handler: Handler, values: Any = None, axis: Any = 0, name: Any = None) -> Any:
    kind = type(values)
    if (kind is not list and kind is not tuple) or not values or type(axis) is not int:
        return None
    return handler.expected("Pack", (values, "axis", axis)) if all(map(_is_tensor, values)) else None


def _add_n(handler: Handler, inputs: Any = None, name: Any = None) -> Any:
    kind = type(inputs)
    if (kind is not list and kind is not tuple) or len(inputs) < 2:
        return None
    return handler.expected("AddN", (inputs,)) if all(map(_is_tensor, inputs)) else None


def _transpose(handler: Handler, a: Any = None, perm: Any = None, conjugate: Any = False, name: Any = None) -> Any:
    if not _is_tensor(a) or conjugate is not False:
        return None
    if perm is None:
        perm = np.arange(len(a._shape_tuple()) - 1, -1, -1, dtype=np.int32)
    elif type(perm) is int or not _are_integers(perm):
        return None
    return handler.expected("Transpose", (a, perm))


def _argmax(
    handler: Handler, input: Any = None, axis: Any = None, output_type: Any = tf.int64, name: Any = None
) -> Any:
    if not _is_tensor(input) or not (axis is None or type(axis) is int) or type(output_type) is not tf.DType:
        return None
    return handler.expected("ArgMax", (input, 0 if axis is None else axis, "output_type", output_type))


def _tile(handler: Handler, input: Any = None, multiples: Any = None, name: Any = None) -> Any:
    if not _is_tensor(input) or type(multiples) is int or not _are_integers(multiples):
        return None
    return handler.expected("Tile", (input, multiples))


def _identity(handler: Handler, input: Any = None, name: Any = None) -> Any:
    if not _is_tensor(input) or input.dtype in _OTHERS:
        return None
    return handler.expected("Identity", (input,))


def _logical(op: str) -> Callable[..., Any]:
    def logical(handler: Handler, x: Any = None, y: Any = None, name: Any = None) -> Any:
        return handler.expected(op, (x, y)) if _is_tensor(x) and _is_tensor(y) else None

    return logical


def _l2_loss(handler: Handler, t: Any = None, name: Any = None) -> Any:
    return handler.expected("L2Loss", (t,)) if _is_tensor(t) else None


def _cumsum(
    handler: Handler, x: Any = None, axis: Any = 0, exclusive: Any = False, reverse: Any = False, name: Any = None
) -> Any:
    if not _is_tensor(x) or type(axis) is not int or type(exclusive) is not bool or type(reverse) is not bool:
        return None
    return handler.expected("Cumsum", (x, axis, "exclusive", exclusive, "reverse", reverse))


def _like(handler: Handler, input: Any = None, dtype: Any = None, name: Any = None, layout: Any = None) -> Any:
    return None  # it fills a shape


def _convolution(
    handler: Handler, input: Any = None, filters: Any = None, strides: Any = None, padding: Any = None,
    data_format: Any = "NHWC", dilations: Any = None, name: Any = None,
) -> Any:  # fmt: skip
    return None  # TensorFlow's Python looks at its strides


def _stop_gradient(handler: Handler, input: Any = None, name: Any = None) -> Any:
    if not _is_tensor(input):
        return None
    with record.stop_recording():
        return handler.expected("StopGradient", (input,))


# Those that convert variables among their first arguments, as many as is said, before anything else: in order, each
# once, and to whatever dtype these have.
CONVERTING: dict[tuple[str, ...], int] = {
    ("abs", "math.abs"): 1, ("add_n", "math.add_n"): 1, ("argmax", "math.argmax"): 1, ("concat",): 1,
    ("cumsum", "math.cumsum"): 1, ("divide", "math.divide"): 2, ("equal", "math.equal"): 2, ("expand_dims",): 1,
    ("identity",): 1, ("nn.conv2d",): 2, ("nn.l2_loss",): 1, ("nn.leaky_relu",): 1,
    ("nn.log_softmax", "math.log_softmax"): 1, ("nn.softmax", "math.softmax"): 1, ("not_equal", "math.not_equal"): 2,
    ("ones_like",): 1, ("reshape",): 1, ("squeeze",): 1, ("stop_gradient",): 1, ("tile",): 1, ("transpose",): 1,
    ("zeros_like",): 1,
    **{(f"reduce_{what}", f"math.reduce_{what}"): 1 for what in ("max", "mean", "min", "prod", "sum")},
}  # fmt: skip

# By public names, the first being where `pickle` finds the function, as in `answers`.
_UNARY: dict[tuple[str, ...], tuple[str, Callable[[Any], bool] | None]] = {
    ("exp", "math.exp"): ("Exp", None),
    ("floor", "math.floor"): ("Floor", None),
    ("math.ceil",): ("Ceil", None),
    ("math.erf",): ("Erf", None),
    ("math.expm1",): ("Expm1", None),
    ("math.is_finite",): ("IsFinite", None),
    ("math.is_nan",): ("IsNan", None),
    ("math.log",): ("Log", None),
    ("math.log1p",): ("Log1p", None),
    ("math.rsqrt",): ("Rsqrt", None),
    ("cos", "math.cos"): ("Cos", None),
    ("sin", "math.sin"): ("Sin", None),
    ("logical_not", "math.logical_not"): ("LogicalNot", None),
    ("math.softplus", "nn.softplus"): ("Softplus", None),
    ("round", "math.round"): ("Round", _floating),
    ("sigmoid", "math.sigmoid", "nn.sigmoid"): ("Sigmoid", None),
    ("sign", "math.sign"): ("Sign", _real),
    ("sqrt", "math.sqrt"): ("Sqrt", None),
    ("square", "math.square"): ("Square", None),
    ("tanh", "math.tanh", "nn.tanh"): ("Tanh", None),
    ("nn.elu",): ("Elu", None),
    ("nn.relu",): ("Relu", None),
    ("nn.relu6",): ("Relu6", None),
    ("nn.selu",): ("Selu", None),
}
_BINARY: dict[tuple[str, ...], tuple[str, bool]] = {
    ("add", "math.add"): ("AddV2", True),
    ("greater", "math.greater"): ("Greater", False),
    ("greater_equal", "math.greater_equal"): ("GreaterEqual", False),
    ("less", "math.less"): ("Less", False),
    ("less_equal", "math.less_equal"): ("LessEqual", False),
    ("math.squared_difference",): ("SquaredDifference", False),
    ("maximum", "math.maximum"): ("Maximum", False),
    ("minimum", "math.minimum"): ("Minimum", False),
    ("multiply", "math.multiply"): ("Mul", False),
    ("pow", "math.pow"): ("Pow", False),
    ("subtract", "math.subtract"): ("Sub", False),
}

SINGLE: dict[tuple[str, ...], Callable[..., Any]] = {
    **{paths: _unary(op, paths[0], applies) for paths, (op, applies) in _UNARY.items()},
    **{paths: _binary(op, paths[0], converts) for paths, (op, converts) in _BINARY.items()},
    ("add_n", "math.add_n"): _add_n,
    ("cumsum", "math.cumsum"): _cumsum,
    ("identity",): _identity,
    ("logical_and", "math.logical_and"): _logical("LogicalAnd"),
    ("logical_or", "math.logical_or"): _logical("LogicalOr"),
    ("nn.conv2d",): _convolution,
    ("nn.l2_loss",): _l2_loss,
    ("ones_like",): _like,
    ("zeros_like",): _like,
    ("argmax", "math.argmax"): _argmax,
    ("concat",): _concat,
    ("divide", "math.divide"): _quotient,
    ("expand_dims",): _expand_dims,
    ("nn.leaky_relu",): _leaky_relu,
    ("nn.log_softmax", "math.log_softmax"): _of_last_axis("LogSoftmax"),
    ("nn.softmax", "math.softmax"): _of_last_axis("Softmax"),
    ("reshape",): _reshape,
    ("squeeze",): _squeeze,
    ("stack",): _stack,
    ("stop_gradient",): _stop_gradient,
    ("tile",): _tile,
    ("transpose",): _transpose,
}
