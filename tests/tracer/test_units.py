"""The tracer's small parts, each on its own: locations, guards, constants, specs, dtypes, shapes."""

import concurrent.futures
import contextlib
import gc
import pickle
import sys
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import coexec
from tracer import location, merge, nodedef
from tracer import spec as spec_module
from tracer.guards import is_guarded
from tracer.inputs import SHAPED_BY_CONSTANTS, input_enum
from tracer.location import Frame, Location, add_library, call_stack, mark_entry
from tracer.merge import SHAPED_BY_SHAPES
from tracer.op import Const, copied_attrs, freeze, signature_of
from tracer.private import node_def_pb2, op_def_library
from tracer.rebuild import infer_outputs
from tracer.spec import _interned, intern_spec, spec_of

FLOAT = tf.float32.as_datatype_enum
INT = tf.int32.as_datatype_enum

# Locations.


def entry(function, *arguments):
    return function(*arguments)


mark_entry(entry.__code__)


def names_of(frames):
    return [f.function.rsplit(".", 1)[-1] for f in frames]


def inner():
    return call_stack()


def outer():
    return inner()


def test_the_call_stack_ends_at_the_entry():
    frames, guarded = entry(outer)
    assert names_of(frames) == ["inner", "outer"]
    assert {f.file for f in frames} == {__file__}
    assert frames[1].line == outer.__code__.co_firstlineno + 1
    assert not guarded


def test_the_nearest_entry_is_the_end():
    def again():
        return entry(outer)

    assert names_of(entry(again)[0]) == ["inner", "outer"]


def test_a_place_has_one_location_and_two_places_have_two():
    def once():
        return [call_stack()[0] for _ in range(3)]

    def twice():
        return call_stack()[0], call_stack()[0]

    assert len(set(entry(once))) == 1
    first, second = entry(twice)
    assert first[0].line == second[0].line
    assert first != second


class Inside:
    """Calls `call_stack` where CPython, once warm, goes straight from an instruction into Python."""

    def __getitem__(self, index):
        return call_stack()[0]

    def __call__(self):
        return call_stack()[0]

    def method(self):
        return call_stack()[0]

    @property
    def attribute(self):
        return call_stack()[0]


@pytest.mark.parametrize("way", ["item", "call", "method", "attribute", "loop"])
def test_a_place_stays_what_it_is_however_cpython_runs_it(way):
    """Its instructions are specialised after some calls, and not while a profiler looks."""
    inside = Inside()

    def generated():
        yield call_stack()[0]

    def place():
        if way == "item":
            return inside[0]
        if way == "call":
            return inside()
        if way == "method":
            return inside.method()
        if way == "attribute":
            return inside.attribute
        for frames in generated():
            return frames

    found = []
    for number in range(100):
        if number in (1, 50):
            sys.setprofile(lambda *_: None)
        try:
            found.append(entry(place))
        finally:
            sys.setprofile(None)
    assert len(found[0]) > 1
    assert set(found) == {found[0]}


def test_frames_of_libraries_are_skipped():
    def through_tensorflow():
        return tf.nest.map_structure(lambda _: call_stack()[0], [0])[0]

    def through_numpy():
        seen = []
        np.apply_along_axis(lambda row: seen.append(call_stack()[0]) or 0, 0, np.zeros([1, 1]))
        return seen[0]

    for function in (through_tensorflow, through_numpy):
        assert names_of(entry(function)) == ["<lambda>", function.__name__]


def test_an_added_library_is_skipped_and_its_neighbour_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(location, "_library_prefixes", list(location._library_prefixes))
    names = {"call_stack": call_stack}
    for folder in ("library", "library2"):
        source = f"def {folder}(): return call_stack()[0]"
        exec(compile(source, str(tmp_path / folder / "code.py"), "exec"), names)
    assert names_of(entry(names["library"])) == ["library"]
    add_library(str(tmp_path / "library"))
    assert names_of(entry(names["library"])) == []
    assert names_of(entry(names["library2"])) == ["library2"]


def test_an_entry_stays_one_when_the_caches_are_emptied():
    location._forget()
    assert names_of(entry(outer)[0]) == ["inner", "outer"]


def test_the_iteration_counts_the_same_operation_at_the_same_place():
    @coexec.function
    def step(x):
        for _ in range(3):
            x = tf.tanh(x)
        return tf.tanh(x) + 1.0

    step(tf.ones([2]))
    found = [(n.op, n.location.iteration) for n in step.trace_graph.nodes[1:]]
    assert found == [("Tanh", 0), ("Tanh", 1), ("Tanh", 2), ("Tanh", 0), ("AddV2", 0)]


