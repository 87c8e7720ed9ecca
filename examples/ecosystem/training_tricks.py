"""Plain TensorFlow: what training loops do by hand, from optimizers of one's own to mixed precision."""

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example
from examples.ecosystem.generative import Stack


def rows(batch, inputs, classes, count=4):
    """Batches of features and labels."""
    rng = np.random.default_rng(0)
    return [
        (tf.constant(rng.normal(size=(batch, inputs)), tf.float32), tf.constant(rng.integers(0, classes, batch)))
        for _ in range(count)
    ]


class Adam(tf.Module):
    """The optimizer of TensorFlow's guide to Core."""

    def __init__(self, learning_rate=1e-3, beta_1=0.9, beta_2=0.999, ep=1e-7):
        super().__init__()
        self.beta_1, self.beta_2, self.learning_rate, self.ep = beta_1, beta_2, learning_rate, ep
        self.t = 1.0
        self.v_dvar, self.s_dvar = [], []
        self.built = False

    def apply_gradients(self, grads, variables):
        if not self.built:
            for var in variables:
                self.v_dvar.append(tf.Variable(tf.zeros(shape=var.shape)))
                self.s_dvar.append(tf.Variable(tf.zeros(shape=var.shape)))
            self.built = True
        for i, (d_var, var) in enumerate(zip(grads, variables)):
            self.v_dvar[i].assign(self.beta_1 * self.v_dvar[i] + (1 - self.beta_1) * d_var)
            self.s_dvar[i].assign(self.beta_2 * self.s_dvar[i] + (1 - self.beta_2) * tf.square(d_var))
            v_dvar_bc = self.v_dvar[i] / (1 - (self.beta_1**self.t))
            s_dvar_bc = self.s_dvar[i] / (1 - (self.beta_2**self.t))
            var.assign_sub(self.learning_rate * (v_dvar_bc / (tf.sqrt(s_dvar_bc) + self.ep)))
        self.t += 1.0


@example()
def module_with_own_adam():
    """A `tf.Module`, its loss and its Adam by hand, as in TensorFlow's guide to Core."""
    model, optimizer = Stack([20, 64, 64, 5]), Adam()

    def step(x, y):
        with tf.GradientTape() as tape:
            sparse_ce = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x))
            loss = tf.reduce_mean(sparse_ce)
        grads = tape.gradient(loss, model.variables)
        optimizer.apply_gradients(grads, model.variables)
        return loss

    return Example(step, lambda: (model.variables, optimizer.variables, optimizer.t), rows(64, 20, 5))


@example()
def maml():
    """Model-agnostic meta-learning: an inner step on each of four sinusoids, and gradients through it."""
    rng = np.random.default_rng(0)
    sizes = [(1, 40), (40,), (40, 40), (40,), (40, 1), (1,)]
    weights = [tf.Variable(tf.random.truncated_normal(s, stddev=0.1)) for s in sizes]
    optimizer = keras.optimizers.Adam(1e-3)

    def forward(x, w):
        h = tf.nn.relu(x @ w[0] + w[1])
        h = tf.nn.relu(h @ w[2] + w[3])
        return h @ w[4] + w[5]

    def tasks():
        amplitude, phase = rng.uniform(0.1, 5.0, (4, 1, 1)), rng.uniform(0, np.pi, (4, 1, 1))
        x = rng.uniform(-5, 5, (4, 20, 1))
        return tf.constant(x, tf.float32), tf.constant(amplitude * np.sin(x + phase), tf.float32)

    def step(xs, ys):
        with tf.GradientTape() as outer:
            losses = []
            for x, y in zip(tf.unstack(xs), tf.unstack(ys)):
                with tf.GradientTape() as inner:
                    inner_loss = tf.reduce_mean((forward(x[:10], weights) - y[:10]) ** 2)
                slopes = inner.gradient(inner_loss, weights)
                fast = [w - 0.01 * g for w, g in zip(weights, slopes)]
                losses.append(tf.reduce_mean((forward(x[10:], fast) - y[10:]) ** 2))
            loss = tf.add_n(losses) / len(losses)
        optimizer.apply_gradients(zip(outer.gradient(loss, weights), weights))
        return loss

    return Example(step, lambda: (weights, optimizer.variables), [tasks() for _ in range(4)])


