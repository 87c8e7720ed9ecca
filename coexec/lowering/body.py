"""Body: a TensorFlow function's definition, written down node by node, without a graph."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from coexec.lowering.varying import number_of
from tracer.nodedef import Symbol, outputs_of, write_constant, write_operation
from tracer.op import freeze, signature_of
from tracer.private import function_pb2, types_pb2
from tracer.spec import RESOURCE, VARIANT, Spec, intern_spec

BOOL = int(types_pb2.DT_BOOL)


# Only small results are shared, in bytes: a program that computes a large one twice may do so to hold it less long.
MAX_SHARED = 1 << 14

# So many scalars are compared with each other in turn, which costs XLA nothing; more are put into one tensor.
MAX_CHAIN = 16


class Body:
    """A function's definition in the making. Inputs are symbols or Python values, in lists where the op takes lists."""

    def __init__(self, name: str) -> None:
        self.definition = function_pb2.FunctionDef()
        self._signature = self.definition.signature
        self._signature.name = name
        self._nodes = self.definition.node_def
        self.specs: dict[str, Spec] = {}  # of all tensors, by their names
        self._constants: dict[Any, Symbol] = {}
        self.varying: dict[tuple[int, int], Symbol] = {}  # arguments for constants that vary, by number and dtype
        self._shared: dict[Any, list[Symbol]] = {}
        self._gone = 0  # how many nodes there were that names may still say

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
        """Has the last result wait for this node."""
        name = self._signature.output_arg[-1].name
        source, enum = self.definition.ret[name], self._signature.output_arg[-1].type
        last = self._nodes.add(name=self._new_name("Identity"), op="Identity", input=[source, f"^{node}"])
        last.attr["T"].type = enum
        self.definition.ret[name] = f"{last.name}:output:0"

    def constant(self, value: Any, enum: int) -> Symbol:
        """Returns a tensor of a Python value; the same one for the same value, and an argument for one that varies."""
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
        """Returns an input as a symbol; a Python value as a tensor of this dtype."""
        return value if isinstance(value, Symbol) else self.constant(value, enum)

    def add(self, op: str, inputs: list[Any], attrs: tuple[Any, ...], specs: list[Spec]) -> list[Symbol]:
        """Adds an operation with these attributes (names and values in turn) and outputs, which it returns flat.

        One that is there already, on the same inputs, is not added again: of the MLP step's 214 operations 50 were
        an optimizer's, the same for each variable.
        """
        key = _content(op, inputs, attrs, specs)
        known = None if key is None else self._shared.get(key)
        if known is not None:
            return known
        node = self._nodes.add(name=self._new_name(op))
        write_operation(node, op, inputs, attrs, self.constant)
        signature = signature_of(op)
        self._signature.is_stateful |= signature is not None and signature.definition.is_stateful
        symbols = [Symbol(name, spec, op, inputs) for name, spec in zip(outputs_of(node), specs, strict=True)]
        self.specs.update((symbol.name, symbol.spec) for symbol in symbols)
        if key is not None:
            self._shared[key] = symbols
        return symbols

    def copy(self, node: Any, inputs: list[str], specs: list[Spec] | None = None, prefix: str = "") -> list[Symbol]:
        """Adds a node of another function with other inputs; returns its outputs. Specs not given are known by name."""
        added = self._nodes.add()
        added.CopyFrom(node)
        added.name = f"{prefix}{node.name}"
        added.input[:] = inputs
        signature = signature_of(node.op)
        self._signature.is_stateful |= signature is not None and signature.definition.is_stateful
        names = outputs_of(added)
        if specs is None:
            specs = [self.specs[name] for name in names]
        self.specs.update(zip(names, specs, strict=True))
        return [Symbol(name, spec, node.op, inputs) for name, spec in zip(names, specs, strict=True)]

    def restart(self, nodes: list[Any]) -> None:
        """Drops all nodes but these constants, which others may have taken."""
        self._gone += len(self._nodes)
        del self._nodes[:]
        self._nodes.extend(nodes)
        self._shared.clear()

    def drop_unused_constants(self) -> None:
        """Drops the constants that nothing takes any more; no operation is to be added behind that."""
        used = {name.partition(":")[0] for node in self._nodes for name in node.input}
        used.update(name.partition(":")[0] for name in self.definition.ret.values())
        kept = function_pb2.FunctionDef()
        kept.node_def.extend([node for node in self._nodes if node.op != "Const" or node.name in used])
        del self._nodes[:]
        self._nodes.extend(kept.node_def)

    def _new_name(self, op: str) -> str:
        return f"{op}_{len(self._nodes) + self._gone}"

    def call(self, function: str, inputs: list[Symbol], specs: list[Spec]) -> list[Symbol]:
        """Adds a call of a function by its name, as an operation of that name; returns what it gives."""
        node = self._nodes.add(name=self._new_name("Call"), op=function)
        node.input.extend(symbol.name for symbol in inputs)
        found = [Symbol(f"{node.name}:result_{n}:0", spec, function, list(inputs)) for n, spec in enumerate(specs)]
        self.specs.update((symbol.name, symbol.spec) for symbol in found)
        return found

    def make(self, op: str, inputs: list[Any], enum: int, shape: tuple[int, ...], **attrs: Any) -> Symbol:
        """Adds an operation with one output, of this dtype and shape."""
        flat = tuple(item for pair in attrs.items() for item in pair)
        return self.add(op, inputs, flat, [intern_spec(enum, shape)])[0]

    def compare(self, op: str, left: Symbol, right: Any) -> Symbol:
        """Compares a symbol's elements with those of one that is broadcast to it."""
        return self.make(op, [left, right], BOOL, left.spec.shape)

    def both(self, left: Symbol, right: Symbol) -> Symbol:
        """Returns where both hold."""
        return self.make("LogicalAnd", [left, right], BOOL, left.spec.shape)

    def all(self, found: Symbol) -> Symbol:
        """Returns a scalar: whether all elements hold."""
        return self.make("All", [found, list(range(len(found.spec.shape)))], BOOL, ())

    def select(self, condition: Symbol, value: Any, other: Symbol) -> Symbol:
        """Returns `value` where the condition holds, else `other`, of whose shape the result is."""
        return self.make("SelectV2", [condition, value, other], other.spec.enum, other.spec.shape)

    def every(self, found: list[Symbol]) -> Symbol:
        """Returns whether all of these scalars hold."""
        if len(found) > MAX_CHAIN:
            return self.all(self.make("Pack", [found], BOOL, (len(found),)))
        return functools.reduce(self.both, found)

    def redirect(self, pairs: list[tuple[Symbol, Symbol]], fine: Symbol) -> None:
        """Lets everything take the second of each pair for the first, but what `fine` and the second ones are made of.

        To be called where the two are equal, or `fine` is false and nobody looks at what comes out. A new value of a
        variable is then made once, for who takes it and for the variable: else XLA makes it twice, or keeps both.
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
        """Returns the control inputs of a node that runs behind these."""
        return list(dict.fromkeys(f"^{s.name.partition(':')[0]}" for s in symbols if s.op))

    def run(self, op: str, inputs: list[Any], control: list[str], **attrs: Any) -> str:
        """Adds an operation without outputs behind the control inputs; returns the node's name."""
        node = self._nodes.add(name=self._new_name(op))
        write_operation(node, op, inputs, tuple(item for pair in attrs.items() for item in pair), self.constant)
        node.input.extend(control)
        self._signature.is_stateful = True
        return str(node.name)

    def finish(self, node: str) -> None:
        """Makes this node run in every launch."""
        self._signature.control_output.append(node)
        self.definition.control_ret[node] = node


def _content(op: str, inputs: list[Any], attrs: tuple[Any, ...], specs: list[Spec]) -> Any:
    """Returns what decides an operation's results; None where that is more than its inputs, or sharing does not pay."""
    signature = signature_of(op)
    if signature is None or signature.definition.is_stateful or not specs:
        return None
    if any(s.enum in (RESOURCE, VARIANT) or s.size > MAX_SHARED for s in specs):
        return None
    try:
        return op, tuple([_name(v) for v in inputs]), freeze(attrs)
    except TypeError:  # a function, say
        return None


def _name(value: Any) -> Any:
    if (number := number_of(value)) is not None:
        return "varying", number
    if isinstance(value, Symbol):
        return value.name
    if isinstance(value, list):
        return tuple([_name(v) for v in value])
    return (value.__class__, freeze(value))
