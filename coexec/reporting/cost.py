"""Cost: the arithmetic and the memory of operations, estimated from their shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracer.block import steps_of
from tracer.graph import Step
from tracer.spec import Spec
from tracer.variable_ops import OPTIMIZER_OPS

# They compute nothing: they move, rename or describe.
_FREE = frozenset(
    """
    AssignVariableOp BroadcastTo Cast Concat ConcatV2 Const ExpandDims Fill GatherV2 Identity IdentityN OneHot OnesLike
    Pack Pad PadV2 PreventGradient Range Rank ReadVariableOp Reshape ResourceGather Reverse ReverseV2 Roll Shape ShapeN
    Size Slice Snapshot Split SplitV Squeeze StopGradient StridedSlice StridedSliceGrad Tile Transpose Unpack
    VariableShape ZerosLike
    """.split()  # noqa: SIM905 (one name a line would take a screen)
)
# They take one operation for each element that goes in, not for each that comes out.
_REDUCING = frozenset("All Any ArgMax ArgMin BiasAddGrad L2Loss Max Mean Min Prod Sum".split())  # noqa: SIM905
_MATRIX_PRODUCTS = {"MatMul": "transpose_a", "BatchMatMul": "adj_x", "BatchMatMulV2": "adj_x", "BatchMatMulV3": "adj_x"}


@dataclass(frozen=True)
class Cost:
    """What operations take, estimated from their shapes: of one segment, or of all that a call launches."""

    name: str
    segments: int
    operations: int  # of TensorFlow; those known from shapes alone are left out
    flops: int  # floating-point operations; a multiply-add counts as two
    bytes_accessed: int  # that the operations read and write, one by one; fusion avoids most of it
    bytes_transferred: int  # what goes in and comes out: the least that has to be read and written
    memory: int  # most bytes that are alive at once, the feeds and variables included, without fusion
    kinds: tuple[tuple[str, int, int], ...] = ()  # of operations, most flops first: name, count, flops
    repeated: bool = False  # whether there are loops on the device, of which one iteration is counted

    def as_dict(self) -> dict[str, Any]:
        """Returns the same as a dict that `json` can write."""
        kinds = [{"operation": op, "count": count, "flops": flops} for op, count, flops in self.kinds]
        return {**vars(self), "kinds": kinds}

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.operations} operations in {_counted(self.segments, 'segment')}, estimated from shapes",
            f"  arithmetic   {_scaled(self.flops, 1000, 'flop')}",
            f"  bytes        {_scaled(self.bytes_accessed)} if each operation reads and writes memory; "
            f"{_scaled(self.bytes_transferred)} go in and come out",
            f"  memory       {_scaled(self.memory)} at most at once",
        ]
        lines += [f"  {flops / self.flops:10.1%}   {count} x {op}" for op, count, flops in self.kinds[:5] if flops]
        if self.repeated:
            lines.append("  loops on the device count with one iteration")
        return "\n".join(lines)

    __repr__ = __str__


def cost_of(name: str, steps: Sequence[Step], feeds: Sequence[Spec], outputs: Sequence[int]) -> Cost:
    """Returns the cost of a segment; `outputs`: the numbers of the tensors that come out."""
    kinds: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    accessed, repeated = 0, False
    running = [step for step in steps if step.variant is not None and not step.variant.folded]
    for step in running:
        inside = steps_of(step)
        repeated = repeated or bool(inside)
        for each in (step, *inside):
            op = each.op or ""
            kinds[op] += 1
            flops[op] += 0 if inside and each is step else flops_of(each)
            accessed += sum(spec.size for spec in (*inputs_of(each), *(out.spec for out in each.outputs)))
    sizes = {step.first + n: out.spec.size for step in steps for n, out in enumerate(step.outputs)}
    given = sum(spec.size for spec in feeds)
    return Cost(
        name, 1, len(running), sum(flops.values()), accessed, given + sum(sizes.get(n, 0) for n in outputs),
        given + _most_alive(running, sizes, frozenset(outputs)),
        tuple((op, kinds[op], most) for op, most in flops.most_common()), repeated,
    )  # fmt: skip


def summed(name: str, costs: Sequence[Cost]) -> Cost:
    """Returns the cost of segments that run one after the other."""
    kinds: dict[str, tuple[int, int]] = {}
    for cost in costs:
        for op, count, flops in cost.kinds:
            before = kinds.get(op, (0, 0))
            kinds[op] = before[0] + count, before[1] + flops
    ranked = sorted(((op, *rest) for op, rest in kinds.items()), key=lambda kind: -kind[2])
    return Cost(
        name, len(costs), sum(c.operations for c in costs), sum(c.flops for c in costs),
        sum(c.bytes_accessed for c in costs), sum(c.bytes_transferred for c in costs),
        max((c.memory for c in costs), default=0), tuple(ranked), any(c.repeated for c in costs),
    )  # fmt: skip


def _most_alive(steps: Sequence[Step], sizes: dict[int, int], outputs: frozenset[int]) -> int:
    """Returns the most bytes of computed tensors that are needed at once, if each dies after its last use."""
    last = {number: n for n, step in enumerate(steps) for number in _used(step)}
    alive = most = 0
    for n, step in enumerate(steps):
        alive += sum(sizes[step.first + k] for k in range(len(step.outputs)))
        most = max(most, alive)
        dead = {number for number in _used(step) if last[number] == n}
        dead |= {number for number in range(step.first, step.end) if number not in last}  # used by nothing
        alive -= sum(sizes.get(number, 0) for number in dead - outputs)
    return most


def _used(step: Step) -> list[int]:
    """Returns the numbers of the segment's tensors that a step takes."""
    slots = [*step.slots, *(slot for inner, _ in step.lists.values() for slot in inner)]
    return [slot for slot in slots if slot >= 0]


