"""Tensors of other kinds: ragged, sparse, slices, strings, tables, datasets, extension types, odd dtypes."""

import tensorflow as tf

from tests.programs import Instance, args, each, integers, program, vector


@program()
def ragged(function):
    "Ragged tensors are made, computed with, iterated, read and returned."

    @function
    def step(x, lengths):
        r = tf.RaggedTensor.from_row_lengths(x, lengths)
        doubled = r * 2.0 + 1.0
        rows = [tf.reduce_sum(row) for row in doubled]
        dense = doubled.to_tensor(default_value=-1.0)
        return (
            doubled,
            rows,
            dense,
            tf.reduce_max(doubled, axis=1),
            doubled.to_list()[1],
            r.shape,
            r.bounding_shape(),
        )

    return Instance(
        step,
        each(lambda i: args(integers(i, 6, dtype="float32"), tf.constant([[1, 2, 3], [3, 1, 2]][i % 2]))),
    )


@program()
def ragged_arguments(function):
    "Ragged tensors go in, of another row length on each call."

    @function
    def step(r):
        mean = tf.reduce_mean(r, axis=1)
        return tf.concat([r, r], axis=1), mean, tf.ragged.stack([mean, mean * 2.0]), r.nrows()

    rows = [[[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0]]]
    return Instance(step, each(lambda i: args(tf.ragged.constant(rows[i % 2])), 10))


@program()
def sparse(function):
    "Sparse tensors are made, multiplied, reduced, made dense and returned."

    @function
    def step(values, x):
        s = tf.SparseTensor([[0, 0], [1, 2]], values, [2, 3])
        product = tf.sparse.sparse_dense_matmul(s, x)
        added = tf.sparse.add(s, s)
        return (
            added,
            product,
            tf.sparse.to_dense(s),
            tf.sparse.reduce_sum(s, 1),
            s.values * 2.0,
            tf.sparse.transpose(s).shape,
        )

    return Instance(step, each(lambda i: args(vector(i, 2), vector(i + 1, 3, 2))))


@program()
def sparse_arguments(function):
    "A sparse tensor goes in and a gradient with respect to its values comes out."

    @function
    def step(s, x):
        with tf.GradientTape() as tape:
            tape.watch(s.values)
            y = tf.reduce_sum(tf.sparse.sparse_dense_matmul(s, x) ** 2)
        return y, tape.gradient(y, s.values), tf.sparse.softmax(s)

    def arguments(i):
        return args(tf.SparseTensor([[0, 1], [2, 0]], vector(i, 2), [3, 2]), vector(i + 1, 2, 2))

    return Instance(step, each(arguments))


@program()
def indexed_slices(function):
    "IndexedSlices are made by hand, turned dense, added and applied."
    table = tf.Variable(tf.zeros([4, 2]))

    @function
    def step(x, rows):
        slices = tf.IndexedSlices(x, rows, dense_shape=tf.constant([4, 2]))
        table.scatter_add(slices)
        table.scatter_max(tf.IndexedSlices(x * 2.0, rows))
        return (
            slices,
            tf.convert_to_tensor(slices) * 2.0,
            slices.values + 1.0,
            tf.math.multiply(slices.values, 2.0),
        )

    return Instance(step, each(lambda i: args(vector(i, 2, 2), tf.constant([i % 4, 3]))), lambda: table)


@program()
def text(function):
    "Strings are joined, split, cut, replaced, hashed and turned into numbers, between numeric operations."

    @function
    def step(names, x):
        y = x * 2.0
        joined = tf.strings.reduce_join(names, separator="-")
        pieces = tf.strings.split(names, "a")
        numbers = tf.strings.to_number(tf.strings.as_string(tf.cast(y, tf.int32)))
        lower = tf.strings.lower(tf.strings.regex_replace(names, "[ab]", "X"))
        buckets = tf.strings.to_hash_bucket_fast(names, 7)
        return (
            joined,
            pieces,
            numbers + y,
            lower,
            buckets,
            tf.strings.substr(names, 0, 2),
            tf.strings.length(joined),
        )

    return Instance(step, each(lambda i: args(tf.constant(["bab", f"aa{i}"]), integers(i, dtype="float32"))))


@program()
def tables(function):
    "A static table is looked up and a mutable one is filled, counted and exported."
    keys = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64))
    static = tf.lookup.StaticHashTable(keys, default_value=-1)
    counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=0)

    @function
    def step(words):
        ids = static.lookup(words)
        counts.insert(ids, counts.lookup(ids) + 1)
        if counts.size() > 1:
            counts.remove(tf.constant([2], tf.int64))
        return ids * 10, int(counts.size())

    words = [["a", "a"], ["b", "c"], ["c", "a"]]

    def state():
        return sorted((int(k), int(v)) for k, v in zip(*counts.export()))

    return Instance(step, each(lambda i: args(tf.constant(words[i % 3])), 12), state)


