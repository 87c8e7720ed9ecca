"""Pure calls: functions that only compute, immutable values, and attributes that no code computes."""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.answers import answered
from tracer.errors import Refused
from tracer.library import behind

# Builtins on numbers and containers. (`min` and `max` read the truth values of tensors, which is refused there; `sum`
# adds tensors, which is an operation.)
BUILTINS = frozenset({abs, len, range, min, max, sum, enumerate, zip, reversed, tuple, list, isinstance, round, divmod,
                      pow, any, all, slice, int, float, bool})  # fmt: skip

# Modules that define TensorFlow's public functions that only compute. The operations that they issue are checked, too:
# stateful and random ones are refused.
_COMPUTING = frozenset(
    f"tensorflow.python.ops.{name}"
    for name in """
    array_ops array_ops_stack bitwise_ops clip_ops confusion_matrix embedding_ops gen_array_ops gen_bitwise_ops
    gen_linalg_ops gen_math_ops gen_nn_ops gen_special_math_ops init_ops linalg_ops linalg.linalg_impl
    manip_ops math_ops nn nn_impl nn_ops ragged.ragged_math_ops shape_util sort_ops special_math_ops
    """.split()  # noqa: SIM905
)
_KERAS = ("keras.src.ops.numpy", "keras.src.ops.nn", "keras.src.ops.math", "keras.src.activations.")
_MODULES = (tf, tf.math, tf.nn, tf.linalg, tf.bitwise)

# Exceptions: those that run the caller's Python, or mean something else in a graph.
_OTHERWISE = frozenset({"recompute_grad", "custom_gradient", "get_static_value", "gradients"})


@functools.cache
def _computing() -> dict[int, Any]:
    """Returns TensorFlow's functions that only compute, as `_unwrapped`, by id (they live as long as their modules)."""
    found = [tf.constant, tf.convert_to_tensor, tf.clip_by_value, tf.stop_gradient, tf.control_dependencies]
    for module in _MODULES:
        for name in dir(module):
            function = getattr(module, name, None)
            is_one = isinstance(function, types.FunctionType) and name not in _OTHERWISE
            if is_one and _unwrapped(function).__module__ in _COMPUTING:
                found.append(function)
    return {id(each): each for each in map(_unwrapped, found)}


@functools.cache
def _answers() -> dict[int, Any]:
    return {id(wrapper): function for _, function, wrapper in answered()}


def _unwrapped(function: Any) -> Any:
    """Returns TensorFlow's function behind those that the runtime puts in its place, which it makes anew at times."""
    inner = behind(function) if isinstance(function, types.FunctionType) else function
    inner = _answers().get(id(inner), inner)
    return behind(inner) if isinstance(inner, types.FunctionType) else inner


def is_computing(function: Any) -> bool:
    """Returns whether a function only computes a result from its arguments."""
    if isinstance(function, types.BuiltinFunctionType):
        return function in BUILTINS or vars(math).get(function.__name__) is function
    if isinstance(function, type):
        return function in BUILTINS
    if isinstance(function, types.FunctionType) and str(behind(function).__module__).startswith(_KERAS):
        return True
    if isinstance(function, np.ufunc):
        return getattr(np, function.__name__, None) is function  # not one by `np.frompyfunc`
    return id(_unwrapped(function)) in _computing()


def takes_tensors(function: Any) -> bool:
    """Returns whether a function converts Python integers to int32 tensors."""
    return id(_unwrapped(function)) in _computing()


_PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None)})


def is_number(value: Any) -> bool:
    """Returns whether a value is immutable and compared by value."""
    kind = type(value)  # `isinstance` may run code of the value's class
    if issubclass(kind, np.generic):  # a class of the program's has attributes besides, a record can be written to
        return kind.__dictoffset__ == 0 and not issubclass(kind, np.void)
    return kind in _PLAIN or issubclass(kind, (tf.DType, tf.TensorShape))


def plain_attribute(owner: Any, name: str) -> Any:
    """Returns an attribute stored in an object, its class, or a module; raises `Refused` if code computes it."""
    found: Any
    if isinstance(owner, types.ModuleType):
        if name not in vars(owner) and not owner.__name__.startswith(("tensorflow", "keras")):
            raise Refused(f"{owner.__name__} computes {name!r}")
        try:
            return getattr(owner, name)  # TensorFlow's modules load parts of themselves lazily
        except AttributeError:
            raise Refused(f"{owner.__name__} has no {name!r}") from None
    if type(owner) is type:  # a class: its own attribute, or a base's
        found = next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None)
        if found is None or hasattr(type(found), "__get__"):
            raise Refused(f"attribute {name!r} of {owner.__qualname__} is computed")
        return found
    kind = type(owner)
    computed: Any = kind.__getattribute__
    if computed is not object.__getattribute__:
        raise Refused(f"attributes of a {kind.__qualname__} are computed")
    held: dict[str, Any] = getattr(owner, "__dict__", {})
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    if isinstance(found, types.FunctionType) and name not in held:
        return getattr(owner, name)
    if name in held and not hasattr(type(found), "__set__"):
        return held[name]
    if found is not None and not hasattr(type(found), "__get__"):
        return found
    raise Refused(f"attribute {name!r} of a {kind.__qualname__} is computed")
