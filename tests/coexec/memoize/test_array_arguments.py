"""Layers, losses and metrics that are given arrays: memoized, with the tensors that Keras would make of them."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.coexec import run_both

CALLS = 16


def check(make, skipped, calls=CALLS, whole=True):
    """Compares with eager, and counts memoized calls of the last three; `whole`: no array may keep one from that."""

    def seeded(decorate):
        keras.utils.clear_session(free_memory=False)  # both runs give the same names
        keras.utils.set_random_seed(3)
        return make(decorate)

    step = run_both(seeded, [(i,) for i in range(calls)])
    before = step.stats().regions
    for i in range(calls, calls + 3):
        step(i)
    assert step.stats().regions - before >= 3 * skipped, step.explain()
    assert not (skipped and whole) or "an argument is a ndarray" not in step.explain()
    return step


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_])
@pytest.mark.parametrize("wanted", ["float32", "float16", "int32", "int64"])
def test_functional_models(dtype, wanted):
    """Of each dtype, for inputs of each dtype: the same bits as Keras' own conversion, the model skipped as one."""

    def make(decorate):
        given = keras.Input((5,), dtype=wanted)
        as_float = keras.ops.cast(given, "float32")
        model = keras.Model(given, [keras.layers.Dense(3, activation="tanh")(as_float), given])

        @decorate
        def step(i):
            return model((np.random.default_rng(i).normal(size=(4, 5)) * 3).astype(dtype))

        return step

    check(make, skipped=1)


def test_functional_models_of_several_inputs():
    """Arrays in dicts and lists, by the inputs' names and positions, and as a keyword argument."""

    def make(decorate):
        ids, x = keras.Input((3,), dtype="int32", name="ids"), keras.Input((5,), name="x")
        inner = keras.layers.Flatten()(keras.layers.Embedding(9, 4)(ids))
        out = keras.layers.Dense(2)(keras.layers.Concatenate()([inner, x]))
        by_name, by_place = keras.Model({"ids": ids, "x": x}, out), keras.Model([ids, x], out)

        @decorate
        def step(i):
            rng = np.random.default_rng(i)
            given = {"ids": rng.integers(0, 9, (4, 3)), "x": rng.normal(size=(4, 5))}
            return by_name(given), by_name(inputs=given), by_place([given["ids"], given["x"]]), by_place(given)

        return step

    check(make, skipped=4)


def test_functional_models_with_a_call_of_their_own():
    """Their `call` sees the arrays themselves: it runs each time."""

    class Own(keras.Model):
        def call(self, inputs, training=None):
            return super().call(inputs * 2.0, training=training) + float(np.asarray(inputs).mean())

    def make(decorate):
        x = keras.Input((5,))
        model = Own(x, keras.layers.Dense(2)(x))

        @decorate
        def step(i):
            return model(np.random.default_rng(i).normal(size=(4, 5)).astype(np.float32))

        return step

    check(make, skipped=0)


@pytest.mark.parametrize("own", ["call", "call of the instance", "compute_mask"])
def test_functional_models_whose_code_sees_the_inputs(own):
    """It sees arrays, in each call."""

    def make(decorate):
        seen = []

        class Own(keras.Model):
            pass

        def noting(result):
            def method(self, inputs, *args, **kwargs):
                seen.append(type(inputs).__name__)
                return result(self, inputs, *args, **kwargs)

            return method

        if own == "call":
            Own.call = noting(lambda self, inputs, **kwargs: super(Own, self).call(inputs, **kwargs))
        elif own == "compute_mask":
            Own.compute_mask = noting(lambda self, inputs, previous_mask=None: None)
        x = keras.Input((5,))
        model = (Own if own in ("call", "compute_mask") else keras.Model)(x, keras.layers.Dense(2)(x))
        if own == "call of the instance":
            call = model.call
            model.call = lambda inputs, **kwargs: (seen.append(type(inputs).__name__), call(inputs, **kwargs))[1]

        @decorate
        def step(i):
            return model(np.random.default_rng(i).normal(size=(4, 5)).astype(np.float32)), list(seen)

        return step

    check(make, skipped=0)