def test_a_location_reads_as_file_line_and_function():
    frame = Frame("a.py", "f", 3, 10)
    assert str(Location((frame, frame), 0)) == "a.py:3 in f"
    assert str(Location((frame,), 2)) == "a.py:3 in f (iteration 2)"
    assert str(Location((), 0)) == "outside of user code"


def test_a_guard_in_any_user_frame_guards():
    def guarding():
        try:
            return outer()
        except ValueError:
            return None

    assert entry(guarding)[1]
    assert not entry(outer)[1]


# Guards. `mark` says whether the place of its call is guarded.

GUARDS = {
    "nothing": (False, "mark()"),
    "except": (True, "try: mark()\nexcept ValueError: pass"),
    "bare except": (True, "try: mark()\nexcept: pass"),
    "finally": (True, "try: mark()\nfinally: mark"),
    "except and finally": (True, "try: mark()\nexcept ValueError: pass\nfinally: mark"),
    "before the try": (False, "mark()\ntry: mark\nexcept ValueError: pass"),
    "after the try": (False, "try: mark\nexcept ValueError: pass\nmark()"),
    "in the handler": (False, "try: raise ValueError\nexcept ValueError: mark()"),
    "in a named handler": (False, "try: raise ValueError\nexcept ValueError as e: mark()"),
    "in else": (False, "try: mark\nexcept ValueError: pass\nelse: mark()"),
    "in finally": (False, "try: mark\nfinally: mark()"),
    "in a handler inside a try": (
        True,
        "try:\n try: raise ValueError\n except ValueError: mark()\nexcept KeyError: pass",
    ),
    "in a loop in a try": (True, "try:\n for _ in range(1): mark()\nexcept ValueError: pass"),
    "after a return out of a try": (True, "try:\n if not mark: return\n mark()\nexcept ValueError: pass"),
    "after a continue out of a try": (
        True,
        "for i in range(2):\n try:\n  if i: continue\n  mark()\n except ValueError: pass",
    ),
    "after a break out of a try": (False, "while True:\n try: break\n except ValueError: pass\nmark()"),
    "try in a loop": (True, "for _ in range(1):\n try: mark()\n except ValueError: pass"),
    "tape": (False, "with tf.GradientTape() as tape: mark()"),
    "tape without a name": (False, "with tf.GradientTape(): mark()"),
    "tape with arguments": (False, "with tf.GradientTape(persistent=True): mark()"),
    "a pause of a tape": (False, "with tf.GradientTape() as tape:\n with tape.stop_recording(): mark()"),
    "name scope": (False, "with tf.name_scope('a'): mark()"),
    "tape in a try": (True, "try:\n with tf.GradientTape(): mark()\nexcept ValueError: pass"),
    "try in a tape": (True, "with tf.GradientTape():\n try: mark()\n except ValueError: pass"),
    "after a try in a tape": (
        False,
        "with tf.GradientTape():\n try: mark\n except ValueError: pass\n mark()",
    ),
    "suppress": (True, "with contextlib.suppress(ValueError): mark()"),
    "suppress in a tape": (True, "with tf.GradientTape():\n with contextlib.suppress(ValueError): mark()"),
    "tape in suppress": (True, "with contextlib.suppress(ValueError):\n with tf.GradientTape(): mark()"),
    "after suppress": (False, "with contextlib.suppress(ValueError): mark\nmark()"),
    "after suppress in a tape": (
        False,
        "with tf.GradientTape():\n with contextlib.suppress(ValueError): mark\n mark()",
    ),
    "tape and suppress in one statement": (
        True,
        "with tf.GradientTape() as t, contextlib.suppress(ValueError): mark()",
    ),
    "suppress and tape in one statement": (
        True,
        "with contextlib.suppress(ValueError), tf.GradientTape() as t: mark()",
    ),
    "two tapes": (False, "with tf.GradientTape() as a, tf.GradientTape() as b: mark()"),
    "a manager of something with a harmless name": (
        True,
        "scope = contextlib\nwith scope.suppress(ValueError): mark()",
    ),
    "a manager from a variable": (True, "manager = contextlib.suppress(ValueError)\nwith manager: mark()"),
}


