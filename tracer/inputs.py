"""Inputs: the arguments of an operation, normalised for recording and following."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.lazy import LazyTensor, new_lazy
from tracer.op import Const, Signature, array_in, as_array, freeze
from tracer.private import (
    CompositeTensor,
    EagerTensor,
    constant_op,
    context,
    core,
    is_resource_variable,
    types_pb2,
    variable_accessed,
)
from tracer.slow_path import is_issued_by_name, is_read_in_c
from tracer.spec import FOLDED, INTEGERS, RESOURCE, Spec, intern_spec

PLAIN = (int, float, bool, complex, str, bytes, type(None), np.generic, np.ndarray)

# Ops whose output shape depends on the values of inputs of any dtype.
VALUE_SHAPED = frozenset({"Range", "LinSpace"})

# Ops on conditions. Eager loops of TensorFlow's and Keras' (`tf.while_loop` over the time of an RNN) ask at each
# iteration whether a counter has reached a shape, and whether another limit holds, too; `tf.linspace` chooses an axis.
LOGICAL = frozenset({"LogicalAnd", "LogicalOr", "LogicalNot", "Select", "SelectV2"})

# Ops whose output shape depends on data: an array of integers there is a batch, not a size.
DATA_SHAPED = frozenset({
    "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Where", "ListDiff", "DynamicPartition",
    "DenseToSparseSetOperation", "DenseToDenseSetOperation", "RaggedGather",
})  # fmt: skip

# Ops whose output shapes follow from the shapes of their inputs, from attributes, and from the values of the inputs at
# these positions: integers in the others are data, however few.
SHAPED_BY_CONSTANTS = {
    "All": (1,), "Any": (1,), "ArgMax": (1,), "ArgMin": (1,), "BroadcastTo": (1,), "ConcatV2": (-1,),
    "Conv2D": (), "Conv2DBackpropFilter": (1,), "Conv2DBackpropInput": (0,), "Einsum": (), "ExpandDims": (1,),
    "Fill": (0,), "GatherV2": (2,), "Max": (1,), "Mean": (1,), "Min": (1,), "Pack": (), "Prod": (1,), "Reshape": (1,),
    "ResourceGather": (), "SparseSoftmaxCrossEntropyWithLogits": (), "Split": (0,), "Squeeze": (), "Sum": (1,),
    "Tile": (1,), "Transpose": (1,), "Unpack": (), "UnsortedSegmentMax": (2,), "UnsortedSegmentMin": (2,),
    "UnsortedSegmentProd": (2,), "UnsortedSegmentSum": (2,),
}  # fmt: skip

# Ops whose outputs follow from the shape of their input alone.
SHAPE_OPS = frozenset({"Shape", "ShapeN", "Size", "Rank", "VariableShape"})

# In bytes. Larger constants are always fed: comparing one would cost more than passing it.
MAX_CONSTANT = 1024
_LARGEST = float(np.finfo(np.float32).max)

_make = constant_op.convert_to_eager_tensor  # the original function, past the hook, so that no handler sees it
NATURAL = {  # dtypes of Python values; that of an `int` depends on its size
    bool: types_pb2.DT_BOOL, float: types_pb2.DT_FLOAT, complex: types_pb2.DT_COMPLEX128, str: types_pb2.DT_STRING,
    bytes: types_pb2.DT_STRING,
}  # fmt: skip

MAX_SHAPE = 16  # elements in an integer tensor that may be used as a shape


class Unsupported(Exception):
    """An input whose form only TensorFlow understands; never leaves the runtime."""


def handles_in(inputs: Any) -> Iterator[Any]:
    """Yields the handles of the variables that an operation uses, also of those that C++ is to read for it."""
    for value in inputs:
        if isinstance(value, (list, tuple)):
            yield from handles_in(value)
            continue
        handle: Any = getattr(value, "_handle", None) if is_resource_variable(value) else value
        if type(handle) is EagerTensor and handle._datatype_enum() == RESOURCE:
            yield handle


def settle(signature: Signature, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `args` with variables, and lists holding tensors where one tensor is expected, converted to tensors.

    A tensor where a list is expected becomes the list of its rows. TensorFlow's C++ code would convert them with
    operations that no hook sees; here those go through the hooks.
    """
    settled: list[Any] | None = None
    for i, is_list in enumerate(signature.lists):
        value = args[i]
        if not is_list and (type(value) is EagerTensor or type(value) is LazyTensor):
            continue
        try:
            if not is_list:
                made = value if _is_settled(value) else _tensor(signature, i, tuple(settled or args), value)
            elif isinstance(value, (list, tuple)) and not all(_is_settled(v) for v in value):
                made = _tensors(signature, i, args, value)
            elif isinstance(value, tf.Tensor):
                made = list(value)
            else:
                continue
        except Unsupported:
            continue
        except (TypeError, ValueError, tf.errors.OpError) as error:
            if not is_list and not is_issued_by_name(signature, args):
                break  # TensorFlow reports the error; a later input's dtype, fixed here, could let it pass
            # TensorFlow's slow path reports it. Each item of a list has a dtype of its own, which could be taken for
            # that of the operation.
            raise core._FallbackException("inputs that cannot be converted") from error
        if made is not value:
            settled = settled or list(args)
            settled[i] = made
    if settled is None:
        return args
    if any(map(is_resource_variable, args)) and _is_refused(signature, args, settled):
        raise core._FallbackException("a variable of another dtype")
    return tuple(settled)


