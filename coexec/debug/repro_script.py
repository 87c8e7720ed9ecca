"""Repro script: one operation, saved so that plain TensorFlow can rerun it in another process."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.inputs import array_of
from tracer.intercept import make_constant
from tracer.nodedef import Symbol, outputs_of, write_operation
from tracer.op import signature_of
from tracer.private import EagerTensor
from tracer.spec import RESOURCE, STRING, VARIANT, spec_of
from tracer.variable_ops import VARIABLE_OPS

SCRIPT = "reproduce.py"
_OPERATION, _INPUTS = "operation.pbtxt", "inputs.npz"

_TEXT = '''"""{message}

Runs this operation once more, on the inputs that it had; its exit status is 0 if the same comes of it.
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf
from google.protobuf import text_format

here = pathlib.Path(__file__).resolve().parent
operation = text_format.Parse((here / "{operation}").read_text(), tf.compat.v1.GraphDef())
held = np.load(here / "{inputs}")
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    tf.graph_util.import_graph_def(operation, name="")
    feeds = {{}}
    for node in operation.node:
        if node.op == "Placeholder":
            dtype = tf.dtypes.as_dtype(node.attr["dtype"].type)
            feeds[node.name + ":0"] = held[node.name].view(dtype.as_numpy_dtype)  # NumPy knows no bfloat16
            print(node.name, feeds[node.name + ":0"], sep=" = ")
    wrong = 0
    for name, value in zip({outputs}, session.run({outputs}, feeds)):
        print(name, value, sep=" = ")
        array = np.asarray(value)
        if tf.dtypes.as_dtype(array.dtype).is_floating or tf.dtypes.as_dtype(array.dtype).is_complex:
            wrong += int(np.count_nonzero(~np.isfinite(array)))
print(wrong, "values are NaN or infinite")
sys.exit(0 if wrong else 1)
'''


class Unwritable(Exception):
    """Raised for an operation that cannot run in another process; never reaches the user."""


def write(
    directory: str, op: str, given: tuple[Any, ...], attrs: tuple[Any, ...], before: Any, message: list[str]
) -> str:
    """Saves an operation to a new directory inside `directory`, and returns its path.

    `given` are its inputs, in lists where the operation takes lists; `before` is the previous value of the variable
    behind its first input. Raises `Unwritable` if another process could not run it, or `OSError`.
    """
    if signature_of(op) is None:
        raise Unwritable(f"{op} is a function")
    definition = tf.compat.v1.GraphDef()
    arrays: dict[str, Any] = {}
    control: list[str] = []

    def fed(array: Any, enum: int) -> str:
        name = f"input_{len(arrays)}"
        arrays[name] = array_of(array)
        node = definition.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = enum
        return name

    def variable(tensor: Any) -> Symbol:
        spec = spec_of(tensor)
        if spec.handle is None or before is None or op not in VARIABLE_OPS:
            raise Unwritable(f"{op} works on something that only its own process has")
        ((enum, shape),) = spec.handle
        node = definition.node.add(name="variable", op="VarHandleOp")
        node.attr["dtype"].type = enum
        node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
        held = definition.node.add(name="held", op="AssignVariableOp", input=["variable", fed(before, enum)])
        held.attr["dtype"].type = enum
        control.append("^held")
        return Symbol("variable", spec, "", [])

    def symbol(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(v, tf.Tensor) for v in value):
            return [symbol(v if isinstance(v, tf.Tensor) else make_constant(v, None)) for v in value]
        if not isinstance(value, EagerTensor):
            return value
        spec = spec_of(value)
        if spec.enum == RESOURCE:
            return variable(value)
        if spec.enum in (STRING, VARIANT):
            raise Unwritable(f"{op} works on {spec.dtype.name}s")
        return Symbol(fed(value, spec.enum), spec, "", [])

    def constant(value: Any, enum: int) -> Symbol:
        tensor = make_constant(value, tf.dtypes.as_dtype(enum))
        return Symbol(fed(tensor, enum), spec_of(tensor), "", [])

    inputs = [symbol(value) for value in given]
    node = definition.node.add(name="operation")
    try:
        write_operation(node, op, inputs, attrs, constant)
    except (NotImplementedError, TypeError, ValueError, KeyError) as error:
        raise Unwritable(f"{op} cannot be written down: {error}") from None
    node.input.extend(control)
    outputs = [f"operation:{n}" for n in range(len(outputs_of(node)))]
    if not outputs:
        read = definition.node.add(name="variable_behind", op="ReadVariableOp", input=["variable", "^operation"])
        read.attr["dtype"].CopyFrom(next(n for n in definition.node if n.name == "variable").attr["dtype"])
        outputs = ["variable_behind:0"]
    path = _new_directory(directory, op)
    np.savez(os.path.join(path, _INPUTS), **arrays)
    said = "\n".join(message).replace("\\", "/").replace('"""', "'''")
    text = _TEXT.format(message=said, operation=_OPERATION, inputs=_INPUTS, outputs=outputs)
    for name, content in ((_OPERATION, str(definition)), (SCRIPT, text)):
        with open(os.path.join(path, name), "w", encoding="utf-8") as file:
            file.write(content)
    return path


def _new_directory(directory: str, op: str) -> str:
    """Creates the next numbered directory for an operation, and returns its path."""
    os.makedirs(directory, exist_ok=True)
    for number in itertools.count(1):
        path = os.path.join(directory, f"{number:03d}-{op}")
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        return path
    raise AssertionError