@pytest.mark.parametrize(
    ("guarded", "source"),
    [pytest.param(*case, id=name) for name, case in GUARDS.items()],
)
def test_what_guards(guarded, source):
    seen = []

    def mark():
        frame = sys._getframe(1)
        seen.append(is_guarded(frame.f_code, frame.f_lasti, frame.f_globals))

    names = {"mark": mark, "tf": tf, "contextlib": contextlib}
    exec("def f():\n" + "\n".join(f"    {line}" for line in source.split("\n")), names)
    names["f"]()
    assert seen == [guarded]


# Constants.

SAME = [
    (1, 1), (1.5, 1.5), ("a", "a"), (b"a", b"a"), (None, None), (float("nan"), float("nan")),
    ([1, [2]], [1, [2]]), (np.arange(3), np.arange(3)), (np.eye(2).T, np.eye(2)),
    (np.float32(1), np.float32(1)),
    (np.array([b"a"], object), np.array([b"a"], object)), (tf.float32, tf.dtypes.float32),
    (tf.TensorShape([1]), tf.TensorShape([1])),
]  # fmt: skip

DIFFERENT = [
    (1, True), (0, False), (1, 1.0), (0.0, -0.0), (0.0, 0), ("a", b"a"), ([1], (1,)), ([1], [True]),
    ([0.0], [-0.0]), ([], ()), (None, "None"), (complex(0.0, 0.0), complex(0.0, -0.0)),
    (np.int32(1), np.int64(1)), (np.int32(1), 1), (np.float32(0.0), np.float32(-0.0)),
    (np.array([0.0]), np.array([-0.0])), (np.arange(3), [0, 1, 2]), (np.zeros([2, 1]), np.zeros([1, 2])),
    (np.zeros(2, np.int32), np.zeros(1, np.int64)), (np.array(1), np.int64(1)), (tf.float32, tf.float64),
    (tf.TensorShape([1]), tf.TensorShape([None])), (tf.float32, repr(tf.float32)),
    (np.array([1.0], ml_dtypes.bfloat16), np.array([1.0], np.float16)),
    (np.array([-1], ml_dtypes.int4), np.array([15], ml_dtypes.uint4)), (ml_dtypes.int4(-1), ml_dtypes.uint4(15)),
    (np.empty([0], object), np.empty([0, 2], object)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), SAME, ids=str)
def test_constants_of_the_same_value_are_equal(a, b):
    assert Const(a) == Const(b)
    assert hash(Const(a)) == hash(Const(b))
    assert Const(a).holds(b)
    assert freeze(a) == freeze(b)


@pytest.mark.parametrize(("a", "b"), DIFFERENT, ids=str)
def test_constants_of_other_values_or_types_differ(a, b):
    assert Const(a) != Const(b)
    assert not Const(a).holds(b)
    assert not Const(b).holds(a)
    assert freeze(a) != freeze(b)


@pytest.mark.parametrize("value", [[1, [2, 3]], np.arange(3), [np.arange(3)]], ids=type)
def test_a_constant_keeps_its_value_when_the_original_changes(value):
    const, same = Const(value), Const(value)
    (value[1] if isinstance(value, list) and len(value) > 1 else value)[0] = 9
    assert const == same
    assert not const.holds(value)
    assert freeze(const.value) == const._key


def test_the_same_list_changed_is_another_value():
    value = [1, 2]
    const = Const(value)
    assert const.holds(value)
    value[0] = 3
    assert not const.holds(value)


def test_attributes_are_copied_with_their_lists():
    shape = [1, [2]]
    attrs = copied_attrs(("strides", shape))
    shape[1].append(3)
    assert attrs == ("strides", [1, [2]])


def test_values_of_other_types_cannot_be_compared():
    with pytest.raises(TypeError, match="a value of type object cannot be compared by value"):
        freeze([object()])


# Specs.


def test_threads_agree_on_specs(monkeypatch):
    """Threads that intern equal specs at the same time get one object, else what they record never matches again."""

    class Slow(spec_module.Spec):
        def __init__(self, *parts):
            time.sleep(0.02)
            super().__init__(*parts)

    monkeypatch.setattr(spec_module, "Spec", Slow)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        specs = list(pool.map(lambda _: intern_spec(FLOAT, (3, 77, 5)), range(4)))
    assert all(spec is specs[0] for spec in specs)


