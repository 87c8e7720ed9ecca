"""Python values of every kind, in every role: bit for bit, dtype and Python type, what eager makes of them.

`KINDS` is the table of values; the values of one kind are given in turn, so that each is told from its neighbours.
"""

import struct

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import run_both
from tests.snapshots import message_of
from tracer.literals import Line, literal
from tracer.op import Const, freeze, same
from tracer.show import parse


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def objects(*items):
    """An array of these objects, as they are."""
    array = np.empty(len(items), object)
    array[:] = items
    return array


def nan(bits):
    """A NaN with a sign and a payload."""
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


QUIET, NEGATIVE = nan(0x7FF8_0000_6000_0000), nan(0xFFF8_0000_0000_0000)  # the payload fits into a float32, too
SINGLES = np.array([0x7FC00001, 0xFFC00002, 0x7FC00000], np.uint32).view(np.float32)
MASKED = [np.ma.array([1, n], mask=[False, True]) for n in (2, 3)]

KINDS = {
    "bytes": [b"ab\0\0", b"\0", b"", b"ab"],
    "str": ["ab\0\0", "\0", "", "ab", "\xe4\0"],
    "bytes and str": [b"ab", "ab", b"ab\0", "ab\0"],
    "lists of bytes": [[b"ab\0", b""], [b"ab", b"\0"], [b"ab", b""], ["ab\0", ""]],
    "S arrays": [np.array([b"ab", b"c"]), np.array([b"ab", b"c\0d"]), np.array(b"ab"), np.zeros((0, 3), "S2")],
    "U arrays": [np.array(["ab", "c"]), np.array(["ab", "\xe4"]), np.array("ab"), np.zeros((2, 0), "U2")],
    "NumPy's bytes and str": [np.bytes_(b"ab"), np.bytes_(b"ab\0"), np.str_("ab"), np.str_("ab\0")],
    "object arrays": [objects(b"a\0", b""), objects(b"a", b"\0"), objects("a", b"\0"), objects("a\0", "")],
    "zeros": [0.0, -0.0, 0],
    "lists of zeros": [[0.0, 1.0], [-0.0, 1.0], [-0.0, 0.0]],
    "arrays of zeros": [np.float32([0, 1]), np.float32([-0.0, 1]), np.float32(0), np.float32(-0.0), np.array(-0.0)],
    "complex zeros": [0j, -0j, complex(0.0, -0.0), complex(-0.0, 0.0), np.complex64(-0.0)],
    "ones": [1, 1.0, True, 1 + 0j],
    "lists of ones": [[1, 0], [True, False], [1.0, 0], [True, 0], [1 + 0j, 0]],
    "NumPy's ones": [np.int32(1), 1, np.uint8(1), np.bool_(True), True, np.float64(1), 1.0, np.float32(1)],
    "lists of NumPy's": [[np.float64(1)], [1.0], [np.float16(1)], [np.int64(1)], [np.array(1.0)], [np.uint64(1)]],
    "NaNs": [QUIET, NEGATIVE, float("nan")],
    "lists of NaNs": [[QUIET], [NEGATIVE], [float("nan")]],
    "arrays of NaNs": [*SINGLES, SINGLES[:1], SINGLES[1:2], SINGLES[2:]],
    "large integers": [2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63), 2**63, [2**31], [2**31 - 1]],
    "uint64": [np.uint64(2**64 - 1), np.uint64(2**63), np.uint64([2**64 - 1]), np.uint64([1])],
    "arrays without axes": [np.array(1.5), np.array([1.5]), np.float64(1.5), 1.5, np.array(1.5, np.float32)],
    "orders": [np.arange(6.0).reshape(2, 3).T, np.arange(6.0)[::2], np.arange(6.0)[::-1],
               np.asfortranarray(np.arange(6.0).reshape(3, 2)), np.broadcast_to(np.float32(1), (2, 2))],
    "byte orders": [np.array([1, 2], ">i4"), np.array([1, 2], "<i4"), np.array([1.0], ">f8"), np.array(1, ">i8")],
    "empty": [np.zeros((0, 3), np.float32), np.zeros((3, 0), np.float32), np.zeros(0, np.int32), [], [[]],
              np.zeros((0, 3), "S2")],
    "masked arrays": MASKED,
    "structures": [np.void(b"abcd"), np.zeros(1, "V4"), np.zeros(1, [("x", "i4")])],
    "quantised": [np.array([(3,)], d.as_numpy_dtype) for d in (tf.qint8, tf.quint8, tf.qint16, tf.qint32)],
    "refused": [np.datetime64("2020-01-01"), np.longdouble(1.5), 2**64, [1, "a"], [[1], [2, 3]]],
    **{
        np.dtype(dtype).name: [dtype(1), np.array([1, 0], dtype), dtype(0), np.array(1, dtype)]
        for dtype in (
            np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16,
            np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
            ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz,
            ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float4_e2m1fn, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2,
            ml_dtypes.uint2,
        )
    },
}  # fmt: skip

