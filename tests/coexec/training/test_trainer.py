"""The trainer: Keras' `fit` run eagerly, and the trainer with eager functions, are the oracles."""

import csv
import os
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.training.loop.replicas import Replicas
from tests.snapshots import assert_same, snapshot

# Keras converts its variables for NumPy in a way that NumPy 2 no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = 52  # the last batch of 16 is a smaller one
NUMBERS = np.random.default_rng(0)
X, Y = NUMBERS.normal(size=(ROWS, 6)).astype("float32"), NUMBERS.integers(3, size=ROWS).astype("int32")
OBJECTIVE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model(*extra):
    keras.utils.set_random_seed(4)
    layers = keras.layers
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), *extra, layers.Dense(3)])


def step(state, batch, training):
    """A loss, and a number that only Python can tell."""
    x, y = batch
    logits = state.model(x, training=training)
    wrong = float(np.mean(logits.numpy().argmax(axis=1) != y.numpy()))
    return {"loss": OBJECTIVE(y, logits), "error": wrong}


def plain(state, batch, training):
    """Only a loss."""
    return OBJECTIVE(batch[1], state.model(batch[0], training=training))


def trainer(function=plain, optimizer=None, net=None, more=None, **options):
    net = model() if net is None else net
    state = {"model": net, "optimizer": optimizer or keras.optimizers.Adam(0.01), **(more or {})}
    return coexec.Trainer(function, state, **options)


def fit(found, data=(X, Y), epochs=3, **options):
    return found.fit(data, batch_size=16, epochs=epochs, verbose=0, **options).history


def weights(net):
    return [v.numpy() for v in net.variables]


def test_as_keras_fits():
    """Losses, weights and validation are those of Keras' `fit`; nearly all steps were followed."""
    oracle = model()
    oracle.compile(keras.optimizers.Adam(0.01), OBJECTIVE, run_eagerly=True)
    expected = oracle.fit(X, Y, batch_size=16, epochs=3, shuffle=False, validation_data=(X[:20], Y[:20]), verbose=0)
    mine = trainer()
    history = fit(mine, validation_data=(X[:20], Y[:20]))
    assert_same(snapshot(expected.history), snapshot(history), rtol=1e-4, atol=1e-5, path="")
    assert_same(snapshot(weights(oracle)), snapshot(weights(mine.model)), rtol=1e-4, atol=1e-5, path="")
    stats = mine.train_step.stats()
    assert (stats.calls, stats.followed) == (12, 11), mine.train_step.explain()
    assert mine.test_step.stats().followed == 5
    scores = mine.evaluate((X[:20], Y[:20]), batch_size=16, verbose=0)
    assert scores["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-5)
    np.testing.assert_allclose(mine.predict((X, Y), batch_size=16, verbose=0), oracle(X), rtol=1e-4, atol=1e-5)


def both(run):
    """What `run` gives with eager functions and with co-executed ones; returns the latter."""
    found = []
    for eager in (True, False):
        tf.config.run_functions_eagerly(eager)
        try:
            found.append(run())
        finally:
            tf.config.run_functions_eagerly(False)
    assert_same(snapshot(found[0]), snapshot(found[1]), rtol=1e-4, atol=1e-5, path="")
    return found[1]


def test_python_metrics_and_state():
    """Reads in the step, metrics and lists in the state, dropout: as eagerly."""

    def run():
        log, accuracy = [], keras.metrics.SparseCategoricalAccuracy()

        def noting(state, batch, training):
            found = step(state, batch, training)
            state.accuracy.update_state(batch[1], state.model(batch[0]))
            state.log.append((training, float(found["loss"])))
            return found

        net = model(keras.layers.Dropout(0.4, seed=2), keras.layers.BatchNormalization())
        mine = trainer(noting, net=net, more={"accuracy": accuracy, "log": log})
        return fit(mine, validation_data=(X, Y)), log, weights(net)

    history, log, _ = both(run)
    assert len(log) == 24
    assert set(history) == {"loss", "error", "accuracy", "val_loss", "val_error", "val_accuracy"}


def test_accumulated_gradients_are_those_of_the_big_batch():
    """Two batches of 8 for one update are one batch of 16, without and with clipping."""
    for norm in (None, 0.05):
        small = trainer(optimizer=keras.optimizers.SGD(0.1), accumulate_steps=2, clip_norm=norm)
        big = trainer(optimizer=keras.optimizers.SGD(0.1), clip_norm=norm)
        small.fit((X[:48], Y[:48]), batch_size=8, epochs=4, verbose=0)
        big.fit((X[:48], Y[:48]), batch_size=16, epochs=4, verbose=0)
        for one, other in zip(weights(small.model), weights(big.model), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        assert small.train_step.stats().followed > 18
    free = trainer(optimizer=keras.optimizers.SGD(0.1))
    fit(free)
    clipped = trainer(optimizer=keras.optimizers.SGD(0.1), clip_norm=0.05)
    fit(clipped)
    assert not np.allclose(weights(free.model)[0], weights(clipped.model)[0], atol=1e-3)


def test_mixed_precision_scales_the_loss():
    """The optimizer is wrapped, as by `compile`, and trains as eagerly."""
    keras.config.set_dtype_policy("mixed_float16")
    try:

        def run():
            mine = trainer()
            assert isinstance(mine.state.optimizer, keras.optimizers.LossScaleOptimizer)
            return np.round(fit(mine, epochs=6)["loss"], 2)

        losses = both(run)
    finally:
        keras.config.set_dtype_policy("float32")
    assert losses[-1] < losses[0]


def test_two_optimizers_without_the_trainers_help():
    """A step may update on its own, as adversarial networks do."""

    def run():
        generator, critic = model(), model()
        slow, fast = keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.02)

        def duel(state, batch, training):
            with tf.GradientTape(persistent=True) as tape:
                first = OBJECTIVE(batch[1], state.model(batch[0]))
                second = tf.reduce_mean(tf.square(state.critic(batch[0])) + tf.stop_gradient(first))
            for optimizer, loss, net in ((slow, first, generator), (fast, second, critic)):
                variables = net.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": first, "critic": second}

        mine = coexec.Trainer(duel, {"model": generator, "critic": critic})
        return fit(mine), weights(generator), weights(critic)

    both(run)
    with pytest.raises(ValueError, match="there is none"):
        coexec.Trainer(plain, {"model": model()}, clip_norm=1.0)


def test_keras_callbacks(tmp_path):
    """They see what they see in `fit`, change rates, stop, restore, save and write."""
    callbacks = keras.callbacks

    def run():
        seen = []
        folder = tmp_path / str(len(os.listdir(tmp_path)))
        folder.mkdir()
        stop = callbacks.EarlyStopping(monitor="loss", min_delta=0.04, patience=2, restore_best_weights=True)
        mine = trainer(
            callbacks=[
                callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
                callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=0.06),
                callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
                callbacks.CSVLogger(folder / "log.csv"),
                callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"]))),
                stop,
            ]
        )
        history = fit(mine, epochs=20)
        with open(folder / "log.csv") as file:
            rows = [[(k, v[:4]) for k, v in row.items()] for row in csv.DictReader(file)]
        files = sorted(p.name for p in folder.iterdir())
        return history, seen, rows, files, stop.stopped_epoch, weights(mine.model)

    history, seen, _, files, stopped, _ = both(run)
    assert 0 < stopped < 19
    assert len(history["loss"]) == stopped + 1
    assert [batch for batch, _ in seen[:5]] == [0, 1, 2, 3, 0]
    assert len(files) == stopped + 2


