"""Variables made early, late and on every call; assigned, aliased, swapped, sliced and read in any order."""

import gc
import os
import tempfile

import numpy as np
import tensorflow as tf

from tests.programs import Instance, args, each, integers, program, signed, vector, whole


@program()
def assigned_and_read(function):
    "`assign`, `assign_add` and `assign_sub`, with reads before, between and after."
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])

    @function
    def step(x):
        before = v * 1.0
        v.assign_add(x)
        between = v + 0.0
        v.assign(between * 0.5)
        v.assign_sub([0.1, 0.2, 0.3, 0.4])
        return before, between, v.read_value(), v.numpy()

    return Instance(step, each(lambda i: args(vector(i))), lambda: v)


@program()
def old_value_kept(function):
    "A value that was read before an assignment stays what it was."
    v = tf.Variable([1.0, 2.0])

    @function
    def step(x):
        old = v.read_value()
        also = tf.convert_to_tensor(v)
        alias = v.value()
        v.assign(x)
        v.assign_add([1.0, 1.0])
        return old, also, alias, v + 0.0

    return Instance(step, each(lambda i: args(vector(i, 2))), lambda: v)


@program(follows=4)
def made_on_the_first_call(function):
    "A variable that exists from the first call on."
    made = {}

    @function
    def step(x):
        if "v" not in made:
            made["v"] = tf.Variable(x * 0.0 + 1.0)
        return made["v"].assign_add(x) * 2.0

    return Instance(step, each(lambda i: args(vector(i))), lambda: made)


@program(follows=4)
def made_on_the_fifth_call(function):
    "A layer that is added when training is under way."
    weights = [tf.Variable(vector(100, 3, 3))]

    @function
    def step(x, number):
        if number == 4:
            weights.append(tf.Variable(tf.eye(3) * 0.5))
        for weight in weights:
            x = tf.tanh(x @ weight)
        weights[-1].assign_sub(0.1 * tf.ones([3, 3]))
        return x

    return Instance(step, each(lambda i: args(vector(i, 2, 3), i), 12), lambda: weights)


@program()
def made_on_every_call(function):
    "A scratch variable is made, changed, read and dropped by every call."

    @function
    def step(x):
        scratch = tf.Variable(tf.zeros(4), trainable=False)
        for _ in range(2):
            scratch.assign_add(x)
        result = scratch * 1.0
        scratch.assign(tf.zeros(4))
        return result, scratch.numpy()

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def made_and_kept(function):
    "Every call adds a variable to a list; the last three are summed."
    kept = []

    @function
    def step(x):
        kept.append(tf.Variable(x * 2.0))
        return tf.add_n([variable.read_value() for variable in (kept * 3)[-3:]])

    return Instance(step, each(lambda i: args(vector(i))), lambda: kept)


@program()
def parts_assigned(function):
    "Slices of a variable, scattered rows and single elements are assigned."
    v = tf.Variable(tf.zeros([4, 2]))

    @function
    def step(x, row):
        v[1:3].assign(tf.stack([x, x * 2.0]))
        v[0, 1].assign(x[0])
        v.scatter_nd_add([[3, 0]], x[1:])
        v.scatter_update(tf.IndexedSlices(x[tf.newaxis] * 3.0, row[tf.newaxis]))
        v.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [0]))
        return v + 0.0, v.sparse_read(row[tf.newaxis]), v.gather_nd([[1, 1]])

    return Instance(step, each(lambda i: args(vector(i, 2), tf.constant(i % 4))), lambda: v)


@program()
def two_names_for_one(function):
    "One variable under two names: what is written through one is read through the other."
    v = tf.Variable(1.0)
    holder = {"same": v, "other": tf.Variable(10.0)}

    @function
    def step(x):
        holder["same"].assign_add(x)
        first = v * 1.0
        v.assign(first * 2.0)
        return first, holder["same"] + holder["other"]

    return Instance(step, each(lambda i: args(whole(i))), lambda: holder)


