"""Hostile values: what compilers may not rewrite, numbers of every kind, indices and variables that change by call."""

import weakref

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from coexec import testing
from tests.coexec import run_both

CALLS = [(i,) for i in range(12)]
MODES = ("auto", True, False)


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def on(values, operation, **options):
    """Runs an operation on values that come from outside, so that no compiler may fold them."""
    values = tf.constant(values, tf.float32)
    return run_both(lambda function: function(lambda _: operation(tf.identity(values))), CALLS[:4], **options)


def backends(fn):
    """What the segments of a function are compiled to; each was launched."""
    assert fn.stats().launches > 0, fn.explain()
    return {c.executable.backend for c in fn._controller.segments._all if c.executable is not None}


@pytest.mark.parametrize(
    ("values", "operation"),
    [
        pytest.param([0.5], lambda x: (x + 1e8) - 1e8, id="sum"),
        pytest.param([0.4], lambda x: (x + 12582912.0) - 12582912.0, id="rounding"),
        pytest.param([1e-30], lambda x: (x * 1e30) * 1e30, id="product"),
        pytest.param([100.0], lambda x: tf.exp(x) * tf.exp(-x), id="exponents"),
        pytest.param([1000.0], lambda x: tf.math.log(tf.exp(x)), id="logarithm"),
        pytest.param([1.0, np.nan, 3.0], lambda x: tf.nn.max_pool1d(x[None, :, None], 2, 1, "VALID"),
                     id="pooled-nan"),
        pytest.param([-0.0, 0.0, -0.0, 0.0], lambda x: tf.math.top_k(x, 3)[1],
                     id="tied-zeros"),
        pytest.param([1.0, 2.0, np.nan], tf.argmax, id="argmax-nan"),
        pytest.param([1.0, 0.0, np.nan], tf.argmin, id="argmin-nan"),
        pytest.param([1.0, np.nan, 3.0], tf.nn.softmax, id="softmax-nan"),
        pytest.param([1e30], lambda x: tf.sqrt(tf.square(x)), id="root-of-square"),
        pytest.param([3e38], lambda x: x / 3e38, id="large-divisor"),
        pytest.param([0.0, 8.0, -8.0], lambda x: tf.quantization.fake_quant_with_min_max_vars(x, -6.0, 6.0),
                     id="quantised"),
        pytest.param([-0.0], lambda x: 1.0 / (x + tf.zeros_like(x)), id="zeros-like"),
        pytest.param([-0.0, 0.0, -2.0, 3.0], lambda x: 1.0 / tf.sign(x), id="sign"),
        pytest.param([-1.0], lambda x: tf.sqrt(x) * tf.sqrt(x), id="roots"),
        pytest.param([0.0, np.inf], lambda x: x / x, id="quotient"),
        pytest.param([0.0, 1.0], lambda x: x / 1e-39, id="tiny-divisor"),
        pytest.param([np.inf, 2.0], lambda x: tf.math.polygamma(1.0, x), id="polygamma"),
        pytest.param([np.inf, 2.5], lambda x: tf.math.zeta(tf.reverse(x, [0]), x), id="zeta"),
        pytest.param([1000.0], lambda x: tf.math.log(tf.stop_gradient(tf.exp(x))), id="logarithm-through-identity"),
        pytest.param([2.0, np.nan, 1.0], lambda x: (tf.sort(x), tf.reduce_max(x)), id="sorted-nan"),
    ],
)  # fmt: skip
def test_rewrites(values, operation):
    """Compiled arithmetic gives the value that each operation on its own gives."""
    on(values, operation)


