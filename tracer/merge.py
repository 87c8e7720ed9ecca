"""Merge: adds a trace to the trace graph."""

from __future__ import annotations

import functools
from typing import Any

from tracer.callees import CALLED
from tracer.graph import VALUE_SHAPED, Node, TraceGraph, Variant, node_key, refusal
from tracer.inputs import SHAPED_BY_CONSTANTS
from tracer.lazy import Output
from tracer.op import Const, OpCall, signature_of
from tracer.rebuild import RESERVED, infer_outputs
from tracer.seeds import are_fed
from tracer.trace import Trace
from tracer.variable_ops import is_variable_op

# Operations whose results have shapes that follow from the shapes of their inputs and from attributes, whatever the
# values. Of these, recorded shapes are known to be right: TensorFlow's shape functions take 0.1 ms for an operation.
SHAPED_BY_SHAPES = frozenset(
    {"Abs", "Add", "AddN", "AddV2", "BatchMatMulV2", "BiasAdd", "BiasAddGrad", "Cast", "Ceil", "Cos", "Div",
     "DivNoNan", "Elu", "EluGrad", "Erf", "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod", "Greater", "GreaterEqual",
     "Identity", "IsFinite", "IsNan", "L2Loss", "LeakyRelu", "LeakyReluGrad", "Less", "LessEqual", "Log", "Log1p",
     "LogSoftmax", "LogicalAnd", "LogicalNot", "LogicalOr", "MatMul", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg",
     "OnesLike", "Pow", "PreventGradient", "ReadVariableOp", "RealDiv", "Reciprocal", "Relu", "Relu6", "Relu6Grad",
     "ReluGrad", "Rsqrt", "RsqrtGrad", "SelectV2", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Softmax", "Softplus",
     "SoftplusGrad", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub", "Tanh", "TanhGrad", "ZerosLike"}
)  # fmt: skip


def merge(graph: TraceGraph, trace: Trace) -> list[Node]:
    """Adds the op calls of a trace to the graph as nodes, variants of known nodes, and edges; returns their nodes."""
    before, nodes = trace.start or graph.entry, []
    for call in trace.calls:
        key = node_key(call.op, call.entry, call.attrs, call.location)
        node = graph.at(key)
        if node is None:
            node = _new_node(graph, call, key)
        else:
            for n, source in enumerate(call.sources[: len(node.inputs)]):
                node.inputs[n] |= {source}
        graph.link(before, node)
        if node.host == CALLED:
            graph.callees.note(call.name)
        if node.host is None and call.host is None:
            add_variant(node, call)
            for path, const in call.numbers.items():
                node.constants.setdefault(path, const)
        if call.guarded > node.guarded:
            node.guarded = call.guarded
        before = node
        nodes.append(node)
    if trace.finished:
        graph.exits.add(before.number)
    return nodes


def _new_node(graph: TraceGraph, call: OpCall, key: Any) -> Node:
    node = graph.add(call.op, call.entry, call.attrs, call.location, key)
    node.host = node.host or call.host or host_reason(node)
    node.name = call.name
    node.inputs = [_alone(source) for source in call.sources]
    return node


@functools.lru_cache(4096)
def _alone(source: str) -> frozenset[str]:
    """Returns the set of this source, of which nodes have few different ones."""
    return frozenset({source})


def host_reason(node: Node) -> str | None:
    """Returns why an operation must be a host op, which runs on its own; None if its inputs decide (`refusal`)."""
    signature = signature_of(node.op)
    if signature is None:
        return CALLED
    try:
        node.frozen  # noqa: B018  (asked for what it raises)
    except TypeError as error:
        return str(error)
    if signature.stateful and not is_variable_op(node.op) and not are_fed(node.op, node.attrs):
        return f"{node.op} has effects of its own"
    return None


def add_variant(node: Node, call: OpCall) -> None:
    """Adds the variant for these inputs, or makes the node a host op if outputs or dtypes rule that out."""
    if call.parts in node.variants:
        return
    node.host = refusal(call.op, call.parts, call.outputs)
    if node.host is not None:
        return
    if call.outputs and not _has_known_shapes(call):
        specs = infer_outputs(call.op, call.entry, call.attrs, call.parts)
        if specs is None:
            node.host = "TensorFlow cannot put it into a graph"
            return
        reserved = RESERVED.get(call.op, ())
        pairs = [pair for n, pair in enumerate(zip(specs, call.outputs, strict=True)) if n not in reserved]
        if any(a is None or a.shape != b.shape for a, b in pairs):
            node.host = VALUE_SHAPED
            return
    outputs = tuple([Output(s, v, node) for s, v in zip(call.outputs, call.values, strict=True)])
    node.variants[call.parts] = Variant(call.parts, outputs, call.template)


def _has_known_shapes(call: OpCall) -> bool:
    """Returns whether the shapes of its results are known to be the recorded ones for all such inputs."""
    if call.op in SHAPED_BY_SHAPES or all(v is not None for v in call.values):
        return True
    deciding = SHAPED_BY_CONSTANTS.get(call.op)
    return deciding is not None and call.entry == "fast" and all(isinstance(call.parts[n], Const) for n in deciding)
