"""Results of any kind as plain data that can be compared, and a comparison that says where two differ."""

import dataclasses
import enum
import re
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tracer.op import as_array

ATOMS = (type(None), bool, int, str, bytes, type, range, slice, tf.DType, tf.TensorShape, np.dtype, type(...))
# TensorFlow prefixes op errors with the graph node that wraps an eager kernel, ends them with an empty name,
# numbers the Python and graph functions of a process, and appends the traceback of those that failed.
DECORATION = re.compile(
    r"\{\{.*?\}\} ?|,? ?name: \w*(?=$|\x1b)|(?<=pyfunc_)\d+|(?<=__inference_)[^\]\s]+|(?<=__forward_)[^\]\s]+"
    r"|^Traceback .*",
    re.MULTILINE | re.DOTALL,
)
ADDRESS = re.compile(r" at 0x\w+")


@dataclasses.dataclass(frozen=True)
class Array:
    """The numbers of a tensor, a variable or an array. `kind` is the Python type that a program can see."""

    kind: str
    dtype: str
    shape: tuple
    values: np.ndarray = dataclasses.field(repr=False)

    def __str__(self):
        values = np.array2string(self.values, threshold=20, precision=9)
        return f"{self.kind} {self.dtype}{list(self.shape)} {values}"


@dataclasses.dataclass(frozen=True)
class Node:
    """Anything that has parts, by name."""

    kind: str
    parts: dict


def snapshot(value: Any, inside: tuple = ()) -> Any:
    """`value` as atoms, floats, `Array`s and `Node`s; pending values are waited for."""
    if isinstance(value, ATOMS):
        return value if type(value) in ATOMS else Node(kind_of(value), {"": repr(value)})
    if isinstance(value, (float, complex)):
        return value if type(value) in (float, complex) else array(value, np.asarray(value))
    if id(value) in inside:
        return Node("cycle", {})
    inside += (id(value),)

    def parts(pairs):
        return {str(name): snapshot(part, inside) for name, part in pairs}

    if isinstance(value, (np.ndarray, np.generic)):
        return array(value, np.asarray(value))
    if isinstance(value, (tf.Variable, keras.Variable)):
        numbers = array(value, np.asarray(value.numpy()))
        return Node(kind_of(value), {"value": numbers, "trainable": bool(value.trainable)})
    if isinstance(value, tf.IndexedSlices):
        return Node(
            kind_of(value),
            parts((name, getattr(value, name)) for name in ("values", "indices", "dense_shape")),
        )
    if isinstance(value, tf.Tensor):
        return tensor(value)
    if tf.is_tensor(value):  # ragged, sparse, extension types
        return Node(kind_of(value), parts(enumerate(tf.nest.flatten(value, expand_composites=True))))
    if isinstance(value, BaseException):
        said = parts((k, v) for k, v in vars(value).items() if not k.startswith("_") and not callable(v))
        known = ("op", "node_def", "message", "experimental_payloads", "error_code")
        behind = value.__cause__ if value.__suppress_context__ else value.__context__
        shown = {"message": message_of(value), "behind it": kind_of(behind)}  # in a traceback
        return Node(kind_of(value), {**shown, **{k: v for k, v in said.items() if k not in known}})
    if isinstance(value, enum.Enum):
        return Node(kind_of(value), {"": value.name})
    if isinstance(value, Mapping):
        return Node(kind_of(value), parts((f"[{key!r}]", part) for key, part in value.items()))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Node(kind_of(value), parts(zip(value._fields, value, strict=True)))
    if isinstance(value, (set, frozenset)):
        return Node(kind_of(value), parts((f"[{n}]", part) for n, part in enumerate(sorted(value, key=repr))))
    if isinstance(value, (list, tuple, deque)):
        return Node(kind_of(value), parts((f"[{n}]", part) for n, part in enumerate(value)))
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)):
        return Node(kind_of(value), {"": value.__name__})
    if hasattr(value, "__dict__"):
        return Node(kind_of(value), parts(vars(value).items()))
    return Node(kind_of(value), {"": ADDRESS.sub("", repr(value))})


def kind_of(value: Any) -> str:
    return value.__class__.__name__  # and not type(value): a stand-in answers for what it stands in


def message_of(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return str(error).partition(" exceeded")[0]  # what Python was about to do depends on the depth, eagerly, too
    return DECORATION.sub("", str(error)).strip()


def tensor(value: tf.Tensor) -> Any:
    if value.dtype in (tf.resource, tf.variant):
        return Node(kind_of(value), {"dtype": value.dtype, "shape": value.shape})
    numbers = value.numpy()
    if tuple(value.shape) != np.shape(numbers):
        raise AssertionError(
            f"a tensor says its shape is {value.shape} and its value has {np.shape(numbers)}"
        )
    return Array(kind_of(value), value.dtype.name, tuple(value.shape), as_array(numbers))


def array(value: Any, numbers: np.ndarray) -> Any:
    if numbers.dtype == object and not all(isinstance(item, (str, bytes)) for item in numbers.flat):
        return Node(kind_of(value), {f"[{n}]": snapshot(item) for n, item in enumerate(numbers.flat)})
    return Array(kind_of(value), numbers.dtype.name, numbers.shape, numbers.copy())


def assert_same(eager: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-6, path: str = "result") -> None:
    """Fail, naming the path, if two snapshots differ; floats may, within the tolerance."""
    if type(eager) is not type(other):
        raise AssertionError(f"{path}: eager has {show(eager)}, not {show(other)}")
    if isinstance(eager, Node):
        if eager.kind != other.kind or list(eager.parts) != list(other.parts):
            raise AssertionError(f"{path}: eager has {show(eager)}, not {show(other)}")
        for name in eager.parts:
            step = name if name.startswith("[") or not name else f".{name}"
            assert_same(eager.parts[name], other.parts[name], rtol, atol, path + step)
    elif isinstance(eager, Array):
        alike = (eager.kind, eager.dtype, eager.shape) == (other.kind, other.dtype, other.shape)
        if not alike or not close(eager.values, other.values, rtol, atol):
            raise AssertionError(f"{path}: eager has {eager}, not {other}")
    elif not (close(eager, other, rtol, atol) if isinstance(eager, (float, complex)) else eager == other):
        raise AssertionError(f"{path}: eager has {show(eager)}, not {show(other)}")


def close(eager: Any, other: Any, rtol: float, atol: float) -> bool:
    eager, other = np.asarray(eager), np.asarray(other)
    if eager.dtype.kind in "biuOSUM":
        return np.array_equal(eager, other)
    # Half and bfloat16 numbers compare as float32; float64 and complex keep their own precision.
    wide = np.float32 if eager.dtype.itemsize < 4 else eager.dtype
    eager, other = eager.astype(wide), other.astype(wide)
    return bool(np.allclose(eager, other, rtol=rtol, atol=atol, equal_nan=True))


def show(value: Any) -> str:
    """A snapshot in few words."""
    if isinstance(value, Node):
        parts = ", ".join(f"{name}: {part!s:.200}" for name, part in value.parts.items())
        return f"{value.kind}({parts:.1000})"
    return str(value) if isinstance(value, Array) else f"{value.__class__.__name__} {value!r}"