def test_equal_specs_are_one_object_while_one_of_them_lives(monkeypatch):
    """Those asked for last live on; there is a bound to how many."""
    monkeypatch.setattr(spec_module, "MAX_RECENT", 8)
    spec = intern_spec(FLOAT, (7, 5, 3))
    assert intern_spec(FLOAT, (7, 5, 3)) is spec
    assert intern_spec(FLOAT, (7, 5)) is not spec
    assert intern_spec(INT, (7, 5, 3)) is not spec
    assert pickle.loads(pickle.dumps(spec)) is spec
    kept = weakref.ref(spec)
    others = [intern_spec(FLOAT, (7, 5, 3, n)) for n in range(8)]
    assert intern_spec(FLOAT, (7, 5, 3)) is spec, others
    del spec
    others += [intern_spec(FLOAT, (7, 5, 4, n)) for n in range(8)]
    gc.collect()
    assert kept() is None
    assert (FLOAT, (7, 5, 3), None) not in _interned


def test_the_spec_of_a_variable_says_what_is_behind_it():
    spec = spec_of(tf.Variable([[1.0, 2.0]]).handle)
    assert spec.handle == ((FLOAT, (1, 2)),)
    assert repr(spec) == "resource<float32[1,2]>[]"
    assert repr(spec_of(tf.Variable([1.0], shape=[None]).handle)) == "resource<float32[-1]>[]"
    assert repr(spec_of(tf.Variable(1, shape=tf.TensorShape(None)).handle)) == "resource<int32[?]>[]"
    assert spec_of(tf.Variable([[3.0, 4.0]]).handle) is spec


def test_the_spec_of_a_tensor():
    spec = spec_of(tf.zeros([2, 3], tf.float64))
    assert (spec.dtype, spec.shape, repr(spec)) == (tf.float64, (2, 3), "float64[2,3]")
    assert spec.tensor_shape == tf.TensorShape([2, 3])


# The dtype that a Python value gets.

HALF = tf.constant(1.0, tf.float16)

ENUMS = [
    ("AddV2", 1, (HALF, 2.0), tf.float16),  # from the other input
    ("AddV2", 0, (2, HALF), tf.float16),
    ("AddV2", 1, (2.0, 3.0), tf.float32),  # from the value
    ("AddV2", 1, (2, 3), tf.int32),
    ("AddV2", 1, (2j, 3j), tf.complex128),
    ("AddV2", 1, (np.float64(1.0), np.float64(1.0)), tf.float64),
    ("AddV2", 1, ("a", "b"), tf.string),
    ("LogicalAnd", 0, (True, False), tf.bool),  # from the definition
    ("Bincount", 0, ([1.0], 3, HALF), tf.int32),
    ("Reshape", 1, (HALF, [2, 3]), tf.int32),  # from the definition's default
    ("Reshape", 1, (HALF, [2, 3], "Tshape", tf.int64), tf.int64),  # from an attribute
    ("Reshape", 1, (HALF, []), tf.int32),  # nothing in it that says so
    ("Pack", 0, ([1.0, HALF],), tf.float16),  # from another item
    ("Pack", 0, ([1.0, 2.0],), tf.float32),
]


@pytest.mark.parametrize(("op", "i", "args", "dtype"), ENUMS, ids=lambda v: str(v)[:40])
def test_input_enum(op, i, args, dtype):
    value = args[i][0] if op == "Pack" else args[i]
    assert input_enum(signature_of(op), i, args, value) == dtype.as_datatype_enum


@pytest.mark.parametrize(
    ("op", "i", "args"),
    [("AddV2", 1, (None, None)), ("Assert", 1, (True, [1.0])), ("AddV2", 0, ([tf.Variable(1)], 1)),
     ("AddV2", 0, ([HALF, 1.0], 2.0))],  # TensorFlow packs it, of the dtype that it finds
)
def test_input_enum_does_not_guess(op, i, args):
    assert input_enum(signature_of(op), i, args, args[i]) is None


# Shapes without values.

X = intern_spec(FLOAT, (2, 3))
SIZES = intern_spec(INT, (2,))

ADJOINED = ("adj_x", True, "adj_y", False, "grad_x", False, "grad_y", False)

