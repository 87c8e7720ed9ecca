"""Differential equations, and networks whose weights other things compute."""

import keras
import numpy as np
import scipy.optimize
import tensorflow as tf

from examples.ecosystem import Example, example


class ODEFunc(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(2)])

    def call(self, y, t=None):
        return self.net(y**3)


def rk4_step(func, t, dt, y):
    k1 = func(y, t=t)
    k2 = func(y + dt * k1 / 2, t=t + dt / 2)
    k3 = func(y + dt * k2 / 2, t=t + dt / 2)
    k4 = func(y + dt * k3, t=t + dt)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def odeint(func, y0, t):
    ys, y = [y0], y0
    for t0, t1 in zip(t[:-1], t[1:]):
        y = rk4_step(func, t0, t1 - t0, y)
        ys.append(y)
    return tf.stack(ys)


@example(rtol=1e-2, atol=1e-3)
def neural_ode():
    """A neural differential equation that is integrated by Runge and Kutta's rule through ten points of a spiral."""
    t = np.linspace(0.0, 2.5, 11).astype(np.float32)
    func, optimizer = ODEFunc(), keras.optimizers.RMSprop(1e-3)
    spiral = np.stack([np.cos(2 * t) * np.exp(-0.1 * t), np.sin(2 * t) * np.exp(-0.1 * t)], 1).astype(np.float32)
    start, path = np.tile(spiral[:1], (8, 1)), spiral[:, None] * np.ones((1, 8, 1), np.float32)
    arguments = [(tf.constant(start * s), tf.constant(path * s)) for s in (1.0, 0.9, 1.1)]
    func(arguments[0][0], t=0.0)

    def step(y0, y_true):
        with tf.GradientTape() as tape:
            pred_y = odeint(func, y0, t)
            loss = tf.reduce_mean(tf.abs(pred_y - y_true))
        grads = tape.gradient(loss, func.trainable_variables)
        optimizer.apply_gradients(zip(grads, func.trainable_variables))
        return loss

    return Example(step, lambda: func.variables, arguments)


class PINN:
    """Burgers' equation with weights in lists, as Raissi's repository has it."""

    def __init__(self, sizes, lb, ub, nu):
        self.lb, self.ub, self.nu = lb, ub, nu
        self.weights, self.biases = [], []
        for n_in, n_out in zip(sizes[:-1], sizes[1:]):
            std = np.sqrt(2 / (n_in + n_out))
            self.weights.append(tf.Variable(tf.random.truncated_normal([n_in, n_out], stddev=std)))
            self.biases.append(tf.Variable(tf.zeros([1, n_out])))

    @property
    def trainable(self):
        return self.weights + self.biases

    def net_u(self, x, t):
        h = 2.0 * (tf.concat([x, t], 1) - self.lb) / (self.ub - self.lb) - 1.0
        for w, b in zip(self.weights[:-1], self.biases[:-1]):
            h = tf.tanh(tf.add(tf.matmul(h, w), b))
        return tf.add(tf.matmul(h, self.weights[-1]), self.biases[-1])

    def net_f(self, x, t):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, t])
            u = self.net_u(x, t)
            u_x = tape.gradient(u, x)
        u_t = tape.gradient(u, t)
        u_xx = tape.gradient(u_x, x)
        del tape
        return u_t + u * u_x - self.nu * u_xx


