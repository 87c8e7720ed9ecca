"""Check: the invariants of a trace graph. Each rule is one sentence, which the error quotes.

`merge` builds nodes, index, edges, exits and variants; the cursor adds steps below `Node.after`. Errors name the node,
and for a step also the node after which its segment starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tensorflow import as_dtype

from tracer.errors import MalformedGraph
from tracer.graph import CONST, LIST, Node, Step, TraceGraph, Variant, node_key
from tracer.lazy import Output
from tracer.op import Const, Signature, signature_of
from tracer.spec import FOLDED, Spec, intern_spec


def check(graph: TraceGraph) -> None:
    """Raises `MalformedGraph`, naming the node and the rule, unless the graph is well-formed."""
    for position, node in enumerate(graph.nodes):
        _rule(node.number == position, node, f"its number is its position, which is {position}")
    _rule(bool(graph.nodes) and graph.nodes[0] is graph.entry, graph.entry, "the entry is the first node")
    _rule(not graph.entry.predecessors, graph.entry, "nothing comes before the entry")
    _rule(not graph.entry.variants, graph.entry, "the entry is no operation")
    _check_edges(graph)
    _check_index(graph)
    for node in graph.nodes[1:]:
        _check_node(node)
    for node in graph.nodes:
        if node.after is not None:
            _check_root(graph, node, node.after)
    for root in graph.shared.values():
        _check_root(graph, None, root)


def _rule(holds: bool, where: Node | Step, text: str) -> None:
    """Raises `MalformedGraph` with the place and the rule's text unless the rule holds there."""
    if not holds:
        raise MalformedGraph(f"{_name(where)}: {text}")


def _name(where: Node | Step) -> str:
    if isinstance(where, Node):
        return f"node {where.number} ({where.op}, {where.location})"
    root = where
    while root.parent is not None:
        root = root.parent
    begins = root.node.number if root.node is not None else "?"
    number = where.node.number if where.node is not None else "?"
    return f"step of node {number} ({where.op}) in the segments behind node {begins}"


# The graph.


def _check_edges(graph: TraceGraph) -> None:
    nodes = graph.nodes
    for node in nodes:
        for number, other in (*node.successors.items(), *node.predecessors.items()):
            known = 0 <= number < len(nodes) and nodes[number] is other
            _rule(known, node, f"its edges lead to nodes of the graph, which {number} is not")
        for other in node.successors.values():
            back = other.predecessors.get(node.number) is node
            _rule(back, node, f"it precedes its successors: {other.number} does not know of it")
        for other in node.predecessors.values():
            forth = other.successors.get(node.number) is node
            _rule(forth, node, f"it succeeds its predecessors: {other.number} does not know of it")
    for number in sorted(graph.exits):
        _rule(0 <= number < len(nodes), graph.entry, f"exits are nodes of the graph, which {number} is not")
    reached = {0}
    ahead = [graph.entry]
    while ahead:
        for number, other in ahead.pop().successors.items():
            if number not in reached:
                reached.add(number)
                ahead.append(other)
    for node in nodes:
        _rule(node.number in reached, node, "a path leads to it from the entry")


def _check_index(graph: TraceGraph) -> None:
    for node in graph.nodes[1:]:
        found = graph.index.get(node_key(node.op, node.entry, node.attrs, node.location))
        _rule(found is node, node, "the index finds it by its type, attributes and location")
    _rule(len(graph.index) == len(graph.nodes) - 1, graph.entry, "the index holds each node but the entry")
    executed = {(n.op, n.location._replace(iteration=0)) for n in graph.nodes if n.entry == "execute"}
    for op, location in graph.slow ^ executed:
        message = f"slow operations are those issued by `execute`, unlike {op} at {location}"
        _rule(False, graph.entry, message)


# Nodes and variants.


def _check_node(node: Node) -> None:
    _rule(node.entry in ("fast", "execute"), node, "it was issued by 'fast' or 'execute'")
    _rule(node.location.iteration >= 0, node, "its iteration is not negative")
    _rule(bool(node.variants) or node.host is not None, node, "it has a variant, or runs on its own")
    signature = signature_of(node.op)
    if signature is None:
        own = node.host is not None or node.callee is not None
        _rule(own, node, "what is no registered operation runs on its own, or is a function that segments call")
    elif node.entry == "fast" and node.host is None:
        sources = len(node.inputs) == len(signature.inputs)
        _rule(sources, node, f"it knows the sources of its {len(signature.inputs)} inputs")
    fed = {path[0] if isinstance(path, tuple) else path for path in node.fed}
    _rule(fed <= set(range(len(node.inputs))), node, "its fed inputs are among its inputs")
    for key, variant in node.variants.items():
        _rule(variant.key == key, node, "a variant is kept under its own key")
        _check_key(node, variant, signature)
        _check_outputs(node, variant, signature)