@example()
def learning_rate_finder():
    """The rate grows with every step, Python smooths the loss, and starts over where it explodes."""
    model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(5)])
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = rows(64, 20, 5)
    model(arguments[0][0])
    optimizer = keras.optimizers.SGD(1e-5)
    start = [v.numpy() for v in model.variables]
    rates, losses = [], []

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = objective(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        smooth = 0.9 * (losses[-1] if losses else float(loss)) + 0.1 * float(loss)
        rates.append(float(optimizer.learning_rate))
        losses.append(smooth)
        if smooth > 4 * min(losses):
            for variable, value in zip(model.variables, start):
                variable.assign(value)
            optimizer.learning_rate = 1e-5
            losses.clear()
        else:
            optimizer.learning_rate = rates[-1] * 1.05
        return smooth

    return Example(step, lambda: (model.variables, rates, losses), arguments)


@example()
def averaging_clipping_accumulating():
    """Gradients of two halves of a batch are summed and clipped; a shadow of the weights follows them slowly."""
    model = keras.Sequential([keras.layers.Dense(64, "gelu"), keras.layers.LayerNormalization(), keras.layers.Dense(5)])
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(1e-3)
    arguments = rows(64, 20, 5)
    model(arguments[0][0])
    variables = model.trainable_variables
    sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
    shadow = [tf.Variable(v, trainable=False) for v in variables]
    calls = [0]

    def step(x, y):
        for part_x, part_y in zip(tf.split(x, 2), tf.split(y, 2)):
            with tf.GradientTape() as tape:
                loss = objective(part_y, model(part_x, training=True)) / 2
            for total, gradient in zip(sums, tape.gradient(loss, variables)):
                total.assign_add(gradient)
        gradients, norm = tf.clip_by_global_norm([total.value() for total in sums], 1.0)
        optimizer.apply_gradients(zip(gradients, variables))
        calls[0] += 1
        decay = min(0.99, (1 + calls[0]) / (10 + calls[0]))
        for average, variable in zip(shadow, variables):
            average.assign(decay * average + (1 - decay) * variable)
        for total in sums:
            total.assign(tf.zeros_like(total))
        return norm

    return Example(step, lambda: (model.variables, optimizer.variables, shadow, sums, calls), arguments)


@example(rtol=2e-2, atol=2e-3)
def mixed_precision_by_hand():
    """Half precision inside, a loss scale that Python halves at an overflow and doubles now and then."""
    model, scale = Stack([20, 64, 64, 5]), tf.Variable(2.0**15)
    velocity = [tf.Variable(tf.zeros_like(v)) for v in model.trainable_variables]
    good = [0]

    def forward(x):
        for layer in model.layers:
            x = tf.matmul(tf.cast(x, tf.float16), tf.cast(layer.w, tf.float16)) + tf.cast(layer.b, tf.float16)
            x = x if layer.activation is None else layer.activation(x)
        return tf.cast(x, tf.float32)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, forward(x)))
            scaled = loss * scale
        gradients = [g / scale for g in tape.gradient(scaled, model.trainable_variables)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        if finite:
            for v, g, m in zip(model.trainable_variables, gradients, velocity):
                m.assign(0.9 * m + g)
                v.assign_sub(0.01 * m)
            good[0] += 1
            if good[0] % 50 == 0:
                scale.assign(scale * 2.0)
        else:
            scale.assign(tf.maximum(scale / 2.0, 1.0))
        return loss

    return Example(step, lambda: (model.variables, velocity, scale, good), rows(64, 20, 5))


@example()
def contrastive_learning():
    """SimCLR: two noisy views of each row, a projection, and the normalised temperature-scaled loss."""
    encoder = keras.Sequential([keras.layers.Dense(128, "relu"), keras.layers.Dense(64, "relu")])
    projector = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(16)])
    optimizer = keras.optimizers.Adam(1e-3)
    arguments = [(x,) for x, _ in rows(32, 20, 5)]
    projector(encoder(arguments[0][0]))

    def augment(x):
        mask = tf.cast(tf.random.uniform(tf.shape(x)) > 0.2, x.dtype)
        return x * mask + tf.random.normal(tf.shape(x), stddev=0.1)

    def nt_xent(a, b, temperature=0.5):
        a, b = tf.math.l2_normalize(a, axis=1), tf.math.l2_normalize(b, axis=1)
        similarities = tf.matmul(a, b, transpose_b=True) / temperature
        labels = tf.range(tf.shape(a)[0])
        loss_1 = keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
        loss_2 = keras.losses.sparse_categorical_crossentropy(labels, tf.transpose(similarities), from_logits=True)
        return tf.reduce_mean(loss_1 + loss_2) / 2

    def step(x):
        with tf.GradientTape() as tape:
            loss = nt_xent(projector(encoder(augment(x))), projector(encoder(augment(x))))
        variables = encoder.trainable_variables + projector.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return float(loss)

    return Example(step, lambda: (encoder.variables, projector.variables, optimizer.variables), arguments)