X = tf.constant([1.0, 2.0])


class Layer(keras.layers.Layer):
    """Makes tensors of an argument, or of an attribute."""

    def __init__(self):
        super().__init__(autocast=False)
        self.value = 0.5

    def call(self, x, value=None):
        return x + 1.0, tf.identity(tf.constant(self.value if value is None else value))


@coexec.pure
def pure(x, value):
    return x + 1.0, tf.identity(tf.constant(value))


@coexec.pure
def unpacked(x, value):
    return x + 1.0, tf.identity(tf.constant(value["key"][0]))


GLOBAL = None


@coexec.pure
def reading(x):
    return x + 1.0, tf.identity(tf.constant(GLOBAL))


def with_global(value):
    global GLOBAL
    GLOBAL = value
    return reading(X)


class Holder:
    value = None


def with_attribute(layer):
    def step(value):
        layer.value = value
        return layer(X)

    return step


def with_object():
    holder = Holder()

    @coexec.pure
    def read(x):
        return x + 1.0, tf.identity(tf.constant(holder.value)), tf.constant(holder.nested[0]["key"])

    def step(value):
        holder.value, holder.nested = value, ({"key": value},)
        return read(X)

    return step


def with_dict(layer):
    """A value as a key, where it can be one."""
    holder = Holder()

    @coexec.pure
    def keys(x):
        return x + 1.0, [tf.constant(key) for key in holder.value]

    def step(value):
        holder.value = {value: 1}
        return keys(X)

    return step


# What a step does with a value; each makes the step, with state of its own.
ROLES = {
    "read": lambda: lambda v: tf.constant(v).numpy(),
    "constant": lambda: lambda v: tf.constant(v),
    "argument of an operation": lambda: lambda v: (tf.identity(tf.constant(v)), tf.raw_ops.ExpandDims(input=v, axis=0)),
    "filled in": lambda: lambda v: tf.fill([2], v),
    "in a list": lambda: lambda v: (tf.stack([v, v]), tf.concat([v, v], 0), [tf.convert_to_tensor(i) for i in (v,)]),
    "beside a tensor": lambda: lambda v: (tf.stack([tf.constant(v), v]), tf.equal(tf.constant(v), v)),
    "Keras' conversion": lambda: lambda v: keras.ops.convert_to_tensor(v),
    "variable": lambda: lambda v: tf.Variable(v),
    "attribute of a layer": lambda: with_attribute(Layer()),
    "argument of a layer": lambda: lambda v, layer=Layer(): layer(X, value=v),  # noqa: B008
    "argument of a helper": lambda: lambda v: pure(X, v),
    "item of a helper's argument": lambda: lambda v: unpacked(X, {"key": (v,)}),
    "global": lambda: with_global,
    "attribute of an object": with_object,
    "key of a dict": lambda: with_dict(None),
}