def _check_key(node: Node, variant: Variant, signature: Signature | None) -> None:
    key = variant.key
    _rule(len(key) == len(node.inputs), node, f"a variant's key has {len(node.inputs)} parts, one per input")
    lists = signature.lists if signature is not None and node.entry == "fast" else (False,) * len(key)
    for i, (part, is_list) in enumerate(zip(key, lists, strict=True)):
        shaped = isinstance(part, tuple) == is_list
        _rule(shaped, node, f"input {i} of a variant's key is {'a list' if is_list else 'no list'}")
        for item in part if isinstance(part, tuple) else (part,):
            kind = isinstance(item, (Spec, Const))
            _rule(kind, node, f"input {i} of a variant's key is made of specs and constants, not {item!r}")
            if isinstance(item, Spec):
                _check_spec(node, item)


def _check_spec(node: Node, spec: Spec) -> None:
    _rule(intern_spec(spec.enum, spec.shape, spec.handle) is spec, node, f"its specs are interned: {spec}")
    _rule(all(size >= 0 for size in spec.shape), node, f"its specs have exact shapes: {spec}")


def _check_outputs(node: Node, variant: Variant, signature: Signature | None) -> None:
    outputs, template = variant.outputs, variant.template
    for n, output in enumerate(outputs):
        _rule(output.node is node, node, f"output {n} refers back to it")
        _check_spec(node, output.spec)
        if output.const is not None:
            _check_folded(node, n, output)
    known = sum(output.const is not None for output in outputs)
    _rule(known in (0, len(outputs)), node, "the values of all outputs of a variant are known, or of none")
    numbers = list(_numbers(template)) if template != -1 else [0]
    once = numbers == list(range(len(outputs)))
    _rule(once, node, f"the template {template} names each of {len(outputs)} outputs once, in order")
    if signature is not None and not any(signature.output_lists):
        count = len(signature.output_lists)
        _rule(len(outputs) == count, node, f"a variant has as many outputs as {node.op}, which are {count}")
    if node.entry == "execute":
        _rule(isinstance(template, list), node, "what `execute` returns is a list")


def _numbers(template: Any) -> Iterator[Any]:
    for item in template or ():
        if isinstance(item, list):
            yield from _numbers(item)
        else:
            yield item


def _check_folded(node: Node, n: int, output: Output) -> None:
    assert output.const is not None
    value = output.const.value
    _rule(isinstance(value, np.ndarray), node, f"the known value of output {n} is an array")
    _rule(output.spec.enum in FOLDED, node, f"output {n} is known, so it is an int32, int64 or bool")
    same = as_dtype(value.dtype).as_datatype_enum == output.spec.enum and value.shape == output.spec.shape
    _rule(same, node, f"the known value of output {n} has the dtype and shape of its spec, {output.spec}")


# Steps.


def _check_root(graph: TraceGraph, node: Node | None, root: Step) -> None:
    where = root if node is None else node
    bare = root.parent is None and root.op is None and root.variant is None and root.node is node
    _rule(bare, where, "the steps behind it hang on a root of its own")
    _rule(root.first == root.end == root.external == 0, where, "a segment begins with nothing")
    # Each entry has the tensors and feeds of the segment up to `parent`. Depth first with an explicit stack, since
    # segments have thousands of steps.
    ahead: list[tuple[Step, Step, list[Output], list[Spec]]] = [(root, child, [], []) for child in root.next]
    _check_hot(root)
    while ahead:
        parent, step, tensors, feeds = ahead.pop()
        _rule(step.parent is parent, step, "it refers back to the step before it")
        _check_step(graph, parent, step, tensors, feeds)
        _check_hot(step)
        if not step.next:
            continue
        _rule(not step.host or step.early, step, "a segment ends at an operation that runs on its own")
        tensors, feeds = [*tensors, *step.outputs], [*feeds, *step.specs]
        ahead += [(step, child, tensors, feeds) for child in step.next]


