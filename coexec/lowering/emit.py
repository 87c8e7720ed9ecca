"""Emit: a plan becomes the body of a TensorFlow function. No choices are made here.

State is made functional: a variable is read once, its later values are followed symbolically, and it is written at
the end, after everything that could fail. So a launch does all of its writes or none, and a launch that failed can
be carried out once more, operation by operation, to fail exactly where and as the eager program would.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from coexec.lowering.failures import can_fail, check, needs_check
from coexec.lowering.plan import Plan
from coexec.lowering.rewrites import as_kernel
from tracer.graph import LIST, Step
from tracer.op import signature_of
from tracer.private import func_graph
from tracer.rebuild import apply, grouped, placeholder
from tracer.spec import RESOURCE

_ADD = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
_SCATTER = {
    "ResourceScatterAdd": tf.tensor_scatter_nd_add,
    "ResourceScatterSub": tf.tensor_scatter_nd_sub,
    "ResourceScatterUpdate": tf.tensor_scatter_nd_update,
    "ResourceScatterMin": tf.tensor_scatter_nd_min,
    "ResourceScatterMax": tf.tensor_scatter_nd_max,
}


class Emitter:
    """Emits one plan; `checks` says whether failures must be foreseen (XLA) or will be raised (graph)."""

    def __init__(self, plan: Plan, checks: bool) -> None:
        self.plan = plan
        self.checks = checks
        self.values: dict[int, Any] = {}
        self.feeds: list[Any] = []
        self.state: dict[int, Any] = {}
        self.read: dict[int, Any] = {}
        self.written: set[int] = set()
        self.predicates: list[Any] = []
        self.failing: list[Any] = []

    def build(self) -> func_graph.FuncGraph:
        """Returns the function's graph. With checks that can fail its last output is a bool: all went well."""
        graph = func_graph.FuncGraph("segment")
        with graph.as_default():
            self.feeds = [placeholder(spec) for spec in self.plan.feeds]
            graph.inputs = list(self.feeds)
            for step in self.plan.steps:
                if step.variant is not None and not step.variant.folded:
                    self._emit(step)
            outputs = [tf.identity(self.values[i]) for i in self.plan.outputs]
            good = tf.reduce_all(tf.stack(self.predicates)) if self.predicates else None
            graph.control_outputs = self._write(good)
            graph.outputs = outputs if good is None else [*outputs, good]
        return graph

    def _write(self, good: Any) -> list[Any]:
        final = {k: self.state[k] for k in sorted(self.written)}
        if good is not None:
            final = {k: tf.where(good, value, self._old(k)) for k, value in final.items()}
        before = [*self.read.values(), *final.values(), *self.failing]
        writes = []
        with tf.control_dependencies(before):
            for k, value in final.items():
                writes.append(tf.raw_ops.AssignVariableOp(resource=self.feeds[k], value=value))
            writes.append(tf.no_op())
        return writes

    def _emit(self, step: Step) -> None:
        op = step.op or ""
        assert step.node is not None
        inputs = [self._input(step, i, slot) for i, slot in enumerate(step.slots)]
        if step.slots and step.slots[0] < 0 and self._is_resource(step.slots[0]):
            outputs = self._variable_op(step, op, -1 - step.slots[0], inputs)
        else:
            if self.checks and needs_check(step):
                self._check(step, op, inputs)
            if self.checks and step.outputs:
                outputs = as_kernel(op, inputs, step.outputs[0].spec.dtype, lambda i: self._apply(step, op, i))
            else:
                outputs = self._apply(step, op, inputs)
            if not self.checks and can_fail(step):
                self.failing.extend(outputs)
        for n, (tensor, out) in enumerate(zip(outputs, step.outputs, strict=True)):
            tensor.set_shape(out.spec.shape)
            self.values[step.first + n] = tensor

    def _apply(self, step: Step, op: str, inputs: list[Any]) -> list[Any]:
        assert step.node is not None
        return apply(op, step.node.entry, step.node.attrs, inputs)

    def _is_resource(self, slot: int) -> bool:
        k = -1 - slot
        return k < len(self.plan.feeds) and self.plan.feeds[k].enum == RESOURCE

    def _check(self, step: Step, op: str, inputs: list[Any]) -> None:
        attrs = dict(zip(step.attrs[::2], step.attrs[1::2], strict=True))
        if step.node is not None and step.node.entry == "execute":
            signature = signature_of(op)
            assert signature is not None
            inputs = grouped(signature, step.node.attrs, inputs)
        predicate = check(op, inputs, attrs)
        if predicate is None:
            raise NotImplementedError(f"{op} may fail on some values, which XLA would not tell")
        self.predicates.append(predicate)

    def _input(self, step: Step, i: int, slot: int) -> Any:
        if slot == LIST:
            slots, consts = step.lists[i]
            return [consts[j].value if j in consts else self._tensor(s) for j, s in enumerate(slots)]
        return step.consts[i].value if i in step.consts else self._tensor(slot)

    def _tensor(self, slot: int) -> Any:
        return self.values[slot] if slot >= 0 else self.feeds[-1 - slot]

    # Variables.

    def _old(self, k: int) -> Any:
        if k not in self.read:
            handle = self.plan.feeds[k].handle
            assert handle is not None
            enum, shape = handle[0]
            value = tf.raw_ops.ReadVariableOp(resource=self.feeds[k], dtype=enum)
            value.set_shape(shape)
            self.read[k] = value
        return self.read[k]

    def _current(self, k: int) -> Any:
        if k not in self.state:
            self.state[k] = self._old(k)
        return self.state[k]

    def _set(self, k: int, value: Any) -> None:
        self.state[k] = value
        self.written.add(k)

    def _added(self, op: str, value: Any, change: Any) -> Any:
        def add(inputs: list[Any]) -> list[Any]:
            return apply(op, "fast", (), inputs)

        inputs = [value, tf.convert_to_tensor(change, value.dtype)]
        return (as_kernel(op, inputs, value.dtype, add) if self.checks else add(inputs))[0]

    def _variable_op(self, step: Step, op: str, k: int, inputs: list[Any]) -> list[Any]:
        handle = self.plan.feeds[k].handle
        assert handle is not None
        if op == "ReadVariableOp":
            return [self._current(k)]
        if op == "AssignVariableOp":
            self._set(k, tf.convert_to_tensor(inputs[1], dtype=tf.dtypes.as_dtype(handle[0][0])))
            return []
        if op in _ADD:
            self._set(k, self._added(_ADD[op], self._current(k), inputs[1]))
            return []
        if self.checks:
            self._check(step, op, [self._current(k), *inputs[1:]])
        if op == "ResourceGather":
            attrs = dict(zip(step.attrs[::2], step.attrs[1::2], strict=True))
            dims = attrs.get("batch_dims") or 0
            value = tf.gather(self._current(k), inputs[1], axis=dims, batch_dims=dims)
            if not self.checks:
                self.failing.append(value)
            return [value]
        if op in _SCATTER:
            indices = tf.convert_to_tensor(inputs[1])
            shape = indices.shape.as_list() + self._current(k).shape.as_list()[1:]
            updates = tf.broadcast_to(inputs[2], shape)
            value = _SCATTER[op](self._current(k), indices[..., tf.newaxis], updates)
            if not self.checks:
                self.failing.append(value)
            self._set(k, value)
            return []
        if op == "ResourceGatherNd":
            value = tf.gather_nd(self._current(k), inputs[1])
            self.failing.append(value)
            return [value]
        raise NotImplementedError(f"{op} on a variable")
