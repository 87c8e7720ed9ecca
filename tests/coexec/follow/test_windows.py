"""Slices at places that change are followed as one, at all places that have the same size, with eager's values."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.testing import compile_everything
from tests.coexec import run_both
from tracer.show import parse

ROWS = np.arange(60, dtype=np.float32).reshape(20, 3) / 7.0


def deep(x):
    """Enough operations to be launched."""
    for _ in range(5):
        x = tf.tanh(x) * 1.1 + 0.1
    return x


def stepping(slice_of, rows=ROWS, kind=tf.constant):
    """Makes programs that slice at the place that each call is given, and return what they compute of that."""

    def make(decorate):
        held = kind(rows)

        @decorate
        def step(n):
            return deep(slice_of(held, n)), tf.shape(slice_of(held, n))

        return step

    return make


PLACES = [0, 4, 8, 12, 16, 0, 4, 8, 12, 2, 7, 9, 11, 3]
SLICES = {
    "a batch": lambda x, n: x[n : n + 4],
    "a batch of NumPy's numbers": lambda x, n: x[np.int64(n) : np.int64(n + 4)],
    "columns": lambda x, n: x[:, n % 2 : n % 2 + 2],
    "rows and columns": lambda x, n: x[n : n + 4, n % 2 : n % 2 + 2],
    "a row's columns": lambda x, n: x[n, n % 2 : n % 2 + 2],
    "rows of a column": lambda x, n: x[n : n + 4, n % 3],
    "from the end": lambda x, n: x[n - 20 : n - 16 or None],
    "beyond the end": lambda x, n: x[n + 100 : n + 104],
    "none": lambda x, n: x[n:n],
    "with a new axis": lambda x, n: x[None, n : n + 4],
    "with an ellipsis": lambda x, n: x[..., n % 2 : n % 2 + 2],
    "every other row": lambda x, n: x[n : n + 8 : 2],
    "backwards": lambda x, n: x[n + 3 : n : -1] if n else x[3:0:-1],
    "by the operation": lambda x, n: tf.strided_slice(x, [n, 0], [n + 4, 2]),
    "all after it": lambda x, n: x[n:],
    "all before it": lambda x, n: x[: n + 1],
}


@pytest.mark.parametrize("kind", [tf.constant, tf.Variable])
@pytest.mark.parametrize("backend", ["graph", "xla"])
@pytest.mark.parametrize("name", SLICES)
def test_slices(name, backend, kind):
    """The last batch may be smaller, and is another path."""
    with compile_everything():
        step = run_both(stepping(SLICES[name], kind=kind), [(n,) for n in PLACES * 2], jit_compile=backend == "xla")
    assert step.stats().diverged <= 1, step.explain()  # where Python asks for another operation
    assert step.stats().followed >= 2 * len(PLACES) - 2, step.explain()


@pytest.mark.parametrize("name", [*SLICES][:6])
def test_all_places_are_one_path(name):
    step = run_both(stepping(SLICES[name]), [(n,) for n in PLACES], jit_compile=False)
    stats = step.stats()
    assert stats.followed == len(PLACES) - 1
    assert stats.launches >= len(PLACES) - 4, step.explain()
    assert stats.compiles <= 3, step.explain()


def test_a_smaller_batch_at_the_end():
    step = run_both(stepping(lambda x, n: x[n : n + 6]), [(n,) for n in [0, 6, 12, 18] * 8], jit_compile=False)
    stats = step.stats()
    assert stats.compiles <= 4, step.explain()
    assert stats.launches >= 26, step.explain()


def test_sizes_that_keep_changing():
    rng = np.random.default_rng(0)
    calls = [tuple(map(int, rng.integers(0, 12, 2))) for _ in range(40)]

    def make(decorate):
        held = tf.constant(ROWS)

        @decorate
        def step(begin, size):
            part = held[begin : begin + size]
            return deep(part), len(part), [float(v) for v in tf.reduce_sum(part, 1)]

        return step

    run_both(make, calls)


def test_the_number_of_sizes_is_bounded(monkeypatch):
    """Beyond, a slice of another size runs on its own, and what comes behind it is followed."""
    monkeypatch.setattr("tracer.windows.MAX_SIZES", 4)

    def make(decorate):
        held = tf.constant(ROWS)

        @decorate
        def step(begin, size):
            return deep(held[begin : begin + size])

        return step

    step = run_both(make, [(n % 5, 1 + n // 3) for n in range(60)])
    node = next(node for node in step.trace_graph.nodes if node.op == "StridedSlice")
    assert len(node.windows) == 4
    assert node.host is not None


def test_a_place_that_is_not_there():
    """It is an error of the operation's, as eagerly, and what came before is done."""

    def make(decorate):
        held, count = tf.constant(ROWS), tf.Variable(0)

        @decorate
        def step(n):
            count.assign_add(1)
            try:
                found = deep(held[n, n % 2 : n % 2 + 2])
            except tf.errors.InvalidArgumentError as error:
                found = str(error)
            return found, count.numpy()

        return step

    step = run_both(make, [(n,) for n in [0, 3, 5, 19, 20, 2, -1, -21, 4, 7, 25, 6]])
    assert step.stats().followed >= 8


