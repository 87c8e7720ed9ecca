"""Operators: arithmetic and indexing of tensors and variables, answered before TensorFlow's Python runs.

`a + b` on tensors goes through name scopes, type promotion, conversion and dispatch, 3 us in all, before it issues the
operation; `x[:, t]` converts three lists to tensors first, in 100 us. If the thread's handler expects exactly this
operation on these tensors next, an earlier call went through all that with the same outcome. In every other case
TensorFlow's operator is called as usual.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tracer import hooks
from tracer.faults import absorbs, passes
from tracer.handler import Handler
from tracer.intercept import answering_handler
from tracer.lazy import LazyTensor
from tracer.private import EagerTensor, ResourceVariable, context, ops
from tracer.variables import is_variable, plain_variable, product, value_of

_OPERATORS = {
    "add": "AddV2", "sub": "Sub", "mul": "Mul", "truediv": "RealDiv",
    "pow": "Pow", "lt": "Less", "le": "LessEqual", "gt": "Greater", "ge": "GreaterEqual",
}  # fmt: skip
_REFLECTED = ("add", "sub", "mul", "truediv")
_UNCONVERTED = ("sub", "mul", "pow", "lt", "le", "gt", "ge")  # a number on the right is converted by TensorFlow's C++


def operand_of(value: Any, other: Any, handler: Handler) -> Any:
    """Returns `other` as the tensor that TensorFlow converts it to in an operation with `value`; None if in doubt."""
    kind = type(other)
    if kind is LazyTensor or kind is EagerTensor:
        return other
    dtype = value.dtype
    if kind is ResourceVariable or kind is keras.Variable:
        variable = plain_variable(other)
        return value_of(variable, handler) if variable is not None and variable._dtype is dtype else None
    number = other
    if kind in _OF_NUMPY and not _promotes():  # TensorFlow converts them as it does Python's numbers
        number = other.item()
        kind = type(number)
    if (kind is float and dtype.is_floating) or (kind is int and dtype in _WIDE and -_LARGEST < number < _LARGEST):
        return handler.constant(other, dtype)
    if kind is np.ndarray and _ARRAYS.get(other.dtype.char) is dtype and not _promotes():
        return handler.constant(other, dtype)
    return None


def _promotes() -> bool:
    """Returns whether the program has asked for NumPy's promotion of types, or a like one."""
    return bool(ops.is_numpy_style_type_promotion() or ops.is_auto_dtype_conversion_enabled())


# The files whose code compares attributes. (That of control flow compares tensors for the program.)
_COMPARING = frozenset(
    os.path.join(os.path.dirname(__file__), f"{name}.py") for name in ("cursor", "graph", "op", "merge", "seeds")
)
_TENSORS = (LazyTensor, EagerTensor)
_READ = (ResourceVariable, keras.Variable, np.ndarray)  # operands that are not to be converted twice
_NUMBERS = frozenset({int, float, np.float64})  # the last is a subclass of `float`
_OF_NUMPY = frozenset({np.float32, np.float64, np.int32, np.int64})
_ARRAYS = {"f": tf.float32, "d": tf.float64, "i": tf.int32, "l": tf.int64}
_WIDE = (tf.float32, tf.float64, tf.int32, tf.int64)
_LARGEST = 1 << 24  # integers below are exact in all of these


def _answered(
    op: str, operator: Callable[[Any, Any], Any], reflected: bool, unconverted: bool
) -> Callable[[Any, Any], Any]:
    @passes
    @functools.wraps(operator)
    def answered(self: Any, other: Any) -> Any:
        handler = None
        try:
            handler = answering_handler()
            if handler is not None:
                number = unconverted and type(other) in _NUMBERS and (type(other) is not np.float64 or not _promotes())
                operand = other if number else operand_of(self, other, handler)
                if operand is not None:
                    result = handler.expected(op, (operand, self) if reflected else (self, operand))
                    if result is not None:
                        return result
                    if type(other) in _READ:
                        other = operand
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        return operator(self, other)

    return answered


