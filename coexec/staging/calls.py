"""Calls: which functions a staged statement may call, as they do nothing but compute.

Relies on `Layer._flatten_layers`, which gives a Keras layer and those inside of it, and on `Layer._called` and
`ResourceVariable._variable_read`, which say whether that was ever done.
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.answers import answered
from tracer.library import behind
from tracer.location import is_user

# Python's own functions of numbers and containers. (`min`, `max` and `sum` ask tensors for their truth, or add them up;
# the first is refused there, the second is what they do.)
BUILTINS = frozenset({abs, len, range, min, max, sum, enumerate, zip, reversed, tuple, list, isinstance, round, divmod,
                      pow, any, all, slice, int, float, bool})  # fmt: skip

# Where TensorFlow's public functions are defined that compute and do nothing else. What they issue is looked at
# besides: operations with effects, and random ones, are refused.
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

# Of those: what runs Python of the caller's, or means something else in a graph.
_OTHERWISE = frozenset({"recompute_grad", "custom_gradient", "get_static_value", "gradients"})


@functools.cache
def _computing() -> dict[int, Any]:
    """Returns TensorFlow's functions that only compute, by id; they live as long as their modules."""
    found: dict[int, Any] = {}
    answers = {id(door): function for _, function, door in answered()}
    for module in _MODULES:
        for name in dir(module):
            function = getattr(module, name, None)
            if not isinstance(function, types.FunctionType) or name in _OTHERWISE:
                continue
            if behind(answers.get(id(function), function)).__module__ in _COMPUTING:
                found[id(function)] = function
    found.update({id(f): f for f in (tf.constant, tf.convert_to_tensor, tf.clip_by_value, tf.stop_gradient)})
    return found


def is_computing(function: Any) -> bool:
    """Returns whether a function computes a result from its arguments, and does nothing else."""
    if isinstance(function, types.BuiltinFunctionType):
        return function in BUILTINS or vars(math).get(function.__name__) is function
    if isinstance(function, type):
        return function in BUILTINS
    module = getattr(function, "__module__", None) or ""
    if isinstance(function, types.FunctionType) and module.startswith(_KERAS):
        return True
    if isinstance(function, np.ufunc):
        return getattr(np, function.__name__, None) is function  # `np.frompyfunc` makes others of Python
    return id(function) in _computing()


def takes_tensors(function: Any) -> bool:
    """Returns whether Python's whole numbers are int32 tensors to a function."""
    return id(function) in _computing()


def note_call(layer: Any) -> None:
    """Has a layer, and those inside of it, know that they were called: of layers that are built, nothing else is noted
    by their first call, and that their variables were read. So it is no change by a call which is watched.
    """
    for inner in layer._flatten_layers():
        if not inner._called:
            inner._called = True
    for variable in layer.variables:
        if getattr(variable.value, "_variable_read", None) is False:
            variable.value._variable_read = True


def is_kerass(layer: Any) -> bool:
    """Returns whether a layer's code, and that of what is inside of it, is Keras' own: then running it once more tells
    whether it does more than compute, and does no harm.
    """
    for inner in layer._flatten_layers():
        held = [v for v in vars(inner).values() if isinstance(v, types.FunctionType)]
        if not type(inner).__module__.startswith("keras.") or any(is_user(v.__code__) for v in held):
            return False
    return True
