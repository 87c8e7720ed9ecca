"""Steps that fail: the exception is eager's, the state is what eager would have left, and later calls work.

Where every other call fails, at least two of the calls that do not are followed.
"""

import numpy as np
import tensorflow as tf

from tests.programs import Instance, args, each, program, signed, vector, whole


class Stop(Exception):
    def __init__(self, reason, value):
        super().__init__(reason, value)
        self.reason, self.value = reason, value


@program(follows=2)
def raised_after_a_write(function):
    "The user's own exception, with a tensor in it, after a variable and a list were changed."
    v, log = tf.Variable([1.0, 2.0, 3.0, 4.0]), []

    @function
    def step(x):
        v.assign_add(x)
        log.append("written")
        y = v * 2.0
        if tf.reduce_sum(x) < 0:
            raise Stop("negative", y)
        v.assign(y * 0.5)
        log.append("done")
        return y

    return Instance(step, each(lambda i: args(signed(i))), lambda: (v, log))


@program(follows=2)
def assertion_between_writes(function):
    "`assign_add`, a failing assertion, `assign_add`: only the first was done."
    v = tf.Variable(0.0)

    @function
    def step(x):
        v.assign_add(1.0)
        tf.debugging.assert_non_negative(x, "x is negative")
        v.assign_add(1.0)
        return v * x

    return Instance(step, each(lambda i: args(signed(i))), lambda: v)


@program(follows=2)
def assert_operation(function):
    "`tf.debugging.Assert` prints its data; writes after it are not done."
    v = tf.Variable(0)

    @function
    def step(x):
        v.assign_add(1)
        tf.debugging.Assert(tf.reduce_sum(x) > 0, [tf.constant("sum"), x])
        v.assign_add(10)
        return x * 2.0

    return Instance(step, each(lambda i: args(signed(i))), lambda: v)


@program(follows=2)
def gather_out_of_range(function):
    "An index that is out of range fails where it is, and what came before stays."
    log, v = [], tf.Variable(0)

    @function
    def step(index):
        v.assign_add(1)
        log.append("before")
        y = tf.gather([1.0, 2.0, 3.0], index)
        v.assign_add(10)
        log.append(float(y[0]))
        return y * 2.0

    return Instance(step, each(lambda i: args(tf.constant([i % 2 * 7])), 10), lambda: (log, v))


@program(follows=2)
def failed_and_caught(function):
    "`except` around operations: the handler sees eager's class, and goes on computing."
    seen = []

    @function
    def step(index):
        table = tf.constant([1.0, 2.0, 3.0]) * 2.0
        try:
            y = tf.gather(table, index)
            seen.append("found")
        except tf.errors.InvalidArgumentError as error:
            seen.append((type(error).__name__, error.error_code, "is not in [0, 3)" in error.message))
            y = table[0]
        finally:
            seen.append("finally")
        return y + 1.0

    return Instance(step, each(lambda i: args(tf.constant(i % 5)), 15), lambda: seen)


@program()
def numbers_checked(function):
    "`check_numerics` and `assert_all_finite` fail on the call that divides by zero, caught by the step."
    v = tf.Variable(0.0)

    @function
    def step(x):
        y = 1.0 / x
        v.assign_add(1.0)
        try:
            y = tf.debugging.check_numerics(y, "reciprocal")
            v.assign_add(100.0)
        except tf.errors.InvalidArgumentError as error:
            return "Inf" in error.message, v + 0.0
        return y, v + 0.0

    return Instance(step, each(lambda i: args(tf.constant([1.0, float(i % 2)])), 10), lambda: v)


@program(follows=2)
def whole_number_division_by_zero(function):
    "An integer is divided by zero."
    v = tf.Variable([0, 0])

    @function
    def step(n):
        v.assign_add([1, 1])
        y = 12 // n
        v.assign(y)
        return y, tf.math.floormod(12, n)

    return Instance(step, each(lambda i: args(tf.constant([3, i % 2])), 10), lambda: v)


@program(follows=2)
def shapes_that_do_not_fit(function):
    "A product of matrices that do not fit fails, before and after one that does."

    @function
    def step(x, y):
        z = tf.sin(x)
        return tf.matmul(z, y)

    return Instance(step, each(lambda i: args(vector(i, 2, 3), vector(i, 3 - i % 2, 2)), 10))


@program()
def refused_by_python(function):
    "TensorFlow's own Python refuses: dtypes that do not mix, wrong types, an unknown name."
    log = []

    @function
    def step(x):
        y = x * 2.0
        for attempt in (
            lambda: y + tf.constant(1),
            lambda: tf.reshape(y, [3, 3]),
            lambda: tf.cast("a", tf.float32) + y,
            lambda: tf.concat([y, y], 5),
            lambda: y @ y,
            lambda: tf.no_such_function(y),
            lambda: y[0, 0],
            lambda: tf.constant([[1], [2, 3]]),
            lambda: tf.Variable(y).assign([1.0]),
        ):
            try:
                log.append(attempt())
            except Exception as error:
                log.append(error)
        return y + 1.0

    return Instance(step, each(lambda i: args(vector(i))), lambda: log)


@program()
def python_errors_caught(function):
    "KeyError, IndexError, ZeroDivisionError, StopIteration and AttributeError inside, with tensors around."

    @function
    def step(x, number):
        names = []
        for attempt in (
            lambda: {}["missing"],
            lambda: [x][number + 1],
            lambda: 1 / (number - number),
            lambda: next(iter(())),
            lambda: x.missing,
            lambda: int("x"),
        ):
            try:
                attempt()
            except (LookupError, ArithmeticError, StopIteration, AttributeError, ValueError) as error:
                names.append((type(error).__name__, str(error)))
                x = x + 1.0
        return x, names

    return Instance(step, each(lambda i: args(vector(i), 3)))


