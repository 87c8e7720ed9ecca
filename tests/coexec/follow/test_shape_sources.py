"""Shapes that values decide, and operations on their own that need nothing pending: right, and without a cut."""

import numpy as np
import pytest
import tensorflow as tf

from coexec.testing import always_follow, compile_everything
from tests.coexec import launches_a_call, run_both
from tracer.check import check

RNG = np.random.default_rng(5)
ROWS = [RNG.normal(size=[24, 3]).astype(np.float32) for _ in range(3)]
KEYS = [RNG.integers(0, high, 24) for high in (6, 4, 6)]  # how many kinds there are differs from call to call
CALLS = [(tf.constant(ROWS[n % 3]), tf.constant(KEYS[n % 3], tf.int32)) for n in range(36)]


def step_of(body, persistent=False):
    """A training step with `body(rows * weight, keys)` in its middle."""

    def make(decorate):
        weight = tf.Variable([1.0, -2.0, 0.5])

        @decorate
        def step(rows, keys):
            with tf.GradientTape(persistent=persistent) as tape:
                result = body(rows * weight, keys)
                loss = tf.reduce_sum(result**2)
            gradient = tape.gradient(loss, weight)
            if persistent:
                gradient += tape.gradient(result, weight)
            weight.assign_sub(1e-3 * gradient)
            return loss, result, gradient, result.shape[0]

        return step

    return make


def kinds_counted(h, keys):
    kinds, place, count = tf.unique_with_counts(keys)
    return tf.math.unsorted_segment_sum(h, place, tf.size(kinds)) / tf.cast(count, tf.float32)[:, None]


def where_of_both(h, keys):
    return tf.concat([tf.gather_nd(h, tf.where(keys > 2)), tf.gather_nd(h, tf.where(keys <= 2))], 0)


WITHOUT_A_CUT = {
    "unique": lambda h, keys: tf.gather(h, tf.unique(keys)[0]),
    "counted": kinds_counted,
    "where": lambda h, keys: tf.gather_nd(h, tf.where(keys > 2)),
    "where of both": where_of_both,
    "boolean mask": lambda h, keys: tf.boolean_mask(h, keys > 2),
    "segments": lambda h, keys: tf.math.unsorted_segment_sum(h, keys, tf.reduce_max(keys) + 1),
    "tile": lambda h, keys: tf.tile(h, [keys[0] + 1, 1]),
    "repeat": lambda h, keys: tf.repeat(h, keys, axis=0),
    "sequence mask": lambda h, keys: h * tf.reduce_sum(tf.sequence_mask(keys, dtype=tf.float32), 1, keepdims=True),
    "bincount": lambda h, keys: h[: tf.size(tf.math.bincount(keys))] * 2.0,
    "list diff": lambda h, keys: tf.gather(h, tf.sparse.from_dense(keys).indices[:, 0]),
    "strings": lambda h, keys: h * tf.strings.to_number(tf.strings.as_string(keys))[:, None],
    "transpose": lambda h, keys: tf.transpose(h, tf.argsort(keys[:2])),
    "permuted twice": lambda h, keys: tf.transpose(tf.transpose(h, tf.argsort(keys[:2])), tf.argsort(-keys[:2])),
    "range": lambda h, keys: tf.gather(h, tf.range(keys[0], keys[0] + 5)),
}


@pytest.mark.parametrize("name", WITHOUT_A_CUT)
@pytest.mark.parametrize("persistent", [False, True])
def test_what_values_of_arguments_decide_needs_no_cut(name, persistent):
    with always_follow():
        fn = run_both(step_of(WITHOUT_A_CUT[name], persistent), CALLS)
        assert launches_a_call(fn, CALLS[:6]) == 1, fn.explain()
    check(fn.trace_graph)


@pytest.mark.parametrize("name", ["where", "boolean mask", "repeat", "segments", "unique"])
def test_a_gradient_beyond_shapes_that_values_decide_is_a_region(name):
    with always_follow():
        fn = run_both(step_of(WITHOUT_A_CUT[name]), CALLS)
        before = fn.stats().regions
        for arguments in CALLS[:6]:
            fn(*arguments)
    assert fn.stats().regions - before >= 3, fn.explain()


def test_a_gradient_whose_result_decides_a_shape_stays_a_region():
    """A sparse update deduplicates indices that the gradient has put together: they stay part of the gradient."""

    def make(decorate):
        weight, table = tf.Variable(tf.ones([8, 4]) * 0.1), tf.Variable(tf.ones([6, 8]))

        @decorate
        def step(rows, keys):
            with tf.GradientTape() as tape:
                state = tf.zeros([4, 4])
                for part in tf.unstack(tf.reshape(keys, [6, 4])):
                    state = tf.tanh(tf.gather(table, part) @ weight + state)
                loss = tf.reduce_sum(state**2)
            dense, sparse = tape.gradient(loss, [weight, table])
            weight.assign_sub(0.1 * dense)
            indices, places = tf.unique(sparse.indices)
            summed = tf.math.unsorted_segment_sum(sparse.values, places, tf.shape(indices)[0])
            table.scatter_sub(tf.IndexedSlices(0.1 * summed, indices))
            return loss, indices

        return step

    with always_follow():
        fn = run_both(make, CALLS)
        before = fn.stats()
        assert launches_a_call(fn, CALLS[:6]) == 1, fn.explain()
    assert fn.stats().regions - before.regions == 12, fn.explain()  # the gradient, and the update
    check(fn.trace_graph)