def test_stopping_in_the_middle_of_an_epoch():
    """`stop_training` is heard after each batch."""
    mine = trainer()

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    mine._callbacks.append(Stop())
    assert len(fit(mine)["loss"]) == 1
    assert mine.train_step.stats().calls == 2


def test_saving(tmp_path):
    """A model that a trainer has trained is a Keras model: it saves and loads in Keras' format and as a SavedModel."""
    mine = trainer(net=model(keras.layers.BatchNormalization()))
    fit(mine)
    expected = mine.predict(X, batch_size=16, verbose=0)
    mine.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(expected, loaded(X), rtol=1e-4, atol=1e-6)
    mine.model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(expected, served.serve(X), rtol=1e-4, atol=1e-6)


class Killed(Exception):
    pass


@pytest.mark.sample("3")
@pytest.mark.parametrize("every", [None, 3])
def test_resuming(every, tmp_path):
    """Callbacks, histories, means, loss scale and accumulators go on where they were."""

    def run(directory, kill=None, epochs=6):
        calls = [0]

        def counted(state, batch, training):
            calls[0] += training
            if calls[0] == kill:
                raise Killed
            return step(state, batch, training)

        callbacks = keras.callbacks
        stop = callbacks.EarlyStopping(monitor="loss", min_delta=0.2, patience=3, restore_best_weights=True)
        plateau = callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=0.1)
        kept = coexec.Checkpoint(directory, every=every)
        mine = trainer(
            counted, net=model(keras.layers.Dropout(0.3, seed=1)), callbacks=[plateau, stop], checkpoint=kept,
            accumulate_steps=2,
        )  # fmt: skip
        history = fit(mine, epochs=epochs, shuffle=True, validation_data=(X, Y))
        return history, weights(mine.model), float(mine.state.optimizer.learning_rate), stop.wait, stop.best

    whole = run(tmp_path / "whole")
    for kill in (6, 4, 9):
        with pytest.raises(Killed):
            run(tmp_path / "parts", kill)
    parts = run(tmp_path / "parts")
    assert_same(snapshot(whole), snapshot(parts), rtol=1e-5, atol=1e-6, path="")
    assert_same(snapshot(parts[0]), snapshot(run(tmp_path / "parts")[0]), rtol=0, atol=0, path="")


def test_backup_and_restore(tmp_path):
    """Keras' own callback for going on after an interruption, at the end of epochs."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise Killed

    def run(*more):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
        return fit(trainer(callbacks=[backup, seen, *more]), epochs=4)

    epochs = []
    with pytest.raises(Killed):
        run(Interrupt())
    run()
    assert epochs == [0, 1, 2, 3]


def test_batches_that_cannot_be_shared_out():
    """Fewer rows than replicas, or parts with different numbers of rows, are refused before anything runs."""
    replicas = Replicas(types.SimpleNamespace(num_replicas_in_sync=2))
    with pytest.raises(ValueError, match=r"1 rows cannot be shared out among 2 replicas.*drop the remainder"):
        replicas.run(plain, (tf.ones([1, 2]), tf.ones([1])))
    with pytest.raises(ValueError, match=r"as many rows, not with \[2, 3\]"):
        replicas.run(plain, (tf.ones([2, 2]), tf.ones([3])))


def test_what_cannot_be():
    """Errors say what is missing."""
    with pytest.raises(TypeError, match='by the name of "model"'):
        coexec.Trainer(plain, {"optimizer": keras.optimizers.SGD()})
    with pytest.raises(KeyError, match="returns its loss"):
        fit(trainer(lambda state, batch, training: {"mean": 1.0}))
    built = keras.optimizers.SGD()
    built.build(model().trainable_variables)
    with pytest.raises(ValueError, match="not built yet"):
        trainer(optimizer=built, accumulate_steps=2)
