"""Op table: how each of TensorFlow's is followed, from the tables by which the runtime decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from coexec.lowering.op_failures import CHECKED, DIVISIONS, NUMBERS_ONLY, POSITIONS, SHIFTS, TOTAL, differs
from tracer import seeds
from tracer.host_ops import is_apart
from tracer.inputs import DATA_SHAPED, SHAPE_OPS
from tracer.op import Signature, signature_of
from tracer.private import types_pb2
from tracer.variable_ops import is_variable_op

XLA, GRAPH, AT_ONCE, ALONE = "in segments, also by XLA", "in segments, outside of XLA", "at once", "alone"

_ABOUT = {
    XLA: "Part of a segment, which is launched as a whole: as a graph, or compiled by XLA.",
    GRAPH: "Part of a segment. Where XLA compiles it, what surrounds these is compiled in parts.",
    AT_ONCE: "On its own, as it is called, if its inputs are known by then; else behind what is pending. "
    "(`VarHandleOp`, which makes a variable, also behind what may fail.)",
    ALONE: "On its own, between two launches.",
}


class Followed(NamedTuple):
    """How an operation is followed, and why, or on which condition."""

    how: str
    why: str


def how_followed(op: str) -> Followed | None:
    """Returns how operation `op` is followed where its inputs have any shapes and dtypes; None if it is not one.

    Shapes and dtypes may say more: an operation on strings, or one whose result has a shape that depends on values
    that are not known, is never part of a segment.
    """
    signature = signature_of(op)
    if signature is None:
        return None
    if signature.stateful and not is_variable_op(op) and op not in seeds.SEEDED:
        return Followed(AT_ONCE if is_apart(op) else ALONE, "it has effects or a state of its own")
    if reason := _refused(signature, op):
        return Followed(AT_ONCE if is_apart(op) else ALONE, reason)
    if op in DATA_SHAPED:
        return Followed(AT_ONCE, "the shape of its result depends on values")
    if op in SHAPE_OPS:
        return Followed(XLA, "its value follows from shapes alone: it does not run")
    if reason := differs(op):
        return Followed(GRAPH, f"it {reason}")
    if op in DIVISIONS or op in SHIFTS or op in CHECKED or op in NUMBERS_ONLY:
        return Followed(XLA, "a predicate tells beforehand whether kernel and XLA agree on these values")
    if op in POSITIONS:
        return Followed(XLA, "if its positions and extents are constants; they could be out of range")
    if op in TOTAL:
        return Followed(XLA, "it cannot fail")
    return Followed(GRAPH, "it may fail on some values, which XLA would not tell")


def _refused(signature: Signature, op: str) -> str | None:
    """Returns why the definition alone keeps an operation out of segments; None if it does not."""
    definition = signature.definition
    given = {arg.type for arg in definition.input_arg}
    made = {arg.type for arg in definition.output_arg}
    if types_pb2.DT_STRING in given | made:
        return "strings cannot be compiled"
    if types_pb2.DT_VARIANT in given | made:
        return "a variant's contents are not known"
    if types_pb2.DT_RESOURCE in made or (types_pb2.DT_RESOURCE in given and not is_variable_op(op)):
        return "it makes a resource, or works on one that is not a variable"
    return None


def operations() -> Iterator[str]:
    """Yields the names of all operations that eager programs can issue, in order: not those on references of TF 1."""
    for op in dir(tf.raw_ops):
        signature = signature_of(op)
        if signature is None:
            continue
        arguments = (*signature.definition.input_arg, *signature.definition.output_arg)
        takes_functions = any(attr.type in ("func", "list(func)") for attr in signature.definition.attr)
        if not takes_functions and not any(arg.is_ref for arg in arguments):
            yield op


def as_markdown() -> str:
    """Returns lists of all operations, by how they are followed and why."""
    found: dict[Followed, list[str]] = {}
    for op in operations():
        if (followed := how_followed(op)) is not None:
            found.setdefault(followed, []).append(op)
    lines = []
    for how, about in _ABOUT.items():
        lines += [f"## {how[0].upper()}{how[1:]}", "", about, ""]
        for followed, names in sorted(found.items()):
            if followed.how == how:
                lines += [f"*{followed.why}* ({len(names)}): {', '.join(names)}", ""]
    return "\n".join(lines)