def _is_refused(signature: Signature, args: tuple[Any, ...], settled: list[Any]) -> bool:
    """Returns whether TensorFlow's slow path takes these, and a variable is not of the first input's dtype."""
    if not is_issued_by_name(signature, args):
        return False
    for i, (arg, value) in enumerate(zip(signature.definition.input_arg, args, strict=False)):
        if not arg.type_attr or not isinstance(settled[i], tf.Tensor) or not is_resource_variable(value):
            continue
        enum = said_enum(signature, i, args)
        if enum is None:
            alike = (n for n, other in enumerate(signature.definition.input_arg) if other.type_attr == arg.type_attr)
            first = settled[next(alike)]
            enum = first._datatype_enum() if isinstance(first, tf.Tensor) else natural_enum(first)
        if enum != settled[i]._datatype_enum():
            return True
    return False


def spelled(given: tuple[Any, ...], settled: tuple[Any, ...]) -> dict[int, tuple[Any, Any]]:
    """Returns, by input, the frozen value and the output of each list or shape that `settle` made a constant.

    The same value at the same step, with the same other inputs, becomes the same constant.
    """
    found = {}
    for i, (value, tensor) in enumerate(zip(given, settled, strict=True)):
        if value is not tensor and type(tensor) is LazyTensor and tensor._out.const is not None:
            with contextlib.suppress(TypeError):  # a list that holds tensors differs on each call
                found[i] = freeze(value), tensor._out
    return found


def as_spelled(spelled: dict[int, tuple[Any, Any]], args: tuple[Any, ...], run: Any) -> tuple[Any, ...]:
    """Returns `args` with lists and shapes replaced by the constants in `spelled`, if all have their earlier values.

    The new lazy tensors are appended to `run.constants`.
    """
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
    """Converts a variable or list to a tensor of the dtype that TensorFlow's C++ code would choose.

    An attribute's default dtype is a preference: tensors are cast to it, and Python numbers converted if that is
    lossless.
    """
    if is_read_in_c(value):
        if getattr(value, "_cached_value", None) is None:
            return tf.convert_to_tensor(value)
        variable_accessed(value)  # C++ reads it past what a caching device holds
        return tf.raw_ops.ReadVariableOp(resource=value._handle, dtype=value._dtype)
    enum = said_enum(signature, i, args)
    if is_resource_variable(value):  # of Keras: Python converts it, to the dtype of the others or not at all
        return tf.convert_to_tensor(value, dtype=enum)
    default = _default_enum(signature, signature.definition.input_arg[i].type_attr) if enum is None else None
    if default is None:
        return tf.convert_to_tensor(value, dtype=enum)
    _refuse_uneven(value)
    packed = has_tensors(value)
    if not packed and not (default == types_pb2.DT_COMPLEX64 and _has_complex(value)):
        with contextlib.suppress(TypeError, ValueError):
            return tf.convert_to_tensor(value, dtype=default)
    tensor = tf.convert_to_tensor(value)
    if default in INTEGERS:
        packed = tensor.dtype == tf.bool or (packed and not _has_floats(value))
    return tf.cast(tensor, default) if packed else tensor


def _tensors(signature: Signature, i: int, args: tuple[Any, ...], values: Any) -> list[Any]:
    """Converts variables and lists in a list of inputs; the first item decides a dtype that no tensor fixes."""
    shared = signature.definition.input_arg[i].type_attr
    enum = said_enum(signature, i, args) if shared else None
    made = []
    for value in values:
        if _is_settled(value):
            made.append(value)
        elif enum is None or is_read_in_c(value):
            made.append(_tensor(signature, i, args, value))
        else:
            made.append(tf.convert_to_tensor(value, dtype=enum))
        if shared and enum is None:
            enum = made[-1]._datatype_enum() if isinstance(made[-1], tf.Tensor) else natural_enum(made[-1])
    return made


