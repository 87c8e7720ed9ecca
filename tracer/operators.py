"""Operators: arithmetic on lazy tensors and indices of tensors, answered before TensorFlow's own Python prepares it.

`a + b` on tensors goes through name scopes, type promotion, conversion and dispatch, 3 us in all, before it issues the
operation; `x[:, t]` makes three tensors of lists on its way, in 100 us. Where the thread's handler knows at once that
this very operation on these very tensors comes next, that has been gone through before, with the same outcome. In
every other case TensorFlow's operator is called as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tracer.intercept import answering_handler
from tracer.lazy import LazyTensor
from tracer.private import EagerTensor, ops

_OPERATORS = {
    "add": "AddV2", "sub": "Sub", "mul": "Mul", "truediv": "RealDiv",
    "lt": "Less", "le": "LessEqual", "gt": "Greater", "ge": "GreaterEqual",
}  # fmt: skip
_REFLECTED = ("add", "sub", "mul", "truediv")
_AS_GIVEN = frozenset({"Sub", "Mul", "Less", "LessEqual", "Greater", "GreaterEqual"})  # these take numbers as they are


def _takes(value: LazyTensor, other: Any) -> bool:
    """Returns whether TensorFlow makes of a number, beside `value`, a tensor of its dtype, without further thinking."""
    if type(other) is float:
        return bool(value.dtype.is_floating)
    return type(other) is int and value._out.spec.enum in _WIDE and -_LARGEST < other < _LARGEST


_WIDE = frozenset(dtype.as_datatype_enum for dtype in (tf.float32, tf.float64, tf.int32, tf.int64))
_LARGEST = 1 << 24  # whole numbers below are exact in each of these


def _answered(op: str, operator: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    as_given = not reflected and op in _AS_GIVEN

    @functools.wraps(operator)
    def answered(self: Any, other: Any) -> Any:
        handler = answering_handler()
        if handler is not None:
            kind, result = type(other), None
            if kind is LazyTensor or kind is EagerTensor:
                result = handler.expected(op, (other, self) if reflected else (self, other))
            elif _takes(self, other):
                if as_given:
                    result = handler.expected(op, (self, other))
                if result is None:
                    made = handler.constant(other, self.dtype)
                    result = handler.expected(op, (made, self) if reflected else (self, made))
            if result is not None:
                return result
        return operator(self, other)

    return answered


def _indexed(operator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operator)
    def indexed(self: Any, index: Any, *rest: Any, **more: Any) -> Any:
        handler = answering_handler()
        if handler is not None:
            given = _slice(index)
            if given is not None:
                begin, end, strides, attrs = given
                bounds = handler.index((tuple(begin), tuple(end), tuple(strides)))
                result = bounds and handler.expected("StridedSlice", (self, *bounds, *attrs))
                if result is not None:
                    return result
        return operator(self, index, *rest, **more)

    return indexed


def _slice(index: Any) -> tuple[list[int], list[int], list[int], tuple[Any, ...]] | None:
    """Returns what TensorFlow makes of an index of numbers, slices, `...` and `None`; None if that takes thinking."""
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


def install() -> None:
    """Gives lazy tensors their operators, and all tensors their indices."""
    base = ops._EagerTensorBase
    base.__getitem__ = _indexed(base.__getitem__)
    for name, op in _OPERATORS.items():
        for slot in (f"__{name}__", f"__r{name}__") if name in _REFLECTED else (f"__{name}__",):
            operator = getattr(LazyTensor.__base__, slot)
            setattr(LazyTensor, slot, _answered(op, operator, slot.startswith("__r")))


install()
