"""Steps of `fit` and `evaluate` that are launched several together: `run_eagerly=True` is the oracle, and counts."""

import _thread
import contextlib
import re
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec import testing
from coexec.base.tuning import tuning
from coexec.training.keras.audience import comes_apart, hears_of_batches
from tests.coexec.training.test_accelerate import Notes, Pythonic, mlp, prepare
from tests.snapshots import assert_same, snapshot

# Keras converts its variables for NumPy in a way that NumPy 2 no longer likes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("impatient"),
]

ROWS, SIZE, FEATURES = 170, 10, 6  # 17 batches: two groups of eight, and one alone


def data(rows=ROWS, seed=0):
    numbers = np.random.default_rng(seed)
    return numbers.normal(size=(rows, FEATURES)).astype("float32"), numbers.integers(3, size=rows).astype("int32")


def dataset(rows=ROWS):
    return tf.data.Dataset.from_tensor_slices(data(rows)).batch(SIZE)


def fit(model, *callbacks, x=None, epochs=6, **options):
    given = {"x": dataset()} if x is None else x
    options = {"verbose": 0, "shuffle": False, "callbacks": list(callbacks), **options}
    return model.fit(**given, epochs=epochs, **options).history


def arrays(rows=ROWS):
    x, y = data(rows)
    return {"x": x, "y": y, "batch_size": SIZE}


def both(run, build=mlp, rtol=1e-4, atol=1e-5, backend=None, made=dict, **options):
    """Runs with a model run eagerly and an accelerated one; what they did is the same. Returns the latter.

    With a `backend`, all is compiled for it at once. What is `made` are options for `compile`, other ones for each.
    """
    found = []
    for eager in (True, False):
        keras.utils.set_random_seed(3)
        model = prepare(build(), eager, backend, **options, **made())
        with testing.compile_everything() if backend else contextlib.nullcontext():
            result = run(model)
        found.append(snapshot((result, state(model), getattr(model, "log", None))))
    assert_same(*found, rtol=rtol, atol=atol, path="")
    return model


def state(model):
    """All that steps change: variables of the model and the optimizer, and what metrics have counted."""
    return [v.numpy() for part in (model, model.optimizer, *model.metrics) for v in part.variables]


def assert_together(model, steps, phase="train"):
    """Most of the steps were launched with others, as regions."""
    execution = getattr(model, f"{phase}_function")
    stats = execution.stats()
    assert execution.together >= 4, execution.explain()
    assert stats.calls < steps / 2, execution.explain()
    assert stats.launches < steps / 2
    assert stats.regions > steps / 3


def assert_alone(model, steps):
    """Each step was a call of its own."""
    assert model.train_function.together == 1
    assert model.train_function.stats().calls == steps


@pytest.mark.sample("arrays")
@pytest.mark.parametrize("x", [None, arrays()], ids=["dataset", "arrays"])
def test_steps_are_launched_together(x):
    """Histories, weights, optimizer and metrics are eager's."""
    assert_together(both(lambda model: fit(model, x=x)), 6 * 17)


@pytest.mark.slow
def test_shuffled_arrays_and_a_smaller_last_batch():
    """Batches of another size go alone, and the next epoch goes on together."""

    def run(model):
        x, y = data(ROWS + 3)
        return model.fit(x, y, batch_size=SIZE, epochs=8, verbose=0, callbacks=[]).history

    assert_together(both(run), 8 * 18)


def test_layers_with_state():
    """Random numbers and moving averages go on from step to step."""

    def build():
        return mlp(keras.layers.Dropout(0.3, seed=1), keras.layers.BatchNormalization())

    assert_together(both(fit, build), 6 * 17)


def test_validation_and_evaluate():
    """Validation between epochs, which is launched together, too."""

    def run(model):
        x, y = data(seed=1)
        history = fit(model, validation_data=(x, y), validation_batch_size=SIZE)
        return history, model.evaluate(x, y, batch_size=SIZE, verbose=0), model.evaluate(dataset(), verbose=0)

    model = both(run)
    assert_together(model, 6 * 17)
    assert_together(model, 8 * 17, "test")


