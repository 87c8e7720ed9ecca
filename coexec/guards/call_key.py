"""Call key: the arguments of a memoized call, in a form that compares equal exactly if the call would do the same.

Tensors are compared by their source in the call, Python values by value, long-lived objects by identity.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.guards.class_lookup import HEAP
from tracer.cursor import Cursor
from tracer.inputs import MAX_SHAPE
from tracer.intercept import make_constant
from tracer.keras_packages import classes
from tracer.lazy import LazyTensor
from tracer.op import Const, freeze
from tracer.private import EagerTensor, KerasFunctional, is_resource_variable
from tracer.spec import Spec, spec_of


class CannotMemoize(Exception):
    """Raised where a call cannot be memoized, as for an argument that cannot be compared; never leaves the runtime."""


class CannotMemoizeForLong(CannotMemoize):
    """Raised for what will hardly be another time: the call is not tried again soon."""


class CannotMemoizeArray(CannotMemoize):
    """Raised for an array argument, which a layer would convert to a tensor."""


class CallArguments:
    """The arguments of one library call: its key, and the tensors among them."""

    def __init__(
        self, cursor: Cursor, objects: Callable[[Any], bool] | None = None, arrays: bool = False, any_size: bool = False
    ) -> None:
        self._of = cursor, objects, arrays
        self._objects = objects  # which of the program's objects to compare by identity: others guard them
        self._arrays = arrays  # whether to compare small arrays by value, which would not be converted to tensors
        self._base = cursor.base
        self._end = cursor.step.end
        self._place = cursor.place
        self._dynamic = any_size or cursor.step.dynamic  # then a region knows at which sizes it holds
        self._constant_of = cursor.constant_of
        self.tensors: list[Any] = []  # lazy tensors of the running segment, constants, else eager ones
        self._numbers: dict[int, int] = {}  # of these, by their ids
        self.given: list[Any] = []  # the same as the program passed them, which is how tapes know them
        self.consts: list[Const | None] = []  # the values of those that operations may treat as constants
        self.anchors: list[Any] = []  # objects compared by identity
        self._inside: set[int] = set()  # ids of tensors whose marks are being keyed

    def anew(self, any_size: bool) -> CallArguments:
        """Returns the same without any arguments yet; `any_size`: for a key without sizes."""
        return CallArguments(*self._of, any_size=any_size)

    def settle(self) -> None:
        """Resolves lazy constants, as effects compare tensors by identity."""
        self.tensors = [v.resolve() if type(v) is LazyTensor and v._out.const is not None else v for v in self.tensors]

    def key(self, value: Any) -> Any:
        """Returns a hashable form of a value, equal exactly if the library would do the same; collects its tensors.

        Called some fifty times a training step, so kinds are cached by type. Raises `CannotMemoize`.
        """
        kind = type(value)
        what = kind_of(value)
        if what is OBJECT:
            self.anchors.append(value)
            return id(value)
        if what is TENSOR:
            marks = value.__dict__ and marks_of(value)
            return self._marked(value, marks) if marks else self._tensor(value)
        if what is SEQUENCE:
            return kind, tuple([self.key(v) for v in value])
        if what is SCALAR:
            return freeze(value)
        if what is DICT:
            return dict, tuple([(self.key(k), self.key(v)) for k, v in value.items()])
        if what is SLICES:
            return "slices", self.key(value.values), self.key(value.indices), self.key(value.dense_shape)
        if what is SPARSE:
            given = self.key(value.indices), self.key(value.values), self.key(value.dense_shape)
            return "sparse", *given, freeze(value.shape)
        if self._objects is not None and kind is MethodType:
            return MethodType, self.key(value.__self__), self.key(value.__func__)
        if is_fixed_class(value):
            return "class", value
        if kind is FunctionType and is_tensorflows(value):
            return "function", value
        if kind is functools.partial:
            return "partial", self.key(value.func), self.key(value.args), self.key(value.keywords)
        if self._arrays and is_short(value):
            return freeze(value)
        if self._objects is not None and self._objects(value):
            self.anchors.append(value)
            return id(value)
        raise (CannotMemoizeArray if kind is np.ndarray else CannotMemoize)(f"an argument is a {kind.__name__}")

    def _tensor(self, value: Any) -> Any:
        """Returns a tensor's key: its source in the call, or its number and spec if it is a constant or new."""
        given = value
        if type(value) is LazyTensor:
            out = value._out
            if out.const is not None:
                # One without a value is no feed either; resolving it would be most of a skipped call's cost.
                real, known = value._value, None
                if real is not None:
                    known = self._place(real)
                number = self._add(value if real is None else real, given, out.const)
                return "constant", known, number, out.spec.enum, self._shape(out.spec)
            place = value._key - self._base
            if value._value is None and 0 <= place < self._end:
                self._add(value, given)
                return "tensor", place
            value = value.resolve()
        feed = self._place(value)
        if feed is not None:
            self._add(value, given, self._constant_of(value))
            return "feed", feed
        spec = spec_of(value)
        return "new", self._add(value, given, self._constant_of(value)), spec.enum, self._shape(spec)

    def _shape(self, spec: Spec) -> Any:
        """Returns what of a tensor's shape is part of the key."""
        return len(spec.shape) if self._dynamic else spec.shape

    def _marked(self, value: Any, marks: dict[str, Any]) -> Any:
        """Returns the key of a tensor with marks, which must not refer back to it."""
        if id(value) in self._inside:
            raise CannotMemoize("a tensor is noted on what is noted on it")
        self._inside.add(id(value))
        found = "marked", self._tensor(value), tuple([(name, self.key(mark)) for name, mark in marks.items()])
        self._inside.discard(id(value))
        return found

    def const(self, number: int) -> Const | None:
        """Returns the value of a tensor that operations may treat as a constant, else None."""
        return self.consts[number]

    def _add(self, value: Any, given: Any, const: Const | None = None) -> int:
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
            self.given.append(given)
            self.consts.append(const)
        return number


