"""Answers: public functions of TensorFlow that issue a single operation, answered before TensorFlow's Python runs.

`tf.cast(x, tf.float32)` spends some 8 us on dispatch, a name scope and conversions before it issues the operation. If
the thread's handler expects exactly this operation on these tensors next, an earlier call went through all that with
the same outcome, and the answer costs 2 us. In every other case TensorFlow's function is called as usual: for arguments
other than tensors and numbers, while recording, and for an operation that may fail inside a `try`.

Relies on which operation each function issues for such arguments; `tests/tracer/test_answers.py` compares them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tracer.faults import absorbs, passes
from tracer.handler import Handler
from tracer.intercept import answering_handler
from tracer.lazy import LazyTensor
from tracer.private import EagerTensor, ResourceVariable
from tracer.single_ops import CONVERTING, SINGLE
from tracer.variables import is_variable, plain_variable, product, rows_of, value_of, with_values

LARGEST = 1 << 24  # integers below are exact in every numeric dtype in use
_SCALARS = {int: tf.int32, float: tf.float32}  # dtypes of tensors made from Python numbers
_NUMERIC = frozenset({int, float})


def _is_tensor(value: Any) -> bool:
    kind = type(value)
    return kind is LazyTensor or kind is EagerTensor


@passes
def _cast(handler: Handler, x: Any = None, dtype: Any = None, name: Any = None) -> Any:
    if type(dtype) is not tf.DType:
        return None
    kind = type(x)
    if kind is ResourceVariable or kind is keras.Variable:
        variable = plain_variable(x)
        # TensorFlow returns the variable itself, or may warn.
        if variable is None or variable._dtype is dtype or variable._dtype.is_complex:
            return None
        value = value_of(variable, handler)
        if value is None:
            return None
        result = handler.expected("Cast", (value, "DstT", dtype, "Truncate", False))
        return _casting(value, dtype) if result is None else result
    if kind is LazyTensor or kind is EagerTensor:
        given = x.dtype
        if given is dtype:
            return x
        if given.is_complex:  # TensorFlow may warn
            return None
    else:
        given = _SCALARS.get(kind)
        if given is None or not -LARGEST < x < LARGEST:
            return None
        x = handler.constant(x, None)
        if given is dtype:
            return x
    return handler.expected("Cast", (x, "DstT", dtype, "Truncate", False))


_casting = tf.cast


def _reduction(op: str) -> Callable[..., Any]:
    def reduce(handler: Handler, x: Any = None, axis: Any = None, keepdims: Any = False, name: Any = None) -> Any:
        if type(keepdims) is not bool or not _is_tensor(x):
            return None
        if axis is None:
            rank = x._rank()
            if not rank:  # TensorFlow computes its axes by another operation
                return None
            axes = handler.index((tuple(range(rank)),))
            if not axes:
                return None
            axis = axes[0]
        elif type(axis) is not int:
            return None
        return handler.expected(op, (x, axis, "keep_dims", keepdims))

    return reduce


def _comparison(op: str) -> Callable[..., Any]:
    def compare(handler: Handler, x: Any = None, y: Any = None, name: Any = None) -> Any:
        if _is_tensor(x):
            if not _is_tensor(y) and type(y) not in _NUMERIC:
                return None
        elif type(x) not in _NUMERIC or not _is_tensor(y):
            return None
        return handler.expected(op, (x, y, "incompatible_shape_error", True))

    return compare


def _check_numerics(handler: Handler, tensor: Any = None, message: Any = None, name: Any = None) -> Any:
    if not _is_tensor(tensor) or type(message) is not str:
        return None
    return handler.expected("CheckNumerics", (tensor, "message", message))


def _abs(handler: Handler, x: Any = None, name: Any = None) -> Any:
    if not _is_tensor(x) or x.dtype.is_complex:
        return None
    return handler.expected("Abs", (x,))


@passes
def _matmul(
    handler: Handler,
    a: Any = None,
    b: Any = None,
    transpose_a: Any = False,
    transpose_b: Any = False,
    adjoint_a: Any = False,
    adjoint_b: Any = False,
    a_is_sparse: Any = False,
    b_is_sparse: Any = False,
    output_type: Any = None,
    grad_a: Any = False,
    grad_b: Any = False,
    name: Any = None,
) -> Any:
    if (adjoint_a, adjoint_b, a_is_sparse, b_is_sparse, output_type, grad_a, grad_b) != _PLAINLY or not _is_tensor(a):
        return None
    if type(transpose_a) is not bool or type(transpose_b) is not bool or a.dtype.is_complex:
        return None
    if _is_tensor(b):
        return product(handler, a, b, transpose_a, transpose_b)
    variable = plain_variable(b)
    if variable is None or variable._dtype is not a.dtype:
        return None
    value = value_of(variable, handler)
    if value is None:
        return None
    result = product(handler, a, value, transpose_a, transpose_b)
    return _product(a, value, transpose_a, transpose_b) if result is None else result  # the variable has been read


_PLAINLY = (False, False, False, False, None, False, False)
_product = tf.linalg.matmul


@passes
def _bias_add(handler: Handler, value: Any = None, bias: Any = None, data_format: Any = None, name: Any = None) -> Any:
    if data_format is not None or not _is_tensor(value):
        return None
    if _is_tensor(bias):
        return handler.expected("BiasAdd", (value, bias, "data_format", None))
    variable = plain_variable(bias)
    if variable is None or variable._dtype is not value.dtype:
        return None
    read = value_of(variable, handler)
    if read is None:
        return None
    result = handler.expected("BiasAdd", (value, read, "data_format", None))
    return _with_bias(value, read) if result is None else result


_with_bias = tf.nn.bias_add


@passes
def _where(handler: Handler, condition: Any = None, x: Any = None, y: Any = None, name: Any = None) -> Any:
    if not _is_tensor(condition) or x is None or y is None:
        return None
    read = with_values((x, y), handler)
    if read is not None:
        x, y = read
    result = None
    if (_is_tensor(x) or _is_tensor(y)) and all(_is_tensor(v) or type(v) in _NUMERIC for v in (x, y)):
        result = handler.expected("SelectV2", (condition, x, y))
    return _selecting(condition, x, y) if result is None and read is not None else result


_selecting = tf.where


def _gather(
    handler: Handler,
    params: Any = None,
    indices: Any = None,
    validate_indices: Any = None,
    axis: Any = None,
    batch_dims: Any = 0,
    name: Any = None,
) -> Any:
    if not _is_tensor(indices) or type(batch_dims) is not int or (axis is not None and type(axis) is not int):
        return None
    axis = batch_dims if axis is None else axis
    if _is_tensor(params):
        # For axis 0 TensorFlow drops `batch_dims`.
        return handler.expected("GatherV2", (params, indices, axis, "batch_dims", batch_dims if axis else 0))
    return rows_of(params, indices, handler) if axis == 0 and is_variable(params) else None


@passes
def _embedding_lookup(
    handler: Handler, params: Any = None, ids: Any = None, max_norm: Any = None, name: Any = None
) -> Any:
    if max_norm is not None:
        return None
    found = _gather(handler, params, ids)
    if found is None:
        return None
    result = handler.expected("Identity", (found,))
    return _with_identity(found) if result is None else result


_with_identity = tf.identity


# By public names, the first being where `pickle` finds the function. Parameters are TensorFlow's, in its order.
_ANSWERS: dict[tuple[str, ...], Callable[..., Any]] = {
    ("abs", "math.abs"): _abs,
    ("cast", "dtypes.cast"): _cast,
    ("debugging.check_numerics",): _check_numerics,
    ("equal", "math.equal"): _comparison("Equal"),
    ("not_equal", "math.not_equal"): _comparison("NotEqual"),
    ("gather",): _gather,
    ("linalg.matmul", "matmul"): _matmul,
    ("nn.embedding_lookup",): _embedding_lookup,
    ("nn.bias_add",): _bias_add,
    ("where",): _where,
}
for _what in ("all", "any", "max", "mean", "min", "prod", "sum"):
    _ANSWERS[f"reduce_{_what}", f"math.reduce_{_what}"] = _reduction(_what.capitalize())
_ANSWERS |= SINGLE


@functools.cache
def answered() -> list[tuple[tuple[str, ...], Any, Any]]:
    """Returns (public names, TensorFlow's function, its replacement) for each function answered here.

    Must first be called before any replacement is installed.
    """
    found = []
    for names, answer in _ANSWERS.items():
        function = functools.reduce(getattr, names[0].split("."), tf)
        found.append((names, function, _answering(function, answer, CONVERTING.get(names, 0))))
    return found


def _answering(function: Any, answer: Callable[..., Any], converts: int) -> Any:
    """Returns a wrapper of `function` that tries `answer` first, if the arguments bind to its parameters.

    `converts`: how many of its first arguments `function` converts to tensors before anything else, variables too.
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    required = sum(parameter.default is inspect.Parameter.empty for parameter in parameters.values())
    # By number of positional arguments: the names that keywords may have.
    later = [frozenset(names[count:]) for count in range(len(names) + 1)]
    theirs = list(inspect.signature(answer).parameters)[1:]
    called = dict(zip(names, theirs, strict=True))

    @passes
    @functools.wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        handler, read = None, False
        try:
            handler = answering_handler()
            if handler is not None:
                if not kwargs:
                    result = answer(handler, *args) if len(args) < len(later) else None
                elif len(args) < len(later) and later[len(args)].issuperset(kwargs):
                    result = answer(handler, *args, **{called[name]: value for name, value in kwargs.items()})
                else:
                    result = None
                if result is not None:
                    return result
                if converts and all(name in kwargs for name in names[len(args) : required]):
                    given = [name for name in names[len(args) : converts] if name in kwargs]
                    taken = (*args[:converts], *(kwargs[name] for name in given))
                    values = with_values(taken, handler, (*args[converts:], *kwargs.values()))
                    if values is not None:  # the variables have been read
                        count = min(len(args), converts)
                        args = (*values[:count], *args[converts:])
                        kwargs = {**kwargs, **dict(zip(given, values[count:], strict=True))}
                        read = True
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        return asking(*args, **kwargs) if read else function(*args, **kwargs)

    return asking
