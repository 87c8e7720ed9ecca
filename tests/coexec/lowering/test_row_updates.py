"""Rows of variables are updated in place, with the values, the errors and the state of eager."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import coexec
from coexec import testing
from coexec.lowering.emit import Emitter
from coexec.lowering.row_updates import ND_SCATTERS, OPTIMIZERS, SLICE, WRITES
from tests.snapshots import assert_same, snapshot
from tracer.op import signature_of
from tracer.variable_ops import ROW_UPDATES, SPARSE_OPTIMIZER_OPS

ROWS, WIDTH = 11, 3
NUMBERS = {
    "epsilon": 1e-2, "l1": 0.01, "l2": 0.02, "l2_shrinkage": 0.01, "lr": 0.1, "lr_power": -0.5, "momentum": 0.5,
    "rho": 0.9,
}  # fmt: skip


@pytest.fixture
def emitted(monkeypatch):
    """The names of the operations in each graph that is written."""
    found = []

    def build(self, before=Emitter.build):
        body = before(self)
        found.append([node.op for node in body.definition.node_def])
        return body

    monkeypatch.setattr(Emitter, "build", build)
    return found


def update(op, variables, updates, indices):
    """Runs an operation on as many of the variables as it takes."""
    if op == SLICE:
        variables[0][indices[2]].assign(updates[0])
        return
    if op in ND_SCATTERS:
        indices = indices[:, None]
    names = [arg.name for arg in signature_of(op).definition.input_arg]
    count = WRITES[op].variables
    given = {name: v.handle for name, v in zip(names, variables, strict=False)}
    given = {name: given[name] for name in names[:count]}
    given |= {name: NUMBERS[name] for name in names if name in NUMBERS and name not in given}
    given |= {"indices": indices, "grad" if "grad" in names else "updates": updates}
    getattr(tf.raw_ops, op)(**given)


def tables(count):
    """Variables that hold numbers of 1 or more: slots of optimizers are no smaller than squares."""
    return [
        tf.Variable(tf.constant(np.random.default_rng(n).uniform(1.0, 2.0, (ROWS, WIDTH)) + n, tf.float32))
        for n in range(count)
    ]


def ids(number, size=6):
    return np.random.default_rng(number).integers(0, ROWS, size)


def compare(make, calls, **options):
    """Compares results or errors, and variables, after each call with eager's; returns the followed function."""
    (plain, expected), (step, found) = make(), make()
    followed = coexec.function(step, **options)
    with testing.compile_everything():
        for number, given in enumerate(calls):
            outcome = []
            for function, variables in ((plain, expected), (followed, found)):
                try:
                    result = function(tf.constant(given))
                except tf.errors.OpError as error:
                    result = type(error), str(error)
                outcome.append(snapshot((result, [v.numpy() for v in variables])))
            assert_same(*outcome, rtol=1e-4, atol=1e-5, path=f"call {number}: ")
    return followed


def computing(use, count=2):
    """Makes programs that look up rows, compute something of them, and hand it to `use`."""

    def make():
        variables = tables(count)
        weight = tf.Variable(tf.ones([WIDTH, WIDTH]))

        def step(indices):
            rows = tf.nn.embedding_lookup(variables[0], indices)
            values = tf.tanh(rows @ weight)
            updates = 0.1 * values * (1.0 - values * values)
            use(variables, updates, indices, weight)
            weight.assign_sub(0.01 * tf.matmul(rows, updates, transpose_a=True))
            return tf.reduce_sum(values)

        return step, [*variables, weight]

    return make


def test_names_are_those_of_the_tracer():
    assert set(OPTIMIZERS) == SPARSE_OPTIMIZER_OPS
    assert set(WRITES) == ROW_UPDATES
    for op, inputs in WRITES.items():
        names = [arg.name for arg in signature_of(op).definition.input_arg]
        assert names[inputs.indices] in ("indices", "begin")
        assert names[inputs.updates] in ("grad", "updates", "value")


@pytest.mark.parametrize("op", sorted(WRITES))
def test_each_operation(op, emitted):
    """Also of rows that occur twice, of none, and of rows that are not there: then nothing is written."""
    calls = [ids(n) for n in range(18)]
    calls[6][:] = 4
    calls[9][2], calls[13][2] = ROWS, -1
    make = computing(lambda variables, updates, indices, _: update(op, variables, updates, indices), 4)
    followed = compare(make, calls, jit_compile=False)
    stats = followed.stats()
    assert stats.followed >= 15, followed.explain()
    assert stats.launches == 14, followed.explain()  # others fail
    assert all(op in body and "ResourceGather" in body for body in emitted)
    assert not any(name.startswith(("TensorScatter", "TensorStrided")) for body in emitted for name in body)


def _twice(op, variables, updates, indices, weight):
    update(op, variables, updates, indices)
    update(op, variables, updates * 0.5, indices[::-1])


def _rows_after(op, variables, updates, indices, weight):
    update(op, variables, updates, indices)
    again = tf.sqrt(tf.abs(tf.nn.embedding_lookup(variables[0], indices)) + 1.0)
    update("ResourceScatterSub", variables[1:], updates / again, indices)


