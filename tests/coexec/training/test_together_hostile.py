"""Steps that are launched together while one fails or somebody interferes: `run_eagerly=True` is the oracle."""

import csv
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from tests.coexec.training import test_together
from tests.coexec.training.test_accelerate import mlp
from tests.coexec.training.test_together import SIZE, both, data, state

# Keras converts its variables for NumPy in a way that NumPy 2 no longer likes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("impatient"),
]

ROWS = 80  # eight batches
L = keras.layers


def dataset(rows=ROWS):
    return tf.data.Dataset.from_tensor_slices(data(rows)).batch(SIZE)


def given(x=None, y=None):
    rows = data(ROWS)
    return {"x": rows[0] if x is None else x, "y": rows[1] if y is None else y, "batch_size": SIZE}


def fit(model, *callbacks, x=None, epochs=5, **options):
    return test_together.fit(model, *callbacks, x=x or {"x": dataset()}, epochs=epochs, **options)


def stateful(*extra):
    """Random numbers and moving averages, which a step that fails later has moved on."""
    return mlp(L.Dropout(0.3, seed=1), L.BatchNormalization(), *extra)


def outcome(run, *args, **kwargs):
    """What is returned or raised, as it is compared."""
    try:
        return run(*args, **kwargs)
    except Exception as error:
        return error.with_traceback(None)


def assert_grown(model):
    execution = model.train_function
    assert execution.together >= 4, execution.explain()
    assert execution.stats().regions > 4


class Epochs(keras.callbacks.Callback):
    """What a callback that is not told of batches is told."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(("begin", epoch, int(self.model.optimizer.iterations)))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(("end", epoch, int(self.model.optimizer.iterations), dict(logs)))

    def on_train_end(self, logs=None):
        self.seen.append(("over", dict(logs)))


# Steps that fail.


def a_label():
    bad = data(ROWS)[1]
    bad[43] = 7
    return stateful, given(), given(y=bad), "label value of 7"


def a_check():
    bad = data(ROWS)[0]
    bad[43] = np.inf
    check = functools.partial(tf.debugging.check_numerics, message="mine")
    return lambda: mlp(L.Dropout(0.3, seed=1), L.Lambda(check), L.BatchNormalization()), given(), given(bad), "mine"


def an_index():
    def build():
        inputs = keras.Input((3,), dtype="int32")
        x = L.Dropout(0.3, seed=1)(L.Flatten()(L.Embedding(5, 4)(inputs)))
        return keras.Model(inputs, L.Dense(3)(x))

    words = np.random.default_rng(0).integers(5, size=(ROWS, 3)).astype("int32")
    bad = words.copy()
    bad[43, 1] = 9
    return build, given(words), given(bad), "9 is not in"


@pytest.mark.sample("an_index-graph")
@pytest.mark.parametrize(
    ("failure", "backend"),
    [
        (a_label, "graph"), (an_index, "graph"), (a_label, "xla"), (a_check, "xla"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)  # fmt: skip
def test_a_step_that_fails(failure, backend):
    """State is that of the line that failed, error and callbacks are eager's, and all goes on; `evaluate` as well."""
    build, good, bad, message = failure()

    def run(model):
        epochs = Epochs()
        found = [fit(model, x=good), outcome(fit, model, epochs, x=bad), state(model), epochs.seen]
        assert message in str(found[1])
        found += [outcome(model.evaluate, **bad, verbose=0), state(model)]
        return found, fit(model, x=good, epochs=2, validation_data=(good["x"], good["y"]))

    assert_grown(both(run, build, backend=backend))


@pytest.mark.sample("3")
@pytest.mark.parametrize("steps", [3, 5])
def test_a_step_that_fails_in_an_execution(steps):
    """Where the program asks for several steps at once, those before the failing one are made."""
    _, good, bad, _ = a_label()

    def run(model):
        return fit(model, x=good), outcome(fit, model, x=bad), state(model), fit(model, x=good, epochs=2)

    both(run, stateful, steps_per_execution=steps)


@pytest.mark.slow
def test_nan():
    """Whoever looks stops at that batch; where nobody does, all becomes NaN, and good weights make it well."""
    x = data(ROWS)[0]
    x[43] = np.nan

    def run(model):
        found = [fit(model)]
        weights = model.get_weights()
        found += [fit(model, keras.callbacks.TerminateOnNaN(), x=given(x)), model.stop_training, state(model)]
        found += [fit(model, x=given(x), epochs=2), state(model)]
        model.set_weights(weights)
        return found, fit(model, epochs=2)

    assert_grown(both(run, stateful))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_generator_that_raises():
    """In the middle of an epoch: what came before is trained on."""

    def batches():
        x, y = data(ROWS)
        for i in range(0, 50, SIZE):
            yield x[i : i + SIZE], y[i : i + SIZE]
        raise KeyError("gone")

    def run(model):
        found = [fit(model), type(outcome(fit, model, x={"x": batches()}, epochs=1)), int(model.optimizer.iterations)]
        return found, fit(model, epochs=2)

    assert_grown(both(run))