INFERRED = {
    "specs alone": ("AddV2", "fast", (), (X, intern_spec(FLOAT, (4, 1, 1))), [(FLOAT, (4, 2, 3))]),
    "an attribute": ("BatchMatMulV2", "fast", ADJOINED, (X, X), [(FLOAT, (3, 3))]),
    "a constant": ("Reshape", "fast", (), (X, Const([3, 2])), [(FLOAT, (3, 2))]),
    "a constant with a gap": ("Reshape", "fast", (), (X, Const(np.array([-1], np.int32))), [(FLOAT, (6,))]),
    "a value still to come": ("Reshape", "fast", (), (X, SIZES), [None]),
    "a list": ("ConcatV2", "fast", (), ((X, X), Const(0)), [(FLOAT, (4, 3))]),
    "several outputs": ("TopKV2", "fast", ("sorted", True), (X, Const(2)), [(FLOAT, (2, 2)), (INT, (2, 2))]),
    "a count of outputs": ("Split", "fast", ("num_split", 3), (Const(1), X), [(FLOAT, (2, 1))] * 3),
    "by name": ("Pack", "execute", ("N", 2, "T", FLOAT, "axis", 0), (X, X), [(FLOAT, (2, 2, 3))]),
}


@pytest.mark.parametrize(("op", "entry", "attrs", "parts", "expected"), INFERRED.values(), ids=INFERRED)
def test_infer_outputs(op, entry, attrs, parts, expected):
    found = infer_outputs(op, entry, attrs, parts)
    assert [s if s is None else (s.enum, s.shape) for s in found] == expected


def test_infer_outputs_reads_through_a_variable():
    handle = spec_of(tf.Variable([1.0, 2.0]).handle)
    (spec,) = infer_outputs("ReadVariableOp", "fast", ("dtype", tf.float32), (handle,))
    assert spec is intern_spec(FLOAT, (2,))


@pytest.mark.parametrize("other", [intern_spec(FLOAT, (3, 2)), Const("text"), SIZES], ids=str)
def test_what_cannot_be_built_has_no_shapes(other):
    assert infer_outputs("BatchMatMulV2", "fast", ADJOINED, (X, X)) is not None
    assert infer_outputs("BatchMatMulV2", "fast", ADJOINED, (X, other)) is None


def test_infer_outputs_leaves_no_operation_behind():
    graph = tf.Graph()
    with graph.as_default():
        assert infer_outputs("AddV2", "fast", (), (X, intern_spec(FLOAT, (1, 3)))) is not None
    assert graph.get_operations() == []


def test_attributes_are_what_tensorflow_makes_of_them():
    """Each is made once; 1 and True stay apart, and whoever changes its copy changes nobody else's."""
    plain = [(1, "int"), (True, "bool"), (True, "int"), (0, "int"), (False, "bool"), (tf.float32, "type"),
             (1, "type"), ("SAME", "string"), ("1", "string")]  # fmt: skip
    for _ in range(2):
        for value, kind in plain:
            node = node_def_pb2.NodeDef()
            found = nodedef._attr_value(value, kind, "name")
            assert found == op_def_library.value_to_attr_value(value, kind, "name")
            assert found is nodedef._attr_value(value, kind, "name")
            node.attr["name"].CopyFrom(found)
            node.attr["name"].i = 7
    for value, kind in [(-0.0, "float"), (0.0, "float"), ([1, 2], "list(int)")]:
        assert nodedef._attr_value(value, kind, "name") == op_def_library.value_to_attr_value(value, kind, "name")
    with pytest.raises(TypeError):
        nodedef._attr_value("1", "int", "name")


@pytest.mark.sample(*sorted(SHAPED_BY_SHAPES)[::4])
@pytest.mark.parametrize("op", sorted(SHAPED_BY_SHAPES))
def test_operations_said_to_be_shaped_by_shapes_are(op):
    """TensorFlow's shape function knows the shapes of all results if it knows no value."""
    signature = signature_of(op)
    assert signature is not None
    assert op == "ReadVariableOp" or not signature.stateful
    if op == "ReadVariableOp":
        variable = tf.Variable(tf.ones([2, 3]))
        parts, attrs = (spec_of(variable.handle),), ("dtype", FLOAT)
    else:
        rows = {"BiasAdd": (4,)}.get(op, (2, 4))
        kinds = [tf.bool] * 3 if op.startswith("Logical") else [tf.bool, tf.float32, tf.float32]
        kinds = kinds if op.startswith(("Logical", "Select")) else [tf.float32] * 3
        shapes = {"MatMul": [(2, 4), (4, 5)], "BatchMatMulV2": [(3, 2, 4), (4, 5)], "AddN": [(2, 4)]}
        shapes = shapes.get(op, [(2, 4), rows, (2, 4)])
        count = len(signature.inputs)
        parts = tuple(intern_spec(k.as_datatype_enum, s) for k, s in zip(kinds[:count], shapes[:count], strict=True))
        attrs = ()
        if op == "AddN":
            parts, attrs = ((parts[0], parts[0]),), ("N", 2, "T", FLOAT)
        elif op == "Cast":
            attrs = ("SrcT", FLOAT, "DstT", INT)
    specs = infer_outputs(op, "fast", attrs, parts)
    assert specs
    assert None not in specs


