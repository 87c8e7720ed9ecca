"""Every way in which Python takes a value out of a tensor in the middle of a step, or looks at the tensor.

Most steps go on computing after the read, so that a read cuts a step in two.
"""

import copy
import decimal
import io
import json
import math
import os
import pathlib
import pickle
import statistics
import tempfile

import numpy as np
import tensorflow as tf

from tests.programs import Instance, args, each, integers, program, signed, vector, whole


def whole_vector(number):
    return integers(number, dtype="float32")


@program()
def numpy_method(function):
    "`.numpy()` of a scalar, of a matrix and of a whole-number tensor."
    seen = []

    @function
    def step(x):
        y = x * 2.0
        seen.append(y.numpy())
        z = tf.reduce_sum(y)
        seen.append(z.numpy())
        seen.append(tf.cast(y, tf.int64).numpy().sum())
        return z + seen[-1].item()

    return Instance(step, each(lambda i: args(integers(i, 2, 3, dtype="float32"))), lambda: seen)


@program()
def builtin_numbers(function):
    "`float`, `int`, `bool`, `complex`, `math.sqrt` and `abs` of a tensor."

    @function
    def step(x):
        y = x * x + 1.0
        numbers = (float(y), int(y), bool(y), complex(y), math.sqrt(y), math.floor(float(y) / 2))
        return numbers, y * numbers[0], abs(-y), -y, +numbers[1]

    return Instance(step, each(lambda i: args(whole(i))))


@program()
def an_index(function):
    "A whole-number tensor is an index of a list, a bound of a slice and a count of repetitions."

    @function
    def step(x):
        best = tf.argmax(x)
        names = ["north", "east", "south", "west"]
        return (
            names[best],
            names[:best],
            [0] * int(best),
            "ab"[best % 2],
            list(range(best)),
            x[best],
            hex(best),
        )

    return Instance(
        step, each(lambda i: args(tf.constant(np.roll([1.0, 5.0, 2.0, 3.0], i % 2).astype("float32"))))
    )


@program()
def formatted(function):
    "A tensor in an f-string, in `%`, in `format` and in `str.join`."

    @function
    def step(x):
        y = x * 2.0
        total = tf.reduce_sum(y)
        texts = [f"{total:.2f}", f"{total}", f"{y}", f"{y!r}", "%s|%d|%.1f" % (total, total, total)]
        texts += ["{:>10.1f}".format(total), "{0} {0!s}".format(y[0]), ", ".join(str(value) for value in y)]
        return texts, y + 1.0

    return Instance(step, each(lambda i: args(whole_vector(i))))


@program()
def printed(function):
    "`print` of tensors, between operations."

    @function
    def step(x):
        y = x + 1.0
        print("y", y, sep="=")
        z = y * 2.0
        print(z.shape, z.dtype, z[0], [z], {"z": z})
        return z

    return Instance(step, each(lambda i: args(whole_vector(i))))


@program()
def looked_at_without_reading(function):
    "Shape, rank, dtype, device and kind are known without the value."

    @function
    def step(x):
        y = tf.matmul(x, x, transpose_b=True)
        static = (y.shape, y.get_shape(), y.shape.rank, y.ndim, y.dtype, y.device, len(y), y.shape.as_list())
        kinds = (
            isinstance(y, tf.Tensor),
            isinstance(y, tf.Variable),
            tf.is_tensor(y),
            tf.is_symbolic_tensor(y),
            isinstance(y, tf.__internal__.EagerTensor),
            y.__class__.__name__,
            hasattr(y, "numpy"),
            callable(y),
            tf.rank(y),
            tf.executing_eagerly(),
        )
        y.set_shape([2, 2])
        return static, kinds, y.ref() == y.ref(), y.ref().deref() is y, tf.TensorSpec.from_tensor(y)

    return Instance(step, each(lambda i: args(vector(i, 2, 3))))