HOSTILE = [1.0, np.nan, -np.inf, -2.0, np.inf, 0.0]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda x, mask: tf.cast(mask, x.dtype) * x, id="product"),
        pytest.param(lambda x, mask: x * tf.stop_gradient(tf.cast(mask, x.dtype)), id="product-through-identity"),
        pytest.param(lambda x, mask: x * tf.reshape(tf.cast(mask, x.dtype), [-1]), id="product-through-reshape"),
        pytest.param(lambda x, mask: tf.cast(mask, x.dtype) / x, id="quotient"),
        pytest.param(lambda x, mask: tf.math.divide_no_nan(tf.cast(mask, x.dtype), x), id="quotient-no-nan"),
        pytest.param(lambda x, mask: tf.math.multiply_no_nan(tf.cast(mask, x.dtype), x), id="product-no-nan"),
        pytest.param(lambda x, mask: tf.reduce_sum(x * tf.cast(mask, x.dtype)) / 2.0, id="masked-mean"),
        pytest.param(lambda x, mask: tf.cast(x > 0, x.dtype) * x, id="product-of-comparison"),
    ],
)
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
def test_masks_let_no_nan_disappear(operation, dtype):
    """What is multiplied by a mask is NaN where it was NaN or infinite: compiled code must not select instead."""
    mask = tf.constant([True, False, False, True, False, False])

    def make(function):
        return function(lambda x: operation(tf.cast(x, dtype), mask))

    harmless = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    run_both(make, [(harmless,)] * 4 + [(tf.constant(HOSTILE),)] * 2)


