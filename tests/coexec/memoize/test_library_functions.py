"""Functions of TensorFlow and Keras that are memoized: by all of their names, random ones, in layers."""

import functools
import importlib
import operator
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.memoize.observe import Observation
from tests.snapshots import assert_same, snapshot
from tracer import library

CALLS = 12


def both(make, calls=CALLS):
    """The outcomes of an eager and of a followed step, from the same seeds; and the followed one."""
    outcomes = []
    for decorator in (lambda f: f, coexec.function(jit_compile=False)):
        tf.random.set_seed(3)
        step = decorator(make())
        given = [tf.constant(np.random.default_rng(n).uniform(0.1, 0.9, [4, 6, 3]), tf.float32) for n in range(calls)]
        outcomes.append([snapshot(step(x)) for x in given])
    return *outcomes, step


def assert_equal(make, regions, calls=CALLS):
    """Each call does what eager does, and so many of its calls at least are skipped."""
    expected, found, step = both(make, calls)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, rtol=1e-5, atol=1e-6, path=f"call {number}: ")
    assert step.stats().regions >= regions, step.explain()


RANDOM = {
    "uniform": lambda x: x + tf.random.uniform([4, 1, 3]),
    "normal": lambda x: x + tf.random.normal(tf.shape(x), stddev=0.5),
    "truncated": lambda x: x * tf.random.truncated_normal([3]),
    "integers": lambda x: x + tf.cast(tf.random.uniform([], 0, 5, tf.int32), tf.float32),
    "dropout": lambda x: tf.nn.dropout(x, 0.4),
    "flip": lambda x: tf.image.random_flip_left_right(x[None]),
    "brightness": lambda x: tf.image.random_brightness(x, 0.2),
    "crop": lambda x: tf.image.random_crop(x, [3, 3, 3]),
    "several": lambda x: tf.nn.dropout(x + tf.random.normal([3]), 0.2) * tf.random.uniform([6, 1]),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("seeded", ["before", "in it", "by operation"])
def test_random_numbers_are_eagers(name, seeded):
    """With one seed for all calls, with a seed that each call sets anew, and with a state that a loop goes on from."""

    def make():
        def step(x):
            if seeded == "in it":
                tf.random.set_seed(7)
            first = RANDOM[name](x)
            other = tf.random.uniform([2], seed=5) if seeded == "by operation" else tf.random.normal([2])
            return first, other, RANDOM[name](x)

        return step

    assert_equal(make, 0 if seeded == "in it" else CALLS - 8)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.nn.silu(x),
        lambda x: tf.nn.gelu(x, approximate=True),
        lambda x: tf.nn.conv1d(x, tf.ones([2, 3, 5]), 1, "SAME"),
        lambda x: tf.repeat(x, 2, axis=1),
        lambda x: tf.meshgrid(x[0, :, 0], x[1, :, 1]),
        lambda x: tf.linspace(0.0, x[0, 0, 0], 5),
        lambda x: tf.sort(x, axis=1, direction="DESCENDING"),
        lambda x: tf.signal.stft(x[:, :, 0], 4, 2),
        lambda x: tf.signal.frame(x, 2, 1, axis=1),
        lambda x: tf.image.resize(x, [2, 9]),
        lambda x: tf.image.ssim(tf.tile(x[:1], [3, 4, 1])[:3, :24], tf.ones([3, 24, 3]), 1.0, filter_size=3),
        lambda x: tf.image.per_image_standardization(x),
        lambda x: tf.linalg.logdet(tf.eye(3) + tf.matmul(x, x, transpose_a=True)),
        lambda x: tf.math.confusion_matrix([0, 1, 2], [2, 1, 0]) + tf.cast(x[0, 0, 0], tf.int32),
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(x, 2), x),
        lambda x: tf.nn.weighted_moments(x, [0], x + 1.0),
        lambda x: keras.losses.binary_crossentropy(x, x * 0.5),
        lambda x: tf.keras.losses.huber(x, x[::-1], delta=0.3),
        lambda x: keras.losses.sparse_categorical_crossentropy(tf.argmax(x, 2), x, from_logits=True),
        lambda x: keras.metrics.sparse_categorical_accuracy(tf.argmax(x, 2), x + tf.random.normal([3])),
        lambda x: keras.ops.dot_product_attention(*[x[:, :, None]] * 3),
        lambda x: keras.ops.layer_normalization(x, axis=-1),
        lambda x: keras.ops.where(x > 0.5, x, 0.0),
        lambda x: keras.ops.take_along_axis(x, keras.ops.argmax(x, axis=1)[:, None], axis=1),
        lambda x: keras.ops.vstack([x, x * 2.0]),
    ],
)
def test_functions_and_their_gradients(function):
    """A gradient through a skipped call is the gradient of its operations; both are skipped in the last call."""

    def make():
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = function(x * 1.5)
                parts = [part for part in tf.nest.flatten(result) if part.dtype == x.dtype] or [x]
                loss = tf.add_n([tf.reduce_sum(tf.abs(part)) for part in parts])
            return result, tape.gradient(loss, x)

        return step

    expected, found, step = both(make)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, rtol=1e-5, atol=1e-6, path=f"call {number}: ")
    before = step.stats().regions
    step(tf.ones([4, 6, 3]))
    assert step.stats().regions >= before + 2, step.explain()