@program()
def truth_of_more_than_one(function):
    "`bool` of a vector, `hash` of a tensor, `int` of a string and `len` of a scalar fail as they do eagerly."

    @function
    def step(x):
        y = x * 2.0
        errors = []
        for attempt in (
            lambda: bool(y),
            lambda: hash(y),
            lambda: float(y),
            lambda: len(y[0]),
            lambda: int(tf.strings.as_string(y)),
            lambda: iter(y[0]),
            lambda: {y: 1},
            lambda: y.no_such_attribute,
            lambda: [1, 2, 3][y[0]],
            lambda: range(y),
        ):
            try:
                errors.append(attempt())
            except Exception as error:
                errors.append((type(error).__name__, str(error)))
        return errors, y

    return Instance(step, each(lambda i: args(whole_vector(i))))


@program()
def numpy_functions(function):
    "NumPy's functions, ufuncs and constructors take tensors."

    @function
    def step(x):
        y = x * 2.0
        arrays = (
            np.asarray(y),
            np.array(y, dtype=np.float64),
            np.array([y[0], y[1]]),
            np.sum(y),
            np.mean(y),
            np.maximum(y, 0),
            np.add(y, 1),
            np.concatenate([y, y]),
            np.stack([y, x]),
            np.dot(np.ones(4, np.float32), y),
            np.shape(y),
            np.isfinite(y).all(),
            np.float32(y[0]),
            np.allclose(y, 2 * x.numpy()),
            np.ones(4, np.float32) + y,
            y + np.ones(4, np.float32),
            np.argsort(y, kind="stable"),
            np.where(y.numpy() > 0),
        )
        return arrays, tf.constant(arrays[0]) + y

    return Instance(step, each(lambda i: args(whole_vector(i))))


