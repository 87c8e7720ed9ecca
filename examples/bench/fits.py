"""Keras models trained by `fit`: eagerly, compiled, by XLA and accelerated. One call is one epoch."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coexec

ROWS = 32  # of a batch


class Fit:
    """A model and its data; until a variant says otherwise, it is trained eagerly."""

    def __init__(self, model: keras.Model, x: np.ndarray, y: np.ndarray, loss: Any, metrics: list[str]) -> None:
        self.model, self.x, self.y, self.loss, self.metrics = model, x, y, loss, metrics
        self.compiled(run_eagerly=True)

    def compiled(self, **options: Any) -> "Fit":
        """Compiles the model in the way of one variant."""
        self.model.compile(keras.optimizers.Adam(), self.loss, metrics=self.metrics, **options)
        return self

    def accelerated(self) -> "Fit":
        """Has the model run co-executed."""
        coexec.accelerate(self.model)
        return self.compiled()

    def __call__(self) -> float:
        """Trains for an epoch and returns its loss."""
        history = self.model.fit(self.x, self.y, batch_size=ROWS, verbose=0, shuffle=False)
        return history.history["loss"][0]

    def stats(self) -> coexec.Stats:
        """What co-execution has counted."""
        return self.model.train_function.stats()


# How each variant prepares what the others decorate.
WRAPPERS: dict[str, Callable[[Fit], Fit]] = {
    "eager": lambda fit: fit,
    "coexec": Fit.accelerated,
    "tf.function": Fit.compiled,
    "jit": lambda fit: fit.compiled(jit_compile=True),
}


def mlp(steps: int) -> Fit:
    """The MLP of the other cases, with a loss and a metric, as most people train."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((20,)), layers.Dense(64, "relu"), layers.Dense(64, "relu"), layers.Dense(10)]
    )
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS * steps, 20)).astype("float32")
    y = numbers.integers(10, size=ROWS * steps).astype("int32")
    return Fit(model, x, y, keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])


class Recurrent(keras.Model):
    """An LSTM cell called 20 times by a Python loop in `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = keras.layers.LSTMCell(64), keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Reads the sequence and answers with one number for each row."""
        state = [tf.zeros((ROWS, 64)), tf.zeros((ROWS, 64))]
        for time in range(20):
            hidden, state = self.cell(x[:, time], state)
        return self.head(hidden)


def lstm(steps: int) -> Fit:
    """A recurrent model of the user's own."""
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS * steps, 20, 8)).astype("float32")
    y = numbers.normal(size=(ROWS * steps, 1)).astype("float32")
    return Fit(Recurrent(), x, y, "mse", ["mae"])
