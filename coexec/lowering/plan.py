"""Plan: what crosses a segment's border, decided before anything is emitted. Pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from coexec.lowering.failures import RANDOM, can_fail, needs_check
from tracer.graph import Step
from tracer.op import freeze
from tracer.spec import RESOURCE, Spec

# On CPU, XLA's convolutions take about three times as long as the graph's oneDNN kernels (ResNet50 training step at
# 64x64, batch 8: 1138 ms against 367 ms), so a segment with one of these goes to `graph` there.
SLOW_ON_CPU = frozenset(
    {"Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "Conv3D", "Conv3DBackpropFilterV2",
     "Conv3DBackpropInputV2", "DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter",
     "DepthwiseConv2dNativeBackpropInput", "MaxPoolGrad"}
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The segment that ends behind `steps[-1]`: its operations, feeds and results."""

    steps: tuple[Step, ...]
    feeds: tuple[Spec, ...]
    outputs: tuple[int, ...]  # numbers of the tensors that somebody may read after the segment
    refusal: str | None  # why it cannot be emitted
    xla_refusal: str | None  # why it cannot be compiled by XLA

    heavy: bool  # whether there are operations that TensorFlow's threads should share

    @property
    def content(self) -> Any:
        """What the executable depends on, without the places: segments of equal content share one."""
        return tuple(_content(s) for s in self.steps), self.feeds, self.outputs

    @property
    def size(self) -> int:
        """How many bytes its feeds have, and the variables behind them."""
        held = [spec.handle[0] if spec.handle else (spec.enum, spec.shape) for spec in self.feeds]
        return sum(math.prod(shape or ()) * max(tf.dtypes.as_dtype(enum).size, 1) for enum, shape in held)

    @property
    def live(self) -> int:
        """How many operations run (those known from shapes alone do not)."""
        return sum(not s.variant.folded for s in self.steps if s.variant is not None)


def _content(step: Step) -> Any:
    assert step.node is not None
    lists = tuple((i, slots, tuple(consts.items())) for i, (slots, consts) in step.lists.items())
    outputs = tuple((o.spec, o.const) for o in step.outputs)
    return step.op, step.node.entry, freeze(step.attrs), step.slots, tuple(step.consts.items()), lists, outputs


def make_plan(last: Step, outputs: tuple[int, ...], on_cpu: bool) -> Plan:
    """Decides what the segment that ends behind `last` takes in and gives out."""
    steps = tuple(last.chain())
    feeds = tuple(spec for s in steps for spec in s.specs)
    refusal = xla_refusal = None
    slow = None
    for step in steps:
        op, node = step.op or "", step.node
        assert node is not None
        if op in ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"):
            refusal = refusal or _assigns_other_shape(step, steps, feeds)
        if op in RANDOM:
            xla_refusal = xla_refusal or f"{op} at {node.location} draws other numbers under XLA than eagerly"
        elif can_fail(step) and not needs_check(step):
            xla_refusal = xla_refusal or f"{op} at {node.location} may fail on some values, which XLA would not tell"
        if on_cpu and op in SLOW_ON_CPU:
            slow = f"{op} at {node.location} is slower under XLA on CPU"
    return Plan(steps, feeds, outputs, refusal, xla_refusal or slow, any(s.op in SLOW_ON_CPU for s in steps))


def _assigns_other_shape(step: Step, steps: tuple[Step, ...], feeds: tuple[Spec, ...]) -> str | None:
    handle = feeds[-1 - step.slots[0]] if step.slots[0] < 0 else None
    if handle is None or handle.enum != RESOURCE or handle.handle is None:
        return f"{step.op} on an unknown variable"
    slot = step.slots[1]
    if slot >= 0:
        spec = next(o.spec for s in steps for n, o in enumerate(s.outputs) if s.first + n == slot)
    elif 1 in step.consts:
        return None if step.consts[1].value is not None else "None is assigned"
    else:
        spec = feeds[-1 - slot]
    if (spec.enum, spec.shape) != handle.handle[0]:
        return f"{step.op} changes the shape or dtype of a variable"
    return None
