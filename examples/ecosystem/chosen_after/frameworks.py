"""What people build around a step: callbacks, hooks, registries, logs, and exceptions that end things early."""

import contextlib
import functools
import logging
import time
from collections import OrderedDict, defaultdict

import keras
import numpy as np
import tensorflow as tf

from examples.ecosystem import Example, example
from examples.ecosystem.chosen_after.own_optimizers import classification

logger = logging.getLogger(__name__)


class Meter:
    """Keeps the last, the mean and the best of what it is shown."""

    def __init__(self):
        self.total, self.count, self.best = 0.0, 0, float("inf")

    def __iadd__(self, value):
        self.total, self.count, self.best = self.total + value, self.count + 1, min(self.best, value)
        return self

    @property
    def mean(self):
        return self.total / max(self.count, 1)

    def __format__(self, spec):
        return f"{self.mean:{spec}} (best {self.best:{spec}})"


class Callback:
    def on_step_begin(self, trainer):
        pass

    def on_backward_end(self, trainer, gradients):
        return gradients

    def on_step_end(self, trainer, logs):
        pass


class GradientClipping(Callback):
    def __init__(self, norm):
        self.norm = norm

    def on_backward_end(self, trainer, gradients):
        return tf.clip_by_global_norm(gradients, self.norm)[0]


class Logging(Callback):
    def __init__(self, every=5):
        self.every, self.meters, self.lines = every, defaultdict(Meter), []

    def on_step_end(self, trainer, logs):
        for name, value in logs.items():
            self.meters[name] += float(value)
        if trainer.global_step % self.every == 0:
            line = ", ".join(f"{name}: {meter:.4f}" for name, meter in sorted(self.meters.items()))
            self.lines.append(line.count(","))
            logger.debug("step %d: %s", trainer.global_step, line)


class ReduceOnPlateau(Callback):
    def __init__(self, patience=4, factor=0.7):
        self.patience, self.factor, self.best, self.wait = patience, factor, None, 0

    def on_step_end(self, trainer, logs):
        loss = float(logs["loss"])
        if self.best is None or loss < self.best - 1e-2:
            self.best, self.wait = loss, 0
        elif (wait := self.wait + 1) >= self.patience:
            trainer.optimizer.learning_rate = float(trainer.optimizer.learning_rate) * self.factor
            self.wait = 0
        else:
            self.wait = wait


class LightningLike:
    """A small framework: a module with `training_step`, callbacks, timers, hooks."""

    def __init__(self, module, optimizer, callbacks):
        self.module, self.optimizer, self.callbacks = module, optimizer, callbacks
        self.global_step, self.timings = 0, OrderedDict()
        self._hooks = defaultdict(list)

    def register_hook(self, event):
        def decorator(function):
            self._hooks[event].append(function)
            return function

        return decorator

    @contextlib.contextmanager
    def timed(self, name):
        started = time.perf_counter()
        try:
            yield self
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - started

    def fire(self, event, *args):
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def fit_batch(self, *batch):
        self.fire("on_step_begin")
        with self.timed("forward"), tf.GradientTape() as tape:
            logs = self.module.training_step(batch)
        with self.timed("backward"):
            variables = self.module.trainable_variables
            gradients = tape.gradient(logs["loss"], variables)
            for callback in self.callbacks:
                gradients = callback.on_backward_end(self, gradients)
            self.optimizer.apply_gradients(zip(gradients, variables))
        self.global_step += 1
        for hook in self._hooks["step"]:
            hook(logs)
        self.fire("on_step_end", logs)
        return logs


REGISTRY = {}


def register(name):
    def wrap(cls):
        REGISTRY[name] = cls
        return cls

    return wrap


@register("residual_mlp")
class ResidualMLP(keras.Model):
    def __init__(self, width=24, depth=3, classes=4, **kwargs):
        super().__init__(**kwargs)
        self.stem, self.head = keras.layers.Dense(width), keras.layers.Dense(classes)
        self.blocks = [keras.layers.Dense(width, "relu") for _ in range(depth)]
        self.drop = keras.layers.Dropout(0.1)

    def call(self, x, training=False):
        x = functools.reduce(lambda h, block: h + self.drop(block(h), training=training), self.blocks, self.stem(x))
        return self.head(x)

    def training_step(self, batch):
        x, y = batch
        logits = self(x, training=True)
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        hits = tf.cast(tf.equal(tf.argmax(logits, -1, output_type=tf.int32), y), tf.float32)
        return {"loss": loss, "accuracy": tf.reduce_mean(hits)}


