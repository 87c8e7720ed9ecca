"""Variables as operands, products of matrices, numbers on the right: eager's results, and TensorFlow's Python rests."""

import operator
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

import coexec
from coexec import testing
from tests.coexec import run_both
from tracer.variables import is_variable

X = tf.constant([[1.0, -2.0], [3.0, 0.5]])
STACK = tf.reshape(tf.range(12.0), (3, 2, 2))
V = tf.Variable([[2.0, 0.0], [-1.0, 4.0]])
ROW = tf.Variable([10.0, -20.0])
WHOLE = tf.Variable([[1, 2], [3, 4]])
DOUBLE = tf.Variable([[1.0, 2.0], [3.0, 4.0]], dtype=tf.float64)
NUMBERS = tf.constant([1, 0, 1])
FIXED = tf.Variable([[0.5, 1.5], [2.5, 3.5]], trainable=False)

KERNEL = tf.Variable(tf.reshape(tf.range(4.0), (2, 2, 1, 1)))
ARRAY = np.array([[0.5, 2.0], [-1.0, 4.0]], np.float32)

ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv]
COMPARED = [operator.lt, operator.le, operator.gt, operator.ge]

# Each is answered.
ANSWERED = {
    **{f"{op.__name__} of a variable": (lambda x, op=op: op(x, V)) for op in ARITHMETIC},
    **{f"{op.__name__} to a variable": (lambda x, op=op: op(V, x)) for op in ARITHMETIC},
    **{f"{op.__name__} of a number": (lambda x, op=op: op(x, 3.0)) for op in ARITHMETIC + COMPARED},
    **{f"{op.__name__} to a number": (lambda x, op=op: op(3.0, x)) for op in ARITHMETIC},
    **{f"{op.__name__} of a number to a variable": (lambda x, op=op: op(V, 2.0)) for op in ARITHMETIC + COMPARED},
    **{f"{op.__name__} of two variables": (lambda x, op=op: op(V, ROW)) for op in ARITHMETIC + COMPARED},
    "a whole number": lambda x: x * 2,
    "a power": lambda x: x**2,
    "a power of a variable": lambda x: V**2.0 + x,
    "a power of wholes": lambda x: WHOLE**2 - tf.cast(x, tf.int32),
    "a power that is a tensor": lambda x: (x * x) ** x,
    "wholes": lambda x: WHOLE * 3 - 1,
    "fixed": lambda x: x + FIXED,
    "a product": lambda x: x @ V,
    "a product the other way round": lambda x: V @ x,
    "a product of tensors": lambda x: x @ (x + 1.0),
    "a product of variables": lambda x: V @ FIXED,
    "products": lambda x: (x + STACK) @ V,
    "products the other way round": lambda x: V @ (x + STACK),
    "matmul": lambda x: tf.matmul(x, V),
    "matmul of tensors": lambda x: tf.linalg.matmul(x, x, transpose_a=True),
    "matmul, turned": lambda x: tf.matmul(a=x, b=V, transpose_b=True),
    "matmul of stacks, turned": lambda x: tf.matmul(x + STACK, STACK + x, transpose_b=True),
    "bias": lambda x: tf.nn.bias_add(x, ROW),
    "a tensor as bias": lambda x: tf.nn.bias_add(x, x[0]),
    "where": lambda x: tf.where(x > 0.0, x, 0.0),
    "where, the other way round": lambda x: tf.where(x > 0.0, 1.0, x),
    "where of tensors": lambda x: tf.where(condition=x > 0.0, x=x, y=-x),
    "gathered": lambda x: tf.gather(x, NUMBERS),
    "gathered columns": lambda x: tf.gather(params=x, indices=NUMBERS, axis=1),
    "gathered columns from behind": lambda x: tf.gather(x, NUMBERS, axis=-1),
    "gathered in batches": lambda x: tf.gather(x, tf.stack([NUMBERS[:2], NUMBERS[1:]]), batch_dims=1),
    "gathered behind batches": lambda x: tf.gather(x + STACK, NUMBERS[:2], axis=0, batch_dims=0),
    "gathered of a variable": lambda x: tf.gather(V, NUMBERS) * 1.0 + x[0],
    "embedded": lambda x: tf.nn.embedding_lookup(V, NUMBERS) * 1.0 + x[0],
    "embedded in a tensor": lambda x: tf.nn.embedding_lookup(x, NUMBERS, name="named"),
    "a value": lambda x: V.value() + x,
    "a row": lambda x: V[0] + x,
    "a window": lambda x: V[:, 1:] + x,
    "another axis": lambda x: V[None] + x,
    "a number in it": lambda x: V[0, -1] * x,
    "reshaped": lambda x: tf.reshape(V, [-1]) * x[0, 0],
    "transposed": lambda x: tf.transpose(V) + x,
    "tiled": lambda x: tf.tile(V, [2, 1]) * x[0, 0],
    "concatenated": lambda x: tf.concat([x, V], axis=0),
    "added up": lambda x: tf.add_n([V, x, FIXED]),
    "cast": lambda x: tf.cast(WHOLE, tf.float32) + x,
    "summed": lambda x: tf.reduce_sum(V) + x,
    "summed by name": lambda x: tf.reduce_sum(input_tensor=V, axis=1) + x,
    "absolute": lambda x: tf.abs(V) + x,
    "the largest": lambda x: tf.cast(tf.argmax(V, 1), tf.float32) + x,
    "a choice": lambda x: tf.where(x > 0.0, V, FIXED),
    "normalised": lambda x: tf.nn.softmax(V) + x,
    "a norm": lambda x: tf.nn.l2_loss(V) + x,
    "cumulative": lambda x: tf.cumsum(V, 1, reverse=True) + x,
    "a copy": lambda x: tf.identity(V) + x,
    "no gradient": lambda x: tf.stop_gradient(V) + x,
    "one more axis": lambda x: tf.expand_dims(V, 0) + x,
    "divided": lambda x: tf.divide(V, 2.0) + x,
    "equal": lambda x: tf.where(tf.equal(V, 0.0), x, V),
    "equal tensors": lambda x: tf.where(x == X, x, V.value()),
    "unequal to a number": lambda x: tf.where(x != -2.0, x, 0.0),
    "both truths": lambda x: tf.cast(tf.logical_and(x > 0.0, x < 2.0), tf.float32),
    **{f"{op.__name__} of NumPy's number": (lambda x, op=op: op(x, np.float32(0.3))) for op in ARITHMETIC + COMPARED},
    **{f"{op.__name__} to NumPy's number": (lambda x, op=op: op(np.float32(0.3), x)) for op in ARITHMETIC},
    **{f"{op.__name__} of NumPy's double": (lambda x, op=op: op(V, np.float64(0.3)) + x) for op in ARITHMETIC},
    **{f"{op.__name__} of NumPy's array": (lambda x, op=op: op(x, ARRAY)) for op in ARITHMETIC},
    **{f"{op.__name__} to NumPy's array": (lambda x, op=op: op(ARRAY, V) + x) for op in ARITHMETIC},
    "NumPy's whole number": lambda x: (x + np.int64(3)) * np.int32(2),
    "a maximum of NumPy's": lambda x: tf.maximum(x, np.float32(0.3)),
}  # fmt: skip

