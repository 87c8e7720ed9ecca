"""Kinds: a function's operations as `repeats` compares them, with what may differ from turn to turn of a loop."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import tensorflow as tf

from coexec.lowering.body import Body
from coexec.lowering.failures import POSITIONS
from coexec.lowering.repeats import Sequence
from tracer.block import STRUCTURES
from tracer.nodedef import outputs_of
from tracer.op import signature_of
from tracer.private import function_pb2
from tracer.spec import RESOURCE, VARIANT

# Operations with more inputs than this are no part of a turn: they sum or stack what turns have given.
_MANY = 16

# Integers may differ from turn to turn where these take them; where others do they may have to be constants.
_ANY = frozenset(
    """
    Add AddV2 BitwiseAnd BitwiseOr BitwiseXor Cast Equal ExpandDims FloorDiv FloorMod Greater GreaterEqual Identity
    Less LessEqual LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul Neg NotEqual Pack SelectV2 Square Sub
    XlaOptimizationBarrier
    """.split()  # noqa: SIM905
)

_INDICES = {("GatherV2", 1), ("GatherNd", 1), ("OneHot", 0)}

# TensorFlow takes these for operations with state; XLA takes them for nothing, and a predicate says whether they fail.
_ONLY_FAIL = frozenset({"CheckNumerics"})

# By operation: which inputs say which part of a tensor it takes, or makes.
SLIDING = {"Slice": (1, 2), "StridedSlice": (1, 2, 3), "StridedSliceGrad": (0, 1, 2, 3)}


def calls_functions(body: Body) -> bool:
    """Whether functions are called by their names, as recursion does: there is no signature to go by."""
    return any(signature_of(node.op) is None for node in body.definition.node_def)


class Operations:
    """A function's operations, in an order in which each is behind what it takes."""

    def __init__(self, body: Body, fixed: set[str]) -> None:
        """Those named in `fixed` are no part of a turn."""
        self.specs = body.specs
        definition = function_pb2.FunctionDef()
        definition.CopyFrom(body.definition)
        self.definition = definition
        self.constants = {node.name: node for node in definition.node_def if node.op == "Const"}
        live = _live(definition)
        nodes = [n for n in definition.node_def if n.op != "Const" and n.name in live]
        # What reads a variable stands in front: all reads see what was there before the launch.
        self.nodes = sorted(nodes, key=lambda node: node.op != "ReadVariableOp")
        self.places = {node.name: place for place, node in enumerate(self.nodes)}
        self.taken = {node.name: list(node.input) for node in self.nodes}
        self.outputs = [outputs_of(node) for node in self.nodes]
        self.makers = {name: (k, port) for k, names in enumerate(self.outputs) for port, name in enumerate(names)}
        self.slides = {n.name: slide for n in self.nodes if (slide := self._slide(n)) is not None}
        self.inputs = [self._inputs(node) for node in self.nodes]
        returned = set(definition.ret.values())
        self.users: defaultdict[str, list[int]] = defaultdict(list)  # by tensor, the places of what takes it
        for k, node in enumerate(self.nodes):
            for name in self.taken[node.name]:
                self.users[name].append(k)
        for name in returned:
            self.users[name].append(-1)
        colours: dict[Any, int] = {}
        kinds = [
            place if node.name in fixed or not self._may_turn(place, node, returned) else self._kind(place, node)
            for place, node in enumerate(self.nodes)
        ]
        coloured = [colours.setdefault(kind, len(colours)) for kind in kinds]
        numbers: dict[str, int] = {}
        numbered = [[numbers.setdefault(name, len(numbers)) for name in names] for names in self.inputs]
        made = [self.makers.get(name, (-1, 0)) for name in numbers]
        self.sequence = Sequence(coloured, numbered, [k for k, _ in made], [port for _, port in made])

    def _inputs(self, node: Any) -> list[str]:
        """Returns the tensors that a node takes, but those that say which part it takes of another."""
        skipped = SLIDING[node.op] if node.name in self.slides else ()
        return [n for k, n in enumerate(self.taken[node.name]) if k not in skipped and not n.startswith("^")]

    def _may_turn(self, place: int, node: Any, returned: set[str]) -> bool:
        signature = signature_of(node.op)
        taken, outputs = self.taken[node.name], self.outputs[place]
        if signature is None or node.op in STRUCTURES or len(taken) > _MANY:
            return False
        if signature.definition.is_stateful and node.op not in _ONLY_FAIL:
            return False
        if not outputs or any(name.startswith("^") for name in taken) or not returned.isdisjoint(outputs):
            return False
        return not any(self.specs[name].enum in (RESOURCE, VARIANT) for name in (*taken, *outputs))

    def _kind(self, place: int, node: Any) -> Any:
        """Returns what is equal for operations that may be one in several turns."""
        attrs = tuple(sorted([(name, value.SerializeToString()) for name, value in node.attr.items()]))
        slide = self.slides.get(node.name)
        skipped = () if slide is None else SLIDING[node.op]
        positions = POSITIONS.get(node.op, ())
        if node.op == "ConcatV2":  # behind a list
            positions = (len(self.taken[node.name]) - 1,)
        taken = []
        for k, name in enumerate(self.taken[node.name]):
            if k in skipped:
                continue
            spec, known = self.specs[name], source_of(name) in self.constants
            if k in positions:
                taken.append((spec, name if known else place))  # a loop would hide from XLA what it finds out now
            else:
                free = spec.dtype.is_floating or spec.dtype.is_complex or node.op in _ANY or (node.op, k) in _INDICES
                taken.append((spec, None if free or not known else name))
        given = tuple([self.specs[name] for name in self.outputs[place]])
        return node.op, attrs, tuple(taken), given, None if slide is None else tuple(slide[1])

    def _slide(self, node: Any) -> tuple[list[int], list[int]] | None:
        """Returns where a part of a tensor begins and how large it is, of a node that takes or makes a known part."""
        if node.op not in SLIDING:
            return None
        values = [self.value(node.input[k]) for k in SLIDING[node.op]]
        if any(value is None for value in values):
            return None
        if node.op == "Slice":
            return [int(b) for b in values[0]], list(self.specs[outputs_of(node)[0]].shape)
        *whole, begin, end, strides = values
        attr = node.attr
        if attr["ellipsis_mask"].i or attr["new_axis_mask"].i or any(int(s) != 1 for s in strides):
            return None
        sizes = [int(dim) for dim in (whole[0] if whole else self.specs[node.input[0]].shape)]
        begins = [0] * len(sizes)
        for n, (first, last) in enumerate(zip(begin, end, strict=True)):
            bit, dim = 1 << n, sizes[n]
            if attr["shrink_axis_mask"].i & bit:
                begins[n], sizes[n] = int(first) % max(dim, 1), 1
                continue
            low = None if attr["begin_mask"].i & bit else int(first)
            high = None if attr["end_mask"].i & bit else int(last)
            begins[n], until, _ = slice(low, high).indices(dim)
            sizes[n] = max(until - begins[n], 0)
        return begins, sizes

    def value(self, name: str) -> Any:
        """Returns a tensor's value, if it is a constant."""
        node = self.constants.get(source_of(name))
        return None if node is None else tf.make_ndarray(node.attr["value"].tensor)


def source_of(tensor: str) -> str:
    """Returns the name of the node that gives a tensor, or that a control input is."""
    return tensor.removeprefix("^").partition(":")[0]


def _live(definition: Any) -> set[str]:
    """Returns the names of the nodes that somebody takes something of, or that run in any case."""
    nodes = {node.name: node for node in definition.node_def}
    ahead = [*map(source_of, definition.ret.values()), *definition.control_ret.values()]
    live: set[str] = set()
    while ahead:
        name = ahead.pop()
        if name not in live and name in nodes:
            live.add(name)
            ahead += map(source_of, nodes[name].input)
    return live
