"""Rebuild: an op call, made again inside a TensorFlow graph.

Relies on `op_def_library._apply_op_helper`, which takes the names of the op's definition.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import tensorflow as tf

from tracer.intercept import handling
from tracer.op import Const, Signature, freeze, signature_of
from tracer.private import cpp_shape_inference_pb2, func_graph, handle_data_util, op_def_library, ops, tensor_shape_pb2
from tracer.spec import RESOURCE, VARIANT, Spec, intern_spec


def placeholder(spec: Spec) -> Any:
    """Returns a placeholder of the default graph with this spec, for a resource with what is behind it."""
    tensor = tf.compat.v1.placeholder(spec.dtype, spec.shape)
    if spec.handle is not None and (spec.enum == RESOURCE or spec.enum == VARIANT):
        data = cpp_shape_inference_pb2.CppShapeInferenceResult.HandleData(is_set=True)
        for enum, shape in spec.handle:
            proto = tensor_shape_pb2.TensorShapeProto(unknown_rank=shape is None)
            for size in shape or ():
                proto.dim.add(size=size)
            data.shape_and_type.add(dtype=enum, shape=proto)
        handle_data_util.set_handle_data(tensor, data)
    return tensor


def grouped(signature: Signature, attrs: tuple[Any, ...], flat: list[Any]) -> list[Any]:
    """Returns flat inputs grouped by argument, as the counts and type lists among `attrs` say."""
    given = dict(zip(attrs[::2], attrs[1::2], strict=True))
    groups: list[Any] = []
    at = 0
    for arg, is_list in zip(signature.definition.input_arg, signature.lists, strict=True):
        if is_list:
            count = given[arg.number_attr] if arg.number_attr else len(given[arg.type_list_attr])
            groups.append(flat[at : at + count])
            at += count
        else:
            groups.append(flat[at])
            at += 1
    return groups


def apply(op: str, entry: str, attrs: tuple[Any, ...], inputs: list[Any]) -> list[Any]:
    """Adds the operation to the default graph and returns its flat outputs."""
    signature = signature_of(op)
    assert signature is not None
    derived: set[str] = set()
    if entry == "execute":
        inputs = grouped(signature, attrs, inputs)
        for arg in signature.definition.input_arg:
            derived.update((arg.type_attr, arg.number_attr, arg.type_list_attr))
    keywords = dict(zip(signature.inputs, inputs, strict=True))
    for name, value in zip(attrs[::2], attrs[1::2], strict=True):
        if name in derived:
            continue
        value = _default(signature, name) if value is None else value
        if value is not None:
            keywords[name] = value
    _, _, operation, _ = op_def_library._apply_op_helper(op, **keywords)
    return list(operation.outputs)


_FIELDS = {"int": "i", "float": "f", "bool": "b", "string": "s", "type": "type"}


def _default(signature: Signature, name: str) -> Any:
    """Returns the default of an attribute, which the wrappers leave to the runtime by passing None."""
    for attr in signature.definition.attr:
        if attr.name == name and attr.HasField("default_value"):
            value, kind = attr.default_value, attr.type
            if kind.startswith("list("):
                return list(getattr(value.list, _FIELDS[kind[5:-1]])) if kind[5:-1] in _FIELDS else None
            return getattr(value, _FIELDS[kind]) if kind in _FIELDS else None
    return None


class _Scratch:
    """A graph to ask TensorFlow's shape functions in; renewed before it grows large."""

    MAX_OPS = 2000

    def __init__(self) -> None:
        self.graph = func_graph.FuncGraph("shapes")
        self.answers: dict[Any, Any] = {}


_scratch = _Scratch()
_lock = threading.RLock()  # two threads that add to one graph take each other's names


def infer_outputs(op: str, entry: str, attrs: tuple[Any, ...], parts: tuple[Any, ...]) -> Any:
    """Returns the outputs' specs, as far as TensorFlow's own shape functions know them.

    `parts` holds a `Spec` (any value) or a `Const` (this value) per input. None stands for a shape that depends on
    values; the whole answer is None where the operation cannot be built.
    """
    global _scratch
    key = (op, entry, freeze(attrs), parts)
    scratch = _scratch
    if key in scratch.answers:
        return scratch.answers[key]
    with _lock, handling(None), contextlib.ExitStack() as stack:
        if len(scratch.answers) > scratch.MAX_OPS:
            scratch = _scratch = _Scratch()
        stack.enter_context(scratch.graph.as_default())
        stack.enter_context(ops.control_dependencies(None))
        try:
            outputs = apply(op, entry, attrs, [_symbol(p) for p in parts])
        except Exception:  # whatever TensorFlow cannot build, it runs: the caller takes the operation as it is
            answer = None
        else:
            answer = tuple(
                intern_spec(o.dtype.as_datatype_enum, tuple(o.shape.as_list())) if o.shape.is_fully_defined() else None
                for o in outputs
            )
    scratch.answers[key] = answer
    return answer


def _symbol(part: Any) -> Any:
    if isinstance(part, tuple):
        return [_symbol(p) for p in part]
    return part.value if isinstance(part, Const) else placeholder(part)