@example(rtol=2e-2, atol=2e-3)
def physics_informed_burgers():
    """Burgers' equation by a network of bare variables and second derivatives from a persistent tape."""
    rng = np.random.default_rng(1)
    pinn = PINN([2, 20, 20, 20, 1], np.array([-1.0, 0.0], np.float32), np.array([1.0, 1.0], np.float32), 0.01 / np.pi)
    optimizer = keras.optimizers.Adam(1e-3)
    x_u = tf.constant(rng.uniform(-1, 1, (20, 1)), tf.float32)
    t_u, u = tf.zeros_like(x_u), -tf.sin(np.pi * x_u)
    arguments = [
        (tf.constant(rng.uniform(-1, 1, (40, 1)), tf.float32), tf.constant(rng.uniform(0, 1, (40, 1)), tf.float32))
        for _ in range(4)
    ]
    log = []

    def step(x, t):
        with tf.GradientTape() as tape:
            loss_u = tf.reduce_mean(tf.square(u - pinn.net_u(x_u, t_u)))
            loss_f = tf.reduce_mean(tf.square(pinn.net_f(x, t)))
            loss = loss_u + loss_f
        optimizer.apply_gradients(zip(tape.gradient(loss, pinn.trainable), pinn.trainable))
        if len(log) % 10 == 0:
            log.append(f"{len(log)}: {loss.numpy():.3f}")
        else:
            log.append(None)
        return loss

    return Example(step, lambda: (pinn.trainable, len(log)), arguments)


@example(rtol=5e-2, atol=5e-3)
def lbfgs_by_scipy():
    """SciPy's L-BFGS drives a Keras model through one flat vector; a step is a minimisation of three iterations."""
    rng = np.random.default_rng(2)
    model = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
    model.build((None, 3))
    shapes = [v.shape for v in model.trainable_variables]
    sizes = [int(np.prod(s)) for s in shapes]
    x = tf.constant(rng.normal(size=(64, 3)), tf.float32)
    y = tf.reduce_sum(tf.sin(x), 1, keepdims=True)
    evaluations = [0]

    def get_flat():
        return np.concatenate([v.numpy().ravel() for v in model.trainable_variables]).astype(np.float64)

    def set_flat(flat):
        for v, part, shape in zip(model.trainable_variables, np.split(flat, np.cumsum(sizes)[:-1]), shapes):
            v.assign(part.reshape(shape).astype(np.float32))

    def loss_and_grad(flat):
        set_flat(flat)
        evaluations[0] += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        grads = tape.gradient(loss, model.trainable_variables)
        flat_grad = tf.concat([tf.reshape(g, [-1]) for g in grads], 0)
        return loss.numpy().astype(np.float64), flat_grad.numpy().astype(np.float64)

    def step(noise):
        result = scipy.optimize.minimize(loss_and_grad, get_flat() + noise, jac=True, method="L-BFGS-B",
                                         options={"maxiter": 3})  # fmt: skip
        set_flat(result.x)
        return result.fun

    noises = [(1e-2 * rng.normal(size=sum(sizes)),) for _ in range(4)]
    return Example(step, lambda: evaluations[0] > 10, noises)


class HyperNetwork(keras.layers.Layer):
    """Makes a dense layer's weights from an embedding of the layer."""

    def __init__(self, z_dim, n_in, n_out):
        super().__init__()
        self.n_in, self.n_out = n_in, n_out
        self.hidden = keras.layers.Dense(z_dim * n_in)
        self.project = keras.layers.Dense(n_out)
        self.z_dim = z_dim

    def call(self, z):
        a = tf.reshape(self.hidden(z[tf.newaxis]), [self.n_in, self.z_dim])
        return self.project(a)


@example()
def hypernetwork():
    """One small network makes the weights of four layers of another, from four embeddings that are learnt."""
    rng = np.random.default_rng(3)
    hyper = HyperNetwork(8, 16, 16)
    zs = [tf.Variable(tf.random.normal([8]), name=f"z{i}") for i in range(4)]
    stem, head = keras.layers.Dense(16), keras.layers.Dense(3)
    arguments = [
        (rng.normal(size=(32, 6)).astype(np.float32), rng.integers(0, 3, 32).astype(np.int32)) for _ in range(4)
    ]
    head(stem(arguments[0][0]))
    hyper(zs[0])
    optimizer = keras.optimizers.Adam(1e-3, clipnorm=1.0)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def forward(x):
        h = stem(x)
        for z in zs:
            h = h + tf.nn.elu(h @ hyper(z))
        return head(h)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = objective(y, forward(x))
        variables = hyper.trainable_weights + zs + stem.trainable_weights + head.trainable_weights
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables))
        return loss

    return Example(step, lambda: (hyper.weights, zs, optimizer.variables), arguments)