# These are left to TensorFlow, with whatever comes of it.
LEFT = {
    "another dtype": lambda x: x + WHOLE,
    "another dtype's product": lambda x: x @ DOUBLE,
    "another dtype to a variable": lambda x: WHOLE + x,
    "a negative power of wholes": lambda x: tf.cast(x, tf.int32) ** -1,
    "a number to a power": lambda x: 2.0**x,
    "a float to wholes": lambda x: WHOLE * 2.5,
    "another shape": lambda x: x + tf.Variable([1.0, 2.0, 3.0]),
    "another shape's product": lambda x: x @ tf.ones((3, 2)),
    "a vector": lambda x: x @ ROW,
    "a vector's product": lambda x: tf.matmul(ROW, x),
    "adjoint": lambda x: tf.matmul(x, V, adjoint_b=True),
    "both": lambda x: tf.matmul(x, V, transpose_b=True, adjoint_b=True),
    "sparse": lambda x: tf.matmul(x, V, b_is_sparse=True),
    "another type": lambda x: tf.matmul(tf.cast(x, tf.int8), tf.cast(x, tf.int8), output_type=tf.int32),
    "complex": lambda x: tf.matmul(tf.complex(x, x), tf.complex(x, -x), transpose_a=True),
    "channels first": lambda x: tf.nn.bias_add(x[None, :, None], ROW, data_format="NCHW"),
    "a bias of another dtype": lambda x: tf.nn.bias_add(x, tf.constant([1, 2])),
    "where of one": lambda x: tf.where(x > 0.0, x),
    "where of none": lambda x: tf.where(x > 0.0),
    "gathered by a list": lambda x: tf.gather(x, [1, 0]),
    "gathered of a list": lambda x: tf.gather([[1.0, 2.0]], tf.cast(x[0] * 0.0, tf.int32)),
    "gathered columns of a variable": lambda x: tf.gather(V, NUMBERS, axis=1) + x[0, 0],
    "gathered in batches of a variable": lambda x: tf.gather(V, tf.constant([[0], [1]]), batch_dims=1) + x,
    "gathered from nowhere": lambda x: tf.gather(x, tf.constant([0, 2])),
    "gathered from nowhere of a variable": lambda x: tf.gather(V, tf.constant([0, 2])) + x[0],
    "embedded from nowhere": lambda x: tf.nn.embedding_lookup(V, tf.constant([-1])) + x[0],
    "gathered by floats": lambda x: tf.gather(x, x),
    "embedded within a norm": lambda x: tf.nn.embedding_lookup(V, NUMBERS, max_norm=1.0) + x[0],
    "embedded in parts": lambda x: tf.nn.embedding_lookup([V, FIXED], NUMBERS) + x[0],
    "a list": lambda x: x @ [[1.0, 0.0], [0.0, 1.0]],
    "an array": lambda x: x * X.numpy() + V,
    "a truth": lambda x: (x > 0.0) & True,
    "nothing": lambda x: x @ None,
    "in words": lambda x: x * "2",
    "an array of another dtype": lambda x: x + np.ones((2, 2)),
    "an array of another shape": lambda x: x + np.ones(3, np.float32),
    "NumPy's infinity": lambda x: x * np.float32("inf") + np.float64("nan"),
    "NumPy's large number": lambda x: x + np.float64(1e300),
    "NumPy's large whole number": lambda x: x * np.int64(1 << 40),
    "NumPy's number to wholes": lambda x: WHOLE * np.float32(2.0),
    "NumPy's truth": lambda x: x * np.bool_(True),
    "a row that is a tensor": lambda x: V[tf.constant(1)] + x,
    "rows by a list": lambda x: V[[0, 1]] + x,
    "a row that is not there": lambda x: V[5] + x,
    "rows by truths": lambda x: V[tf.constant([True, False])] + x,
    "stacked": lambda x: tf.stack([V, x]),
    "cast to itself": lambda x: tf.cast(V, tf.float32) + x,
    "zeros": lambda x: tf.zeros_like(V) + tf.ones_like(WHOLE, tf.float32) + x,
    "a convolution": lambda x: tf.nn.conv2d(x[None, ..., None], KERNEL, 1, "SAME"),
    "a shape that does not fit": lambda x: tf.reshape(V, [3, 3]) + x[0, 0],
    "concatenated dtypes": lambda x: tf.concat([x, WHOLE], 0),
}


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def repeated(function):
    """The function between operations, so that it is no first one."""

    def make(decorate):
        @decorate
        def step(x):
            before = tf.identity(x)
            return function(before), tf.identity(before)

        return step

    return make


