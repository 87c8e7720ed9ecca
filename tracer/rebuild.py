"""Rebuild: output specs of an operation for other inputs, from TensorFlow's own shape functions.

Relies on `ops._create_c_op`, `Operation._from_c_op`, and on handle data, which describes a resource's variable.
"""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from tracer.callees import MAX_SIZES, Callee
from tracer.intercept import handling
from tracer.nodedef import Symbol, grouped, run_through, write_constant, write_operation
from tracer.op import Const, freeze
from tracer.private import (
    context,
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

    def call(self, definition: Any, given: list[Any]) -> list[Any]:
        """Adds the operations of a function to which these tensors are given; returns its results."""
        results = run_through(definition, given, self._inside)
        if results is None:
            raise ValueError("a function's operations have no order")
        return results

    def _inside(self, node: Any, given: list[Any]) -> list[Any]:
        if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            return self.call(context.context().get_function_def(node.attr["f"].func.name), given)
        copy = self._node()
        copy.op = node.op
        for name, value in node.attr.items():
            if not name.startswith("_"):
                copy.attr[name].CopyFrom(value)
        return list(self._add(copy, given).outputs)

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

    def placeholder(self, spec: Spec) -> Any:
        """Returns the tensor of a placeholder for a spec."""
        return self._tensors[self._placeholder(spec).name]

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


def infer_outputs(op: str, entry: str, attrs: tuple[Any, ...], parts: tuple[Any, ...], opens: bool = False) -> Any:
    """Returns the output specs that TensorFlow's shape functions infer, memoized.

    `parts` has a `Spec` (any value) or a `Const` (this value) per input. An item is None if that shape depends on
    values, or with `opens` if its rank does; the result is None if the operation cannot be built.
    """
    global _scratch
    key = (op, entry, freeze(attrs), parts, opens)
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
                intern_spec(o.dtype.as_datatype_enum, tuple(o.shape.as_list()))
                if o.shape.is_fully_defined() or (opens and o.shape.rank is not None)
                else None
                for o in outputs
            )
    scratch.answers[key] = answer
    return answer


def results_of(callee: Callee, parts: tuple[Spec, ...]) -> tuple[Spec, ...] | None:
    """Returns the specs of a function's results for inputs of these specs; None if some shape depends on values.

    It has been traced for all sizes of the dimensions that its signature leaves open: TensorFlow's shape functions tell
    the shapes for these ones, if it is not called with ever other sizes.
    """
    if parts not in callee.sizes:
        results = [(callee.results[n].dtype.as_datatype_enum, callee.results[n].shape) for n in callee.computed]
        if all(shape.is_fully_defined() for _, shape in results):
            callee.sizes.clear()
        elif len(callee.sizes) < MAX_SIZES:
            results = _inferred(callee, parts)
        else:
            return None
        known = all(shape.is_fully_defined() for _, shape in results)
        callee.sizes[parts] = tuple(intern_spec(enum, tuple(s.as_list())) for enum, s in results) if known else None
    found: tuple[Spec, ...] | None = callee.sizes[parts]
    return found


def _inferred(callee: Callee, parts: tuple[Spec, ...]) -> list[tuple[int, Any]]:
    scratch = _Scratch()  # one of its own: a function may have thousands of operations
    with _lock, handling(None):
        try:
            given = [scratch.placeholder(spec) for spec in parts]
            results = scratch.call(context.context().get_function_def(callee.name), given)
            results = [results[number] for number in callee.computed]
        except Exception:  # TensorFlow cannot build it here: the caller runs it unchanged
            return [(0, tf.TensorShape(None))]
    return [(result.dtype.as_datatype_enum, result.shape) for result in results]
