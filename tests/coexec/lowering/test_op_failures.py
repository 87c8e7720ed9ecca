"""Failures of operations at sizes and dtypes at which they have not run: at their place, before later writes."""

import keras
import pytest
import tensorflow as tf

import coexec
from coexec.lowering import op_failures


def _assign(x):
    return tf.raw_ops.TensorStridedSliceUpdate(input=tf.zeros([6]), begin=[0], end=[4], strides=[1], value=x[:4])


# By name: an operation, sizes at which it succeeds, and some at which it fails, though its shape is known.
OPERATIONS = {
    "slice": (lambda x: tf.slice(x, [1], [2]), range(4, 12), (2, 1)),
    "reflect": (lambda x: tf.pad(x, [[2, 2]], "REFLECT"), range(4, 12), (2, 1)),
    "symmetric": (lambda x: tf.pad(x, [[3, 0]], "SYMMETRIC"), range(4, 12), (2, 1)),
    "argmax": (lambda x: tf.cast(tf.argmax(x[2:]), tf.float32), range(4, 12), (2,)),
    "band": (lambda x: tf.linalg.band_part(tf.stack([x, x], 1), 3, 0), range(4, 12), (2, 1)),
    "update": (_assign, range(4, 12), (3, 2)),
    "keras": (lambda x: keras.ops.slice(x, (1,), (2,)), range(4, 12), (2, 1)),
}  # fmt: skip


def _sizes(good, bad):
    """Sizes in turn, the good ones often enough for a graph that is launched at any of them."""
    yield from [*good, *good]
    for size in bad:
        yield from (size, good[0], size, good[-1], size, size)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_that_fails_at_a_new_size_writes_nothing_after_the_failure(name):
    operation, good, bad = OPERATIONS[name]

    def program(decorate):
        written = tf.Variable(0.0)

        @decorate
        def step(x):
            y = operation(x * 1.0)
            written.assign_add(1.0)
            for _ in range(8):
                y = tf.sin(y) + 1.0
            return tf.reduce_sum(y)

        found = []
        for size in _sizes(good, bad):
            try:
                found.append(round(float(step(tf.range(float(size)))), 4))
            except tf.errors.InvalidArgumentError:
                found.append("failed")
            found.append(float(written))
        return found, step

    wanted, _ = program(lambda function: function)
    found, step = program(coexec.function)
    assert "failed" in wanted
    assert [pytest.approx(v, rel=1e-4) if isinstance(v, float) else v for v in wanted] == found
    assert step.stats().launches > 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_handler_catches_a_failure_at_a_new_size(name):
    operation, good, bad = OPERATIONS[name]

    def program(decorate):
        events, count = [], tf.Variable(0)

        @decorate
        def step(x):
            try:
                operation(x * 1.0)
            except tf.errors.InvalidArgumentError:
                events.append("caught")
                count.assign_add(100)
                return "caught"
            count.assign_add(1)
            return "done"

        found = []
        for size in [*[good[0]] * 3, bad[0], good[0], *bad, good[0], *bad]:
            found += [step(tf.range(float(size))), int(count)]
        return found, events

    wanted = program(lambda function: function)
    assert wanted[1]
    assert program(coexec.function) == wanted


def test_a_handler_catches_that_a_new_dtype_has_no_kernel():
    def program(decorate):
        @decorate
        def step(x):
            try:
                return tf.matmul(x, x).dtype.name
            except tf.errors.NotFoundError:
                return "no kernel"

        order = [tf.float32] * 3 + [tf.uint8, tf.uint8, tf.float32, tf.uint8, tf.float64, tf.float32]
        return [step(tf.cast(tf.eye(2), dtype)) for dtype in order]

    wanted = program(lambda function: function)
    assert "no kernel" in wanted
    assert program(coexec.function) == wanted


def test_a_handler_costs_no_cut_once_the_operation_has_run():
    @coexec.function
    def step(x):
        try:
            y = tf.slice(x * 2.0, [1], [2])
        except tf.errors.InvalidArgumentError:
            y = tf.zeros([2])
        return tf.reduce_sum(tf.sin(y) * 2.0 + 1.0)

    for size in (4, 5) * 20:
        step(tf.ones([size]))
    before = step.stats()
    for size in (4, 5) * 4:
        step(tf.ones([size]))
    after = step.stats()
    assert after.launches - before.launches <= after.followed - before.followed
    assert after.diverged == before.diverged


def test_operations_that_fail_by_size_are_among_those_that_no_value_makes_fail():
    assert op_failures.SIZED <= op_failures.TOTAL