SHAPED = {
    "All": lambda b, n: tf.reduce_all(b, 0),
    "Any": lambda b, n: tf.reduce_any(b, 1),
    "ArgMax": lambda x, n: tf.argmax(x, 1),
    "ArgMin": lambda x, n: tf.argmin(x, 0),
    "BroadcastTo": lambda x, n: tf.broadcast_to(x[:1], [3, 4]),
    "ConcatV2": lambda x, n: tf.concat([x, x], 0),
    "Conv2D": lambda x, n: tf.nn.conv2d(tf.reshape(x, [1, 2, 4, 1]), tf.ones([2, 2, 1, 3]), 1, "VALID"),
    "Conv2DBackpropFilter": lambda x, n: convolved(x)[1],
    "Conv2DBackpropInput": lambda x, n: convolved(x)[0],
    "Einsum": lambda x, n: tf.einsum("ij,kj->ik", x, x),
    "ExpandDims": lambda x, n: tf.expand_dims(x, 1),
    "Fill": lambda x, n: tf.fill([2, 3], x[0, 0]),
    "GatherV2": lambda x, n: tf.gather(x, n, axis=1),
    "Max": lambda x, n: tf.reduce_max(x, 1),
    "Mean": lambda x, n: tf.reduce_mean(x),
    "Min": lambda x, n: tf.reduce_min(x, 0, keepdims=True),
    "Pack": lambda x, n: tf.stack([x, x], 2),
    "Prod": lambda x, n: tf.reduce_prod(x, 0),
    "Reshape": lambda x, n: tf.reshape(x, [4, -1]),
    "ResourceGather": lambda x, n: tf.gather(TABLE, n),
    "SparseSoftmaxCrossEntropyWithLogits": lambda x, n: tf.nn.sparse_softmax_cross_entropy_with_logits(n, x),
    "Split": lambda x, n: tf.split(x, 2, 1)[1],
    "Squeeze": lambda x, n: tf.squeeze(x[:1]),
    "Sum": lambda x, n: tf.reduce_sum(x, [0, 1]),
    "Tile": lambda x, n: tf.tile(x, [1, 2]),
    "Transpose": lambda x, n: tf.transpose(x),
    "Unpack": lambda x, n: tf.unstack(x)[0],
    "UnsortedSegmentMax": lambda x, n: tf.math.unsorted_segment_max(x, n, 4),
    "UnsortedSegmentMin": lambda x, n: tf.math.unsorted_segment_min(x, n, 4),
    "UnsortedSegmentProd": lambda x, n: tf.math.unsorted_segment_prod(x, n, 4),
    "UnsortedSegmentSum": lambda x, n: tf.math.unsorted_segment_sum(x, n, 4),
}
TABLE = tf.Variable(tf.ones([5, 3]))


def convolved(x):
    """Returns the gradients of a convolution."""
    image, kernel = tf.reshape(x, [1, 2, 4, 1]), tf.ones([2, 2, 1, 3])
    with tf.GradientTape() as tape:
        tape.watch([image, kernel])
        result = tf.nn.conv2d(image, kernel, 1, "VALID")
    return tape.gradient(result, [image, kernel])


@pytest.mark.parametrize("op", sorted(SHAPED_BY_CONSTANTS))
def test_operations_said_to_be_shaped_by_constants_are(op, monkeypatch):
    """What is recorded is what TensorFlow's shape function says."""
    agreed = []
    original = merge._has_known_shapes

    def known(call):
        found = original(call)
        if found and call.op == op and call.outputs:
            specs = infer_outputs(call.op, call.entry, call.attrs, call.parts)
            agreed.append([spec.shape for spec in specs] == [output.shape for output in call.outputs])
        return found

    monkeypatch.setattr(merge, "_has_known_shapes", known)
    x, n = tf.constant([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]), tf.constant([1, 2])
    x = x > 2 if op in ("All", "Any") else x
    step = coexec.function(SHAPED[op])
    for _ in range(3):
        np.testing.assert_array_equal(step(x, n), SHAPED[op](x, n))
    assert agreed
    assert all(agreed)
    assert step.stats().followed == 2
