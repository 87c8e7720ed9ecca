"""Functions that are given ever other sizes: most calls run plainly, those of a size that keeps coming do not."""

import dataclasses
import itertools
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.base.tuning import tuning
from coexec.dispatch.shape_policy import ShapePolicy, Verdict

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(autouse=True)
def few(tune):
    """Sizes count, and the clock does not."""
    tune(sizes_at_once=8, sizes_followed=8)


def times(known, calls, *args, **kwargs):
    """Says which of so many calls are followed."""
    return [bool(known.judge(args, kwargs, lambda: False)) for _ in range(calls)]


def test_few_sizes_are_followed():
    """As many as most programs have, whatever arguments they come in."""
    known = ShapePolicy()
    for n in range(tuning.sizes_at_once):
        assert all(times(known, 20, tf.ones((n, 2)), np.ones(n), [{"x": tf.ones(n)}], 3, None, y="other"))


def test_others_are_followed_once_they_have_come_often():
    """Each counts on its own."""
    known = ShapePolicy()
    for n in range(tuning.sizes_at_once):
        times(known, 1, tf.ones(n))
    found = list(zip(*[times(known, 20, tf.ones(100)), times(known, 20, tf.ones(101))], strict=True))
    assert found == [(n >= tuning.size_often, n >= tuning.size_often) for n in range(20)]
    assert all(times(known, 5, tf.ones(3)))
    assert all(times(known, 20, (7, "a"))[tuning.size_often:])


def test_a_size_that_comes_once_is_not_learnt(tune):
    """The first call's is; another one is followed the second time it comes, if it is among the first few."""
    tune(sizes_at_once=1, sizes_followed=3)
    known = ShapePolicy()
    assert times(known, 1, tf.ones(9)) == [True]
    assert [times(known, 1, tf.ones(n)) for n in range(8)] == 8 * [[False]]
    assert times(known, 3, tf.ones(9)) == 3 * [True]
    assert [known.judge((tf.ones(5),), {}, lambda: False) for _ in range(3)] == [*2 * [Verdict.INVEST], Verdict.FOLLOW]
    assert times(known, 2, tf.ones(6)) == [True, True]
    assert times(known, 4, tf.ones(7)) == [False, False, False, True]


def test_ever_other_lengths_cost_no_more_than_a_few_calls(tune):
    """Beside the first call only those are observed, and compiled, that came again; all values are eager's."""
    tune(sizes_at_once=1, sizes_followed=3)
    (plain, one), (mine, other) = step_of(1), step_of(1)
    step = coexec.function(mine, reduce_retracing=False)
    for n in range(1, 25):
        np.testing.assert_allclose(plain(*batch(n)), step(*batch(n)), rtol=1e-4, atol=1e-6)
    stats = step.stats()
    assert (stats.recorded, stats.imperative, stats.compiles, stats.validated) == (1, 23, 0, 0), step.explain()
    for _ in range(4):
        for n in (7, 8):
            np.testing.assert_allclose(plain(*batch(n)), step(*batch(n)), rtol=1e-4, atol=1e-6)
    assert step.stats().followed == 8
    assert step.stats().launches >= 4, step.explain()
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_one_that_comes_again_is_followed_where_that_can_be_afforded():
    """Not where it comes for the first time: it may be the last."""
    known = ShapePolicy()
    for n in range(tuning.sizes_at_once):
        times(known, 1, tf.ones(n))
    assert [known.judge((tf.ones(100),), {}, lambda: True) for _ in range(4)] == [Verdict.PLAIN] + 3 * [Verdict.FOLLOW]


def test_lists_that_no_operation_is_given():
    """What a step reads by index is no size: calls of 35 combinations of lengths are followed, on one path."""
    weight = tf.Variable(0.5 * tf.ones((4, 4)))
    seen = []

    @coexec.function
    def step(x, boxes):
        seen.append(len(boxes) + sum(map(len, boxes)))
        weight.assign_sub(0.01 * tf.matmul(x, tf.tanh(x @ weight), transpose_a=True))
        return tf.reduce_sum(weight)

    lengths = [[[0.5] * (n % 7), [1.0] * (n % 5)] for n in range(60)]
    for n, boxes in enumerate(lengths):
        step(tf.ones((4, 4)) * n, boxes)
    assert seen == [2 + len(first) + len(second) for first, second in lengths]
    assert "ever other sizes" not in str(step.explain())
    assert step.stats().followed >= 45, step.explain()  # the clock may have some run plainly
    assert step.stats().compiles <= 2  # a graph, and XLA


