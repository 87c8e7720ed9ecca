"""Models that draw: discrete latents, noise on weights, densities."""

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


def sample_gumbel(shape, eps=1e-20):
    u = tf.random.uniform(shape, minval=0, maxval=1)
    return -tf.math.log(-tf.math.log(u + eps) + eps)


def gumbel_softmax(logits, temperature, hard=False):
    y = tf.nn.softmax((logits + sample_gumbel(tf.shape(logits))) / temperature)
    if hard:
        y_hard = tf.cast(tf.equal(y, tf.reduce_max(y, -1, keepdims=True)), y.dtype)
        y = tf.stop_gradient(y_hard - y) + y
    return y


@example()
def gumbel_softmax_autoencoder():
    """Categorical latents by Gumbel's softmax, straight through; NumPy anneals the temperature every 20 steps."""
    rng = np.random.default_rng(0)
    n_classes, n_latents = 6, 5
    encoder = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(n_classes * n_latents)])
    decoder = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(36)])
    arguments = [(tf.constant(rng.integers(0, 2, (32, 36)), tf.float32),) for _ in range(4)]
    decoder(tf.zeros([1, n_classes * n_latents]))
    encoder(arguments[0][0])
    optimizer = keras.optimizers.Adam(1e-3)
    tau0, anneal, minimum = 1.0, 0.003, 0.5
    np_temp, i = [tau0], [0]

    def step(x):
        with tf.GradientTape() as tape:
            logits_y = tf.reshape(encoder(x), [-1, n_classes])
            q_y = tf.nn.softmax(logits_y)
            log_q_y = tf.math.log(q_y + 1e-20)
            y = tf.reshape(gumbel_softmax(logits_y, np_temp[0], hard=True), [-1, n_latents * n_classes])
            logits_x = decoder(y)
            kl = tf.reshape(q_y * (log_q_y - tf.math.log(1.0 / n_classes)), [-1, n_latents, n_classes])
            kl = tf.reduce_sum(kl, [1, 2])
            log_p = -tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=x, logits=logits_x), 1)
            loss = tf.reduce_mean(kl - log_p)
        params = encoder.trainable_variables + decoder.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, params), params))
        if i[0] % 20 == 1:
            np_temp[0] = np.maximum(tau0 * np.exp(-anneal * i[0]), minimum)
        i[0] += 1
        return loss

    return Example(step, lambda: (encoder.variables, decoder.variables, np_temp), arguments)


class VariationalDense(keras.layers.Layer):
    """Sparse variational dropout, after Molchanov et al."""

    def __init__(self, units, activation=None, threshold=3.0):
        super().__init__()
        self.units, self.activation, self.threshold = units, keras.activations.get(activation), threshold

    def build(self, input_shape):
        self.theta = self.add_weight(shape=(input_shape[-1], self.units), initializer="glorot_uniform")
        self.log_sigma2 = self.add_weight(
            shape=(input_shape[-1], self.units), initializer=keras.initializers.Constant(-10.0)
        )
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros")

    @property
    def log_alpha(self):
        return tf.clip_by_value(self.log_sigma2 - tf.math.log(tf.square(self.theta) + 1e-8), -8.0, 8.0)

    def call(self, x, training=False):
        if training:
            mu = tf.matmul(x, self.theta) + self.bias
            std = tf.sqrt(tf.matmul(tf.square(x), tf.exp(self.log_alpha) * tf.square(self.theta)) + 1e-8)
            out = mu + std * tf.random.normal(tf.shape(mu))
        else:
            out = tf.matmul(x, tf.where(self.log_alpha < self.threshold, self.theta, 0.0)) + self.bias
        return self.activation(out)

    def kl(self):
        k1, k2, k3 = 0.63576, 1.8732, 1.48695
        la = self.log_alpha
        return -tf.reduce_sum(k1 * tf.sigmoid(k2 + k3 * la) - 0.5 * tf.math.softplus(-la) - k1)

    @property
    def sparsity(self):
        return tf.reduce_mean(tf.cast(self.log_alpha > self.threshold, tf.float32))


