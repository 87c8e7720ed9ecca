"""Signatures: encodes a function's operations so that `find_repeats` can compare iterations of a loop."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.lowering.function_body import Body
from coexec.lowering.op_failures import POSITIONS
from coexec.lowering.reroll.find_repeats import Sequence
from tracer.block import STRUCTURES
from tracer.nodedef import outputs_of
from tracer.op import signature_of
from tracer.private import function_pb2
from tracer.spec import RESOURCE, VARIANT

# Constant integer inputs of these may differ between iterations; other operations may require compile-time constants.
_ANY = frozenset(
    """
    Add AddV2 BitwiseAnd BitwiseOr BitwiseXor Cast Equal ExpandDims FloorDiv FloorMod Greater GreaterEqual Identity
    Less LessEqual LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul Neg NotEqual Pack SelectV2 Square Sub
    XlaOptimizationBarrier
    """.split()  # noqa: SIM905
)

_INDICES = {("GatherV2", 1), ("GatherNd", 1), ("OneHot", 0)}

# Stateful to TensorFlow only because they may fail; XLA drops them, and a predicate stands for the failure.
_ONLY_FAIL = frozenset({"CheckNumerics"})

# By operation, the inputs that define the slice of a tensor that it reads or writes.
SLIDING = {"Slice": (1, 2), "StridedSlice": (1, 2, 3), "StridedSliceGrad": (0, 1, 2, 3)}


def calls_functions(body: Body) -> bool:
    """Whether a node calls a function by name, as recursion does: such a node has no signature to compare."""
    return any(signature_of(node.op) is None for node in body.definition.node_def)


class Operations:
    """A function's operations in topological order."""

    def __init__(self, body: Body, fixed: set[str]) -> None:
        """Reads `body` without changing it. The nodes named in `fixed` are never part of a loop."""
        self.specs = body.specs
        definition = function_pb2.FunctionDef()
        definition.CopyFrom(body.definition)
        self.definition = definition
        self.constants = {node.name: node for node in definition.node_def if node.op == "Const"}
        live = _live(definition)
        nodes = [n for n in definition.node_def if n.op != "Const" and n.name in live]
        # Variable reads come first: all of them see the values from before the launch.
        self.nodes = sorted(nodes, key=lambda node: node.op != "ReadVariableOp")
        self.places = {node.name: place for place, node in enumerate(self.nodes)}
        self.taken = {node.name: list(node.input) for node in self.nodes}
        self.outputs = [outputs_of(node) for node in self.nodes]
        self.makers = {name: (k, port) for k, names in enumerate(self.outputs) for port, name in enumerate(names)}
        self.slides = {n.name: slide for n in self.nodes if (slide := self._slide(n)) is not None}
        self.inputs = [self._inputs(node) for node in self.nodes]
        returned = set(definition.ret.values())
        self.users: defaultdict[str, list[int]] = defaultdict(list)  # by tensor, places of its users (-1: a result)
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
        """Returns a node's input tensors, without those that only position a slice."""
        skipped = SLIDING[node.op] if node.name in self.slides else ()
        return [n for k, n in enumerate(self.taken[node.name]) if k not in skipped and not n.startswith("^")]

    def _may_turn(self, place: int, node: Any, returned: set[str]) -> bool:
        """Whether an operation may be part of a loop: stateless, not a result, without resources or control inputs."""
        signature = signature_of(node.op)
        taken, outputs = self.taken[node.name], self.outputs[place]
        if signature is None or node.op in STRUCTURES or len(taken) > tuning.max_turn_inputs:
            return False
        if signature.definition.is_stateful and node.op not in _ONLY_FAIL:
            return False
        if not outputs or any(name.startswith("^") for name in taken) or not returned.isdisjoint(outputs):
            return False
        specs = [self.specs[name] for name in (*taken, *outputs)]
        return not any(spec.enum in (RESOURCE, VARIANT) or spec.open for spec in specs)

    def _kind(self, place: int, node: Any) -> Any:
        """Returns a key, equal for operations that may be iterations of the same one."""
        attrs = tuple(sorted([(name, value.SerializeToString()) for name, value in node.attr.items()]))
        slide = self.slides.get(node.name)
        skipped = () if slide is None else SLIDING[node.op]
        positions = POSITIONS.get(node.op, ())
        if node.op == "ConcatV2":  # the axis comes after a list
            positions = (len(self.taken[node.name]) - 1,)
        taken = []
        for k, name in enumerate(self.taken[node.name]):
            if k in skipped:
                continue
            spec, known = self.specs[name], source_of(name) in self.constants
            if k in positions:
                taken.append((spec, name if known else place))  # XLA could not resolve it in a loop
            else:
                free = spec.dtype.is_floating or spec.dtype.is_complex or node.op in _ANY or (node.op, k) in _INDICES
                taken.append((spec, None if free or not known else name))
        given = tuple([self.specs[name] for name in self.outputs[place]])
        return node.op, attrs, tuple(taken), given, None if slide is None else tuple(slide[1])

    def _slide(self, node: Any) -> tuple[list[int], list[int]] | None:
        """Returns the starts and sizes of the slice that a node reads or writes; None if it is not static."""
        if node.op not in SLIDING:
            return None
        values = [self.value(node.input[k]) for k in SLIDING[node.op]]
        if any(value is None for value in values) or self.specs[outputs_of(node)[0]].open:
            return None
        if node.op == "Slice":
            return [int(b) for b in values[0]], list(self.specs[outputs_of(node)[0]].shape)
        *whole, begin, end, strides = values
        if not whole and self.specs[node.input[0]].open:
            return None
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
        """Returns the value of a constant; None for any other tensor."""
        node = self.constants.get(source_of(name))
        return None if node is None else tf.make_ndarray(node.attr["value"].tensor)


def source_of(tensor: str) -> str:
    """Returns the name of the node that produces a tensor, or that a control input names."""
    return tensor.removeprefix("^").partition(":")[0]


def _live(definition: Any) -> set[str]:
    """Returns the names of the nodes that results or control results depend on."""
    nodes = {node.name: node for node in definition.node_def}
    ahead = [*map(source_of, definition.ret.values()), *definition.control_ret.values()]
    live: set[str] = set()
    while ahead:
        name = ahead.pop()
        if name not in live and name in nodes:
            live.add(name)
            ahead += map(source_of, nodes[name].input)
    return live