class SpecArguments(CallArguments):
    """The same with tensors by their specs, and by which of them are the same.

    Calls with equal keys run the same code, if it reads no values.
    """

    def _tensor(self, value: Any) -> Any:
        spec = value._out.spec if type(value) is LazyTensor else spec_of(value)
        if spec.open:
            raise CannotMemoize("the size of a tensor that it is given depends on values")
        known = value._value if type(value) is LazyTensor else None
        return "spec", self._add(value if known is None else known, value), spec.enum, spec.shape


def is_fixed_class(value: Any) -> bool:
    """Returns whether this is a class that cannot be changed, as `float` or `np.float32`, given as a dtype."""
    return type(value) is type and not value.__flags__ & HEAP


def is_tensorflows(function: FunctionType) -> bool:
    """Returns whether this is a function that a module of TensorFlow's defines, as a window of `tf.signal` is."""
    name = function.__module__  # None in code that was made without one
    module = sys.modules.get(name) if type(name) is str and name.startswith("tensorflow.") else None
    return module is not None and vars(module).get(function.__name__) is function


def is_short(value: Any) -> bool:
    """Returns whether this is an array of a few whole numbers, such as a shape; floats are data.

    (Labels that are 0.0 or 1.0, at each of eight steps in a loop, were known at some and not at others, and each
    mixture was another way for all that follows: 0.8 of eager's time, and 0.2 as data.)
    """
    return type(value) is np.ndarray and value.size <= MAX_SHAPE and value.dtype.kind in "biu"


_SCALARS = (int, float, bool, complex, str, bytes, type(None))


def is_by_identity(kind: type) -> bool:
    """Returns whether objects of this class are compared by identity."""
    return issubclass(kind, (*classes.stateful, keras.Variable, tf.Variable, tf.UnconnectedGradients))


_RESOURCE = "_should_act_as_resource_variable"  # looked up on types, as on values it might run the program's code


