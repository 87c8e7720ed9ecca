"""Plain TensorFlow on sets, graphs and sparse matrices."""

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


@example()
def kmeans():
    """Lloyd's algorithm: assign, average by segments, stop when nothing moves."""
    rng = np.random.default_rng(0)
    points = tf.constant(rng.normal(size=(500, 8)) + rng.integers(0, 4, (500, 1)) * 3, tf.float32)
    centres = tf.Variable(points[:6])
    moved = []

    def step():
        distances = tf.reduce_sum((points[:, None] - centres[None]) ** 2, axis=-1)
        nearest = tf.argmin(distances, axis=1)
        sums = tf.math.unsorted_segment_sum(points, nearest, 6)
        counts = tf.math.unsorted_segment_sum(tf.ones(len(points)), nearest, 6)
        fresh = tf.where(counts[:, None] > 0, sums / tf.maximum(counts, 1.0)[:, None], centres)
        moved.append(float(tf.reduce_max(tf.abs(fresh - centres))))
        centres.assign(fresh)
        if moved[-1] < 1e-4:  # converged: begin again somewhere else
            start = (len(moved) * 7) % 400
            centres.assign(points[start : start + 6])
        return tf.reduce_sum(tf.reduce_min(distances, axis=1))

    return Example(step, lambda: (centres, moved), [()])


@example()
def graph_convolution():
    """Messages along edges by gather and segment sum, normalised by degree, on batches of random graphs."""
    rng, nodes = np.random.default_rng(0), 60
    layers = [keras.layers.Dense(32), keras.layers.Dense(32), keras.layers.Dense(4)]
    optimizer = keras.optimizers.Adam(1e-2)

    def graph():
        edges = rng.integers(0, nodes, (240, 2))
        edges = edges[np.argsort(edges[:, 1])]
        features, labels = rng.normal(size=(nodes, 16)), rng.integers(0, 4, nodes)
        return tf.constant(features, tf.float32), tf.constant(edges), tf.constant(labels)

    def convolve(layer, x, edges):
        messages = tf.gather(layer(x), edges[:, 0])
        degree = tf.math.unsorted_segment_sum(tf.ones(tf.shape(edges)[0]), edges[:, 1], nodes)
        return tf.math.unsorted_segment_sum(messages, edges[:, 1], nodes) / (degree[:, None] + 1.0) + layer(x)

    arguments = [graph() for _ in range(4)]

    def step(features, edges, labels):
        with tf.GradientTape() as tape:
            x = features
            for layer in layers[:-1]:
                x = tf.nn.relu(convolve(layer, x, edges))
            logits = convolve(layers[-1], x, edges)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        variables = [v for layer in layers for v in layer.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss, tf.reduce_mean(tf.cast(tf.argmax(logits, 1) == labels, tf.float32))

    return Example(step, lambda: ([layer.variables for layer in layers], optimizer.variables), arguments)


@example()
def sparse_recommender():
    """Matrix factorisation: a sparse matrix of ratings, embeddings looked up, gradients as slices."""
    rng = np.random.default_rng(0)
    users = tf.Variable(tf.random.normal([200, 16], stddev=0.1))
    items = tf.Variable(tf.random.normal([300, 16], stddev=0.1))
    bias = tf.Variable(tf.zeros([300]))
    weights = [users, items, bias]
    optimizer = keras.optimizers.Adam(1e-2)

    def ratings():
        places = np.unique(rng.integers(0, [200, 300], (128, 2)), axis=0)[:120]
        return (tf.SparseTensor(places, rng.uniform(1, 5, 120).astype(np.float32), [200, 300]),)

    def step(rated):
        with tf.GradientTape() as tape:
            user, item = tf.gather(users, rated.indices[:, 0]), tf.gather(items, rated.indices[:, 1])
            predicted = tf.reduce_sum(user * item, axis=1) + tf.gather(bias, rated.indices[:, 1])
            error = tf.reduce_mean(tf.math.squared_difference(rated.values, predicted))
            decay = 1e-3 * (tf.nn.l2_loss(user) + tf.nn.l2_loss(item))
            loss = error + decay
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        seen = tf.sparse.reduce_sum(rated, axis=1)
        return loss, tf.reduce_max(seen)

    return Example(step, lambda: (weights, optimizer.variables), [ratings() for _ in range(4)])