def test_places_that_are_tensors():
    def make(decorate):
        held, place = tf.constant(ROWS), tf.Variable(0)

        @decorate
        def step(n):
            place.assign(n)
            return deep(held[place : place + 4]), deep(held[tf.constant(n) : tf.constant(n) + 4])

        return step

    run_both(make, [(n,) for n in PLACES])


@pytest.mark.parametrize("backend", ["graph", "xla"])
def test_gradients(backend):
    """What is sliced may be differentiated: the gradient goes to the same place."""

    def make(decorate):
        held, weight = tf.Variable(ROWS), tf.Variable(tf.ones([3, 3]))

        @decorate
        def step(n):
            with tf.GradientTape(persistent=True) as tape:
                part = held[n : n + 4]
                loss = tf.reduce_sum(deep(part @ weight) ** 2) + tf.reduce_sum(held[n + 1, n % 2 : n % 2 + 2])
            gradients = tape.gradient(loss, [held, weight, part])
            weight.assign_sub(0.001 * gradients[1])
            return loss, gradients

        return step

    with compile_everything():
        step = run_both(make, [(n,) for n in PLACES], jit_compile=backend == "xla")
    assert step.stats().diverged == 0, step.explain()
    assert step.stats().followed == len(PLACES) - 1, step.explain()


def test_batches_of_a_training_step():
    """Of two arrays that are sliced alike, in a step that is launched at once."""

    def make(decorate):
        keras.utils.set_random_seed(3)
        rng = np.random.default_rng(1)
        features = tf.constant(rng.normal(size=(64, 5)), tf.float32)
        labels = tf.constant(rng.integers(0, 3, 64))
        model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)])
        model.build([None, 5])
        optimizer = keras.optimizers.SGD(0.1)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @decorate
        def step(start, size):
            batch, wanted = features[start : start + size], labels[start : start + size]
            with tf.GradientTape() as tape:
                loss = loss_of(wanted, model(batch, training=True))
            gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return step

    step = run_both(make, [(n, 16) for n in [0, 16, 32, 48] * 6])
    stats = step.stats()
    assert stats.followed == 23
    assert stats.launches <= 23 + 6, step.explain()
    assert stats.compiles <= 4, step.explain()


def test_what_is_sliced_has_other_sizes():
    """Two sizes of an array, and places in each."""
    arrays = [tf.constant(np.arange(n * 3, dtype=np.float32).reshape(n, 3)) for n in (20, 30, 40, 20, 25)]

    def make(decorate):
        @decorate
        def step(rows, n):
            return deep(rows[n : n + 4]), rows[n : n + 2, 1]

        return step

    step = run_both(make, [(arrays[n % 5], n % 13) for n in range(60)])
    assert step.stats().followed >= 40, step.explain()


def test_places_in_a_loop():
    """Each turn has a place of its own, and all of them move."""

    def make(decorate):
        held = tf.constant(ROWS)

        @decorate
        def step(n):
            total = tf.zeros([2, 3])
            for turn in range(5):
                total = total + tf.tanh(held[n + turn : n + turn + 2])
            return total

        return step

    step = run_both(make, [(n,) for n in PLACES], jit_compile=False)
    assert step.stats().compiles <= 3, step.explain()


@pytest.mark.parametrize("options", [{"control_flow": True}, {"batching": True}, {"regions": False}])
def test_with_options(options):
    step = run_both(stepping(SLICES["rows and columns"]), [(n,) for n in PLACES * 2], **options)
    assert step.stats().followed >= len(PLACES), step.explain()


def test_other_dtypes():
    for values in (np.arange(20), np.array([f"{n}" for n in range(20)], object), np.arange(20) > 9):
        held = tf.constant(values)

        def make(decorate, held=held):
            return decorate(lambda place: held[place : place + 3])

        assert run_both(make, [(n,) for n in PLACES]).stats().followed == len(PLACES) - 1


def test_text_of_the_graph():
    """What has been recorded can be read back, but for the windows, which are learnt again."""
    step = coexec.function(lambda n: deep(tf.constant(ROWS)[n : n + 4]))
    for n in PLACES:
        step(n)
    text = str(step.trace_graph)
    assert str(parse(text)) == text