@program()
def dataset_iterator(function):
    "`next` of a dataset's iterator in a step, until it is used up and starts again."
    dataset = tf.data.Dataset.range(5).map(lambda n: tf.cast(n, tf.float32) * 2.0).batch(2)
    state = {"iterator": iter(dataset), "epochs": 0}

    @function
    def step(x):
        try:
            batch = next(state["iterator"])
        except StopIteration:
            state["epochs"] += 1
            state["iterator"] = iter(dataset)
            batch = next(state["iterator"])
        return tf.reduce_sum(batch) * x

    return Instance(step, each(lambda i: args(vector(i)), 14), lambda: state["epochs"])


@program(follows=2)
def dataset_made_inside(function):
    "A dataset is made of the step's tensors, walked by a loop and reduced."

    @function
    def step(x):
        dataset = tf.data.Dataset.from_tensor_slices(x * 2.0).map(lambda row: row + 1.0).batch(2)
        total = tf.constant(0.0)
        for batch in dataset:
            total += tf.reduce_sum(batch)
        return (
            total,
            dataset.reduce(tf.constant(1.0), lambda a, b: a * tf.reduce_prod(b)),
            int(dataset.cardinality()),
        )

    return Instance(step, each(lambda i: args(vector(i)), 4))


@program()
def optional_next(function):
    "An iterator's optional elements say whether there is one."
    iterator = iter(tf.data.Dataset.range(6))

    @function
    def step(x):
        element = iterator.get_next_as_optional()
        if element.has_value():
            return x + tf.cast(element.get_value(), tf.float32)
        return x * 0.0

    return Instance(step, each(lambda i: args(vector(i)), 10))


@program()
def extension_type(function):
    "A `tf.experimental.ExtensionType` of the user's own, with a method and tensor fields."

    class Masked(tf.experimental.ExtensionType):
        values: tf.Tensor
        mask: tf.Tensor

        def filled(self, value):
            return tf.where(self.mask, self.values, value)

    @function
    def step(masked):
        y = masked.filled(0.0) * 2.0
        return Masked(values=y, mask=tf.logical_not(masked.mask)), y, isinstance(masked, Masked)

    return Instance(step, each(lambda i: args(Masked(vector(i), vector(i) > 0))))


@program()
def whole_numbers(function):
    "Whole numbers of every width wrap around, shift and divide as eagerly."

    @function
    def step(n):
        out = []
        for dtype in (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.int64, tf.uint32, tf.uint64):
            m = tf.cast(n, dtype)
            out += [
                m * m + m,
                tf.bitwise.left_shift(m, tf.ones_like(m)),
                m // tf.cast(3, dtype),
                tf.bitwise.invert(m),
            ]
        return out, tf.cast(n, tf.float32) / 3, n / 3, tf.math.floormod(-n, 5), tf.truncatediv(-n, 5)

    return Instance(step, each(lambda i: args(tf.constant([i + 1, 100, 127]))))


@program(rtol=1e-2, atol=1e-2)  # bfloat16 has two decimal digits
def small_floats(function):
    "float16, bfloat16 and float64 keep their dtype; complex numbers too."

    @function
    def step(x):
        out = []
        for dtype in (tf.float16, tf.bfloat16, tf.float64):
            y = tf.cast(x, dtype)
            out += [y * 2, y + y, tf.reduce_sum(y), tf.tanh(y)]
        z = tf.complex(x, x + 1.0)
        return out, z * z, tf.math.conj(z), tf.abs(z), tf.cast(z, tf.complex128), tf.math.real(z)

    return Instance(step, each(lambda i: args(vector(i))))


@program()
def special_floats(function):
    "Infinities, NaN, and negative zero come out as eagerly."

    @function
    def step(x):
        y = x / 0.0
        n = y - y
        tests = [
            tf.math.is_nan(n),
            tf.math.is_inf(y),
            n == n,
            tf.maximum(n, 1.0),
            tf.math.sign(y),
            1.0 / (x * 0.0),
        ]
        return (
            y,
            n,
            tests,
            tf.where(tf.math.is_nan(n), 0.0, n),
            tf.clip_by_value(y, -1.0, 1.0),
            bool(n[0] == n[0]),
        )

    return Instance(step, each(lambda i: args(tf.constant([1.0, -1.0, 0.0, -0.0]) * (1.0 - 2 * (i % 2)))))


@program()
def queues(function):
    "A queue holds tensors from one call to the next."
    queue = tf.queue.FIFOQueue(4, [tf.float32], shapes=[[2]])
    queue.enqueue(tf.zeros(2))

    @function
    def step(x):
        queue.enqueue(x * 2.0)
        return queue.dequeue() + 1.0, int(queue.size())

    return Instance(step, each(lambda i: args(vector(i, 2))), lambda: queue.size())


@program()
def parsed_examples(function):
    "Examples are serialised and parsed, as an input pipeline inside a step would."

    @function
    def step(x, number):
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[number, 2]))
        example = tf.train.Example(features=tf.train.Features(feature={"n": feature}))
        parsed = tf.io.parse_single_example(
            example.SerializeToString(), {"n": tf.io.FixedLenFeature([2], tf.int64)}
        )
        return x * tf.cast(parsed["n"][0], tf.float32), tf.io.decode_raw(
            tf.io.encode_base64("abcd"), tf.uint8
        )

    return Instance(step, each(lambda i: args(vector(i), i)))
