"""What AutoGraph documents as its limits, each as a program that runs."""

import tensorflow as tf

from tests.programs import Instance, args, each, integers, program, signed, vector, whole


@program()
def none_in_one_branch(function):
    "A name is None after one branch and a tensor after the other."

    @function
    def step(x):
        found = None
        if tf.reduce_sum(x) > 0:
            found = x * 2.0
        return found

    return Instance(step, each(lambda i: args(signed(i))))


@program()
def undefined_in_one_branch(function):
    "A name that only one branch defines is used where it is defined, and missed where it is not."

    @function
    def step(x):
        if tf.reduce_sum(x) > 0:
            extra = x + 1.0
        try:
            return extra
        except UnboundLocalError:
            return "undefined"

    return Instance(step, each(lambda i: args(signed(i))))


@program(follows=4)
def first_defined_in_a_loop(function):
    "A variable that the body of a tensor loop defines is there after it."

    @function
    def step(x):
        while x < 4.0:
            x = x + 1.0
            last = x * 10.0
        return last

    return Instance(step, each(lambda i: args(whole(i % 3)), 10))


@program()
def object_changed_in_a_called_function(function):
    "Functions and methods that the step calls change objects, in a branch on a tensor."

    class Counter:
        def __init__(self):
            self.positive, self.last = 0, None

        def note(self, x):
            self.positive += 1
            self.last = x

    counter = Counter()

    def change(target, x):
        if tf.reduce_sum(x) > 0:
            target.note(x * 2.0)
        else:
            target.last = None

    @function
    def step(x):
        change(counter, x)
        return x if counter.last is None else x + counter.last

    return Instance(step, each(lambda i: args(signed(i))), lambda: counter)


@program()
def lambda_over_a_loop_variable(function):
    "All lambdas made in a loop see the variable's last value."

    @function
    def step(x):
        scales = []
        for factor in (1.0, 2.0, 3.0):
            scales.append(lambda value: value * factor)
        return [scale(x) for scale in scales]

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def append_in_a_tensor_loop(function):
    "A list grows in a loop whose end a tensor decides."

    @function
    def step(x):
        parts = []
        while tf.reduce_max(x) < 16.0:
            x = x * 2.0
            parts.append(x)
        return tf.stack(parts), len(parts)

    return Instance(step, each(lambda i: args(tf.constant([1.0, 2.0 + 2.0 * (i % 2)]))))


@program()
def dict_with_a_computed_key(function):
    "A key of a dict is read from a tensor, in a branch."

    @function
    def step(x):
        counts = {}
        for value in x:
            counts[int(value)] = counts.get(int(value), tf.constant(0.0)) + 1.0
        if x[0] > 1:
            counts[f"first {int(x[0])}"] = x * 2
        return counts

    values = [[1, 2, 1], [3, 3, 3]]
    return Instance(step, each(lambda i: args(tf.constant(values[i % 2]))))


@program()
def dtype_changes_in_a_branch(function):
    "An integer tensor becomes a float one when it is large."

    @function
    def step(n):
        y = n * 2
        if tf.reduce_sum(y) > 10:
            y = tf.cast(y, tf.float32) / 4.0
        return y, y + 1

    return Instance(step, each(lambda i: args(tf.constant([1, 2 + 10 * (i % 2)]))))


@program()
def shape_changes_in_a_loop(function):
    "Each turn makes the tensor one longer."

    @function
    def step(x):
        while tf.size(x) < 5:
            x = tf.concat([x, x[:1] + 1.0], 0)
        return x

    return Instance(step, each(lambda i: args(vector(i, 2))))


@program(follows=3)
def branch_on_a_shape(function):
    "`tf.shape` decides, and the static shape does."

    @function
    def step(x):
        if tf.shape(x)[0] > 2:
            x = x[:2]
        if x.shape[0] == 2:
            return tf.reduce_sum(x)
        return tf.reduce_prod(x)

    return Instance(step, each(lambda i: args(vector(i, 1 + 2 * (i % 2)))))


@program()
def without_source(function):
    "The text of the function is nowhere to be found."
    namespace = {"tf": tf, "log": []}
    exec(
        "def step(x):\n"
        "    log.append(len(log))\n"
        "    while tf.reduce_sum(x) < 10:\n"
        "        x = x + 1.0\n"
        "    return x * 2.0\n",
        namespace,
    )
    return Instance(function(namespace["step"]), each(lambda i: args(signed(i))), lambda: namespace["log"])


@program()
def exceptions_in_a_loop(function):
    "`try` and `except` in the body of a tensor loop."

    @function
    def step(x):
        limits, seen = {0: 1.0, 1: 3.0}, []
        turn = 0
        while x < 6.0:
            try:
                x = x + limits[turn]
            except KeyError as error:
                seen.append(error.args[0])
                x = x + 10.0
            turn += 1
        return x, seen

    return Instance(step, each(lambda i: args(whole(3 * (i % 2)))))


@program()
def deleted_names(function):
    "`del` of a local in a branch, and a new binding of another kind."

    @function
    def step(x):
        other = x + 1.0
        if tf.reduce_sum(x) > 0:
            del other
            other = [x, x * 2.0]
        return other

    return Instance(step, each(lambda i: args(signed(i))))


@program()
def identity_of_tensors(function):
    "`is` between tensors, and between a tensor and None."

    @function
    def step(x):
        y = x * 1.0
        best = None
        for candidate in (x, y, y + 1.0):
            if best is None or tf.reduce_sum(candidate) > tf.reduce_sum(best):
                best = candidate
        return best is x, best is y, [y, best][0] is y, any(item is y for item in (x, y))

    return Instance(step, each(lambda i: args(integers(i, dtype="float32"))))