@program()
def same_variable_twice(function):
    "One variable as both arguments, then two variables: the second write must not reach the first."
    a, b = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])

    @function
    def step(left, right):
        left.assign_add([1.0, 1.0])
        y = left * right
        right.assign(y * 0.25)
        return y, left + right

    pairs = [(a, a), (a, a), (a, b), (a, b), (b, a), (b, b), (a, a), (b, a), (a, b), (b, a), (a, b), (a, a)]
    return Instance(step, each(lambda i: args(*pairs[i]), len(pairs)), lambda: (a, b))


@program()
def swapped_variables(function):
    "Two attributes exchange their variables: the same place meets another handle."

    class Networks:
        online, target = tf.Variable([1.0, 1.0]), tf.Variable([5.0, 5.0])

    networks = Networks()

    @function
    def step(x):
        networks.online.assign_add(x)
        y = networks.online * 2.0 - networks.target
        networks.online, networks.target = networks.target, networks.online
        return y

    return Instance(step, each(lambda i: args(vector(i, 2))), lambda: vars(networks))


@program()
def replaced_variable(function):
    "A variable is replaced by a new one between calls, and the old one is forgotten."
    holder = {"v": tf.Variable([1.0, 2.0])}

    @function
    def step(x):
        holder["v"].assign_add(x)
        return holder["v"] * 3.0

    def arguments(i):
        if i % 3 == 2:
            holder["v"] = tf.Variable([10.0 * i, 0.0])
            gc.collect()
        return args(vector(i, 2))

    return Instance(step, each(arguments), lambda: holder)


@program()
def decides_a_branch(function):
    "A counter on the device decides what the host does."
    count = tf.Variable(0, dtype=tf.int64)

    @function
    def step(x):
        count.assign_add(1)
        if count % 3 == 0:
            x = x * 10.0
        return x, int(count), [0] * count.numpy()

    return Instance(step, each(lambda i: args(vector(i)), 10), lambda: count)


@program()
def changed_between_calls(function):
    "The caller assigns variables between calls, and loads others."
    v = tf.Variable([1.0, 2.0])

    @function
    def step(x):
        y = v * x
        v.assign(y)
        return y

    def arguments(i):
        if i % 2:
            v.assign([float(i), 1.0])
        return args(tf.constant([1.0, 2.0]))

    return Instance(step, each(arguments), lambda: v, after=lambda _: v.assign_add([0.5, 0.5]).numpy())


