"""Python values that become part of a computation, the same at every call or not: catches and near misses."""

import collections
import enum

import numpy as np
import tensorflow as tf

from tests.programs import Instance, args, each, program, vector, whole


@program()
def zeros_of_either_sign(function):
    "`0.0` and `-0.0` are equal, and yet two constants."

    @function
    def step(x, zero):
        return 1.0 / (x * 0.0 + zero), tf.constant(zero), x + zero

    return Instance(step, each(lambda i: args(tf.constant([-1.0, -2.0]), [0.0, -0.0][i % 2]), 10))


@program(rtol=0, atol=0)
def zero_that_turns_negative(function):
    "A constant is `0.0` for five calls, and then `-0.0`."

    @function
    def step(x, number):
        zero = 0.0 if number < 5 else -0.0
        return tf.math.reciprocal(tf.constant(zero)), x * (1.0 if number < 5 else -1.0)

    return Instance(step, each(lambda i: args(whole(i), i), 10))


@program(follows=3)
def one_in_three_types(function):
    "`True`, `1` and `1.0` are equal, and yet constants of three dtypes."

    @function
    def step(x, one):
        made = tf.constant(one)
        return made, tf.cast(made, tf.float32) + x, tf.convert_to_tensor([one, one])

    return Instance(step, each(lambda i: args(whole(i), [True, 1, 1.0][i % 3]), 15))


@program()
def number_added_to_a_tensor(function):
    "`x + 1` and `x + 1.0` are the same for a float tensor; `x + True` is refused."

    @function
    def step(x, one):
        try:
            return x + one, one * x
        except Exception as error:
            return type(error).__name__

    return Instance(step, each(lambda i: args(whole(i), [1, 1.0, True][i % 3]), 12))


@program()
def changes_at_the_fifth_call(function):
    "A number that was constant for four calls is another from then on."

    @function
    def step(x, rate):
        return x * rate - rate, tf.fill([2], rate)

    return Instance(step, each(lambda i: args(vector(i), 0.5 if i < 4 else 0.25), 12))


@program()
def changes_on_every_call(function):
    "A rate that decays, a step count and a text that names it."
    names = []

    class Schedule:
        rate, steps = 1.0, 0

    @function
    def step(x):
        Schedule.rate *= 0.9
        Schedule.steps += 1
        names.append(f"step {Schedule.steps}")
        return (
            x * Schedule.rate,
            x + Schedule.steps,
            tf.constant(names[-1]),
            tf.constant([Schedule.rate, 1.0]),
        )

    return Instance(step, each(lambda i: args(vector(i))), lambda: names)


