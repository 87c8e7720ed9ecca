"""Keras 2 (`tf_keras`): its calls are memoized as those of Keras 3, and notice what they must. Eager is the oracle."""

import logging
import subprocess
import sys
import textwrap
import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as k2

import coexec
from tests.coexec import run_both
from tests.snapshots import assert_same, snapshot
from tracer import effects, keras_packages

pytestmark = [  # of tf_keras itself, of some versions
    pytest.mark.filterwarnings("ignore:non-integer arguments to randrange:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The initializer .* is unseeded:UserWarning"),
]
CALLS = 16  # enough for learning, confirming, skipping and running again
SHARED = {"factor": 1.0}


def batch(i, features=4):
    numbers = np.random.default_rng(i)
    return tf.constant(numbers.normal(size=(6, features)), tf.float32), tf.constant(numbers.integers(3, size=6))


def mlp(*extra):
    return k2.Sequential([k2.layers.Dense(8, activation="relu"), *extra, k2.layers.Dense(3)])


class Training:
    """A model, its optimizer, a metric and a training step as guides to Keras 2 write it."""

    def __init__(self, model=mlp, optimizer=None, metric=None, inputs=batch):
        k2.backend.clear_session()  # names, and the learning phase
        k2.utils.set_random_seed(1)
        self.model = model()
        self.optimizer = k2.optimizers.Adam(0.01) if optimizer is None else optimizer()
        self.objective = k2.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.metric = k2.metrics.SparseCategoricalAccuracy() if metric is None else metric()
        self.model(inputs(0)[0])  # builds it
        self.log = []
        self.flags = {"training": True}

    def step(self, x, y):
        with tf.GradientTape() as tape:
            predicted = self.model(x, **self.flags)
            loss = self.objective(y, predicted) + sum(self.model.losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.metric.update_state(y, predicted)
        self.log.append(float(loss))
        return loss

    def state(self):
        optimizer = self.optimizer.variables
        variables = optimizer() if callable(optimizer) else optimizer
        return self.model.variables, variables, self.metric.variables, self.log


def compare(make, change=None, calls=CALLS, regions=3, inputs=batch, raises=()):
    """Trains eagerly and co-executed; `change(training, i)` happens before call i. Returns the decorated function."""
    outcomes, function = [], None
    for decorated in (False, True):
        training = make()
        step = training.step
        if decorated:
            step = function = coexec.function(step)
        found = []
        for i in range(calls):
            if change is not None:
                change(training, i)
            try:
                result = step(*inputs(i))
            except raises as error:
                result = error.with_traceback(None)
            found.append(snapshot((result, training.state())))
        outcomes.append(found)
    for number, (one, other) in enumerate(zip(*outcomes, strict=True)):
        assert_same(one, other, rtol=1e-4, atol=1e-5, path=f"call {number}: ")
    assert function.stats().regions >= regions * (calls - 12), function.explain()
    return function


def test_a_training_step_is_memoized_calls():
    """The model, the loss, the gradient, the optimizer and the metric: little Python of Keras 2 is left."""
    function = compare(Training, calls=30)
    before = function.stats()
    function(*batch(99))
    after = function.stats()
    assert after.regions - before.regions == 5, function.explain()
    assert after.launches - before.launches <= 2


def words(i):
    """Of ever other kinds, the same ones several times."""
    numbers = np.random.default_rng(i)
    return tf.constant(numbers.integers(2 + i % 13, size=(6, 5))), tf.constant(numbers.integers(3, size=6))


def embedded():
    return k2.Sequential([k2.layers.Embedding(16, 4), k2.layers.GlobalAveragePooling1D(), k2.layers.Dense(3)])


SPARSE = {
    "Adam": lambda: k2.optimizers.Adam(0.01),
    "AMSGrad": lambda: k2.optimizers.Adam(0.01, amsgrad=True, weight_decay=0.01),
    "AdamW": lambda: k2.optimizers.AdamW(0.01, clipnorm=1.0),
    "Adagrad": lambda: k2.optimizers.Adagrad(0.1),
    "Adadelta": lambda: k2.optimizers.Adadelta(0.1),
    "Adamax": lambda: k2.optimizers.Adamax(0.01),
    "Ftrl": lambda: k2.optimizers.Ftrl(0.1),
    "RMSprop": lambda: k2.optimizers.RMSprop(0.01, centered=True, momentum=0.9),
    "SGD": lambda: k2.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "clipped": lambda: k2.optimizers.Adam(k2.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5), global_clipnorm=0.1),
    "averaging": lambda: k2.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=5),
    "of Keras 2.10": lambda: k2.optimizers.legacy.Adagrad(0.1),
}


