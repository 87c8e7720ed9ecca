"""Keras' TensorBoard callback: it writes what it writes of Keras itself; without the package, what to install."""

import importlib.util
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec

# Keras converts its variables for NumPy in a way that NumPy 2 no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

NUMBERS = np.random.default_rng(0)
X, Y = NUMBERS.normal(size=(52, 6)).astype("float32"), NUMBERS.integers(3, size=52).astype("int32")
OBJECTIVE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model():
    keras.utils.set_random_seed(4)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])


def step(state, batch, training):
    return OBJECTIVE(batch[1], state.model(batch[0], training=training))


def train(kind, callback):
    """Trains in one of three ways; returns how many calls were followed."""
    net = model()
    if kind == "trainer":
        trainer = coexec.Trainer(step, {"model": net, "optimizer": keras.optimizers.Adam()}, callbacks=[callback])
        trainer.fit((X, Y), batch_size=16, epochs=3, verbose=0, validation_data=(X, Y))
        return trainer.train_step.stats().followed
    if kind == "accelerate":
        coexec.accelerate(net)
    net.compile(keras.optimizers.Adam(), OBJECTIVE, run_eagerly=kind == "keras" or None)
    net.fit(X, Y, batch_size=16, epochs=3, verbose=0, shuffle=False, validation_data=(X, Y), callbacks=[callback])
    return 0 if kind == "keras" else net.train_function.stats().followed


def hide_tensorboard(monkeypatch):
    """Makes the package one that is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name))


def scalars(directory):
    """What was written, by file, name and step; without times."""
    found = {}
    for path in sorted(Path(directory).rglob("events.out.*.v2")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars" and "steps_per_second" not in value.tag:
                    key = path.parent.name, value.tag, event.step
                    found[key] = float(tf.make_ndarray(value.tensor))
    return found


@pytest.mark.parametrize("kind", ["accelerate", "trainer"])
def test_without_the_package(kind, tmp_path, monkeypatch):
    """The error comes before anything is trained, and says what to install."""
    hide_tensorboard(monkeypatch)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        train(kind, keras.callbacks.TensorBoard(tmp_path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.sample("accelerate-2", "trainer-epoch")
@pytest.mark.parametrize("frequency", ["epoch", 2])
@pytest.mark.parametrize("kind", ["accelerate", "trainer"])
def test_what_is_written(kind, frequency, tmp_path):
    """Losses of epochs, batches and validation, at their steps."""
    options = {"update_freq": frequency, "write_graph": False, "histogram_freq": 1}
    train("keras", keras.callbacks.TensorBoard(tmp_path / "keras", **options))
    assert train(kind, keras.callbacks.TensorBoard(tmp_path / "mine", **options)) >= 10
    expected, found = scalars(tmp_path / "keras"), scalars(tmp_path / "mine")
    assert len(expected) > 6
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4), key
