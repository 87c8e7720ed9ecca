"""Shape rules: what they say is what TensorFlow's shape functions say."""

import itertools

import pytest
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tracer.op import signature_of
from tracer.shape_rules import _ALIKE, _ELEMENTWISE, _RULES, BY_NUMBERS, shape_of
from tracer.sizes import Size

SHAPES = [(), (1,), (3,), (1, 1), (2, 3), (3, 2), (4, 3), (3, 3), (1, 3), (2, 4, 3), (2, 1, 3), (7, 2, 4, 3)]
AXES = [[], [0], [1], [-1], [0, 1], [1, 0], [0, 2], [2, 0, 1], [-1, 0], [3, 1, 0, 2]]


BY_NUMBER = ("ConcatV2", "ExpandDims", "GatherV2", "UnsortedSegmentSum")  # by one
FULL = [
    [],
    [1],
    [6],
    [3, 2],
    [2, 3],
    [1, 3],
    [4, 3],
    [-1],
    [3, -1],
    [-1, 2, 3],
    [2, 4, 3],
    [1, -1, 4],
    [0, 2],
    [2, -1, -1],
]


def numbers(op):
    """Returns what an operation is given as its last input: axes, or sizes."""
    if op in BY_NUMBER:
        return [[n] for n in range(-4, 5)]
    return FULL if op in ("BroadcastTo", "Reshape", "Tile") else AXES


def inferred(op, shapes, axes, attrs):
    """Returns the shape that TensorFlow infers; None if it refuses the inputs."""
    names = [name.replace("reduction_indices", "axis") for name in signature_of(op).inputs]
    names = ["axis" if name == "dim" else name for name in names]
    kinds = {"segment_ids": tf.int32, "indices": tf.int32}
    with FuncGraph("inferred").as_default():
        usual = tf.bool if op.startswith("Logical") else tf.float32
        made = [
            tf.compat.v1.placeholder(kinds.get(name, usual), s)
            for name, s in zip(names if op != "ConcatV2" else ["values"] * len(shapes), shapes, strict=False)
        ]
        if op == "SelectV2":
            made[0] = tf.compat.v1.placeholder(tf.bool, shapes[0])
        if op in ("AddN", "ConcatV2"):
            made = [made]
        if axes is not None:
            made.append(tf.constant(axes if op not in BY_NUMBER else axes[0], tf.int32))
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
    by_axes = names[-1] in ("reduction_indices", "perm") or op in BY_NUMBERS
    known = {attr.name for attr in signature_of(op).definition.attr}
    flags = [name for name in ("transpose_a", "transpose_b", "keep_dims") if name in known]
    count = 2 if op in ("AddN", "ConcatV2") else len(names) - by_axes
    said = 0
    for shapes in itertools.product(SHAPES, repeat=count):
        for axes in numbers(op) if by_axes else [None]:
            for values in itertools.product([False, True], repeat=len(flags)):
                attrs = dict(zip(flags, values, strict=True))
                expected = inferred(op, shapes, axes, attrs)
                if expected is None:
                    continue
                given = [*shapes, () if op in BY_NUMBER else (len(axes),)] if by_axes else list(shapes)
                found = shape_of(op, tuple(itertools.chain(*attrs.items())), given, axes)
                said += found is not None
                assert found in (None, expected), (shapes, axes, attrs)
    assert said >= 8


B, C = Size(0, ((1, ((0, 0),)),)), Size(0, ((1, ((1, 0),)),))


@pytest.mark.parametrize(
    ("op", "shapes", "axes", "expected"),
    [
        ("Reshape", [(B, 3, 4)], [B, 12], (B, 12)),
        ("Reshape", [(B, 3, 4)], [B, -1], (B, 12)),
        ("Reshape", [(B, 3, 4)], [-1, 12], (B, 12)),
        ("Reshape", [(B, 3, 4)], [-1, 4], None),  # 3 times B
        ("Reshape", [(B, 3, 4)], [C, 12], None),
        ("Reshape", [(B, C)], [-1], None),
        ("Reshape", [(B, 0)], [-1, 0], None),
        ("BroadcastTo", [(1, 3)], [B, 3], (B, 3)),
        ("BroadcastTo", [(C, 3)], [B, 3], None),
        ("ConcatV2", [(B, 3), (B, 2)], [1], (B, 5)),
        ("ConcatV2", [(B, 3), (C, 3)], [0], None),
        ("ConcatV2", [(B, 3), (C, 2)], [1], None),
        ("ExpandDims", [(B, 3)], [-1], (B, 3, 1)),
        ("GatherV2", [(7, 3), (B, 2)], [0], (B, 2, 3)),
        ("Tile", [(1, 3)], [B, 1], (B, 3)),
        ("Tile", [(B, 3)], [1, 2], (B, 6)),
        ("Tile", [(B, 3)], [2, 1], None),
        ("Tile", [(2, 3)], [B, 1], None),
        ("UnsortedSegmentSum", [(B, 2, 3), (B,)], [7], (7, 2, 3)),
        ("UnsortedSegmentSum", [(B, 2, 3), (C,)], [7], None),
    ],
)
def test_sizes(op, shapes, axes, expected):
    """What a rule says for dimensions that differ between calls, or nothing."""
    assert shape_of(op, (), [*shapes, (len(axes),)], axes) == expected
