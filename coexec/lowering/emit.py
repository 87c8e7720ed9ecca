"""Emitter: turns a plan into a TensorFlow function definition. It makes no policy decisions.

State is functionalized: a variable is read once, its later values are tracked symbolically, and it is written at the
end, after everything that can fail. So a launch does all of its writes or none, and a failed launch can be replayed
operation by operation, to fail exactly where and how the eager program would.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from coexec.lowering.function_body import Body
from coexec.lowering.functional_ops import Structures
from coexec.lowering.lifted_constants import varying
from coexec.lowering.op_failures import ASSERTION, SIZED, can_fail, needs_check
from coexec.lowering.optimizer_ops import VARIABLES, updated
from coexec.lowering.plan import Plan
from coexec.lowering.row_updates import GATHER, ND_SCATTERS, SCATTERS, SLICE, WRITES, attributes_of
from coexec.lowering.xla.checks import check
from coexec.lowering.xla.philox import as_drawn, seeded, skipped
from coexec.lowering.xla.rewrites import as_kernel, barrier, constant
from tracer.block import CALL, STRUCTURES
from tracer.callees import Callee
from tracer.graph import CONST, LIST, Step, spec_of_constant
from tracer.inputs import natural_enum
from tracer.nodedef import Symbol, grouped
from tracer.op import Const
from tracer.private import types_pb2
from tracer.spec import RESOURCE, Spec, intern_spec

_ADD = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}


class Emitter:
    """Emits one plan.

    `checks`: whether failures must be computed as predicates because the backend does not raise them (XLA; a graph
    does). `varying`: lifted constants, from (step, path) to argument number; a path is an input, or an input and a list
    index.
    """

    def __init__(self, plan: Plan, checks: bool, name: str, varying: dict[Any, int] | None = None) -> None:
        self.plan = plan
        self.varying = varying or {}
        self.checks = checks
        self.body = Body(name)
        self.functions: list[Body] = []  # bodies and conditions of loops and branches
        self.values: dict[int, Symbol] = {}
        self.feeds: list[Symbol] = []
        self.state: dict[int, Symbol] = {}
        self.read: dict[int, Symbol] = {}
        self.written: set[int] = set()
        self.predicates: list[Symbol] = []
        self.failing: list[Symbol] = []
        self.asserting: list[str] = []  # nodes that may fail and have no outputs
        self.outside: set[str] = set()  # nodes that XLA cannot compile
        self.barrier: str | None = None  # the node that runs once nothing can fail any more
        self._checked: set[str] = set()  # conditions that are asserted
        self._rows: Symbol | None = None  # the indices of the last late step that was checked
        self.late = frozenset[int]() if checks else plan.row_updates.late

    def build(self) -> Body:
        """Returns the function's body. If it has predicates, its last result is a bool: whether all of them hold."""
        body = self.body
        self.feeds = [body.argument(spec) for spec in self.plan.feeds]
        if self.plan.words is not None:
            self.words = body.argument(self.plan.words)
        for place, step in enumerate(self.plan.steps):
            if step.variant is not None and not step.variant.folded and place not in self.late:
                if self.checks and place in self.plan.outside:
                    self._emit_outside(step)
                else:
                    self._emit(step)
        if self.late:
            self._update_rows()
        for i in self.plan.outputs:
            value = self.values[i]
            body.give(body.make("Identity", [value], value.spec.enum, value.spec.shape))
        good = None
        if self.predicates:
            good = barrier(body, body.every(self.predicates))  # without it XLA recomputes it for each write
            body.give(good)
        self._write(good)
        return body

    def _write(self, good: Symbol | None) -> None:
        """Adds the variable writes, selected by `good` if there are predicates, after everything that may fail."""
        body = self.body
        final = {k: self.state[k] for k in sorted(self.written)}
        if good is not None:
            chosen = {k: body.select(good, value, self._kept(k)) for k, value in final.items()}
            if not self.outside:  # otherwise nodes before a partition would depend on nodes after it
                body.redirect([(final[k], value) for k, value in chosen.items()], good)
            final = chosen
        all_went_well = self.barrier or self._barrier(final)
        for k, value in final.items():
            write = [self.feeds[k], value]
            behind = [f"^{all_went_well}", *(body.after([self.read[k]]) if self.late and k in self.read else ())]
            body.finish(body.run("AssignVariableOp", write, behind, dtype=value.spec.enum))
        body.finish(all_went_well)
        # When TensorFlow inlines a call, only its results and writes keep nodes alive.
        if (self.failing or self.asserting) and self.plan.outputs and not final and not self.checks and not self.late:
            body.give_behind(all_went_well)

    def _barrier(self, final: dict[int, Symbol]) -> str:
        """Returns a node that waits for what may fail: n + m control edges instead of n * m, for each write one."""
        before = [*self.read.values(), *final.values(), *self.failing]
        return self.body.run("NoOp", [], [*self.body.after(before), *self.asserting])

    # Updates of rows (`row_updates`).

    def _update_rows(self) -> None:
        """Emits the late steps, behind everything that can fail."""
        steps = {place: self.plan.steps[place] for place in sorted(self.late)}
        for place, step in steps.items():
            self._check_rows(step, place in self.plan.row_updates.sized)
        self.barrier = self._barrier({k: self.state[k] for k in self.written})
        turns: dict[int, list[str]] = {}  # by variable: nodes for which the next access waits
        for step in steps.values():
            inputs = WRITES.get(step.op or "")
            if inputs is None and step.op != GATHER:
                self._emit(step)
                continue
            tables = [-1 - slot for slot in step.slots[: 1 if inputs is None else inputs.variables]]
            given = self._row_inputs(step)
            control = [self.barrier, *dict.fromkeys(node for k in tables for node in turns.get(k, ()))]
            node = self.body.run(step.op or "", given, [f"^{node}" for node in control], **attributes_of(step))
            if inputs is None:
                spec = step.outputs[0].spec
                self.values[step.first] = self.body.output(node, spec, step.op or "", given)
                turns.setdefault(tables[0], []).append(node)
                continue
            turns.update((k, [node]) for k in tables)
            self.body.finish(node)

    def _row_inputs(self, step: Step) -> list[Symbol]:
        """Returns the inputs of an update or read of rows, all as symbols."""
        inputs = WRITES.get(step.op or "")
        count, at = (1, 1) if inputs is None else (inputs.variables, inputs.indices)
        given = [self._input(step, i, slot) for i, slot in enumerate(step.slots)]
        enum = self._spec(-1 - step.slots[0]).enum
        given[at] = self._indices(given[at])
        if step.op == SLICE:
            given[2:4] = [self.body.symbol(value, given[at].spec.enum) for value in given[2:4]]
        return [*given[:count], *(self.body.symbol(value, enum) for value in given[count:])]

    def _indices(self, value: Any) -> Symbol:
        return value if isinstance(value, Symbol) else self.body.constant(value, natural_enum(value))

    def _bounds(self, step: Step, indices: Symbol) -> tuple[Any, Any]:
        """Returns the least index that a late step may be given, and the first that is too large."""
        shape = self._spec(-1 - step.slots[0]).shape
        if step.op in ND_SCATTERS:
            return 0, list(shape[: indices.spec.shape[-1]])
        if step.op == SLICE:
            sizes = list(shape[: indices.spec.shape[0]])
            return [-size for size in sizes], sizes
        return 0, shape[0]

    def _check_rows(self, step: Step, sized: bool) -> None:
        """Asserts that a late step finds its rows, and if `sized` that it has as many of each input as of indices."""
        body, found = self.body, []
        constant = step.op == SLICE and step.slots[1] == CONST  # then it is where it was recorded
        if (step.op in WRITES or step.op == GATHER) and not constant:
            inputs = WRITES.get(step.op or "")
            at = 1 if inputs is None else inputs.indices
            self._rows = self._indices(self._input(step, at, step.slots[at]))
            least, most = self._bounds(step, self._rows)
            found = [body.compare("GreaterEqual", self._rows, least), body.compare("Less", self._rows, most)]
        conditions = [body.all(each) for each in found]
        for slot in step.slots if sized else ():
            value = self.values.get(slot) if slot >= 0 else self.feeds[-1 - slot] if slot > CONST else None
            if value is None or value is self._rows or value.spec.enum == RESOURCE or not value.spec.shape:
                continue  # of updated rows, or one number for all of them
            sizes = [body.make("Size", [each], types_pb2.DT_INT32, ()) for each in (value, self._rows)]
            wanted = body.make("Mul", [sizes[1], math.prod(value.spec.shape[1:])], types_pb2.DT_INT32, ())
            conditions.append(body.make("Equal", [sizes[0], wanted], types_pb2.DT_BOOL, ()))
        if conditions and (good := body.every(conditions)).name not in self._checked:  # the next may be checked by it
            self._checked.add(good.name)
            self.asserting.append(f"^{body.run(ASSERTION, [good, [good]], [])}")

    def _emit_outside(self, step: Step) -> None:
        """Emits a step that XLA cannot compile, to run as its TensorFlow kernel."""
        nodes = self.body.definition.node_def
        first = len(nodes)
        self.checks = False
        self._emit(step)
        self.checks = True
        self.outside.update(node.name for node in nodes[first:])

    def _emit(self, step: Step) -> None:
        """Emits one step's operation, and stores its outputs in `values`."""
        op, node = step.op or "", step.node
        assert node is not None
        inputs = [self._input(step, i, slot) for i, slot in enumerate(step.slots)]
        specs = [out.spec for out in step.outputs]
        if step.op in STRUCTURES:
            outputs = self._structure(step, inputs)
        elif op == ASSERTION:
            outputs = self._assert(inputs[0])
        elif node.callee is not None:
            outputs = self._call(step, node.callee, inputs)
        elif step.slots and step.slots[0] < 0 and self._is_resource(step.slots[0]):
            outputs = self._variable_op(step, op, -1 - step.slots[0], inputs)
        else:
            if node.entry == "execute":
                inputs = grouped(op, node.attrs, inputs)
            if self.checks and needs_check(step):
                self._check(step, op, inputs)
            if step.seeded:
                outputs = [seeded(self.body, op, inputs, specs[0], self.words, step.draws - 1, self.checks)]
            elif self.checks:
                drawn = as_drawn(self.body, op, inputs, specs)
                outputs = as_kernel(self.body, op, inputs, node.attrs, specs) if drawn is None else drawn
            else:
                outputs = self.body.add(op, inputs, node.attrs, specs)
            if not self.checks and (op in SIZED or can_fail(step)):  # the graph may be launched at other sizes
                self.failing.extend(outputs)
        for n, symbol in enumerate(outputs):
            self.values[step.first + n] = symbol

    def _structure(self, step: Step, inputs: list[Any]) -> list[Symbol]:
        """Emits a staged loop, branch or recursion; returns its outputs, and appends its predicate to `predicates`."""
        assert step.variant is not None
        specs = step.variant.key
        writer = Structures(self.body.definition.signature.name, self.body, self.functions, self.checks)
        symbols = [self.body.symbol(value, spec.enum) for value, spec in zip(inputs, specs, strict=True)]
        if step.op != CALL:
            return writer.loop(step.attrs[1], symbols)
        results, fine = writer.block(step.attrs[1], symbols)
        if fine is not None:
            self.predicates.append(fine)
        return results

    def _call(self, step: Step, callee: Callee, inputs: list[Symbol]) -> list[Symbol]:
        """Emits the call of a graph function; it reads variables itself, before the launch writes any."""
        if not self.written.isdisjoint(-1 - slot for slot in step.slots if slot < 0):
            raise NotImplementedError("a function reads a variable that is written before")
        op = "StatefulPartitionedCall" if callee.stateful else "PartitionedCall"
        specs: list[Any] = [intern_spec(result.dtype.as_datatype_enum, ()) for result in callee.results]
        for number, out in zip(callee.computed, step.outputs, strict=True):
            specs[number] = out.spec
        kinds = "Tin", [symbol.spec.enum for symbol in inputs], "Tout", [spec.enum for spec in specs]
        results = self.body.add(op, [inputs], (*kinds, *step.attrs), specs)
        outputs = [results[number] for number in callee.computed]
        node = self.body.definition.node_def[-1]
        if callee.compiled and outputs[0].name.startswith(f"{node.name}:"):  # else it is an earlier call's
            node.attr["_XlaMustCompile"].b = True
        # A call that is inlined counts as over before its results are there, so what waits for it waits for these.
        arrived = [self.body.make("Identity", [value], value.spec.enum, value.spec.shape) for value in outputs]
        self.failing += [*outputs, *arrived]
        return outputs

    def _assert(self, condition: Symbol) -> list[Symbol]:
        """Emits an assertion: a predicate for XLA, an `Assert` node in a graph."""
        if self.checks:
            self.predicates.append(condition)
        else:
            self.asserting.append(f"^{self.body.run(ASSERTION, [condition, [condition]], [])}")
        return []

    def _is_resource(self, slot: int) -> bool:
        k = -1 - slot
        return k < len(self.plan.feeds) and self.plan.feeds[k].enum == RESOURCE

    def _check(self, step: Step, op: str, inputs: list[Any]) -> None:
        """Emits an operation's predicate; raises `NotImplementedError` if there is none."""
        attrs = dict(zip(step.attrs[::2], step.attrs[1::2], strict=True))
        predicate = check(self.body, op, inputs, attrs)
        if predicate is None:
            raise NotImplementedError(f"{op} may fail on some values, which XLA would not tell")
        self.predicates.append(predicate)

    def _input(self, step: Step, i: int, slot: int) -> Any:
        """Returns input `i` of a step: a symbol, a Python value, or a list of these."""
        if slot == LIST:
            slots, consts = step.lists[i]
            return [
                self._constant(consts[j], step, i, j) if j in consts else self._tensor(s) for j, s in enumerate(slots)
            ]
        return self._constant(step.consts[i], step, i) if i in step.consts else self._tensor(slot)

    def _constant(self, const: Const, step: Step, *path: int) -> Any:
        """Returns a constant as a tensor of its recorded dtype, or as the Python value where none was recorded."""
        spec, value = spec_of_constant(step, *path), const.value
        if self.varying and (number := self.varying.get((step, path))) is not None:
            value = varying(value, number)
        if spec is None:
            return value
        return constant(self.body, value, spec.enum) if self.checks else self.body.constant(value, spec.enum)

    def _tensor(self, slot: int) -> Symbol:
        return self.values[slot] if slot >= 0 else self.feeds[-1 - slot]

    # Variables.

    def _spec(self, k: int) -> Spec:
        """Returns the dtype and shape of the variable behind resource feed `k`; raises if the shape is not static."""
        handle = self.plan.feeds[k].handle
        assert handle is not None
        enum, shape = handle[0]
        if shape is None or None in shape or -1 in shape:
            raise NotImplementedError("a variable has no fixed shape")
        return intern_spec(enum, shape)

    def _old(self, k: int) -> Symbol:
        """Returns the value of the variable behind feed `k` before the launch."""
        if k not in self.read:
            spec = self._spec(k)
            self.read[k] = self.body.make("ReadVariableOp", [self.feeds[k]], spec.enum, spec.shape, dtype=spec.enum)
        return self.read[k]

    def _kept(self, k: int) -> Symbol:
        """Returns the value that a variable keeps if a predicate is false.

        A newly created variable is still uninitialised, with shape [0], to which a scalar would be broadcast. XLA
        refuses to read it; TensorFlow's runtime, which does the reads in front of a partition, does not.
        """
        old, spec = self._old(k), self._spec(k)
        if not self.outside or spec.shape[-1:] not in ((), (1,)):
            return old
        checked = self.body.add("EnsureShape", [old], ("shape", tf.TensorShape(spec.shape)), [spec])[0]
        self.outside.add(checked.name.partition(":")[0])
        return checked

    def _current(self, k: int) -> Symbol:
        """Returns the tracked value of the variable behind feed `k`."""
        if k not in self.state:
            self.state[k] = self._old(k)
        return self.state[k]

    def _set(self, k: int, value: Symbol) -> None:
        self.state[k] = value
        self.written.add(k)

    def _same_as(self, value: Symbol, op: str, inputs: list[Any]) -> Symbol:
        """Adds an operation whose one output has the dtype and shape of `value`."""
        if self.checks:
            return as_kernel(self.body, op, inputs, (), [value.spec])[0]
        return self.body.add(op, inputs, (), [value.spec])[0]

    def _optimize(self, step: Step, op: str, inputs: list[Any]) -> None:
        """Emits the update of a variable and its slots."""
        count = VARIABLES[op]
        places = [-1 - slot for slot in step.slots[:count]]
        variables = [self._current(k) for k in places]
        enum = variables[0].spec.enum

        def emit(op: str, symbols: list[Symbol]) -> Symbol:
            return self._same_as(max(symbols, key=lambda symbol: len(symbol.spec.shape)), op, list(symbols))

        given = [self.body.symbol(value, enum) for value in inputs[count:]]
        attrs = dict(zip(step.attrs[::2], step.attrs[1::2], strict=True))
        one = self.body.constant(1.0, enum)
        for k, value in zip(places, updated(op, attrs, variables, given, one, emit), strict=True):
            self._set(k, value)

    def _variable_op(self, step: Step, op: str, k: int, inputs: list[Any]) -> list[Symbol]:
        """Emits an operation on the variable of feed `k`: reads or updates its tracked value; returns the outputs."""
        body = self.body
        if op == "ReadVariableOp":
            return [self._current(k)]
        if op == "AssignVariableOp":
            self._set(k, body.symbol(inputs[1], self._spec(k).enum))
            return []
        if op in _ADD:
            value = self._current(k)
            self._set(k, self._same_as(value, _ADD[op], [value, body.symbol(inputs[1], value.spec.enum)]))
            return []
        if op in VARIABLES:
            self._optimize(step, op, inputs)
            return []
        if op == GATHER and k not in self.written and not self.checks:  # without a copy of the variable
            given = [self.feeds[k], self._indices(inputs[1])]
            gathered = body.add(op, given, step.attrs, [step.outputs[0].spec])[0]
            self.failing.append(gathered)
            return [gathered]
        value = self._current(k)
        if op in ND_SCATTERS:
            if attributes_of(step).get("bad_indices_policy"):
                raise NotImplementedError("indices that are not there are treated in a way of their own")
            indices = self._indices(inputs[1])
            scattered = self._same_as(value, ND_SCATTERS[op], [value, indices, body.symbol(inputs[2], value.spec.enum)])
            if not self.checks:
                self.failing.append(scattered)
            self._set(k, scattered)
            return []
        if op == SLICE:
            assigned = [value, *inputs[1:4], body.symbol(inputs[4], value.spec.enum)]
            sliced = body.add("TensorStridedSliceUpdate", assigned, step.attrs, [value.spec])[0]
            if not self.checks:  # as above
                self.failing.append(sliced)
            self._set(k, sliced)
            return []
        if op == "RngReadAndSkip":
            self._set(k, skipped(body, value, *inputs[1:]))
            return [value]
        if self.checks:
            self._check(step, op, [value, *inputs[1:]])
        if op in SCATTERS:
            indices = self._indices(inputs[1])
            at = indices.spec.shape
            shape = (*at, *value.spec.shape[1:])
            updates = body.symbol(inputs[2], value.spec.enum)
            if updates.spec.shape != shape:
                if None in shape:
                    raise NotImplementedError("rows whose number depends on values are broadcast")
                updates = body.make("BroadcastTo", [updates, shape], value.spec.enum, shape)
            places = body.make("ExpandDims", [indices, -1], indices.spec.enum, (*at, 1))
            scattered = self._same_as(value, SCATTERS[op], [value, places, updates])
            if not self.checks:
                self.failing.append(scattered)
            self._set(k, scattered)
            return []
        spec = step.outputs[0].spec
        if op == GATHER:
            attrs = dict(zip(step.attrs[::2], step.attrs[1::2], strict=True))
            dims = attrs.get("batch_dims") or 0
            gathered = body.make("GatherV2", [value, inputs[1], dims], spec.enum, spec.shape, batch_dims=dims)
        elif op == "ResourceGatherNd":
            gathered = body.make("GatherNd", [value, inputs[1]], spec.enum, spec.shape)
        else:
            raise NotImplementedError(f"{op} on a variable")
        if not self.checks:
            self.failing.append(gathered)
        return [gathered]
