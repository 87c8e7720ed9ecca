"""Inputs: what an operation was given, put into the forms that recording and following share."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.lazy import LazyTensor, new_lazy
from tracer.op import Const, Signature, freeze
from tracer.private import CompositeTensor, EagerTensor, is_resource_variable, types_pb2
from tracer.spec import INTEGERS, Spec, intern_spec

PLAIN = (int, float, bool, complex, str, bytes, type(None), np.generic, np.ndarray)

# Their output's shape depends on the value of inputs that are no integers.
VALUE_SHAPED = frozenset({"Range", "LinSpace"})

# Their outputs follow from the shape of their input alone.
SHAPE_OPS = frozenset({"Shape", "ShapeN", "Size", "Rank", "VariableShape"})

# A constant above this size, in bytes, is always fed: comparing it would cost more than passing it.
MAX_CONSTANT = 1024

MAX_SHAPE = 16  # elements of an integer tensor that may stand for a shape


class Unsupported(Exception):
    """An input that only TensorFlow itself understands; never leaves the runtime."""


def settle(signature: Signature, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `args` with variables, and lists that contain tensors where one tensor is expected, made tensors.

    TensorFlow's C++ side would do that out of sight, with operations of its own; here they are issued in sight.
    """
    settled: list[Any] | None = None
    for i, is_list in enumerate(signature.lists):
        value = args[i]
        if is_list:
            if isinstance(value, (list, tuple)) and not all(_is_settled(v) for v in value):
                settled = settled or list(args)
                settled[i] = [v if _is_settled(v) else _tensor(signature, i, args, v) for v in value]
        elif not _is_settled(value):
            settled = settled or list(args)
            try:
                settled[i] = _tensor(signature, i, args, value)
            except (TypeError, ValueError, Unsupported):
                continue  # TensorFlow says what is wrong with it
    return args if settled is None else tuple(settled)


def spelled(given: tuple[Any, ...], settled: tuple[Any, ...]) -> dict[int, tuple[Any, Any]]:
    """Returns which constants lists and shapes have become, by input: what they say, and the output of the tensor.

    Given again at the same place, with other inputs that are alike, they become the same.
    """
    found = {}
    for i, (value, tensor) in enumerate(zip(given, settled, strict=True)):
        if value is not tensor and type(tensor) is LazyTensor and tensor._out.const is not None:
            with contextlib.suppress(TypeError):  # one that holds tensors says something else each time
                found[i] = freeze(value), tensor._out
    return found


def as_spelled(spelled: dict[int, tuple[Any, Any]], args: tuple[Any, ...], run: Any) -> tuple[Any, ...]:
    """Returns the arguments with lists and shapes made constants of a call, if they say what they said before."""
    made = list(args)
    for i, (said, out) in spelled.items():
        try:
            if type(args[i]) is LazyTensor or freeze(args[i]) != said:
                return args
        except (IndexError, TypeError):
            return args
        made[i] = lazy = new_lazy(out, -1, run)
        run.constants.append(lazy)
    return tuple(made)


def _tensor(signature: Signature, i: int, args: tuple[Any, ...], value: Any) -> Any:
    enum = None if is_resource_variable(value) else input_enum(signature, i, args, value)  # it has a dtype of its own
    return tf.convert_to_tensor(value, dtype=enum)


def _is_settled(value: Any) -> bool:
    kind = type(value)
    if kind is LazyTensor or kind is EagerTensor:
        return True
    if isinstance(value, PLAIN):
        return True
    # A variable counts as composite too; TensorFlow would read it out of sight.
    return isinstance(value, CompositeTensor) and not is_resource_variable(value)


def input_enum(signature: Signature, i: int, args: tuple[Any, ...], value: Any) -> int | None:
    """Returns the dtype enum that input `i` takes when a Python `value` is given there (None: unknown)."""
    arg = signature.definition.input_arg[i]
    if arg.type:
        return int(arg.type)
    attr = arg.type_attr
    if not attr:
        return None
    count = len(signature.inputs)
    given = args[count:]
    for name, attr_value in zip(given[::2], given[1::2], strict=False):
        if name == attr and attr_value is not None:
            return int(getattr(attr_value, "as_datatype_enum", attr_value))
    for other, candidate in zip(signature.definition.input_arg, args[:count], strict=True):
        if other.type_attr == attr:
            items = candidate if isinstance(candidate, (list, tuple)) else (candidate,)
            for item in items:
                if type(item) is EagerTensor or type(item) is LazyTensor:
                    return int(item._datatype_enum())
    if value is None or has_tensors(value):
        return None
    natural = natural_enum(value)
    for definition in signature.definition.attr:
        if definition.name == attr and definition.HasField("default_value"):
            default = int(definition.default_value.type)
            if natural != default and isinstance(value, (np.ndarray, np.generic)) and _gives(signature, attr):
                return None  # sometimes it is the one and sometimes the other, and the result shows which
            return default if _is_integer(value) else natural
    return natural


