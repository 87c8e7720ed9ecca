"""Body: a TensorFlow function's definition, written down node by node, without a graph.

Adding an operation to a TensorFlow graph took 0.5 to 1 ms here, for conversions and shape functions whose answers
recording has found already: the larger part of what it took to have an executable.

Relies on `op_def_library.value_to_attr_value`, and on how the bodies of functions name what a node gives:
"node:output:number".
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tracer.inputs import natural_enum
from tracer.op import freeze, signature_of
from tracer.private import function_pb2, op_def_library, types_pb2
from tracer.spec import Spec, intern_spec

BOOL = int(types_pb2.DT_BOOL)


class Symbol:
    """A tensor of the body: its name and spec, and which operation makes it of what ("" if it is an argument)."""

    __slots__ = ("inputs", "name", "op", "spec")

    def __init__(self, name: str, spec: Spec, op: str, inputs: list[Any]) -> None:
        self.name = name
        self.spec = spec
        self.op = op
        self.inputs = inputs


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
            proto = tf.make_tensor_proto(value, tf.dtypes.as_dtype(enum))
            node = self._nodes.add(name=f"Const_{len(self._nodes)}", op="Const")
            node.attr["dtype"].type = enum
            node.attr["value"].tensor.CopyFrom(proto)
            spec = intern_spec(enum, tuple(d.size for d in proto.tensor_shape.dim))
            symbol = self._constants[key] = Symbol(f"{node.name}:output:0", spec, "Const", [])
        return symbol

    def symbol(self, value: Any, enum: int) -> Symbol:
        """Returns an input as a symbol; a Python value as a tensor of this dtype."""
        return value if isinstance(value, Symbol) else self.constant(value, enum)

    def add(self, op: str, inputs: list[Any], attrs: tuple[Any, ...], specs: list[Spec]) -> list[Symbol]:
        """Adds an operation with these attributes (names and values in turn) and outputs, which it returns flat."""
        recipe = _recipe(op)
        given = {name: value for name, value in zip(attrs[::2], attrs[1::2], strict=True) if value is not None}
        derived = _derived(recipe, inputs, given)
        names: list[str] = []
        for arg, value in zip(recipe.inputs, inputs, strict=True):
            if arg.enums:
                enums = derived.get(arg.enums) or given[arg.enums]
                names += [self.symbol(v, int(e)).name for v, e in zip(value, enums, strict=True)]
            else:
                enum = arg.enum or derived.get(arg.type) or _enum(given[arg.type])
                names += [self.symbol(v, enum).name for v in (value if arg.number else [value])]
        node = self._nodes.add(name=f"{op}_{len(self._nodes)}", op=op, input=names)
        for name, kind, default in recipe.attrs:
            if name in given:
                node.attr[name].CopyFrom(op_def_library.value_to_attr_value(given[name], kind, name))
            elif name in derived:
                _set(node.attr[name], kind, derived[name])
            elif default is not None:
                node.attr[name].CopyFrom(default)
            else:
                raise NotImplementedError(f"attribute {name!r} of {op} is not known")
        if recipe.stateful:
            self._signature.is_stateful = True
        if len(specs) == 1:
            return [Symbol(f"{node.name}:{recipe.outputs[0].name}:0", specs[0], op, inputs)]
        ends = []
        for out in recipe.outputs:
            count = len(node.attr[out.enums].list.type) if out.enums else node.attr[out.number].i if out.number else 1
            ends += [f"{node.name}:{out.name}:{n}" for n in range(count)]
        return [Symbol(end, spec, op, inputs) for end, spec in zip(ends, specs, strict=True)]

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
        self.add(op, inputs, tuple(item for pair in attrs.items() for item in pair), [])
        self._nodes[-1].input.extend(control)
        return str(self._nodes[-1].name)

    def finish(self, node: str) -> None:
        """Makes this node run in every launch."""
        self._signature.control_output.append(node)
        self.definition.control_ret[node] = node


class _Argument(NamedTuple):
    name: str
    enum: int  # the dtype, where it is always the same
    type: str  # else the attribute that says it
    number: str  # the attribute that says how many there are, of a list of one dtype
    enums: str  # the attribute with the dtypes of a list of several


class _Recipe(NamedTuple):
    inputs: tuple[_Argument, ...]
    outputs: tuple[_Argument, ...]
    attrs: tuple[tuple[str, str, Any], ...]  # name, kind, default
    stateful: bool


@functools.cache
def _recipe(op: str) -> _Recipe:
    signature = signature_of(op)
    if signature is None:
        raise NotImplementedError(f"{op} is no operation that TensorFlow has registered")
    definition = signature.definition

    def arguments(given: Any) -> tuple[_Argument, ...]:
        return tuple(_Argument(a.name, a.type, a.type_attr, a.number_attr, a.type_list_attr) for a in given)

    attrs = tuple((a.name, a.type, a.default_value if a.HasField("default_value") else None) for a in definition.attr)
    return _Recipe(
        arguments(definition.input_arg), arguments(definition.output_arg), attrs, bool(definition.is_stateful)
    )


def _derived(recipe: _Recipe, inputs: list[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes that follow from the inputs: dtypes as enums, counts.

    Tensors say their dtype, then arrays, then Python's numbers, as where TensorFlow makes tensors of them together.
    """
    derived: dict[str, Any] = {}
    python: list[tuple[str, Any]] = []
    for arg, value in zip(recipe.inputs, inputs, strict=True):
        if arg.enums:
            if arg.enums not in given:
                derived[arg.enums] = [v.spec.enum if isinstance(v, Symbol) else natural_enum(v) for v in value]
            continue
        if arg.number:
            derived.setdefault(arg.number, len(value))
        if arg.type and arg.type not in given and arg.type not in derived:
            for item in value if arg.number else (value,):
                if isinstance(item, Symbol):
                    derived[arg.type] = item.spec.enum
                    break
            else:
                python += [(arg.type, item) for item in (value if arg.number else (value,))]
    for name, value in sorted(python, key=lambda item: not isinstance(item[1], (np.ndarray, np.generic))):
        if name not in derived:
            default = next((d for n, _, d in recipe.attrs if n == name), None)
            integers = np.asarray(value).dtype.kind in "iu" or np.size(value) == 0
            derived[name] = default.type if default is not None and integers else natural_enum(value)
    return derived


def _enum(dtype: Any) -> int:
    return int(getattr(dtype, "as_datatype_enum", dtype))


def _set(attr: Any, kind: str, value: Any) -> None:
    if kind == "type":
        attr.type = value
    elif kind == "int":
        attr.i = value
    else:
        attr.list.type.extend(value)
