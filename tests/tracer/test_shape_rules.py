"""Shape rules: what they say is what TensorFlow's shape functions say."""

import itertools

import pytest
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tracer.op import signature_of
from tracer.shape_rules import _ALIKE, _ELEMENTWISE, _RULES, shape_of

SHAPES = [(), (1,), (3,), (1, 1), (2, 3), (3, 2), (4, 3), (3, 3), (1, 3), (2, 4, 3), (2, 1, 3), (7, 2, 4, 3)]
AXES = [[], [0], [1], [-1], [0, 1], [1, 0], [0, 2], [2, 0, 1], [-1, 0], [3, 1, 0, 2]]


def inferred(op, shapes, axes, attrs):
    """Returns the shape that TensorFlow infers; None if it refuses the inputs."""
    names = [name.replace("reduction_indices", "axis") for name in signature_of(op).inputs]
    with FuncGraph("inferred").as_default():
        made = [tf.compat.v1.placeholder(tf.bool if op.startswith("Logical") else tf.float32, s) for s in shapes]
        if op == "SelectV2":
            made[0] = tf.compat.v1.placeholder(tf.bool, shapes[0])
        if op == "AddN":
            made = [made]
        if axes is not None:
            made.append(tf.constant(axes, tf.int32))
        if op == "Cast":
            attrs = {**attrs, "DstT": tf.int32}
        try:
            return tuple(getattr(tf.raw_ops, op)(**dict(zip(names, made, strict=True)), **attrs).shape)
        except ValueError:
            return None


@pytest.mark.parametrize("op", sorted(_ALIKE | _ELEMENTWISE | set(_RULES)))
def test_rules(op):
    """Whatever a rule says for inputs that TensorFlow takes is what TensorFlow says, and a rule says something."""
    names = signature_of(op).inputs
    by_axes = names[-1] in ("reduction_indices", "perm")
    known = {attr.name for attr in signature_of(op).definition.attr}
    flags = [name for name in ("transpose_a", "transpose_b", "keep_dims") if name in known]
    count = 2 if op == "AddN" else len(names) - by_axes
    said = 0
    for shapes in itertools.product(SHAPES, repeat=count):
        for axes in AXES if by_axes else [None]:
            for values in itertools.product([False, True], repeat=len(flags)):
                attrs = dict(zip(flags, values, strict=True))
                expected = inferred(op, shapes, axes, attrs)
                if expected is None:
                    continue
                given = [*shapes, (len(axes),)] if by_axes else list(shapes)
                found = shape_of(op, tuple(itertools.chain(*attrs.items())), given, axes)
                said += found is not None
                assert found in (None, expected), (shapes, axes, attrs)
    assert said >= 8
