"""Constants: of the dtype and to the bit what eager makes of them, wherever they end up."""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import run_both

CALLS = [(i,) for i in range(6)]
MODES = ("auto", True, False)


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def fed(values, dtype=tf.float32):
    """A tensor that no compiler may fold."""
    return tf.identity(tf.constant(values, dtype))


DOUBLE = tf.constant([0.1 + 1e-10], tf.float64)
SINGLE = tf.constant([0.1])


@pytest.mark.parametrize("jit", MODES)
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda: tf.cast(tf.less(np.array([0.1]), tf.constant([0.1])), tf.float32) * fed([2.0]),
                     id="array-and-tensor"),
        pytest.param(lambda: tf.cast(tf.less(0.1, tf.constant([0.1 + 1e-10], tf.float64)), tf.float32) * fed([2.0]),
                     id="number-and-double"),
        pytest.param(lambda: tf.maximum(0.1, tf.constant([0.05], tf.float64)) * fed([3.0], tf.float64),
                     id="number-and-smaller-double"),
        pytest.param(lambda: tf.add_n([tf.constant([0.1], tf.float64), tf.constant([0.2], tf.float64)])
                     + fed([1.0], tf.float64), id="list-of-doubles"),
        pytest.param(lambda: tf.stack([0.1, 0.2]) * fed([1.0, 2.0]), id="list-of-numbers"),
        pytest.param(lambda: tf.raw_ops.Mul(x=fed([1.0], tf.float16), y=1 + 2.0**-11 + 2.0**-30), id="half"),
        pytest.param(lambda: tf.raw_ops.Mul(x=fed([1.0], tf.bfloat16), y=1 + 2.0**-9 + 2.0**-30), id="bfloat16"),
        pytest.param(lambda: tf.constant(2, tf.int64) * tf.cast(fed([3.0]), tf.int64), id="int64"),
        pytest.param(lambda: tf.complex(1.0, 2.0) * tf.cast(fed([1.0]), tf.complex64), id="complex"),
    ],
)  # fmt: skip
def test_dtypes(operation, jit):
    """Where all inputs are constants, tensors among them say the dtype, not arrays and numbers."""
    fn = run_both(lambda function: function(lambda _: operation()), CALLS, jit_compile=jit)
    assert fn.stats().launches > 0, fn.explain()


RANGES = {
    "longer than what is folded": lambda i: tf.range(300, dtype=tf.int64),
    "of another length each time": lambda i: tf.range(3 + i, dtype=tf.int64) + 1,
    "long, of another length": lambda i: tf.range(300 + i % 2, dtype=tf.int64) + 1,
    "floats": lambda i: tf.range(24, dtype=tf.float32),
    "floats of another length": lambda i: tf.range(3 + i, dtype=tf.float32) * 0.5,
    "doubles": lambda i: tf.range(0.0, 1.0, 0.1 * (1 + i % 2), dtype=tf.float64),
    "whole numbers of NumPy's": lambda i: tf.range(np.int64(5 + i % 2)),
    "as many as a shape says": lambda i: tf.range(tf.shape(tf.zeros((3 + i % 2, 200)), out_type=tf.int64)[i % 2]),
    "scalars as they are": lambda i: tf.raw_ops.Range(start=np.int64(0), limit=np.int64(300), delta=np.int64(1)),
    "arrays as they are": lambda i: tf.raw_ops.Range(start=0, limit=np.asarray(300.0 + i % 3), delta=np.asarray(1)),
    "complex arrays as they are": lambda i: tf.signal.fft(np.arange(4) * (1.0 + i)),
}


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", RANGES)
def test_ranges(name, jit):
    """Operations on constants alone take the dtype that these had as tensors, where TensorFlow has a default, too."""

    def program(function):
        @function
        def step(i):
            return RANGES[name](i), tf.abs(RANGES[name](i))

        return step

    fn = run_both(program, CALLS, jit_compile=jit)
    assert fn.stats().followed == len(CALLS) - 1


@pytest.mark.parametrize("jit", MODES)
def test_constants_that_variables_hold(jit):
    """XLA merges no constants that come by way of a variable, and keeps the sign of zero."""

    def program(function):
        v, w = tf.Variable([0.0]), tf.Variable([0.0, 0.0])

        def step(i):
            v.assign(fed([1.0]))
            v.assign_add([1e8])
            v.assign_sub([1e8])
            w.assign(fed([-0.0, 1.0]) * 1.0)
            w.assign_add([0.0, 0.0])
            kept = v + 0.0
            v.assign([1e8])
            return kept, 1.0 / w, (fed([1.0]) + v) - v

        return function(step)

    fn = run_both(program, CALLS, jit_compile=jit)
    assert fn.stats().launches > 0, fn.explain()


