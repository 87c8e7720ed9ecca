"""Keras models under `accelerate`: `run_eagerly=True` is the oracle, and counts show that steps were followed."""

import gc
import itertools
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.compile.compile_thread import background
from coexec.launch import executor
from coexec.launch.backend_race import Compiled
from tests.snapshots import assert_same, snapshot

# Keras converts its variables for NumPy in a way that NumPy 2 no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS, FEATURES = 70, 6  # the last batch of 16 is a smaller one


def data(seed=0):
    numbers = np.random.default_rng(seed)
    return numbers.normal(size=(ROWS, FEATURES)).astype("float32"), numbers.integers(3, size=ROWS).astype("int32")


def mlp(*extra, model=keras.Sequential):
    inputs = x = keras.Input((FEATURES,))
    for layer in (keras.layers.Dense(8, activation="relu"), *extra, keras.layers.Dense(3)):
        x = layer(x)
    return model(inputs, x) if model is not keras.Sequential else keras.Model(inputs, x)


def prepare(model, eager, backend=None, **options):
    """Compiles a model to run eagerly, or accelerates it."""
    given = {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    if eager:
        model.compile(**{**given, **options}, run_eagerly=True)
        return model
    assert coexec.accelerate(model, jit_compile=False if backend == "graph" else "auto") is model
    model.compile(**{**given, **options})
    return model


class Notes(keras.callbacks.Callback):
    """Everything that a callback is told, with the weights it sees then."""

    def __init__(self):
        super().__init__()
        self.log = []

    def note(self, name, number, logs):
        weight = [float(np.sum(w.numpy())) for w in self.model.weights[:1]]
        self.log.append((name, number, weight, {k: v for k, v in (logs or {}).items() if k != "outputs"}))


for _hook in (
    "on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin",
    "on_test_batch_end", "on_predict_batch_begin", "on_predict_batch_end",
):  # fmt: skip
    setattr(Notes, _hook, lambda self, number, logs=None, name=_hook: self.note(name, number, logs))


def compare(build, run, followed=4, atol=1e-5):
    """Runs `run(model, callback)` with a model run eagerly and an accelerated one; returns the latter."""
    found = []
    for eager in (True, False):
        keras.utils.set_random_seed(3)
        model, notes = build(eager), Notes()
        result = run(model, notes)
        if isinstance(result, keras.callbacks.History):
            result = result.history, result.epoch
        log = getattr(model, "log", None)
        state = [v.numpy() for v in model.variables], [v.numpy() for v in model.optimizer.variables]
        found.append(snapshot((result, notes.log, log, state)))
    assert_same(*found, rtol=1e-4, atol=atol, path="")
    steps = [getattr(model, f"{name}_function") for name in ("train", "test", "predict")]
    stats = [step.stats() for step in steps if step is not None]
    assert sum(s.followed for s in stats) >= followed, [step.explain() for step in steps if step is not None]
    assert sum(s.launches for s in stats) >= followed // 2
    return model


def fit(model, notes, **options):
    x, y = data()
    return model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[notes], **options)


def test_fit():
    """History, logs of each batch, weights and optimizer state are eager's; most steps were followed, as regions."""
    model = compare(lambda eager: prepare(mlp(), eager), fit, followed=10)
    stats = model.train_function.stats()
    assert stats.calls == 15
    assert stats.regions >= 9, model.train_function.explain()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"validation_split": 0.3}, {"validation_data": data(1), "validation_freq": 2}, {"shuffle": False},
        {"class_weight": {0: 1.0, 1: 0.5, 2: 2.0}}, {"sample_weight": np.linspace(0, 1, ROWS)},
        {"steps_per_epoch": 1}, {"initial_epoch": 1},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_of_fit(options):
    """What `fit` offers works as it does eagerly."""
    compare(lambda eager: prepare(mlp(), eager), lambda *args: fit(*args, **options), followed=2)


