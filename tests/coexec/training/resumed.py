"""A program that trains with everything that a checkpoint must keep, for tests that kill it.

    python -m tests.coexec.training.resumed DIRECTORY KIND OUTPUT EPOCHS

Prints a line for each step. At its end it writes what it has learnt to OUTPUT, bit by bit.
"""

import random
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import coexec

ROWS, SIZE = 44, 8
FEATURES = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
LABELS = np.random.default_rng(1).integers(3, size=ROWS).astype("int32")


class Stream:
    """Batches drawn by Python's random numbers, which knows where it is."""

    def __init__(self):
        self.at, self.goes_on = 0, False

    def __iter__(self):
        if not self.goes_on:
            self.at = 0
        self.goes_on = False
        return self

    def __next__(self):
        if self.at == 6:
            raise StopIteration
        self.at += 1
        rows = [random.randrange(ROWS) for _ in range(SIZE)]
        return tf.constant(FEATURES[rows]), tf.constant(LABELS[rows])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.goes_on = state["at"], True


class Pages(keras.utils.PyDataset):
    def __len__(self):
        return ROWS // SIZE

    def __getitem__(self, i):
        rows = slice(SIZE * i, SIZE * i + SIZE)
        return tf.constant(FEATURES[rows]), tf.constant(LABELS[rows])


def data(kind):
    if kind == "dataset":
        rows = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))
        return {"data": rows.shuffle(30).map(lambda x, y: (x * 2.0, y)).batch(SIZE), "prefetch": 2}
    if kind == "arrays":
        return {"data": (FEATURES, LABELS), "batch_size": SIZE, "shuffle": True, "prefetch": 2}
    if kind == "pages":
        return {"data": Pages(workers=1), "shuffle": True}
    if kind == "epochs":
        batches = [(tf.constant(FEATURES[i : i + SIZE]), tf.constant(LABELS[i : i + SIZE])) for i in range(0, 40, SIZE)]
        return {"data": batches}
    return {"data": Stream()}


def train(directory, kind, output, epochs):
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(7)
    layers = keras.layers
    dense = [layers.Dense(8, "relu"), layers.Dropout(0.3), layers.BatchNormalization(), layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,)), *dense])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.02), dynamic_growth_steps=4)
    optimizer.build(model.trainable_variables)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean = keras.metrics.Mean()
    noise = tf.random.Generator.from_seed(3)
    losses, numbers = [], np.random.default_rng(5)

    @coexec.function
    def step(x, y):
        x = x + 0.1 * tf.random.normal(x.shape) + 0.1 * noise.normal(x.shape) + float(np.random.normal())
        x = x + 0.1 * keras.random.normal(x.shape)
        with tf.GradientTape() as tape:
            loss = objective(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        if numbers.random() < 0.9:
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        mean.update_state(loss)
        return float(loss)

    every = None if kind == "epochs" else 3
    kept = coexec.Checkpoint(
        directory, every=every, keep=2, model=model, optimizer=optimizer, mean=mean, noise=noise, losses=losses,
        numbers=numbers,
    )  # fmt: skip
    training = coexec.loop(**data(kind), epochs=int(epochs), checkpoint=kept)
    for x, y in training:
        losses.append(step(x, y))
        print(training.step, flush=True)
    found = [loss.hex() for loss in losses] + [float(mean.result()).hex()]
    found += [v.numpy().tobytes().hex() for v in model.variables + optimizer.variables]
    followed = step.stats().ops_followed
    Path(output).write_text("\n".join(map(str, [*found, "followed" if followed > 100 else f"only {followed}"])))


if __name__ == "__main__":
    train(*sys.argv[1:])
