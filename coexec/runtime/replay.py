"""Replay: a segment's operations, carried out one by one as the eager program would have."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracer.graph import CONST, LIST, Step, spec_of_constant
from tracer.inputs import python_spec
from tracer.intercept import fast_execute, flat_outputs, handling, make_constant, run_execute
from tracer.lazy import eager_constant
from tracer.location import raise_at
from tracer.op import Const, signature_of
from tracer.private import context, core, record


def replay(steps: list[Step], feeds: list[Any], values: list[Any]) -> None:
    """Runs the steps in order and gives each lazy tensor among `values` its eager one (None: nobody wants it).

    A failing operation raises what it raises eagerly; those before it have run, those behind it have not.
    """
    ctx = context.context()
    real: list[Any] = [None] * len(values)
    with handling(None), record.stop_recording():
        for step in steps:
            assert step.op is not None
            assert step.node is not None
            assert step.variant is not None
            if step.variant.folded:
                for n, out in enumerate(step.outputs):
                    assert out.const is not None
                    real[step.first + n] = eager_constant(out.const.value, out.spec)
                continue
            inputs = [_input(step, i, slot, real, feeds) for i, slot in enumerate(step.slots)]
            try:
                if step.node.entry == "execute":
                    result = run_execute(ctx.device_name, step.op, _made(inputs), step.attrs, len(step.outputs))
                else:
                    result = _run_fast(ctx, step, inputs)
            except core._NotOkStatusException as error:
                if step.node.entry == "fast":  # as the generated wrappers do
                    error.message += " name: " + str(step.node.name if step.node.name is not None else "")
                failure = core._status_to_exception(error)
                failure.__suppress_context__ = True
                raise_at(failure, step.node.location)
            for n, tensor in enumerate(flat_outputs(result)):
                real[step.first + n] = tensor
                lazy = values[step.first + n]
                if lazy is not None:
                    lazy._value = tensor


def _run_fast(ctx: Any, step: Step, inputs: list[Any]) -> Any:
    name = step.node.name if step.node is not None else None
    try:
        return fast_execute(ctx, step.op, name, *inputs, *step.attrs)
    except core._FallbackException:
        # Constants that were tensors when the operation was recorded, of a dtype that only tensors can have, or NumPy's
        # scalars, whose dtypes the generated wrapper settled by converting all inputs together.
        return fast_execute(ctx, step.op, name, *_settled(step, inputs), *step.attrs)


def _settled(step: Step, inputs: list[Any]) -> list[Any]:
    """Returns the inputs with arrays and NumPy's scalars made tensors, scalars of the dtype that the others ask for."""
    signature = signature_of(step.op or "")
    assert signature is not None
    args = (*inputs, *step.attrs)

    def settled(i: int, value: Any) -> Any:
        if isinstance(value, list):
            return [settled(i, v) for v in value]
        if isinstance(value, np.generic):
            return make_constant(value, python_spec(signature, i, args, value).dtype)
        return value

    return _made([settled(i, value) for i, value in enumerate(inputs)])


def _made(inputs: list[Any]) -> list[Any]:
    """Returns the inputs with arrays made tensors, of their own dtype."""
    return [
        _made(v) if isinstance(v, list) else make_constant(v, None) if isinstance(v, np.ndarray) else v for v in inputs
    ]


def _input(step: Step, i: int, slot: int, real: list[Any], feeds: list[Any]) -> Any:
    if slot == LIST:
        slots, consts = step.lists[i]
        return [
            _constant(consts[j], step, i, j) if j in consts else _tensor(s, real, feeds) for j, s in enumerate(slots)
        ]
    return _constant(step.consts[i], step, i) if i in step.consts else _tensor(slot, real, feeds)


def _constant(const: Const, step: Step, *path: int) -> Any:
    """Returns a constant; as a tensor, where TensorFlow could not tell its dtype from the other inputs."""
    value = const.value
    if isinstance(value, (np.ndarray, np.generic)) or all(slot in (CONST, LIST) for slot in step.slots):
        spec = spec_of_constant(step, *path)
        if spec is not None:
            return make_constant(value, spec.dtype)
    return value


def _tensor(slot: int, real: list[Any], feeds: list[Any]) -> Any:
    return real[slot] if slot >= 0 else feeds[-1 - slot]