def test_a_call_that_issues_an_operation_on_its_own_is_made():
    """How many rows come of a repetition by numbers of a list is up to the operation that finds them."""

    def make():
        return lambda x: tf.repeat(x, [1, 0, 2, 1], axis=0)

    assert_equal(make, 0)


def test_every_public_name_stands_for_the_wrapper():
    """`tensorflow.compat.v2`, which libraries import as `tf`, is a module of its own, and may be imported late."""
    library.install()
    sys.modules.pop("tensorflow.compat.v2", None)
    late = importlib.import_module("tensorflow.compat.v2")
    assert late.matmul is not tf.matmul
    library.install()  # as where the next function is decorated
    names = "matmul", "reduce_logsumexp", "nn.silu", "linalg.einsum", "random.normal", "math.reduce_sum"
    for find in map(operator.attrgetter, names):
        assert find(late) is find(tf)
        assert hasattr(find(tf), "__wrapped__")
    assert tf.reduce_logsumexp is tf.math.reduce_logsumexp
    library.uninstall()
    assert late.matmul is tf.matmul
    assert not library.is_wrapper(tf.random.normal)
    library.install()
    assert library.is_wrapper(late.random.normal)


def test_code_that_imports_another_name_is_answered_as_well():
    """As many operations are answered before TensorFlow's Python under `tensorflow.compat.v2` as under `tensorflow`."""
    import tensorflow.compat.v2 as other

    counts = []
    for module in (tf, other):

        @coexec.function(jit_compile=False)
        def step(x, module=module):
            return module.reduce_logsumexp(module.matmul(module.tanh(x), x, transpose_b=True), axis=1)

        for _ in range(CALLS):
            step(tf.ones([2, 3]))
        counts.append(step.stats().regions)
    assert counts[0] == counts[1] >= CALLS - 6


def test_an_error_in_a_layer_tells_what_it_was_given():
    """Where an operation may fail in a layer, whose message Keras writes, the function runs."""

    class Entropy(keras.layers.Layer):
        offset = 0

        def call(self, labels, logits):
            self.seen = labels  # not skipped as a whole
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)

    def make():
        layer = Entropy()

        def step(x):
            labels = tf.constant([0, 1, 2, 1 + 7 * (step.count == 9)])
            step.count += 1
            try:
                return float(tf.reduce_sum(layer(labels, x[:, 0])))
            except tf.errors.InvalidArgumentError as error:
                return str(error)

        step.count = 0
        return step

    expected, found, _ = both(make)
    assert expected == found


def test_keras_knows_its_functions():
    """What is compiled with a function, saved, and loaded is what eager makes of it."""
    library.install()
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, activation=keras.ops.silu)])
    loss, metric = keras.losses.mean_squared_error, keras.metrics.binary_accuracy
    assert library.is_wrapper(loss)
    assert loss is tf.keras.losses.MSE
    assert keras.losses.serialize(loss) == keras.losses.serialize(library.behind(loss))
    assert keras.metrics.serialize(metric) == keras.metrics.serialize(library.behind(metric))
    assert pickle.loads(pickle.dumps(loss)) is loss
    model.compile("sgd", loss=loss, metrics=[metric])
    x = np.linspace(0.0, 1.0, 12).reshape(4, 3).astype("float32")
    one = model.evaluate(x, x[:, :2], verbose=0, return_dict=True)
    assert sorted(one) == ["binary_accuracy", "loss"]
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    other.compile("sgd", loss="mean_squared_error", metrics=["binary_accuracy"])
    assert other.evaluate(x, x[:, :2], verbose=0, return_dict=True) == one