@pytest.mark.slow
def test_callbacks_of_epochs():
    """What looks at epochs only sees weights, logs and files as ever, and may change the course."""

    class Epochs(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_epoch_begin(self, epoch, logs=None):
            self.seen.append((epoch, self.model.layers[1].kernel.numpy()))
            if epoch == 2:
                self.model.layers[1].trainable = False
            elif epoch == 4:
                self.model.optimizer.learning_rate = 0.3
                self.model.layers[2].activation = keras.activations.tanh
            self.model.stop_training = epoch == 7

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append((epoch, logs, [v.numpy() for v in self.model.optimizer.variables]))

    def run(model):
        seen = Epochs()
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=0.05)
        stop = keras.callbacks.EarlyStopping(monitor="loss", patience=9, restore_best_weights=True)
        # Steps are launched eight at a time, and each change is learnt over some three of these launches.
        return fit(model, seen, plateau, stop, epochs=9, x={"x": dataset(2 * ROWS)}), seen.seen

    assert_together(both(run), 8 * 34)


def test_who_hears_of_batches():
    """Keras' own callbacks of epochs do not, those of batches do, in whatever way they say so."""
    quiet = [
        keras.callbacks.EarlyStopping(), keras.callbacks.History(), keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.ModelCheckpoint("a.keras"), keras.callbacks.BackupAndRestore("a"), keras.callbacks.Callback(),
        keras.callbacks.LambdaCallback(on_epoch_end=print), keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
    ]  # fmt: skip
    assert not any(hears_of_batches(callback, phase) for callback in quiet for phase in ("train", "test"))

    class Old(keras.callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            pass

    hearing = [
        keras.callbacks.LambdaCallback(on_train_batch_end=print), keras.callbacks.TerminateOnNaN(), Old(), Notes(),
        keras.callbacks.ModelCheckpoint("a.keras", save_freq=9), keras.callbacks.ProgbarLogger(),
        keras.callbacks.BackupAndRestore("a", save_freq=9),
    ]  # fmt: skip
    assert all(hears_of_batches(callback, "train") for callback in hearing)
    assert hears_of_batches(Notes(), "test")
    assert not hears_of_batches(Old(), "test")


def test_a_callback_of_batches_hears_of_each():
    """With its logs, and the weights of that moment."""

    def run(model):
        fit(model, epochs=1)
        notes = Notes()
        return fit(model, notes, epochs=2), notes.log

    assert both(run).train_function.stats().calls > 2 * 17


def test_steps_full_of_python_go_one_by_one():
    """The user's Python runs for each batch, before the next one is taken."""
    model = both(lambda model: fit(model, epochs=3), Pythonic, metrics=None)
    assert_alone(model, 3 * 17)


@pytest.mark.slow
def test_logs_that_are_no_metrics():
    """What a step of the user's reports is the history, of the last batch."""

    class Own(keras.Model):
        def train_step(self, batch):
            logs = super().train_step(batch)
            return {"mine": logs["loss"] * 2.0, "more": {"kernel": tf.reduce_sum(self.layers[1].kernel)}}

    model = both(fit, lambda: mlp(model=Own))
    assert_alone(model, 6 * 17)


def test_data_that_look_at_the_model():
    """A pipeline that reads a variable of the model gets what the step before has left there."""

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # else tf.data reads ahead by the clock, eagerly, too

    def run(model):
        kernel = model.layers[1].kernel.value
        looking = dataset().map(lambda x, y: (x + tf.reduce_sum(kernel), y)).with_options(options)
        return fit(model, x={"x": looking}, epochs=2)

    assert_alone(both(run), 2 * 17)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_made_by_python():
    """A generator is asked for the next batch when the step before is done."""

    def run(model):
        x, y = data()
        seen = []

        def batches():
            for i in range(0, ROWS, SIZE):
                seen.append(int(model.optimizer.iterations.numpy()))
                yield x[i : i + SIZE], y[i : i + SIZE]

        specs = tf.TensorSpec((None, FEATURES)), tf.TensorSpec((None,), tf.int32)
        generated = tf.data.Dataset.from_generator(batches, output_signature=specs)
        at_once = tf.data.Options()  # else TensorFlow asks ahead, the farther the faster steps are
        at_once.experimental_optimization.inject_prefetch = False
        history = fit(model, x={"x": generated.with_options(at_once)}, epochs=3)
        assert seen == list(range(len(seen)))
        return history

    assert_alone(both(run), 3 * 17)


def test_which_data_come_apart():
    """Variables, tables and Python in a pipeline are found, inside of others and of branches, too."""
    x, y = data()
    counter = tf.Variable(0.0)
    plain = tf.data.Dataset.from_tensor_slices(x)
    assert comes_apart(plain.shuffle(9).map(lambda v: v * 2.0).batch(3).prefetch(1))
    assert comes_apart((x, y, None))
    assert comes_apart(({"a": x, "b": tf.constant(x)}, y, None))
    assert not comes_apart((None, None, None))
    assert not comes_apart((x.tolist(), y, None))
    read = plain.map(lambda v: v + counter)
    assert not comes_apart(read.batch(3))
    assert not comes_apart(tf.data.Dataset.zip((plain, plain.concatenate(read))))
    python = plain.map(lambda v: tf.cond(v[0] > 0.0, lambda: tf.numpy_function(np.sin, [v], tf.float32), lambda: v))
    assert not comes_apart(python.prefetch(1))
    assert not comes_apart(plain.flat_map(lambda v: tf.data.Dataset.from_tensors(v).map(lambda w: w + counter)))


@pytest.mark.slow
def test_data_that_fail():
    """What came before is trained on."""

    def run(model):
        fit(model, epochs=4)
        def inverse(i, batch):
            return batch[0] * tf.debugging.check_numerics(1.0 / tf.cast(13 - i, tf.float32), "the last"), batch[1]

        bad = dataset().enumerate().map(inverse)
        with pytest.raises(tf.errors.InvalidArgumentError):
            fit(model, x={"x": bad})
        return int(model.optimizer.iterations)

    model = both(run)
    assert int(model.optimizer.iterations) == 4 * 17 + 13
    assert model.train_function.stats().calls < 4 * 17


@pytest.mark.slow
def test_data_that_run_out_or_go_on():
    """Epochs of so many steps, with data for more or fewer."""

    def run(model):
        histories = [fit(model, x={"x": dataset().repeat()}, steps_per_epoch=steps, epochs=4) for steps in (17, 5, 11)]
        with pytest.warns(UserWarning, match="ran out of data"):
            histories.append(fit(model, steps_per_epoch=13, epochs=3))
        return histories, int(model.optimizer.iterations)

    assert both(run).train_function.together == tuning.max_steps_together


def test_ctrl_c():
    """Wherever it comes, the state is that of some step's operations up to there, as eagerly.

    Keras counts a step behind its updates: what is not as after as many steps as it counted is as after one more.
    """
    keras.utils.set_random_seed(3)
    model, x = prepare(mlp(), False), {"x": dataset().repeat()}
    fit(model, x=x, steps_per_epoch=40)
    stats = model.train_function.stats
    before = stats().calls

    def interrupt():
        while stats().calls < before + 12:
            time.sleep(0.01)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(model, x=x, steps_per_epoch=10**6)
    finally:
        signal.signal(signal.SIGINT, handler)
    thread.join()
    steps = int(model.optimizer.iterations)
    assert steps > 240 + 8
    keras.utils.set_random_seed(3)
    other, states = prepare(mlp(), True), []
    fit(other, x=x, steps_per_epoch=40)
    for more in (steps - 240, 1):
        fit(other, x=x, epochs=1, steps_per_epoch=more)
        states.append([v.numpy() for v in other.variables + other.optimizer.variables])
    for mine, *others in zip(model.variables + model.optimizer.variables, *states, strict=True):
        assert any(np.allclose(mine, one, rtol=1e-2, atol=1e-4) for one in others), mine.path


@pytest.mark.slow
def test_the_progress_bar(capsys):
    """Keras' bar shows what it shows eagerly in the end, and metrics in between."""
    lines = []
    for eager in (True, False):
        keras.utils.set_random_seed(3)
        model = prepare(mlp(), eager)
        model.fit(dataset(), epochs=3, shuffle=False)
        model.evaluate(dataset())
        text = re.sub(r"\x1b\[\d*m|\x08|\r", "", capsys.readouterr().out)
        assert re.search(r"\b1/17.*accuracy: \d", text), text
        text = re.sub(r" \d+s \d+.s/step|━*", "", text)
        lines.append([line.strip() for line in re.findall(r"17/17[^/]*$", text, re.MULTILINE)])
    assert lines[0] == lines[1]
    assert len(lines[0]) == 4
    assert model.train_function.stats().calls < 3 * 17


@pytest.mark.sample("3")
@pytest.mark.parametrize("steps", [2, 3, 20])
def test_steps_per_execution(steps):
    """What the program asks for at once is launched at once."""
    model = both(lambda model: fit(model), steps_per_execution=steps)
    assert model.train_function.stats().launches < 6 * 17 / 2


@pytest.mark.slow
def test_other_threads_do_not_hurt():
    """Whoever reads a weight meanwhile gets that of some moment before."""
    model = prepare(mlp(), False)
    fit(model)
    seen, done = [], threading.Event()

    def look():
        while not done.is_set():
            seen.append(int(model.optimizer.iterations.numpy()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        fit(model)
    finally:
        done.set()
        thread.join()
    assert seen == sorted(seen)
    assert int(model.optimizer.iterations) == 12 * 17
    assert model.train_function.stats().followed > 20
