"""Array arguments: converted to tensors before a library call that would convert them first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from coexec.guards.call_key import updates_metric, with_tensors
from coexec.memoize.array_names import name_arrays
from tracer.faults import is_fault
from tracer.library import labelled, layer_calls, loss_call

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def converts_arrays(function: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether a library function converts arrays to tensors first."""
    return function in layer_calls or function is loss_call or function in labelled or updates_metric(function, args)


def call_with_tensors(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Call) -> Any:
    """Makes such a call by `make`, with tensors in place of arrays; an error names the arrays."""
    taken = with_tensors(args, kwargs, function in labelled)
    try:
        return make(function, *taken)
    except Exception as error:
        if not is_fault(error) and function not in labelled:
            name_arrays(error, (args, kwargs), taken)
        raise


def call_recorded(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Call) -> Any:
    """Makes a library call by `make` as a followed call would, so that both issue the same operations."""
    if _holds_array((*args, *kwargs.values())) and converts_arrays(function, args):
        return call_with_tensors(function, args, kwargs, make)
    return make(function, args, kwargs)


def _holds_array(values: Any) -> bool:
    for value in values:
        if isinstance(value, np.ndarray):
            return True
        if isinstance(value, (list, tuple)) and _holds_array(value):
            return True
        if isinstance(value, dict) and _holds_array(value.values()):
            return True
    return False