@pytest.mark.parametrize("operation", [tf.reduce_max, tf.reduce_min, tf.math.cumulative_logsumexp])
def test_gradients_of_extremes_of_nan(operation):
    """They are NaN, and what looks for NaN finds them."""

    def differentiated(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operation(x)
        return y, tape.gradient(y, x)

    values = [[1.0, 2.0, 3.0, 3.0]] * 4 + [[1.0, np.nan, -0.0, 0.0], [np.nan] * 4]
    run_both(lambda function: function(differentiated), [(tf.constant(v),) for v in values])


@pytest.mark.parametrize("operation", [tf.nn.elu, tf.nn.selu])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.float32, tf.float64])
def test_exponential_units_at_zero(operation, dtype):
    """Below zero, where the kernels' exponential is one already, both value and slope are those at zero."""

    def differentiated(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operation(x)
        return y, tape.gradient(y, x)

    values = np.array([-1e-30, -1e-20, -1e-9, -1e-3, -1.0, -0.0, 0.0, 1e-20, 1.0, np.inf, -np.inf, np.nan])
    fn = run_both(lambda function: function(differentiated), [(tf.cast(values, dtype),)] * 4)
    assert backends(fn) == {"xla"}, fn.explain()


EDGES = np.array([0.0, -0.0, 1.0, -1.0, 7.0, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("dtype", [tf.float32, tf.complex64])
@pytest.mark.parametrize("operation", [tf.sqrt, tf.math.rsqrt, tf.math.reciprocal])
def test_gradients_of_roots(operation, dtype):
    """No gradient stays none, and squares of what is large or small are lost where the kernels lose them."""

    def differentiated(x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operation(x)
        return tape.gradient(y, x, output_gradients=dy)

    sizes = [0.25, 1.0, 1e-30, 1e30] if dtype != tf.complex64 else [0.0, 1.0 + 2.0j, 4.0]
    slopes = [0.0, 2.0, 1e-30, 1e30] if dtype != tf.complex64 else [0.0]
    values, slopes = (tf.constant(v.ravel(), dtype) for v in np.meshgrid(sizes, slopes))
    fn = run_both(lambda function: function(differentiated), [(values, slopes)] * 4)
    assert backends(fn) == {"xla"}, fn.explain()


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
@pytest.mark.parametrize(
    ("operation", "given", "gradient"),
    [(tf.raw_ops.ReluGrad, "features", "gradients"), (tf.raw_ops.Relu6Grad, "features", "gradients"),
     (tf.raw_ops.RsqrtGrad, "y", "dy"), (tf.raw_ops.SqrtGrad, "y", "dy"), (tf.raw_ops.ReciprocalGrad, "y", "dy")],
)  # fmt: skip
def test_gradients_of_infinities(operation, given, gradient, dtype):
    """Infinite and missing gradients go on, and zeros stay zeros of their sign, as the kernels have it."""
    values, slopes = (tf.constant(v.ravel(), dtype) for v in np.meshgrid(EDGES, EDGES))

    def differentiated(x, dy):
        found = operation(**{given: x, gradient: dy})
        return found, 1.0 / found

    fn = run_both(lambda function: function(differentiated), [(values, slopes)] * 4)
    assert backends(fn) == {"xla"}, fn.explain()


@pytest.mark.parametrize(
    "operation",
    [tf.math.ndtri, lambda x: tf.math.igamma(x, 0.0 * x), lambda x: tf.math.igammac(0.0 * x, x)],
    ids=["ndtri", "igamma", "igammac"],
)
def test_tails(operation):
    """Special functions that XLA approximates otherwise far out are left to their kernels."""
    fn = on([1e-30, 1e-20, 1e-8, 1e-6, 0.5, 1.0], operation)
    assert backends(fn) == {"graph"}
    assert "gives other values under XLA" in fn.explain()


@pytest.mark.parametrize(
    "operation",
    [tf.sqrt, tf.norm, tf.reduce_max, tf.reduce_prod, tf.math.rsqrt, tf.math.cumprod, tf.math.reduce_std,
     lambda x: tf.clip_by_value(x, 0.0, 1.0), lambda x: x**0.5, lambda x: tf.math.xlogy(x, x),
     lambda x: tf.where(x > 0, tf.math.log(x), 0.0), lambda x: tf.math.top_k(x, 2)[0]],
)  # fmt: skip
@pytest.mark.parametrize("jit", MODES)
def test_gradients_at_the_edge(operation, jit):
    """Gradients at zeros, ties and borders are the kernels' own, with their NaNs and infinities."""

    def differentiated(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operation(x)
        return y, tape.gradient(y, x)

    on([0.0, 1.0, 1.0, 0.0], differentiated, jit_compile=jit)


@pytest.mark.parametrize("jit", MODES)
def test_indices_that_leave_the_range(jit):
    """Indices out of range fail as eagerly do, write nothing of their own, and the next call is right."""

    def make(function):
        table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]))

        @function
        def step(i):
            rows = tf.constant([0, [2, 5, 6, -1, 1][i % 5]])
            table.assign_add(tf.ones_like(table))
            found = tf.gather(table, rows) * 2.0
            table.scatter_add(tf.IndexedSlices(tf.ones([2, 2]), rows))
            return found, tf.one_hot(rows, 3), table.read_value()

        return step

    run_both(make, CALLS, jit_compile=jit)


@pytest.mark.parametrize("jit", MODES)
def test_duplicates_and_slices_of_one_variable(jit):
    """Sparse updates with duplicates and slice assignments come in the program's order."""

    def make(function):
        state = tf.Variable(tf.zeros([4]))

        @function
        def step(i):
            state.scatter_update(tf.IndexedSlices(tf.constant([1.0, 2.0, 3.0]) + float(i), tf.constant([1, 1, 1])))
            state.scatter_max(tf.IndexedSlices(tf.constant([9.0, 2.0]), tf.constant([0, 0])))
            state.scatter_mul(tf.IndexedSlices(tf.constant([2.0, 3.0]), tf.constant([1, 1])))
            state[2].assign(state[1] * 2.0)
            state[1:3].assign(state[0:2])
            return state + 0.0

        return step

    run_both(make, CALLS, jit_compile=jit)


@pytest.mark.parametrize("jit", MODES)
def test_one_variable_under_two_names_late(jit):
    """A variable that becomes another's alias on a late call is read after it was written."""

    def make(function):
        one, two = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])

        @function
        def step(i):
            left, right = (one, one) if i % 4 == 3 else (one, two)
            left.assign_add([1.0, 1.0])
            doubled = right * 2.0
            right.assign(left + doubled)
            return left + right, doubled, one.read_value(), two.read_value()

        return step

    run_both(make, CALLS, jit_compile=jit)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *[(d, n) for d in (tf.float32, tf.float16, tf.int8) for n in (np.float32(2), np.int64(2))],
        (tf.int32, np.int64(2)),
        (tf.float32, 2.0),
    ],
)
@pytest.mark.parametrize("jit", MODES)
def test_number_that_becomes_a_numpy_scalar(dtype, number, jit):
    """A Python number may be a NumPy scalar on a later call, beside a tensor of any dtype."""
    values = tf.constant([1, 3, 0], dtype)

    def make(function):
        @function
        def step(n):
            return values + n, n - values, values * n

        return step

    run_both(make, [(2,), (number,), (number,), (2,), (number,)], jit_compile=jit)


