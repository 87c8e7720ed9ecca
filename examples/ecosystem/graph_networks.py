"""Spektral: convolution and attention on a graph with a sparse adjacency matrix."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Spektral's layers are of Keras 2

import numpy as np
import tensorflow as tf
from spektral.layers import GATConv, GCNConv, GlobalSumPool

from examples.ecosystem import Example, example


def graph(nodes=80, features=16):
    """Features, a normalised adjacency matrix as a sparse tensor, and labels."""
    rng = np.random.default_rng(0)
    adjacency = (rng.random((nodes, nodes)) < 0.05).astype(np.float32)
    adjacency = np.maximum(adjacency, adjacency.T) + np.eye(nodes, dtype=np.float32)
    adjacency /= np.sqrt(adjacency.sum(0)[:, None] * adjacency.sum(1)[None])
    sparse = tf.sparse.from_dense(adjacency)
    x = tf.constant(rng.normal(size=(nodes, features)), tf.float32)
    return x, sparse, tf.one_hot(rng.integers(0, 4, nodes), 4)


class GCN(tf.keras.Model):
    """Two convolutions with dropout."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(16, activation="relu"), GCNConv(4, activation="softmax")
        self.dropout = tf.keras.layers.Dropout(0.5)

    def call(self, inputs, training=False):
        x, a = inputs
        x = self.conv1([self.dropout(x, training=training), a])
        return self.conv2([self.dropout(x, training=training), a])


@example()
def spektral_gcn():
    """Node classification, as in Spektral's example of a custom training loop."""
    x, a, y = graph()
    model = GCN()
    optimizer = tf.keras.optimizers.legacy.Adam(1e-2)
    loss_fn = tf.keras.losses.CategoricalCrossentropy()
    model([x, a])

    def step(x, a, y):
        with tf.GradientTape() as tape:
            predictions = model([x, a], training=True)
            loss = loss_fn(y, predictions) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return Example(step, lambda: (model.variables, optimizer.variables()), [(x, a, y)])


@example()
def spektral_gat():
    """Attention over neighbours, pooled to one answer for the graph."""
    x, a, _ = graph()
    layers = [GATConv(8, attn_heads=4, activation="elu"), GATConv(8, attn_heads=1)]
    pool, head = GlobalSumPool(), tf.keras.layers.Dense(1)
    optimizer = tf.keras.optimizers.legacy.Adam(1e-3)

    def model(x, a):
        for layer in layers:
            x = layer([x, a])
        return head(pool(x))

    model(x, a)
    variables = [v for layer in [*layers, head] for v in layer.trainable_variables]

    def step(x, a):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, a) - 1.0) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Example(step, lambda: (variables, optimizer.variables()), [(x, a)])
