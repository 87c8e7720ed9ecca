"""Values on which compiled code and eager kernels part ways, and inputs that TensorFlow refuses: as in eager."""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import run_both
from tests.snapshots import assert_same, snapshot

NAN, INF = float("nan"), float("inf")
MODES = [("xla", True), ("graph", False)]


def outcomes(function, arguments):
    """What each call returns or raises."""
    found = []
    for given in arguments:
        try:
            found.append(snapshot(function(*given)))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def compare(function, arguments, jit_compile, follows):
    """Run all calls eagerly and co-executed, and demand the same, some of it from a launch."""
    decorated = coexec.function(function, jit_compile=jit_compile)
    with testing.compile_everything():
        found = outcomes(decorated, arguments)
    for number, (one, other) in enumerate(zip(outcomes(function, arguments), found, strict=True)):
        assert_same(one, other, path=f"call {number}: ")
    assert decorated.stats().followed >= follows, decorated.explain()
    assert decorated.stats().launches > 0, decorated.explain()


@pytest.mark.parametrize(("name", "jit_compile"), MODES)
def test_extremes_and_nans(name, jit_compile):
    """Reductions, selections and activations pass NaNs and infinities on as the kernels do."""

    def step(x):
        return (
            tf.reduce_max(x), tf.reduce_min(x), tf.maximum(x, 0.0), tf.minimum(x, 1.0), tf.nn.relu(x), tf.nn.relu6(x),
            tf.clip_by_value(x, 0.0, 1.0), tf.argmax(x), tf.sort(x), tf.math.is_nan(x), tf.reduce_logsumexp(x),
        )  # fmt: skip

    rows = [[1.0, 2.0, 2.0], [1.0, 2.0, 2.0], [NAN, 1.0, 2.0], [1.0, NAN, 2.0], [INF, 1.0, 2.0], [-INF, 1.0, 2.0]]
    compare(step, [(tf.constant(row),) for row in rows], jit_compile, follows=5)


@pytest.mark.parametrize(("name", "jit_compile"), MODES)
def test_casts_that_do_not_fit(name, jit_compile):
    """Floats that no integer holds become what the kernel makes of them, on every call."""

    def step(x):
        return tf.cast(x * 1e10, tf.int32) + 1, tf.cast(x, tf.uint8)

    rows = [[0.0, 1e-10, 2e-10]] * 3 + [[1.0, 2.0, 3.0]] * 7
    compare(step, [(tf.constant(row),) for row in rows], jit_compile, follows=9)


@pytest.mark.parametrize(("name", "jit_compile"), MODES)
def test_whole_numbers(name, jit_compile):
    """Division, modulo and shifts have the kernels' signs, and zeros and wide shifts what the kernels do with them."""

    def step(x, y):
        return x // y, x % y, tf.truncatediv(x, y), x * y, tf.bitwise.left_shift(x, y), tf.bitwise.right_shift(x, y)

    x = tf.constant([7, -7, 2**30, -5])
    divisors = [[2, 2, 3, 3], [1, 2, 5, 5], [2, 2, 3, 3], [40, 3, 33, 2], [1, 0, 1, 1], [1, 1, 1, 1]]
    compare(step, [(x, tf.constant(y)) for y in divisors], jit_compile, follows=4)


@pytest.mark.parametrize(("name", "jit_compile"), MODES)
def test_gradients_at_zero(name, jit_compile):
    """Gradients where a function has a corner, or where zero times infinity lurks."""

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            ways = [
                tf.sqrt(tf.maximum(x, 0.0)), tf.norm(x * 0.0), tf.nn.elu(x), tf.nn.selu(x), tf.abs(x),
                tf.where(x > 0, tf.math.log(x), x), tf.math.divide_no_nan(x, x), tf.reduce_max(x),
            ]  # fmt: skip
        return [tape.gradient(way, x) for way in ways]

    compare(step, [(tf.constant([float(i % 3), 1.0, -1.0, 0.0]),) for i in range(6)], jit_compile, follows=5)


@pytest.mark.parametrize(("name", "jit_compile"), MODES)
def test_places_that_do_not_exist(name, jit_compile):
    """Indices out of range raise on the call that has them, and the next call is right again."""

    def step(x, i):
        y = x * 2.0
        return tf.gather(y, i) + 1.0, tf.math.unsorted_segment_sum(y, tf.stack([i, 0, 1]), 3)

    numbers = [0, 1, 2, 7, 1, -1, 2, 0]
    compare(step, [(tf.constant([1.0, 2.0, 3.0]), tf.constant(i)) for i in numbers], jit_compile, follows=5)


@pytest.mark.parametrize(
    "number", [1, True, 2.5, -0.0, NAN, 300, 2**40, 1 + 2j, np.float32(2.5), np.int64(3)], ids=repr
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "int32", "complex64", "bool"])
def test_operators_with_any_number(dtype, number):
    """Each operator beside each kind of number gives eager's tensor, or eager's refusal, from either side."""

    def step(x):
        results = []
        for operator in ("add", "sub", "mul", "truediv", "lt", "ge", "radd", "rsub", "rmul", "rtruediv"):
            try:
                results.append(getattr(x, f"__{operator}__")(number))
            except Exception as error:
                results.append(type(error).__name__)
        return results

    def doubled(x):
        return step(x if x.dtype == tf.bool else x + x)

    x = tf.cast(tf.constant([1.0, 2.0]), dtype)
    decorated = coexec.function(doubled)
    with testing.compile_everything(), np.errstate(over="ignore"):
        found = outcomes(decorated, [(x,)] * 4)
        expected = outcomes(doubled, [(x,)] * 4)
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


def test_a_zero_that_tensorflow_keeps_with_another_sign():
    """TensorFlow keeps one tensor for 0.0 and -0.0, with the sign that came first; following is not put off by it."""
    ones = tf.constant([1.0, 2.0], tf.bfloat16)
    tf.identity(ones * -0.0)  # from now on this is what 0.0 becomes beside bfloat16, if none was made before

    def make(function):
        return function(lambda i: (1.0 / (ones * 0.0), ones + 0.0, tf.maximum(ones * -0.0, 0.0)))

    with testing.compile_everything():
        function = run_both(make, [(i,) for i in range(6)])
    assert (function.stats().followed, function.stats().imperative) == (5, 0)
    assert function.stats().launches > 0


@pytest.mark.parametrize(("name", "jit_compile"), MODES)
def test_operations_that_the_fast_path_refuses(name, jit_compile):
    """An operation that TensorFlow issues a second time, with a float for an integer, gives a tensor, not a list."""

    def program(x):
        bounds = tf.quantization.fake_quant_with_min_max_args(x)
        given = [tf.quantization.fake_quant_with_min_max_args(x, *pair) for pair in ((-6, 6), (-6.0, 6.0))]
        return bounds * 2.0, given

    compare(program, [(tf.constant([0.5, -1.25, 7.0]) * n,) for n in range(6)], jit_compile, follows=5)


@pytest.mark.parametrize(("name", "jit_compile"), MODES)
def test_lists_of_several_dtypes_under_a_tape(name, jit_compile):
    """A number in a list of values, each with a dtype of its own, is what TensorFlow makes of it, on tapes, too."""

    def program(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            whole, part = tf.io.decode_csv(tf.strings.join([["1,2"], ["5"]], "."), [0, 0.5])
            y = x * part * tf.cast(whole, tf.float32)
        return y, tape.gradient(y, x)

    compare(program, [(tf.constant([0.5, -1.25]) * n,) for n in range(6)], jit_compile, follows=5)
