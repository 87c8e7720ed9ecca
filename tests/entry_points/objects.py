"""Variables, tables, composites, files, models: objects that are made of tensors, and what converts them."""

import os

import keras
import numpy as np
import tensorflow as tf

from tests.entry_points import entry_point, refusal


class Masked(tf.experimental.ExtensionType):
    """A type of the program's own."""

    values: tf.Tensor
    mask: tf.Tensor


class Sequence:
    """What is a sequence only by its methods."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Given:
    """What NumPy and TensorFlow ask for its array."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.tensor, dtype)


class Converted:
    """What TensorFlow asks for its tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __tf_tensor__(self, dtype=None, name=None):
        return self.tensor


@entry_point
def variables(t):
    made = tf.Variable(t.floats), tf.Variable(lambda: t.floats), tf.Variable(initial_value=[t.number, t.number])
    made[0].assign(t.floats * 2.0)
    made[0].assign_add(t.floats)
    made[0].scatter_nd_update(t.pair[:, None], t.floats[:2])
    made[1].scatter_update(tf.IndexedSlices(t.floats[:2], t.pair))
    made[1][: t.two].assign(t.floats[2:])
    return [v.numpy() for v in made], made[0].gather_nd(t.pair[:, None]), made[1].sparse_read(t.pair), made[0][t.two]


@entry_point
def compat_variables(t):
    one = tf.compat.v1.Variable(t.floats, use_resource=True)
    return one.numpy(), one.shape, one.dtype.name


@entry_point
def variables_in_graphs(t):
    v = tf.Variable(t.floats)
    graph = tf.function(lambda: v.assign_add(t.floats))
    return graph(), v.numpy()


@entry_point
def keras_variables(t):
    made = keras.Variable(t.floats), keras.Variable(lambda shape, dtype: tf.reshape(t.floats, shape), shape=(4,))
    made[0].assign(t.floats * 2.0)
    made[1].assign_add(t.floats)
    return [v.numpy() for v in made], keras.ops.convert_to_numpy(made[0]), made[1].value


@entry_point
def tables(t):
    start = tf.lookup.KeyValueTensorInitializer(t.pair, t.floats[:2])
    table = tf.lookup.StaticHashTable(start, default_value=t.number)
    mutable = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, default_value=t.number)
    mutable.insert(t.pair, t.floats[:2])
    dense = tf.lookup.experimental.DenseHashTable(
        tf.int64, tf.float32, default_value=t.number, empty_key=t.pair[0] - 1, deleted_key=t.pair[0] - 2
    )
    dense.insert(t.pair, t.floats[:2])
    found = [each.lookup(t.pair + 1) for each in (table, mutable, dense)]
    return found, table[t.pair], mutable.export(), table.size(), dense.lookup(t.pair)


@entry_point
def tables_of_text(t):
    keys = tf.strings.as_string(t.pair)
    start = tf.lookup.KeyValueTensorInitializer(keys, t.pair)
    table = tf.lookup.StaticVocabularyTable(start, 1)
    return table.lookup(keys), table.lookup(tf.strings.join([keys, keys]))


@entry_point
def nested_lists(t):
    return (
        tf.convert_to_tensor([[t.number, 1.0], [t.floats[1], t.floats[2]]]),
        tf.convert_to_tensor([t.two, t.two]),
        tf.convert_to_tensor([[t.number], [2.0]]),
        tf.convert_to_tensor((t.number, np.float32(2.0))),
        tf.stack([t.number, 1.0]),
        tf.constant(t.floats),
        tf.constant(t.matrix, shape=[4]),
        tf.constant(t.number, tf.float32, [2]),
        tf.convert_to_tensor([t.two, 3]),
        tf.convert_to_tensor([t.floats, t.floats]),
        tf.convert_to_tensor([[[t.true]]]),
        tf.convert_to_tensor([[t.floats], [t.floats]]),
    )


@entry_point
def nested_lists_of_another_dtype(t):
    makers = (
        lambda: tf.constant([t.two, t.two], tf.int64),
        lambda: tf.constant([t.number], tf.float64),
        lambda: tf.constant([t.number, t.two]),
        lambda: tf.convert_to_tensor([t.number, t.two]),
        lambda: tf.constant(t.floats, tf.int32),
        lambda: tf.constant([t.true, 1]),
        lambda: tf.constant([[t.two], 1]),
        lambda: tf.constant({"a": t.two}),
        lambda: tf.constant([t.floats, t.number]),
        lambda: tf.constant([None, t.two]),
    )
    return [refusal(make) for make in makers]


@entry_point
def other_sequences(t):
    makers = (
        lambda: tf.constant(Sequence([t.number, t.number])),
        lambda: tf.convert_to_tensor(Sequence([t.two, 1])),
        lambda: tf.constant(Given(t.floats)),
        lambda: tf.convert_to_tensor(Converted(t.floats)),
        lambda: tf.stack([Converted(t.floats), t.floats]),
        lambda: tf.constant(np.array([t.number, t.two], object)),
        lambda: tf.add(Given(t.floats), t.floats),
        lambda: tf.add(Sequence([t.number] * 4), t.floats),
        lambda: tf.reshape(t.floats, Sequence([t.two, t.two])),
        lambda: tf.constant([Sequence([t.number])]),
        lambda: tf.constant({}.fromkeys([1]).keys()),
        lambda: tf.constant([Given(t.floats), Given(t.floats)]),
        lambda: tf.concat([Given(t.floats), [t.number]], 0),
        lambda: tf.constant([np.ones(4), t.floats]),
        lambda: tf.constant([[t.floats], np.ones((1, 4))]),
        lambda: tf.reduce_sum(Sequence([t.floats, t.floats])),
    )
    return [refusal(make) for make in makers]


@entry_point
def shapes(t):
    return (
        tf.zeros([t.two, 3]),
        tf.fill([t.two], t.number),
        tf.reshape(t.floats, [t.two, -1]),
        tf.range(t.two),
        tf.broadcast_to(t.number, [t.two]),
        tf.TensorShape([t.two, 2]),
        tf.ones(t.pair + 1),
        tf.eye(t.two),
        tf.slice(t.floats, [t.two], [t.two]),
        t.floats[t.two],
        t.floats[: t.two],
        tf.split(t.floats, int(t.two)),
        tf.split(t.floats, [t.two, t.two]),
        tf.tile(t.number[None], [t.two]),
        tf.one_hot(t.pair, t.two),
        tf.linspace(t.number, t.number * 2.0, t.two),
        tf.transpose(t.matrix, perm=t.pair),
        tf.random.uniform([t.two]).shape,
    )


@entry_point
def attributes(t):
    makers = (
        lambda: tf.reduce_sum(t.matrix, axis=t.two - 1),
        lambda: tf.stack([t.floats] * 2, axis=t.two - 1),
        lambda: tf.unstack(t.matrix, num=t.two),
        lambda: tf.reduce_sum(t.matrix, axis=0, keepdims=t.true),
        lambda: tf.nn.top_k(t.floats, k=t.two),
        lambda: tf.matmul(t.matrix, t.matrix, transpose_a=t.true),
        lambda: tf.squeeze(t.matrix[None], axis=t.two - 2),
        lambda: tf.nn.leaky_relu(t.floats, alpha=t.number),
        lambda: tf.argmax(t.matrix, axis=t.two - 1),
        lambda: tf.nn.dropout(t.floats, rate=t.number - 3.0),
        lambda: tf.raw_ops.LeakyRelu(features=t.floats, alpha=t.number),
        lambda: tf.gather(t.matrix, t.pair, axis=t.two - 1),
        lambda: tf.raw_ops.Concat(concat_dim=t.two - 2, values=[t.floats, t.floats]),
        lambda: tf.nn.moments(t.matrix, axes=[t.two - 2]),
        lambda: tf.image.resize(t.matrix[..., None], [t.two, t.two]),
        lambda: tf.raw_ops.Unpack(value=t.matrix, num=t.two),
        lambda: tf.raw_ops.Pack(values=[t.number], axis=t.two - 2),
        lambda: tf.strings.substr("abcd", t.two, t.two),
        lambda: tf.pad(t.floats, [[t.two, 0]], constant_values=t.number),
    )
    return [refusal(make) for make in makers]


@entry_point
def protos(t):
    made = [
        refusal(lambda v=v: tf.make_ndarray(tf.make_tensor_proto(v))) for v in (t.floats, [t.two], t.matrix.numpy())
    ]
    return made, tf.get_static_value(t.matrix), tf.get_static_value(t.two)


@entry_point
def specs(t):
    return (
        tf.TensorSpec.from_tensor(t.floats),
        tf.type_spec_from_value(t.matrix),
        tf.TensorSpec([None]).is_compatible_with(t.two),
        tf.is_tensor(t.floats),
        tf.is_symbolic_tensor(t.floats),
        isinstance(t.floats, tf.Tensor),
        type(t.floats).__name__,
        tf.nest.is_nested(t.floats),
        tf.shape(t.matrix),
        t.matrix.get_shape(),
        tf.rank(t.matrix),
        tf.size(t.matrix),
        tf.dtypes.as_dtype(t.floats.dtype).name,
        tf.math.confusion_matrix(t.pair, t.pair),
        t.matrix.ndim,
    )


@entry_point
def composites(t):
    indices = tf.stack([t.pair, t.pair], 1)
    sparse = tf.SparseTensor(indices, t.floats[:2], tf.constant([2, 2], tf.int64))
    ragged = tf.RaggedTensor.from_row_lengths(t.floats, t.pair + tf.constant([1, 2], tf.int64))
    slices = tf.IndexedSlices(t.floats[:2], t.pair, tf.constant([4]))
    flat = [tf.nest.flatten(c, expand_composites=True) for c in (sparse, ragged, slices)]
    again = [
        tf.nest.pack_sequence_as(c, f, expand_composites=True)
        for c, f in zip((sparse, ragged, slices), flat, strict=True)
    ]
    twice = tf.nest.map_structure(lambda a: a * 2, {"r": ragged}, expand_composites=True)
    tf.nest.assert_same_structure(sparse, again[0], expand_composites=True)
    return (
        tf.sparse.to_dense(again[0]),
        again[1].to_list(),
        tf.convert_to_tensor(again[2]),
        twice["r"].to_list(),
        tf.sparse.sparse_dense_matmul(sparse, t.matrix),
        tf.ragged.stack([t.floats, t.floats[:2]]).to_list(),
        (ragged * 2.0).to_list(),
        tf.function(lambda r: r + 1.0)(ragged).to_list(),
        tf.sparse.from_dense(t.matrix).values,
        tf.function(lambda: tf.sparse.reduce_sum(sparse))(),
        [tf.type_spec_from_value(c) for c in (sparse, ragged, slices)],
        sparse.shape,
        tf.ragged.constant([[1.0], []]).to_list(),
        ragged.numpy().tolist()[0].tolist(),
    )


@entry_point
def extension_types(t):
    masked = Masked(t.floats, t.floats > t.number)
    graph = tf.function(lambda m: tf.where(m.mask, m.values, 0.0))
    return (
        graph(masked),
        masked.values,
        tf.nest.flatten(masked, expand_composites=True),
        Masked([t.number], t.true).values,
    )


@entry_point
def structures(t):
    given = {"a": [t.floats, t.two], "b": (t.matrix,)}
    flat = tf.nest.flatten(given)
    return (
        flat,
        tf.nest.pack_sequence_as(given, flat),
        tf.nest.map_structure(lambda a, b: a + b, given, given),
        keras.tree.flatten(given),
        keras.tree.map_structure(lambda a: a * 2, given),
        keras.tree.pack_sequence_as(given, flat),
    )


@entry_point
def files(t):
    path = os.path.join(t.directory, "tensor")
    tf.io.write_file(path, tf.io.serialize_tensor(t.floats))
    again = tf.io.parse_tensor(tf.io.read_file(path), tf.float32)
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(t.floats.numpy().tobytes())
    text = tf.strings.join(["a", tf.strings.as_string(t.two)])
    np.save(path + ".npy", t.matrix)
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(tf.io.serialize_tensor(t.matrix).numpy())
    records = [tf.io.parse_tensor(r, tf.float32) for r in tf.data.TFRecordDataset(path)]
    return again, text, np.load(path + ".npy"), records, tf.io.gfile.exists(path)


@entry_point
def examples(t):
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=t.floats))
    integers = tf.train.Feature(int64_list=tf.train.Int64List(value=t.pair))
    example = tf.train.Example(features=tf.train.Features(feature={"a": feature, "b": integers}))
    kinds = {"a": tf.io.FixedLenFeature([4], tf.float32), "b": tf.io.FixedLenFeature([2], tf.int64)}
    return tf.io.parse_single_example(example.SerializeToString(), kinds)


@entry_point
def checkpoints(t):
    v, w = tf.Variable(t.floats), tf.Variable(tf.zeros([4]))
    path = tf.train.Checkpoint(v=v).write(os.path.join(t.directory, "checkpoint"))
    tf.train.Checkpoint(v=w).read(path).assert_consumed()
    tf.raw_ops.SaveV2(prefix=path + "raw", tensor_names=["a"], shape_and_slices=[""], tensors=[t.floats])
    raw = tf.raw_ops.RestoreV2(prefix=path + "raw", tensor_names=["a"], shape_and_slices=[""], dtypes=[tf.float32])
    return w.numpy(), raw, tf.train.load_variable(path, "v/.ATTRIBUTES/VARIABLE_VALUE")


@entry_point
def summaries(t):
    directory = os.path.join(t.directory, "logs")
    writer = tf.summary.create_file_writer(directory)
    with writer.as_default(step=0):
        tf.summary.write("tensor", t.floats, step=tf.cast(t.two, tf.int64))
        tf.summary.scalar("scalar", t.number)
        tf.summary.histogram("histogram", t.floats)
        tf.summary.text("text", tf.strings.as_string(t.two))
    writer.close()
    kept = []
    for name in sorted(tf.io.gfile.listdir(directory)):
        for record in tf.data.TFRecordDataset(os.path.join(directory, name)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            kept += [(event.step, v.tag, tf.make_ndarray(v.tensor).tolist()) for v in event.summary.value]
    tf.io.gfile.rmtree(directory)
    return kept


@entry_point
def generators(t):
    seed = tf.cast(tf.stack([t.two, t.two]), tf.int64)
    generator = tf.random.Generator.from_seed(int(t.two))
    state = tf.random.Generator.from_state(tf.concat([seed, seed[:1]], 0), tf.random.Algorithm.PHILOX)
    drawn = tf.random.stateless_uniform([2], seed=seed, minval=0.0, maxval=t.number)
    return generator.uniform([t.two]), state.normal([2]), drawn, keras.random.uniform((2,), seed=3), state.state.numpy()


@entry_point
def strings(t):
    words = tf.strings.as_string(t.pair)
    return (
        tf.strings.join([words, "a"]),
        tf.strings.reduce_join(words),
        tf.strings.to_number(words),
        tf.strings.length(words),
        tf.strings.split(words, "1").to_list(),
        tf.strings.regex_replace(words, "0", "z"),
        [w.decode() for w in words.numpy()],
        tf.io.encode_base64(words),
        tf.strings.unicode_encode([[65, 66]], "UTF-8"),
    )


@entry_point
def keras_layers(t):
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(2)
    outputs = dense(t.matrix)
    dense.set_weights([t.matrix, t.floats[:2]])
    normalization = keras.layers.Normalization(mean=t.number, variance=t.number)
    adapted = keras.layers.Normalization(axis=None)
    adapted.adapt(t.floats)
    lookup = keras.layers.IntegerLookup(vocabulary=[0, 1])
    return (
        outputs,
        dense(t.matrix),
        normalization(t.floats),
        adapted(t.floats),
        lookup(t.pair),
        dense.get_weights(),
        keras.losses.MeanSquaredError()(t.floats, t.floats * 2.0),
        keras.metrics.Mean()(t.floats),
        keras.initializers.Constant(t.number)((2,)),
    )


@entry_point
def keras_operations(t):
    square = keras.ops.custom_gradient(lambda a: (a * a, lambda *args, upstream=None: upstream))
    return (
        keras.ops.scan(lambda c, a: (c + a, c), t.number, t.floats),
        keras.ops.map(lambda a: a * t.number, t.floats),
        keras.ops.vectorized_map(lambda a: a * t.number, t.floats),
        keras.ops.fori_loop(0, 2, lambda i, a: a + 1.0, t.floats),
        keras.ops.cond(t.true, lambda: t.floats, lambda: t.floats),
        keras.ops.convert_to_numpy(t.floats),
        keras.ops.convert_to_tensor([t.number, 1.0]),
        keras.ops.array(t.floats),
        keras.ops.stop_gradient(t.floats),
        square(t.floats),
        keras.ops.shape(t.matrix),
        keras.ops.cast(t.two, "float32"),
        keras.ops.slice(t.floats, [0], [2]),
        keras.ops.while_loop(lambda a: keras.ops.sum(a) < 100.0, lambda a: (a * 2.0,), [t.floats]),
    )


def small_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model


@entry_point
def keras_fit(t):
    model = small_model()
    history = model.fit(t.matrix, t.matrix[:, :1], epochs=2, batch_size=2, shuffle=False, verbose=0)
    batch = model.train_on_batch(t.matrix, t.matrix[:, :1])
    return (
        history.history["loss"],
        model.predict(t.matrix, verbose=0),
        model.evaluate(t.matrix, t.matrix[:, 0], verbose=0),
        batch,
    )


@entry_point
def keras_fit_from_a_generator(t):
    def batches():
        while True:
            yield t.matrix, t.matrix[:, :1] * 2.0

    model = small_model()
    return model.fit(batches(), steps_per_epoch=2, epochs=1, shuffle=False, verbose=0).history[
        "loss"
    ], model.get_weights()


@entry_point
def keras_fit_from_a_generator_of_sparse_batches(t):
    def batches():
        while True:
            yield tf.sparse.from_dense(t.matrix), t.matrix[:, :1] * 2.0

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((2,), sparse=True), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model.fit(batches(), steps_per_epoch=2, epochs=1, shuffle=False, verbose=0).history[
        "loss"
    ], model.get_weights()


class Batches(keras.utils.PyDataset):
    """Batches that worker threads ask for."""

    def __init__(self, t, **options):
        super().__init__(**options)
        self.t = t

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.t.matrix * float(index), self.t.matrix[:, :1]


@entry_point
def keras_fit_from_workers(t):
    model = small_model()
    data = Batches(t, workers=2, max_queue_size=2)
    return model.fit(data, shuffle=False, epochs=1, verbose=0).history["loss"], model.get_weights()


@entry_point
def keras_fit_of_a_dataset(t):
    model = small_model()
    data = tf.data.Dataset.from_tensors((t.matrix, t.matrix[:, :1])).map(lambda a, b: (a * t.number, b)).repeat(2)
    return model.fit(data, epochs=1, shuffle=False, verbose=0).history["loss"], model.get_weights()


@entry_point
def keras_saving(t):
    model = small_model()
    model.set_weights([t.matrix[:, :1], t.floats[:1]])
    path = os.path.join(t.directory, "model.keras")
    model.save(path)
    return keras.models.load_model(path).get_weights()


@entry_point
def saved_models(t):
    module = tf.Module()
    module.kept, module.v = t.number, tf.Variable(t.floats)
    module.ask = tf.function(lambda a: a * module.v + module.kept, input_signature=[tf.TensorSpec([4])])
    path = os.path.join(t.directory, "module")
    tf.saved_model.save(module, path)
    again = tf.saved_model.load(path)
    return again.ask(t.floats), again.v.numpy()