def test_a_tape_that_watches_a_constant():
    """The gradient with respect to a constant that a layer is given is there in every call."""
    import keras

    layer = keras.layers.Dense(2)
    layer.build((None, 2))

    def step(reads):
        c = tf.constant([[1.0, 2.0]])
        with tf.GradientTape() as tape:
            tape.watch(c)
            y = layer(c)
            if reads:
                float(y[0, 0])
        return tape.gradient(y, c)

    for reads in (False, True):
        fn = coexec.function(step)
        for _ in range(16):
            np.testing.assert_allclose(fn(reads).numpy(), step(reads).numpy(), rtol=1e-6)
        assert fn.stats().regions > 0, fn.explain()


def test_indices_inside_of_a_traced_function():
    """An index of an eager tensor inside of a function that is being traced belongs to that function."""
    x = tf.reshape(tf.range(6.0), [2, 3])

    def step(i):
        total = x[0] * 2.0
        inner = tf.function(lambda y: y + x[1] + (total * 1.0)[0])
        return inner(total) + x[1]

    fn = coexec.function(step)
    for i in range(4):
        np.testing.assert_array_equal(fn(i).numpy(), step(i).numpy())


LISTS = {
    "reshape": lambda x, v: tf.reshape(x, v),
    "reduce_sum": lambda x, v: tf.reduce_sum(x, v),
    "gather": lambda x, v: tf.gather(x, v, axis=1),
    "tile": lambda x, v: tf.tile(x, v),
    "pad": lambda x, v: tf.pad(x, [v, [1, 1]]),
    "concat": lambda x, v: tf.concat([[1, 2], v], 0),
    "concat_first": lambda x, v: tf.concat([v, [1, 2]], 0),
    "stack": lambda x, v: tf.stack([[1, 2], v]),
    "equal": lambda x, v: tf.equal([1, 6], v),
}  # fmt: skip


@pytest.mark.parametrize("usual", [[1, 6], (6, 2)])
@pytest.mark.parametrize("operation", LISTS.values(), ids=LISTS)
def test_lists_that_tensorflow_converts_otherwise(operation, usual):
    """Bools among numbers are refused, and integers beyond 32 bits kept or cut as eagerly, also after others."""
    values = fed([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    others = [[True, 6], [1, True], [[True, 2]], [1.0, 12], [6, 2], (1, 0)]
    if operation not in (LISTS["tile"], LISTS["pad"]):  # which would ask for terabytes, and wait for them
        others += [[2**40, 1], [2**31, 1]]
    calls = [(v,) for v in [usual] * 4 + others + [usual] + others]
    fn = run_both(lambda function: function(lambda v: operation(values, v) * 1), calls)
    assert fn.stats().followed > 2


def numbers_that_change(decorate):
    """A rate and rows that are others in each call, as numbers, arrays and items of lists, with their gradient."""
    weights, decay = tf.Variable([0.5, -0.25]), [1.0]

    @decorate
    def step(i):
        decay[0] *= 0.9
        with tf.GradientTape() as tape:
            error = weights * np.array([i, 2 * i + 1], np.float32) - float(i)
            loss = tf.reduce_sum(tf.square(error)) + tf.add_n([decay[0], tf.reduce_sum(weights), 0.5 * i])
        (slope,) = tape.gradient(loss, [weights])
        weights.assign_sub(0.1 * decay[0] ** 2 * slope)
        return loss, weights.numpy()

    return step


@pytest.mark.parametrize("jit", MODES)
def test_numbers_that_change_are_fed_from_the_second_call_on(jit):
    """What the second call gives is compared with the recorded one: its path is that of all later calls."""
    fn = run_both(numbers_that_change, CALLS, jit_compile=jit)
    stats = fn.stats()
    assert (stats.recorded, stats.followed) == (1, len(CALLS) - 1), fn.explain()
    assert stats.launches == len(CALLS) - 2, fn.explain()


@pytest.mark.parametrize("size", [3, 300])
def test_tensors_of_a_call_are_of_one_class(size):
    """Those converted from arrays, however large, and those computed; gradients know both, and kept ones stay."""
    array = np.linspace(-1.0, 1.0, size, dtype=np.float32)

    def make(decorate):
        v, kept = tf.Variable(tf.ones([size])), []

        @decorate
        def step(i):
            one, other = tf.constant(array * (i + 1)), tf.convert_to_tensor(array)
            with tf.GradientTape() as tape:
                tape.watch([one, other])
                y = one * other + v
                z = tf.reduce_sum(y * y)
            gradients = tape.gradient(z, [one, other, v])
            kept.append(one)
            assert type(one) is type(other) is type(y) is type(gradients[0])
            assert isinstance(one, tf.Tensor)
            assert one.shape == [size]
            assert one is kept[-1]
            return gradients, one, kept[0] + other, other.numpy().sum()

        return step

    assert run_both(make, CALLS * 3).stats().followed > 10
