"""Programs that once did something else than eagerly, made small: what the fuzzer has found."""

import pytest

from tests.fuzz.differential import BACKENDS, check
from tests.fuzz.programs import Program, Statement

FOUND = {
    # An operation outside of any `try` failed in one segment with an operation inside of one, whose handler got the
    # error; what the failed one had made could not be read, which was the error that the caller saw.
    "a failure before the operation in a try": (
        """
        c = tf.math.unsorted_segment_sum(a, j % 4, 3)
        try:
            S.alias.assign(b * 0.5)
            a = tf.gather(a, i % 3)
        except Exception as error:
            S.log.append(type(error).__name__)
        return c, tf.reduce_sum(c)
        """,
        [0, 0, 0, 1, 0, 0, 0, 1],
    ),
    # NumPy read a tensor whose operation failed: the process crashed.
    "a failure that a callback's argument is read at": (
        """
        b = tf.gather(a, j % 4)
        S.log.append(tf.numpy_function(lambda z: z * 2, [b], tf.float32))
        return b, i
        """,
        [0, 0, 2, 0, 1, 0, 0, 2],
    ),
    # A new variable's scalar was broadcast to what it held before, which is nothing: XLA took parts of the segment.
    "a scalar variable before an operation that XLA does not take": (
        """
        S.variables["rate"] = tf.Variable(0.1)
        b = tf.linalg.inv(tf.linalg.diag(tf.cast(i % 5 + 1, tf.float32)))[0]
        items = [b, b]; items.append(a); c = tf.stack(items)[tf.reduce_sum(i) % 3]
        b = tf.gather(a, j % 4) + tf.tanh(c) * tf.sin(b) - tf.reduce_sum(c * b)
        return b, float(c[0])
        """,
        [0, 0, 2, 0, 1, 0, 1, 0],
    ),
    # The variable was made before what was pending, which failed: it never got its value, and the one before was lost.
    "an assertion before a new variable": (
        """
        tf.debugging.assert_positive(tf.reduce_sum(i) - 30)
        S.made("late", a)
        return a, i
        """,
        [0, 1, 0, 0, 1, 0],
    ),
    "a failure before a new variable": (
        """
        b = tf.tensor_scatter_nd_update(a, [[tf.reduce_sum(i) % 4]], [0.5])
        S.made("late", a * 0.5)
        return b, i
        """,
        [0, 1, 0, 0, 2, 1, 0, 1],
    ),
    "a failure that NumPy reads at": (
        """
        S.v.assign_add(a)
        b = tf.gather(a, j % 4)
        S.log.append(np.array(b))
        return b, i
        """,
        [0, 0, 2, 0, 1, 0, 0, 2],
    ),
    # What had failed was raised while TensorFlow made the ones that a gradient begins with: it does not look, took NULL
    # for the gradient of a tensor that it was asked for twice, and the process crashed.
    "a failure before the gradient of a tensor by itself": (
        """
        with tf.GradientTape(persistent=True) as upper:
            b = S.inner(a, j)
        try:
            S.checked(c, j, call)
        except (ArithmeticError, AssertionError) as error:
            S.log.append(type(error).__name__)
        found = upper.gradient(b, [S.v, b, c, b])
        b = S.gathered(found, b)
        return a, b
        """,
        [0, 0, 1, 1, 1, 1, 0, 2],
    ),
}


def program(source, inputs):
    """A program of one statement, which cannot be made smaller."""
    lines = [line[8:] for line in source.strip("\n").splitlines()]
    return Program({"step": [Statement([("\n".join(lines).rstrip(), None)])]}, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FOUND)
def test_found(name, backend):
    check(program(*FOUND[name]), (backend,))