def test_arrays_beside_tensors():
    """Keras refuses them, in the same words."""

    def make(decorate):
        x, y = keras.Input((3,), name="x"), keras.Input((3,), name="y")
        model = keras.Model({"x": x, "y": y}, x + y)

        @decorate
        def step(i):
            try:
                model({"x": np.ones((2, 3), np.float32), "y": tf.ones((2, 3)) * i})
            except ValueError as error:
                return str(error)

        return step

    check(make, skipped=0)


def test_keras_warns_of_an_array_in_place_of_a_list():
    """As in each eager call; a tensor in its place is taken without a word."""

    def make(decorate):
        keras.utils.set_random_seed(1)
        whole = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="inner"), keras.layers.Dense(1)])
        inner = keras.Model(whole.inputs, whole.get_layer("inner").output)
        step = decorate(lambda x: inner(x) * 2.0)

        def counted(x):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                result = step(x)
            return result, sum("structure of `inputs`" in str(w.message) for w in found)

        counted.stats = getattr(step, "stats", None)
        return counted

    arrays = [(np.full((2, 3), n, np.float32),) for n in range(8)]
    step = run_both(make, arrays)
    assert step.stats().followed >= 6
    step = run_both(make, [(tf.constant(array),) for (array,) in arrays])
    assert step.stats().regions > 0


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
def test_arrays_that_a_functional_model_leaves_alone(extra):
    """Those with names of no input, texts among them, are passed over; nothing is converted beside them."""

    def make(decorate):
        x, y = keras.Input((3,), name="x"), keras.Input((3,), name="y")
        models = [keras.Model(given, keras.layers.Dense(2)(x + y)) for given in ({"x": x, "y": y}, [x, y])]

        @decorate
        def step(i):
            rng = np.random.default_rng(i)
            given = {"x": rng.normal(size=(4, 3)), "y": rng.normal(size=(4, 3))}
            if extra:
                given["names"] = np.array(["a", "b"])
            found = []
            for model in models:
                try:
                    found.append(model(given))
                except ValueError as error:
                    found.append(str(error))
            return found

        return step

    check(make, skipped=0 if extra else 2)


def test_a_functional_model_given_another_shape_or_dtype():
    """What Keras reshapes, casts or refuses."""

    def make(decorate):
        x = keras.Input((5,))
        model = keras.Model(x, keras.layers.Dense(2)(x))

        @decorate
        def step(i):
            given = np.random.default_rng(i).normal(size=(4, 5))
            if i % 5 == 1:
                given = given[:, :4]
            if i % 5 == 2:
                given = given[..., None]
            if i % 5 == 3:
                given = given.astype(np.complex64)
            try:
                return model(given)
            except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
                return type(error).__name__, str(error)

        return step

    check(make, skipped=0, calls=30)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32, np.float64, np.bool_])
def test_metrics_of_labels_in_arrays(dtype):
    """Each update is skipped; the state is eager's."""

    def make(decorate):
        metrics = [
            keras.metrics.BinaryAccuracy(), keras.metrics.AUC(num_thresholds=20), keras.metrics.Precision(),
            keras.metrics.MeanSquaredError(), keras.metrics.F1Score(threshold=0.5), keras.metrics.BinaryIoU(),
        ]  # fmt: skip

        @decorate
        def step(i):
            rng = np.random.default_rng(i)
            labels = rng.integers(0, 2, (8, 1)).astype(dtype)
            predicted = tf.constant(rng.uniform(size=(8, 1)), tf.float32)
            for metric in metrics:
                metric.update_state(labels, predicted)
            metrics[0].update_state(labels, predicted, sample_weight=rng.uniform(size=(8, 1)).astype(np.float32))
            return [metric.result() for metric in metrics], [v.numpy() for m in metrics for v in m.variables]

        return step

    check(make, skipped=12 if dtype is not np.float64 else 6, whole=dtype in (np.int64, np.int32, np.bool_))


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float32, np.bool_])
def test_a_metric_that_wraps_a_function_of_the_programs(dtype):
    """The function sees the arrays themselves; so does a method of a metric derived from one of Keras'."""

    class Own(keras.metrics.MeanSquaredError):
        def update_state(self, labels, predicted, sample_weight=None):
            return super().update_state(labels * labels, predicted, sample_weight)

    def distance(labels, predicted):
        return keras.ops.abs(labels * 100 - predicted) * (2.0 if isinstance(labels, np.ndarray) else 1.0)

    def make(decorate):
        metrics = [keras.metrics.MeanMetricWrapper(distance), Own()]

        @decorate
        def step(i):
            rng = np.random.default_rng(i)
            labels = rng.integers(0, 2, (8, 1)).astype(dtype) * dtype(1)
            for metric in metrics:
                metric.update_state(labels, tf.constant(rng.uniform(size=(8, 1)), tf.float32))
            return [metric.result() for metric in metrics]

        return step

    check(make, skipped=0)


