"""Structures: lowers staged loops, branches and recursion to TensorFlow's functional operations.

Where an operation inside may fail, or behave differently under XLA than its kernel does, a predicate stands for the
failure: the loop stops before that iteration, and Python runs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coexec.lowering.function_body import BOOL, Body
from coexec.lowering.op_failures import can_fail, needs_check
from coexec.lowering.plan import selects
from coexec.lowering.xla.checks import check
from coexec.lowering.xla.rewrites import as_kernel, constant
from tracer.block import (
    BRANCH,
    CALL,
    COUNT,
    FLAG,
    LOOP,
    STRUCTURES,
    Block,
    Branch,
    RecursiveCall,
    RecursiveFunction,
    WhileLoop,
)
from tracer.graph import LIST, Step, spec_of_constant
from tracer.nodedef import Symbol
from tracer.op import Const
from tracer.spec import Spec


class Structures:
    """Emits loops, branches and calls into a function's body; appends the functions that they call to `functions`."""

    def __init__(
        self,
        name: str,
        body: Body,
        functions: list[Body],
        checks: bool,
        known: dict[RecursiveFunction, str] | None = None,
    ) -> None:
        self.name = name  # prefix of the functions' names
        self.body = body
        self.functions = functions
        self.checks = checks  # whether this is for XLA
        # Names of recursive functions.
        self.known: dict[RecursiveFunction, str] = {} if known is None else known
        self.repeats = False  # whether this is inside a recursive function

    def _function(self, kind: str, specs: list[Spec]) -> tuple[Structures, list[Symbol]]:
        """Starts a function; returns its writer, and symbols for its arguments, which have `specs`."""
        body = Body(f"{self.name}_{kind}_{len(self.functions)}")
        self.functions.append(body)
        if kind == "recursion" or self.repeats:
            body.definition.attr["_noinline"].b = True  # TensorFlow would inline a recursive function for ever
        inside = Structures(self.name, body, self.functions, self.checks, self.known)
        inside.repeats = kind == "recursion" or self.repeats
        return inside, [body.argument(spec) for spec in specs]

    # Loops.

    def loop(self, loop: WhileLoop, inputs: list[Symbol]) -> list[Symbol]:
        """Emits a loop; returns its final states, number of iterations, whether its test still holds, saved rows."""
        body = self.body
        (go,), fine = self.block(loop.test, [inputs[k] for k in loop.test_inputs])
        stuck = body.constant(False, BOOL) if fine is None else self._not(fine)
        if fine is not None:  # if Python must evaluate the test, the loop has not ended
            go = self._either(go, stuck)
        rows = [self._room(inputs[loop.states[k]].spec, loop.limit) for k in loop.saved]
        variables = [body.constant(0, COUNT.enum), go, stuck, *inputs, *rows]
        specs = [v.spec for v in variables]
        attrs = (
            "T", [s.enum for s in specs], "cond", self._condition(loop, specs), "body", self._turn(loop, specs),
            "output_shapes", [s.tensor_shape for s in specs], "parallel_iterations", 1,
        )  # fmt: skip
        turned, go, _, *rest = body.add(LOOP, [variables], attrs, specs)
        return [*(rest[k] for k in loop.states), turned, go, *rest[len(inputs) :]]

    def _room(self, spec: Spec, limit: int) -> Symbol:
        """Returns a zero buffer of shape [limit, *spec.shape], for states saved by each iteration."""
        shape = (limit, *spec.shape)
        zero = self.body.constant(np.zeros((), spec.dtype.as_numpy_dtype), spec.enum)
        return self.body.make("Fill", [list(shape), zero], spec.enum, shape)

    def _condition(self, loop: WhileLoop, specs: list[Spec]) -> str:
        """Emits the loop's condition: the test holds, no check failed, `limit` not reached; returns its name."""
        inside, (turned, go, stuck, *_) = self._function("condition", specs)
        body = inside.body
        body.give(body.both(body.both(go, inside._not(stuck)), body.compare("Less", turned, loop.limit)))
        return str(body.definition.signature.name)

    def _turn(self, loop: WhileLoop, specs: list[Spec]) -> str:
        """Emits the loop's body; returns its name. If a check fails, the iteration keeps the state and sets `stuck`."""
        inside, (turned, _, _, *given) = self._function("turn", specs)
        body = inside.body
        count = len(given) - len(loop.saved)
        given, rows = given[:count], given[count:]
        rows = [inside._saved(row, given[loop.states[k]], turned) for row, k in zip(rows, loop.saved, strict=True)]
        (*states, stuck), fine = inside.block(loop.body, [given[k] for k in loop.body_inputs])
        after = list(given)
        for k, state in zip(loop.states, states, strict=True):
            after[k] = state
        (again,), holds = inside.block(loop.test, [after[k] for k in loop.test_inputs])
        for good in (fine, holds):
            if good is not None:
                stuck = inside._either(stuck, inside._not(good))
        if stuck.op == "Const" and not stuck.inputs[0]:
            one: Any = 1
        else:  # restore the state before the iteration, which Python will run
            after = [a if a is g else body.select(stuck, g, a) for a, g in zip(after, given, strict=True)]
            again = inside._either(stuck, again)
            one = body.select(stuck, 0, body.constant(1, COUNT.enum))
        now = body.make("AddV2", [turned, one], COUNT.enum, ())
        for value in (now, again, stuck, *after, *rows):
            body.give(body.make("Identity", [value], value.spec.enum, value.spec.shape))
        return str(body.definition.signature.name)

    def _saved(self, rows: Symbol, state: Symbol, turned: Symbol) -> Symbol:
        """Returns `rows` with the state stored at index `turned`; harmless if the iteration is left to Python."""
        body, spec = self.body, rows.spec
        row = body.make("ExpandDims", [state, 0], spec.enum, (1, *spec.shape[1:]))
        if self.checks:  # XLA updates it in place
            begin = body.make("Pack", [[turned, *[0] * len(state.spec.shape)]], COUNT.enum, (len(spec.shape),))
            return body.make("XlaDynamicUpdateSlice", [rows, row, begin], spec.enum, spec.shape)
        place = body.make("Reshape", [turned, [1, 1]], COUNT.enum, (1, 1))
        return body.make("TensorScatterUpdate", [rows, place, row], spec.enum, spec.shape)

    # Branches.

    def branch(self, branch: Branch, inputs: list[Symbol]) -> tuple[list[Symbol], Symbol | None]:
        """Emits a branch; returns its results, and the predicate of the side taken (None if neither has one)."""
        body = self.body
        condition, *given = inputs
        ways = (branch.then, branch.then_inputs), (branch.other, branch.other_inputs)
        if selects(branch):
            one, two = (self.block(block, [given[k] for k in places])[0] for block, places in ways)
            return [self._chosen(condition, *pair) for pair in zip(one, two, strict=True)], None
        specs = [v.spec for v in given]
        names, results, alarms = [], [], []
        for kind, (block, places) in zip(("then", "else"), ways, strict=True):
            inside, symbols = self._function(kind, specs)
            found, fine = inside.block(block, [symbols[k] for k in places])
            names.append((inside, fine))
            results.append(found)
            alarms.append(fine)
        checked = any(fine is not None for fine in alarms)
        for (inside, fine), found in zip(names, results, strict=True):
            for value in [*found, *([inside._flag(fine)] if checked else [])]:
                inside.body.give(inside.body.make("Identity", [value], value.spec.enum, value.spec.shape))
        out = [v.spec for v in results[0]] + [FLAG] * checked
        then, other = (str(inside.body.definition.signature.name) for inside, _ in names)
        attrs = (
            "Tcond", BOOL, "Tin", [s.enum for s in specs], "Tout", [s.enum for s in out],
            "then_branch", then, "else_branch", other, "output_shapes", [s.tensor_shape for s in out],
        )  # fmt: skip
        found = body.add(BRANCH, [condition, given], attrs, out)
        return (found[:-1], found[-1]) if checked else (found, None)

    def _chosen(self, condition: Symbol, value: Symbol, other: Symbol) -> Symbol:
        return value if value is other else self.body.select(condition, value, other)

    def _flag(self, fine: Symbol | None) -> Symbol:
        return self.body.constant(True, BOOL) if fine is None else fine

    def _not(self, value: Symbol) -> Symbol:
        return self.body.make("LogicalNot", [value], BOOL, ())

    def _either(self, one: Symbol, other: Symbol) -> Symbol:
        return self.body.make("LogicalOr", [one, other], BOOL, ())

    # Recursion.

    def recursion(
        self, part: RecursiveFunction | RecursiveCall, inputs: list[Symbol], specs: list[Spec]
    ) -> list[Symbol]:
        """Emits a call of a recursive function, as an operation of that name, and the function if it is new.

        TensorFlow's passes for XLA follow other kinds of calls, and would not terminate.
        """
        recursion = part.recursion if isinstance(part, RecursiveCall) else part
        assert recursion.block is not None
        if recursion not in self.known:
            inside, given = self._function("recursion", [v.spec for v in inputs])
            self.known[recursion] = str(inside.body.definition.signature.name)
            results, fine = inside.block(recursion.block, given)
            if fine is not None:  # the last result tells Python to run all of it
                results[-1] = inside._either(results[-1], inside._not(fine))
            for value in results:
                inside.body.give(inside.body.make("Identity", [value], value.spec.enum, value.spec.shape))
        return self.body.call(self.known[recursion], inputs, specs)

    # Blocks.

    def block(self, block: Block, inputs: list[Symbol]) -> tuple[list[Symbol], Symbol | None]:
        """Emits a block's operations; returns its results, and a predicate: whether they behave as eager kernels do.

        The predicate is None if that is certain.
        """
        values: dict[int, Symbol] = {-1 - k: symbol for k, symbol in enumerate(inputs)}
        checks: list[Symbol] = []
        for step in block.steps:
            if step.variant is not None and not step.variant.folded:
                given = [self._input(step, i, slot, values) for i, slot in enumerate(step.slots)]
                for n, symbol in enumerate(self._operation(step, given, checks)):
                    values[step.first + n] = symbol
        results = [
            values[r] if isinstance(r, int) else self.body.constant(r[0].value, r[1].enum) for r in block.results
        ]
        fine = None
        for predicate in checks:
            fine = predicate if fine is None else self.body.both(fine, predicate)
        return results, fine

    def _operation(self, step: Step, inputs: list[Any], checks: list[Symbol]) -> list[Symbol]:
        """Emits one operation of a block; returns its outputs, and appends its predicate, if any, to `checks`."""
        body, op, attrs = self.body, step.op or "", step.attrs
        assert step.variant is not None
        if op in STRUCTURES:
            symbols = [body.symbol(v, s.enum) for v, s in zip(inputs, step.variant.key, strict=True)]
            if op == CALL:
                return self.recursion(attrs[1], symbols, [out.spec for out in step.outputs])
            if op == LOOP:  # a whole loop's last result: whether it stopped before its end
                results = self.loop(attrs[1], symbols)
                if attrs[1].whole:
                    checks.append(self._not(results[-1]))
                return results
            results, fine = self.branch(attrs[1], symbols)
            if fine is not None:
                checks.append(fine)
            return results
        specs = [out.spec for out in step.outputs]
        if needs_check(step) and (self.checks or can_fail(step)):
            predicate = check(body, op, inputs, dict(zip(attrs[::2], attrs[1::2], strict=True)))
            if predicate is None:
                raise NotImplementedError(f"{op} may fail on some values")
            checks.append(predicate)
        return as_kernel(body, op, inputs, attrs, specs) if self.checks else body.add(op, inputs, attrs, specs)

    def _input(self, step: Step, i: int, slot: int, values: dict[int, Symbol]) -> Any:
        if slot == LIST:
            slots, consts = step.lists[i]
            return [
                self._constant(consts[j], step, i, j) if j in consts else values[s] for j, s in enumerate(slots)
            ]
        return self._constant(step.consts[i], step, i) if i in step.consts else values[slot]

    def _constant(self, const: Const, step: Step, *path: int) -> Any:
        spec = spec_of_constant(step, *path)
        if spec is None:
            return const.value
        value = const.value
        return constant(self.body, value, spec.enum) if self.checks else self.body.constant(value, spec.enum)
