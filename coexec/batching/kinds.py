"""Kinds: operations that can be carried out together, as they differ only in the tensors of their row inputs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from coexec.batching.rules import CONSTANT, RULES, SHARED, Operand, Rule, RuleCall, fits
from tracer.derive import folded_variant, inferred_variant
from tracer.graph import Node
from tracer.inputs import part_of
from tracer.intercept import handling
from tracer.lazy import Output
from tracer.location import Location
from tracer.op import Const, signature_of


class OpKind:
    """An operation, its attributes, and what is known of its inputs and outputs."""

    __slots__ = ("alone", "attrs", "call", "checked", "number", "outputs", "rule", "single", "wrong")

    def __init__(self, number: int, call: RuleCall, attrs: tuple[Any, ...], outputs: tuple[Output, ...], single: bool):
        self.number = number
        self.call = call
        self.attrs = attrs
        self.rule: Rule = RULES[call.op][0]
        self.outputs = outputs
        self.single = single  # whether the result is a tensor, not a list of tensors
        # Whether all instances are one, as nothing but shared tensors goes in: then so is the result.
        self.alone = all(operand.mode in (SHARED, CONSTANT) for operand in call.operands)
        self.wrong = False  # whether that found another value
        self.checked = False  # whether a batch of it has been compared with the operation


class Folded:
    """An operation whose results follow from shapes and constants: they are constants."""

    __slots__ = ("outputs", "single")

    def __init__(self, outputs: tuple[Output, ...], single: bool) -> None:
        self.outputs = outputs
        self.single = single


def kind_of(
    number: int, op: str, attrs: tuple[Any, ...], operands: list[Any], outside: list[Any]
) -> OpKind | Folded | None:
    """Returns the kind of an operation, or what it folds to; None if it cannot be batched.

    `operands`: one `Operand` per input, a list of them for a list input. `outside`: for each the specs or constants
    that the outputs' shapes may depend on, if these are not the operand's own (a variable's handle).
    """
    flat: list[Operand] = []
    parts: list[Any] = []
    for operand, handle in zip(operands, outside, strict=True):
        if isinstance(operand, list):
            flat += operand
            first = operand[0]
            # Many items are one operand.
            parts.append(tuple(_part(op, o) for o in (operand if not first.items else operand * first.items)))
        else:
            flat.append(operand)
            parts.append(_part(op, operand) if handle is None else handle)
    if not _has_one_dtype(op, operands, attrs):
        return None
    node = Node(0, op, "fast", attrs, Location((), 0))
    key = tuple(parts)
    with handling(None):
        variant = folded_variant(node, key) or inferred_variant(node, key)
    if variant is None or not variant.outputs:
        return None
    single = variant.template == -1
    if not single and variant.template != list(range(len(variant.outputs))):
        return None
    if variant.folded:
        return Folded(variant.outputs, single)
    if op not in RULES:
        return None
    shapes = [out.spec.shape for out in variant.outputs]
    call = RuleCall(op, flat, dict(zip(attrs[::2], attrs[1::2], strict=True)), shapes)
    alone = all(operand.mode in (SHARED, CONSTANT) for operand in flat)
    if all(operand.mode == CONSTANT for operand in flat):
        return None
    if alone:  # carried out as a batch of one
        seen = [Operand("row" if o.mode == SHARED else o.mode, o.spec, o.value) for o in flat]
        call = RuleCall(op, seen, call.attrs, shapes)
    if not fits(call):
        return None
    kind = OpKind(number, call, attrs, variant.outputs, single)
    kind.alone = alone
    return kind


def _has_one_dtype(op: str, operands: list[Any], attrs: tuple[Any, ...]) -> bool:
    """Returns whether inputs that the definition wants to be of one dtype are; eagerly others are refused."""
    signature = signature_of(op)
    assert signature is not None
    found = {name: tf.as_dtype(value) for name, value in zip(attrs[::2], attrs[1::2], strict=True) if name == "T"}
    for argument, operand in zip(signature.definition.input_arg, operands, strict=True):
        if argument.type_attr:
            for item in operand if isinstance(operand, list) else [operand]:
                if found.setdefault(argument.type_attr, item.spec.dtype) != item.spec.dtype:
                    return False
    return True


def _part(op: str, operand: Operand) -> Any:
    const = None if operand.mode != CONSTANT else Const(operand.value)
    return part_of(const, operand.spec, op)
