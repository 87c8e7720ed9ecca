"""Node definitions: an operation and its inputs as a `NodeDef`, TensorFlow's own format.

Building a node through TensorFlow's Python takes 0.5 to 1 ms, for conversions and shape functions whose answers are
known from recording.

Relies on `op_def_library.value_to_attr_value`, and on the output names in function bodies: "node:output:number".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tracer.inputs import natural_enum
from tracer.op import freeze, signature_of
from tracer.private import node_def_pb2, op_def_library, types_pb2
from tracer.spec import Spec, intern_spec


class Symbol:
    """A tensor of the graph under construction: name, spec, and the op and inputs that produce it, if any."""

    __slots__ = ("inputs", "name", "op", "spec")

    def __init__(self, name: str, spec: Spec, op: str, inputs: list[Any]) -> None:
        self.name = name
        self.spec = spec
        self.op = op
        self.inputs = inputs


def write_constant(node: Any, value: Any, enum: int) -> Symbol:
    """Turns `node`, already named, into a constant of this value and dtype; returns its output."""
    given = value
    if enum == types_pb2.DT_HALF and not isinstance(value, (np.ndarray, np.generic)):
        with np.errstate(over="ignore"):  # TensorFlow rounds Python numbers to float32 first
            given = np.asarray(value, np.float32)
    proto = tf.make_tensor_proto(given, tf.dtypes.as_dtype(enum))
    node.op = "Const"
    node.attr["dtype"].type = enum
    node.attr["value"].tensor.CopyFrom(proto)
    spec = intern_spec(enum, tuple(d.size for d in proto.tensor_shape.dim))
    return Symbol(f"{node.name}:output:0", spec, "Const", [value])


def write_operation(
    node: Any, op: str, inputs: list[Any], attrs: tuple[Any, ...], constant: Callable[[Any, int], Symbol]
) -> list[str]:
    """Turns `node`, already named, into an operation with these inputs and attributes (alternating names and values).

    Inputs are symbols or Python values, as lists for list arguments; `constant` makes symbols of values. Returns the
    names of the outputs. Raises `NotImplementedError` for an unregistered operation or a missing attribute.
    """
    form = _form_of(op, inputs, attrs)
    given = inputs
    if form.lists is not None:
        given = [v for value, many in zip(inputs, form.lists, strict=True) for v in (value if many else (value,))]
    names = [
        value.name if isinstance(value, Symbol) else constant(value, enum).name
        for value, enum in zip(given, form.enums, strict=True)
    ]
    node.MergeFromString(form.content)
    node.input.extend(names)
    name = node.name
    return [name + output for output in form.outputs]


class _Form(NamedTuple):
    """What operations with the same attributes, on inputs of the same dtypes, have in common."""

    content: bytes  # the node without its name and inputs
    lists: tuple[bool, ...] | None  # which inputs are lists; None if none is
    enums: tuple[int, ...]  # the dtypes of the inputs, those in lists one by one
    outputs: tuple[str, ...]  # names of the outputs, without the node's in front


MAX_FORMS = 4096
# A segment has few different ones: of a rollout of 1640 operations 60. Attribute by attribute, an operation took 15 us.
_forms: dict[Any, _Form] = {}


def _form_of(op: str, inputs: list[Any], attrs: tuple[Any, ...]) -> _Form:
    """Returns the form of an operation; see `write_operation`."""
    try:
        key = op, freeze(attrs), tuple([_kind(value) for value in inputs])
    except TypeError:  # a function among the attributes, say
        return _new_form(op, inputs, attrs)
    form = _forms.get(key)
    if form is None:
        if len(_forms) >= MAX_FORMS:
            _forms.clear()
        form = _forms[key] = _new_form(op, inputs, attrs)
    return form


def _kind(value: Any) -> Any:
    """Returns what the attributes that follow from an input depend on."""
    if isinstance(value, Symbol):
        return value.spec.enum
    if value.__class__ is list:
        return tuple([_kind(v) for v in value])
    return value.__class__, freeze(value)


def _new_form(op: str, inputs: list[Any], attrs: tuple[Any, ...]) -> _Form:
    recipe = _recipe(op)
    given = {name: value for name, value in zip(attrs[::2], attrs[1::2], strict=True) if value is not None}
    derived = _derived(recipe, inputs, given)
    found: list[int] = []
    for arg, value in zip(recipe.inputs, inputs, strict=True):
        if arg.enums:
            enums = derived[arg.enums] if arg.enums in derived else given[arg.enums]
            found += [int(enum) for _, enum in zip(value, enums, strict=True)]
        else:
            enum = arg.enum or derived.get(arg.type) or _enum(given[arg.type])
            found += [enum] * (len(value) if arg.number else 1)
    node = node_def_pb2.NodeDef(op=op)
    for name, kind, default in recipe.attrs:
        if name in given:
            node.attr[name].CopyFrom(_attr_value(given[name], kind, name))
        elif name in derived:
            _set(node.attr[name], kind, derived[name])
        elif default is not None:
            node.attr[name].CopyFrom(default)
        else:
            raise NotImplementedError(f"attribute {name!r} of {op} is not known")
    lists = tuple([bool(arg.number or arg.enums) for arg in recipe.inputs])
    return _Form(node.SerializeToString(), lists if any(lists) else None, tuple(found), tuple(outputs_of(node)))


MAX_ATTRS = 1000
_PLAIN_ATTRS = (int, bool, str, tf.DType)
_attr_values: dict[tuple[str, type, Any], Any] = {}  # by the attribute's kind, and the type and value


def _attr_value(value: Any, kind: str, name: str) -> Any:
    """Returns the protocol message for an attribute, cached for plain values; the caller must copy it."""
    if type(value) not in _PLAIN_ATTRS:
        return op_def_library.value_to_attr_value(value, kind, name)
    key = kind, type(value), value
    found = _attr_values.get(key)
    if found is None:
        if len(_attr_values) >= MAX_ATTRS:
            _attr_values.clear()
        found = _attr_values[key] = op_def_library.value_to_attr_value(value, kind, name)
    return found


def run_through(definition: Any, given: list[Any], run: Callable[[Any, list[Any]], Iterable[Any]]) -> list[Any] | None:
    """Returns a function's results; `run` makes the outputs of an operation from its inputs.

    Operations come in an order in which inputs are known. None if there is none.
    """
    values = {arg.name: value for arg, value in zip(definition.signature.input_arg, given, strict=True)}
    waiting = list(definition.node_def)
    while waiting:
        later = []
        for node in waiting:
            names = [name for name in node.input if not name.startswith("^")]
            if all(name in values for name in names):
                values.update(zip(outputs_of(node), run(node, [values[name] for name in names]), strict=True))
            else:
                later.append(node)
        if len(later) == len(waiting):
            return None
        waiting = later
    return [values[definition.ret[arg.name]] for arg in definition.signature.output_arg]


def outputs_of(node: Any) -> list[str]:
    """Returns the names of a node's outputs."""
    names = []
    for out in _recipe(node.op).outputs:
        count = len(node.attr[out.enums].list.type) if out.enums else node.attr[out.number].i if out.number else 1
        names += [f"{node.name}:{out.name}:{n}" for n in range(count)]
    return names


