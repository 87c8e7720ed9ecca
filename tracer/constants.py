"""Constants: what tensors made of Python values look like, known from the second time on without making them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracer import intercept
from tracer.inputs import MAX_CONSTANT
from tracer.lazy import Output
from tracer.op import Const, freeze
from tracer.spec import spec_of

_outputs: dict[Any, Output] = {}
_indices: dict[tuple[tuple[int, ...], ...], list[Output]] = {}
MAX_OUTPUTS = 4096


def constant_output(value: Any, dtype: Any) -> tuple[Output | None, Any]:
    """Returns the output that a small Python value becomes, and its tensor if it had to be made.

    No output: the tensor is too large to be a constant, or of a dtype that NumPy does not know.
    """
    try:
        key = (freeze(value), dtype)
        out = _outputs.get(key)
    except TypeError:  # a list of the user's own type, say: known by what it becomes
        key, out = None, None
    if out is not None:
        return out, None
    tensor = intercept.make_constant(value, dtype)
    if not tensor.dtype.is_numpy_compatible or tensor._num_elements() * 8 > MAX_CONSTANT:
        return None, tensor
    out = Output(spec_of(tensor), Const(np.asarray(tensor._numpy_internal())))
    if key is not None:
        if len(_outputs) >= MAX_OUTPUTS:
            _outputs.clear()
        _outputs[key] = out
    return out, tensor


def index_outputs(index: tuple[tuple[int, ...], ...]) -> list[Output]:
    """Returns what the bounds and steps of an index become, which are whole numbers (and no bools)."""
    outs = _indices.get(index)
    if outs is None:
        outs = [out for part in index if (out := constant_output(list(part), None)[0]) is not None]
        if len(_indices) >= MAX_OUTPUTS:
            _indices.clear()
        _indices[index] = outs
    return outs