@pytest.mark.parametrize("jit", MODES)
def test_numbers_of_four_bits(jit):
    """Arrays of the same bytes in other dtypes are other constants, and feeds of half a byte are what they were."""
    signed, unsigned = np.array([7, -1, 3], ml_dtypes.int4), np.array([7, 15, 3], ml_dtypes.uint4)

    def make(function):
        @function
        def step(i):
            both = tf.constant(signed), tf.constant(unsigned)
            given = tf.constant(unsigned if i % 2 else signed)
            return [tf.cast(v, tf.int32) + 1 for v in (*both, given)]

        return step

    step = run_both(make, CALLS, jit_compile=jit)
    assert step.stats().launches


@pytest.mark.parametrize("jit", [True, False])
def test_operations_of_finalizers(jit):
    """What the program has done at a tensor's end may issue operations and read values: the call stays as it is."""

    class Holder:
        def __init__(self, tensor, log):
            self.tensor, self.log = tensor, log

        def __del__(self):
            self.log.append(float(self.tensor[0]))

    def make(function):
        state, log = tf.Variable([1.0, 2.0]), []

        @function
        def step(i):
            doubled = state * float(i)
            added, other = doubled + 1.0, doubled + 2.0
            total = tf.reduce_sum(added) + tf.reduce_sum(other)
            weakref.finalize(added, lambda: log.append(float(tf.reduce_sum(state * 3.0))))
            other.holder = Holder(doubled, log)
            del added, other
            return state * float(total)

        return lambda i: (step(i), sorted(log))

    run_both(make, CALLS[:6], jit_compile=jit)


LISTS = {
    "begin": lambda x: tf.slice(x, [True, 0], [1, 2]),
    "size": lambda x: tf.slice(x, [1, 0], [True, 2]),
    "begin after a number": lambda x: tf.slice(x, [0, True], [1, 2]),
    "addend": lambda x: tf.add(x, [True, 1.0, 2.0, 3.0]),
    "addend of whole numbers": lambda x: tf.add(tf.cast(x, tf.int32), [1, 1.0, 2, 3]),
    "shape": lambda x: tf.reshape(x, [4, 3.0]),
    "repeats": lambda x: tf.tile(x, [True, 2]),
    "indices": lambda x: tf.gather(x, [True, 0]),
    "condition": lambda x: tf.where([True, 0, False], x[:, 0], 0.0),
    "paddings": lambda x: tf.pad(x, [[True, 0], [0, 0]]),
    "order": lambda x: tf.transpose(x, [True, 0]),
    "order of floats": lambda x: tf.transpose(x, [1.0, 0.0]),
    "words": lambda x: x * ["a", 1, 2, 3],
    "none": lambda x: x * [None, 1, 2, 3],
    "rows": lambda x: tf.concat([x, [[1, 2.0, 3, True]]], 0),
    "stacked": lambda x: tf.stack([x[0], [1, 2, 3, True]]),
    "large": lambda x: tf.add(tf.cast(x, tf.int32), [2**40, 0, 0, 0]),
    "negative": lambda x: tf.add(tf.cast(x, tf.uint8), [-1, 0, 0, 0]),
    "axes": lambda x: tf.reduce_sum(x, [1.0]),
}


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("operation", LISTS.values(), ids=LISTS)
def test_lists_that_mix_types(operation, batching):
    """What TensorFlow refuses is refused, in each call, and nothing else is."""

    def make(decorate):
        @decorate
        def step(x):
            try:
                return operation(x * 1.0)
            except (TypeError, ValueError) as error:
                return type(error), str(error)

        return step

    step = run_both(make, [(tf.reshape(tf.range(12.0), [3, 4]),)] * 4, batching=batching)
    assert step.stats().ops_followed >= 3  # what comes before the list, in each call but the first
