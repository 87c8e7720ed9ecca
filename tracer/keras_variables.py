"""Keras variables: their arithmetic, and writes to variables, answered before Keras' and TensorFlow's Python runs.

`v * 0.9` on a Keras variable goes through a wrapper for sparse tensors, two conversions and type promotion, in 50 us,
before it issues the operation; `v.assign(x)` converts, compares shapes, casts, and creates an object for the new value,
in 30. Hand-written optimizers, moving averages and soft updates do little else. As with the operators of tensors, the
handler answers if it expects the same operation as in an earlier call; in every other case Keras' own function is
called, with the value if the variable has been read.

Relies on the implementations: `keras_numpy` issues one operation for operands of one dtype, and `KerasVariable.assign`
and `tf.Variable.assign` write a tensor of the variable's dtype and shape without conversion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tracer import hooks
from tracer.faults import absorbs, passes
from tracer.handler import Handler
from tracer.intercept import answering_handler
from tracer.lazy import LazyTensor
from tracer.operators import operand_of
from tracer.private import (
    EagerTensor,
    KerasVariable,
    ResourceVariable,
    gen_resource_variable_ops,
    keras_numpy,
    variable_accessed,
)
from tracer.variables import is_variable, plain_variable, unread, value_of

# By operator: Keras' function, and the operation that it issues for operands of one dtype.
_OPERATORS = {
    "add": ("add", "AddV2"), "sub": ("subtract", "Sub"), "mul": ("multiply", "Mul"),
    "truediv": ("true_divide", "RealDiv"), "pow": ("power", "Pow"),
}  # fmt: skip
_REFLECTED = ("add", "sub", "mul", "truediv")


def _answered(operator: Any, function: Callable[[Any, Any], Any], op: str, reflected: bool) -> Any:
    @passes
    @functools.wraps(operator)
    def answered(self: Any, other: Any) -> Any:
        handler, value = None, None
        try:
            handler = answering_handler()
            if handler is not None:
                variable = plain_variable(self) if type(self) is keras.Variable else None
                if variable is not None and variable._dtype.is_floating and _is_plain(other, variable._dtype):
                    value = value_of(variable, handler)
                    if value is not None:
                        operand = operand_of(value, other, handler)
                        if operand is not None:
                            result = handler.expected(op, (operand, value) if reflected else (value, operand))
                            if result is not None:
                                return result
                            if type(other) is keras.Variable:  # it has been read
                                other = operand
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        if value is not None:
            return function(other, value) if reflected else function(value, other)
        return operator(self, other)

    return answered


def _is_plain(other: Any, dtype: Any) -> bool:
    """Returns whether an operand has a variable's dtype, or is a Python number, which Keras converts to it."""
    kind = type(other)
    if kind is LazyTensor or kind is EagerTensor:
        return other.dtype is dtype
    if kind is float or kind is int:
        return True
    variable = plain_variable(other) if kind is keras.Variable else None
    return variable is not None and variable._dtype is dtype


def _given(variable: Any, value: Any, handler: Handler) -> Any:
    """Returns what a write to a variable is given as a tensor, if it issues only the operation, without an error."""
    if not variable._validate_shape or variable._shape.rank is None:
        return None
    kind = type(value)
    if kind is LazyTensor or kind is EagerTensor:
        fits = value.dtype is variable._dtype and value._shape_tuple() == tuple(variable._shape)
        return value if fits else None
    shape = value.shape if kind is np.ndarray else ()
    return operand_of(variable, value, handler) if kind in _NUMBERS and shape == tuple(variable._shape) else None


_NUMBERS = frozenset({int, float, np.float32, np.float64, np.int32, np.int64, np.ndarray})


def _assigning(assign: Any) -> Any:
    """Wraps Keras' `assign`; the wrapper returns the value, as Keras does, without an object for the new one."""

    @passes
    @functools.wraps(assign)
    def assigning(self: Any, value: Any) -> Any:
        handler, variable, given = None, None, None
        try:
            handler = answering_handler()
            if handler is not None and type(self) is keras.Variable:
                variable = plain_variable(self)
                given = None if variable is None else _given(variable, value, handler)
        except Exception as error:
            given = None
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        if variable is None or given is None:
            return assign(self, value)
        gen_resource_variable_ops.assign_variable_op(variable._handle, given, validate_shape=True)
        variable_accessed(variable)
        return given

    return assigning


def _writing(method: Any, issue: Callable[[Any, Any], Any]) -> Any:
    """Wraps a TensorFlow variable's write."""

    @passes
    @functools.wraps(method)
    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        handler, given, result = None, None, None
        try:
            if len(args) == 1 and not kwargs and is_variable(self):
                handler = answering_handler()
                given = None if handler is None else _given(self, args[0], handler)
            if given is not None:  # what may raise comes before the variable is written
                result = unread(self._handle, self._dtype, self._shape, self._in_graph_mode, self._unique_id)
        except Exception as error:
            given = None
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        if given is None:
            return method(self, *args, **kwargs)
        issue(self._handle, given)
        variable_accessed(self)
        return result

    return writing


_hooks = hooks.HookSet(
    __name__,
    "operators and `assign` of `KerasVariable`; `assign`, `assign_add`, `assign_sub` of `ResourceVariable`",
    "a handler that knows the operation answers it before Keras and TensorFlow prepare it",
    hooks.PROCESS,
)


def install() -> None:
    """Installs the operators of Keras' variables, and the writes of both kinds."""
    for name, (function, op) in _OPERATORS.items():
        for slot in (f"__{name}__", f"__r{name}__") if name in _REFLECTED else (f"__{name}__",):
            made = _answered(getattr(KerasVariable, slot), getattr(keras_numpy, function), op, slot.startswith("__r"))
            _hooks.add(KerasVariable, slot, made)
    _hooks.add(KerasVariable, "assign", _assigning(KerasVariable.assign))
    issued = gen_resource_variable_ops
    for name, issue in (
        ("assign", functools.partial(issued.assign_variable_op, validate_shape=True)),
        ("assign_add", issued.assign_add_variable_op),
        ("assign_sub", issued.assign_sub_variable_op),
    ):
        _hooks.add(ResourceVariable, name, _writing(getattr(ResourceVariable, name), issue))
    _hooks.hold_for_good()


install()
