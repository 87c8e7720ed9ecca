"""DeepCTR: click-through rates by a factorisation machine and a network over the same embeddings."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # DeepCTR's layers are of Keras 2

import numpy as np
import tensorflow as tf
from deepctr.feature_column import DenseFeat, SparseFeat
from deepctr.models import DeepFM

from examples.ecosystem import Example, example


@example()
def deepctr_deepfm():
    """DeepFM with a step of its own around it."""
    rng = np.random.default_rng(0)
    columns = [SparseFeat(f"c{n}", 50, embedding_dim=4) for n in range(4)] + [DenseFeat("d", 3)]
    model = DeepFM(columns, columns, dnn_hidden_units=(32, 16), task="binary")
    optimizer = tf.keras.optimizers.legacy.Adam(1e-3)

    def batch():
        features = {f"c{n}": tf.constant(rng.integers(0, 50, (64, 1)), tf.int32) for n in range(4)}
        features["d"] = tf.constant(rng.normal(size=(64, 3)), tf.float32)
        return features, tf.constant(rng.integers(0, 2, (64, 1)), tf.float32)

    def step(features, clicked):
        with tf.GradientTape() as tape:
            predicted = model(features, training=True)
            loss = tf.reduce_mean(tf.keras.losses.binary_crossentropy(clicked, predicted)) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return Example(step, lambda: (model.variables, optimizer.variables()), [batch() for _ in range(4)])
