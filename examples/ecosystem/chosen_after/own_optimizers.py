"""Optimizers that people write themselves, and ways to descend without one gradient of the mean."""

import dataclasses
import math
from enum import Enum, auto
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example


def classification(seed, batch=32, inputs=12, classes=4, count=4):
    rng = np.random.default_rng(seed)
    return [
        (
            tf.constant(rng.normal(size=(batch, inputs)), tf.float32),
            tf.constant(rng.integers(0, classes, batch), tf.int32),
        )
        for _ in range(count)
    ]


def classifier(inputs=12, width=32, classes=4):
    model = keras.Sequential(
        [keras.layers.Dense(width, "relu"), keras.layers.Dense(width, "relu"), keras.layers.Dense(classes)]
    )
    model.build((None, inputs))
    return model


class Lion:
    """Evolved sign momentum (Chen et al., 2023)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        assert all(0.0 <= beta < 1.0 for beta in betas)
        self.params = list(params)
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.state = {}

    def step(self, grads):
        beta1, beta2 = self.betas
        for p, g in zip(self.params, grads):
            if g is None:
                continue
            if id(p) not in self.state:
                self.state[id(p)] = tf.Variable(tf.zeros_like(p), trainable=False)
            exp_avg = self.state[id(p)]
            p.assign(p * (1 - self.lr * self.weight_decay))
            update = tf.sign(exp_avg * beta1 + g * (1 - beta1))
            p.assign_add(-self.lr * update)
            exp_avg.assign(exp_avg * beta2 + g * (1 - beta2))


class Lookahead:
    """k steps forward, one step back (Zhang et al., 2019)."""

    def __init__(self, inner, k=5, alpha=0.5):
        self.inner, self.k, self.alpha, self.counter = inner, k, alpha, 0
        self.slow = [tf.Variable(p, trainable=False) for p in inner.params]

    def step(self, grads):
        self.inner.step(grads)
        self.counter += 1
        if self.counter % self.k == 0:
            for slow, fast in zip(self.slow, self.inner.params):
                slow.assign_add(self.alpha * (fast - slow))
                fast.assign(slow)


@example(rtol=2e-2, atol=5e-3)
def lion_with_lookahead():
    """Lion inside of Lookahead, both classes of one's own, on a Keras model with weight decay and warm-up."""
    model = classifier(width=24)
    optimizer = Lookahead(Lion(model.trainable_variables, lr=3e-4, weight_decay=1e-2))
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        optimizer.inner.lr = 3e-4 * min(1.0, (optimizer.counter + 1) / 20)
        with tf.GradientTape() as tape:
            loss = loss_object(y, model(x, training=True))
        optimizer.step(tape.gradient(loss, model.trainable_variables))
        return loss

    return Example(step, lambda: (model.variables, optimizer.slow, optimizer.counter), classification(0))


@dataclasses.dataclass
class Slot:
    m: tf.Variable
    v: tf.Variable


class LAMB(keras.optimizers.Optimizer):
    """Layerwise adaptation, as a Keras optimizer of one's own."""

    def __init__(self, learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-6, weight_decay_rate=0.01, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta_1, self.beta_2, self.epsilon, self.weight_decay_rate = beta_1, beta_2, epsilon, weight_decay_rate

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._m = [self.add_variable_from_reference(v, name="m") for v in variables]
        self._v = [self.add_variable_from_reference(v, name="v") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        lr = tf.cast(learning_rate, variable.dtype)
        step = tf.cast(self.iterations + 1, variable.dtype)
        m, v = self._m[self._get_variable_index(variable)], self._v[self._get_variable_index(variable)]
        m.assign(self.beta_1 * m + (1 - self.beta_1) * gradient)
        v.assign(self.beta_2 * v + (1 - self.beta_2) * tf.square(gradient))
        m_hat = m / (1 - tf.pow(self.beta_1, step))
        v_hat = v / (1 - tf.pow(self.beta_2, step))
        update = m_hat / (tf.sqrt(v_hat) + self.epsilon) + self.weight_decay_rate * variable
        w_norm, g_norm = tf.norm(tf.convert_to_tensor(variable)), tf.norm(update)
        ratio = tf.where(w_norm > 0, tf.where(g_norm > 0, w_norm / g_norm, 1.0), 1.0)
        variable.assign_sub(ratio * lr * update)


@example(rtol=1e-2, atol=1e-3)
def lamb_as_keras_optimizer():
    """LAMB as a subclass of Keras' optimizer, under a cosine schedule."""
    model = classifier()
    optimizer = LAMB(keras.optimizers.schedules.CosineDecay(1e-2, 200))
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_object(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return Example(step, lambda: (model.variables, optimizer.variables), classification(1))


@example()
def private_gradients():
    """DP-SGD: gradients of each example by `vectorized_map`, clipped one by one, summed, and noise on the sum."""
    model = classifier(width=16)
    variables = model.trainable_variables
    optimizer = keras.optimizers.SGD(0.1)
    l2_norm_clip, noise_multiplier = 1.0, 0.7
    budget = {"steps": 0, "epsilon": 0.0}

    def clip_one(args):
        x, y = args
        with tf.GradientTape() as tape:
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y[None], model(x[None]))
        grads = tape.gradient(loss, variables)
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g)) for g in grads]))
        divisor = tf.maximum(norm / l2_norm_clip, 1.0)
        return [g / divisor for g in grads]

    def step(x, y):
        clipped = tf.vectorized_map(clip_one, (x, y))
        noised = []
        for g in clipped:
            total = tf.reduce_sum(g, 0)
            noised.append((total + tf.random.normal(total.shape, stddev=l2_norm_clip * noise_multiplier)) / len(x))
        optimizer.apply_gradients(zip(noised, variables))
        budget["steps"] += 1
        budget["epsilon"] = math.sqrt(2 * budget["steps"] * math.log(1e5)) * 0.01 / noise_multiplier
        return budget["epsilon"]

    return Example(step, lambda: (variables, budget), classification(2, batch=16))