@program()
def operators(function):
    "All of Python's operators, from the left and from the right, with numbers, arrays and tensors."

    @function
    def step(x, n):
        half = x / 2.0
        numbers = [
            half + 1,
            1 + half,
            half - 2,
            2 - half,
            half * 3,
            3 * half,
            half / 4,
            4 / (half + 8),
            half**2,
            2**half,
        ]
        numbers += [
            half // 2.0,
            7.25 // (half + 8),
            half % 2.0,
            7.25 % (half + 8),
            -half,
            abs(half),
            np.float32(2) * half,
        ]
        matrix = tf.stack([half, x])
        numbers += [matrix @ tf.transpose(matrix), matrix.numpy() @ tf.transpose(matrix)]
        compared = [
            half < 1,
            half <= 1,
            half > 1,
            half >= 1,
            half == x,
            half != x,
            1 < half,
            (x == x) & (x > 0),
        ]
        compared += [(x > 0) | (x < -1), (x > 0) ^ (x > 1), ~(x > 0)]
        whole = [n & 3, n | 4, n ^ 1, ~n, n // 2, n % 3, -n // 2, 7 % (n + 9), n**2]
        return numbers, compared, whole

    return Instance(step, each(lambda i: args(whole_vector(i), integers(i + 50))))


@program()
def in_place_operators(function):
    "`+=` and its kin make new tensors and leave the old ones alone."

    @function
    def step(x):
        y = x
        old = y
        y += 1.0
        y *= 2.0
        y -= x
        y /= 4.0
        y **= 2
        return y, old, old is x

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def indexing(function):
    "Slices, steps, negative indices, ellipses, new axes, tensors and arrays of indices."

    @function
    def step(x, n):
        y = x * 1.0
        parts = [
            y[0],
            y[-1],
            y[0, 1],
            y[:, 1],
            y[1:],
            y[::2],
            y[::-1],
            y[..., 0],
            y[:, tf.newaxis],
            y[None, ..., -1],
        ]
        parts += [y[n], y[: n + 1], y[n, n], y[y > 0], y[1:2, 0:1]]
        for mistake in (lambda: y[7], lambda: y[0.5], lambda: y["a"]):
            try:
                parts.append(mistake())
            except Exception as error:
                parts.append(type(error).__name__)
        return parts

    return Instance(step, each(lambda i: args(integers(i % 2, 3, 3, dtype="float32"), tf.constant(i % 2))))


@program()
def iteration(function):
    "Unpacking, `iter`, `reversed`, `list`, `zip(*t)` and starred arguments walk the first axis."

    @function
    def step(x):
        y = x * 2.0
        first, *rest = y
        (a, b), c, d = y[:3, :2][0], y[1], y[2]
        iterator = iter(y)
        next(iterator)
        second = next(iterator)
        return (
            first,
            rest,
            a + b,
            c,
            d,
            second,
            list(reversed(list(y))),
            list(zip(*y)),
            tf.add(*y[:2]),
            len(list(y)),
        )

    return Instance(step, each(lambda i: args(vector(i, 3, 2))))


@program()
def compared_with_equals(function):
    "`==`, `in`, `list.index` and `list.count` compare tensors by value."

    @function
    def step(x, n):
        candidates = [n * 0, n * 0 + 1, n]
        return (
            n in candidates[:2],
            candidates.index(n),
            candidates.count(n),
            n == 1,
            n != 1,
            (x == x[0]),
            n == None,
        )  # noqa: E711

    return Instance(step, each(lambda i: args(whole_vector(i), tf.constant(i % 2))))


@program()
def sorted_by_value(function):
    "`sorted`, `max`, `min`, `sum` and `any` ask tensors how they compare."

    @function
    def step(x):
        values = list(x * 2.0)
        return (
            sorted(values),
            max(values),
            min(values, key=abs),
            sum(values),
            any(value > 3 for value in values),
        )

    return Instance(
        step, each(lambda i: args(tf.constant(np.roll([1.0, 5.0, -2.0, 3.0], i % 2).astype("float32"))))
    )


@program()
def pickled_and_copied(function):
    "`pickle`, `copy`, `deepcopy` and `np.save` of a tensor and of a list of tensors."

    @function
    def step(x):
        y = x * 2.0
        buffer = io.BytesIO()
        np.save(buffer, y)
        shallow, deep = copy.copy(y), copy.deepcopy({"y": y, "list": [y]})
        loaded = pickle.loads(pickle.dumps([y, x]))
        return shallow, deep, loaded, shallow + deep["y"], np.load(io.BytesIO(buffer.getvalue()))

    return Instance(step, each(lambda i: args(whole_vector(i))))


@program()
def dlpack_and_buffers(function):
    "dlpack, `memoryview`, `bytes` and tensor protos take the value out of Python's sight."

    @function
    def step(x):
        y = x * 2.0
        exported = tf.experimental.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(y))
        proto = tf.make_ndarray(tf.make_tensor_proto(y))
        view = memoryview(y)
        text = tf.io.serialize_tensor(y)
        return (
            exported + 1.0,
            proto,
            view.shape,
            view.tolist(),
            tf.io.parse_tensor(text, tf.float32),
            bytes(view),
        )

    return Instance(step, each(lambda i: args(whole_vector(i))))


@program()
def other_libraries(function):
    "`json`, `statistics`, `decimal` and `random.choices`-like code see real numbers."

    @function
    def step(x):
        y = x * 2.0
        values = y.numpy().tolist()
        text = json.dumps({"values": values, "sum": float(tf.reduce_sum(y))})
        return (
            text,
            statistics.median(values),
            decimal.Decimal(int(y[0])),
            statistics.fmean(y.numpy()),
            np.median(y),
        )

    return Instance(step, each(lambda i: args(whole_vector(i))))


@program()
def static_values(function):
    "`tf.get_static_value` and `tf.experimental.numpy` know an eager tensor's value."

    @function
    def step(x):
        y = x * 2.0
        return (
            tf.get_static_value(y),
            tf.get_static_value(tf.shape(y)),
            tf.experimental.numpy.sum(y),
            tf.size(y).numpy(),
        )

    return Instance(step, each(lambda i: args(whole_vector(i))))


