"""What graphs and XLA are known to change, one fact a test: eager, followed with `graph`, followed with `xla`.

Each names what `tf.function` makes of the program; forks have tests of their own in `test_forks`.
"""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import in_thread, outcomes, unchanged
from tests.snapshots import assert_same

BACKENDS = {"graph": False, "xla": True}


@pytest.fixture(params=BACKENDS)
def compared(request, tune):
    """Compares a program's calls with eager's; returns the decorated function, which was followed and launched."""
    tune(compile_allowance=1000.0)

    def compare(make, calls, follows, exact=True):
        tf.random.set_seed(3)
        expected = outcomes(make(unchanged), calls)
        fn = make(coexec.function(jit_compile=BACKENDS[request.param]))
        tf.random.set_seed(3)
        with testing.compile_everything():
            found = outcomes(fn, calls)
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 1e-6}
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_same(one, other, **tolerance, path=f"call {number}: ")
        stats = fn.stats()
        assert stats.followed >= follows, fn.explain()
        assert stats.launches > 0, fn.explain()
        return fn

    return compare


GOOD, BAD = tf.constant([1.0, 2.0, 4.0]), tf.constant([1.0, 0.0, 4.0])
CALLS = [(x,) for x in (GOOD, GOOD, GOOD, GOOD, BAD, GOOD, BAD, GOOD, GOOD)]


@pytest.mark.parametrize(
    "check",
    [
        lambda x: tf.debugging.check_numerics(1.0 / x, "reciprocal"),
        lambda x: tf.debugging.assert_positive(x, "not above zero"),
        lambda x: tf.debugging.Assert(tf.reduce_all(x > 0.0), [x]),
        lambda x: tf.debugging.assert_all_finite(tf.math.log(x), "logarithm"),
        lambda x: 7 // tf.cast(x, tf.int32),
        lambda x: tf.gather(x, 3 - tf.cast(x, tf.int32)[1] // 2),
        lambda x: tf.linalg.cholesky(tf.linalg.diag(x - 0.5)),
    ],
    ids=["check_numerics", "assert_positive", "Assert", "assert_all_finite", "division", "gather", "cholesky"],
)
def test_checks_fail(compared, check):
    """Under `jit_compile=True` they pass in silence."""

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x):
            v.assign_add(1.0)
            check(x)
            v.assign_add(10.0)
            return x * 2.0, v + 0.0

        return step

    compared(make, CALLS, follows=3)


def test_state_behind_a_failed_assertion(compared):
    """Eager leaves 1; a graph leaves 2, XLA 2 without an error."""
    left = []

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x):
            v.assign_add(1.0)
            tf.debugging.assert_positive(x)
            v.assign_add(1.0)

        def call(x):
            v.assign(0.0)
            try:
                step(x)
            finally:
                left.append(v.numpy())
            return v + 0.0

        call.stats, call.explain = getattr(step, "stats", None), getattr(step, "explain", None)
        return call

    compared(make, CALLS, follows=4)
    assert left == [1.0 if x is BAD else 2.0 for (x,) in CALLS] * 2


def test_printing(compared, tmp_path):
    """`tf.print` and strings refuse to compile; here what they print is eager's, and XLA has the rest."""
    printed = []

    def make(decorate):
        path = f"{tmp_path}/{len(printed)}"

        @decorate
        def step(x):
            y = tf.tanh(x) * 2.0
            tf.print("first", tf.cast(y * 4.0, tf.int32), output_stream=f"file://{path}")
            z = y + 1.0
            print("second", end="")
            text = tf.strings.as_string(tf.cast(x, tf.int32))
            tf.print(text, output_stream=f"file://{path}")
            printed.append(Path(path).read_text())
            return z * y, text

        return step

    compared(make, [(GOOD + n,) for n in range(6)], follows=5, exact=False)
    assert printed[:6] == printed[6:]
    assert printed[5].startswith("first [6 7 7]\n[")