def _check_hot(step: Step) -> None:
    _rule(step.hot is None or step.hot in step.next, step, "the step tried first is one of those behind it")


def _check_step(graph: TraceGraph, parent: Step, step: Step, tensors: list[Output], feeds: list[Spec]) -> None:
    node, before = step.node, parent.node
    known = node is not None and node.number < len(graph.nodes) and graph.nodes[node.number] is node
    _rule(known, step, "its node is one of the graph")
    assert node is not None
    _rule(step.op == node.op and step.attrs == node.attrs, step, "it has its node's type and attributes")
    if before is not None:  # else it is behind a cut at which ways meet
        linked = before.successors.get(node.number) is node
        _rule(linked, step, f"an edge leads to it from node {before.number}")
    _rule(step.first == parent.end, step, f"its tensors are numbered from {parent.end}")
    _rule(step.end == step.first + len(step.outputs), step, "each output is a tensor")
    external = parent.external + len(step.specs)
    _rule(step.external == external, step, f"the segment has {external} feeds up to it")
    _rule(step.join or step.arity == len(step.slots), step, "it has a slot for each input")
    draws = parent.draws + step.seeded
    _rule(step.draws == draws, step, f"the segment has {draws} draws up to it")
    _rule(step.dynamic or not parent.dynamic, step, "what follows an operation for any size is for any size, too")
    if step.host:
        _rule(not step.join or parent.parent is not None, step, "a join is in the middle of a segment")
        _rule(not step.slots and step.variant is None, step, "what runs on its own has no wiring")
        return
    variant = step.variant
    assert variant is not None
    there = node.opens if variant.open else node.variants
    if variant.window:
        there = {key: slid for (key, _), slid in (node.windows or {}).items() if slid is variant}
    known = step.dynamic or there.get(variant.key) is variant
    _rule(known, step, "its variant is one of its node, if it is for exact sizes")
    _rule(step.outputs is variant.outputs, step, "its outputs are its variant's")
    _rule(step.single == (variant.template == -1), step, "it returns one tensor if its variant does")
    _check_wiring(step, variant, tensors, [*feeds, *step.specs])


def _check_wiring(step: Step, variant: Variant, tensors: list[Output], feeds: list[Spec]) -> None:
    _rule(len(step.slots) == len(variant.key), step, f"it has a slot for each of {len(variant.key)} inputs")
    lists = {i for i, slot in enumerate(step.slots) if slot == LIST}
    _rule(lists == set(step.lists), step, "its list slots are those with a wiring of their own")
    used = _check_slots(step, step.slots, step.consts, variant.key, tensors, feeds)
    for i, (slots, consts) in step.lists.items():
        _rule(len(slots) == len(variant.key[i]), step, f"it has a slot for each item of input {i}")
        used |= _check_slots(step, slots, consts, variant.key[i], tensors, feeds)
    new = set(range(len(feeds) - len(step.specs), len(feeds)))
    _rule(new <= used, step, "it uses the feeds that it adds")


def _check_slots(
    step: Step,
    slots: tuple[int, ...],
    consts: dict[int, Const],
    parts: Any,
    tensors: list[Output],
    feeds: list[Spec],
) -> set[int]:
    """Checks what each slot refers to, and returns the numbers of the feeds among them."""
    constant = {i for i, slot in enumerate(slots) if slot == CONST}
    _rule(constant == set(consts), step, "its constant slots are those with a constant")
    used = set()
    for i, (slot, part) in enumerate(zip(slots, parts, strict=True)):
        if slot >= 0:
            _rule(slot < len(tensors), step, f"input {i} is an earlier tensor, which {slot} is not")
            _rule(tensors[slot].const is None, step, f"input {i} is a tensor that is computed")
            _rule(tensors[slot].spec is part, step, f"input {i} is a tensor of the spec {part}")
        elif slot > CONST:
            feed = -1 - slot
            _rule(feed < len(feeds), step, f"input {i} is a feed of the segment, which {feed} is not")
            _rule(feeds[feed] is part, step, f"input {i} is a feed of the spec {part}")
            used.add(feed)
        elif slot == CONST:
            same = isinstance(part, Spec) or consts[i] == part
            _rule(same, step, f"input {i} is its variant's constant, {part}")
    return used