@program()
def as_a_number(function):
    "A variable in operators, conversions, comparisons, indices and formats."
    v, index = tf.Variable(3.0), tf.Variable(1)

    @function
    def step(x):
        v.assign_add(1.0)
        numbers = [v + x, x - v, v * 2, 1 / v, v**2, -v, v // 2, abs(v), v % 3.0]
        compared = [v > 2, v <= x, bool(v == 4.0), v.numpy() == 4.0]
        python = [
            float(v),
            int(v),
            f"{v.numpy():.1f}",
            [10, 20, 30][int(index)],
            np.asarray(v),
            str(v.shape),
            v.dtype,
            v.trainable,
        ]
        return numbers, compared, python

    return Instance(step, each(lambda i: args(whole(i))), lambda: v)


@program()
def printed_variable(function):
    "`repr`, `str` and `print` of a variable show its value at that line."
    v = tf.Variable([1.0, 2.0], name="shown")

    @function
    def step(x):
        print(v)
        v.assign_add(x)
        return repr(v), str(v.value())

    return Instance(step, each(lambda i: args(tf.constant([1.0, float(i)]))), lambda: v)


@program(follows=3)
def shape_of_its_own(function):
    "A variable without a fixed shape takes a longer value on each call."
    v = tf.Variable([1.0], shape=tf.TensorShape([None]))

    @function
    def step(x):
        if v.shape.rank and len(v.numpy()) > 3:
            v.assign([0.5])
        v.assign(tf.concat([v, x], 0))
        return tf.reduce_sum(v), v.numpy()

    return Instance(step, each(lambda i: args(vector(i, 1)), 14), lambda: v.numpy())


@program()
def other_dtypes(function):
    "Variables of whole numbers, truth values, strings, halves and complex numbers."
    number, flag, text = tf.Variable(1), tf.Variable(False), tf.Variable("a")
    half, plane = tf.Variable([1.0, 0.5], dtype=tf.float16), tf.Variable(1.0 + 2.0j)

    @function
    def step(n):
        number.assign(number * 3 + n)
        flag.assign(tf.logical_not(flag))
        text.assign(tf.strings.join([text, "b"]))
        half.assign(half * 0.5 + 1.0)
        plane.assign(plane * 1j)
        return number + 0, flag.numpy(), text.numpy(), half * 2.0, plane * plane

    return Instance(step, each(lambda i: args(tf.constant(i))), lambda: (number, flag, text, half, plane))


@program()
def moving_average(function):
    "`tf.train.ExponentialMovingAverage`-like shadow copies and a constraint."
    weight = tf.Variable([1.0, -2.0], constraint=lambda value: tf.clip_by_value(value, -1.0, 1.0))
    average = tf.train.ExponentialMovingAverage(0.5)

    @function
    def step(x):
        weight.assign(weight.constraint(weight + x))
        average.apply([weight])
        return average.average(weight) * 1.0

    return Instance(step, each(lambda i: args(vector(i, 2))), lambda: weight)


@program()
def modules(function):
    "A `tf.Module` with submodules, a name scope and a method that makes its variables late."

    class Dense(tf.Module):
        def __init__(self, units, name=None):
            super().__init__(name=name)
            self.units, self.built = units, False

        @tf.Module.with_name_scope
        def __call__(self, x):
            if not self.built:
                self.w = tf.Variable(vector(self.units, x.shape[-1], self.units), name="w")
                self.built = True
            return tf.nn.relu(x @ self.w)

    class Network(tf.Module):
        def __init__(self):
            super().__init__(name="network")
            self.layers = [Dense(4, "first"), Dense(2, "second")]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    network = Network()

    @function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(network(x))
        for variable, gradient in zip(
            network.trainable_variables, tape.gradient(loss, network.trainable_variables)
        ):
            variable.assign_sub(0.01 * gradient)
        return loss, [variable.name for variable in network.variables], len(network.submodules)

    return Instance(step, each(lambda i: args(vector(i, 3, 3))), lambda: network.variables)


@program()
def checkpointed(function):
    "A checkpoint is written within a step, and read back in a later one."
    v, prefix = tf.Variable([1.0, 2.0]), os.path.join(tempfile.mkdtemp(), "model")
    checkpoint = tf.train.Checkpoint(v=v)
    log = []

    @function
    def step(x, number):
        v.assign_add(x)
        if number % 4 == 1:
            log.append(os.path.basename(checkpoint.write(prefix)))
        if number % 4 == 3:
            checkpoint.read(prefix)
        return v * 1.0

    return Instance(step, each(lambda i: args(vector(i, 2), i), 12), lambda: (log, v))


@program()
def unread_assignments(function):
    "Assignments that return nothing, that are chained, and whose result is kept."
    v = tf.Variable(1.0)

    @function
    def step(x):
        silent = v.assign(x, read_value=False)
        chained = v.assign_add(1.0).assign_add(2.0)
        kept = v.assign_sub(0.5)
        v.assign(kept * 2.0)
        return silent is None, chained is v, kept is v, float(kept), float(v)

    return Instance(step, each(lambda i: args(whole(i))), lambda: v)


@program()
def assignment_of_a_branch(function):
    "Only the branch that was taken writes; state after each call is eager's."
    positive, negative = tf.Variable(0.0), tf.Variable(0.0)

    @function
    def step(x):
        total = tf.reduce_sum(x)
        if total > 0:
            positive.assign_add(total)
        else:
            negative.assign_add(total)
        return positive - negative

    return Instance(step, each(lambda i: args(signed(i))), lambda: (positive, negative))


@program()
def running_statistics(function):
    "Mean and variance of all that was seen, kept in variables of whole and broken numbers."
    count, mean = tf.Variable(0), tf.Variable(tf.zeros(4))

    @function
    def step(x):
        count.assign_add(1)
        delta = x - mean
        mean.assign_add(delta / tf.cast(count, tf.float32))
        return tf.where(count > 3, mean, x), count > 3

    return Instance(step, each(lambda i: args(integers(i, dtype="float32"))), lambda: (count, mean))
