"""Sizes that depend on values and that nobody asks for: followed without a cut, and on one path for all of them.

Whoever asks gets eager's answer, at its place. Eager TensorFlow is the oracle.
"""

import numpy as np
import pytest
import tensorflow as tf

from coexec.testing import always_follow
from tests.coexec import launches_a_call, run_both
from tracer.check import check

RNG = np.random.default_rng(6)
CALLS = [
    (tf.constant(RNG.normal(size=[24, 3]), tf.float32), tf.constant(RNG.integers(0, 2 + n % 11, 24), tf.int32))
    for n in range(40)
]


def summed(rows, keys):
    kinds, places = tf.unique(keys)
    return kinds, tf.math.unsorted_segment_sum(rows, places, tf.shape(kinds)[0])


def table_of(body):
    """A step that updates a table by `body(table, rows, keys)`."""

    def make(decorate):
        table = tf.Variable(tf.reshape(tf.range(36.0), [12, 3]))

        @decorate
        def step(rows, keys):
            found = body(table, rows, keys)
            return tf.reduce_sum(table), found

        return step

    return make


def update(table, rows, keys):
    kinds, sums = summed(rows, keys)
    table.scatter_sub(tf.IndexedSlices(0.1 * sums / tf.sqrt(tf.gather(table, kinds) ** 2 + 1.0), kinds))
    return table.read_value()


def maximum(table, rows, keys):
    kinds, sums = summed(rows, keys)
    table.scatter_update(tf.IndexedSlices(tf.nn.relu(sums), kinds))
    return tf.reduce_max(sums, 0), tf.reduce_mean(sums * sums, 0)


def both(table, rows, keys):
    kinds, sums = summed(rows, keys)
    others, more = summed(rows * 2.0, (keys + 3) % 12)
    table.scatter_add(tf.IndexedSlices(tf.concat([sums, more], 0), tf.concat([kinds, others], 0)))
    return table.read_value()


UNASKED = {"update": update, "maximum": maximum, "both": both}


def paths(fn):
    return fn.trace_graph.steps


@pytest.mark.parametrize("name", UNASKED)
def test_one_path_for_all_sizes(name):
    with always_follow():
        fn = run_both(table_of(UNASKED[name]), CALLS[:12])
        before = paths(fn)
        assert launches_a_call(fn, CALLS[12:]) == 1, fn.explain()
    assert paths(fn) == before, "steps were added for a size"
    assert fn.stats().compiles == 1, fn.explain()
    check(fn.trace_graph)


@pytest.mark.parametrize("name", UNASKED)
def test_xla_leaves_them_to_the_graph(name):
    """It compiles for fixed sizes."""
    with always_follow():
        fn = run_both(table_of(UNASKED[name]), CALLS, jit_compile=True)
        assert launches_a_call(fn, CALLS[:6]) <= 2, fn.explain()


def test_xla_compiles_what_is_around_them(tune):
    tune(xla_price=0.0)

    def body(table, rows, keys):
        for _ in range(20):
            rows = tf.tanh(rows * 1.01 + 0.1)
        return update(table, rows, keys)

    with always_follow():
        fn = run_both(table_of(body), CALLS)
        launches_a_call(fn, CALLS)
    assert fn.stats().diverged == 0