@pytest.mark.parametrize("name", WITHOUT_A_CUT)
def test_sizes_that_never_come_again(name):
    """Other keys in every call, among them none that is picked; of one kind at the end."""
    rng = np.random.default_rng(8)
    keys = [rng.integers(0, 1 + n % 7, 24) for n in range(24)] + [np.zeros(24), np.full(24, 3), np.zeros(24)]
    calls = [(tf.constant(ROWS[n % 3]), tf.constant(k, tf.int32)) for n, k in enumerate(keys)]
    with always_follow():
        fn = run_both(step_of(WITHOUT_A_CUT[name]), calls)
    assert fn.stats().followed >= 20, fn.explain()
    assert fn.stats().diverged == 0, fn.explain()
    check(fn.trace_graph)


def test_what_a_model_decides_is_cut_once():
    def body(h, keys):
        for _ in range(4):  # more than may run at once
            h = tf.tanh(h) * 1.5
        return tf.boolean_mask(h, h[:, 0] > 0.1) * 2.0

    with always_follow():
        fn = run_both(step_of(body), CALLS)
        assert launches_a_call(fn, CALLS[:6]) == 2, fn.explain()


def test_one_value_decides_several_shapes():
    def body(h, keys):
        count = tf.reduce_max(keys) + 1
        sums = tf.math.unsorted_segment_sum(h, keys, count)
        return tf.tile(sums, [count, 1]) + tf.reshape(tf.cast(tf.range(3 * count * count), tf.float32), [-1, 3])

    with always_follow():
        fn = run_both(step_of(body), CALLS)
        assert launches_a_call(fn, CALLS[:6]) == 1, fn.explain()


def test_a_value_that_decided_a_shape_is_also_data():
    """What made the number of segments is computed with, too, and read by Python."""
    seen = []

    def body(h, keys):
        count = tf.reduce_max(keys) + 1
        seen.append(int(count))
        return tf.math.unsorted_segment_sum(h, keys, count) / tf.cast(count * 2, tf.float32)

    with always_follow():
        fn = run_both(step_of(body), CALLS)
    assert seen[: len(CALLS)] == seen[len(CALLS) :]
    assert fn.stats().followed == len(CALLS) - 1


def test_a_number_decides_in_a_loop():
    def body(h, keys):
        parts = []
        for k in range(3):
            parts.append(tf.tile(h[:1], [tf.reduce_sum(tf.cast(keys == k, tf.int32)), 1]))
        return tf.concat(parts, 0)

    with always_follow():
        fn = run_both(step_of(body), CALLS)
        assert launches_a_call(fn, CALLS[:6]) == 1, fn.explain()


# Operations on their own that need nothing pending.


def test_a_lookup_in_a_table():
    def make(decorate):
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(tf.range(6), tf.range(6, dtype=tf.float32) * 2.0), -1.0
        )
        return step_of(lambda h, keys: h * table.lookup(keys)[:, None])(decorate)

    with always_follow():
        fn = run_both(make, CALLS)
        assert launches_a_call(fn, CALLS[:6]) == 1, fn.explain()


def test_a_table_that_the_step_writes():
    """A look-up sees what was inserted before it, and nothing that is inserted behind it."""

    def make(decorate):
        table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, -1.0)
        weight = tf.Variable(1.0)

        @decorate
        def step(rows, keys):
            before = table.lookup(keys)
            table.insert(keys[:2], tf.cast(keys[:2], tf.float32) * weight)
            between = table.lookup(keys)
            weight.assign_add(1.0)
            table.insert(keys[2:4], tf.cast(keys[2:4], tf.float32) * weight)
            return before, between, table.lookup(keys), table.size(), weight.read_value()

        return step

    with always_follow():
        fn = run_both(make, CALLS)
    assert fn.stats().followed == len(CALLS) - 1, fn.explain()


def test_a_variable_of_each_call():
    def body(h, keys):
        mean = tf.Variable(tf.zeros([3]))
        mean.assign(tf.reduce_mean(h, axis=0))
        return h - mean

    with always_follow():
        fn = run_both(step_of(body), CALLS)
        assert launches_a_call(fn, CALLS[:6]) == 1, fn.explain()


