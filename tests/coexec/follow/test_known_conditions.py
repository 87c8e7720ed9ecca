"""Known conditions: comparisons of shapes and constants are decided while following, without a launch."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec import testing
from tests.coexec import run_both

X = tf.constant([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
CALLS = [(i,) for i in range(8)]
MODES = ("auto", True, False)


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def while_loop(x):
    """Counts to a shape, under a limit of iterations: its condition is a conjunction."""
    size = tf.shape(x)[1]
    return tf.while_loop(
        lambda n, z: n < size, lambda n, z: (n + 1, z * 1.1 + tf.cast(n, tf.float32)), (tf.constant(0), x),
        maximum_iterations=size + 2,
    )  # fmt: skip


def is_one_segment(fn):
    """Whether each call was launched at its end, and no decision waited."""
    stats = fn.stats()
    assert (stats.decisions, len(stats.ops_per_segment)) == (0, 1), fn.explain()
    assert stats.launches > 2, fn.explain()


LOOPS = {
    "while_loop": while_loop,
    "map_fn": lambda x: tf.map_fn(lambda row: row * 2.0, x),
    "scan": lambda x: tf.scan(lambda a, row: a + row, x),
    "foldl": lambda x: tf.foldl(lambda a, row: a * row, x),
    "not": lambda x: x if tf.logical_not(tf.equal(tf.rank(x), 2)) else -x,
    "or": lambda x: x if tf.logical_or(tf.size(x) > 9, tf.shape(x)[0] == 2) else -x,
    "linspace": lambda x: tf.linspace(0.0, 1.0, 3) * x,
    "chosen": lambda x: x[: tf.where(tf.shape(x)[1] > 2, 1, tf.rank(x))],
    "as data": lambda x: tf.where(tf.range(3) > 1, x, tf.cast(tf.shape(x) < 3, tf.float32)[:, None]),
}


@pytest.mark.parametrize("jit", MODES)
@pytest.mark.parametrize("name", LOOPS)
def test_conditions_on_shapes(name, jit):
    """A loop of TensorFlow's over a shape is part of one segment."""
    loop = LOOPS[name]

    def program(function):
        def step(i):
            with tf.GradientTape() as tape:
                x = X * float(i + 1)
                tape.watch(x)
                y = loop(x)
            return y, tape.gradient(tf.nest.flatten(y)[-1], x)

        return function(step)

    fn = run_both(program, CALLS, jit_compile=jit)
    is_one_segment(fn)


@pytest.mark.parametrize("kind", [keras.layers.GRU, keras.layers.LSTM, keras.layers.SimpleRNN])
def test_recurrent_layers_in_a_loop(kind):
    """A recurrent layer whose Python loops over the time is memoized, and so is its gradient."""

    def program(function):
        keras.utils.set_random_seed(0)
        layer, optimizer = kind(3, return_sequences=True), keras.optimizers.SGD(0.001)

        def step(i):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(layer(X[None] * float(n + 1)) ** 2) for n in range(3)])
            optimizer.apply_gradients(
                zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables, strict=True)
            )
            return float(loss)

        return function(step)

    calls = [(i,) for i in range(14)]
    fn = run_both(program, calls)
    is_one_segment(fn)
    assert fn.stats().regions >= 4 * (len(calls) - 8), fn.explain()


def test_other_lengths():
    """Another number of time steps is another path, and comes back to what is known of the first."""
    lengths = [2, 2, 2, 3, 2, 1, 3, 3, 2, 5]

    def program(function):
        keras.utils.set_random_seed(0)
        layer = keras.layers.GRU(3)
        return function(lambda n: layer(tf.reshape(tf.range(2.0 * n * 3.0) / 10.0, [2, n, 3])))

    fn = run_both(program, [(n,) for n in lengths])
    assert (fn.stats().decisions, fn.stats().followed > 2) == (0, True), fn.explain()


@pytest.mark.parametrize("late", [3, 6])
def test_conditions_that_change(late):
    """Numbers, bools and tensors of the program that were the same in the first calls, and then are not."""
    limit = [3]
    give = {
        "number": lambda i: tf.less(2 if i < late else 5, 3),
        "numpy": lambda i: tf.less(np.int64(2 if i < late else 5), 3),
        "tensor": lambda i: tf.constant([1, 2] if i < late else [4, 5]) < 3,
        "attribute": lambda i: tf.greater(limit[0] + (i >= late), 3),
        "bool": lambda i: tf.logical_and(i < late, True),
        "bools": lambda i: tf.logical_or([i < late, i >= late], [False, i % 2 == 0]),
        "numpy bool": lambda i: tf.logical_not(np.bool_(i < late)),
        "chosen": lambda i: tf.where([True, i < late], tf.constant([1, 2]), [3, 4]) > 2,
        "chosen floats": lambda i: tf.where(i < late, 1.0, tf.zeros([2])) > 0.5,
        "shape": lambda i: tf.shape(tf.zeros([2 + (i >= late)]))[0] > 2,
        "chain": lambda i: tf.logical_not(tf.logical_and(tf.less(i, late), tf.equal(i // late, 0))),
    }

    def program(function):
        v = tf.Variable(0.0)

        def step(i):
            taken = []
            for name, condition in give.items():
                found = condition(i)
                taken.append((name, bool(tf.reduce_all(found)), found))
                v.assign_add(tf.reduce_sum(tf.cast(found, tf.float32)))
            return taken, v.read_value()

        return function(step)

    fn = run_both(program, [(i,) for i in range(9)])
    assert fn.stats().followed > 4


def test_a_counter_of_the_program_is_data():
    """A step counter that is compared in every call is no constant: the result follows it through a thousand calls."""

    def program(function):
        count = itertools.count()

        def step():
            n = next(count)
            return tf.where(tf.equal(n % 5, 0), 1.0, -1.0), tf.less(n, 25), n if tf.less(n, 30) else -n

        return function(step)

    fn = run_both(program, [()] * 40)
    assert fn.stats().followed > 30


def test_conditions_given_as_variables_and_results():
    """What a variable holds is not known beforehand, nor what compares floating-point numbers."""

    def program(function):
        n = tf.Variable(0)

        def step(i):
            n.assign_add(1)
            return bool(n < 4), bool(tf.reduce_sum(X) * float(i) > 3.0), tf.equal("a", "a" if i < 5 else "b")

        return function(step)

    fn = run_both(program, CALLS)
    assert fn.stats().decisions > 0


def test_a_condition_passed_on():
    """A known condition may be returned, kept, negated, and given to an assertion."""

    def program(function):
        kept = []

        def step(i):
            fits = tf.equal(tf.shape(X)[0], 2)
            kept.append(fits)
            tf.debugging.Assert(fits, [X])
            tf.debugging.assert_equal(tf.shape(X), [2, 3])
            return fits, ~fits, fits & (i > 2), [k.numpy() for k in kept[-2:]]

        return function(step)

    fn = run_both(program, CALLS)
    assert fn.stats().followed == len(CALLS) - 1
