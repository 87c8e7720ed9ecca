"""Lazy tensor: an eager tensor whose value is not computed yet.

Relies on `ops._EagerTensorBase`, which implements the public methods of an eager tensor on top of a few private ones
(`_numpy_internal`, `_shape_tuple`, `_datatype_enum`, ...), and on `isinstance` consulting `__class__`, so TensorFlow
and Keras take a lazy tensor for an `EagerTensor`. TensorFlow's C++ code does not; `intercept` converts for it.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

from tracer.buffer import export_buffer_of
from tracer.faults import absorbs, passes
from tracer.naming import pass_for
from tracer.op import Const
from tracer.private import EagerTensor, context, ops, pywrap_tfe
from tracer.spec import Spec, spec_of
from tracer.tensor_visits import visit_without_change


class Output:
    """One output of a node: its spec and, if folded from shapes and constants, its value."""

    __slots__ = ("const", "node", "spec")

    def __init__(self, spec: Spec, const: Const | None = None, node: Any = None) -> None:
        self.spec = spec
        self.const = const
        self.node = node

    def __repr__(self) -> str:
        return f"{self.spec!r}" if self.const is None else f"{self.spec!r}={self.const.value!r}"


class LazyTensor(ops._EagerTensorBase):
    """A tensor with a dtype and shape, whose value its run computes when it is first observed.

    It outlives its run: once the run has launched what the value needs, `_value` holds the eager tensor.
    """

    __slots__ = ("_key", "_out", "_run", "_uid", "_value")
    _key: int
    _out: Output
    _run: Any
    _uid: int
    _value: Any

    # A class attribute, not a property: `isinstance` reads it some hundred times per Keras layer.
    __class__ = EagerTensor

    def resolve(self) -> Any:
        """Returns the eager tensor, launching what it needs first."""
        value = self._value
        if value is None:
            const = self._out.const
            if const is not None:
                try:
                    value = eager_constant(const.value, self._out.spec)
                except Exception as error:  # retry: the caller may be TensorFlow's C++ code in the middle of something
                    if not absorbs(error):
                        raise
                    value = eager_constant(const.value, self._out.spec)
                self._value = value
            else:
                try:
                    self._run.force(self)
                except Exception as error:
                    if not self._run.fault(error):
                        raise
                    self._run.force(self)
                value = self._value
        return value

    @passes
    def __bool__(self) -> bool:
        # A loop whose end is known may still be shorter as one on the device.
        if self._value is None and (self._out.const is None or getattr(self._run, "control", None) is not None):
            try:
                return bool(self._run.decide(self, sys._getframe(1)))
            except Exception as error:
                if not self._run.fault(error):
                    raise
        return self.truth()

    @passes
    def truth(self) -> bool:
        """Returns the truth value."""
        truth: bool = super(LazyTensor, type(self)).__bool__(self)
        return truth

    def has_id(self) -> bool:
        """Returns whether the id by which tapes and references know this tensor was ever requested."""
        return hasattr(self, "_uid")

    # The private methods that `_EagerTensorBase` builds on.

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

    def measured(self) -> Spec:
        """Returns the spec with the exact shape, launching what that depends on first."""
        spec = self._out.spec
        if spec.open:
            if self._value is None:
                self._run.measure(self)
            spec = spec_of(self.resolve())
            self._out = Output(spec, None, self._out.node)
        return spec

    @passes
    def _shape_tuple(self) -> Any:
        spec = self._out.spec
        return self.measured().shape if spec.open else spec.shape

    def _rank(self) -> Any:
        return len(self._out.spec.shape)

    def _num_elements(self) -> Any:
        return self.shape.num_elements()

    def _copy_to_device(self, device_name: str) -> Any:
        return self.resolve()._copy_to_device(device_name)

    def _prefer_custom_summarizer(self) -> Any:
        return self.resolve()._prefer_custom_summarizer()

    def _summarize_value(self) -> Any:
        return self.resolve()._summarize_value()

    dtype = property(operator.attrgetter("_out.spec.dtype"))  # C: Keras reads it some hundred times per step

    @property
    @passes
    def shape(self) -> Any:
        """The shape: of a tensor whose size depends on values, these are computed first."""
        spec = self._out.spec
        return self.measured().tensor_shape if spec.open else spec.tensor_shape

    @property
    def device(self) -> Any:
        # Keras' optimizers read it for every gradient; with a single device the answer needs no launch.
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
        return self._value._handle_data if self._value is not None else self.__dict__.get("_held")

    @_handle_data.setter
    def _handle_data(self, data: Any) -> None:
        # TensorFlow copies it between tensors, and sets it on resources, which are never pending, and on variants: the
        # lists that a graph function keeps of a loop for its backward function.
        if data is not None and self._value is None:
            self.__dict__["_held"] = data

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self.resolve())


pass_for(LazyTensor, EagerTensor)
export_buffer_of(LazyTensor, "resolve")
visit_without_change()

# A slot has no class-level default: `new_lazy` sets them all but `_uid`.
_new = LazyTensor.__new__


def new_lazy(out: Output, key: int, run: Any) -> LazyTensor:
    """Returns a lazy tensor for `out`; `key` identifies it within `run`."""
    lazy = _new(LazyTensor)
    lazy._out = out
    lazy._key = key
    lazy._run = run
    lazy._value = None
    return lazy


# Attributes of tensors that mean nothing to programs: ours (`_handle_data`), and a hint that `tf.zeros` leaves.
_HINTS = frozenset({"_held", "_is_zeros_tensor"})


def has_attributes(value: Any) -> bool:
    """Returns whether this is a tensor with attributes that the program or a library has set, as Keras sets masks."""
    return isinstance(value, (EagerTensor, LazyTensor)) and not _HINTS.issuperset(vars(value))


def eager_constant(value: Any, spec: Spec) -> Any:
    """Returns an eager tensor with this value, on the device in scope."""
    ctx = context.context()
    ctx.ensure_initialized()
    return EagerTensor(value.copy(), ctx.device_name, spec.enum)  # a copy, as the tensor shares its memory


def unwrap(value: Any) -> Any:
    """Returns `value` with lazy tensors replaced by their eager tensors, also inside lists and tuples."""
    kind = type(value)
    if kind is LazyTensor:
        return value.resolve()
    if kind is list:
        return [unwrap(v) for v in value]
    if kind is tuple:
        return tuple([unwrap(v) for v in value])
    return value


def has_pending(values: Any) -> bool:
    """Returns whether `values` has a lazy tensor that is not computed yet, also inside lists and tuples."""
    for value in values:
        kind = type(value)
        if kind is LazyTensor:
            if value._value is None and value._out.const is None:
                return True
        elif (kind is list or kind is tuple) and has_pending(value):
            return True
    return False


def has_lazy(values: Any) -> bool:
    """Returns whether `values` has a lazy tensor, also inside lists and tuples."""
    for value in values:
        kind = type(value)
        if kind is LazyTensor or ((kind is list or kind is tuple) and has_lazy(value)):
            return True
    return False