# Somebody in between.


@pytest.mark.slow
def test_a_callback_of_batches_between_groups():
    """It reads weights, changes the rate, and stops; before and behind it, steps are launched together."""

    class Meddler(keras.callbacks.Callback):
        seen = ()

        def on_train_batch_end(self, batch, logs=None):
            self.seen = [*self.seen, (batch, self.model.layers[1].kernel.numpy(), logs)]
            if batch == 3:
                self.model.optimizer.learning_rate = 0.02
            self.model.stop_training = len(self.seen) == 13

    def run(model):
        meddler = Meddler()
        return fit(model), fit(model, meddler), meddler.seen, fit(model)

    assert_grown(both(run, stateful))


@pytest.mark.slow
def test_callbacks_that_run_the_model():
    """Between epochs: single batches, `evaluate` and `predict`, whose results and effects are there at once."""
    x, y = data(25, seed=2)

    class Runs(keras.callbacks.Callback):
        seen = ()

        def on_epoch_end(self, epoch, logs=None):
            model = self.model
            self.seen = [*self.seen, model.train_on_batch(x[:5], y[:5]), state(model), model.test_on_batch(x, y)]
            self.seen += [model.train_on_batch(x[5:10], y[5:10], return_dict=True), state(model)]
            self.seen += [model.evaluate(x, y, batch_size=5, verbose=0), model.predict(x, batch_size=10, verbose=0)]

    def run(model):
        runs = Runs()
        return fit(model, runs, validation_data=data(30, 1), validation_batch_size=5), runs.seen

    assert_grown(both(run, stateful))


@pytest.mark.slow
def test_single_batches_between_fits():
    """Metrics go on or begin anew as the program says."""
    x, y = data(ROWS)

    def run(model):
        found = [fit(model)]
        for _ in range(2):
            found += [model.train_on_batch(x[i : i + SIZE], y[i : i + SIZE]) for i in (0, 10, 20)]
            model.reset_metrics()
            found += [model.test_on_batch(x[:7], y[:7]), fit(model, epochs=2), model.get_metrics_result()]
        return found

    assert_grown(both(run, stateful))


@pytest.mark.slow
def test_models_in_turns():
    """Two that share a layer, the second trained and compiled again in between, parts of both frozen."""

    def run(model):
        compiled = {"loss": model.loss, "metrics": ["accuracy"], "run_eagerly": model.run_eagerly}
        inputs = keras.Input(model.input_shape[1:])
        other = keras.Model(inputs, L.Dense(3)(L.BatchNormalization()(model.layers[1](inputs))))
        if not model.run_eagerly:
            coexec.accelerate(other)
        found = []
        for frozen in (False, True):
            other.layers[1].trainable = not frozen
            other.compile(keras.optimizers.SGD(0.02), **compiled)
            found += [fit(other, epochs=2), model.evaluate(dataset(), verbose=0)]
            model.compile(keras.optimizers.Adam(0.01), **compiled)
            found += [fit(model), other.evaluate(dataset(), verbose=0), state(other)]
        return found

    assert_grown(both(run, stateful))


@pytest.mark.slow
def test_weights_of_rows_and_classes():
    """For the loss and for metrics."""

    def run(model):
        rows = np.linspace(0, 1, ROWS)
        found = [fit(model, x=given(), class_weight={0: 1.0, 1: 0.5, 2: 2.0})]
        found += [fit(model, x=given(), sample_weight=rows, validation_split=0.25)]
        return found, model.evaluate(**given(), sample_weight=rows, verbose=0)

    assert_grown(both(run, weighted_metrics=["accuracy"]))


OPTIMIZERS = {
    "accumulating": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, gradient_accumulation_steps=3),
    "averaging": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=5),
    "scheduled": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.02, 7, 0.5, staircase=True), global_clipnorm=0.1, epsilon=1e-3
    ),
}


@pytest.mark.slow
@pytest.mark.sample("accumulating", "scheduled")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_count(name):
    """What they do every few steps comes in the middle of groups; where they read their count, steps go alone."""
    model = both(fit, made=lambda: {"optimizer": OPTIMIZERS[name]()})
    assert (model.train_function.together > 1) is (name == "scheduled"), model.train_function.explain()


