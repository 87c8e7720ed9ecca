"""Body: a TensorFlow function's definition, written down node by node, without a graph."""

from __future__ import annotations

from typing import Any

from tracer.nodedef import Symbol, outputs_of, write_constant, write_operation
from tracer.op import freeze, signature_of
from tracer.private import function_pb2, types_pb2
from tracer.spec import Spec, intern_spec

BOOL = int(types_pb2.DT_BOOL)


class Body:
    """A function's definition in the making. Inputs are symbols or Python values, in lists where the op takes lists."""

    def __init__(self, name: str) -> None:
        self.definition = function_pb2.FunctionDef()
        self._signature = self.definition.signature
        self._signature.name = name
        self._nodes = self.definition.node_def
        self._constants: dict[Any, Symbol] = {}

    def argument(self, spec: Spec) -> Symbol:
        """Adds an argument."""
        name = f"feed_{len(self._signature.input_arg)}"
        self._signature.input_arg.add(name=name, type=spec.enum)
        return Symbol(name, spec, "", [])

    def give(self, symbol: Symbol) -> None:
        """Adds a result of the function."""
        name = f"result_{len(self._signature.output_arg)}"
        self._signature.output_arg.add(name=name, type=symbol.spec.enum)
        self.definition.ret[name] = symbol.name

    def constant(self, value: Any, enum: int) -> Symbol:
        """Returns a tensor of a Python value; the same one for the same value."""
        key = enum, freeze(value)
        symbol = self._constants.get(key)
        if symbol is None:
            node = self._nodes.add(name=f"Const_{len(self._nodes)}")
            symbol = self._constants[key] = write_constant(node, value, enum)
        return symbol

    def symbol(self, value: Any, enum: int) -> Symbol:
        """Returns an input as a symbol; a Python value as a tensor of this dtype."""
        return value if isinstance(value, Symbol) else self.constant(value, enum)

    def add(self, op: str, inputs: list[Any], attrs: tuple[Any, ...], specs: list[Spec]) -> list[Symbol]:
        """Adds an operation with these attributes (names and values in turn) and outputs, which it returns flat."""
        node = self._nodes.add(name=f"{op}_{len(self._nodes)}")
        write_operation(node, op, inputs, attrs, self.constant)
        signature = signature_of(op)
        self._signature.is_stateful |= signature is not None and signature.definition.is_stateful
        return [Symbol(name, spec, op, inputs) for name, spec in zip(outputs_of(node), specs, strict=True)]

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

    def after(self, symbols: list[Symbol]) -> list[str]:
        """Returns the control inputs of a node that runs behind these."""
        return list(dict.fromkeys(f"^{s.name.partition(':')[0]}" for s in symbols if s.op))

    def run(self, op: str, inputs: list[Any], control: list[str], **attrs: Any) -> str:
        """Adds an operation without outputs behind the control inputs; returns the node's name."""
        node = self._nodes.add(name=f"{op}_{len(self._nodes)}")
        write_operation(node, op, inputs, tuple(item for pair in attrs.items() for item in pair), self.constant)
        node.input.extend(control)
        self._signature.is_stateful = True
        return str(node.name)

    def finish(self, node: str) -> None:
        """Makes this node run in every launch."""
        self._signature.control_output.append(node)
        self.definition.control_ret[node] = node