@program(follows=2)
def chained_exceptions(function):
    "`raise ... from ...` keeps its cause and its context."
    links = []

    @function
    def step(x):
        y = x + 1.0
        try:
            if y[0] < 0:
                raise KeyError("inner")
        except KeyError as error:
            try:
                raise Stop("outer", float(y[0])) from error
            except Stop as stop:
                links.append((stop.__cause__, stop.__context__ is stop.__cause__))
                raise
        return y

    return Instance(step, each(lambda i: args(signed(i) * 2.0)), lambda: links)


@program(follows=2)
def finally_writes(function):
    "`finally` and `__exit__` write variables on the way out of an exception."
    v, log = tf.Variable(0.0), []

    class Scope:
        def __enter__(self):
            v.assign_add(1.0)
            return self

        def __exit__(self, kind, error, traceback):
            log.append(None if kind is None else kind.__name__)
            v.assign_add(10.0)

    @function
    def step(x):
        try:
            with Scope():
                if x[0] < 0:
                    raise ValueError("negative")
                return x * v
        finally:
            v.assign_add(100.0)

    return Instance(step, each(lambda i: args(signed(i))), lambda: (v, log))


@program(follows=2)
def in_the_middle_of_a_loop(function):
    "The third turn of five fails: two turns were done."
    v = tf.Variable(tf.zeros(4))

    @function
    def step(x, limit):
        for turn in range(5):
            v.assign_add(x)
            if turn == limit:
                raise IndexError(turn)
        return v * 1.0

    return Instance(step, each(lambda i: args(vector(i), 2 if i % 2 else 9)), lambda: v)


@program(follows=2)
def interrupted(function):
    "KeyboardInterrupt and SystemExit that the step raises pass through, state and all."
    v = tf.Variable(0.0)

    @function
    def step(x, number):
        v.assign_add(x)
        if number % 4 == 1:
            raise KeyboardInterrupt
        if number % 4 == 3:
            raise SystemExit(3)
        return v * 2.0

    return Instance(step, each(lambda i: args(whole(i), i), 12), lambda: v)


@program(follows=2)
def under_a_tape(function):
    "An operation fails under an open tape; the tape of the next call is fine."
    weight = tf.Variable([1.0, 2.0, 3.0])

    @function
    def step(index):
        with tf.GradientTape() as tape:
            y = tf.gather(weight * 2.0, index)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, weight)

    return Instance(step, each(lambda i: args(tf.constant([0, i % 2 * 5])), 10), lambda: weight)


@program(follows=2)
def in_host_functions(function):
    "Exceptions in `py_function`, in a custom gradient and in a tf.function."

    def on_host(x):
        if x[0] < 0:
            raise ValueError("host")
        return x

    @tf.custom_gradient
    def strict(x):
        def gradient(upstream):
            if upstream[0] < 0:
                raise Stop("gradient", 1)
            return upstream

        return x * 1.0, gradient

    traced = tf.function(lambda x, i: tf.gather(x, i))

    @function
    def step(x, number):
        seen = []
        try:
            x = tf.py_function(on_host, [x], tf.float32)
        except tf.errors.InvalidArgumentError:
            seen.append("host")
        try:
            x = traced(x, tf.constant(7 if number % 4 == 2 else 0)) + x
        except tf.errors.InvalidArgumentError:
            seen.append("traced")
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = strict(x) * x[0]
        return seen, tape.gradient(y, x)

    return Instance(step, each(lambda i: args(signed(i), i), 16))


@program(follows=2)
def late_and_once(function):
    "A single failure after a long good run, and a good run after it."
    log = []

    @function
    def step(x, number):
        y = tf.tanh(x)
        log.append(number)
        if number == 5:
            raise Stop("five", number)
        return y * 2.0

    return Instance(step, each(lambda i: args(vector(i), i), 10), lambda: log)


@program()
def assertions_that_hold(function):
    "The near miss: the same checks as above, and all of them pass."
    v = tf.Variable(0.0)

    @function
    def step(x):
        v.assign_add(1.0)
        tf.debugging.assert_non_negative(x * x, "a square is negative")
        tf.debugging.Assert(tf.reduce_sum(x * x) > 0, [x])
        y = tf.gather(tf.debugging.check_numerics(x, "x"), [0, 3])
        v.assign_add(1.0)
        return y // 2.0, v + 0.0

    return Instance(step, each(lambda i: args(signed(i))), lambda: v)


@program(follows=2)
def value_errors_of_a_variable(function):
    "Assignments of another shape and another dtype fail and leave the variable alone."
    v = tf.Variable([1.0, 2.0])

    @function
    def step(x, number):
        v.assign_add([1.0, 1.0])
        if number % 2:
            v.assign(x)
        try:
            v.assign_add(tf.constant([1, 2]))
        except Exception as error:
            return type(error).__name__, v * 1.0
        return v * 2.0

    return Instance(step, each(lambda i: args(vector(i), i)), lambda: v)


@program(follows=2)
def table_without_the_key(function):
    "A look-up in a plain dict and one in NumPy fail in the middle."
    table = {0: 1.0, 1: 2.0}
    v = tf.Variable(0.0)

    @function
    def step(n):
        v.assign_add(1.0)
        scale = table[int(n)]
        v.assign_add(scale)
        return np.array([3.0, 4.0])[int(n) :] * scale, v * scale

    return Instance(step, each(lambda i: args(tf.constant(i % 3)), 12), lambda: v)
