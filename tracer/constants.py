"""Constants: outputs for tensors converted from Python values, memoized so that a repeated value makes no tensor."""

from __future__ import annotations

from typing import Any

from tracer import intercept
from tracer.inputs import MAX_CONSTANT
from tracer.lazy import Output
from tracer.op import Const, array_in, freeze
from tracer.spec import spec_of

_outputs: dict[Any, Output] = {}
_indices: dict[tuple[tuple[int, ...], ...], list[Output]] = {}
MAX_OUTPUTS = 4096


def constant_output(value: Any, dtype: Any) -> tuple[Output | None, Any]:
    """Returns the output that a small Python value becomes, and its tensor if one had to be made.

    The output is None if the tensor is too large to be a constant, or has a dtype that NumPy lacks.
    """
    try:
        key = (freeze(value), dtype)
        out = _outputs.get(key)
    except TypeError:  # for example a user-defined list class: not memoized
        key, out = None, None
    if out is not None:
        return out, None
    tensor = intercept.make_constant(value, dtype)
    if not tensor.dtype.is_numpy_compatible or tensor._num_elements() * 8 > MAX_CONSTANT:
        return None, tensor
    out = Output(spec_of(tensor), Const(array_in(tensor)))
    if key is not None:
        if len(_outputs) >= MAX_OUTPUTS:
            _outputs.clear()
        _outputs[key] = out
    return out, tensor


def index_outputs(index: tuple[tuple[int, ...], ...]) -> list[Output]:
    """Returns the outputs for the bounds and strides of an index, which are all ints, no bools."""
    outs = _indices.get(index)
    if outs is None:
        outs = [out for part in index if (out := constant_output(list(part), None)[0]) is not None]
        if len(_indices) >= MAX_OUTPUTS:
            _indices.clear()
        _indices[index] = outs
    return outs
