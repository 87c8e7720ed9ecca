"""Merge: a trace becomes part of the trace graph."""

from __future__ import annotations

from tracer.graph import Node, TraceGraph, Variant, is_variable_op
from tracer.lazy import Output
from tracer.op import OpCall, freeze, signature_of
from tracer.rebuild import infer_outputs
from tracer.seeds import are_fed
from tracer.spec import RESOURCE, STRING, VARIANT, Spec
from tracer.trace import Trace


def merge(graph: TraceGraph, trace: Trace) -> None:
    """Adds a trace's op calls to the graph: known places gain variants, new ones become nodes."""
    before = trace.start or graph.entry
    for call in trace.calls:
        node = graph.find(call.op, call.entry, call.attrs, call.location)
        if node is None:
            node = _new_node(graph, call)
        graph.link(before, node)
        if node.host is None and call.host is None:
            add_variant(node, call)
        for known, source in zip(node.inputs, call.sources, strict=False):
            known.add(source)
        node.guarded = max(node.guarded, call.guarded)
        before = node
    if trace.finished:
        graph.exits.add(before.number)


def _new_node(graph: TraceGraph, call: OpCall) -> Node:
    node = graph.add(call.op, call.entry, call.attrs, call.location)
    node.host = node.host or host_reason(call)
    node.name = call.name
    node.inputs = [set() for _ in call.sources]
    return node


def host_reason(call: OpCall) -> str | None:
    """Returns why an operation must run on its own, at its place, and not as part of a segment."""
    if call.host is not None:
        return call.host
    signature = signature_of(call.op)
    if signature is None:
        return "a function is called"
    try:
        freeze(call.attrs)
    except TypeError as error:
        return str(error)
    if signature.stateful and not is_variable_op(call.op) and not are_fed(call.op, call.attrs):
        return f"{call.op} has effects of its own"
    specs = [s for p in call.parts for s in (p if isinstance(p, tuple) else (p,)) if isinstance(s, Spec)]
    for spec in (*specs, *call.outputs):
        if spec.enum == STRING:
            return "strings cannot be compiled"
        if spec.enum == VARIANT:
            return "a variant's contents are not known"
    if any(s.enum == RESOURCE for s in call.outputs):
        return f"{call.op} makes a resource"
    for spec in specs:
        if spec.enum == RESOURCE and not is_variable_op(call.op):
            return f"{call.op} works on a resource"
        if spec.enum == RESOURCE and not _is_fixed(spec):
            return "the variable's shape is not fixed"
    return None


def _is_fixed(spec: Spec) -> bool:
    return spec.handle is not None and all(shape is not None and -1 not in shape for _, shape in spec.handle)


def add_variant(node: Node, call: OpCall) -> None:
    """Notes what came out for these inputs; where that depends on values, the node runs on its own from now on."""
    if call.parts in node.variants:
        return
    if call.outputs and not all(v is not None for v in call.values):
        specs = infer_outputs(call.op, call.entry, call.attrs, call.parts)
        if specs is None:
            node.host = "TensorFlow cannot put it into a graph"
            return
        if any(a is None or a.shape != b.shape for a, b in zip(specs, call.outputs, strict=True)):
            node.host = "the shape of its result depends on values"
            return
    outputs = tuple(Output(s, v, node) for s, v in zip(call.outputs, call.values, strict=True))
    node.variants[call.parts] = Variant(call.parts, outputs, call.template)
