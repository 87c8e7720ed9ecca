"""Body: builds a TensorFlow `FunctionDef` node by node, without a graph."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from coexec.base.tuning import tuning
from coexec.lowering.lifted_constants import number_of
from tracer.nodedef import Symbol, outputs_of, write_constant, write_operation
from tracer.op import freeze, signature_of
from tracer.private import function_pb2, types_pb2
from tracer.spec import RESOURCE, VARIANT, Spec, intern_spec

BOOL = int(types_pb2.DT_BOOL)


class Body:
    """A `FunctionDef` under construction. Inputs are symbols or Python values, in lists where the op takes lists."""

    def __init__(self, name: str) -> None:
        self.definition = function_pb2.FunctionDef()
        self._signature = self.definition.signature
        self._signature.name = name
        self._nodes = self.definition.node_def
        self.specs: dict[str, Spec] = {}  # by tensor name
        self._constants: dict[Any, Symbol] = {}
        self.varying: dict[tuple[int, int], Symbol] = {}  # arguments for lifted constants, by number and dtype
        self._shared: dict[Any, list[Symbol]] = {}
        self._gone = 0  # nodes dropped by `restart`, so that new names do not repeat theirs

    def argument(self, spec: Spec) -> Symbol:
        """Adds an argument."""
        name = f"feed_{len(self._signature.input_arg)}"
        self._signature.input_arg.add(name=name, type=spec.enum)
        self.specs[name] = spec
        return Symbol(name, spec, "", [])

    def give(self, symbol: Symbol) -> None:
        """Adds a result of the function."""
        name = f"result_{len(self._signature.output_arg)}"
        self._signature.output_arg.add(name=name, type=symbol.spec.enum)
        self.definition.ret[name] = symbol.name

    def give_behind(self, node: str) -> None:
        """Makes the last result depend on this node."""
        name = self._signature.output_arg[-1].name
        source, enum = self.definition.ret[name], self._signature.output_arg[-1].type
        last = self._nodes.add(name=self._new_name("Identity"), op="Identity", input=[source, f"^{node}"])
        last.attr["T"].type = enum
        self.definition.ret[name] = f"{last.name}:output:0"

    def constant(self, value: Any, enum: int) -> Symbol:
        """Returns a tensor of a Python value: one node for equal values, an argument for a lifted constant."""
        number = number_of(value)
        if number is not None:
            if (number, enum) not in self.varying:
                self.varying[number, enum] = self.argument(intern_spec(enum, np.shape(value)))
            return self.varying[number, enum]
        key = enum, freeze(value)
        symbol = self._constants.get(key)
        if symbol is None:
            node = self._nodes.add(name=self._new_name("Const"))
            symbol = self._constants[key] = write_constant(node, value, enum)
            self.specs[symbol.name] = symbol.spec
        return symbol

    def symbol(self, value: Any, enum: int) -> Symbol:
        """Returns an input as a symbol; a Python value becomes a constant of this dtype."""
        return value if isinstance(value, Symbol) else self.constant(value, enum)

    def add(self, op: str, inputs: list[Any], attrs: tuple[Any, ...], specs: list[Spec]) -> list[Symbol]:
        """Adds an operation and returns its outputs, flat.

        `attrs` alternates names and values; `specs` are those of the outputs. Common subexpressions are shared: of an
        MLP step's 214 operations 50 were an optimizer's, the same for each variable.
        """
        key = _content(op, inputs, attrs, specs)
        known = None if key is None else self._shared.get(key)
        if known is not None:
            return known
        node = self._nodes.add(name=self._new_name(op))
        names = write_operation(node, op, inputs, attrs, self.constant)
        if _is_stateful(op):
            self._signature.is_stateful = True
        symbols = [Symbol(name, spec, op, inputs) for name, spec in zip(names, specs, strict=True)]
        self.specs.update(zip(names, specs, strict=True))
        if key is not None:
            self._shared[key] = symbols
        return symbols

    def copy(self, node: Any, inputs: list[str], specs: list[Spec] | None = None, prefix: str = "") -> list[Symbol]:
        """Copies a node of another function, with new inputs; returns its outputs. `specs` default to those by name."""
        added = self._nodes.add()
        added.CopyFrom(node)
        added.name = f"{prefix}{node.name}"
        added.input[:] = inputs
        if _is_stateful(node.op):
            self._signature.is_stateful = True
        names = outputs_of(added)
        if specs is None:
            specs = [self.specs[name] for name in names]
        self.specs.update(zip(names, specs, strict=True))
        return [Symbol(name, spec, node.op, inputs) for name, spec in zip(names, specs, strict=True)]

    def restart(self, nodes: list[Any]) -> None:
        """Drops all nodes and starts again with `nodes`, constants that later ones may use."""
        self._gone += len(self._nodes)
        del self._nodes[:]
        self._nodes.extend(nodes)
        self._shared.clear()

    def drop_unused_constants(self) -> None:
        """Drops unused constants. Add no operation after this."""
        used = {name.partition(":")[0] for node in self._nodes for name in node.input}
        used.update(name.partition(":")[0] for name in self.definition.ret.values())
        kept = function_pb2.FunctionDef()
        kept.node_def.extend([node for node in self._nodes if node.op != "Const" or node.name in used])
        del self._nodes[:]
        self._nodes.extend(kept.node_def)

    def _new_name(self, op: str) -> str:
        return f"{op}_{len(self._nodes) + self._gone}"

    def call(self, function: str, inputs: list[Symbol], specs: list[Spec]) -> list[Symbol]:
        """Adds a call of a function, as an operation of that name; returns its outputs."""
        node = self._nodes.add(name=self._new_name("Call"), op=function)
        node.input.extend(symbol.name for symbol in inputs)
        found = [Symbol(f"{node.name}:result_{n}:0", spec, function, list(inputs)) for n, spec in enumerate(specs)]
        self.specs.update((symbol.name, symbol.spec) for symbol in found)
        return found

    def make(self, op: str, inputs: list[Any], enum: int, shape: tuple[int, ...], **attrs: Any) -> Symbol:
        """Adds an operation with one output of this dtype and shape, and returns the output."""
        flat = tuple(item for pair in attrs.items() for item in pair)
        return self.add(op, inputs, flat, [intern_spec(enum, shape)])[0]

    def compare(self, op: str, left: Symbol, right: Any) -> Symbol:
        """Returns the elementwise comparison `op` of `left` with `right`, which is broadcast to the shape of `left`."""
        return self.make(op, [left, right], BOOL, left.spec.shape)

    def both(self, left: Symbol, right: Symbol) -> Symbol:
        """Returns the elementwise logical and, of the shape of `left`."""
        return self.make("LogicalAnd", [left, right], BOOL, left.spec.shape)

    def all(self, found: Symbol) -> Symbol:
        """Returns a scalar bool: whether all elements are true."""
        return self.make("All", [found, list(range(len(found.spec.shape)))], BOOL, ())

    def select(self, condition: Symbol, value: Any, other: Symbol) -> Symbol:
        """Returns `value` where the condition holds, else `other`; the result has the shape of `other`."""
        return self.make("SelectV2", [condition, value, other], other.spec.enum, other.spec.shape)

    def every(self, found: list[Symbol]) -> Symbol:
        """Returns a scalar bool: whether all of these scalars are true."""
        if len(found) > tuning.max_check_chain:
            return self.all(self.make("Pack", [found], BOOL, (len(found),)))
        return functools.reduce(self.both, found)

    def redirect(self, pairs: list[tuple[Symbol, Symbol]], fine: Symbol) -> None:
        """Replaces uses of each pair's first by its second, except in the second itself and in what computes `fine`.

        Valid where the two are equal unless `fine` is false, in which case the results are discarded. The new value of
        a variable is then computed once, for its consumers and for the write; otherwise XLA computes it twice, or keeps
        both.
        """
        nodes = {node.name: node for node in self._nodes}
        known, ahead = set(), [fine.name]
        while ahead:
            name = ahead.pop().partition(":")[0].lstrip("^")
            if name not in known and name in nodes:
                known.add(name)
                ahead += nodes[name].input
        names: dict[str, str] = {}
        for old, new in pairs:
            if old.op not in ("", "Const") and old.name.partition(":")[0] not in known:
                names.setdefault(old.name, new.name)
        known.update(new.name.partition(":")[0] for _, new in pairs)
        for node in self._nodes:
            if node.name not in known and not names.keys().isdisjoint(node.input):
                node.input[:] = [names.get(name, name) for name in node.input]

    def after(self, symbols: list[Symbol]) -> list[str]:
        """Returns the control inputs of a node that runs after these."""
        return list(dict.fromkeys(f"^{s.name.partition(':')[0]}" for s in symbols if s.op))

    def run(self, op: str, inputs: list[Any], control: list[str], **attrs: Any) -> str:
        """Adds an operation without outputs, after the control inputs; returns the node's name."""
        node = self._nodes.add(name=self._new_name(op))
        write_operation(node, op, inputs, tuple(item for pair in attrs.items() for item in pair), self.constant)
        node.input.extend(control)
        self._signature.is_stateful = True
        return str(node.name)

    def output(self, node: str, spec: Spec, op: str, inputs: list[Any]) -> Symbol:
        """Returns the one output of a node that `run` has added."""
        symbol = Symbol(f"{node}:output:0", spec, op, inputs)
        self.specs[symbol.name] = spec
        return symbol

    def finish(self, node: str) -> None:
        """Adds a control output: the node runs in every launch."""
        self._signature.control_output.append(node)
        self.definition.control_ret[node] = node


@functools.cache
def _is_stateful(op: str) -> bool:
    """Returns whether TensorFlow declares an operation as stateful; a function's name is none."""
    signature = signature_of(op)
    return signature is not None and bool(signature.definition.is_stateful)


def _content(op: str, inputs: list[Any], attrs: tuple[Any, ...], specs: list[Spec]) -> Any:
    """Returns the key for sharing equal operations; None if it is stateful, or not worth sharing."""
    if signature_of(op) is None or _is_stateful(op) or not specs:
        return None
    for spec in specs:
        if spec.enum == RESOURCE or spec.enum == VARIANT or spec.size > tuning.max_shared_result:
            return None
    try:
        return op, tuple([_name(v) for v in inputs]), freeze(attrs)
    except TypeError:  # a function, say
        return None


def _name(value: Any) -> Any:
    """Returns what identifies an input in the key of `_content`."""
    if (number := number_of(value)) is not None:
        return "varying", number
    if isinstance(value, Symbol):
        return value.name
    if isinstance(value, list):
        return tuple([_name(v) for v in value])
    return (value.__class__, freeze(value))