# Kinds of values, for keys.
TENSOR, SEQUENCE, DICT, SCALAR, SLICES, SPARSE, OBJECT, OTHER = (
    "tensor", "sequence", "dict", "scalar", "slices", "sparse", "object", "other"
)  # fmt: skip


_WHAT: dict[type, str] = {}


def kind_of(value: Any) -> str:
    """Returns a value's kind, for keys."""
    kind = type(value)
    return _WHAT.get(kind) or _what_is(value, kind)


def _what_is(value: Any, kind: type) -> str:
    if kind is LazyTensor or kind is EagerTensor:
        what = TENSOR
    elif kind is list or kind is tuple:
        what = SEQUENCE
    elif kind is dict:
        what = DICT
    elif issubclass(kind, tf.IndexedSlices):
        what = SLICES
    elif kind is tf.SparseTensor:
        what = SPARSE
    elif kind in _SCALARS or issubclass(kind, (tf.DType, tf.TensorShape, np.dtype, np.number, np.bool_)):
        what = SCALAR
    elif is_by_identity(kind) or (hasattr(kind, _RESOURCE) and is_resource_variable(value)):
        what = OBJECT
    else:
        what = OTHER
    if len(_WHAT) > tuning.max_known_types:
        _WHAT.clear()
    _WHAT[kind] = what
    return what


def marks_of(tensor: Any) -> dict[str, Any]:
    """Returns the attributes that Keras has set on a tensor: its mask, the logits it was computed from."""
    return {name: value for name, value in vars(tensor).items() if value is not None}


def marks_changed(
    tensors: list[Any], before: list[dict[str, Any]], form: Callable[[Any], Any]
) -> list[tuple[int, dict[str, Any]]]:
    """Returns which tensors have other marks than `before`, by number, with the `form` of each mark that changed.

    Attention takes the masks off its arguments, for example.
    """
    found = []
    for number, (tensor, known) in enumerate(zip(tensors, before, strict=True)):
        now = vars(tensor)
        changed = {name: form(now.get(name)) for name in {**known, **now} if now.get(name) is not known.get(name)}
        if changed:
            found.append((number, changed))
    return found


def marks_emptied(tensors: list[Any], before: list[dict[str, Any]]) -> set[tuple[int, str]]:
    """Returns the marks that are None now, and were not there `before`, as numbers of tensors and names.

    That says the same, so the next time they may be there: it is no difference between two runs.
    """
    found = enumerate(zip(tensors, before, strict=True))
    return {(n, name) for n, (v, known) in found for name in vars(v) if vars(v)[name] is None and name not in known}


def with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], labels: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a layer, loss or metric with arrays converted to tensors, as it would do first.

    `labels`: of a function that does so with arrays of integers.
    """
    if labels:
        return _convert(args, _LABELS), _convert(kwargs, _LABELS)
    holder: Any = args[0]
    legacy = isinstance(holder, classes.layers) and not isinstance(holder, keras.layers.Layer)
    wanted: Any = None
    if isinstance(holder, KerasFunctional):
        given = [*args[1:2]] or [kwargs.get("inputs")]
        if _sees_inputs(holder) or not all(type(v) is np.ndarray for v in tf.nest.flatten(given)):
            return args, kwargs
        inputs = _as_inputs(given[0], holder._inputs_struct)
        if any(type(v) is np.ndarray for v in tf.nest.flatten(inputs)):
            return args, kwargs  # Keras refuses tensors beside arrays
        return ((holder, inputs, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "inputs": inputs})
    if isinstance(holder, keras.layers.Layer):
        if not getattr(holder, "_convert_input_args", False):
            return args, kwargs
    elif legacy:  # Keras 2 converts the first argument alone, also if it is given by name
        first: list[str] = holder._call_spec.arg_names[:1]
        if len(args) == 1 and first and first[0] in kwargs:
            return args, {**kwargs, first[0]: _convert(kwargs[first[0]], None)}
        return (holder, *(_convert(v, None) for v in args[1:2]), *args[2:]), kwargs
    else:
        wanted = getattr(holder, "dtype", "")  # NumPy would round other floats

    return _convert(args, wanted), _convert(kwargs, wanted)


def updates_metric(function: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether a metric of Keras is given labels or values, which its own code converts to tensors first."""
    if function.__name__ != "update_state" or not type(args[0]).__module__.startswith("keras.src.metrics."):
        return False
    # `MeanMetricWrapper` passes them on to a function as they are.
    wrapped = getattr(args[0], "_fn", None)
    module = "keras.src.metrics." if wrapped is None else str(getattr(wrapped, "__module__", ""))
    return module.startswith(("keras.src.metrics.", "keras.src.losses."))


