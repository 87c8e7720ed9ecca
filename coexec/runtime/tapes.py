"""Tapes: followed operations on gradient tapes and forward accumulators, as if TensorFlow had run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tracer.graph import Step
from tracer.inputs import python_spec
from tracer.intercept import flat_outputs, record_gradient
from tracer.op import complete_attrs, signature_of
from tracer.private import EagerTensor, ops


def record_on_tapes(
    step: Step, op: str, args: tuple[Any, ...], result: Any, constant: Callable[[Any, Any], Any]
) -> None:
    """Puts a followed operation on the active tapes; `constant(value, dtype)` makes tensors of Python values."""
    flat: list[Any] = []
    kinds: list[Any] = []
    for i in range(step.arity):
        value = args[i]
        if i in step.lists:
            value = [v if isinstance(v, EagerTensor) else tf.convert_to_tensor(v) for v in value]
            flat.extend(value)
            kinds.append(tuple(v._datatype_enum() for v in value))
            continue
        if not isinstance(value, EagerTensor):
            signature = signature_of(op)
            assert signature is not None
            value = constant(value, python_spec(signature, i, args, value).dtype)
        flat.append(value)
        kinds.append(value._datatype_enum())
    if step.tape is None:
        step.tape = complete_attrs(op, step.attrs, tuple(kinds))
    record_gradient(op, flat, step.tape, flat_outputs(result), ops.get_name_scope())