def test_symbolic_tensors_of_keras():
    """Functional models are made of the wrappers as of the functions, in followed calls, too."""

    @coexec.function
    def made(x):
        inputs = keras.Input([3])
        return keras.Model(inputs, keras.ops.normalize(keras.ops.vstack([inputs, inputs])))(x)

    x = tf.ones([2, 3])
    expected = keras.ops.normalize(keras.ops.vstack([x, x]))
    for _ in range(4):
        np.testing.assert_allclose(made(x), expected, rtol=1e-6)


def test_a_number_that_changes_is_seen():
    """Arguments count by value; an array that changes in place is read in each call."""
    delta, array = 0.1, np.ones(3, np.float32)

    def make():
        def step(x):
            nonlocal delta
            delta = delta + 0.1 if step.count % 3 == 0 else delta
            array[:] = step.count
            step.count += 1
            return keras.losses.huber(x[:, 0], x[:, 1], delta=delta), keras.losses.huber(x[0], array, delta=0.5)

        nonlocal delta
        step.count, delta = 0, 0.1
        return step

    assert_equal(make, 0)


@pytest.mark.parametrize(
    "function",
    [lambda x, y, n: keras.losses.huber(x, y, n), lambda x, y, n: tf.nn.gelu(tf.clip_by_norm(x, clip_norm=n)) + y],
)
def test_numbers_of_a_schedule_are_fed(function, monkeypatch):
    """A function that is given another float in each call is followed, with the float as a feed, and never observed."""
    observed, observe = [], Observation.call
    monkeypatch.setattr(Observation, "call", lambda *args: observed.append(args) or observe(*args))

    def plain(x, number):
        return function(x, x[::-1], number) * 2.0

    step = coexec.function(plain, jit_compile=False)
    x, known = tf.constant([[0.1, 0.7], [1.5, 0.2]]), []
    for number in (*[0.5] * 5, *np.linspace(0.4, 0.1, CALLS).tolist()):
        np.testing.assert_allclose(step(x, number), plain(x, number), rtol=1e-6)
        known.append((len(observed), step.trace_graph.steps))
    assert known[4][0] >= 2
    assert known[-1][0] == known[4][0], known
    assert len(set(known[7:])) == 1, known


GIVEN = {
    "a class as a dtype": lambda x: x + tf.cast(tf.random.uniform([3], 0, 9, np.int32), x.dtype),
    "a class by name": lambda x: tf.eye(3, dtype=np.float32) @ x[0][:3] + tf.zeros([3, 3], dtype=float),
    "a shape in an array": lambda x: x + tf.random.normal(np.array([6, 3]), stddev=np.float32(0.5)),
    "no shape at all": lambda x: x + tf.random.uniform(np.array([], np.int32)),
    "axes in an array": lambda x: tf.tensordot(x, tf.ones([3, 2]), axes=np.array([[2], [0]])),
    "numbers of NumPy": lambda x: tf.clip_by_norm(x, np.float32(1.5)) + tf.linspace(np.float32(0), np.float32(1), 3),
    "a bool of NumPy": lambda x: tf.reduce_logsumexp(x, 1, keepdims=np.bool_(True)),
    "a function of TensorFlow's": lambda x: tf.signal.stft(x[0, :, 0], 4, 2, window_fn=tf.signal.hamming_window),
    "a part of one": lambda x: tf.signal.stft(x[0, :, 0], 4, 2, window_fn=WINDOW),
}

WINDOW = functools.partial(tf.signal.hann_window, periodic=False)


@pytest.mark.parametrize("given", GIVEN)
def test_what_a_function_may_be_given(given):
    def make():
        return GIVEN[given]

    assert_equal(make, CALLS - 4)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
@pytest.mark.parametrize("change", ["once", "in each call", "in shape", "to a number", "by sign"])
def test_an_array_that_is_changed_in_place_is_seen(change, kind):
    """Arrays of whole numbers are compared by their values, dtypes and shapes, however often they were the same.

    Those of floats are data.
    """

    def make():
        held = [np.array([2, 3, 0], kind)]
        count = [0]

        def step(x):
            count[0] += 1
            if count[0] > 7:
                if change == "in each call":
                    held[0][0] = count[0]
                elif change == "once":
                    held[0][1] = 7
                elif change == "in shape":
                    held[0] = np.array([[2, 3, 0]], kind)
                elif change == "to a number":
                    held[0] = kind(2)
                else:
                    held[0][2] = -0.0
            clipped = tf.cast(tf.clip_by_value(held[0], -1, 5), tf.float32)
            return tf.math.atan2(x * 0.0, clipped), tf.nn.silu(clipped)

        return step

    assert_equal(make, 1 if kind is np.int32 else 0)


