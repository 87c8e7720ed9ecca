"""Indices of tensors: whatever the index is, followed or not, the result is eager's."""

import itertools
import random
import sys

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import run_both
from tracer.check import check

X = tf.reshape(tf.range(120.0), [2, 3, 4, 5])

INDICES = [
    0, -1, 1, slice(None), slice(1, None), slice(None, -1), slice(0, 2), slice(None, None, 2), slice(None, None, -1),
    (0, 1), (slice(None), 1), (slice(None), -1, slice(1, 3)), (Ellipsis, 0), (0, Ellipsis), Ellipsis, None,
    (None, 0), (slice(None), None, 1), (Ellipsis, None), (0, 0, 0, 0), (slice(2, 1),), slice(0, 0),
    np.int64(1), np.int32(0), True, (slice(np.int64(1), None),), slice(0, None, 1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


def outcome(run):
    """What a call returned, or which error it raised."""
    try:
        return run().numpy()
    except (TypeError, ValueError, IndexError, tf.errors.OpError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("lazy", [True, False])
def test_indices(index, lazy):
    """Values and shapes, of tensors that are still to come and of those that are there."""

    def step(x):
        x = x + 1.0 if lazy else x
        return x[index] * 2.0

    fn = coexec.function(step)
    right = outcome(lambda: step(X))
    for _ in range(4):
        found = outcome(lambda: fn(X))
        if isinstance(right, tuple):
            assert found == right
        else:
            np.testing.assert_array_equal(found, right)
            assert found.shape == right.shape


@pytest.mark.parametrize("index", [7, (0, 9), (0, 0, 0, 0, 0), (Ellipsis, Ellipsis), slice(None, None, 0), 1.5, "a"])
def test_errors(index):
    """A wrong index raises eager's error, in recorded and followed calls."""

    def step(x, index):
        return (x + 1.0)[index] * 2.0

    right = outcome(lambda: step(X, index))
    assert isinstance(right, tuple)
    fn = coexec.function(step)
    for _ in range(3):
        assert outcome(lambda: fn(X, index)) == right
        assert not isinstance(outcome(lambda: fn(X, 0)), tuple)


def test_other_tensors_and_other_indices():
    """The same line on other tensors and with other indices, as they change from call to call."""

    def step(x, y, i):
        return x[:, i % 3] + y[0, i % 3 : i % 3 + 1] + (x * 2.0)[..., -1, :][:, i % 3, None]

    fn = coexec.function(step)
    for i in range(12):
        other = X + float(i)
        pair = (X, other) if i % 2 else (other, X)
        np.testing.assert_array_equal(fn(*pair, i).numpy(), step(*pair, i).numpy())


@pytest.mark.parametrize("lazy", [True, False])
def test_known_indices_are_not_prepared_again(lazy):
    """In a call that knows the index, TensorFlow's own Python for it does not run; in the first it does."""

    def step(x):
        x = x + 1.0 if lazy else x
        return x[:, 1, ..., None] * 2.0

    fn = coexec.function(step)
    prepared = []
    for _ in range(6):
        names = []
        sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)  # noqa: B023
        try:
            fn(X)
        finally:
            sys.setprofile(None)
        prepared.append("_slice_helper" in names)
    assert prepared[0] and not any(prepared[3:])  # noqa: PT018


def test_gradients_of_indices():
    """Tapes see the same operation."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(x[:, 1] * x[0, 2] ** 2.0) + tf.reduce_sum(x[..., None, 2])
        return tape.gradient(y, x)

    fn = coexec.function(step)
    for _ in range(4):
        np.testing.assert_allclose(fn(X).numpy(), step(X).numpy(), rtol=1e-6)
    assert fn.stats().followed == 3


def test_variables_and_masks_go_their_own_way():
    """What TensorFlow itself has to think about: variables, masks, tensors as indices, assignment to a part."""
    variable = tf.Variable(X)

    def step(x, i):
        variable[0, 0].assign(variable[0, 1])
        return variable[:, 0], x[x > 3.0], x[i], x[i:, 0], tf.gather(x, i)

    fn = coexec.function(step)
    for i in range(4):
        index = tf.constant(i % 2)
        for one, other in zip(fn(X, index), step(X, index), strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("pick", ["index", "gather", "slice"])
def test_choices_between_two_are_no_paths(pick):
    """Six choices a call are 64 combinations: positions that differed between two recorded calls are fed, too."""
    rng = random.Random(3)
    calls = [(tuple(rng.randrange(2) for _ in range(6)), n > 1) for n in range(24)]
    calls[:2] = ((0,) * 6, False), ((1,) * 6, True)  # the second does something else first, and is recorded, too
    pick = {
        "index": lambda p, n: p[n],
        "gather": lambda p, n: tf.gather(p, n),
        "slice": lambda p, n: tf.slice(p, [n], [1])[0],
    }[pick]

    def make(decorate):
        weight = tf.Variable([0.3, -0.2])

        @decorate
        def step(actions, scales):
            if scales:
                weight.assign(weight * 0.9)
            with tf.GradientTape() as tape:
                chosen = [pick(tf.nn.log_softmax(weight * (n + 1.0)), action) for n, action in enumerate(actions)]
                loss = -tf.reduce_sum(tf.stack(chosen))
            gradient = tape.gradient(loss, weight)
            weight.assign_sub(0.01 * gradient)
            return loss, gradient

        return step

    with testing.always_follow():
        fn = run_both(make, calls)
        before = fn.stats()
        for actions in itertools.product([0, 1], repeat=6):
            fn(actions, True)
    stats = fn.stats()
    assert stats.compiles == before.compiles <= 4, fn.explain()
    assert stats.diverged == before.diverged == 1, fn.explain()
    assert stats.launches - before.launches == stats.regions - before.regions == 64, fn.explain()
    check(fn.trace_graph)


SLICES = {
    "to the end": lambda row: ([row, 0], [-1, -1]),
    "one": lambda row: ([1 + row, 2], [1, 1]),
    "none": lambda row: ([1 + row, 0], [0, 4]),
    "int64": lambda row: (np.int64([row, 1]), np.int64([2, -1])),
    "the same": lambda row: ([1, 1], [2, 2]),
}


@pytest.mark.parametrize("name", SLICES)
def test_gradients_of_slices(name):
    """First and second, in calls that begin at other places."""

    def make(decorate):
        weight = tf.Variable(tf.reshape(tf.range(12.0), [3, 4]))

        @decorate
        def step(row):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    part = tf.slice(weight, *SLICES[name](row))
                    loss = tf.reduce_sum(part**3)
                first = tape.gradient(loss, weight)
            return part, first, outer.gradient(first, weight)

        return step

    with testing.always_follow():
        fn = run_both(make, [(n % 2,) for n in range(12)])
    assert fn.stats().followed >= 9, fn.explain()
    assert "StridedSliceGrad" in str(fn.trace_graph)
    check(fn.trace_graph)


def test_the_gradient_of_a_slice_of_a_scalar():
    nothing = tf.zeros([0], tf.int32)

    def make(decorate):
        weight = tf.Variable(3.0)

        @decorate
        def step(scale):
            with tf.GradientTape() as tape:
                loss = tf.slice(weight, nothing, nothing) ** 2 * scale
            return loss, tape.gradient(loss, weight)

        return step

    with testing.always_follow():
        fn = run_both(make, [(float(n),) for n in range(8)])
    assert fn.stats().followed >= 6, fn.explain()