def _has_complex(value: Any) -> bool:
    """Returns whether a nest of lists contains a complex number of Python's: TensorFlow makes it complex128."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_complex, value))
    return type(value) is complex


def _refuse_uneven(value: Any) -> None:
    """Raises `Unsupported` for a list that mixes bools with numbers, has NumPy's bools, or integers beyond 32 bits.

    Converted to the dtype that TensorFlow prefers, bools would count as numbers, and integers would be cut;
    TensorFlow's Python refuses the former, and chooses another dtype for the latter.
    """
    if _is_uneven(value):
        raise Unsupported("a list mixes bools with numbers, has NumPy's bools, or integers beyond 32 bits")


def _is_uneven(value: Any) -> bool:
    if type(value) is not list and type(value) is not tuple:
        return False
    bools = numbers = False
    for item in value:
        kind = type(item)
        if kind is int:
            if not -(1 << 31) <= item < 1 << 31:
                return True
            numbers = True
        elif kind is float:
            numbers = True
        elif kind is bool:
            bools = True
        elif _is_uneven(item) or (isinstance(item, (np.ndarray, np.generic)) and item.dtype.kind == "b"):
            return True
    return bools and numbers


def _is_settled(value: Any) -> bool:
    kind = type(value)
    if kind is LazyTensor or kind is EagerTensor:
        return True
    if isinstance(value, PLAIN):
        return True
    # A variable is a composite too, but TensorFlow would read it past the hooks.
    return isinstance(value, CompositeTensor) and not is_resource_variable(value)


def input_enum(signature: Signature, i: int, args: tuple[Any, ...], value: Any) -> int | None:
    """Returns the dtype enum of input `i` if a Python `value` is passed there; None if unknown."""
    said = said_enum(signature, i, args)
    attr = signature.definition.input_arg[i].type_attr
    if said is not None or not attr or value is None or has_tensors(value):
        return said
    natural = natural_enum(value)
    default = _default_enum(signature, attr)
    if default is None:
        return natural
    _refuse_uneven(value)
    if natural != default and isinstance(value, (np.ndarray, np.generic)) and _gives(signature, attr):
        return None  # either dtype is possible; only the result shows which
    return default if _is_integer(value) else natural


def said_enum(signature: Signature, i: int, args: tuple[Any, ...]) -> int | None:
    """Returns the dtype enum of input `i` if the definition, an attribute or another input fixes it, else None."""
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
    for other, is_list, candidate in zip(signature.definition.input_arg, signature.lists, args[:count], strict=True):
        if other.type_attr == attr:
            items = candidate if is_list and isinstance(candidate, (list, tuple)) else (candidate,)
            for item in items:
                if type(item) is EagerTensor or type(item) is LazyTensor:
                    return int(item._datatype_enum())
    # Without a tensor, the first Python value decides.
    for j, (other, value) in enumerate(zip(signature.definition.input_arg[:i], args, strict=False)):
        if other.type_attr == attr and isinstance(value, (*PLAIN, list, tuple)) and value is not None:
            return natural_enum(value) if signature.lists[j] else input_enum(signature, j, args, value)
    return None


def _default_enum(signature: Signature, attr: str) -> int | None:
    """Returns the default dtype enum of an attribute, or None."""
    for definition in signature.definition.attr:
        if definition.name == attr and definition.HasField("default_value"):
            return int(definition.default_value.type)
    return None


def _gives(signature: Signature, attr: str) -> bool:
    """Returns whether an output has the dtype of this attribute."""
    return any(arg.type_attr == attr for arg in signature.definition.output_arg)


def has_tensors(value: Any) -> bool:
    """Returns whether a nest of lists contains a tensor or variable."""
    if isinstance(value, (list, tuple)):
        return any(has_tensors(v) for v in value)
    return not isinstance(value, PLAIN)


def _has_floats(value: Any) -> bool:
    """Returns whether a nest of lists contains a Python float."""
    if isinstance(value, (list, tuple)):
        return any(_has_floats(v) for v in value)
    return isinstance(value, (float, np.floating))


def _is_integer(value: Any) -> bool:
    """Whether TensorFlow accepts a value for an integer default dtype: arrays and NumPy's scalars are cast."""
    array = np.asarray(value)
    kinds = "iubf" if isinstance(value, (np.ndarray, np.generic)) else "iub"
    return bool(array.dtype.kind in kinds or array.size == 0)