def inputs_of(step: Step) -> list[Spec]:
    """Returns the specs of a step's inputs, those of constants aside."""
    parts = step.variant.key if step.variant is not None else ()
    flat = [inner for part in parts for inner in (part if isinstance(part, tuple) else (part,))]
    return [part for part in flat if isinstance(part, Spec)]


def _sizes(spec: Spec) -> tuple[int, ...]:
    """Returns the shape; sizes that depend on values count as 1, as in `Spec.size`."""
    return tuple([1 if size is None else size for size in spec.shape]) if spec.open else spec.shape


def flops_of(step: Step) -> int:
    """Returns the floating-point operations of a step: of products by their rule, else one for each element."""
    op, given = step.op or "", inputs_of(step)
    shapes = [_sizes(spec) for spec in given]
    made = max((math.prod(_sizes(out.spec)) for out in step.outputs), default=0)
    attrs = dict(zip(step.attrs[::2], step.attrs[1::2], strict=False)) if len(step.attrs) % 2 == 0 else {}
    if op in _FREE:
        return 0
    if op in _MATRIX_PRODUCTS and shapes and len(shapes[0]) > 1:
        return 2 * made * shapes[0][-2 if attrs.get(_MATRIX_PRODUCTS[op]) else -1]
    if op == "Einsum":
        return _einsum(str(attrs.get("equation", "")), shapes, made)
    if op in ("Conv2D", "Conv3D", "DepthwiseConv2dNative") and len(shapes) > 1:
        window = shapes[1][:-2] if op.startswith("Depthwise") else shapes[1][:-1]
        return 2 * made * math.prod(window)
    if "BackpropInput" in op or "BackpropFilter" in op:
        return _way_back(op, shapes, [_sizes(out.spec) for out in step.outputs])
    if op in OPTIMIZER_OPS and given:
        return 8 * max(math.prod(shape) for shape in shapes)
    if op in _REDUCING and shapes:
        return max(math.prod(shape) for shape in shapes)
    return made


def _einsum(equation: str, shapes: list[tuple[int, ...]], made: int) -> int:
    left = equation.split("->")[0].split(",")
    if "." in equation or len(left) != len(shapes):
        return made
    sizes = {label: size for labels, shape in zip(left, shapes, strict=True) for label, size in zip(labels, shape)}  # noqa: B905
    return len(left) * math.prod(sizes.values())


def _way_back(op: str, shapes: list[tuple[int, ...]], made: list[tuple[int, ...]]) -> int:
    """Returns what a convolution's gradient takes: as much as the convolution, which gave the last input's shape."""
    filters = made[0] if "Filter" in op else next((shape for shape in shapes if len(shape) > 1), ())
    window = filters[:-2] if op.startswith("Depthwise") else filters[:-1]
    return 2 * math.prod(shapes[-1] if shapes else ()) * math.prod(window)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _scaled(number: int, base: int = 1024, unit: str = "B") -> str:
    """Returns a number with a prefix: 1.5 MiB, 20 Mflop."""
    value, prefixes = float(number), ["", "k", "M", "G", "T"] if base == 1000 else ["", "Ki", "Mi", "Gi", "Ti"]
    while value >= base and len(prefixes) > 1:
        value, prefixes = value / base, prefixes[1:]
    return f"{value:.3g} {prefixes[0]}{unit}"
