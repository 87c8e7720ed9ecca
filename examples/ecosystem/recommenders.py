"""TensorFlow Recommenders: two towers, and a deep and cross network."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # its layers are of Keras 2

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

from examples.ecosystem import Example, example


@example()
def recommenders_two_towers():
    """Retrieval: names are looked up and embedded, and other rows of the batch are the negatives."""
    rng = np.random.default_rng(0)
    names = {"user": [f"u{n}" for n in range(50)], "film": [f"film {n}" for n in range(80)]}
    towers = {
        kind: tf.keras.Sequential([
            tf.keras.layers.StringLookup(vocabulary=known, mask_token=None),
            tf.keras.layers.Embedding(len(known) + 1, 16),
            tf.keras.layers.Dense(16),
        ])
        for kind, known in names.items()
    }  # fmt: skip
    task = tfrs.tasks.Retrieval()
    optimizer = tf.keras.optimizers.legacy.Adagrad(0.1)
    arguments = [({kind: tf.constant(rng.choice(known, 32)) for kind, known in names.items()},) for _ in range(4)]
    for kind, tower in towers.items():
        tower(arguments[0][0][kind])
    variables = [v for tower in towers.values() for v in tower.trainable_variables]

    def step(features):
        with tf.GradientTape() as tape:
            loss = task(towers["user"](features["user"]), towers["film"](features["film"]), compute_metrics=False)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Example(step, lambda: (variables, optimizer.variables()), arguments)


@example()
def recommenders_cross_network():
    """A deep and cross network on dense features, with a ranking task."""
    rng = np.random.default_rng(0)
    cross = [tfrs.layers.dcn.Cross(projection_dim=8) for _ in range(2)]
    deep = [tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(1)]
    task = tfrs.tasks.Ranking(loss=tf.keras.losses.MeanSquaredError())
    optimizer = tf.keras.optimizers.legacy.Adam(1e-2)
    arguments = [
        (tf.constant(rng.normal(size=(64, 12)), tf.float32), tf.constant(rng.normal(size=(64, 1)), tf.float32))
        for _ in range(4)
    ]

    def model(x):
        start = x
        for layer in cross:
            x = layer(start, x)
        for layer in deep:
            x = layer(x)
        return x

    model(arguments[0][0])
    variables = [v for layer in [*cross, *deep] for v in layer.trainable_variables]

    def step(features, ratings):
        with tf.GradientTape() as tape:
            loss = task(labels=ratings, predictions=model(features), compute_metrics=False)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Example(step, lambda: (variables, optimizer.variables()), arguments)