def _product_after(op, variables, updates, indices, weight):
    update(op, variables, updates, indices)
    again = tf.nn.embedding_lookup(variables[0], indices)
    weight.assign_add(0.001 * tf.matmul(again, again, transpose_a=True))


def _whole_after(op, variables, updates, indices, weight):
    update(op, variables, updates, indices)
    weight.assign_add(0.001 * tf.reduce_sum(variables[0]) * tf.ones([WIDTH, WIDTH]))


def _whole_before(op, variables, updates, indices, weight):
    update(op, variables, updates * tf.reduce_mean(variables[0]), indices)


def _assigned_before(op, variables, updates, indices, weight):
    variables[0].assign(variables[0] * 0.9)
    update(op, variables, updates, indices)


def _assigned_after(op, variables, updates, indices, weight):
    update(op, variables, updates, indices)
    variables[0].assign(tf.clip_by_norm(variables[0], 10.0))


def _failure_after(op, variables, updates, indices, weight):
    update(op, variables, updates, indices)
    weight.assign_add(tf.cast(tf.constant([7]) // tf.cast(indices[:1], tf.int32), tf.float32) * 0.01 * tf.ones([3, 3]))


def _anything_after(op, variables, updates, indices, weight):
    """What cannot fail: a product, a norm, a reduction; it goes into another variable, which is used again."""
    update(op, variables, updates, indices)
    again = tf.nn.embedding_lookup(variables[0], (indices + 1) % ROWS)
    again = tf.nn.softmax(tf.clip_by_norm(again, 1.0, 1) @ weight)
    weight.assign_add(0.001 * tf.matmul(again, again, transpose_a=True))
    weight.assign(weight * 0.99)
    update("ResourceScatterUpdate", variables[2:], again @ weight, indices)


def _value_kept(op, variables, updates, indices, weight):
    """The values of before are those of before, though they were in the variable's memory."""
    before = variables[0].read_value()
    update(op, variables, updates, indices)
    weight.assign_add(0.001 * tf.matmul(before, before, transpose_a=True))


def _elements(op, variables, updates, indices, weight):
    update(op, variables, updates, indices)
    variables[2].scatter_nd_add(tf.stack([indices, indices % WIDTH], 1), updates[:, 0])
    variables[2][indices[0], 1].assign(tf.reduce_sum(tf.nn.embedding_lookup(variables[2], indices)))
    variables[2][3:5].assign(updates[:2])


def _slices_of_other_sizes(op, variables, updates, indices, weight):
    update(op, variables, updates, indices)
    begin = indices[1:2]
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variables[2].handle, begin=begin, end=begin + 1, strides=[1], value=updates[:1]
    )


def _a_random_place(op, variables, updates, indices, weight):
    update(op, variables, updates, indices)
    place = tf.random.stateless_uniform([6], [1, 2], 0, ROWS, tf.int32)
    weight.assign_add(tf.reduce_mean(tf.nn.embedding_lookup(variables[0], place)) * 0.01 * tf.ones([WIDTH, WIDTH]))


def _rows_that_are_the_result(op, variables, updates, indices, weight):
    update(op, variables, updates, tf.cast(tf.reduce_sum(indices)[None] % ROWS, tf.int32) + tf.zeros([6], tf.int32))


def _one_number(op, variables, updates, indices, weight):
    update(op, variables, updates if op in OPTIMIZERS else tf.constant(0.25), indices)


PLACES = [
    _twice, _rows_after, _product_after, _whole_after, _whole_before, _assigned_before, _assigned_after,
    _failure_after, _value_kept, _anything_after, _elements, _slices_of_other_sizes, _a_random_place,
    _rows_that_are_the_result, _one_number,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["graph", "xla"])
@pytest.mark.parametrize("op", ["ResourceScatterAdd", "ResourceSparseApplyAdagradV2"])
@pytest.mark.parametrize("place", PLACES, ids=[place.__name__.strip("_") for place in PLACES])
def test_whatever_else_uses_the_variable(place, op, backend):
    """It is updated in place, or as a value, or the segment ends between; a launch that fails has written nothing."""
    calls = [ids(n) for n in range(16)]
    calls[8][0], calls[11][3] = 0, ROWS  # no number to divide by; no row
    make = computing(lambda *given: place(op, *given), 3)
    followed = compare(make, calls, jit_compile=backend == "xla")
    stats = followed.stats()
    assert stats.followed >= 12, followed.explain()
    assert 12 <= stats.launches <= 32, followed.explain()


@pytest.mark.parametrize("size", [6, 40])
@pytest.mark.parametrize("op", ["ResourceScatterAdd", "ResourceSparseApplyAdagradV2"])
def test_rows_that_occur_more_than_once_are_added_up(op, size, emitted):
    """How many are left depends on values: it is no part of the path, even of a few integers."""

    def use(variables, updates, indices, weight):
        there, places = tf.unique(indices)
        added = tf.math.unsorted_segment_sum(updates, places, tf.shape(there)[0])
        update("ResourceScatterAdd", variables[1:], added * added, there)
        scale = tf.math.rsqrt(tf.nn.embedding_lookup(variables[1], there))
        update(op, variables[::2], added * scale, there)

    followed = compare(computing(use, 3), [ids(n, size) for n in range(24)], jit_compile=False)
    stats = followed.stats()
    assert stats.followed >= 20, followed.explain()
    assert stats.launches >= 18, followed.explain()
    assert stats.compiles <= 4, followed.explain()
    assert {"ResourceScatterAdd", op} <= set(emitted[-1])


def test_lengths_that_differ():
    def use(variables, updates, indices, weight):
        update("ResourceSparseApplyMomentum", variables, updates, indices)

    calls = [ids(n, (5, 17, 30, 6, 21)[n % 5]) for n in range(30)]
    followed = compare(computing(use), calls)
    assert followed.stats().launches >= 20, followed.explain()


def test_as_many_updates_as_rows():
    """Updates of another length are an error, and nothing is written."""

    def use(variables, updates, indices, weight):
        there, _ = tf.unique(indices)
        update("ResourceSparseApplyMomentum", variables, updates, there)

    calls = [np.random.default_rng(n).permutation(40)[:20] % 20 if n != 9 else np.arange(20) // 2 for n in range(14)]

    def make():
        variables = [tf.Variable(tf.ones([40, WIDTH]) * (n + 1.0)) for n in range(2)]

        def step(indices):
            rows = tf.nn.embedding_lookup(variables[0], indices)
            updates = rows
            for _ in range(8):
                updates = tf.tanh(updates) * 1.5
            use(variables, updates, indices, None)
            return tf.reduce_sum(rows)

        return step, variables

    followed = compare(make, calls, jit_compile=False)
    assert followed.stats().followed >= 8, followed.explain()


OPTIMIZERS_OF_KERAS = {
    "legacy Adadelta": lambda: tf_keras.optimizers.legacy.Adadelta(0.5),
    "legacy Adagrad": lambda: tf_keras.optimizers.legacy.Adagrad(0.1),
    "legacy RMSprop": lambda: tf_keras.optimizers.legacy.RMSprop(0.01, momentum=0.5),
    "legacy SGD": lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9),
    "Adagrad": lambda: tf_keras.optimizers.Adagrad(0.1),
    "RMSprop": lambda: tf_keras.optimizers.RMSprop(0.01),
    "SGD": lambda: tf_keras.optimizers.SGD(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS_OF_KERAS)
def test_optimizers_of_keras(name):
    def make():
        tf_keras.utils.set_random_seed(1)
        table, head, optimizer = tf_keras.layers.Embedding(50, 4), tf_keras.layers.Dense(1), OPTIMIZERS_OF_KERAS[name]()
        head(table(tf.constant([1])))
        variables = [*table.trainable_variables, *head.trainable_variables]

        def step(indices):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((head(table(indices)) - 1.0) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        return step, variables

    calls = [np.random.default_rng(n).integers(0, 50, 20) for n in range(16)]
    followed = compare(make, calls, jit_compile=False)
    stats = followed.stats()
    assert stats.followed == 15, followed.explain()
    assert stats.launches <= 15 + 4, followed.explain()  # one a call, but where it learns


@pytest.mark.distrusting
@pytest.mark.parametrize("rows", [1_000, 100_000])
def test_large_tables_are_not_copied(rows, emitted):
    """By validation and by XLA, that is; what a graph reads of them are rows."""

    def make():
        table = tf.Variable(tf.ones([rows, 16]))

        def step(indices):
            found = tf.nn.embedding_lookup(table, indices)
            updates = found
            for _ in range(8):
                updates = tf.tanh(updates) * 1.5
            table.scatter_sub(tf.IndexedSlices(updates, indices))
            return tf.reduce_sum(found)

        return step, [table]

    (plain, [expected]), (step, [found]) = make(), make()
    followed = coexec.function(step, jit_compile=True)
    for number in range(12):
        given = tf.constant(np.random.default_rng(number).integers(0, rows, 40))
        assert_same(snapshot(plain(given)), snapshot(followed(given)), rtol=1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    large = rows * 16 * 4 > 1 << 22
    assert (followed.stats().validated == 0) == large
    assert ("XLA would copy all rows" in str(followed.explain())) == large
    assert any("ReadVariableOp" in body for body in emitted) != large  # by XLA, for the smaller


@pytest.mark.parametrize("op", ["ResourceScatterUpdate", "ResourceSparseApplyAdagradV2", SLICE])
def test_values_that_the_program_keeps(op):
    """Tensors that were read from a variable, or written to it, are the program's, whatever is updated later."""

    def make():
        variables, kept = tables(2), []

        def step(indices):
            kept.append(variables[0].read_value())
            updates = tf.tanh(tf.nn.embedding_lookup(variables[0], indices)) * 0.5
            for _ in range(6):
                updates = tf.tanh(updates) * 1.2
            update(op, variables, updates, indices)
            kept.append(variables[0] + 0.0)
            variables[1].assign(kept[-1])
            del kept[:-6]
            return [*kept]

        return step, variables

    followed = compare(make, [ids(n) for n in range(14)], jit_compile=False)
    assert followed.stats().launches >= 12, followed.explain()
