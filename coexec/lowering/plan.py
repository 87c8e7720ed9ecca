"""Plan: a segment's inputs and outputs, and which backends can compile it, decided before emission. Pure data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from coexec.base.tuning import tuning
from coexec.lowering.op_failures import can_fail, differs, needs_check
from coexec.lowering.row_updates import OPTIMIZERS, RowUpdates, row_updates
from coexec.lowering.show_plan import lines_of
from coexec.lowering.xla.philox import WORDS
from tracer.block import BRANCH, CALL, LOOP, STRUCTURES, Branch, RecursiveFunction, steps_of
from tracer.graph import Step
from tracer.private import types_pb2
from tracer.rebuild import RESERVED
from tracer.spec import RESOURCE, VARIANT, Spec, intern_spec
from tracer.variable_ops import READS, is_variable_op
from tracer.versions import present

# Operations whose CPU kernels use TensorFlow's intra-op thread pool.
HEAVY = frozenset(
    {"Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "Conv3D", "Conv3DBackpropFilterV2",
     "Conv3DBackpropInputV2", "DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter",
     "DepthwiseConv2dNativeBackpropInput", "MaxPoolGrad"}
)  # fmt: skip

# XLA packs several of these into a byte; TensorFlow's tensors hold one per byte.
_PACKED = frozenset(
    getattr(types_pb2, name) for name in present(types_pb2, "DT_INT4", "DT_UINT4", "DT_INT2", "DT_UINT2")
)

_COSTLY = frozenset({"BatchMatMulV2", "BatchMatMulV3", "Cholesky", "Einsum", "MatMul", "Qr", "Sort", "Svd", "TopKV2"})


def selects(branch: Branch) -> bool:
    """Returns whether a branch is lowered to a select: both sides are computed."""
    steps = [*branch.then.steps, *branch.other.steps]
    inner = [s for step in steps for s in (step, *steps_of(step)) if s.variant is not None and not s.variant.folded]
    if len(inner) > tuning.select_operations:
        return False
    if any(s.op in (LOOP, CALL) or s.op in _COSTLY or s.op in HEAVY for s in inner):
        return False
    given = [spec.size for block in (branch.then, branch.other) for spec in block.arguments]
    if max([*given, *(out.spec.size for s in inner for out in s.outputs)], default=0) > tuning.select_bytes:
        return False
    return not any(can_fail(s) or needs_check(s) for s in inner if s.op != BRANCH)


@dataclass(frozen=True)
class Plan:
    """The segment that ends after `steps[-1]`: its operations, feeds and results."""

    steps: tuple[Step, ...]
    feeds: tuple[Spec, ...]
    outputs: tuple[int, ...]  # numbers of the tensors that may be used after the segment
    refusal: str | None  # why it cannot be emitted
    xla_refusal: str | None  # why XLA can compile nothing of it
    outside: dict[int, str]  # indices of the steps that XLA cannot compile, with the reason
    heavy: bool  # whether it has operations that should use TensorFlow's thread pools
    row_updates: RowUpdates  # what a graph runs on variables themselves

    @functools.cached_property  # read more than once, and may span thousands of steps
    def content(self) -> Any:
        """The executable's cache key: all that it depends on except source locations."""
        return tuple(_content(s) for s in self.steps), self.feeds, self.outputs

    @property
    def words(self) -> Spec | None:
        """Spec of the feed, after the others, with the seeds of its random operations; None if it has none."""
        draws = self.steps[-1].draws
        return intern_spec(types_pb2.DT_UINT64, (WORDS * draws,)) if draws else None

    @property
    def size(self) -> int:
        """Size in bytes of its feeds, and of the variables behind them."""
        return sum(spec.size for spec in self.feeds)

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """The feeds with variables that its operations write."""
        writing = [s for s in self.steps if is_variable_op(s.op or "") and s.op not in READS]
        slots = {-1 - slot for s in writing for slot in s.slots if slot < 0}
        return frozenset(n for n, spec in enumerate(self.feeds) if spec.enum == RESOURCE and n in slots)

    @functools.cached_property
    def grain(self) -> float:
        """Mean size in bytes of an operation's results."""
        given = [out.spec.size for s in self.steps if s.variant and not s.variant.folded for out in s.outputs]
        return sum(given) / max(self.live, 1)

    def __str__(self) -> str:
        refusals = [("refused", self.refusal), ("not for XLA", self.xla_refusal)]
        lines = [f"  {what}: {why}" for what, why in refusals if why]
        lines += [f"  not for XLA, {self.steps[n].op}: {why}" for n, why in self.outside.items()]
        head = f"plan of {self.live} operations, with {self.size} bytes of feeds"
        return "\n".join([head, *lines_of(self.steps, self.feeds, self.outputs), *lines])

    def refusal_by_xla(self, least: int) -> str | None:
        """Returns why XLA can compile neither all of it nor `least` operations of it; None if it can."""
        if self.xla_refusal is None and self.outside and self.live - len(self.outside) < least:
            return next(iter(self.outside.values()))
        return self.xla_refusal

    @functools.cached_property
    def live(self) -> int:
        """How many operations run; constant-folded ones, known from shapes alone, do not."""
        return sum(not s.variant.folded for s in self.steps if s.variant is not None)


