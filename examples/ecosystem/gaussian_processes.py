"""GPflow: regression by its own training loss, and sparse variational models on batches."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # GPflow's optimizers are of Keras 2

import gpflow
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


def curve(rows, seed=0):
    """Points on a noisy curve."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 6, (rows, 1))
    return x, np.sin(2 * x) + 0.1 * rng.normal(size=(rows, 1))


@example()
def gpflow_regression():
    """Exact regression with a squared exponential kernel, trained by Adam."""
    model = gpflow.models.GPR(curve(60), kernel=gpflow.kernels.SquaredExponential())
    optimizer = tf.optimizers.legacy.Adam(0.05)

    def step():
        optimizer.minimize(model.training_loss, model.trainable_variables)
        return model.likelihood.variance.numpy()

    return Example(step, lambda: (model.trainable_variables, optimizer.variables()), [()])


@example()
def gpflow_svgp():
    """A sparse variational process on batches: natural gradients for q, Adam for the rest."""
    x, y = curve(200)
    model = gpflow.models.SVGP(
        gpflow.kernels.Matern52(), gpflow.likelihoods.Gaussian(), x[:20].copy(), num_data=len(x)
    )
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    natural = gpflow.optimizers.NaturalGradient(gamma=0.1)
    adam = tf.optimizers.legacy.Adam(0.01)
    arguments = [(tf.constant(x[n : n + 50]), tf.constant(y[n : n + 50])) for n in range(0, 200, 50)]

    def step(x, y):
        loss = model.training_loss_closure((x, y), compile=False)
        adam.minimize(loss, model.trainable_variables)
        natural.minimize(loss, [(model.q_mu, model.q_sqrt)])
        return -model.elbo((x, y))

    return Example(step, lambda: (model.variables, adam.variables()), arguments)


@example()
def gpflow_prediction():
    """What a fitted process says of new points."""
    model = gpflow.models.GPR(curve(80), gpflow.kernels.RBF() + gpflow.kernels.Linear(), noise_variance=0.01)
    rng = np.random.default_rng(3)
    arguments = [(rng.uniform(0, 6, (30, 1)),) for _ in range(4)]

    def step(points):
        mean, variance = model.predict_y(points)
        return mean.numpy(), np.sqrt(variance.numpy())

    return Example(step, lambda: model.trainable_variables, arguments)