def natural_enum(value: Any) -> int:
    """Returns the dtype enum that TensorFlow gives a Python value on its own. Raises `Unsupported` if it takes none."""
    kind = type(value)
    enum: int | None = NATURAL.get(kind)
    if enum is not None:
        return enum
    if kind is int and -(1 << 31) <= value < 1 << 31:
        return int(types_pb2.DT_INT32)
    try:
        if isinstance(value, (np.ndarray, np.generic)):
            return int(tf.dtypes.as_dtype(value.dtype).as_datatype_enum)
        # Integers that need 64 bits, and lists, whose first item may have a NumPy dtype.
        return int(_make(value, context.context())._datatype_enum())
    except (TypeError, ValueError) as error:
        raise Unsupported(str(error)) from None


def python_spec(signature: Signature, i: int, args: tuple[Any, ...], value: Any) -> Spec:
    """Returns the spec of the tensor that a Python value becomes as input `i`, or raises `Unsupported`."""
    enum = input_enum(signature, i, args, value)
    if enum is None:
        raise Unsupported(f"the dtype of a Python value is not known for input {signature.inputs[i]!r}")
    try:
        return intern_spec(enum, np.shape(value))
    except ValueError as error:
        raise Unsupported(str(error)) from None


def part_of(const: Const | None, spec: Spec, op: str) -> Any:
    """Returns what an operation's outputs depend on of one input: the value of a shape-like constant, else its spec."""
    if const is not None and (spec.enum in INTEGERS or op in VALUE_SHAPED or op in LOGICAL):
        return const
    return spec


def shape_like(tensor: Any) -> Const | None:
    """Returns the value of an eager tensor that may be used as a shape: a small integer tensor. None for others.

    TensorFlow's gradient functions cache such tensors and pass them on every call; their values decide shapes.
    """
    if tensor._datatype_enum() not in INTEGERS or tensor._num_elements() > MAX_SHAPE:
        return None
    return Const(array_in(tensor))


def array_of(value: Any) -> Any:
    """Returns a tensor's value as an array; arrays as they are.

    `np.asarray` of a tensor would fail for scalars of a foreign dtype such as bfloat16.
    """
    return as_array(value.numpy() if isinstance(value, tf.Tensor) else value)


_LARGE = 1 << 16  # bytes of an array
_ALIGNED = 64  # a tensor may share the memory of an array that begins at a multiple of these bytes


def is_large(value: Any) -> bool:
    """Returns whether this is an array of numbers that takes long to copy."""
    return value.__class__ is np.ndarray and value.nbytes >= _LARGE and value.dtype.kind in "biufc"


def aligned_copy(array: Any) -> np.ndarray[Any, Any]:
    """Returns a copy of an array that a tensor can share."""
    memory = np.empty(array.nbytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    own: np.ndarray[Any, Any] = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(own, array)
    return own


def overflows(value: Any) -> bool:
    """Returns whether this is a number beyond float32, for which TensorFlow raises unless it is told the dtype."""
    return type(value) is float and _LARGEST < abs(value) < math.inf


def small(value: Any) -> bool:
    """Returns whether a Python value is small enough to be a constant."""
    kind = type(value)
    if kind is int or kind is float:
        return kind is int or not overflows(value)
    if kind is bytes or kind is str:
        return len(value) <= MAX_CONSTANT
    if isinstance(value, np.ndarray):
        return value.nbytes <= MAX_CONSTANT and value.dtype != object
    if isinstance(value, (list, tuple)):
        try:
            return len(value) <= MAX_CONSTANT // 4 and np.size(value) <= MAX_CONSTANT // 4
        except ValueError:  # ragged: TensorFlow reports it
            return False
    return True


def foldable(op: str, stateful: bool, parts: tuple[Any, ...], outputs: tuple[Spec, ...]) -> bool:
    """Returns whether the outputs follow from shapes and integer constants alone, and are small enough to keep."""
    if not outputs or (stateful and op not in SHAPE_OPS):
        return False
    for spec in outputs:  # (asked for each operation recorded, and answered by the first of most)
        if spec.enum not in FOLDED or math.prod(spec.shape) > MAX_CONSTANT // 8:
            return False
    return op in SHAPE_OPS or (bool(parts) and all(map(_all_const, parts)))


def _all_const(part: Any) -> bool:
    return all(map(_all_const, part)) if isinstance(part, tuple) else isinstance(part, Const)


def indexes_known(op: str, parts: Sequence[Any], outside: Container[Any]) -> bool:
    """Returns whether an operation takes items of a tensor whose value is known, such as a shape.

    The items are known, too, if the indices are: they are no numbers of the program's that change, even if others come
    in this turn of a loop after other choices. (Fed, they were read in each call of a dropout, and cut its segment.)
    """
    return op == "StridedSlice" and bool(parts) and isinstance(parts[0], Const) and 0 not in outside