PYTHON = {
    "_read_variable_op", "_slice_helper", "abs", "add_n", "argmax_v2", "bias_add", "binary_op_wrapper", "cast",
    "concat", "cumsum", "divide", "embedding_lookup", "equal", "expand_dims_v2", "gather", "gather_v2", "greater",
    "greater_equal", "identity", "l2_loss", "less", "less_equal", "logical_and", "matmul", "maximum",
    "r_binary_op_wrapper", "reduce_sum", "reshape", "softmax_v2", "stop_gradient", "tensor_equals",
    "tensor_not_equals", "tile", "transpose_v2", "value", "where_v2",
}  # fmt: skip


def python_of(run):
    """Functions of TensorFlow's operators and products that begin while `run` does."""
    seen = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_name in PYTHON and "tensorflow" in frame.f_code.co_filename:
            seen.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("name", ANSWERED)
def test_answered(name):
    """Values, dtypes and shapes are eager's, and once it is followed TensorFlow's Python is not run for it."""
    step = run_both(repeated(ANSWERED[name]), [(X,), (X,), (X * 2.0,), (X,)])
    assert (step.stats().recorded, step.stats().followed, step.stats().diverged) == (1, 3, 0)
    assert not python_of(lambda: step(X))
    assert python_of(lambda: coexec.imperative()(step)(X))