def test_random_numbers(compared):
    """With one seed, eager, graph and XLA draw different numbers."""

    def make(decorate):
        generator = tf.random.Generator.from_seed(5)

        @decorate
        def step(x):
            return (
                tf.random.uniform([4]), tf.random.uniform([4], 0, 1000, tf.int32), tf.nn.dropout(x, 0.5),
                generator.uniform([3]), tf.random.stateless_uniform([3], [1, 2]), x * 2.0,
            )  # fmt: skip

        return step

    compared(make, [(GOOD,)] * 6, follows=5)


def test_a_decision_on_a_tie(compared):
    """Sums of numbers whose sum is exact are equal in every order, so that the branch is eager's."""

    def make(decorate):
        @decorate
        def step(x):
            return x * 2.0 if tf.reduce_sum(x) > tf.reduce_sum(x[::-1]) else x * 3.0

        return step

    compared(make, [(GOOD,), (BAD,)] * 4, follows=6)


def test_arguments_that_do_not_fit(compared):
    """`tf.function` keeps its lock then: the next call from another thread blocks for ever."""
    functions = []

    def make(decorate):
        @decorate
        def step(x, scale):
            return tf.tanh(x) * scale

        functions.append(step)
        return step

    fn = compared(make, [(GOOD, 2.0), (GOOD, 2.0), (GOOD,), (GOOD, 2.0), (GOOD, 2.0, 3.0), (GOOD, 2.0)], 3, False)
    np.testing.assert_allclose(in_thread(lambda: fn(GOOD, 2.0)), functions[0](GOOD, 2.0), rtol=1e-6)


class Own(Exception):
    """Of the program, with an argument that no string is."""

    def __init__(self, reason, number):
        super().__init__(reason, number)
        self.reason, self.number = reason, number


def test_exceptions_of_the_program(compared):
    """In `tf.function` they become `StagingError`, and `except` is never met; a callback's change as eagerly."""

    def callback(x):
        if x[1] == 0.0:
            raise Own("callback", 2)
        return x

    def make(decorate):
        @decorate
        def step(x, where):
            y = tf.tanh(x) * 2.0
            try:
                z = tf.gather(y, tf.cast(x[2], tf.int32) - 2 * tf.cast(x[1] > 0.0, tf.int32))
            except tf.errors.InvalidArgumentError:
                z = y[0]
            if where == "callback":
                z = z + tf.py_function(callback, [x], tf.float32)
            elif where == "python" and x[1] == 0.0:
                raise Own("python", 1)
            return z + y

        return step

    calls = [(x, where) for where in ("none", "python", "callback") for x in (GOOD, GOOD, GOOD, BAD, GOOD, BAD, GOOD)]
    compared(make, calls, follows=10, exact=False)


def test_sizes_that_vary(compared):
    """XLA compiles again for each; here none is wrong, and sizes that have come often enough are launched."""

    def make(decorate):
        @decorate
        def step(x):
            for _ in range(4):
                x = tf.tanh(x) + 0.5
            return tf.reduce_sum(x), x

        return step

    compared(make, [(tf.ones([n % 7 + 1, 2]),) for n in range(28)], follows=26, exact=False)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=lambda d: d.name)
def test_checked_numbers_go_to_xla(compared, dtype):
    """`check_numerics` passes in silence there; here it is a predicate, and keeps nothing from XLA."""

    def make(decorate):
        v = tf.Variable(tf.zeros([3], dtype))

        @decorate
        def step(x):
            y = tf.debugging.check_numerics(tf.cast(1.0 / x, dtype), "reciprocal")
            v.assign_add(tf.debugging.check_numerics(y * 2.0, "twice"))
            return y, v + 0.0

        return step

    overflow = tf.constant([1e-39, 1.0, 1.0])
    calls = [*CALLS, (overflow,), (GOOD * np.nan,), (GOOD,)]
    fn = compared(make, calls, follows=6, exact=False)
    assert "not compiled by XLA" not in fn.explain()