@program()
def debugging_assertions(function):
    "`tf.debugging` looks at values, shapes, ranks, types and numbers, and passes."

    @function
    def step(x):
        y = tf.exp(x)
        tf.debugging.assert_positive(y)
        tf.debugging.assert_equal(tf.shape(y), [4])
        tf.debugging.assert_all_finite(y, "finite")
        tf.debugging.assert_shapes([(y, ("n",)), (x, ("n",))])
        tf.debugging.assert_rank(y, 1)
        tf.debugging.assert_type(y, tf.float32)
        tf.debugging.assert_near(y, y)
        tf.debugging.assert_less(x, y)
        tf.Assert(tf.reduce_all(y > 0), [y])
        assert y[0] > 0, "a plain assertion"
        return tf.debugging.check_numerics(y, "numbers") * 2.0

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def strings(function):
    "String tensors are read, compared and decoded."

    @function
    def step(x, name):
        text = tf.strings.join([name, "-", tf.strings.as_string(x[0])])
        decoded = text.numpy().decode()
        same = bool(text == "even-1")
        parts = tf.strings.split(text, "-")
        return (
            text,
            decoded,
            same,
            [part.numpy() for part in parts],
            tf.strings.length(text) + len(decoded),
            str(text),
        )

    return Instance(step, each(lambda i: args(tf.constant([1, i]), tf.constant(["even", "odd"][i % 2]))))


@program()
def tf_print(function):
    "`tf.print` writes between operations, in order."
    path = os.path.join(tempfile.mkdtemp(), "printed")

    @function
    def step(x):
        y = x * 2.0
        tf.print("first", y, output_stream=f"file://{path}")
        v = y + 1.0
        tf.print("second", v[0], {"v": v}, output_stream=f"file://{path}", summarize=2)
        return v, tf.strings.format("{} and {}", (y, v))

    def state():
        return pathlib.Path(path).read_text() if os.path.exists(path) else ""

    return Instance(step, each(lambda i: args(whole_vector(i))), state)


@program()
def read_at_every_point(function):
    "After each operation its result is read, and decides a sign."
    log = []

    @function
    def step(x):
        for change in (tf.abs, tf.square, tf.negative, tf.cumsum):
            x = change(x)
            log.append(x.numpy().tolist())
            if x[0] > 3:
                x = -x
        return x

    return Instance(step, each(lambda i: args(whole_vector(i % 2))), lambda: log)


@program()
def number_from_a_read(function):
    "A number that was read comes back as a constant of later operations, another on each call."

    @function
    def step(x):
        scale = float(tf.reduce_max(tf.abs(x)))
        y = x / scale
        index = int(tf.argmax(y))
        return (
            y + index,
            tf.fill([2], scale),
            tf.constant([scale, index]),
            tf.reduce_sum(y) * np.float32(scale),
        )

    return Instance(step, each(lambda i: args(signed(i) + 1.0)))


@program()
def same_value_read_twice(function):
    "Two reads of one tensor, with an assignment between, give the same number."

    @function
    def step(x, v):
        y = v * x
        first = y.numpy()
        v.assign_add(x)
        return first, y.numpy(), y, v.numpy()

    variable = tf.Variable([1.0, 2.0, 3.0, 4.0])
    return Instance(step, each(lambda i: args(whole_vector(i), variable)), lambda: variable)


@program()
def array_changed_after_the_read(function):
    "An array copied out of a tensor is the caller's to change; the tensor keeps its value."

    @function
    def step(x):
        y = x * 2.0
        mine = np.array(y)
        mine[0] = 100.0
        mine += 1.0
        other = tf.constant(mine)
        mine[:] = 0.0
        return y, other, mine

    return Instance(step, each(lambda i: args(whole_vector(i))))
