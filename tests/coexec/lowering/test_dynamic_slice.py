"""Rows and elements at places that are still to come: `x[n]`, on the device as eagerly, wherever it points."""


import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.control_flow.test_control_flow import TRIPS, same, scalars
from tests.marks import needs_places
from tests.snapshots import assert_same, snapshot

pytestmark = [
    needs_places,
    pytest.mark.usefixtures("eager_to_stage"),
]

TABLE = tf.reshape(tf.range(60.0), [5, 4, 3]) * 0.25


def rows(x):
    n, total = tf.constant(0), tf.zeros([3])
    while x < 100.0:
        row = TABLE[n, -1 - n % 3]
        total, x, n = total + row * TABLE[n][1], x + 9.0 + TABLE[0, n % 4, 0], (n + 2) % 5
    return total, x, n


def columns(x):
    n, total = tf.constant(3, tf.int64), tf.zeros([5, 3])
    while x < 100.0:
        total, x, n = total + TABLE[:, n] - TABLE[:, :, n % 3][:, :3], x + 9.0, n - 1
        if n < -4:
            n = n + 4
    return total, n


def out_of_range(x):
    n, total = tf.constant(0), tf.zeros([4, 3])
    while x < 100.0:
        total, x, n = total + TABLE[n], x + 9.0, n + 1
    return total, n


def too_far_below(x):
    n, total = tf.constant(0), tf.zeros([4, 3])
    while x < 100.0:
        total, x, n = total + TABLE[n], x + 9.0, n - 1
    return total, n


def gradients(x):
    w, table = tf.constant([1.0, 0.5, 0.25]), TABLE * 1.0
    with tf.GradientTape() as tape:
        tape.watch([w, table])
        y, n = x * 1.0, tf.constant(0)
        while y < 100.0:
            y = y + tf.reduce_sum(table[n, 0] * w) + tf.reduce_max(table[:, n % 4, -1 - n % 3]) + 1.0
            n = (n + 1) % 5
    return y, tape.gradient(y, [w, table])


@pytest.mark.parametrize("function", [rows, columns, out_of_range, too_far_below, gradients], ids=lambda f: f.__name__)
def test_in_loops(function, backend):
    """The same values, gradients and errors."""
    same(function, TRIPS, backend)


def test_other_parts_stay_with_python(backend):
    """Whose shapes depend on the place."""

    def function(x):
        n, total = tf.constant(1), tf.zeros([4, 3])
        while x < 100.0:
            total, x, n = total + tf.reduce_sum(TABLE[n:], 0), x + 9.0, (n + 1) % 4
        return total

    same(function, TRIPS, backend, on_device=False)


def test_outside_of_loops(backend):
    """One executable for all places; an error where it points outside."""

    def function(x):
        n = tf.cast(x, tf.int32)
        return TABLE[n] * 2.0 + TABLE[-1, n % 4, 0] + tf.reduce_sum(tf.sin(x) + tf.exp(-x * x) * 3.0)

    fn = coexec.function(function, jit_compile=backend == "xla")
    compiles = []
    with testing.compile_everything():
        for (x,) in scalars(0, 1, 2, -5, 4, -1, 3, 5, 0, -6, 1):
            results = []
            for each in (function, fn):
                try:
                    results.append(snapshot(each(x)))
                except tf.errors.InvalidArgumentError as error:
                    results.append(snapshot(error.with_traceback(None)))
            assert_same(*results, rtol=1e-5, atol=1e-6)
            compiles.append(fn.stats().compiles)
    assert fn.stats().launches >= 5
    assert compiles[-1] == compiles[4], fn.explain()