def grouped(op: str, attrs: tuple[Any, ...], flat: list[Any]) -> list[Any]:
    """Returns flat inputs grouped by argument, using the counts and type lists in `attrs`."""
    given = dict(zip(attrs[::2], attrs[1::2], strict=True))
    groups: list[Any] = []
    at = 0
    for arg in _recipe(op).inputs:
        if arg.number or arg.enums:
            count = given[arg.number] if arg.number else len(given[arg.enums])
            groups.append(flat[at : at + count])
            at += count
        else:
            groups.append(flat[at])
            at += 1
    return groups


class _Argument(NamedTuple):
    name: str
    enum: int  # a fixed dtype, or 0
    type: str  # else the attribute with the dtype
    number: str  # of a list of one dtype: the attribute with its length
    enums: str  # of a list of mixed dtypes: the attribute with those


class _Recipe(NamedTuple):
    inputs: tuple[_Argument, ...]
    outputs: tuple[_Argument, ...]
    attrs: tuple[tuple[str, str, Any], ...]  # name, kind, default


@functools.cache
def _recipe(op: str) -> _Recipe:
    signature = signature_of(op)
    if signature is None:
        raise NotImplementedError(f"{op} is no operation that TensorFlow has registered")
    definition = signature.definition

    def arguments(given: Any) -> tuple[_Argument, ...]:
        return tuple(_Argument(a.name, a.type, a.type_attr, a.number_attr, a.type_list_attr) for a in given)

    attrs = tuple((a.name, a.type, a.default_value if a.HasField("default_value") else None) for a in definition.attr)
    return _Recipe(arguments(definition.input_arg), arguments(definition.output_arg), attrs)


def _derived(recipe: _Recipe, inputs: list[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes that follow from the inputs: dtype enums and list lengths.

    Tensors take precedence over arrays, and arrays over Python numbers, as when TensorFlow converts them together.
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
            array = isinstance(value, np.ndarray)  # it keeps the dtype it had as a tensor
            integers = not array and (np.asarray(value).dtype.kind in "iu" or np.size(value) == 0)
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