@pytest.mark.parametrize("name", LEFT)
def test_left_to_tensorflow(name):
    """Results and errors are eager's, words included."""
    run_both(repeated(LEFT[name]), [(X,), (X,), (X * 2.0,), (X,), (X,)])


def test_values_of_the_moment():
    """A variable is read where it stands, between its assignments."""

    def make(decorate):
        v = tf.Variable(X)

        @decorate
        def step(x):
            first = x @ v
            v.assign_add(x)
            second = x * v + v
            v.assign(v * 0.5 - 1.0)
            return first, second, v + 0.0, v @ v

        return step

    step = run_both(make, [(X,), (X * 0.5,), (X + 1.0,), (X,), (-X,)])
    assert (step.stats().followed, step.stats().diverged) == (4, 0)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("watching", [True, False])
def test_gradients(persistent, watching):
    """Tapes hear of what is read: of trainable variables by themselves, of others where they are watched."""

    def make(decorate):
        kernel, bias = tf.Variable(X), tf.Variable([0.5, -0.5])
        fixed, other = tf.Variable(X, trainable=False), tf.Variable(X, trainable=False)

        @decorate
        def step(x):
            with tf.GradientTape(persistent, watching) as tape:
                tape.watch(fixed)
                y = tf.nn.bias_add(tf.matmul(x, kernel, transpose_b=True) * 2.0, bias)
                y = tf.where(y > 0.0, y, 0.1 * y) @ fixed + other - kernel
                loss = tf.reduce_sum(y * y)
            names = sorted(v.name for v in tape.watched_variables())
            return loss, tape.gradient(loss, [kernel, bias, fixed, other]), len(names)

        return step

    step = run_both(make, [(X,), (X * 0.5,), (X + 1.0,), (X,), (-X,)])
    assert (step.stats().followed, step.stats().diverged) == (4, 0)


@pytest.mark.parametrize("persistent", [True, False])
def test_gradients_of_what_functions_are_given(persistent):
    """Tapes watch variables that functions convert, slices of them, and what NumPy's numbers and arrays work on."""

    def make(decorate):
        v = tf.Variable(X)

        @decorate
        def step(x):
            with tf.GradientTape(persistent=persistent) as tape:
                tape.watch(x)
                y = tf.transpose(v) * np.float32(0.3) + v[None, 0] + tf.reshape(v, [2, 2]) * ARRAY
                z = tf.reduce_sum(v) / np.float64(3.0) + tf.nn.l2_loss(v) - tf.reduce_sum(np.float32(2.0) * y * x)
                watched = [variable is v for variable in tape.watched_variables()]
            return tape.gradient(z, [v, x]), watched

        return step

    step = run_both(make, [(X,), (X * 0.5,), (X + 1.0,), (X,), (-X,)])
    assert (step.stats().recorded, step.stats().followed, step.stats().diverged) == (1, 4, 0)


