"""Rebuild: output specs of an operation for other inputs, from TensorFlow's own shape functions.

Relies on `ops._create_c_op`, `Operation._from_c_op`, and on handle data, which describes a resource's variable.
"""

from __future__ import annotations

import threading
from typing import Any

from tracer.intercept import handling
from tracer.nodedef import Symbol, grouped, write_constant, write_operation
from tracer.op import Const, freeze
from tracer.private import (
    cpp_shape_inference_pb2,
    func_graph,
    handle_data_util,
    node_def_pb2,
    ops,
    tensor_shape_pb2,
)
from tracer.spec import RESOURCE, VARIANT, Spec, intern_spec

# Outputs that a kernel reserves for its own gradient. Their shapes depend on the device: TensorFlow's shape functions
# do not know them (V3's workspace), or get them wrong (the CPU's placeholders for gradients are scalars, not [0]).
RESERVED = {
    "FusedBatchNormV3": frozenset({5}),
    "FusedBatchNormGrad": frozenset({3, 4}),
    "FusedBatchNormGradV2": frozenset({3, 4}),
    "FusedBatchNormGradV3": frozenset({3, 4}),
}


class _Scratch:
    """A graph in which TensorFlow infers shapes; replaced before it grows large."""

    MAX_OPS = 2000

    def __init__(self) -> None:
        self.graph = func_graph.FuncGraph("shapes")
        self.answers: dict[Any, Any] = {}
        self._symbols: dict[Any, Symbol] = {}
        self._tensors: dict[str, Any] = {}
        self._names = 0

    def symbol(self, part: Any) -> Any:
        """Returns a placeholder for a spec, and the value of a constant; maps over lists."""
        if isinstance(part, tuple):
            return [self.symbol(p) for p in part]
        if isinstance(part, Const):
            return part.value
        found = self._symbols.get(part)
        if found is None:
            found = self._symbols[part] = self._placeholder(part)
        return found

    def shapes(self, op: str, inputs: list[Any], attrs: tuple[Any, ...]) -> list[Any]:
        """Adds an operation and returns its outputs, with the shapes TensorFlow infers."""
        node = self._node()
        write_operation(node, op, inputs, attrs, self._constant)
        return list(self._add(node, [self._tensors[name] for name in node.input]).outputs)

    def _placeholder(self, spec: Spec) -> Symbol:
        node = self._node()  # by hand: `tf.compat.v1.placeholder` takes five times as long
        node.op = "Placeholder"
        node.attr["dtype"].type = spec.enum
        node.attr["shape"].shape.CopyFrom(_proto_of(spec.shape))
        tensor = self._add(node, []).outputs[0]
        if spec.handle is not None and (spec.enum == RESOURCE or spec.enum == VARIANT):
            data = cpp_shape_inference_pb2.CppShapeInferenceResult.HandleData(is_set=True)
            for enum, shape in spec.handle:
                data.shape_and_type.add(dtype=enum, shape=_proto_of(shape))
            handle_data_util.set_handle_data(tensor, data)
        return self._named(Symbol(tensor.name, spec, "", []), tensor)

    def _constant(self, value: Any, enum: int) -> Symbol:
        key = enum, freeze(value)
        found = self._symbols.get(key)
        if found is None:
            node = self._node()
            symbol = write_constant(node, value, enum)
            found = self._symbols[key] = self._named(symbol, self._add(node, []).outputs[0])
        return found

    def _named(self, symbol: Symbol, tensor: Any) -> Symbol:
        self._tensors[symbol.name] = tensor
        return symbol

    def _node(self) -> Any:
        self._names += 1
        return node_def_pb2.NodeDef(name=f"shape_of_{self._names}")

    def _add(self, node: Any, inputs: list[Any]) -> Any:
        c_op = ops._create_c_op(self.graph, node, inputs, [], extract_traceback=False)
        return ops.Operation._from_c_op(c_op=c_op, g=self.graph)


def _proto_of(shape: tuple[int, ...] | None) -> Any:
    proto = tensor_shape_pb2.TensorShapeProto(unknown_rank=shape is None)
    for size in shape or ():
        proto.dim.add(size=-1 if size is None else size)
    return proto


_scratch = _Scratch()
_lock = threading.RLock()  # names would collide if two threads used one graph


def infer_outputs(op: str, entry: str, attrs: tuple[Any, ...], parts: tuple[Any, ...]) -> Any:
    """Returns the output specs that TensorFlow's shape functions infer, memoized.

    `parts` has a `Spec` (any value) or a `Const` (this value) per input. An item is None if that shape depends on
    values; the result is None if the operation cannot be built.
    """
    global _scratch
    key = (op, entry, freeze(attrs), parts)
    scratch = _scratch
    if key in scratch.answers:
        return scratch.answers[key]
    with _lock, handling(None):
        if len(scratch.answers) > scratch.MAX_OPS:
            scratch = _scratch = _Scratch()
        try:
            inputs = [scratch.symbol(p) for p in parts]
            inputs = grouped(op, attrs, inputs) if entry == "execute" else inputs
            outputs = scratch.shapes(op, inputs, attrs)
        except Exception:  # TensorFlow cannot build it: the caller runs it unchanged
            answer = None
        else:
            answer = tuple(
                intern_spec(o.dtype.as_datatype_enum, tuple(o.shape.as_list())) if o.shape.is_fully_defined() else None
                for o in outputs
            )
    scratch.answers[key] = answer
    return answer