# Dtypes of labels that operations take as they are; arrays of others, TensorFlow casts.
_LABELS = frozenset(map(np.dtype, ("int8", "uint8", "int32", "int64")))


def _convert(value: Any, wanted: Any) -> Any:
    """Returns a structure with its arrays as tensors; `wanted`: the dtype that floats must have, or those of all."""
    kind = type(value)
    if kind is np.ndarray and (
        value.dtype in wanted
        if wanted is _LABELS
        else wanted is None or value.dtype.kind in "iub" or value.dtype == wanted
    ):
        return _as_tensor(value, None)
    if kind is list or kind is tuple:
        return kind([_convert(v, wanted) for v in value])
    if kind is dict:
        return {k: _convert(v, wanted) for k, v in value.items()}
    return value


def _as_tensor(array: Any, dtype: Any) -> Any:
    try:
        return make_constant(array, dtype)
    except (TypeError, ValueError):
        return array  # the library raises its own error


# The methods of a functional model that are given its inputs before it has converted them.
_GIVEN_INPUTS = frozenset({
    "_adjust_input_rank", "_assert_input_compatibility", "_convert_inputs_to_tensors",
    "_maybe_warn_inputs_struct_mismatch", "_run_through_graph",
    "_standardize_inputs", "call", "compute_mask",
})  # fmt: skip


def _sees_inputs(model: Any) -> bool:
    """Returns whether code of the program's in a functional model sees its inputs as they are given."""
    kind = type(model)
    if kind is not KerasFunctional and any(
        getattr(kind, name, None) is not getattr(KerasFunctional, name, None) for name in _GIVEN_INPUTS
    ):
        return True
    return not _GIVEN_INPUTS.isdisjoint(vars(model))


def _as_inputs(value: Any, inputs: Any) -> Any:
    """Returns a functional model's inputs with arrays as tensors of the dtypes that the model gives them.

    Only what the model takes as it is: it would name the array in its error, reshape it, or warn of an array in place
    of a list.
    """
    kind = type(value)
    if kind is np.ndarray:
        if isinstance(inputs, (list, tuple, dict)):
            return value
        if len(value.shape) != len(inputs.shape) or not all(
            n in (None, m) for n, m in zip(inputs.shape, value.shape, strict=True)
        ):
            return value
        wanted = tf.as_dtype(inputs.dtype)
        if value.dtype.kind not in "iubf" or not (wanted.is_floating or wanted.is_integer or wanted.is_bool):
            return value
        # Keras converts without a dtype, and casts, if integers or bools are wanted.
        return _as_tensor(value, wanted if wanted.is_floating and value.dtype.kind == "f" else None)
    if kind is dict:
        named = inputs if isinstance(inputs, dict) else {v.name: v for v in inputs} if _is_flat(inputs) else {}
        return {k: _as_inputs(v, named[k]) if k in named else v for k, v in value.items()}
    if (kind is list or kind is tuple) and isinstance(inputs, (list, tuple)) and len(value) == len(inputs):
        return kind([_as_inputs(v, known) for v, known in zip(value, inputs, strict=True)])
    return value


def _is_flat(inputs: Any) -> bool:
    return isinstance(inputs, (list, tuple)) and not any(isinstance(v, (list, tuple, dict)) for v in inputs)
