"""Arguments: positional arguments converted and checked by an `input_signature`, as `tf.function` does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tracer.faults import passes


def with_signature(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Returns `function` with its arguments converted as `signature` specifies; unchanged if that is None.

    Raises:
      TypeError: here, if `signature` is not a sequence of `tf.TypeSpec`s; on a call, if the arguments do not match it.
    """
    if signature is None:
        return function
    if not isinstance(signature, (list, tuple)):
        raise TypeError(f"input_signature is a list or tuple of tf.TypeSpecs, not {signature!r}")
    for leaf in tf.nest.flatten(signature):
        if not isinstance(leaf, tf.TypeSpec):
            raise TypeError(f"input_signature holds tf.TypeSpecs, and lists, tuples and dicts of them, not {leaf!r}")
    parameters = inspect.signature(function)
    names = list(parameters.parameters)
    # As in `tf.function`, the signature does not cover `self`.
    names = names[1:] if names[:1] == ["self"] else names
    variadic = [n for n in names if parameters.parameters[n].kind is inspect.Parameter.VAR_POSITIONAL]

    @functools.wraps(function)
    @passes
    def converted(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(*args, **kwargs)
        given = [n for n in names if n in bound.arguments and n not in variadic]
        values = [bound.arguments[n] for n in given] + [v for n in variadic for v in bound.arguments.get(n, ())]
        if len(values) != len(signature):
            raise TypeError(
                f"{function!r} takes {len(signature)} arguments by its input_signature, and was given {len(values)}"
            )
        for place, (spec, value) in enumerate(zip(signature, values, strict=True)):
            values[place] = _convert(spec, value, given[place] if place < len(given) else f"argument {place}")
        bound.arguments.update(zip(given, values, strict=False))
        bound.arguments.update({n: tuple(values[len(given) :]) for n in variadic})
        return function(*bound.args, **bound.kwargs)

    return converted


def _convert(spec: Any, value: Any, name: str) -> Any:
    """Returns `value` converted to `spec`, or raises TypeError; `name` is for the message."""
    if isinstance(spec, Mapping):
        if not isinstance(value, Mapping) or value.keys() != spec.keys():
            raise TypeError(f"{name} is {value!r}, where the input_signature has the keys {sorted(spec)}")
        items = {key: _convert(spec[key], value[key], f"{name}[{key!r}]") for key in spec}
        return type(value)(items)  # type: ignore[call-arg]  # mappings of any type, as given
    if isinstance(spec, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(spec):
            raise TypeError(f"{name} is {value!r}, where the input_signature has {len(spec)} items")
        return type(value)(_convert(s, v, f"{name}[{i}]") for i, (s, v) in enumerate(zip(spec, value, strict=True)))
    if isinstance(spec, tf.TensorSpec):
        try:
            value = tf.convert_to_tensor(value, dtype=spec.dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} cannot be converted to {spec!r} of the input_signature: {error}") from error
    if not spec.is_compatible_with(value):
        raise TypeError(f"{name} is {value!r}, which does not match {spec!r} of the input_signature")
    return value
