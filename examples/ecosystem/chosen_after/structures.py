"""Graphs and sets: attention over edges, pooling, clients of a federation."""

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


class GraphAttention(keras.layers.Layer):
    """As in Keras' example on node classification with graph attention networks."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[0][-1], self.units), initializer="glorot_uniform", name="kernel"
        )
        self.kernel_attention = self.add_weight(
            shape=(self.units * 2, 1), initializer="glorot_uniform", name="kernel_attention"
        )
        self.built = True

    def call(self, inputs):
        node_states, edges = inputs
        node_states_transformed = tf.matmul(node_states, self.kernel)
        node_states_expanded = tf.gather(node_states_transformed, edges)
        node_states_expanded = tf.reshape(node_states_expanded, (tf.shape(edges)[0], -1))
        attention_scores = tf.nn.leaky_relu(tf.matmul(node_states_expanded, self.kernel_attention))
        attention_scores = tf.squeeze(attention_scores, -1)
        attention_scores = tf.math.exp(tf.clip_by_value(attention_scores, -2, 2))
        attention_scores_sum = tf.math.unsorted_segment_sum(
            data=attention_scores, segment_ids=edges[:, 0], num_segments=tf.reduce_max(edges[:, 0]) + 1
        )
        attention_scores_sum = tf.repeat(attention_scores_sum, tf.math.bincount(tf.cast(edges[:, 0], "int32")))
        attention_scores_norm = attention_scores / attention_scores_sum
        node_states_neighbors = tf.gather(node_states_transformed, edges[:, 1])
        return tf.math.unsorted_segment_sum(
            data=node_states_neighbors * attention_scores_norm[:, tf.newaxis],
            segment_ids=edges[:, 0],
            num_segments=tf.shape(node_states)[0],
        )


class MultiHeadGraphAttention(keras.layers.Layer):
    def __init__(self, units, num_heads=3, merge_type="concat"):
        super().__init__()
        self.merge_type = merge_type
        self.attention_layers = [GraphAttention(units) for _ in range(num_heads)]

    def call(self, inputs):
        atom_features, pair_indices = inputs
        outputs = [attention_layer([atom_features, pair_indices]) for attention_layer in self.attention_layers]
        if self.merge_type == "concat":
            outputs = tf.concat(outputs, axis=-1)
        else:
            outputs = tf.reduce_mean(tf.stack(outputs, axis=-1), axis=-1)
        return tf.nn.relu(outputs)


@example()
def graph_attention_network():
    """Keras' graph attention on a citation graph, nodes drawn for each step."""
    rng = np.random.default_rng(0)
    nodes, classes = 60, 4
    edges = np.unique(np.concatenate([rng.integers(0, nodes, (200, 2)), np.stack([np.arange(nodes)] * 2, 1)]), axis=0)
    edges = tf.constant(edges, tf.int64)
    features = tf.constant(rng.normal(size=(nodes, 12)), tf.float32)
    preprocess, output = keras.layers.Dense(18, "relu"), keras.layers.Dense(classes)
    attention = [MultiHeadGraphAttention(6), MultiHeadGraphAttention(6)]
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy("acc")
    labels = rng.integers(0, classes, nodes)

    def forward():
        x = preprocess(features)
        for layer in attention:
            x = layer([x, edges]) + x
        return output(x)

    forward()

    def step(indices):
        y = tf.gather(labels, indices)
        with tf.GradientTape() as tape:
            outputs = forward()
            loss = loss_fn(y, tf.gather(outputs, indices))
        variables = [v for layer in (preprocess, *attention, output) for v in layer.trainable_weights]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        accuracy.update_state(y, tf.gather(outputs, indices))
        return {"loss": loss, "acc": accuracy.result()}

    arguments = [(rng.choice(nodes, 20, replace=False),) for _ in range(4)]
    return Example(step, lambda: (output.weights, accuracy.variables), arguments)


class DeepSet(tf.Module):
    """phi on each member, a sum over each set, rho on the sum."""

    def __init__(self, dims, name=None):
        super().__init__(name=name)
        with self.name_scope:
            self.phi = [keras.layers.Dense(d, "tanh") for d in dims]
            self.rho = keras.layers.Dense(1)

    @tf.Module.with_name_scope
    def __call__(self, x, lengths):
        mask = tf.sequence_mask(lengths, maxlen=x.shape[1], dtype=tf.float32)
        for layer in self.phi:
            x = layer(x)
        return self.rho(tf.reduce_sum(x * mask[..., None], axis=1))[:, 0]

    @property
    def weights(self):
        return [w for layer in [*self.phi, self.rho] for w in layer.trainable_weights]


@example()
def deep_sets():
    """The sum of the digits in sets of changing sizes, padded in NumPy to the longest of each batch."""
    rng = np.random.default_rng(1)
    net = DeepSet([32, 32])
    optimizer = keras.optimizers.Nadam(1e-3)

    def sets():
        lengths = rng.integers(2, 6, 16)
        x = np.zeros((16, lengths.max(), 10), np.float32)
        y = np.zeros(16, np.float32)
        for i, n in enumerate(lengths):
            digits = rng.integers(0, 10, n)
            x[i, np.arange(n), digits] = 1
            y[i] = digits.sum()
        return x, lengths.astype(np.int32), y

    arguments = [sets() for _ in range(6)]
    net(*arguments[0][:2])
    errors = []

    def step(x, lengths, y):
        with tf.GradientTape() as tape:
            prediction = net(x, lengths)
            loss = keras.losses.huber(y, prediction)
        optimizer.apply_gradients(zip(tape.gradient(loss, net.weights), net.weights))
        errors.append(int(np.sum(np.round(prediction) != y)))
        return loss

    return Example(step, lambda: (net.weights, optimizer.variables), arguments)


class Client:
    def __init__(self, number, rng):
        self.number = number
        self.x = rng.normal(number / 4, 1, (32, 5)).astype(np.float32)
        self.y = (self.x.sum(1) > number).astype(np.float32)[:, None]

    def batches(self, size):
        order = np.random.permutation(len(self.x))
        for start in range(0, len(order), size):
            yield self.x[order[start : start + size]], self.y[order[start : start + size]]

    def __len__(self):
        return len(self.x)


@example()
def federated_averaging():
    """Three of five clients train the server's weights for an epoch each; the server averages what they return."""
    rng = np.random.default_rng(2)
    clients = [Client(i, rng) for i in range(5)]
    model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model.build((None, 5))
    server = model.get_weights()
    bce = keras.losses.BinaryCrossentropy(from_logits=True)
    rounds = []

    def train(client, weights):
        model.set_weights(weights)
        optimizer = keras.optimizers.SGD(0.1)
        for x, y in client.batches(16):
            with tf.GradientTape() as tape:
                loss = bce(y, model(x, training=True))
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return model.get_weights(), float(loss)

    def step():
        chosen = np.random.choice(len(clients), 3, replace=False)
        total = sum(len(clients[i]) for i in chosen)
        updates, losses = zip(*(train(clients[i], server) for i in chosen))
        server[:] = [np.sum([len(clients[i]) / total * w for i, w in zip(chosen, ws)], axis=0) for ws in zip(*updates)]
        rounds.append((sorted(chosen.tolist()), np.mean(losses)))
        return rounds[-1][1]

    return Example(step, lambda: (server, [r[0] for r in rounds]), [()])