@example()
def evolution_strategies():
    """OpenAI's evolution strategies: pairs of perturbed weights, ranks of their rewards, a step along what paid."""
    model = classifier(width=8)
    rng = np.random.default_rng(4)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    sizes = [int(np.prod(s)) for s in shapes]
    theta = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
    sigma, lr, velocity = 0.05, 0.05, np.zeros_like(theta)

    def reward(flat, x, y):
        weights = [part.reshape(shape) for part, shape in zip(np.split(flat, np.cumsum(sizes)[:-1]), shapes)]
        model.set_weights(weights)
        logits = model(x)
        return -float(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)))

    def compute_ranks(x):
        ranks = np.empty(len(x), dtype=int)
        ranks[x.argsort(kind="stable")] = np.arange(len(x))
        return ranks / (len(x) - 1) - 0.5

    def step(x, y):
        noise = rng.normal(size=(4, theta.size)).astype(np.float32)
        rewards = np.array([[reward(theta + sign * sigma * n, x, y) for sign in (1, -1)] for n in noise])
        shaped = compute_ranks(rewards.ravel()).reshape(rewards.shape)
        gradient = (shaped[:, 0] - shaped[:, 1]) @ noise / (2 * len(noise) * sigma)
        velocity[:] = 0.9 * velocity + 0.1 * gradient
        theta[:] += lr * velocity
        return rewards.max()

    return Example(step, lambda: theta, classification(5))


class Reduction(Enum):
    MEAN = auto()
    SUM = auto()


class Scheduler(Enum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclasses.dataclass(frozen=True)
class Config:
    lr: float = 3e-3
    accumulate: int = 3
    reduction: Reduction = Reduction.MEAN
    scheduler: Scheduler = Scheduler.COSINE
    warmup: int = 10
    total: int = 500


@dataclasses.dataclass
class TrainState:
    step: int = 0
    micro: int = 0
    sums: list[Any] = dataclasses.field(default_factory=list)
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)


def learning_rate(config, step):
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    match config.scheduler:
        case Scheduler.CONSTANT:
            return config.lr
        case Scheduler.LINEAR:
            return config.lr * (1 - step / config.total)
        case Scheduler.COSINE:
            return config.lr * 0.5 * (1 + math.cos(math.pi * step / config.total))


@example()
def accumulation_with_dataclasses():
    """Gradients gathered in a dataclass over three calls; enums and `match` decide on the rate and the reduction."""
    config, state = Config(), TrainState()
    model = classifier()
    optimizer = keras.optimizers.Adam(config.lr)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_object(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        state.sums = [s + g for s, g in zip(state.sums, gradients)] if state.sums else gradients
        state.micro += 1
        if state.micro < config.accumulate:
            return {"loss": loss}
        match config.reduction:
            case Reduction.MEAN:
                gradients = [s / state.micro for s in state.sums]
            case Reduction.SUM:
                gradients = state.sums
        optimizer.learning_rate.assign(learning_rate(config, state.step))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        norm = tf.linalg.global_norm(gradients)
        state.step, state.micro, state.sums = state.step + 1, 0, []
        state.history.append({"loss": float(loss), "norm": float(norm)})
        return {"loss": loss, "norm": norm}

    return Example(step, lambda: (model.variables, optimizer.variables, state.step, state.micro), classification(6))