@pytest.mark.parametrize("name", SPARSE)
def test_rows_of_a_table_are_updated_in_a_memoized_call(name):
    """How many there are differs from call to call, and nobody asks."""
    function = compare(lambda: Training(embedded, SPARSE[name], inputs=words), calls=30, inputs=words)
    before, steps = function.stats(), function.trace_graph.steps
    for i in range(30, 38):
        function(*words(i))
    after = function.stats()
    if name not in ("averaging", "of Keras 2.10"):  # effects that not every call has; kernels for rows
        assert after.regions - before.regions == 8 * 5, function.explain()
        assert after.launches - before.launches == 8, function.explain()
        assert function.trace_graph.steps == steps, "steps were added for a number of rows"


@pytest.mark.parametrize("change", ["rate", "row by row", "frozen", "clipping", "method"])
def test_rows_of_a_table_and_what_changes(change):
    def turn(training, i):
        if change == "rate":
            training.optimizer.learning_rate = 0.01 / (1 + i % 4)
        elif change == "frozen" and i in (9, 14):
            training.model.layers[0].trainable = i == 14
        elif change == "clipping" and i == 10:
            training.optimizer.clipnorm = 0.01
        elif change == "method" and i == 10:
            training.optimizer._deduplicate_sparse_grad = lambda grads: [
                tf.IndexedSlices(g.values * 0.5, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else g
                for g in grads
            ]

    def rows(i):
        x, y = words(i)
        return (x[:1], y[:1]) if change == "row by row" and i % 3 == 0 else (x, y)

    compare(lambda: Training(embedded, inputs=rows), turn, calls=24, regions=2, inputs=rows)


def functional():
    inputs = k2.Input((4,))
    shared = k2.layers.Dense(4, activation="tanh")
    hidden = k2.layers.Concatenate()([shared(inputs), shared(inputs * 2.0)])
    return k2.Model(inputs, k2.layers.Dense(3)(k2.layers.LayerNormalization()(hidden)))


class Blocks(k2.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [k2.layers.Dense(4, activation="relu") for _ in range(2)]
        self.head = k2.layers.Dense(3)

    def call(self, x, training=None):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * SHARED["factor"]


class Counting(Blocks):
    """A `call` with an effect of its own."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def call(self, x, training=None):
        self.calls.append(training)
        return super().call(x, training)


def regularized():
    return k2.Sequential([
        k2.layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1", kernel_constraint="unit_norm"),
        k2.layers.ActivityRegularization(0.1),
        k2.layers.Dense(3, bias_regularizer="l2"),
    ])  # fmt: skip


def convolutional():
    return k2.Sequential([
        k2.layers.Reshape((2, 2, 1)),
        k2.layers.Conv2D(3, 2, padding="same", use_bias=False),  # whose gradient would be noise before what follows
        k2.layers.BatchNormalization(),
        k2.layers.MaxPool2D(),
        k2.layers.Flatten(),
        k2.layers.Dense(3),
    ])  # fmt: skip


MODELS = {
    "sequential": mlp,
    "functional": functional,
    "subclass": Blocks,
    "with effects": Counting,
    "nested": lambda: k2.Sequential([functional(), k2.layers.Dense(4), Blocks()]),
    "regularized": regularized,
    "convolutional": convolutional,
    "dropout": lambda: mlp(k2.layers.Dropout(0.3), k2.layers.GaussianNoise(0.1)),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_of_every_kind(model):
    regions = 2 if model in ("with effects", "regularized") else 3
    compare(lambda: Training(MODELS[model]), regions=regions)


OPTIMIZERS = {
    "momentum": lambda: k2.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "schedule": lambda: k2.optimizers.Adam(k2.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "clipped": lambda: k2.optimizers.RMSprop(0.01, global_clipnorm=0.1),
    "decayed": lambda: k2.optimizers.AdamW(0.01, weight_decay=0.1),
    "averaged": lambda: k2.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "legacy": lambda: k2.optimizers.legacy.Adam(0.01, decay=0.1),
    "legacy momentum": lambda: k2.optimizers.legacy.SGD(0.1, momentum=0.9, clipvalue=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_of_both_generations(optimizer):
    compare(lambda: Training(optimizer=OPTIMIZERS[optimizer]))


def test_another_learning_rate():
    def change(training, i):
        if i == 8:
            training.optimizer.learning_rate = 0.5
        if i == 11:
            training.optimizer.learning_rate.assign(0.001)

    compare(Training, change)


def test_another_hyperparameter():
    def change(training, i):
        if i == 9:
            training.optimizer.clipvalue = 1e-4
        if i == 12:
            training.optimizer.beta_1 = 0.1

    compare(Training, change, regions=2)


@pytest.mark.filterwarnings("ignore:.*set_learning_phase")
def test_training_is_said_or_is_the_phase():
    def change(training, i):
        training.flags = [{"training": True}, {"training": False}, {}][i // 3 % 3]
        k2.backend.set_learning_phase(i // 9 % 2)

    make = lambda: Training(lambda: mlp(k2.layers.BatchNormalization(), k2.layers.Dropout(0.5)))  # noqa: E731
    try:
        compare(make, change, calls=30, regions=2)
    finally:
        k2.backend.clear_session()


def test_a_frozen_layer():
    def change(training, i):
        training.model.layers[1].trainable = not 8 <= i < 12

    compare(lambda: Training(lambda: mlp(k2.layers.BatchNormalization())), change, regions=2)


def test_attributes_of_a_layer():
    def change(training, i):
        first, drop = training.model.layers[:2]
        if i == 8:
            drop.rate = 0.9
        if i == 10:
            first.activation = tf.nn.tanh
        if i == 12:
            vars(first)["activation"] = tf.nn.sigmoid  # without `__setattr__`
        if i == 14:
            first.use_bias = False

    compare(lambda: Training(lambda: mlp(k2.layers.Dropout(0.3))), change, calls=18, regions=2)


def test_containers_and_globals_of_a_model():
    def change(training, i):
        if i == 8:
            training.model.blocks.append(k2.layers.Dense(4))
        if i == 10:
            training.model.blocks[0] = training.model.blocks[1]
        SHARED["factor"] = 2.0 if i == 12 else 1.0

    compare(lambda: Training(Blocks, optimizer=lambda: k2.optimizers.legacy.SGD(0.1)), change, regions=2)


def test_a_method_of_a_class():
    calls = []
    original = k2.layers.Dense.call

    def other(self, x):
        calls.append(self.units)
        return original(self, x) * 2.0

    def change(training, i):
        k2.layers.Dense.call = other if 8 <= i < 11 else original

    try:
        compare(Training, change, regions=1)
    finally:
        k2.layers.Dense.call = original
    assert calls == 2 * 3 * [8, 3]


def test_weights_that_are_set():
    def change(training, i):
        if i == 9:
            training.model.set_weights([w * 0.5 for w in training.model.get_weights()])

    compare(Training, change)


def test_a_loss_that_is_added_between_calls():
    """The outermost layer forgets it as it is called, and so must a call that is skipped."""

    class Adding(k2.layers.Layer):
        adds = False

        def call(self, x):
            if self.adds:
                self.add_loss(tf.reduce_mean(x))
            return x

    def change(training, i):
        if i in (8, 9, 12):
            layer = training.model.layers[1]
            vars(layer)["adds"] = True
            layer(batch(i)[0])
            vars(layer)["adds"] = False
            training.log.append(len(training.model.losses))

    compare(lambda: Training(lambda: mlp(Adding())), change, regions=2)


def test_a_loss_that_a_layer_adds():
    class Adding(k2.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_mean(x) * 0.1)
            return x

    compare(lambda: Training(lambda: mlp(Adding())), regions=1)


def test_losses_are_of_each_thread():
    model = mlp(k2.layers.ActivityRegularization(0.1))
    x, _ = batch(0)
    model(x)

    def elsewhere():
        thread = threading.Thread(target=lambda: model(x * 2.0))
        thread.start()
        thread.join()

    def step(x):
        y = model(x)
        elsewhere()
        return y, model.losses

    run_both(lambda decorate: decorate(step), [(batch(i)[0],) for i in range(8)])


def test_the_context_that_a_layer_is_called_in():
    """One layer inside of two others, which say whether it is training, or are frozen."""
    inner = k2.layers.Dropout(0.5)

    class Outer(k2.layers.Layer):
        def __init__(self, **given):
            super().__init__()
            self.given, self.inner = given, inner

        def call(self, x, training=None):
            return self.inner(x) + self.inner(x, **self.given)

    one, other = Outer(training=True), Outer(training=False)

    def step(x, training):
        return one(x), other(x, training=training), inner(x), one(x, training=training)

    def make(decorate):
        tf.random.set_seed(3)
        return decorate(step)

    run_both(make, [(batch(i)[0], i % 3 == 0) for i in range(24)])


def test_the_policy_that_numbers_are_made_by():
    model = mlp()
    model(batch(0)[0])
    low = k2.layers.Dense(3, dtype="mixed_bfloat16")
    low(batch(0)[0])

    def step(x, floatx):
        k2.backend.set_floatx(floatx)
        try:
            return low(x), model(x), k2.backend.constant(1.5) + k2.backend.zeros([2])
        finally:
            k2.backend.set_floatx("float32")

    kinds = ["float32", "float32", "float64", "float16"]
    run_both(lambda decorate: decorate(step), [(batch(i)[0], kinds[i // 4 % 4]) for i in range(24)])


def test_masks_and_states():
    def make():
        return k2.Sequential([
            k2.layers.Embedding(5, 4, mask_zero=True),
            k2.layers.LSTM(4, return_sequences=True),
            k2.layers.GRU(3),
        ])  # fmt: skip

    def inputs(i):
        numbers = np.random.default_rng(i)
        return tf.constant(numbers.integers(0, 5, size=(6, 4))), tf.constant(numbers.integers(3, size=6))

    compare(lambda: Training(make, inputs=inputs), inputs=inputs, regions=1)


def test_a_recurrent_layer_that_keeps_its_state():
    k2.utils.set_random_seed(2)
    layer = k2.layers.SimpleRNN(3, stateful=True, batch_input_shape=(6, 2, 2))
    layer.build((6, 2, 2))
    start = layer.get_weights()

    def step(x, resets):
        if resets:
            layer.reset_states()
        return layer(tf.reshape(x, [6, 2, 2])), [tf.identity(s) for s in layer.states]

    def make(decorate):
        layer.set_weights(start)
        layer.reset_states()
        return decorate(step)

    run_both(make, [(batch(i)[0], i % 5 == 4) for i in range(20)])


class Bounded(k2.metrics.Metric):
    """A metric of the program, whose methods AutoGraph converts."""

    def __init__(self):
        super().__init__()
        self.highest = self.add_weight("highest", initializer="zeros")
        self.seen = []

    def update_state(self, y, predicted, sample_weight=None):
        found = tf.reduce_max(predicted)
        self.seen.append(len(self.seen))
        if found > self.highest:
            self.highest.assign(found)

    def result(self):
        return self.highest + len(self.seen)


METRICS = {
    "mean": lambda: k2.metrics.MeanSquaredError(),
    "area": lambda: k2.metrics.SparseTopKCategoricalAccuracy(2),
    "wrapped": lambda: k2.metrics.MeanMetricWrapper(lambda y, p: tf.reduce_mean(p, -1) * SHARED["factor"]),
    "own": Bounded,
}


@pytest.mark.parametrize("metric", METRICS)
def test_metrics(metric):
    class Measuring(Training):
        def step(self, x, y):
            if self.metric.name == "mean_squared_error":
                y = tf.one_hot(y, 3)
                self.objective = k2.losses.MeanSquaredError()
            loss = super().step(x, y)
            return loss, self.metric.result(), self.metric.result() + 1.0

    def change(training, i):
        SHARED["factor"] = 2.0 if 9 <= i < 12 else 1.0
        if i == 10:
            training.metric.reset_state()

    try:
        compare(lambda: Measuring(metric=METRICS[metric]), change, regions=2)
    finally:
        SHARED["factor"] = 1.0


def test_a_metric_in_a_graph_function():
    """Where AutoGraph converts it: the highest value is kept by a condition on the device."""

    def make(decorate):
        k2.utils.set_random_seed(3)
        metric, mean = Bounded(), k2.metrics.MeanSquaredError()

        @tf.function
        def measure(y, predicted):
            metric.update_state(y, predicted)
            mean.update_state(y, predicted)
            return metric.highest + mean.result()

        def step(x, y):
            predicted = x[:, :3] * 2.0
            mean.update_state(tf.one_hot(y, 3), predicted)
            return measure(tf.one_hot(y, 3), predicted), mean.result(), tf.identity(metric.highest)

        return decorate(step)

    run_both(make, [batch(i) for i in range(10)])


def test_arrays_are_converted():
    k2.utils.set_random_seed(2)
    model = mlp()
    model(batch(0)[0])

    def step(x, y):
        return model(x), model(np.float32([[1.0, 2.0, 3.0, len(y)]])), model(np.asarray(y, np.float64)[:4][None])

    function = run_both(lambda decorate: decorate(step), [tuple(v.numpy() for v in batch(i)) for i in range(10)])
    assert function.stats().regions >= 5


def test_an_array_given_by_name_is_converted():
    """The first argument of `call`, whatever it is called; others are the program's business."""

    class Scores(k2.layers.Layer):
        def call(self, labels, predictions, weight=None):
            scale = 1.0 if weight is None else 2.0
            return tf.reduce_mean((labels - predictions) ** 2) * scale, tf.shape(labels)

    layer = Scores()

    def step(x, y):
        labels = np.float32(y[:, None])
        return layer(labels=labels, predictions=x), layer(labels=labels, predictions=x, weight=np.ones(3))

    function = run_both(lambda d: d(step), [(batch(i)[0], batch(i)[1].numpy()) for i in range(12)])
    assert function.stats().regions >= 5, function.explain()


@pytest.mark.parametrize("change", ["value", "new", "removed", "order", "update", "by the original", "cleared"])
def test_containers_that_tensorflow_wraps(change):
    """A layer's own dict and tuple are read by its `call`: each change of them is noticed by the next call."""

    def make(decorate):
        k2.utils.set_random_seed(3)
        numbers = {"a": 1.0, "b": 2.0}

        class Own(k2.layers.Layer):
            def __init__(self):
                super().__init__()
                self.numbers = numbers
                self.parts = {"one": k2.layers.Dense(3), "two": k2.layers.Dense(3, activation="tanh")}
                self.pair = (k2.layers.Dense(2), 0.5)

            def call(self, x):
                with tf.control_dependencies([x]):
                    total = tf.add_n([part(x) for _, part in self.parts.items()])
                for name in self.numbers:
                    total = total * 3.0 + self.numbers[name]
                dense, scale = self.pair
                return dense(total) * scale * float(len(self.numbers))

        layer = Own()
        layer(tf.zeros((1, 4)))

        @decorate
        def step(i):
            if i == 10:
                held = layer.numbers
                if change == "value":
                    held["a"] = 7.0
                elif change == "new":
                    held["c"] = 3.0
                elif change == "removed":
                    del held["a"]
                elif change == "order":
                    held["a"] = held.pop("a")
                elif change == "update":
                    held.update(b=5.0)
                elif change == "by the original":
                    numbers["b"] = 9.0
                else:
                    held.clear()
            if i == 14:
                layer.pair = (layer.pair[0], 0.25)
            return layer(tf.constant(np.random.default_rng(i).normal(size=(5, 4)), tf.float32))

        return step

    function = run_both(make, [(i,) for i in range(20)])
    assert function.stats().regions >= 10, function.explain()


@pytest.mark.parametrize("own", [False, True])
def test_losses_of_arrays_are_left_to_keras(own):
    """Keras 2 converts no labels before it calls the loss: integers of another rank are broadcast, not squeezed."""

    class Own(k2.losses.Loss):
        def call(self, y, predicted):
            return tf.reduce_mean(predicted, -1) * y.mean()  # a method of arrays

    loss = Own() if own else k2.losses.MeanSquaredError()

    def step(x, y):
        return loss(y, x[:, 0] if not own else x)

    run_both(lambda decorate: decorate(step), [(batch(i)[0], np.arange(6)[:, None] + i) for i in range(16)])


def test_custom_objects_are_looked_up_again():
    """By scopes, by the global registry, in the step and around it."""

    class Named(k2.layers.Layer):
        def call(self, x):
            return k2.activations.get("mine")(x)

    layer = Named()

    def step(x, how, function):
        if how == "scope":
            with k2.utils.custom_object_scope({"mine": function}):
                return layer(x)
        if how == "in the step":
            k2.utils.get_custom_objects()["mine"] = function
        return layer(x)

    def outcomes(decorate):
        function, found = decorate(step), []
        try:
            for i in range(30):
                given = tf.nn.tanh if i % 10 < 7 else tf.nn.relu
                how = ["scope", "in the step", "before"][i // 10]
                if how == "before":
                    k2.utils.get_custom_objects()["mine"] = given
                found.append(snapshot(function(batch(i)[0], how, given)))
        finally:
            k2.utils.get_custom_objects().clear()
        assert decorate is not coexec.function or function.stats().regions >= 10, function.explain()
        return found

    for number, (one, other) in enumerate(zip(outcomes(lambda f: f), outcomes(coexec.function), strict=True)):
        assert_same(one, other, path=f"call {number}: ")


class Configured:
    scale = 2.0

    def __getitem__(self, name):
        return self.scale


@pytest.mark.skipif(not hasattr(k2.layers.Layer, "_register_call_context_args"), reason="since tf_keras 2.20")
@pytest.mark.parametrize("make", [lambda: {"scale": 2.0}, Configured, lambda: {"scale": np.full(1, 2.0, np.float32)}])
def test_what_layers_hand_on_may_change(make):
    class Inner(k2.layers.Layer):
        def __init__(self):
            super().__init__()
            self._register_call_context_args("settings")

        def call(self, x, settings=None):
            return x * settings["scale"]

    class Outer(k2.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner()
            self._register_call_context_args("settings")
            vars(self)["log"] = []

        def call(self, x):
            self.log.append(1)  # so that it is not memoized itself
            return self.inner(x)

    def outcomes(decorate):
        settings, outer = make(), Outer()
        function, found = decorate(lambda x: outer(x, settings=settings)), []
        for i in range(20):
            if i == 14 and isinstance(settings, Configured):
                settings.scale = 5.0
            elif i == 14 and isinstance(settings["scale"], np.ndarray):
                settings["scale"][:] = 5.0
            elif i == 14:
                settings["scale"] = 5.0
            found.append(snapshot(function(tf.ones([2]))))
        return found

    for one, other in zip(outcomes(lambda f: f), outcomes(coexec.function), strict=True):
        assert_same(one, other)


def test_a_constraint_of_a_variable():
    """Changed without `__setattr__`; nothing but the variable leads to it."""

    def make():
        return mlp(k2.layers.Dense(4, kernel_constraint=k2.constraints.MaxNorm(100.0)))

    def change(training, i):
        if i == 11:
            vars(training.model.layers[1].kernel.constraint)["max_value"] = 0.5

    compare(lambda: Training(make), change)


@pytest.mark.parametrize("package", [k2, keras], ids=["Keras 2", "Keras 3"])
def test_arrays_in_the_graph_of_a_model(package):
    class Weighing(package.layers.Layer):
        def call(self, x, by=None):
            return x * by

    def outcomes(decorate):
        scale, by = np.ones(4, np.float32), np.ones(4, np.float32)
        x = package.Input((4,))
        model = package.Model(x, [x * scale, Weighing()(x, by=by)])
        function, found = decorate(lambda x: model(x)), []
        for i in range(20):
            if i == 14:
                assert decorate is not coexec.function or function.stats().regions >= 8, function.explain()
                scale[:], by[:] = 5.0, 6.0
            found.append(snapshot(function(batch(i)[0])))
        return found

    for number, (one, other) in enumerate(zip(outcomes(lambda f: f), outcomes(coexec.function), strict=True)):
        assert_same(one, other, path=f"call {number}: ")


@pytest.mark.parametrize("package", [k2, keras], ids=["Keras 2", "Keras 3"])
def test_a_container_that_a_layer_holds_is_returned_itself(package):
    class Holding(package.layers.Layer):
        def __init__(self):
            super().__init__()
            vars(self)["held"] = {"count": 1}

        def call(self, x):
            return x * 2.0, self.held

    layer = Holding()
    step = coexec.function(lambda x: layer(x))
    for i in range(12):
        assert step(batch(i)[0])[1] is vars(layer)["held"]


def test_what_is_logged_depends_on_the_level():
    logger, found = tf.get_logger(), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage()[:40])
    before = logger.level
    logger.addHandler(handler)
    try:
        for decorate in (lambda f: f, coexec.function):
            v, w, optimizer = tf.Variable([1.0]), tf.Variable([2.0]), k2.optimizers.SGD(0.1)
            step = decorate(lambda g, o=optimizer, v=v, w=w: o.apply_gradients([(g, v), (None, w)]))
            logger.setLevel("ERROR")
            for i in range(18):
                if i == 14:
                    assert not hasattr(step, "stats") or step.stats().regions >= 8, step.explain()
                    logger.setLevel("WARNING")
                step(tf.ones([1]))
            found.append("end")
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    assert len(found) > 2


def test_losses_that_are_set():
    layer = k2.layers.Dense(3)
    layer(batch(0)[0])
    step = coexec.function(lambda x: layer(x))
    for i in range(14):
        if i == 12:
            assert step.stats().regions >= 8, step.explain()
            layer._eager_losses = [tf.constant(1.0)]
        step(batch(i)[0])
    assert layer.losses == []


def test_an_error_names_the_layer():
    def make():
        return k2.Sequential([k2.layers.Embedding(5, 4, input_length=2), k2.layers.Flatten(), k2.layers.Dense(3)])

    def inputs(i):
        numbers = np.random.default_rng(i)
        x = numbers.integers(0, 5, size=(6, 2))
        if i % 5 == 4:
            x[3, 1] = 7  # no row of the table
        return tf.constant(x), tf.constant(numbers.integers(3, size=6))

    function = compare(
        lambda: Training(make, inputs=inputs), inputs=inputs, regions=1, calls=22, raises=tf.errors.InvalidArgumentError
    )
    assert function.stats().followed > 10


def test_steps_of_a_compiled_model():
    class Steps:
        def __init__(self):
            k2.utils.set_random_seed(1)
            self.model = mlp()
            self.model.compile("adam", k2.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"],
                               run_eagerly=True)  # fmt: skip

        def step(self, x, y):
            return self.model.train_on_batch(x, y), self.model.test_on_batch(x, y)

        def state(self):
            return self.model.variables

    function = compare(Steps, regions=9)
    before = function.stats().regions
    function(*batch(99))
    assert function.stats().regions - before >= 9, "model and loss, gradient, optimizer; four metrics, twice"


def test_an_attribute_that_is_set_and_restored_is_no_change():
    """TensorFlow's tracking is switched off for a moment by many of Keras' methods."""
    layer = k2.layers.Dense(3)
    layer(batch(0)[0])
    watcher = mock.Mock(spec=effects.Watcher)
    effects.watch([layer], watcher)
    layer._self_setattr_tracking = True
    layer._call_result = 3.0
    watcher.changed.assert_not_called()
    layer.units = 4
    watcher.changed.assert_called_once()


def test_symbolic_calls_are_left_to_keras():
    """A functional model that is built inside of a step."""

    def step(x):
        inputs = k2.Input((4,))
        outputs = k2.layers.Dense(3, kernel_initializer="ones")(inputs)
        return k2.Model(inputs, outputs)(x)

    run_both(lambda decorate: decorate(step), [(batch(i)[0],) for i in range(6)])


def test_keras_2_may_be_imported_later():
    """It is never imported by us, and known from the next recorded call on."""
    program = """
        import sys
        import tensorflow as tf, coexec
        from coexec import testing
        from tracer import keras_packages

        @coexec.function
        def step(f, x):
            return f(x)

        x = tf.ones([2, 4])
        with testing.always_follow():
            for _ in range(3):
                step(tf.square, x)
        assert "tf_keras" not in sys.modules and keras_packages.legacy is None
        import tf_keras
        model = tf_keras.Sequential([tf_keras.layers.Dense(3), tf_keras.layers.Dense(2)])
        with testing.always_follow():
            for _ in range(9):
                assert (step(model, x).numpy() == model(x).numpy()).all()
        assert keras_packages.legacy is not None and step.stats().regions > 2, step.stats()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=200)


def test_a_version_that_lacks_something_is_left_alone(monkeypatch):
    """Its calls are followed, not memoized."""
    monkeypatch.setattr(keras_packages, "legacy", None)
    monkeypatch.setattr(keras_packages, "_is_unknown", False)
    monkeypatch.delattr(k2.src.engine.base_layer_utils, "call_context")
    known = keras_packages.classes.stateful
    for _ in range(2):
        assert keras_packages.adopt_legacy() is None
    assert keras_packages._is_unknown
    assert keras_packages.classes.stateful == known


def test_what_is_relied_on():
    legacy = keras_packages.legacy or keras_packages.adopt_legacy()
    assert legacy is not None
    call = k2.src.engine.base_layer_utils.call_context()
    assert call.in_call is False
    assert {"layer", "inputs", "saving"} <= set(call._state)
    seen = []

    class Looking(k2.layers.Layer):
        def call(self, x, training=None):
            given = call._state.get("call_context_args", call._state)
            seen.append((call.in_call, call._state["layer"] is self, given["training"]))
            return x

    layer = Looking()
    layer(tf.ones([1]), training=True)
    assert seen == [(True, True, True)]
    assert layer._thread_local._eager_losses == []
    assert type(layer._thread_local) is threading.local
    kept = []
    before = legacy.surroundings(kept)
    with k2.src.mixed_precision.autocast_variable.enable_auto_cast_variables(tf.float16):
        assert legacy.surroundings(kept) != before
    assert legacy.surroundings(kept) == before
    assert not kept


def making_a_layer():
    """A layer of a library's that makes another one in each of its calls, often where the last one was in memory."""

    class Sum(k2.layers.Layer):
        def call(self, parts):
            return k2.layers.Add()(parts)

    inputs = k2.Input((4,))
    parts = [k2.layers.Dense(5)(inputs), k2.layers.Dense(5, activation="relu")(inputs)]
    return k2.Model(inputs, k2.layers.Dense(3)(k2.layers.Dense(6)(Sum()(parts))))


def test_an_object_made_anew_in_each_call_is_no_other_way():
    function = compare(lambda: Training(making_a_layer), calls=30)
    assert "by ever other ways" not in function.explain(), function.explain()
    before = function.stats()
    for i in range(8):
        function(*batch(i))
    assert function.stats().launches - before.launches == 8
    assert function.stats().compiles <= 1, function.explain()


def test_layers_of_a_model_that_is_given_a_dict():
    """Its inputs are other tensors in each call, on which the layers inside do not depend otherwise."""

    class Counted(Counting):
        def call(self, x, training=None):
            return super().call(x["left"] * x["right"], training)

    def inputs(i):
        x, y = batch(i)
        return {"left": x, "right": tf.cast(x > 0.0, tf.float32)}, y

    function = compare(lambda: Training(Counted, inputs=inputs), calls=30, inputs=inputs)
    before = function.stats()
    for i in range(8):
        function(*inputs(i))
    assert function.stats().regions - before.regions >= 8 * 6, function.explain()  # its three layers, too
    assert function.stats().launches - before.launches == 8, function.explain()
