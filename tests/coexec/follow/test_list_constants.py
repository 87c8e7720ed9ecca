"""Lists and shapes among an operation's inputs: what they say counts, each time, and is compared without a tensor."""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.follow import follower
from tests.coexec import run_both

CALLS = [(i,) for i in range(8)]
X = np.arange(24, dtype=np.float32).reshape(4, 6)

GIVEN = {
    "a list": lambda x, i: tf.reshape(x, [6, 4]),
    "a tuple with a dimension to be found": lambda x, i: tf.reshape(x, (-1, 8)),
    "a shape": lambda x, i: tf.reshape(x * 2.0, x.shape) + tf.zeros(x.shape),
    "another list each time": lambda x, i: tf.reshape(x, [[6, 4], [2, 12], [4, 6]][i % 3]),
    "another kind of list": lambda x, i: tf.reshape(
        x, [[6, 4], (6, 4), np.array([6, 4]), tf.TensorShape([6, 4])][i % 4]),
    "NumPy's numbers in a list": lambda x, i: tf.reshape(x, [np.int64(6), 4] if i % 2 else [6, np.int32(4)]),
    "an axis, or several": lambda x, i: tf.reduce_sum(x, [0, 1]) + tf.reduce_sum(x, [0]) + tf.reduce_sum(x, [-1])[0],
    "lists in lists": lambda x, i: tf.pad(x, [[1, 0], [0, 2 + i % 2]])[1:],
    "numbers of the other inputs' dtype": lambda x, i: tf.maximum(x, [0.5, 1, 2, 3, 4, 5]) + tf.cast(
        tf.maximum(tf.cast(x, tf.int64), [1, 2, 3, 4, 5, 6]), tf.float32),
    "the same in other dtypes": lambda x, i: [tf.maximum(tf.cast(x, dtype), [1, 2, 3, 4, 5, 6])
                                              for dtype in (tf.float32, tf.int64, tf.float64)],
    "bools": lambda x, i: tf.where([[True] * 6, [False] * 6, [True, i % 2 == 0] * 3, [True] * 6], x, -x),
    "a list with a tensor": lambda x, i: tf.reshape(x, [tf.shape(x)[0] * 2, 3]),
    "a list with another tensor each time": lambda x, i: tf.fill([tf.constant(2), 2 + i % 3], x[0, 1]),
    "no list any more": lambda x, i: tf.tile(x, [1, 2] if i < 4 else tf.constant([2, 1])),
    "an empty one": lambda x, i: tf.reshape(x[0, :1], []) + tf.reduce_sum(x, []),
    "what does not fit": lambda x, i: attempt(lambda: tf.reshape(x, [5, 5] if i == 5 else [6, 4])),
    "what is no shape": lambda x, i: attempt(lambda: tf.reshape(x, [6.0, 4.0] if i == 5 else [6, 4])),
}  # fmt: skip


def attempt(operation):
    try:
        return operation()
    except (tf.errors.OpError, TypeError, ValueError) as error:
        return type(error).__name__


@pytest.fixture
def settled(monkeypatch):
    """Counts the arguments that TensorFlow's conversion had to make tensors."""
    counted = []
    settle = follower.settle
    monkeypatch.setattr(follower, "settle", lambda *given: (counted.append(given[1]), settle(*given))[1])
    return counted


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("which", GIVEN)
def test_what_it_says_counts(which, jit):
    """Values, dtypes, shapes and errors are eager's, also where the list is another one in the next call."""

    def make(decorate):
        return decorate(lambda i: GIVEN[which](tf.constant(X), i))

    with testing.compile_everything():
        assert run_both(make, CALLS, jit_compile=jit).stats().ops_followed > 0


@pytest.mark.parametrize("taped", [False, True])
def test_a_list_that_is_changed_in_place(taped):
    """It is read in each call; so is one that was changed between two uses in the same call."""

    def make(decorate):
        shape = [6, 4]

        @decorate
        def step(x, i):
            with tf.GradientTape() as tape:
                tape.watch(x)
                first = tf.reshape(x, shape)
                shape[0], shape[1] = shape[1], shape[0]
                second = tf.reshape(x * x, shape)
                shape.reverse()
                if i % 3 == 2:
                    shape[:] = [2, 12] if shape[0] == 6 else [6, 4]
                loss = tf.reduce_sum(first[0] * first[1]) + tf.reduce_sum(second[1])
            return first, second, tape.gradient(loss, x) if taped else loss

        return step

    with testing.compile_everything():
        assert run_both(make, [(tf.constant(X), i) for i in range(10)]).stats().ops_followed > 0


def test_gradients():
    """A tape is told the same as eagerly, and asked twice, gives the same twice."""

    def make(decorate):
        v = tf.Variable(X)

        @decorate
        def step(i):
            with tf.GradientTape(persistent=True) as tape:
                x = tf.reshape(v, [6, 4]) * 2.0
                y = tf.tile(tf.transpose(x, [1, 0]), [1, 2]) + tf.pad(tf.reverse(x, [0]), [[0, 0], [2, 6]])[:4]
                loss = tf.reduce_sum(tf.reduce_mean(y * y, [0]), axis=[0])
            found = tape.gradient(loss, v), tape.gradient(loss, x), tape.gradient(y, [x, v])
            v.assign_sub(1e-3 * found[0])
            return loss, found

        return step

    with testing.compile_everything():
        fn = run_both(make, CALLS)
    assert fn.stats().diverged == 0, fn.explain()
    assert fn.stats().launches > 0, fn.explain()


def test_no_tensor_is_made_of_it(settled):
    """From the second followed call on, a list at a known place costs a comparison, not a conversion."""

    @coexec.function
    def step(x):
        y = tf.transpose(tf.reshape(x, [2, 2, 6]), [1, 0, 2])
        y = tf.tile(y, (1, 2, 1)) + tf.zeros(y.shape[-1:])
        return tf.reduce_sum(tf.pad(y, [[0, 1], [0, 0], [0, 0]]), [0, 2])

    with testing.compile_everything():
        for _ in range(3):
            step(X)
        settled.clear()
        for _ in range(5):
            np.testing.assert_allclose(step(X), step.python_function(X))
    assert settled == []
    assert step.stats().diverged == 0
