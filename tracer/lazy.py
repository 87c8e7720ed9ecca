"""Lazy tensor: an eager tensor whose value is still to come.

Relies on `ops._EagerTensorBase`, which expresses the public methods of an eager tensor by a few private ones
(`_numpy_internal`, `_shape_tuple`, `_datatype_enum`, ...), and on `isinstance` asking `__class__`: TensorFlow and
Keras then take a lazy tensor for an `EagerTensor`. TensorFlow's C++ side does not; `intercept` stands in between.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np

from tracer.buffer import export_buffer_of
from tracer.op import Const
from tracer.private import EagerTensor, context, ops, pywrap_tfe
from tracer.spec import Spec

_TYPE_NAME = "'tensorflow.python.framework.ops.EagerTensor'"  # as the C++ type calls itself in messages


class Output:
    """One output of a node: its spec and, where it follows from shapes and constants alone, its value."""

    __slots__ = ("const", "node", "spec")

    def __init__(self, spec: Spec, const: Const | None = None, node: Any = None) -> None:
        self.spec = spec
        self.const = const
        self.node = node

    def __repr__(self) -> str:
        return f"{self.spec!r}" if self.const is None else f"{self.spec!r}={self.const.value!r}"


class LazyTensor(ops._EagerTensorBase):
    """A tensor with dtype and shape, whose value its run computes when somebody reads it.

    It stays valid for ever: after its run has launched what it needs, it holds the eager tensor.
    """

    __slots__ = ("_key", "_out", "_run", "_uid", "_value")
    _key: int
    _out: Output
    _run: Any
    _uid: int
    _value: Any

    # No property: `isinstance` asks for it some hundred times a Keras layer.
    __class__ = EagerTensor

    def resolve(self) -> Any:
        """Returns the eager tensor, launching what it takes to have it."""
        value = self._value
        if value is None:
            const = self._out.const
            if const is not None:
                value = eager_constant(const.value, self._out.spec)
                self._value = value
            else:
                self._run.force(self)
                value = self._value
        return value

    def __bool__(self) -> bool:
        if self._value is None and self._out.const is None:
            return self._run.decide(self, sys._getframe(1))
        return self.truth()

    def truth(self) -> bool:
        """Returns what Python takes the value for."""
        return super(LazyTensor, type(self)).__bool__(self)

    def has_id(self) -> bool:
        """Returns whether somebody has asked for the number that tapes and references know this tensor by."""
        return hasattr(self, "_uid")

    # What `_EagerTensorBase` builds on.

    @property
    def _id(self) -> int:
        try:
            return self._uid
        except AttributeError:
            self._uid = pywrap_tfe.TFE_Py_UID()
            return self._uid

    def _numpy_internal(self) -> Any:
        return self.resolve()._numpy_internal()

    def _datatype_enum(self) -> Any:
        return self._out.spec.enum

    def _shape_tuple(self) -> Any:
        return self._out.spec.shape

    def _rank(self) -> Any:
        return len(self._out.spec.shape)

    def _num_elements(self) -> Any:
        return self._out.spec.tensor_shape.num_elements()

    def _copy_to_device(self, device_name: str) -> Any:
        return self.resolve()._copy_to_device(device_name)

    def _prefer_custom_summarizer(self) -> Any:
        return self.resolve()._prefer_custom_summarizer()

    def _summarize_value(self) -> Any:
        return self.resolve()._summarize_value()

    def __getattr__(self, name: str) -> Any:
        try:
            return super(LazyTensor, type(self)).__getattr__(self, name)
        except AttributeError as error:
            raise AttributeError(str(error).replace("'EagerTensor'", _TYPE_NAME)) from None

    # Getters in C: Keras asks some hundred times a step.
    dtype = property(operator.attrgetter("_out.spec.dtype"))
    shape = property(operator.attrgetter("_out.spec.tensor_shape"))

    @property
    def device(self) -> Any:
        # Keras' optimizers ask each gradient for it; with one device, the answer needs no launch.
        devices = context.context().devices()
        return devices[0] if len(devices) == 1 else self.resolve().device

    @property
    def backing_device(self) -> Any:
        devices = context.context().devices()
        return devices[0] if len(devices) == 1 else self.resolve().backing_device

    @property
    def is_packed(self) -> bool:
        return False

    @property
    def _handle_data(self) -> Any:
        return None

    @_handle_data.setter
    def _handle_data(self, data: Any) -> None:
        # TensorFlow copies it from tensor to tensor; resources, which have some, are never lazy.
        assert data is None

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = np.asarray(self.resolve()._numpy())
        return array if dtype is None else array.astype(dtype)

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self.resolve())


# Error messages name the type.
LazyTensor.__name__ = EagerTensor.__name__
export_buffer_of(LazyTensor, "resolve")

# A lazy tensor has no class-level value for a slot: `new_lazy` fills all of them.
_new = LazyTensor.__new__


def new_lazy(out: Output, key: int, run: Any) -> LazyTensor:
    """Returns a lazy tensor for `out`; `key` names it among the tensors of its run."""
    lazy = _new(LazyTensor)
    lazy._out = out
    lazy._key = key
    lazy._run = run
    lazy._value = None
    return lazy


def eager_constant(value: Any, spec: Spec) -> Any:
    """Returns an eager tensor with this value, on the device in scope."""
    ctx = context.context()
    ctx.ensure_initialized()
    return EagerTensor(value.copy(), ctx.device_name, spec.enum)  # it would share the array's memory


def unwrap(value: Any) -> Any:
    """Returns `value` with lazy tensors, also those in lists and tuples, replaced by their eager tensors."""
    kind = type(value)
    if kind is LazyTensor:
        return value.resolve()
    if kind is list:
        return [unwrap(v) for v in value]
    if kind is tuple:
        return tuple([unwrap(v) for v in value])
    return value


def has_pending(values: Any) -> bool:
    """Returns whether a lazy tensor is among `values` whose value is still to be computed."""
    return any(type(v) is LazyTensor and v._value is None and v._out.const is None for v in values)


def has_lazy(values: Any) -> bool:
    """Returns whether a lazy tensor is among `values`, or in a list or tuple there."""
    for value in values:
        kind = type(value)
        if kind is LazyTensor or ((kind is list or kind is tuple) and has_lazy(value)):
            return True
    return False