def _gives(signature: Signature, attr: str) -> bool:
    """Returns whether a result has the dtype that this attribute says."""
    return any(arg.type_attr == attr for arg in signature.definition.output_arg)


def has_tensors(value: Any) -> bool:
    """Returns whether a tensor or variable is somewhere in a nest of lists."""
    if isinstance(value, (list, tuple)):
        return any(has_tensors(v) for v in value)
    return not isinstance(value, PLAIN)


def _is_integer(value: Any) -> bool:
    array = np.asarray(value)
    return bool(array.dtype.kind in "iu" or array.size == 0)


def natural_enum(value: Any) -> int:
    """Returns the dtype enum that TensorFlow gives to a Python value on its own."""
    kind = np.asarray(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return int(tf.dtypes.as_dtype(kind.dtype).as_datatype_enum)
    return {
        "b": types_pb2.DT_BOOL, "i": types_pb2.DT_INT32, "f": types_pb2.DT_FLOAT, "c": types_pb2.DT_COMPLEX128,
    }.get(kind.dtype.kind, types_pb2.DT_STRING)  # fmt: skip


def python_spec(signature: Signature, i: int, args: tuple[Any, ...], value: Any) -> Spec:
    """Returns the spec of the tensor that TensorFlow makes of a Python value given as input `i`."""
    enum = input_enum(signature, i, args, value)
    if enum is None:
        raise Unsupported(f"the dtype of a Python value is not known for input {signature.inputs[i]!r}")
    try:
        return intern_spec(enum, np.shape(value))
    except ValueError as error:
        raise Unsupported(str(error)) from None


def part_of(const: Const | None, spec: Spec, op: str) -> Any:
    """Returns what matters of an input for its operation's outputs: its value if it is a shape-like constant."""
    if const is not None and (spec.enum in INTEGERS or op in VALUE_SHAPED):
        return const
    return spec


def shape_like(tensor: Any) -> Const | None:
    """Returns the value of an eager tensor that may stand for a shape: few integers. None for others.

    TensorFlow's gradient functions keep such tensors and pass them call after call; their values decide shapes.
    """
    if tensor._datatype_enum() not in INTEGERS or tensor._num_elements() > MAX_SHAPE:
        return None
    return Const(np.asarray(tensor._numpy_internal()))


def array_of(value: Any) -> Any:
    """Returns a tensor's values, or an array as it is.

    NumPy asks a tensor for them, too, but takes no scalar of a dtype that is not its own, such as bfloat16.
    """
    return np.asarray(value.numpy() if isinstance(value, tf.Tensor) else value)


def small(value: Any) -> bool:
    """Returns whether a Python value may be a constant by its size."""
    if type(value) is int or type(value) is float:
        return True
    if isinstance(value, np.ndarray):
        return value.nbytes <= MAX_CONSTANT and value.dtype != object
    if isinstance(value, (list, tuple)):
        try:
            return len(value) <= MAX_CONSTANT // 4 and np.size(value) <= MAX_CONSTANT // 4
        except ValueError:  # of unequal lengths: TensorFlow says so
            return False
    return True


def foldable(op: str, stateful: bool, parts: tuple[Any, ...], outputs: tuple[Spec, ...]) -> bool:
    """Returns whether the outputs follow from shapes and integer constants alone, and are small enough to keep."""
    if not outputs or (stateful and op not in SHAPE_OPS):
        return False
    if any(o.enum not in INTEGERS or o.tensor_shape.num_elements() > MAX_CONSTANT // 8 for o in outputs):
        return False
    return op in SHAPE_OPS or (bool(parts) and all(_all_const(p) for p in parts))


def _all_const(part: Any) -> bool:
    return all(_all_const(p) for p in part) if isinstance(part, tuple) else isinstance(part, Const)
