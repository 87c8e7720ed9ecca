"""CleverHans: training on examples that an attack makes from the batch."""

import keras
import numpy as np
import tensorflow as tf
from cleverhans.tf2.attacks.fast_gradient_method import fast_gradient_method
from cleverhans.tf2.attacks.projected_gradient_descent import projected_gradient_descent

from examples.ecosystem import Example, example


def network():
    """A classifier of small images, its optimizer and its data."""
    rng = np.random.default_rng(0)
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    arguments = [
        (tf.constant(rng.random((32, 14, 14, 1)), tf.float32), tf.constant(rng.integers(0, 10, 32))) for _ in range(4)
    ]
    model(arguments[0][0])
    return model, keras.optimizers.Adam(1e-3), arguments


@example(rtol=1e-2, atol=1e-3)
def cleverhans_adversarial_training():
    """Projected gradient descent of three steps, then a training step on what it found."""
    model, optimizer, arguments = network()
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss_metric = keras.metrics.Mean()

    def step(x, y):
        x = projected_gradient_descent(model, x, 0.3, 0.1, 3, np.inf)
        with tf.GradientTape() as tape:
            loss = objective(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        loss_metric(loss)
        return loss_metric.result()

    return Example(step, lambda: (model.variables, optimizer.variables, loss_metric.variables), arguments)


@example()
def cleverhans_fast_gradient():
    """What the fast gradient method does to a classifier's accuracy."""
    model, _, arguments = network()
    clean, attacked = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.SparseCategoricalAccuracy()

    def step(x, y):
        x_fgm = fast_gradient_method(model, x, 0.3, np.inf)
        clean(y, model(x))
        attacked(y, model(x_fgm))
        return float(clean.result()), float(attacked.result()), x_fgm

    return Example(step, lambda: (clean.variables, attacked.variables), arguments)