def test_a_class_is_the_one_that_is_given():
    """Those of the program may be changed, and are no reason to skip a call."""

    def make():
        kinds = [np.float32, float, np.float64, tf.float32, np.dtype("f4"), np.int32]
        count = [0]

        def step(x):
            count[0] += 1
            kind = kinds[count[0] // 2 % len(kinds)]
            return tf.random.uniform([2], 0, 5, kind), tf.zeros_like(x, dtype=kind), tf.repeat(x, np.array([2]), axis=0)

        return step

    assert_equal(make, 1)


def test_a_function_is_the_one_that_is_given():
    """And a partial one by all that it has; the program's own may do anything."""

    def make():
        windows = [
            tf.signal.hann_window, tf.signal.hamming_window, WINDOW,
            functools.partial(tf.signal.hann_window, periodic=True),
            lambda n, dtype: tf.cast(tf.range(n + count[0]), dtype)[:n] * count[0],
            eval("lambda n, dtype: tf.ones(n, dtype)", {"tf": tf}),  # of no module
        ]  # fmt: skip
        count = [0]

        def step(x):
            count[0] += 1
            window = windows[count[0] // 3 % len(windows)]
            return tf.abs(tf.signal.stft(x[0, :, 0], 4, 2, window_fn=window))

        return step

    assert_equal(make, 4, 36)


LABELLED = {
    "one_hot": lambda x, labels: tf.one_hot(labels, 3) * x,
    "cross entropy": lambda x, labels: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x),
    "cross entropy by name": lambda x, labels: tf.nn.sparse_softmax_cross_entropy_with_logits(logits=x, labels=labels),
    "segments": lambda x, labels: tf.math.unsorted_segment_mean(x, labels, 3),
    "of Keras": lambda x, labels: keras.losses.sparse_categorical_crossentropy(labels, tf.nn.softmax(x)),
    "a metric of Keras": lambda x, labels: keras.metrics.sparse_categorical_accuracy(labels, x),
}


@pytest.mark.parametrize("size", [5, 40])
@pytest.mark.parametrize("dtype", ["i8", "i4", "u1", "f4"])
@pytest.mark.parametrize("name", LABELLED)
def test_labels_in_arrays(name, dtype, size):
    """They are data, as few as they may be: other ones are fed. What is no label is what it is eagerly."""

    def make():
        count = [0]

        def step(x):
            count[0] += 1
            labels = np.random.default_rng(count[0]).integers(0, 3, size).astype(dtype)
            rows = tf.tile(tf.reshape(x, [-1, 3])[:5], [size // 5, 1])
            if dtype in ("i8", "i4"):
                return LABELLED[name](rows, labels)
            try:
                return LABELLED[name](rows, labels)
            except (TypeError, ValueError, tf.errors.OpError) as error:
                return type(error), str(error)

        return step

    assert_equal(make, CALLS if dtype in ("i8", "i4") else 0, 2 * CALLS)


IMPORTING = """
import tensorflow as tf
{0}
import coexec

def step(x):
    {2}
    for limit in (20.0, 30.0, 40.0):
        tf.debugging.assert_less(x, limit)
        tf.debugging.assert_greater(x, -limit)
    return tf.math.reduce_std(x) + tf.linalg.trace(x)

step = coexec.function(step)
{1}
for n in range(12):
    step(tf.constant([[1.0, 2.0], [3.0, n]]))
from tracer.library import behind
functions = tf.debugging.assert_less, tf.math.reduce_std, tf.linalg.trace
print("regions", step.stats().regions, all(behind(function) is not function for function in functions))
"""
IMPORTS = "import tensorflow.debugging, tensorflow.linalg; from tensorflow.math import reduce_std"


@pytest.mark.parametrize("where", range(3), ids=["before coexec", "behind the decorator", "in the step"])
def test_modules_of_tensorflow_that_are_imported_by_name(where):
    """`import tensorflow.linalg` makes a second module, which becomes `tf.linalg`; its functions are wrapped, too."""

    def regions(*statements):
        program = IMPORTING.format(*statements)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        count, wrapped = done.stdout.split("regions")[1].split()
        assert wrapped == "True"
        return int(count)

    usual = regions("", "", "")
    assert usual >= 48
    assert regions(*(IMPORTS if place == where else "" for place in range(3))) >= usual - 8