def test_loss_scales_that_overflow():
    """In half precision, steps are left out and the scale moves, at the batch where it does eagerly."""

    def made():
        inner = keras.optimizers.Adam(0.01, epsilon=1e-2)
        return {"optimizer": keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**30, dynamic_growth_steps=7)}

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = both(fit, rtol=2e-2, atol=5e-3, made=made)
    finally:
        keras.config.set_dtype_policy("float32")
    assert 0 < int(model.optimizer.inner_optimizer.iterations) < 5 * 8


@pytest.mark.slow
def test_layers_whose_state_is_set_between_epochs():
    """A recurrent state that is reset, statistics that are adapted, weights and seeds that are put in."""

    def build():
        inputs = keras.Input(batch_shape=(SIZE, 6))
        normal = L.Normalization()
        normal.adapt(data(ROWS)[0])
        x = L.Dropout(0.2, seed=3)(L.LSTM(4, stateful=True)(L.Reshape((3, 2))(normal(inputs))))
        return keras.Model(inputs, L.Dense(3)(x))

    def change(model, epoch):
        normal, recurrent, dropout = model.layers[1], model.layers[3], model.layers[4]
        if epoch % 2:
            recurrent.reset_state()
        if epoch == 3:
            normal.adapt(3 + 2 * data(ROWS, seed=5)[0])
        elif epoch == 4:
            dropout.seed_generator.state.assign([3, 9])
            model.set_weights([0.9 * weight for weight in model.get_weights()])

    def run(model):
        changing = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: change(model, epoch))
        return fit(model, changing, x=given()), model.predict(data(ROWS)[0], batch_size=SIZE, verbose=0)

    both(run, build, rtol=1e-3)


class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_callbacks_with_files(tmp_path):
    """Checkpoints every three batches, logs, and going on after an interruption, at an epoch's end or in its middle."""
    callbacks = keras.callbacks

    def interrupt(on, number):
        seen = []

        def note(*_, **__):
            seen.append(1)
            if len(seen) == number:
                raise Interrupted

        return callbacks.LambdaCallback(**{on: note})

    def run(model):
        folder = tmp_path / ("eager" if model.run_eagerly else "together")
        folder.mkdir()
        found = [fit(model, callbacks.CSVLogger(folder / "log.csv"), validation_data=data(30, 1))]
        with open(folder / "log.csv") as file:
            found.append([{k: round(float(v), 3) for k, v in row.items()} for row in csv.DictReader(file)])
        every = callbacks.ModelCheckpoint(folder / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3)
        found += [fit(model, every, epochs=2), sorted(p.name for p in folder.iterdir())]
        for frequency, on, number in (("epoch", "on_epoch_begin", 3), (3, "on_train_batch_end", 13)):
            options = {"backup_dir": folder / str(frequency), "save_freq": frequency}
            broken = outcome(fit, model, callbacks.BackupAndRestore(**options), interrupt(on, number), epochs=4)
            assert isinstance(broken, Interrupted)
            found += [state(model), fit(model, callbacks.BackupAndRestore(**options), epochs=4), state(model)]
        return found

    assert_grown(both(run))


class Pages(keras.utils.PyDataset):
    def __len__(self):
        return ROWS // SIZE

    def __getitem__(self, i):
        return tuple(part[SIZE * i : SIZE * i + SIZE] for part in data(ROWS))


@pytest.mark.sample("3")
@pytest.mark.parametrize("workers", [1, 3])
def test_pages_made_by_workers(workers):
    """Batches come in order, and are trained on one by one."""

    def run(model):
        pages = Pages(workers=workers)
        history = fit(model, x={"x": pages})
        return history, model.evaluate(pages, verbose=0), model.predict(pages, verbose=0)

    assert both(run).train_function.together == 1


@pytest.mark.slow
def test_epochs_of_all_lengths():
    """A last batch that is smaller or the only one, data without end, and `predict` and `evaluate` on so many."""

    def run(model):
        found = [fit(model, x={"x": dataset(rows)}, epochs=3) for rows in (84, 5, 23, 80)]
        found.append(fit(model, x={"x": dataset(84).repeat()}, steps_per_epoch=7, epochs=3))
        found.append(fit(model, epochs=2, validation_data=dataset().repeat(), validation_steps=3))
        return found, model.evaluate(dataset().repeat(), steps=5, verbose=0), model.predict(dataset().repeat(), steps=3)

    assert_grown(both(run, stateful))