def bits(value):
    """A value as plain data, equal for values of one type that are the same to the last bit."""
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return value.__class__.__name__, value.dtype.name, tuple(value.shape), bits(value.numpy())
    if isinstance(value, np.ndarray) and value.dtype == object:
        return "array", value.shape, [bits(item) for item in value.ravel().tolist()]
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return type(value), value.dtype, value.tobytes()
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    if type(value) in (float, complex):
        return type(value), struct.pack("dd", value.real, value.imag)
    return type(value), value


def outcomes(step, values):
    """What each call gives, or raises."""
    found = []
    for value in values:
        try:
            found.append(bits(step(value)))
        except Exception as error:
            found.append((type(error).__name__, message_of(error).partition("[")[0]))
    return found


def compare(make, values, follows, **options):
    """Runs a step on these values eagerly and co-executed; the outcomes are to be the same."""
    expected = outcomes(make(), values)
    function = coexec.function(make(), **options)
    found = outcomes(function, values)
    for number, (value, one, other) in enumerate(zip(values, expected, found, strict=True)):
        assert one == other, f"call {number}, of {value!r}\n{function.explain()}"
    raised = sum(isinstance(one[0], str) and one[0].endswith("Error") for one in expected)
    assert function.stats().followed >= follows or raised >= len(values) // 2, function.explain()
    return function


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ROLES)
def test_values_in_turn(role, kind):
    """Each value is a constant for two calls, then another one is; then they change in every call."""
    values = [value for value in KINDS[kind] for _ in range(2)] + 2 * KINDS[kind]
    compare(ROLES[role], values, follows=len(values) // 3)


SCALARS = [kind for kind in ("bytes", "str", "zeros", "ones", "NaNs", "complex zeros") if kind in KINDS]


@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.parametrize("role", ["attribute of a layer", "argument of a layer", "argument of a helper", "global"])
def test_keys_of_memoized_calls(role, kind):
    """A value stays until calls are memoized, and gives way to another that must not be taken for it."""
    values = [value for value in KINDS[kind] for _ in range(5)] + 2 * KINDS[kind]
    function = compare(ROLES[role], values, follows=len(values) // 2)
    # A layer whose `call` has its effects watched is memoized unless it makes strings, which are not compiled.
    assert function.stats().regions > 0 or kind in ("bytes", "str"), function.explain()


ATTRIBUTES = {
    "zeros": [0.0, -0.0, 0.0, -0.0],
    "NaNs": [float("nan"), 0.5, float("nan"), 0.5],
    "NumPy's": [np.float64(-0.0), np.float64(0.0), 0.5, np.float64(0.5)],
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_attributes_of_operations(kind):
    """0.0 and -0.0 are two attributes; one NaN is as good as another, so that it is followed."""

    def make():
        return lambda alpha: tf.raw_ops.LeakyRelu(features=X - 2.0, alpha=alpha)

    values = [value for value in ATTRIBUTES[kind] for _ in range(3)]
    compare(make, values, follows=len(values) - 4, jit_compile=False)


def test_arrays_as_attributes():
    """Arrays where lists are expected are compared as a whole, and an array behind a number is no error of ours."""
    values = 2 * [0, [0, 2], np.array([0, 2]), (2, 0), np.array([2, 0]), np.array([2, 0, 1])]

    def make():
        return lambda axis: tf.squeeze(X[None, :, None] * 1.0, axis=axis)

    compare(make, values, follows=3)


@pytest.mark.parametrize("role", ["constant", "argument of an operation", "in a list", "variable"])
def test_arrays_that_change_in_place(role):
    """What a constant was is not what an array holds now, also where the array is in a list."""

    def make():
        operation, array = ROLES[role](), np.zeros(2, np.float32)
        text = objects(b"a\0", "b")

        def step(number):
            array[number % 2] += number // 3
            text[number % 2] = b"\0" * (number // 3)
            return operation(array), operation(array[1:]), tf.stack([array, array * 2.0]), tf.constant(text)

        return step

    compare(make, list(range(12)), follows=6)


def test_results_are_the_programs_own():
    """A program may write to what it reads, and the constant is what it was in the next call."""

    def make():
        def step(n):
            single, text = tf.constant([1.0, 2.0]).numpy(), tf.constant([b"a\0", b""]).numpy()
            before = single.copy(), text.copy()
            single[0], text[0] = n, b"changed"
            return before

        return step

    compare(make, list(range(6)), follows=4)


@pytest.mark.parametrize("value", [np.float32([0.0]), np.array(1.5), np.int64(3), np.array([1, 0], np.int8)], ids=repr)
def test_arrays_beside_tensors_of_another_dtype(value):
    """TensorFlow makes an array what the tensor beside it is, and so does what runs one by one."""
    whole = tf.constant([1, 2])
    compare(lambda: lambda v: (whole + v, whole < v, v * whole), [value] * 6, follows=4)


@pytest.mark.parametrize("jit_compile", [True, False])
def test_numbers_that_count_from_negative_zero(jit_compile):
    """XLA makes an iota of a constant that counts, whose first number is 0.0."""
    rows = [[-0.0, 1.0], [0.0, 1.0], [-0.0, 1.0, 2.0], [0.0, -0.0]]

    def make():
        return lambda row: (tf.identity(tf.constant(row)), tf.identity(tf.constant(row, tf.bfloat16)))

    function = compare(make, [row for row in rows for _ in range(4)], follows=12, jit_compile=jit_compile)
    assert function.stats().launches > 0


def test_a_place_whose_dtype_becomes_one_that_is_not_compiled():
    """XLA ends the process where it is given strings: what was compiled with numbers runs on its own with them."""
    values = [np.zeros((0, 3), np.float32), np.zeros(2, np.float32), b"a\0", np.zeros((0, 3), "S2"), 1.0, "a"]
    for make in (ROLES["variable"], ROLES["argument of an operation"]):
        for jit_compile in (True, False):
            compare(make, [value for value in 2 * values for _ in range(3)], follows=18, jit_compile=jit_compile)


# The same bytes, in programs.


def test_lengths_of_bytes():
    compare(lambda: tf.strings.length, [b"ab\0\0", b"\0", b"", b"ab"] * 4, follows=12)


def test_serialized_tensors():
    serialized = [tf.io.serialize_tensor(tf.zeros([n])).numpy() for n in (3, 1, 3, 2)]
    assert all(text.endswith(b"\0") for text in serialized)

    def make():
        return lambda text: tf.io.parse_tensor(tf.constant(text), tf.float32)

    compare(make, serialized * 3, follows=8)


def test_records_that_end_in_zeros():
    def record(*values):
        feature = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString()

    spec = {"x": tf.io.FixedLenFeature([2], tf.float32)}

    def make():
        return lambda text: tf.io.parse_single_example(text, spec)["x"] * 2.0

    compare(make, [record(1.0, 0.0), record(0.0, 0.0), record(2.0, 1.0)] * 4, follows=8)


def test_checkpoints_inside_of_a_step(tmp_path):
    """What a checkpoint says of itself ends in NUL, too."""
    paths = iter(range(100))

    def make():
        v = tf.Variable([1.0, 0.0])
        saved = tf.train.Checkpoint(v=v)

        def step(n):
            v.assign_add([1.0, 0.0])
            path = saved.write(str(tmp_path / f"{next(paths)}"))
            v.assign([-1.0, -1.0])
            saved.read(path).assert_consumed()
            return v.read_value() * n

        return step

    compare(make, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], follows=4)


# Text.


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_values(kind):
    """What text can hold reads back as the same value, NaNs with their payload and strings with their NULs."""
    for value in KINDS[kind]:
        text = literal(value)
        if "opaque(" not in text:
            line = Line(1, text)
            assert same(line.value(), value), text
            line.end()
        else:  # dtypes with fields, and classes derived from arrays
            assert kind in ("structures", "quantised", "masked arrays"), text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("structures", "refused")])
def test_text_of_graphs(kind):
    """A graph with such constants prints as what it is read back from."""
    function = coexec.function(ROLES["argument of an operation"]())
    outcomes(function, [value for value in KINDS[kind] for _ in range(3)])
    text = str(function.trace_graph)
    assert str(parse(text)) == text


# What all of this rests on.


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_told_apart(kind):
    """Two values are the same exactly where TensorFlow makes the same tensor of them, and Python the same type."""
    for n, one in enumerate(KINDS[kind]):
        for m, other in enumerate(KINDS[kind]):
            expected = n == m or (type(one) is type(other) and bits(one) == bits(other))
            if kind != "masked arrays":  # of which TensorFlow takes what is behind the mask
                assert same(one, other) == expected, (one, other)
    assert not same(*MASKED)


def test_copies():
    """A constant keeps nothing that the program may write to."""
    array, items = np.zeros(2), [np.zeros(2), (np.zeros(1),)]
    const, nested = Const(array), Const(items)
    array[0] = items[0][0] = items[1][0][0] = 1.0
    assert not const.holds(array)
    assert not nested.holds(items)
    assert freeze(const.value) == freeze(np.zeros(2))
    assert freeze(nested.value) == freeze([np.zeros(2), (np.zeros(1),)])


LARGE = {
    "floats": lambda n: np.arange(40_000, dtype=np.float32) + n,
    "by columns": lambda n: np.asfortranarray(np.arange(40_000, dtype=np.float32).reshape(200, 200) + n),
    "every other": lambda n: (np.arange(80_000, dtype=np.float64) + n)[::2],
    "read-only": lambda n: np.broadcast_to(np.float32(n), (200, 200)),
    "bools": lambda n: np.arange(80_000) % 3 == n % 3,
    "complex": lambda n: np.arange(20_000) * (1.0 + 2.0j * n),
    "halves": lambda n: (np.arange(40_000) % 100 + n).astype(np.float16),
    "of another byte order": lambda n: (np.arange(40_000) + n).astype(">f4"),
    "of a class of its own": lambda n: np.ma.masked_array(np.arange(40_000.0) + n),
}


# Not `tf.raw_ops.Identity`: eagerly its result may share the memory of the array.
USES = {
    "identity": tf.identity,
    "roll": lambda x: tf.raw_ops.Roll(input=x, shift=[1], axis=[0]),
    "gather": lambda x: tf.gather(x, [5, 1, 7]),
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("use", USES)
def test_large_arrays(kind, use):
    """They are copied once, and are what they were when they were given, however they are changed."""

    def make(decorate):
        held = [LARGE[kind](n) for n in range(3)]

        @decorate
        def step(n):
            given = held[n % 3]
            found = [USES[use](given), tf.shape(given)]
            if given.flags.writeable:
                given[..., :9] = given[..., 9:18]
            return found

        return step

    assert run_both(make, [(n,) for n in range(9)], jit_compile=False).stats().followed >= 6


NUMPYS = [np.float64(0.3), np.sqrt(2.0), np.int64(3), np.float16(0.5), np.float32(0.3)]


@pytest.mark.parametrize("number", NUMPYS, ids=repr)
def test_a_number_of_numpy_is_one_path(number):
    """What C++ converts to the dtype of the other operand is the same constant each time: one launch, no cut."""

    def make(decorate):
        v = tf.Variable([1.0, 2.0])

        @decorate
        def step(x):
            before = tf.tanh(x)
            return before * number - v * number, before**number, tf.identity(before)

        return step

    with testing.always_follow(), testing.compile_everything():
        step = run_both(make, [(tf.constant([float(n), 2.0]),) for n in range(8)])
    assert (step.stats().recorded, step.stats().followed, step.stats().diverged) == (1, 7, 0)
    assert 1 <= step.stats().launches <= 8
    assert "ever other ways" not in str(step.explain())