def test_sizes_matter_again_once_they_do(tune):
    """Sizes of which three in a row taught nothing are followed at once, until one does."""
    tune(sizes_at_once=5, sizes_followed=0)
    known = ShapePolicy()
    for n in range(5):
        assert known.judge((tf.ones(n),), {}, lambda: False)
        known.followed(n < 2)
    for n in range(5, 9):
        assert known.judge((tf.ones(n),), {}, lambda: False)
        known.followed(n == 8)
    assert not known.judge((tf.ones(9),), {}, lambda: False)


def test_lengths_of_lists_of_numbers_do_not_count(tune):
    """What the program makes of these is its own: their lengths need not be sizes. Those of lists of tensors do."""
    tune(sizes_at_once=1, sizes_followed=0)
    known = ShapePolicy()
    assert times(known, 1, [[0] * 3, ["a"]]) == [True]
    for n in range(5):
        assert times(known, 1, [[0] * n, ["a"] * n]) == [True]
    assert times(known, 1, [tf.ones(2)]) == [False]
    assert times(known, 1, [tf.ones(2), tf.ones(2)]) == [False]


def test_batches_that_the_step_makes_itself_are_followed():
    """Of sequences that it is given as lists of numbers, by their lengths."""
    weight = tf.Variable(0.1 * tf.ones((9, 4)))
    seen = []

    def step(sequences):
        long = max(map(len, sequences))
        seen.append(long)
        rows = np.zeros((len(sequences), long), np.int32)
        for row, sequence in zip(rows, sequences, strict=True):
            row[: len(sequence)] = sequence
        h = tf.zeros((len(sequences), 4))
        with tf.GradientTape() as tape:
            for n in range(long):
                h = tf.tanh(0.5 * h + tf.gather(weight, rows[:, n]))
            loss = tf.reduce_sum(h**2)
        weight.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, weight)))
        return loss

    mine = coexec.function(step)
    lengths = [[3 + n % k for k in (4, 5, 7)] for n in range(60)]
    for one in lengths:
        mine([[k % 9 for k in range(n)] for n in one])
    assert seen == [max(one) for one in lengths]
    assert mine.stats().followed >= 40, mine.explain()


def test_the_first_calls_of_a_new_size_are_an_investment():
    """They are not held against following, but for those of the very first size."""
    known = ShapePolicy()
    found = [[known.judge((tf.ones(n),), {}, lambda: False) for _ in range(4)] for n in (3, 4)]
    assert found == [4 * [Verdict.FOLLOW], 2 * [Verdict.INVEST] + 2 * [Verdict.FOLLOW]]


class Graph:
    """What a program hands from hand to hand; only its arrays count, as lists in it may grow with each call."""

    def __init__(self, n):
        self.nodes, self.edges, self.name, self.log = tf.ones([n, 2]), np.ones(3 * n), f"graph {n}", list(range(n))


@dataclasses.dataclass
class Record:
    x: tf.Tensor
    size: int


class Pair(NamedTuple):
    x: tf.Tensor
    y: np.ndarray


class Slotted:
    __slots__ = ("x",)


class Counting:
    asked = 0

    def __getattribute__(self, name):
        Counting.asked += 1
        return object.__getattribute__(self, name)


@pytest.mark.parametrize(
    "make",
    [
        Graph,
        lambda n: [Graph(n), Graph(3)],
        lambda n: Record(tf.ones(n), n),
        lambda n: {"a": Pair(tf.ones(3), np.ones(n))},
        lambda n: tf.ragged.constant([[1], list(range(n))]),
        lambda n: tf.sparse.from_dense(tf.ones([1, n])),
    ],
    ids=["object", "list of objects", "dataclass", "named tuple", "ragged", "sparse"],
)
def test_sizes_of_what_objects_hold(make, tune):
    tune(sizes_at_once=1, sizes_followed=0)
    known = ShapePolicy()
    assert times(known, 2, make(9)) == [True, True]
    assert times(known, 1, make(8)) == [False]
    assert times(known, 2, make(9)) == [True, True]