def test_errors_of_what_converts_variables():
    """They are eager's, words included, also where another function of the line would read the variable."""

    def make(decorate):
        v, k = tf.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0], name="kept")

        def outcome(function, *given):
            try:
                return function(*given)
            except (ValueError, TypeError, tf.errors.OpError) as error:
                return type(error).__name__, str(error)

        @decorate
        def step(x, number):
            function = (tf.reduce_sum, tf.reduce_any)[number % 2]
            found = [outcome(function, variable) for variable in (v, k)]
            chosen = [outcome(tf.where, *given) for given in ((x > 0.0, v, k), (k, x, v))]
            row = v[1:]
            with tf.name_scope("outer"):
                other = v[:1]
            failed = [outcome(part.assign, x) for part in (row, other)] + [outcome(row.assign, x[:1])]
            return found, chosen, [type(one).__name__ for one in failed], failed[:2], v + 0.0

        return step

    step = run_both(make, [(tf.constant([float(n), 1.0]), n // 3) for n in range(14)])
    assert step.stats().followed >= 6


def test_a_call_that_does_not_bind_accesses_no_variable():
    def make(decorate):
        v = tf.Variable([1.0, 2.0])

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                try:
                    y = tf.reshape(v)
                except TypeError:
                    y = x * 2.0
            return y, len(tape.watched_variables()), v + 0.0

        return step

    step = run_both(make, [(tf.constant([float(n), 1.0]),) for n in range(6)])
    assert step.stats().followed >= 3, step.explain()


def test_equality_and_promotion_are_what_the_program_has_asked_for():
    """Also from one call to the next."""

    def make(decorate):
        v = tf.Variable([1.0, 2.0])

        @decorate
        def step(x, y):
            same, added = x == y, tf.add(x, np.float64(1.0))
            return str(same)[:9], x * np.float64(0.5), np.int64(2) + x, added, x / ARRAY[0], v + 0.0

        def outside(x, y, mode):
            try:
                if mode == "equality":
                    tf.compat.v1.disable_tensor_equality()
                elif mode:
                    ops.set_dtype_conversion_mode(mode)
                return step(x, y)
            finally:
                tf.compat.v1.enable_tensor_equality()
                ops.set_dtype_conversion_mode("off")

        outside.stats = getattr(step, "stats", None)
        return outside

    modes = [None, None, None, None, "equality", None, "legacy", None, "safe", None, "all", None]
    calls = [(tf.constant([float(n), 1.0]), tf.constant([1.0, 1.0]), mode) for n, mode in enumerate(modes)]
    assert run_both(make, calls).stats().followed >= 4


def test_a_cast_to_its_own_dtype_is_the_variable_itself():
    """It is read when it is used, also where the next operation of that line reads it."""

    def make(decorate):
        v, k = tf.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0])

        def to(variable, dtype):
            return tf.cast(variable, dtype)

        @decorate
        def step(x):
            _ = to(v, tf.float64), to(k, tf.float64)
            own, read = to(v, tf.float32), to(k, tf.float32)
            wide = to(v, tf.float64), to(k, tf.float64)
            v.assign_add(x)
            k.assign(x)
            return own is v, own + 1.0, read + 1.0, wide

        return step

    step = run_both(make, [(tf.constant([float(n), 1.0]),) for n in range(8)])
    assert step.stats().diverged == 0


def test_a_slice_of_a_variable_is_assigned():
    """What `v[...]` returns has its method `assign`, in the call and behind it."""

    def make(decorate):
        v = tf.Variable(X)
        kept = []

        @decorate
        def step(x):
            row = v[0, 1:]
            row.assign(x[0, :1])
            v[1].assign(x[1], name="named")
            kept.append(v[:, 0])
            return row, v + 0.0

        def outside(x):
            if kept:
                kept[-1].assign([7.0, 8.0])
            return step(x), v.numpy()

        outside.stats = getattr(step, "stats", None)
        return outside

    step = run_both(make, [(X,), (X * 0.5,), (X + 1.0,), (X,), (-X,)])
    assert (step.stats().followed, step.stats().diverged) == (4, 0)


def test_gradients_of_rows():
    """Rows that were looked up have gradients of rows, and an optimizer that takes them moves those alone."""

    def make(decorate):
        table, optimizer = tf.Variable(tf.reshape(tf.range(12.0), (6, 2))), tf.keras.optimizers.SGD(0.1)

        @decorate
        def step(ids):
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(table, ids) * tf.gather(table, ids + 1)
                loss = tf.reduce_sum(rows * tf.gather(tf.gather(table, ids), tf.zeros_like(ids)))
            gradient = tape.gradient(loss, table)
            optimizer.apply_gradients([(gradient, table)])
            return loss, gradient.values, gradient.indices, table + 0.0

        return step

    step = run_both(make, [(tf.constant(ids),) for ids in ([0, 1], [2, 2], [4, 0], [1, 1], [0, 4])])
    assert (step.stats().followed, step.stats().diverged) == (4, 0)


@pytest.mark.parametrize("caught", [True, False])
def test_rows_that_are_not_there(caught):
    """An index from nowhere fails at its line, in a `try` or at the end, and nothing is written behind it."""

    def make(decorate):
        table, count = tf.Variable(tf.ones((3, 2))), tf.Variable(0)

        @decorate
        def step(ids):
            count.assign_add(1)
            ids = ids + 0
            if caught:
                try:
                    rows = tf.nn.embedding_lookup(table, ids)
                except tf.errors.InvalidArgumentError as error:
                    return "not in" in error.message, count + 0
            else:
                rows = tf.nn.embedding_lookup(table, ids)
            table.assign_add(tf.gather(rows, tf.zeros((3,), tf.int32)))
            return rows, count + 0

        return step

    run_both(make, [(tf.constant(ids),) for ids in ([0, 1], [2, 2], [0, 2], [3, 0], [0, 1], [0, -1], [1, 0])])


def test_other_ways():
    """Where the program goes on otherwise behind a read, what was read is used, and nothing is read twice."""

    def make(decorate):
        v = tf.Variable(X)

        @decorate
        def step(x, way):
            y = x * 1.0
            if way == 0:
                return y @ v
            if way == 1:
                return y + v
            if way == 2:
                return tf.matmul(y, v, transpose_b=True)
            if way == 3:
                return tf.nn.bias_add(y, v[0])
            return v.read_value()

        return step

    step = run_both(make, [(X, way) for _ in range(4) for way in (0, 1, 2, 3, 4, 2, 0)])
    assert step.stats().followed > 15


def test_numbers_that_change():
    """Numbers of Python's on the right count by value and kind."""

    def make(decorate):
        @decorate
        def step(x, number):
            y = x * 1.0
            return y * number, y - number, y < number, number * y

        return step

    run_both(make, [(X, number) for number in [2.0, 2.0, 2, -0.0, 0.0, 1e300, float("nan"), True, 1 << 40] * 2])


def test_variables_of_a_strategy_are_its_own():
    """What a strategy makes is no plain variable, and its tapes hear of the whole."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def make(decorate):
        with strategy.scope():
            v = tf.Variable(X)

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x @ v + v * 2.0)
            return tape.gradient(loss, v), len(tape.watched_variables())

        def run(x):
            gradient, count = strategy.run(step, (x,))
            return strategy.experimental_local_results(gradient), count

        run.stats = getattr(step, "stats", None)
        return run

    run_both(make, [(X,), (X,), (X * 2.0,), (X,)])


def test_what_counts_as_a_variable():
    """Plain ones; none that is read from elsewhere, none of values that hold more than numbers."""
    assert is_variable(V)
    assert not is_variable(X)
    assert not is_variable(V.assign_add(X * 0.0))
    with tf.device("CPU:0"):
        assert is_variable(tf.Variable(1.0))


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"batching": True}], ids=str)
def test_a_caching_device(options):
    """C++ reads such a variable past what is cached, Python the cached value, as eagerly."""

    def make(decorate):
        cached = tf.Variable([1.0, 2.0, 3.0], caching_device="CPU:0")

        @decorate
        def step(x):
            cached.assign_add(x)
            seen = x * cached, cached * x, tf.add(cached, 0.0), tf.tanh(cached), tf.concat([cached, x], 0)
            python = cached.value(), cached.read_value(), float(cached.numpy()[0])
            cached.assign(cached * 0.5)
            with tf.GradientTape() as tape:
                y = x * cached * cached
            return seen, python, cached + 0.0, tape.gradient(y, cached)

        return step

    step = run_both(make, [(tf.constant([1.0, 0.5, float(n)]),) for n in range(10)], **options)
    assert step.stats().followed >= 4, step.explain()
