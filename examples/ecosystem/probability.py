"""TensorFlow Probability: variational inference, flows, Markov chains, state space models."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # TensorFlow Probability's layers are of Keras 2

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

from examples.ecosystem import Example, example

tfd, tfb = tfp.distributions, tfp.bijectors


@example()
def tfp_variational_regression():
    """Bayesian linear regression: a mean-field posterior fitted by the evidence lower bound."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=100)).astype(np.float32)
    mean = tf.Variable(tf.zeros([3]))
    scale = tfp.util.TransformedVariable(tf.ones([3]), tfb.Softplus())
    posterior = tfd.Independent(tfd.Normal(mean, scale), 1)
    prior = tfd.Independent(tfd.Normal(tf.zeros([3]), 1.0), 1)
    variables = posterior.trainable_variables
    optimizer = tf.keras.optimizers.legacy.Adam(0.05)

    def step(x, y):
        with tf.GradientTape() as tape:
            weights = posterior.sample(16)
            likelihood = tfd.Normal(tf.linalg.matvec(x, weights[:, None]), 0.1)
            log_likelihood = tf.reduce_sum(likelihood.log_prob(y), axis=-1)
            elbo = tf.reduce_mean(log_likelihood + prior.log_prob(weights) - posterior.log_prob(weights))
            loss = -elbo
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    return Example(step, lambda: (variables, optimizer.variables()), [(tf.constant(x), tf.constant(y))])


@example()
def tfp_masked_autoregressive_flow():
    """A density by three autoregressive layers over two moons."""
    rng = np.random.default_rng(0)
    layers = []
    for n in range(3):
        made = tfb.AutoregressiveNetwork(params=2, hidden_units=[32, 32], activation="relu")
        layers.append(tfb.MaskedAutoregressiveFlow(shift_and_log_scale_fn=made, name=f"flow_{n}"))
        layers.append(tfb.Permute(permutation=[1, 0]))
    flow = tfd.TransformedDistribution(
        distribution=tfd.Sample(tfd.Normal(0.0, 1.0), sample_shape=[2]), bijector=tfb.Chain(layers[:-1])
    )
    optimizer = tf.keras.optimizers.legacy.Adam(1e-3)
    angles = rng.uniform(0, np.pi, (4, 128))
    arguments = [(tf.constant(np.stack([np.cos(a), np.sin(a)], 1), tf.float32),) for a in angles]
    flow.log_prob(arguments[0][0])

    def step(points):
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(flow.log_prob(points))
        gradients = tape.gradient(loss, flow.trainable_variables)
        optimizer.apply_gradients(zip(gradients, flow.trainable_variables))
        return loss

    return Example(step, lambda: (flow.trainable_variables, optimizer.variables()), arguments)


@example(rtol=1e-2, atol=1e-3)
def tfp_hamiltonian_monte_carlo():
    """One transition of Hamiltonian Monte Carlo on a logistic regression; Python keeps the chain."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.float32)
    chain, accepted = [tf.zeros([4])], []

    def log_posterior(weights):
        prior = tf.reduce_sum(tfd.Normal(0.0, 1.0).log_prob(weights))
        return prior + tf.reduce_sum(tfd.Bernoulli(logits=tf.linalg.matvec(x, weights)).log_prob(y))

    kernel = tfp.mcmc.HamiltonianMonteCarlo(log_posterior, step_size=0.05, num_leapfrog_steps=3)
    results = [kernel.bootstrap_results(chain[0])]

    def step():
        state, results[0] = kernel.one_step(chain[-1], results[0])
        chain.append(state)
        del chain[:-10]
        accepted.append(bool(results[0].is_accepted))
        return state

    return Example(step, lambda: (chain, accepted), [()])


@example()
def tfp_bayesian_network():
    """A network of Flipout layers, its divergence from the prior added to the loss (Keras 2)."""
    rng = np.random.default_rng(0)
    divergence = lambda q, p, _: tfd.kl_divergence(q, p) / 1000.0  # noqa: E731
    model = tf.keras.Sequential([
        tfp.layers.DenseFlipout(32, activation="relu", kernel_divergence_fn=divergence),
        tfp.layers.DenseFlipout(10, kernel_divergence_fn=divergence),
    ])  # fmt: skip
    optimizer = tf.keras.optimizers.legacy.Adam(1e-2)
    arguments = [
        (tf.constant(rng.random((32, 20)), tf.float32), tf.constant(rng.integers(0, 10, 32))) for _ in range(4)
    ]
    model(arguments[0][0])

    def step(features, labels):
        with tf.GradientTape() as tape:
            likelihood = tfd.Categorical(logits=model(features))
            loss = -tf.reduce_mean(likelihood.log_prob(labels)) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return Example(step, lambda: (model.variables, optimizer.variables()), arguments)


@example()
def tfp_joint_distribution():
    """Maximum a posteriori of eight schools by a joint distribution."""
    effects = tf.constant([28.0, 8, -3, 7, -1, 1, 18, 12])
    errors = tf.constant([15.0, 10, 16, 11, 9, 11, 10, 18])
    model = tfd.JointDistributionSequential([
        tfd.Normal(0.0, 10.0),
        tfd.Normal(5.0, 1.0),
        tfd.Independent(tfd.Normal(tf.zeros(8), tf.ones(8)), 1),
        lambda z, log_tau, mu: tfd.Independent(
            tfd.Normal(mu[..., None] + tf.exp(log_tau[..., None]) * z, errors), 1
        ),
    ])  # fmt: skip
    mu, log_tau, z = tf.Variable(0.0), tf.Variable(1.0), tf.Variable(tf.zeros(8))
    variables = [mu, log_tau, z]
    optimizer = tf.keras.optimizers.legacy.Adam(0.1)

    def step():
        with tf.GradientTape() as tape:
            loss = -model.log_prob([mu, log_tau, z, effects])
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return Example(step, lambda: (variables, optimizer.variables()), [()])