def _multiplied(operator: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    @passes
    @functools.wraps(operator)
    def multiplied(self: Any, other: Any) -> Any:
        handler = None
        try:
            handler = answering_handler()
            if handler is not None and type(other) is not float and type(other) is not int:
                operand = operand_of(self, other, handler)
                if operand is not None:
                    factors = (operand, self) if reflected else (self, operand)
                    result = product(handler, *factors, False, False)
                    if result is not None:
                        return result
                    if type(other) in _READ:
                        other = operand
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        return operator(self, other)

    return multiplied


def _indexed(operator: Callable[..., Any]) -> Callable[..., Any]:
    @passes
    @functools.wraps(operator)
    def indexed(self: Any, index: Any, *rest: Any, **more: Any) -> Any:
        handler = None
        try:
            handler = answering_handler()
            if handler is not None:
                given = _slice(index)
                if given is not None:
                    begin, end, strides, attrs = given
                    bounds = handler.index((tuple(begin), tuple(end), tuple(strides)))
                    result = bounds and handler.expected("StridedSlice", (self, *bounds, *attrs))
                    if result is not None:
                        return result
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        return operator(self, index, *rest, **more)

    return indexed


def _sliced(operator: Callable[..., Any]) -> Callable[..., Any]:
    @passes
    @functools.wraps(operator)
    def sliced(self: Any, index: Any) -> Any:
        handler, value, result = None, None, None
        try:
            handler = answering_handler()
            if handler is not None and is_variable(self):
                given = _slice(index)
                value = None if given is None else value_of(self, handler)
                if given is not None and value is not None:
                    begin, end, strides, attrs = given
                    assign = _assignment(self, *given)
                    bounds = handler.index((tuple(begin), tuple(end), tuple(strides)))
                    result = handler.expected("StridedSlice", (value, *bounds, *attrs)) if bounds else None
                    if result is not None:
                        result.assign = assign
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        if result is not None:
            return result
        return operator(self, index) if value is None else tf.__operators__.getitem(value, index, self)

    return sliced


def _assignment(
    variable: Any, begin: list[int], end: list[int], strides: list[int], attrs: tuple[Any, ...]
) -> Callable[..., Any]:
    """Returns the method `assign` that TensorFlow gives to a slice of a variable."""
    scope = context.context().scope_name

    def assign(val: Any, name: Any = None) -> Any:
        masks = dict(zip(attrs[::2], attrs[1::2], strict=True))
        bounds = {"begin": tf.constant(begin), "end": tf.constant(end), "strides": tf.constant(strides)}
        name = f"{scope}strided_slice/_assign" if name is None else name  # errors end with it
        return variable._strided_slice_assign(**bounds, value=val, name=name, **masks)

    return assign


def _slice(index: Any) -> tuple[list[int], list[int], list[int], tuple[Any, ...]] | None:
    """Returns begin, end, strides and masks for an index of ints, slices, `...` and `None`; None for any other one."""
    begin, end, strides = [], [], []
    begins = ends = ellipses = new = shrinks = 0
    bit = 1
    for item in index if type(index) is tuple else (index,):
        if type(item) is int and -_LARGEST < item < _LARGEST:
            begin.append(item)
            end.append(item + 1)
            strides.append(1)
            shrinks |= bit
        elif type(item) is slice and _is_plain(item.start) and _is_plain(item.stop) and _is_plain(item.step):
            begin.append(item.start or 0)
            end.append(item.stop or 0)
            strides.append(1 if item.step is None else item.step)
            begins |= bit if item.start is None else 0
            ends |= bit if item.stop is None else 0
        elif item is None or item is Ellipsis:
            begin.append(0)
            end.append(0)
            strides.append(1)
            if item is None:
                new |= bit
            else:
                ellipses |= bit
        else:
            return None
        bit *= 2
    if not begin:
        return None
    return begin, end, strides, (
        "begin_mask", begins, "end_mask", ends, "ellipsis_mask", ellipses, "new_axis_mask", new,
        "shrink_axis_mask", shrinks,
    )  # fmt: skip


def _is_plain(bound: Any) -> bool:
    return bound is None or (type(bound) is int and -_LARGEST < bound < _LARGEST)


def _of_variable(slot: str, operator: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    tensors = getattr(LazyTensor, slot)

    @passes
    @functools.wraps(operator)
    def answered(self: Any, *args: Any, **kwargs: Any) -> Any:
        handler, value = None, None
        try:
            handler = answering_handler()
            if handler is not None and is_variable(self):
                value = value_of(self, handler)
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        if value is not None:
            return tensors(value, *args, **kwargs)
        return operator(self, *args, **kwargs)

    return answered


def _compared(op: str, operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns `==` or `!=` that issues no operation where an operation is matched, by its attributes, too.

    The program may give a tensor or a variable as one (`tf.one_hot(x, 3, axis=tensor)`).
    """

    @passes
    @functools.wraps(operator)
    def compared(self: Any, other: Any) -> Any:
        if sys._getframe(1).f_code.co_filename in _COMPARING:
            return NotImplemented
        handler = None
        try:
            kind = type(other)
            if type(self) in _TENSORS and (kind in _TENSORS or kind is int or kind is float) and self._USE_EQUALITY:
                handler = answering_handler()
                if handler is not None:
                    result = handler.expected(op, (self, other, "incompatible_shape_error", False))
                    if result is not None:
                        return result
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        return operator(self, other)

    return compared


_hooks = hooks.HookSet(
    __name__,
    "operators and `__getitem__` of `ops._EagerTensorBase` and `ResourceVariable`, `==` and `!=` of these "
    "and of Keras' variables",
    "a handler that knows the operation answers it before TensorFlow prepares it; matching an operation issues none",
    hooks.PROCESS,
)


def install() -> None:
    """Installs the operators of tensors and variables, and tensor indexing."""
    base = ops._EagerTensorBase
    _hooks.add(base, "__getitem__", _indexed(base.__getitem__))
    for name, op in _OPERATORS.items():
        for slot in (f"__{name}__", f"__r{name}__") if name in _REFLECTED else (f"__{name}__",):
            unconverted = name in _UNCONVERTED and not slot.startswith("__r")
            _hooks.add(base, slot, _answered(op, getattr(base, slot), slot.startswith("__r"), unconverted))
    for slot in ("__matmul__", "__rmatmul__"):
        _hooks.add(base, slot, _multiplied(getattr(base, slot), slot.startswith("__r")))
    _hooks.hold_for_good()  # before those of variables, which build on them
    _hooks.add(ResourceVariable, "__getitem__", _sliced(ResourceVariable.__getitem__))
    for slot in [name for target, name in _hooks.entries() if target is base and name != "__getitem__"]:
        _hooks.add(ResourceVariable, slot, _of_variable(slot, getattr(ResourceVariable, slot)))
    for kind in (base, ResourceVariable, keras.Variable):
        for slot, op in (("__eq__", "Equal"), ("__ne__", "NotEqual")):
            if hasattr(kind, slot):
                _hooks.add(kind, slot, _compared(op, getattr(kind, slot)))


install()
