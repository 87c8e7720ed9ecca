"""Shapes, dtypes and attributes that depend on data, or that change from call to call."""

import tensorflow as tf

from tests.programs import Instance, args, each, integers, program, signed, vector, whole


@program()
def unknown_until_run(function):
    "`where`, `boolean_mask`, `unique` and `nonzero`: how long the result is, only the values tell."

    @function
    def step(x):
        places = tf.where(x > 0)
        chosen = tf.boolean_mask(x, x > 0)
        values, index, counts = tf.unique_with_counts(x)
        doubled = chosen * 2.0
        return (
            places,
            doubled,
            tf.reduce_sum(doubled),
            values,
            index,
            counts,
            tf.shape(chosen)[0],
            tf.math.count_nonzero(x),
        )

    return Instance(step, each(lambda i: args(integers(i, 6, dtype="float32"))))


@program()
def length_asked(function):
    "Python asks how long a data-dependent result is, and computes with that."

    @function
    def step(x):
        chosen = x[x > 0]
        n = chosen.shape[0]
        if n == 0:
            return x
        return tf.reshape(chosen, [n, 1]) / n, len(chosen), [float(value) for value in chosen]

    values = [[1.0, -1.0, 2.0], [-1.0, -2.0, 3.0], [-1.0, -1.0, -1.0]]
    return Instance(step, each(lambda i: args(tf.constant(values[i % 3])), 12))


@program()
def partitions_and_sets(function):
    "`dynamic_partition`, `dynamic_stitch`, set operations and `repeat` with counts."

    @function
    def step(x, n):
        small, large = tf.dynamic_partition(x, tf.cast(x > 0, tf.int32), 2)
        back = tf.dynamic_stitch(
            tf.dynamic_partition(tf.range(4), tf.cast(x > 0, tf.int32), 2), [small, large]
        )
        common = tf.sets.intersection(n[None], n[None, ::-1])
        return (
            small * 2.0,
            large,
            back,
            common,
            tf.repeat(x, tf.cast(x > 0, tf.int32) + 1),
            tf.range(tf.reduce_max(n)),
        )

    return Instance(step, each(lambda i: args(vector(i % 2), integers(i % 2, low=1, high=5))))


@program(follows=2)
def batches_of_two_sizes(function):
    "The last batch of each epoch is smaller."
    weight = tf.Variable(vector(100, 3))

    @function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.linalg.matvec(x, weight)))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss, x.shape[0], tf.shape(x)[0] * 2

    return Instance(step, each(lambda i: args(vector(i, 2 if i % 3 == 2 else 5, 3)), 10), lambda: weight)


@program(follows=0, why="each call has a shape of its own, and no later call comes back to one")
def growing_batches(function):
    "Every call is one row longer than the last."

    @function
    def step(x):
        return tf.nn.softmax(x * 2.0), tf.reduce_sum(x, 0), len(x)

    return Instance(step, each(lambda i: args(vector(i, 2 + i, 3))))


