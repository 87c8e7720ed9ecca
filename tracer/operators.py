"""Operators: arithmetic on lazy tensors, answered before TensorFlow's own Python prepares it.

`a + b` on tensors goes through name scopes, type promotion, conversion and dispatch, 3 us in all, before it issues the
operation. Where the thread's handler knows at once that this very operation on these very tensors comes next, that has
been gone through before, with the same outcome. In every other case TensorFlow's operator is called as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tracer.intercept import current_handler
from tracer.lazy import LazyTensor
from tracer.private import EagerTensor

_OPERATORS = {
    "add": "AddV2", "sub": "Sub", "mul": "Mul", "truediv": "RealDiv",
    "lt": "Less", "le": "LessEqual", "gt": "Greater", "ge": "GreaterEqual",
}  # fmt: skip
_REFLECTED = ("add", "sub", "mul", "truediv")


def _operand(value: Any, other: Any, handler: Any) -> Any:
    """Returns `other` as the tensor that TensorFlow makes of it beside `value`; None where that takes thinking."""
    kind = type(other)
    if kind is LazyTensor or kind is EagerTensor:
        return other
    dtype = value.dtype
    if (kind is float and dtype.is_floating) or (kind is int and dtype in _WIDE and -_LARGEST < other < _LARGEST):
        return handler.constant(other, dtype)
    return None


_WIDE = (tf.float32, tf.float64, tf.int32, tf.int64)
_LARGEST = 1 << 24  # whole numbers below are exact in each of these


def _answered(op: str, operator: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    @functools.wraps(operator)
    def answered(self: Any, other: Any) -> Any:
        handler = current_handler()
        if handler is not None:
            operand = _operand(self, other, handler)
            if operand is not None:
                result = handler.expected(op, (operand, self) if reflected else (self, operand))
                if result is not None:
                    return result
        return operator(self, other)

    return answered


def install() -> None:
    """Gives lazy tensors their operators."""
    for name, op in _OPERATORS.items():
        for slot in (f"__{name}__", f"__r{name}__") if name in _REFLECTED else (f"__{name}__",):
            operator = getattr(LazyTensor.__base__, slot)
            setattr(LazyTensor, slot, _answered(op, operator, slot.startswith("__r")))


install()