ASKING = {
    "shape": lambda kinds, sums: sums.shape[0],
    "shape of the kinds": lambda kinds, sums: list(kinds.shape),
    "static shape in a number": lambda kinds, sums: sums * (1.0 / sums.shape[0]),
    "length": lambda kinds, sums: len(sums),
    "iteration": lambda kinds, sums: [float(row[0]) for row in sums],
    "size": lambda kinds, sums: int(tf.size(kinds)),
    "range": lambda kinds, sums: tf.range(tf.size(kinds)) * 2,
    "tile": lambda kinds, sums: tf.tile([1.0], [tf.shape(sums)[0]]),
    "zeros": lambda kinds, sums: tf.zeros(tf.shape(sums)) + sums,
    "values": lambda kinds, sums: (kinds.numpy().tolist(), sums.numpy().tolist()),
    "boolean mask": lambda kinds, sums: tf.boolean_mask(sums, kinds > 2),
    "reshape": lambda kinds, sums: tf.reshape(sums, [-1]),
    "flat": lambda kinds, sums: tf.reshape(sums, [tf.size(sums)])[:2],
    "sorted": lambda kinds, sums: tf.sort(kinds),
    "array": lambda kinds, sums: np.asarray(sums).sum(0),
    "mean": lambda kinds, sums: tf.reduce_mean(sums),
    "product": lambda kinds, sums: tf.matmul(sums, sums, transpose_a=True),
    "elements": lambda kinds, sums: (kinds[-1], sums[0], sums[:1], sums[..., 1]),
    "the tensors themselves": lambda kinds, sums: (kinds, [sums], {"twice": sums + sums}),
    "ragged": lambda kinds, sums: tf.RaggedTensor.from_row_lengths(tf.range(3), [1, 2]).to_tensor() + tf.size(kinds),
    "rank": lambda kinds, sums: (tf.rank(sums), sums.ndim),
    "like": lambda kinds, sums: tf.ones_like(sums) - sums,
    "stack": lambda kinds, sums: tf.stack([sums, sums]),
    "graph function": tf.function(lambda kinds, sums: tf.reduce_sum(sums) + tf.cast(tf.reduce_max(kinds), tf.float32)),
    "map_fn": lambda kinds, sums: tf.map_fn(lambda row: row * 2.0, sums),
    "py_function": lambda kinds, sums: tf.py_function(lambda v: v * 2.0, [sums], tf.float32),
    "string": lambda kinds, sums: f"{kinds}",
    "one hot": lambda kinds, sums: tf.one_hot(kinds, 12),
    "einsum": lambda kinds, sums: tf.einsum("ij,ik->jk", sums, sums),
    "norm": lambda kinds, sums: tf.clip_by_norm(sums, 1.0),
    "global norm": lambda kinds, sums: tf.clip_by_global_norm([sums], 1.0),
    "truth": lambda kinds, sums: bool(tf.reduce_all(kinds < 12)) and "small",
    "while": lambda kinds, sums: tf.while_loop(lambda i, v: i < tf.size(kinds), lambda i, v: (i + 1, v + 1), (0, 0)),
    "persistent id": lambda kinds, sums: sums.ref() == sums.ref(),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_is_asked(name):
    def body(table, rows, keys):
        kinds, sums = summed(rows, keys)
        found = ASKING[name](kinds, sums)
        table.scatter_add(tf.IndexedSlices(sums, kinds))
        return found

    with always_follow():
        fn = run_both(table_of(body), CALLS)
    assert fn.stats().followed >= 25, fn.explain()
    check(fn.trace_graph)


def test_who_asks_is_cut_in_one_call_only():
    """From the next call on the size is known before: as keys are arguments, that takes no cut."""

    def body(table, rows, keys):
        _, sums = summed(rows, keys)
        return tf.reduce_sum(tf.sqrt(tf.abs(sums))) / sums.shape[0]

    with always_follow():
        fn = run_both(table_of(body), CALLS)
        assert launches_a_call(fn, CALLS[:8]) <= 1, fn.explain()
    assert [cause["count"] for cause in fn.explain().as_dict()["causes"] if cause["id"] == "CX-READ"] == [1]


def test_only_some_calls_ask():
    def body(table, rows, keys):
        kinds, sums = summed(rows, keys)
        table.scatter_add(tf.IndexedSlices(sums, kinds))
        return sums.shape[0] if float(rows[0, 0]) > 0.7 else None

    with always_follow():
        fn = run_both(table_of(body), CALLS)
    assert fn.stats().followed >= 30, fn.explain()


def test_a_tape_needs_shapes():
    def body(table, rows, keys):
        weight = tf.constant([1.0, 2.0, 3.0])
        with tf.GradientTape() as tape:
            tape.watch(weight)
            _, sums = summed(rows * weight, keys)
            loss = tf.reduce_sum(sums**2)
        return tape.gradient(loss, weight)

    with always_follow():
        fn = run_both(table_of(body), CALLS)
    assert fn.stats().followed >= 30, fn.explain()


def test_a_tape_that_opens_later():
    """It watches what has an open size, and records what is computed from it."""

    def body(table, rows, keys):
        _, sums = summed(rows, keys)
        with tf.GradientTape() as tape:
            tape.watch(sums)
            loss = tf.reduce_sum(sums**3)
        return tape.gradient(loss, sums)

    with always_follow():
        run_both(table_of(body), CALLS)


def test_a_tape_in_some_calls():
    """The same lines with and without a tape around them."""
    turn = {"n": 0}

    def body(table, rows, keys):
        turn["n"] += 1
        if turn["n"] % 3 == 0:
            with tf.GradientTape() as tape:
                tape.watch(rows)
                kinds, sums = summed(rows, keys)
            return tape.gradient(sums, rows)
        kinds, sums = summed(rows, keys)
        table.scatter_add(tf.IndexedSlices(sums, kinds))
        return tf.reduce_sum(sums)

    def make(decorate):
        turn["n"] = 0
        return table_of(body)(decorate)

    with always_follow():
        run_both(make, CALLS)


FAILING = {
    "an element that is not there": lambda kinds, sums: sums[5],
    "sizes that do not fit": lambda kinds, sums: sums + tf.ones([4, 3]),
    "rows that do not fit": lambda kinds, sums: tf.concat([sums[:, :1], tf.ones([4, 1])], 1),
    "a product": lambda kinds, sums: tf.matmul(tf.ones([2, 4]), sums),
    "a row of the table": lambda kinds, sums: tf.gather(tf.ones([4, 1]), kinds),
    "a reshape": lambda kinds, sums: tf.reshape(sums, [4, 3]),
}


@pytest.mark.parametrize("name", FAILING)
def test_errors_come_where_eager_raises_them(name):
    def body(table, rows, keys):
        kinds, sums = summed(rows, keys)
        try:
            found = FAILING[name](kinds, sums)
        except (tf.errors.OpError, ValueError, IndexError) as error:
            return type(error).__name__
        table.scatter_add(tf.IndexedSlices(sums, kinds))
        return found

    with always_follow():
        run_both(table_of(body), CALLS)


@pytest.mark.parametrize("name", FAILING)
def test_errors_that_nobody_catches(name):
    def body(table, rows, keys):
        kinds, sums = summed(rows, keys)
        return FAILING[name](kinds, sums)

    with always_follow():
        run_both(table_of(body), CALLS)


def test_a_row_outside_of_the_table_writes_nothing():
    def body(table, rows, keys):
        kinds, sums = summed(rows, keys * 2)
        table.assign_add(tf.ones([12, 3]))
        table.scatter_sub(tf.IndexedSlices(sums, kinds))
        return table.read_value()

    with always_follow():
        run_both(table_of(body), CALLS)


def test_tensors_outlive_the_call():
    kept = []

    def body(table, rows, keys):
        kept.append(summed(rows, keys))
        return [tf.reduce_sum(sums) for _, sums in kept[-3:]], [kinds.shape for kinds, _ in kept[-2:-1]]

    def make(decorate):
        kept.clear()
        return table_of(body)(decorate)

    with always_follow():
        run_both(make, CALLS)
    for (rows, keys), (kinds, sums) in zip(CALLS, kept, strict=True):
        expected = summed(rows, keys)
        assert kinds.numpy().tolist() == expected[0].numpy().tolist()
        np.testing.assert_allclose(sums, expected[1], rtol=1e-5)


def test_options_for_which_sizes_stay_known():
    with always_follow():
        run_both(table_of(update), CALLS, control_flow=True)
        run_both(table_of(update), CALLS, batching=True)


def test_it_can_be_looked_at():
    with always_follow():
        fn = run_both(table_of(update), CALLS[:8])
    assert str(fn.segments())
    assert fn.cost().flops > 0
    assert str(fn.trace_graph)