@program(follows=2)
def ranks_and_dtypes(function):
    "Scalars, vectors and matrices, of floats and whole numbers, in turn."

    @function
    def step(x):
        y = x + x
        return y, tf.reduce_sum(y), y.dtype.is_floating

    def arguments(i):
        dtype = ["float32", "int32", "float64"][i % 3]
        return args([vector, integers][dtype == "int32"](i, *[2, 3][: i // 3 % 2 + 1], dtype=dtype))

    return Instance(step, each(arguments, 18))


@program()
def empty_tensors(function):
    "Tensors without elements go through operations, reductions and loops."

    @function
    def step(x):
        empty = x[:0]
        rows = [row for row in empty]
        return (
            tf.concat([empty, x], 0),
            tf.reduce_sum(empty),
            tf.reduce_max(empty),
            rows,
            tf.stack([empty, empty]),
            bool(tf.size(empty)),
        )

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def shape_as_numbers(function):
    "`tf.shape`, `x.shape` and `tf.size` in arithmetic, reshapes and Python."

    @function
    def step(x):
        rows, columns = x.shape
        dynamic = tf.shape(x)
        y = tf.reshape(x, [columns, -1]) * rows
        z = tf.reshape(x, [dynamic[1], dynamic[0]]) + tf.cast(dynamic[0], tf.float32)
        return (
            y,
            z,
            tf.zeros(dynamic),
            tf.size(x) // 2,
            dynamic.numpy().tolist(),
            tf.broadcast_dynamic_shape(dynamic, [1]),
        )

    return Instance(step, each(lambda i: args(vector(i, 2, 3))))


@program()
def axis_that_alternates(function):
    "An axis, a permutation and a keyword alternate from call to call."

    @function
    def step(x, number):
        axis = number % 2
        y = tf.reduce_sum(x, axis=axis)
        z = tf.transpose(x, [axis, 1 - axis])
        return y, z, tf.concat([x, x], axis), tf.reduce_max(x, axis, keepdims=bool(axis)), tf.argmax(x, axis)

    return Instance(step, each(lambda i: args(vector(i, 2, 3), i), 10))


@program(follows=3)
def number_of_inputs(function):
    "Two, then three tensors are stacked and added."

    @function
    def step(x, count):
        parts = [x * (n + 1.0) for n in range(count)]
        return tf.stack(parts), tf.add_n(parts), tf.concat(parts, 0)

    return Instance(step, each(lambda i: args(vector(i), 2 + i % 2)))


@program()
def bounds_that_change(function):
    "Slice bounds, pad widths and repetitions are Python numbers that come and go in turn."

    @function
    def step(x, number):
        k = number % 2 + 1
        return (
            x[:k] * 2.0,
            x[k],
            tf.pad(x, [[k, 0]]),
            tf.tile(x, [k]),
            tf.reshape(x, [k, -1]),
            tf.one_hot(k, 4),
            tf.range(k),
        )

    return Instance(step, each(lambda i: args(vector(i), i), 12))


@program(launches=False, why="every window is a path of its own, and none comes twice")
def window_that_slides(function):
    "A slice's start is another number on every call; the shape stays."

    @function
    def step(x, number):
        window = x[number : number + 3]
        return window * 2.0, tf.slice(x, [number], [2]), x[number], tf.gather(x, number + 1)

    return Instance(step, each(lambda i: args(vector(50, 16), i), 12))


@program()
def broadcasting(function):
    "Operands of different ranks, with ones and with scalars."

    @function
    def step(x, y):
        column = x[:, None]
        return (
            column + y,
            column * y - x[0],
            tf.maximum(column, 0.0),
            (column > y),
            tf.where(column > y, column, y),
        )

    return Instance(step, each(lambda i: args(vector(i, 3), vector(i + 1, 1, 2))))


@program()
def weights_of_a_mask(function):
    "A mask picks rows, and a mean over them is skipped when there are none."

    @function
    def step(rows, keep):
        kept = tf.boolean_mask(rows, keep)
        if tf.shape(kept)[0] == 0:
            return tf.zeros(2)
        return tf.reduce_mean(kept, 0)

    masks = [[True, False, True], [False, False, False]]
    return Instance(step, each(lambda i: args(vector(i, 3, 2), tf.constant(masks[i % 2]))))


@program()
def statically_known(function):
    "`set_shape`, `tf.ensure_shape` and `tf.TensorShape` agree with what is there."

    @function
    def step(x):
        y = tf.ensure_shape(x * 2.0, [None])
        y.set_shape([4])
        compatible = (
            y.shape.is_compatible_with([None]),
            y.shape == [4],
            tf.TensorShape([4]) == y.shape,
            y.shape.num_elements(),
        )
        return y, compatible, tf.TensorSpec([None], tf.float32).is_compatible_with(y)

    return Instance(step, each(lambda i: args(signed(i))), after=lambda r: r[0].shape.as_list())


@program()
def scalars_and_vectors_of_one(function):
    "A scalar and a vector of one element are kept apart."

    @function
    def step(x):
        y = tf.reduce_sum(x, keepdims=True)
        return (
            y,
            tf.squeeze(y),
            tf.reshape(x, []),
            tf.reshape(x, [1]) + tf.reshape(x, []),
            float(y[0]),
            y.shape.rank,
        )

    return Instance(step, each(lambda i: args(tf.reshape(whole(i), [1]))))
