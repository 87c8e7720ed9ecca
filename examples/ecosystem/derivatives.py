"""Programs that differentiate gradients, and one whose data stay NumPy arrays."""

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


def perceptron(inputs, *units, activation="tanh"):
    """Returns a network of dense layers; the last one is linear."""
    hidden = [keras.layers.Dense(n, activation=activation) for n in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(units[-1])])


@example()
def burgers_equation():
    """A physics-informed network: the residual has first and second derivatives by the inputs."""
    network, optimizer = perceptron(2, 24, 24, 24, 1), keras.optimizers.Adam(1e-3)

    def step(points, known, values):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(points)
                with tf.GradientTape() as first:
                    first.watch(points)
                    u = network(points, training=True)
                slopes = first.gradient(u, points)
                along = slopes[:, 1:]
            curvature = second.gradient(along, points)[:, 1:]
            residual = slopes[:, :1] + u * along - 0.01 / np.pi * curvature
            loss = tf.reduce_mean(residual**2) + tf.reduce_mean((network(known, training=True) - values) ** 2)
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables))
        return float(loss)

    rng = np.random.default_rng(0)
    arguments = []
    for _ in range(4):
        x = rng.uniform(-1, 1, (32, 1))
        known = np.hstack([np.zeros((32, 1)), x])
        given = rng.uniform(-1, 1, (128, 2)), known, -np.sin(np.pi * x)
        arguments.append(tuple(tf.constant(each, tf.float32) for each in given))
    return Example(step, lambda: (network.variables, optimizer.variables), arguments)


@example()
def critic_with_a_gradient_penalty():
    """The critic of a Wasserstein GAN: the norm of its slope at mixed samples is part of its loss."""
    critic, optimizer = perceptron(16, 64, 64, 1, activation="leaky_relu"), keras.optimizers.Adam(1e-4, beta_1=0.5)
    generator = perceptron(8, 32, 16)

    def penalty_of(real, fake):
        mix = tf.random.uniform([tf.shape(real)[0], 1])
        mixed = mix * real + (1.0 - mix) * fake
        with tf.GradientTape() as inner:
            inner.watch(mixed)
            scores = critic(mixed, training=True)
        slopes = inner.gradient(scores, [mixed])[0]
        return tf.reduce_mean((tf.norm(slopes, axis=1) - 1.0) ** 2)

    def step(real):
        losses = []
        for _ in range(2):
            fake = generator(tf.random.normal([tf.shape(real)[0], 8]))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(real)) + 10.0 * penalty_of(real, fake)
            optimizer.apply_gradients(zip(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables))
            losses.append(loss)
        return losses

    rng = np.random.default_rng(1)
    arguments = [(tf.constant(rng.normal(size=(32, 16)), tf.float32),) for _ in range(4)]
    return Example(step, lambda: (critic.variables, optimizer.variables), arguments)


@example()
def learning_to_fit_sinusoids():
    """MAML: three tasks are each fitted by one step of descent, through which the common start is learnt."""
    weights = [tf.Variable(tf.random.normal(s, stddev=0.3)) for s in ((1, 32), (32,), (32, 32), (32,), (32, 1))]
    optimizer = keras.optimizers.Adam(1e-3)

    def predicted(x, parameters):
        first, bias, second, other, last = parameters
        return tf.nn.relu(tf.nn.relu(x @ first + bias) @ second + other) @ last

    def error(x, y, parameters):
        return tf.reduce_mean((predicted(x, parameters) - y) ** 2)

    def step(tasks):
        with tf.GradientTape() as tape:
            total = 0.0
            for x, y, further, wanted in tasks:
                with tf.GradientTape() as inner:
                    loss = error(x, y, weights)
                adapted = [w - 0.05 * g for w, g in zip(weights, inner.gradient(loss, weights))]
                total += error(further, wanted, adapted)
        optimizer.apply_gradients(zip(tape.gradient(total, weights), weights))
        return total

    def task(rng):
        height, phase = rng.uniform(0.5, 2.0), rng.uniform(0, np.pi)
        x = rng.uniform(-3, 3, (2, 10, 1))
        y = height * np.sin(x + phase)
        return [tf.constant(each, tf.float32) for each in (x[0], y[0], x[1], y[1])]

    rng = np.random.default_rng(2)
    return Example(step, lambda: (weights, optimizer.variables), [([task(rng) for _ in range(3)],) for _ in range(4)])


@example()
def functional_model_of_arrays():
    """Two branches of a functional model are given NumPy arrays by name; metrics are given labels in arrays."""
    words, numbers = keras.Input((6,), dtype="int32", name="words"), keras.Input((5,), name="numbers")
    text = keras.layers.Embedding(50, 12)(words)
    text = keras.layers.Flatten()(keras.layers.Conv1D(16, 3, activation="relu")(text))
    both = keras.layers.Concatenate()([text, keras.layers.Dense(16, "relu")(numbers)])
    model = keras.Model({"words": words, "numbers": numbers}, keras.layers.Dense(1)(keras.layers.Dropout(0.1)(both)))
    objective, optimizer = keras.losses.BinaryCrossentropy(from_logits=True), keras.optimizers.Adam(1e-3)
    metrics = keras.metrics.BinaryAccuracy(threshold=0.0), keras.metrics.AUC(from_logits=True)

    def step(batch, labels):
        with tf.GradientTape() as tape:
            logits = model(batch, training=True)
            loss = objective(labels, logits)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights))
        for metric in metrics:
            metric.update_state(labels, logits)
        return loss, [float(metric.result()) for metric in metrics]

    rng = np.random.default_rng(3)
    arguments = []
    for _ in range(4):
        batch = {"words": rng.integers(0, 50, (16, 6)), "numbers": rng.normal(size=(16, 5))}
        arguments.append((batch, rng.integers(0, 2, (16, 1))))
    return Example(step, lambda: (model.variables, optimizer.variables), arguments)