@example()
def variational_dropout():
    """Noise on weights with a variance for each; every tenth step the sparsity and the accuracy without noise."""
    rng = np.random.default_rng(1)
    net = [VariationalDense(32, "relu"), VariationalDense(32, "relu"), VariationalDense(4)]
    arguments = [(rng.normal(size=(64, 10)).astype(np.float32), rng.integers(0, 4, 64)) for _ in range(4)]
    optimizer = keras.optimizers.Adam(1e-3)

    def forward(x, training):
        for layer in net:
            x = layer(x, training=training)
        return x

    forward(arguments[0][0], False)
    report, calls = [], [0]

    def step(x, y):
        calls[0] += 1
        beta = min(1.0, calls[0] / 50)
        with tf.GradientTape() as tape:
            nll = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=forward(x, True)))
            loss = nll + beta * sum(layer.kl() for layer in net) / 1000
        variables = [v for layer in net for v in layer.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        if calls[0] % 10 == 0:
            accuracy = (forward(x, False).numpy().argmax(-1) == y).mean()
            report.append([accuracy] + [float(layer.sparsity) for layer in net])
        return nll, loss

    return Example(step, lambda: ([layer.variables for layer in net], len(report)), arguments)


class NeuralSpline(tf.Module):
    """An autoregressive density of two dimensions by a monotone piecewise-linear map."""

    def __init__(self, bins=8, hidden=32):
        super().__init__()
        self.bins = bins
        self.first = tf.Variable(tf.zeros([bins]), name="first")
        self.w1 = tf.Variable(tf.random.normal([1, hidden]) * 0.5, name="w1")
        self.b1 = tf.Variable(tf.zeros([hidden]), name="b1")
        self.w2 = tf.Variable(tf.random.normal([hidden, bins]) * 0.1, name="w2")

    def log_density(self, x, logits):
        probabilities = tf.nn.softmax(logits, -1)
        index = tf.clip_by_value(tf.cast(tf.floor(x * self.bins), tf.int32), 0, self.bins - 1)
        chosen = tf.gather(probabilities, index, batch_dims=1)
        return tf.math.log(chosen * self.bins)

    def __call__(self, x):
        batch = tf.shape(x)[0]
        first = self.log_density(x[:, 0], tf.broadcast_to(self.first, [batch, self.bins]))
        second = self.log_density(x[:, 1], tf.matmul(tf.nn.tanh(x[:, :1] @ self.w1 + self.b1), self.w2))
        return first + second

    def sample(self, n):
        index = tf.random.categorical(tf.broadcast_to(self.first, [1, self.bins]), n)[0]
        x0 = (tf.cast(index, tf.float32) + tf.random.uniform([n])) / self.bins
        logits = tf.nn.tanh(x0[:, None] @ self.w1 + self.b1) @ self.w2
        x1 = (tf.cast(tf.random.categorical(logits, 1)[:, 0], tf.float32) + tf.random.uniform([n])) / self.bins
        return tf.stack([x0, x1], 1)


@example()
def piecewise_density():
    """An autoregressive density of bins with momentum by hand, from which NumPy is shown a histogram now and then."""
    rng = np.random.default_rng(2)
    model = NeuralSpline()
    velocity = {v.name: tf.Variable(tf.zeros_like(v)) for v in model.trainable_variables}
    data = rng.beta(2, 5, (256, 2)).astype(np.float32)
    data[:, 1] = (data[:, 1] + data[:, 0]) / 2
    seen = {"calls": 0, "histograms": []}

    def step(x):
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(model(x))
        for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
            m = velocity[v.name]
            m.assign(0.9 * m + g)
            v.assign_add(-0.1 * m)
        seen["calls"] += 1
        if not seen["calls"] % 8:
            histogram, *_ = np.histogram2d(*model.sample(128).numpy().T, bins=4, range=[[0, 1], [0, 1]])
            seen["histograms"].append(histogram.sum())
        return loss

    return Example(
        step, lambda: (model.variables, velocity, seen), [(tf.constant(data[i : i + 64]),) for i in range(0, 256, 64)]
    )