@pytest.mark.sample("arrays-2", "dataset-3", "generator-100")
@pytest.mark.parametrize("steps", [2, 3, 100])
@pytest.mark.parametrize("source", ["arrays", "dataset", "generator"])
def test_steps_per_execution(source, steps):
    """Callbacks hear of batches in the numbers that compiled Keras tells, the data run out in the middle or not."""
    x, y = data()

    def run(model, notes):
        given = {
            "arrays": lambda: {"x": x, "y": y, "batch_size": 16},
            "dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(16)},
            "generator": lambda: {"x": ((x[i : i + 16], y[i : i + 16]) for i in itertools.cycle(range(0, 64, 16)))},
        }[source]()
        more = {"steps_per_epoch": 4} if source == "generator" else {}
        history = model.fit(**given, epochs=3, verbose=0, shuffle=False, callbacks=[notes], **more)
        return history.history, [(name, number) for name, number, _, _ in notes.log]

    found = []
    for build in (lambda: prepare(mlp(), False, steps_per_execution=steps), lambda: compiled(steps)):
        keras.utils.set_random_seed(3)
        found.append(snapshot(run(build(), Notes())))
    assert_same(*found, rtol=1e-4, atol=1e-5, path="")


def compiled(steps):
    model = mlp()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], steps_per_execution=steps)
    return model


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        x, y = data()
        return {"features": x[16 * i : 16 * i + 16]}, y[16 * i : 16 * i + 16]


def test_py_dataset_and_dicts():
    """Named inputs from a PyDataset."""

    def build(eager):
        inputs = keras.Input((FEATURES,), name="features")
        return prepare(keras.Model({"features": inputs}, keras.layers.Dense(3)(inputs)), eager)

    def run(model, notes):
        return model.fit(Sequence(), epochs=3, verbose=0, callbacks=[notes])

    compare(build, run)


class Pythonic(keras.Model):
    """A model whose methods only plain Python can run: reads, lists, early returns, NumPy."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)
        self.drop = keras.layers.Dropout(0.3, seed=5)
        self.scale = keras.metrics.Mean(name="scale")
        self.log = []

    def call(self, x, training=False):
        hidden = self.first(x)
        if float(tf.reduce_mean(hidden)) > 0.3:
            hidden = self.drop(hidden, training=training)
        self.log.append(("call", bool(training), int(x.shape[0])))
        return self.last(hidden)

    def train_step(self, batch):
        x, y = batch[:2]  # `train_on_batch` adds weights
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits)
        self.log.append(float(loss))
        if len(self.log) % 7 == 0:
            self.optimizer.learning_rate = 0.5 * float(self.optimizer.learning_rate)
            return {"loss": loss, "scale": self.scale.result()}
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        norms = np.array([np.linalg.norm(g.numpy()) for g in gradients])
        self.scale.update_state(norms.max())
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.log.append(norms.argmax())
        return {"loss": loss, "scale": self.scale.result()}

    def test_step(self, batch):
        logs = super().test_step(batch)
        self.log.append(sorted((k, float(v)) for k, v in logs.items()))
        return logs

    def predict_step(self, batch):
        (x,) = batch if isinstance(batch, tuple) else (batch,)
        logits = self(x, training=False)
        self.log.append(logits.numpy().argmax(axis=1).tolist())
        return {"logits": logits, "rows": tf.shape(x)[0]}


def test_steps_full_of_python():
    """Reads, lists and branches in every method; `fit`, `evaluate` and `predict`."""

    def run(model, notes):
        x, y = data()
        history = fit(model, notes, validation_data=data(1))
        scores = model.evaluate(x, y, batch_size=16, verbose=0, callbacks=[notes], return_dict=True)
        return history.history, scores, model.predict(x[:64], batch_size=16, verbose=0, callbacks=[notes])

    model = compare(lambda eager: prepare(Pythonic(), eager, metrics=None), run, followed=20)
    assert model.train_function.stats().share_followed > 0.5, model.train_function.explain()


def test_custom_layers_losses_and_metrics():
    """Python in a layer, a loss function, a metric function and a metric class runs for every batch."""
    seen = []

    class Counting(keras.layers.Layer):
        def compute_output_shape(self, shape):
            return shape

        def call(self, x):
            seen.append("layer")
            return x * float(tf.reduce_max(x).numpy() > 0) + tf.cast(len(seen) % 2, x.dtype)

    def loss(y, logits):
        seen.append("loss")
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))

    def spread(y, logits):
        seen.append("metric")
        return np.float32(np.ptp(logits.numpy()))

    class Rows(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="rows")
            self.rows = self.add_variable((), "zeros", name="rows")

        def update_state(self, y, logits, sample_weight=None):
            seen.append(int(tf.shape(y)[0]))
            self.rows.assign_add(float(seen[-1]))

        def result(self):
            return self.rows

    def build(eager):
        seen.clear()
        layers = [keras.layers.Dense(8, activation="relu"), Counting(), keras.layers.Dense(3)]
        return prepare(keras.Sequential(layers), eager, loss=loss, metrics=[spread, Rows()])

    def run(model, notes):
        return fit(model, notes).history, list(seen)

    compare(build, run)


LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.4, seed=1),
    "batch normalization": lambda: keras.layers.BatchNormalization(),
    "regularizer": lambda: keras.layers.Dense(8, kernel_regularizer="l2"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_state(name):
    """Random numbers, moving averages and added losses."""
    compare(lambda eager: prepare(mlp(LAYERS[name]()), eager), fit)


def test_single_batches():
    """`train_on_batch`, `test_on_batch` and `predict_on_batch`, on arrays."""

    def run(model, notes):
        x, y = data()
        found = []
        for i in range(8):
            rows = slice(8 * i, 8 * i + 8)
            found.append(model.train_on_batch(x[rows], y[rows], return_dict=True))
            found.append(model.test_on_batch(x[rows], y[rows]))
            found.append(model.predict_on_batch(x[rows]))
        return found

    compare(lambda eager: prepare(mlp(), eager), run, followed=18)


@pytest.mark.parametrize("steps", [1, 3])
def test_predict(steps):
    """Results of all batches are joined, the last smaller one, too."""
    compare(
        lambda eager: prepare(mlp(), eager, steps_per_execution=steps),
        lambda model, notes: model.predict(data()[0], batch_size=16, verbose=0),
        followed=3,
    )


@pytest.mark.slow
def test_mixed_precision():
    """Loss scaling and half-precision layers."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compare(lambda eager: prepare(mlp(), eager), fit, atol=2e-3)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_callbacks_that_change_the_course():
    """Learning rates moved, the best weights restored, training stopped."""

    def run(model, notes):
        x, y = data()
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=0.05)
        stop = keras.callbacks.EarlyStopping(monitor="loss", min_delta=0.02, patience=2, restore_best_weights=True)
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, now: now * 0.7)
        history = model.fit(
            x, y, batch_size=16, epochs=12, verbose=0, shuffle=False, callbacks=[notes, rate, plateau, stop]
        )
        return history.history, history.epoch, stop.stopped_epoch

    compare(lambda eager: prepare(mlp(), eager), run)


