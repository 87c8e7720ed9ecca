"""Indices of tensors: whatever the index is, followed or not, the result is eager's."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing

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
