"""tf.data: what datasets are made of and capture, and what their Python gives on threads of TensorFlow's own."""

import os

import tensorflow as tf

from tests.entry_points import entry_point

FLOAT = tf.TensorSpec([], tf.float32)
FLOATS = tf.TensorSpec([4], tf.float32)


@entry_point
def sources(t):
    made = (
        tf.data.Dataset.from_tensors((t.floats, {"n": t.two})),
        tf.data.Dataset.from_tensor_slices((t.floats, t.floats)),
        tf.data.Dataset.range(tf.cast(t.two, tf.int64)),
        tf.data.Dataset.from_tensors(tf.sparse.from_dense(t.matrix)),
        tf.data.Dataset.from_tensor_slices(tf.RaggedTensor.from_row_lengths(t.floats, [1, 3])),
        tf.data.Dataset.from_tensor_slices([t.floats, t.floats]),
        tf.data.Dataset.from_tensors([t.number, t.number]),
    )
    return [list(each) for each in made]


@entry_point
def arguments(t):
    count = tf.cast(t.two, tf.int64)
    numbers = tf.data.Dataset.range(8)
    made = (
        numbers.take(count),
        numbers.skip(count),
        numbers.batch(count),
        numbers.repeat(count).take(3),
        numbers.shard(count, 0),
        numbers.window(count).flat_map(lambda w: w.batch(2)),
        numbers.enumerate(count),
        numbers.shuffle(count, seed=1),
        numbers.batch(3).padded_batch(count, [4], t.pair[0]),
        numbers.interleave(lambda n: tf.data.Dataset.from_tensors(n), cycle_length=count),
    )
    return [list(each) for each in made]


@entry_point
def captured_by_maps(t):
    numbers = tf.data.Dataset.range(3)
    made = (
        numbers.map(lambda n: t.floats * tf.cast(n, tf.float32)),
        numbers.filter(lambda n: n < tf.cast(t.two, tf.int64)),
        numbers.flat_map(lambda n: tf.data.Dataset.from_tensors(t.floats)),
        numbers.scan(t.number, lambda s, n: (s + t.number, s)),
        numbers.take_while(lambda n: t.true),
    )
    return [list(each) for each in made]


@entry_point
def reduced(t):
    numbers = tf.data.Dataset.range(3)
    return numbers.reduce(t.number, lambda s, n: s + t.number), numbers.apply(
        lambda d: d.take(int(t.two))
    ).cardinality()


@entry_point
def mixed(t):
    ones, twos = tf.data.Dataset.from_tensors(t.number).repeat(2), tf.data.Dataset.from_tensors(t.floats[1]).repeat(2)
    chosen = tf.data.Dataset.choose_from_datasets([ones, twos], tf.data.Dataset.from_tensor_slices(t.pair))
    sampled = tf.data.Dataset.sample_from_datasets([ones, twos], weights=[1.0, 0.0], seed=1)
    return list(chosen), list(sampled.take(2)), list(tf.data.Dataset.zip((ones, twos))), list(ones.concatenate(twos))


@entry_point
def generator_of_tensors(t):
    def items():
        yield from t.floats

    return list(tf.data.Dataset.from_generator(items, output_signature=FLOAT))


@entry_point
def generator_of_one_tensor(t):
    def items():
        yield t.floats
        yield t.floats * 2.0

    return list(tf.data.Dataset.from_generator(items, output_signature=FLOATS))


@entry_point
def generator_of_structures(t):
    def items():
        for _ in range(2):
            yield {"a": t.floats, "b": (t.two, [t.number, t.number])}

    signature = {"a": FLOATS, "b": (tf.TensorSpec([], tf.int32), tf.TensorSpec([2]))}
    return list(tf.data.Dataset.from_generator(items, output_signature=signature))


@entry_point
def generator_of_composites(t):
    def items():
        yield (
            tf.sparse.from_dense(t.matrix),
            tf.RaggedTensor.from_row_lengths(t.floats, t.pair + tf.constant([1, 2], tf.int64)),
        )
        sparse = tf.SparseTensor(t.pair[:, None], t.floats[:2], tf.constant([4], tf.int64))
        yield (
            tf.sparse.reshape(sparse, [2, 2]),
            tf.RaggedTensor.from_row_splits(t.floats, tf.constant([0, 4], tf.int64)),
        )

    signature = tf.SparseTensorSpec([2, 2]), tf.RaggedTensorSpec([None, None], row_splits_dtype=tf.int64)
    made = tf.data.Dataset.from_generator(items, output_signature=signature)
    return [(tf.sparse.to_dense(s), r.to_list()) for s, r in made]


@entry_point
def generator_by_types(t):
    def items():
        yield t.floats, t.two

    return list(tf.data.Dataset.from_generator(items, (tf.float32, tf.int32), args=None))


@entry_point
def generator_with_arguments(t):
    def items(a, n):
        for _ in range(n):
            yield a

    return list(tf.data.Dataset.from_generator(items, args=(t.floats, t.two), output_signature=FLOATS))


@entry_point
def generator_behind_others(t):
    def items():
        for n in range(4):
            yield t.number * float(n)

    made = tf.data.Dataset.from_generator(items, output_signature=FLOAT)
    return list(made.map(lambda a: a * t.number, num_parallel_calls=2).batch(2).prefetch(1)), list(
        made.as_numpy_iterator()
    )


@entry_point
def py_functions_in_maps(t):
    numbers = tf.data.Dataset.range(3)
    made = (
        numbers.map(lambda n: tf.py_function(lambda m: t.floats, [n], tf.float32)),
        numbers.map(lambda n: tf.py_function(lambda m: t.floats, [n], tf.float32), num_parallel_calls=2),
        numbers.map(lambda n: tf.py_function(lambda m: m, [n], tf.int64)),
        numbers.map(lambda n: tf.numpy_function(lambda m: t.floats, [n], tf.float32)),
    )
    return [list(each) for each in made]


@entry_point
def iterators(t):
    iterator = iter(tf.data.Dataset.from_tensor_slices(t.floats))
    first = next(iterator), iterator.get_next(), iterator.get_next_as_optional().get_value()
    optional = tf.experimental.Optional.from_value((t.floats, t.two))
    return first, optional.get_value(), tf.data.Dataset.from_tensors(t.floats).get_single_element()


@entry_point
def kept_on_disk(t):
    path = os.path.join(t.directory, "dataset")
    tf.data.Dataset.from_tensor_slices(t.floats).save(path)
    loaded = list(tf.data.Dataset.load(path))
    tf.io.gfile.rmtree(path)
    return loaded


@entry_point
def grouped(t):
    made = tf.data.Dataset.range(6).group_by_window(
        key_func=lambda n: n % tf.cast(t.two, tf.int64), reduce_func=lambda k, w: w.batch(3), window_size=3
    )
    return list(made)