@pytest.mark.slow
def test_changes_between_steps():
    """A step that is one region notices what callbacks do to layers, losses, optimizer and metrics."""

    class Changes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            model, number = self.model, len(self.model.history.epoch) * 5 + batch
            if number == 8:
                model.layers[1].trainable = False
            elif number == 11:
                model.layers[2].rate = 0.9
            elif number == 14:
                model.optimizer.learning_rate = 0.2
            elif number == 17:
                model.optimizer.weight_decay = 0.1
            elif number == 20:
                model.layers[1].trainable = True
                model.layers[2].rate = 0.0
            elif number == 23:
                model.layers[-1].activation = keras.activations.tanh
            elif number == 26:
                model.layers[-1].kernel.assign(model.layers[-1].kernel * 0.5)

    def run(model, notes):
        x, y = data()
        return model.fit(x, y, batch_size=16, epochs=8, verbose=0, callbacks=[Changes(), notes], shuffle=False)

    model = compare(lambda eager: prepare(mlp(keras.layers.Dropout(0.3, seed=2)), eager), run, followed=30)
    assert model.train_function.stats().regions > 14, model.train_function.explain()


@pytest.mark.slow
def test_steps_inside_of_steps():
    """Keras' own step, called by one of the user's under a tape of its own, or twice."""

    class Twice(keras.Model):
        def train_step(self, batch):
            with tf.GradientTape() as tape:
                logs = super().train_step(batch)
                kernel = self.layers[1].kernel
                slope = tape.gradient(tf.reduce_sum(kernel * kernel), kernel.value)
            super().train_step(batch)
            return {**logs, "slope": tf.reduce_sum(slope)}

    compare(lambda eager: prepare(mlp(model=Twice), eager), fit)


