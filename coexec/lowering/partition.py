"""Partition: outlines the operations of a function that XLA can compile into functions of their own.

An operation's level is the number of parts before it on the longest path, and the operations of a level form a part:
so parts never form a cycle, and there are as few as possible.

Relies on `_XlaMustCompile`, which makes TensorFlow compile the function that a call node names, as for a `tf.function`
with `jit_compile=True` inside another one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from coexec.base.tuning import tuning
from coexec.lowering.function_body import Body
from tracer.block import LOOP
from tracer.private import function_pb2, node_def_pb2
from tracer.spec import RESOURCE, VARIANT, Spec

# Reads, writes and failures are left to TensorFlow's runtime.
_STAY = frozenset({"Assert", "AssignVariableOp", "NoOp", "ReadVariableOp"})


@dataclass(frozen=True)
class Part:
    """A function that XLA compiles (`definition`), and one that only calls it (`alone`).

    Launching `alone` compiles a part ahead of its first use: XLA's cache key includes how the function is called.
    """

    definition: Any
    alone: Any
    arguments: tuple[Spec, ...]
    results: int


def outline(body: Body, outside: set[str]) -> list[Part]:
    """Moves the operations of `body`, in place, into parts, except the nodes named in `outside`; returns the parts.

    Their names start with the function's. Returns an empty list, and changes nothing, if no part is worth compiling.
    """
    definition = body.definition
    groups = _groups(body, outside)
    home = {node.name: call for call, members in groups.items() for node in members}
    if not groups:
        return []
    constants = {node.name: node for node in definition.node_def if node.op == "Const"}
    given = _leaving(definition, home)
    names: dict[str, str] = {}  # the parts' results, renamed in the function
    parts, calls = [], []
    for call, members in groups.items():
        function = function_pb2.FunctionDef()
        function.signature.name = call
        function.attr["_XlaMustCompile"].b = True
        taken = _fill(function, members, home, constants, body.specs)
        for k, tensor in enumerate(given[call]):
            function.signature.output_arg.add(name=f"result_{k}", type=body.specs[tensor].enum)
            function.ret[f"result_{k}"] = tensor
            names[tensor] = f"{call}:output:{k}"
        calls.append(_call(function, taken))
        specs = tuple(body.specs[tensor] for tensor in taken)
        parts.append(Part(function, _alone(function), specs, len(given[call])))
    rest = [_copy(node) for node in definition.node_def if node.name not in home] + calls
    for node in rest:
        behind = dict.fromkeys(f"^{home.get(i[1:], i[1:])}" for i in node.input if i.startswith("^"))
        node.input[:] = [*(names.get(i, i) for i in node.input if not i.startswith("^")), *behind]
    for result, tensor in list(definition.ret.items()):
        definition.ret[result] = names.get(tensor, tensor)
    del definition.node_def[:]
    definition.node_def.extend(rest)
    return parts


def _groups(body: Body, outside: set[str]) -> dict[str, list[Any]]:
    """Returns the nodes of each part, by the part's name."""
    levels: dict[str, int] = {}  # by node, its part's level; if it stays, that of the last part before it (-1: none)
    found: defaultdict[int, list[Any]] = defaultdict(list)
    staying = set(outside)
    for node in body.definition.node_def:  # in topological order
        if node.op == "Const":
            continue
        sources = [source for i in node.input if (source := _source(i)) in levels]
        if node.op in _STAY or node.name in outside or not _compiles(body, node):
            staying.add(node.name)
            levels[node.name] = max([levels[s] for s in sources], default=-1)
        else:
            levels[node.name] = max([levels[s] + (s in staying) for s in sources], default=0)
            found[levels[node.name]].append(node)
    name = body.definition.signature.name
    return {f"{name}_part_{level}": nodes for level, nodes in found.items() if _is_worth_it(nodes)}


def _is_worth_it(nodes: list[Any]) -> bool:
    """Whether a part is worth compiling: it is large enough, or has a loop."""
    return len(nodes) >= tuning.min_outlined or any(node.op == LOOP for node in nodes)  # loops are emitted for XLA


def _leaving(definition: Any, home: dict[str, str]) -> dict[str, list[str]]:
    """Returns the tensors that leave each part, as inputs of other nodes or results of the function."""
    leaving: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for node in definition.node_def:
        for tensor in node.input:
            part = home.get(_source(tensor))
            if part is not None and not tensor.startswith("^") and home.get(node.name) != part:
                leaving[part][tensor] = None
    for tensor in definition.ret.values():
        if _source(tensor) in home:
            leaving[home[_source(tensor)]][tensor] = None
    return {part: list(leaving[part]) for part in home.values()}


def _fill(function: Any, nodes: list[Any], home: dict[str, str], constants: dict[str, Any], specs: Any) -> list[str]:
    """Copies the nodes, and the constants they use, into a part; returns the tensors that become its arguments."""
    call = function.signature.name
    taken: dict[str, str] = {}
    for node in nodes:
        for tensor in node.input:
            source = _source(tensor)
            if source not in constants and home.get(source) != call:
                taken.setdefault(tensor, f"given_{len(taken)}")
    here = dict.fromkeys(source for node in nodes for i in node.input if (source := _source(i)) in constants)
    function.node_def.extend([constants[name] for name in here])
    for node in nodes:
        copy = function.node_def.add()
        copy.CopyFrom(node)
        copy.input[:] = [taken.get(i, i) for i in node.input]
    for tensor, name in taken.items():
        function.signature.input_arg.add(name=name, type=specs[tensor].enum)
    return list(taken)


def _call(function: Any, taken: list[str]) -> Any:
    """Returns the node that calls a part."""
    node, signature = node_def_pb2.NodeDef(), function.signature
    node.name, node.op = signature.name, "PartitionedCall"
    node.input.extend(taken)
    node.attr["f"].func.name = signature.name
    node.attr["Tin"].list.type.extend([arg.type for arg in signature.input_arg])
    node.attr["Tout"].list.type.extend([arg.type for arg in signature.output_arg])
    node.attr["_XlaMustCompile"].b = True
    return node


def _alone(function: Any) -> Any:
    """Returns a function that only calls a part."""
    alone = function_pb2.FunctionDef()
    alone.signature.CopyFrom(function.signature)
    alone.signature.name = f"{function.signature.name}_alone"
    alone.node_def.append(_call(function, [arg.name for arg in function.signature.input_arg]))
    for k, arg in enumerate(function.signature.output_arg):
        alone.ret[arg.name] = f"{function.signature.name}:output:{k}"
    return alone


def _copy(node: Any) -> Any:
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    return copy


def _source(tensor: str) -> str:
    """Returns the name of the node that produces a tensor, or that a control input names."""
    return tensor.removeprefix("^").partition(":")[0]


def _compiles(body: Body, node: Any) -> bool:
    """Whether all inputs of a node may be arguments of a part."""
    given = (body.specs.get(tensor) for tensor in node.input)
    return not any(spec is not None and spec.enum in (RESOURCE, VARIANT) for spec in given)