@program(atol=1e-5)  # gradients of a tanh that saturates
def attribute_that_the_caller_sets(function):
    "The caller changes an attribute of an object between calls, and sets it back."

    class Options:
        scale, shift, enabled = 1.0, 0, True

    options = Options()

    @function
    def step(x):
        y = x * options.scale + options.shift
        return tf.tanh(y) if options.enabled else y

    def arguments(i):
        options.scale = [1.0, 2.0][i // 3 % 2]
        options.shift = i // 2
        options.enabled = i % 4 != 3
        return args(vector(i))

    return Instance(step, each(arguments, 12))


@program()
def list_changed_in_place(function):
    "A list that becomes a constant is changed between calls, and once within one."
    numbers = [1.0, 2.0, 3.0, 4.0]

    @function
    def step(x):
        y = x + numbers
        numbers[0] += 1.0
        return y * tf.constant(numbers)

    def arguments(i):
        numbers[3] = float(i // 3)
        return args(vector(i))

    return Instance(step, each(arguments), lambda: numbers)


@program()
def array_changed_in_place(function):
    "A NumPy array that operations take is changed in place, right after one of them took it."
    array = np.array([1.0, 2.0, 3.0, 4.0], np.float32)

    @function
    def step(x):
        # No gradient through this product: eagerly, a tape's view of the array would change with it.
        y = tf.stop_gradient(x) * array
        made = tf.constant(array)
        array[1] += 1.0
        z = tf.add(array, x)
        array[:] = array * 0.5
        return y, made, z, made + y

    return Instance(step, each(lambda i: args(vector(i))), lambda: array)


@program()
def array_that_stays(function):
    "An array that never changes, and one that is equal but new on each call."
    array = np.arange(4, dtype=np.float32)

    @function
    def step(x):
        return x * array, x + np.arange(4, dtype=np.float32), tf.constant(np.float32(2.5)) * x

    return Instance(step, each(lambda i: args(vector(i))))


@program(follows=3)
def array_of_another_dtype(function):
    "Equal arrays of two dtypes and two shapes are four constants."

    @function
    def step(x, array):
        made = tf.constant(array)
        return made, tf.cast(made, tf.float32) + x

    arrays = [
        np.ones(2, np.float32),
        np.ones(2, np.int32),
        np.ones((2, 1), np.float32),
        np.ones((2, 1), np.int64),
    ]
    return Instance(step, each(lambda i: args(whole(i), arrays[i % 4]), 16))


@program()
def same_tensor_or_two(function):
    "One tensor given twice, or two of the same value: no difference, whichever was seen first."

    @function
    def step(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = x * y
        return z, tape.gradient(z, x), x is y

    def arguments(i):
        x = vector(i)
        return args(x, x if i % 3 == 0 else vector(i + i % 3 - 1))

    return Instance(step, each(arguments, 12))


@program()
def same_object_in_two_places(function):
    "An intermediate result is used twice, or two that were computed alike."

    @function
    def step(x, shared):
        y = tf.sin(x)
        z = y if shared else tf.sin(x)
        with tf.GradientTape() as tape:
            tape.watch(y)
            w = y * z
        return w, tape.gradient(w, y)

    return Instance(step, each(lambda i: args(vector(i), i % 2 == 0), 10))


@program()
def constants_out_of_range(function):
    "Not-a-number, infinities, and numbers that do not fit fail or pass as eagerly."

    @function
    def step(x, value):
        try:
            made = tf.constant(value, tf.int32)
        except Exception as error:
            return type(error).__name__, x + 1.0
        return made, x * float("inf"), tf.constant(float("nan")) + x, tf.constant(2**40)

    return Instance(step, each(lambda i: args(whole(i + 1), [1, 2**40, 1.5][i % 3]), 12))


@program()
def dtype_and_flags_as_values(function):
    "Dtypes, enum members, strings and flags choose what an operation does."

    class Kind(enum.Enum):
        sine = "sin"
        cosine = "cos"

    @function
    def step(x, kind, dtype, flag):
        y = getattr(tf, kind.value)(x)
        return tf.cast(y, dtype), tf.reduce_sum(y, keepdims=flag), tf.strings.join([kind.name, "!"])

    def arguments(i):
        return args(vector(i), list(Kind)[i % 2], [tf.float32, tf.float64][i % 2], i % 2 == 0)

    return Instance(step, each(arguments, 10))


@program()
def defaults_and_globals(function):
    "A module global, a default argument and a class attribute are rebound between calls."
    namespace = {"tf": tf, "SCALE": 1.0}
    exec("def scaled(x, shift=1.0):\n    return x * SCALE + shift\n", namespace)

    class Base:
        bias = 0.0

    @function
    def step(x):
        return namespace["scaled"](x) + Base.bias

    def arguments(i):
        namespace["SCALE"] = float(i // 3)
        namespace["scaled"].__defaults__ = (float(i // 4),)
        Base.bias = float(i % 2)
        return args(vector(i))

    return Instance(step, each(arguments, 10))


@program()
def numpy_numbers(function):
    "NumPy scalars of several dtypes, where Python numbers are usual."

    @function
    def step(x, number):
        scale = np.float32(number) if number % 2 else np.float32(0.5)
        count = np.int64(number % 2 + 1)
        return (
            x * scale,
            tf.zeros([count]),
            x[: int(count)],
            tf.fill([count], np.float32(1.0)),
            tf.constant(np.int8(number)),
        )

    return Instance(step, each(lambda i: args(vector(i), i), 12))


@program()
def large_constants(function):
    "A large table that is the same on each call, and one that differs in a single element late."
    table = np.arange(2000, dtype=np.float32)

    @function
    def step(x, number):
        mine = table.copy()
        if number >= 4:
            mine[1999] = float(number)
        return tf.reduce_sum(tf.constant(table[:100])) + x, tf.gather(mine, [0, 1999])

    return Instance(step, each(lambda i: args(whole(i), i), 10))


@program()
def structures_of_constants(function):
    "Named tuples, nested lists and mixed lists of numbers and tensors become tensors."
    Point = collections.namedtuple("Point", "x y")

    @function
    def step(x, number):
        point = Point(1.0, float(number // 3))
        return (
            tf.constant(point) + x[:2],
            tf.stack([x[0], 2.0, float(number)]),
            tf.convert_to_tensor([[1, number], [3, 4]]),
        )

    return Instance(step, each(lambda i: args(vector(i), i)))