@pytest.mark.slow
def test_compiled_again():
    """Another optimizer and loss are used from then on; layers may be frozen."""

    def run(model, notes):
        first = fit(model, notes).history
        model.layers[1].trainable = False
        options = {} if model.run_eagerly is False else {"run_eagerly": True}
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", **options)
        return first, fit(model, notes).history

    compare(lambda eager: prepare(mlp(keras.layers.Activation("softmax")), eager), run)


@pytest.mark.slow
def test_many_fits_keep_what_is_known():
    """What `fit` notes on the model is no reason to learn anew: each of the last steps is still one region."""
    model = prepare(mlp(), eager=False)
    x, y = data()
    for _ in range(30):
        model.fit(x[:32], y[:32], batch_size=16, verbose=0, validation_data=(x[32:48], y[32:48]))
    regions = []
    for _ in range(4):
        before = model.train_function.stats()
        model.fit(x[:16], y[:16], batch_size=16, verbose=0)
        after = model.train_function.stats()
        regions.append(after.regions - before.regions)
    assert regions == [1] * 4, model.train_function.explain()


def test_errors_are_eagers():
    """A step that fails raises what it raises, and training can go on."""

    class Failing(Pythonic):
        def train_step(self, batch):
            if len(self.log) > 12:
                raise KeyError("enough")
            return super().train_step(batch)

    def run(model, notes):
        with pytest.raises(KeyError, match="enough"):
            fit(model, notes)
        del model.log[:]
        return model.train_on_batch(*(part[:16] for part in data()))

    compare(lambda eager: prepare(Failing(), eager, metrics=None), run, followed=2)


def test_a_model_with_functions_of_its_own_keeps_them():
    """A class that overrides `make_train_function` is asked, as by Keras."""

    class Own(keras.Model):
        made = 0

        def make_train_function(self, force=False):
            Own.made += 1
            self.train_function = lambda batches: {"own": len(next(batches))}

    model = coexec.accelerate(mlp(model=Own))
    model.compile(loss="mse")
    assert model.fit(*data(), batch_size=16, verbose=0).history == {"own": [2]}
    assert Own.made == 1
    with pytest.raises(TypeError, match="takes a Keras model"):
        coexec.accelerate(keras.layers.Dense(1))


def test_models_die():
    """An accelerated model is garbage once nobody holds it."""
    model = prepare(mlp(), eager=False)
    fit(model, Notes())
    reference = weakref.ref(model)
    del model
    for _ in range(3):
        gc.collect()
    assert reference() is None


def test_saving(tmp_path):
    """The model saves and loads as ever, in Keras' format and as a SavedModel; the loaded one is a plain model."""
    model = prepare(mlp(keras.layers.BatchNormalization()), eager=False)
    fit(model, Notes())
    x, _ = data()
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(expected, loaded.predict(x, verbose=0), rtol=1e-4, atol=1e-6)
    assert not isinstance(loaded.predict_function, type(model.predict_function))
    for one, other in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(expected, served.serve(x), rtol=1e-4, atol=1e-6)
    tf.saved_model.save(model, tmp_path / "saved")
    saved = tf.saved_model.load(tmp_path / "saved")
    (found,) = saved.signatures["serving_default"](tf.constant(x)).values()
    np.testing.assert_allclose(expected, found, rtol=1e-4, atol=1e-6)
    before = model.train_function.stats().calls
    fit(model, Notes())  # goes on co-executed
    assert model.train_function.stats().followed >= before - 1


@pytest.mark.parametrize("asked", [True, False])
def test_keras_jit_compile_is_heeded(asked, monkeypatch, tune):
    """Where Keras is told to compile with XLA, XLA is asked once a step has come a few times; else by the clock."""
    tune(xla_price=1e9)
    tried = []
    monkeypatch.setattr(executor.Executable, "prepare", lambda self, device: tried.append(self.backend))

    def run(model, notes):
        return model.fit(*data(), batch_size=16, epochs=4, verbose=0, shuffle=False)

    monkeypatch.setattr(Compiled, "compete", lambda self, rival, on_cpu: None)  # it need not win
    keras.utils.set_random_seed(3)
    model = prepare(mlp(), False, jit_compile=asked)
    run(model, None)
    assert background.wait(60)
    assert tried == (["xla"] * len(tried) if asked else [])
    assert bool(tried) is asked