# In every fourth call, a word is no number.
WORDS = [(tf.constant(ROWS[n % 3][:3]), tf.constant(["1", "2", "x" if n % 4 == 3 else "3"])) for n in range(20)]


@pytest.mark.parametrize("caught", [False, True])
def test_an_operation_on_its_own_that_fails_finds_what_came_before_it_done(caught):
    def make(decorate):
        total = tf.Variable(tf.zeros([3]))
        after = tf.Variable(0.0)

        @decorate
        def step(rows, words):
            total.assign_add(tf.reduce_sum(rows, axis=0))
            if caught:
                try:
                    numbers = tf.strings.to_number(words)
                except tf.errors.InvalidArgumentError as error:
                    return total.read_value(), str(error)[:40], after.read_value()
            else:
                numbers = tf.strings.to_number(words)
            after.assign_add(tf.reduce_sum(numbers))
            return rows * numbers[:, None] + total, after.read_value()

        def observed(rows, words):
            try:
                return step(rows, words), total.numpy(), after.numpy()
            except tf.errors.InvalidArgumentError as error:
                return type(error).__name__, error.message[:40], total.numpy(), after.numpy()

        observed.decorated = step
        return observed

    with always_follow():
        fn = run_both(make, WORDS).decorated
    stats = fn.stats()
    assert stats.followed >= 15, fn.explain()


def test_an_operation_that_is_pending_fails_before_one_on_its_own():
    """The pending one is out of range in some calls, in which the other would fail, too."""

    def make(decorate):
        weight = tf.Variable([1.0, 2.0, 3.0])

        @decorate
        def step(at, words):
            picked = tf.gather(weight * 2.0, at)
            return picked * tf.strings.to_number(words)

        return step

    good, bad = tf.constant([0, 1]), tf.constant([0, 7])
    numbers, letters = tf.constant(["1", "2"]), tf.constant(["1", "z"])
    calls = [[(good, numbers), (bad, numbers), (good, letters), (bad, letters)][n // 2 % 4] for n in range(24)]
    with always_follow():
        fn = run_both(make, calls)
    assert fn.stats().followed >= 10, fn.explain()


def test_python_in_an_operation_sees_what_came_before_it():
    """It is declared stateless, but runs Python, which reads a variable that has a pending write."""

    def make(decorate):
        weight = tf.Variable(1.0)

        @decorate
        def step(rows, keys):
            weight.assign_add(1.0)
            seen = tf.numpy_function(lambda: weight.numpy() * 2.0, [], tf.float32, stateful=False)
            return rows * seen

        return step

    fn = run_both(make, CALLS[:12])
    assert fn.stats().followed >= 8, fn.explain()


def test_an_operation_that_may_fail_in_a_try_needs_no_cut():
    def make(decorate):
        weight = tf.Variable([1.0, -2.0, 0.5])

        @decorate
        def step(rows, keys):
            h = tf.tanh(tf.exp(rows * weight) - 1.0) * 0.5 + tf.sin(rows)
            try:
                picked = tf.gather(keys * 2, keys[:4])
            except tf.errors.InvalidArgumentError:
                return h * 0.0
            return h * tf.cast(tf.reduce_sum(picked), tf.float32)

        return step

    calls = [(rows, keys if n % 7 < 6 else keys + 30) for n, (rows, keys) in enumerate(CALLS)]
    with always_follow():
        fn = run_both(make, calls)
        assert launches_a_call(fn, CALLS[:6]) == 1, fn.explain()


@pytest.mark.parametrize("lengths", [(7, 5), (5, 7), (4, 6, 5)])
def test_labels_of_a_small_batch_are_data(lengths):
    """Six integers may be a shape: in a gradient of what they index they are none, at the second length either."""

    def make(decorate):
        start, table = tf.Variable(tf.zeros(3)), tf.Variable(tf.ones([9, 3]))

        @decorate
        def step(words, tags):
            with tf.GradientTape() as tape:
                x = tf.gather(table, words)
                score = tf.gather(start, tags[:, 0]) + tf.gather(x[:, 0], tags[:, 0], batch_dims=1)
                for t in range(1, tags.shape[1]):
                    score += tf.gather(x[:, t], tags[:, t], batch_dims=1)
                loss = tf.reduce_mean(score**2)
            for variable, gradient in zip((start, table), tape.gradient(loss, (start, table)), strict=True):
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
            return loss, start.value()

        return step

    rng = np.random.default_rng(1)
    calls = [
        (rng.integers(0, 9, [6, n]).astype(np.int32), rng.integers(0, 3, [6, n]).astype(np.int32))
        for n in lengths * (32 // len(lengths))
    ]
    with always_follow(), compile_everything():
        step = run_both(make, calls[:-6])
        before = step.stats()
        for arguments in calls[-6:]:
            step(*arguments)
        after = step.stats()
    assert (after.launches - before.launches, after.regions - before.regions) == (6, 6)
    assert after.compiles == before.compiles
    check(step.trace_graph)