def test_objects_whose_arrays_are_not_data():
    """A model, a variable, the object of a method; no code of the program runs for the sizes."""
    layer = keras.layers.Dense(3)
    layer.table = np.ones(3)
    known, method = ShapePolicy(), ShapePolicy(is_method=True)
    for n in range(tuning.sizes_at_once + 9):
        layer.table = np.ones(n)
        assert times(known, 1, layer, tf.Variable(tf.ones(n)), Slotted(), Counting(), Graph, np, times) == [True]
        assert times(method, 1, Graph(n), 3) == [True]
    assert Counting.asked == 0


def test_a_methods_own_object_is_no_argument(tune):
    """`self` holds what it likes."""
    tune(sizes_at_once=1, sizes_followed=0)

    class Trainer:
        def __init__(self):
            self.seen = np.zeros(0)

        @coexec.function
        def step(self, x):
            self.seen = np.append(self.seen, 1.0)
            return tf.tanh(x) * 2.0

    trainer = Trainer()
    for _ in range(9):
        trainer.step(tf.ones(4))
    assert len(trainer.seen) == 9
    assert Trainer.step.stats().followed == 8


def test_dtypes_and_numbers_do_not_count():
    """Only sizes are looked at."""
    known = ShapePolicy()
    assert all(times(known, 1, number, str(number), tf.constant([number])) == [True] for number in range(100))


def test_what_is_known_is_bounded():
    """Sizes that come once are forgotten; one that keeps coming is followed again soon."""
    known = ShapePolicy()
    for n in range(3 * tuning.max_sizes):
        times(known, 1, np.broadcast_to(0, (n,)))
    assert len(known._seen) <= tuning.max_sizes
    assert times(known, 2 * tuning.size_often, np.ones((5, 5)))[-1]


def step_of(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = objective(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step, model


def batch(n):
    numbers = np.random.default_rng(n)
    return tf.constant(numbers.normal(size=(n, 4)), tf.float32), tf.constant(numbers.integers(3, size=n), tf.int32)


@pytest.mark.slow
def test_two_hundred_sizes():
    """All are followed, at any size: losses and weights are eager's, and few executables are compiled."""
    (plain, one), (mine, other) = step_of(1), step_of(1)
    step = coexec.function(mine)
    for n in map(int, np.random.default_rng(0).permutation(np.arange(1, 201))):
        np.testing.assert_allclose(plain(*batch(n)), step(*batch(n)), rtol=1e-4, atol=1e-6)
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    stats = step.stats()
    assert stats.imperative == 0, step.explain()
    assert stats.compiles <= 24
    assert stats.launches >= 180


def test_two_hundred_paths(exact_sizes):
    """Losses and weights are eager's, few executables are compiled, and those sizes that were first go on fast."""
    (plain, one), (mine, other) = step_of(1), step_of(1)
    step = coexec.function(mine)
    order = [*range(1, 9)] * 6 + [int(n) for n in np.random.default_rng(0).permutation(np.arange(9, 201))]
    for n in order:
        np.testing.assert_allclose(plain(*batch(n)), step(*batch(n)), rtol=1e-4, atol=1e-6)
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    stats = step.stats()
    assert stats.imperative >= 192
    assert stats.followed >= 40, step.explain()
    assert stats.compiles <= 24
    assert "ever other sizes" in step.explain()
    before = step.stats().launches
    for n in range(1, 9):
        step(*batch(n))
    assert step.stats().launches >= before + 8, step.explain()


def test_a_size_among_many_that_keeps_coming():
    """It is compiled in the end."""
    _, (mine, _) = step_of(1), step_of(1)
    step = coexec.function(mine)
    for n, often in zip(range(1, 41), itertools.repeat(77), strict=False):
        step(*batch(n))
        step(*batch(often))
    before = step.stats().launches
    for _ in range(5):
        step(*batch(77))
    assert step.stats().launches >= before + 5, step.explain()


def test_a_short_last_batch():
    """It costs few executables, however many epochs there are."""
    keras.utils.set_random_seed(1)
    x, y = (part.numpy() for part in batch(16 * 6 + 5))
    model = coexec.accelerate(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    compiles = []
    for _ in range(8):
        model.fit(x, y, batch_size=16, verbose=0)
        compiles.append(model.train_function.stats().compiles)
    stats = model.train_function.stats()
    assert stats.followed >= 40, model.train_function.explain()
    assert compiles[-1] <= 6, compiles  # the graph of each size, of steps together, and XLA's once they have paid
    assert stats.imperative == 0