@example()
def trainer_with_callbacks():
    """A framework of one's own: a registry, hooks, timers as context managers, meters, three callbacks."""
    module = REGISTRY["residual_mlp"](width=24)
    arguments = classification(7)
    module(arguments[0][0])
    logs = Logging()
    trainer = LightningLike(module, keras.optimizers.Adam(3e-3), [GradientClipping(1.0), logs, ReduceOnPlateau()])
    sizes = []

    @trainer.register_hook("step")
    def remember(values):
        sizes.append(len(values))

    return Example(
        trainer.fit_batch, lambda: (module.variables, trainer.global_step, len(logs.lines), sizes), arguments
    )


class Diverged(Exception):
    def __init__(self, loss):
        super().__init__(f"loss {loss} is not finite")
        self.loss = loss


class SkipBatch(Exception):
    pass


@example()
def exceptions_as_control_flow():
    """Bad batches are skipped by raising; an infinite loss restores good weights and lowers the rate."""
    model = keras.Sequential([keras.layers.Dense(24, "relu"), keras.layers.Dense(4)])
    arguments = classification(8, count=7)
    arguments[3] = arguments[3][0] * np.inf, arguments[3][1]
    arguments[5] = arguments[5][0], tf.constant([-1] * 32, tf.int32)
    model(arguments[0][0])
    optimizer = keras.optimizers.Adam(1e-3)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    good, outcomes = [None], defaultdict(int)

    def check(loss):
        if not np.isfinite(loss):
            raise Diverged(loss)

    def train(x, y):
        if y[0] < 0:
            raise SkipBatch
        with tf.GradientTape() as tape:
            loss = objective(y, model(x, training=True))
        check(loss.numpy())
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    def step(x, y):
        try:
            loss = train(x, y)
        except SkipBatch:
            outcomes["skipped"] += 1
            return None
        except Diverged as error:
            outcomes[type(error).__name__] += 1
            if good[0] is not None:
                model.set_weights(good[0])
            optimizer.learning_rate = max(1e-5, float(optimizer.learning_rate) * 0.9)
            return str(error)
        else:
            outcomes["good"] += 1
            if outcomes["good"] % 10 == 1:
                good[0] = model.get_weights()
            return loss
        finally:
            outcomes["all"] += 1

    return Example(step, lambda: (model.variables, outcomes), arguments)


@example()
def checked_with_assertions():
    """TensorFlow's assertions around every stage, a graph function for the augmentation, shapes in a log."""
    model = keras.Sequential([keras.layers.Dense(24, "swish"), keras.layers.Dense(4)])
    arguments = classification(9)
    model(arguments[0][0])
    optimizer = keras.optimizers.Adagrad(1e-2)
    shapes = set()

    @tf.function
    def jitter(x, strength):
        noise = tf.random.stateless_uniform(tf.shape(x), seed=[1, 2], minval=-strength, maxval=strength)
        return x + noise

    def step(x, y):
        tf.debugging.assert_rank(x, 2)
        tf.debugging.assert_less(y, 4, message="labels are out of range")
        x = tf.debugging.check_numerics(jitter(x, tf.constant(0.1)), "inputs")
        with tf.GradientTape() as tape:
            logits = tf.ensure_shape(model(x, training=True), [None, 4])
            logger.debug("logits %s", logits.shape)
            shapes.add((tuple(logits.shape), logits.dtype.name))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            tf.debugging.assert_non_negative(losses)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        for g, v in zip(gradients, model.trainable_variables):
            tf.debugging.assert_all_finite(g, f"gradient of {v.name}")
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        counts, _, idx = np.unique(np.asarray(y), return_inverse=True, return_counts=True)
        unique, where = tf.unique(y)
        per_class = tf.math.unsorted_segment_mean(losses, where, tf.size(unique))
        return loss, tf.reduce_max(per_class), len(counts)

    return Example(step, lambda: (model.variables, shapes), arguments)


@example()
def monte_carlo_dropout_inference():
    """Prediction with uncertainty: a generator of stochastic passes until NumPy sees the variance settle."""
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(4)])
    arguments = [(x,) for x, _ in classification(10)]
    model(arguments[0][0])
    used = []

    def passes(x):
        while True:
            yield tf.nn.softmax(model(x, training=True)).numpy()

    def step(x):
        samples, previous = [], None
        for sample in passes(x):
            samples.append(sample)
            spread = np.std(samples, axis=0).mean()
            if previous is not None and len(samples) >= 4 and abs(spread - previous) < 0.05 * previous:
                break
            if len(samples) == 12:
                break
            previous = spread
        used.append(len(samples))
        mean = np.mean(samples, axis=0)
        entropy = -(mean * np.log(mean + 1e-9)).sum(-1)
        low, high = np.percentile(samples, [5, 95], axis=0)
        return {"class": mean.argmax(-1), "entropy": entropy, "width": (high - low).mean()}

    return Example(step, lambda: used, arguments)