def _content(step: Step) -> Any:
    """Returns a step's part of the cache key."""
    assert step.node is not None
    lists = tuple([(i, slots, tuple(consts.items())) for i, (slots, consts) in step.lists.items()])
    outputs = tuple([(o.spec, o.const) for o in step.outputs])
    return step.op, step.node.entry, step.node.frozen, step.slots, tuple(step.consts.items()), lists, outputs


def make_plan(last: Step, outputs: tuple[int, ...]) -> Plan:
    """Plans the segment that ends after `last` and returns the tensors numbered in `outputs`."""
    steps = tuple(s for s in last.chain() if s.variant is not None)  # the others have already run
    feeds = tuple(spec for s in steps for spec in s.specs)
    made = {s.first + n: out.spec for s in steps for n, out in enumerate(s.outputs)}
    refusal = xla_refusal = None
    outside: dict[int, str] = {}
    for place, step in enumerate(steps):
        op, node = step.op or "", step.node
        assert node is not None
        if step.variant is not None and step.variant.folded:  # constant-folded: it does not run
            continue
        if op in ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"):
            refusal = refusal or _assigns_other_shape(step, made, feeds)
        if recurses(step):
            outside[place] = f"a function called at {node.location} calls itself"
        if op in STRUCTURES:
            continue  # its operations were checked when it was staged
        if node.callee is not None:
            outside[place] = f"{op} called at {node.location} is a graph function, which runs as TensorFlow runs it"
            continue
        if op in OPTIMIZERS:
            xla_refusal = xla_refusal or f"{op} at {node.location} has no kernel that XLA compiles"
        elif step.open:
            outside[place] = f"{op} at {node.location} works on tensors whose sizes depend on values"
        elif op == "ZerosLike" and any(out.spec.enum == VARIANT for out in step.outputs):
            outside[place] = f"{op} at {node.location} works on a variant"
        elif difference := differs(op):
            outside[place] = f"{op} at {node.location} {difference}"
        elif can_fail(step) and not needs_check(step):
            outside[place] = f"{op} at {node.location} may fail on some values, which XLA would not tell"
        if any(step.first + n in outputs for n in RESERVED.get(op, ())):
            outside[place] = f"{op} at {node.location} gives XLA's own workspace, which the program holds"
    if any((spec.handle[0][0] if spec.handle else spec.enum) in _PACKED for spec in (*feeds, *made.values())):
        xla_refusal = xla_refusal or "TensorFlow gives XLA one number a byte where XLA expects several"
    if last.dynamic:
        xla_refusal = "its sizes differ between calls, and XLA compiles for each of them"
    rows = row_updates(steps, feeds, last.dynamic)
    refusal = refusal or rows.refusal
    if rows.size(feeds) > tuning.max_copied_tables:
        xla_refusal = xla_refusal or "XLA would copy all rows of a variable of which few change"
    heavy = any(inner.op in HEAVY or _turns(inner) for s in steps for inner in (s, *steps_of(s)))
    return Plan(steps, feeds, outputs, refusal, xla_refusal, outside, heavy, rows)


def recurses(step: Step) -> bool:
    """Returns whether this is, or contains, a call of a recursive function."""
    if step.op not in STRUCTURES:
        return False
    return any(isinstance(s.attrs[1], RecursiveFunction) for s in (step, *steps_of(step)) if s.op in STRUCTURES)


def _turns(step: Step) -> bool:
    """Whether this calls functions: under a single-threaded executor each nested call blocks another thread."""
    if step.node is not None and step.node.callee is not None:
        return True
    return step.op == LOOP or recurses(step) or (step.op == BRANCH and not selects(step.attrs[1]))


def _assigns_other_shape(step: Step, made: dict[int, Spec], feeds: tuple[Spec, ...]) -> str | None:
    """Returns why an assignment cannot be emitted, None if it can: a variable must keep its dtype and shape."""
    handle = feeds[-1 - step.slots[0]] if step.slots[0] < 0 else None
    if handle is None or handle.enum != RESOURCE or handle.handle is None:
        return f"{step.op} on an unknown variable"
    slot = step.slots[1]
    if slot >= 0:
        spec = made[slot]
    elif 1 in step.consts:
        return None if step.consts[1].value is not None else "None is assigned"
    else:
        spec = feeds[-1 - slot]
    if (spec.enum, spec.shape) != handle.handle[0]:
        return f"{step.op} changes the shape or dtype of a variable"
    return None