def test_a_metric_of_the_programs_own():
    """Its `update_state` sees the arrays themselves."""

    class Own(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.total = self.add_variable((), "zeros")

        def update_state(self, labels, predicted):
            self.total.assign_add(float(labels.max()) + tf.reduce_sum(predicted))

        def result(self):
            return self.total

    def make(decorate):
        metric = Own()

        @decorate
        def step(i):
            metric.update_state(np.arange(4) + i, tf.ones(3) * i)
            return tf.identity(metric.result())

        return step

    check(make, skipped=0)


def test_sparse_tensors():
    """A layer is given sparse tensors: new ones in each call, of changing values, counts and static shapes."""

    class Propagate(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(3)
            self.inner.build((None, 4))

        def call(self, x, adjacency):
            return tf.sparse.sparse_dense_matmul(adjacency, self.inner(x)) + float(adjacency.shape[0] or -1)

    def make(decorate):
        layer = Propagate()

        @decorate
        def step(i):
            rng = np.random.default_rng(i)
            count = 5 + (i % 7 == 6)
            places = np.stack([rng.integers(0, 6, count), rng.integers(0, 6, count)], 1)
            places = np.unique(places, axis=0)
            shape = tf.constant([6, 6], tf.int64)
            adjacency = tf.SparseTensor(places, tf.ones(len(places)) * (1.0 + i), shape)
            return layer(tf.constant(rng.normal(size=(6, 4)), tf.float32), adjacency)

        return step

    check(make, skipped=1, calls=40)


def refusing(form):
    """A model that is given arrays, one of whose layers refuses them where they have five columns."""
    names = ("a", "b")
    given = [keras.Input((None,), name=name) for name in names]
    layer = keras.layers.Rescaling(2.0, name="picky")
    outputs = [layer(given[0]), given[1]]
    layer.input_spec = keras.layers.InputSpec(ndim=2, axes={-1: 4})
    if form == "a list":
        model = keras.Model(given, outputs)
        return lambda x: model([x, x + 1.0])
    if form == "a dict":
        model = keras.Model(dict(zip(names, given, strict=True)), outputs)
        return lambda x: model({"a": x, "b": x + 1.0}, training=True)
    model = keras.Model(given[0], outputs[0])
    if form == "a model inside":
        outer = keras.Input((None,))
        model = keras.Model(outer, model(outer))
    return (lambda x: model(inputs=x)) if form == "by name" else model.__call__


@pytest.mark.parametrize("form", ["an array", "by name", "a list", "a dict", "a model inside"])
def test_an_error_names_the_arrays(form):
    def make(decorate):
        keras.utils.clear_session(free_memory=False)
        model = refusing(form)

        @decorate
        def step(i):
            x = np.random.default_rng(i).normal(size=(2, 5 if i in (0, 4, 9) else 4)).astype("float32")
            return model(x)

        return step

    step = run_both(make, [(i,) for i in range(14)])
    assert step.stats().regions >= 4, step.explain()
    with pytest.raises(ValueError, match="picky") as caught:
        step(9)
    assert ("array(" in str(caught.value)) == (form != "a model inside")
