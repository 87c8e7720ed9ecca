"""Programs on two logical devices, for tests that start a process with them: `tf.distribute` must be set up first.

    python -m tests.coexec.distributed [NAME...]

Each program is run with plain steps, with co-executed steps inside of `strategy.run`, and with a co-executed function
around it; trainers on one device and on several. Prints, for each name, how they compare, and what was followed.
"""

import contextlib
import faulthandler
import json
import sys
import tempfile
import traceback

import keras
import numpy as np
import tensorflow as tf

import coexec
from coexec import testing
from tests.snapshots import assert_same, snapshot

REPLICAS, ROWS, STEPS = 2, 8, 6
NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(STEPS, ROWS, 4)).astype("float32")
Y = NUMBERS.integers(3, size=(STEPS, ROWS)).astype("int32")
OBJECTIVE = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def context():
    return tf.distribute.get_replica_context()


class Program:
    """What is compared: a step for one replica, run on the parts of a batch, and the state that it leaves."""

    layers = ()

    def __init__(self, strategy):
        self.strategy, self.log = strategy, []
        keras.utils.set_random_seed(2)
        with strategy.scope():
            self.make()

    def make(self):
        hidden = [keras.layers.Dense(8, "relu"), *(make() for make in self.layers)]
        self.model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(3)])
        self.optimizer = keras.optimizers.Adam(0.02)
        self.optimizer.build(self.model.trainable_variables)

    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(OBJECTIVE(y, self.model(x, training=True))) / ROWS
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def parts(self, array):
        """The rows of each replica."""
        parts = np.array_split(array, REPLICAS)
        return self.strategy.experimental_distribute_values_from_function(
            lambda c: tf.constant(parts[c.replica_id_in_sync_group])
        )

    def whole(self, x, y):
        return self.strategy.reduce("SUM", self.strategy.run(self.step, (x, y)), axis=None)

    def run(self):
        return [float(self.whole(self.parts(x), self.parts(y))) for x, y in zip(X, Y, strict=True)]

    def state(self):
        kept = [*self.model.variables, *self.optimizer.variables]
        return [[part.numpy() for part in self.strategy.experimental_local_results(v.value)] for v in kept]


class Training(Program):
    """Nothing but to train."""


class Layers(Program):
    """Moving averages, and random numbers that each replica draws of its own."""

    layers = (lambda: keras.layers.BatchNormalization(), lambda: keras.layers.Dropout(0.4, seed=3))


class Metrics(Program):
    """Variables that are only summed up when they are read."""

    def make(self):
        super().make()
        self.mean, self.accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
        self.count = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ,
                                 aggregation=tf.VariableAggregation.SUM, trainable=False)  # fmt: skip

    def step(self, x, y):
        loss = super().step(x, y)
        self.mean.update_state(loss)
        self.accuracy.update_state(y, self.model(x))
        self.count.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return loss

    def run(self):
        losses = super().run()
        return losses, float(self.mean.result()), float(self.accuracy.result()), float(self.count.read_value())


class Reads(Program):
    """Python in the step: reads, lists, ways that depend on values."""

    def step(self, x, y):
        replica = int(context().replica_id_in_sync_group)
        before = float(tf.reduce_sum(x))
        self.log.append(("x", replica, round(before, 4)))
        loss = super().step(x, y)
        self.log.append(("loss", replica, round(float(loss), 3)))
        return loss * 2.0 if before > 0 else loss + 1.0

    def run(self):
        return super().run(), self.log


class Reductions(Program):
    """What replicas tell each other in the middle of a step."""

    def step(self, x, y):
        total = context().all_reduce("SUM", tf.reduce_sum(x))
        mean = context().all_reduce("MEAN", tf.reduce_mean(x * total))
        loss = super().step(x - mean, y)
        return loss + context().all_reduce("SUM", loss * 2.0) - mean


class Merges(Program):
    """A function of all replicas together in the middle of each one's step."""

    def merged(self, strategy, value, variable):
        self.log.append("merged")
        total = strategy.reduce("SUM", value, axis=None)
        strategy.extended.update(variable, lambda v, t: v.assign_add(t), args=(total,))
        return total * 2.0

    def make(self):
        super().make()
        self.total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def step(self, x, y):
        y = y * 1
        doubled = context().merge_call(self.merged, args=(tf.reduce_mean(x), self.total))
        loss = super().step(x * 2.0 + self.total * 0.01, y)
        self.log.append("stepped")
        return loss + doubled

    def run(self):
        return super().run(), self.log, float(self.total.read_value())


class Late(Program):
    """Variables that the first step makes."""

    def make(self):
        super().make()
        self.optimizer = keras.optimizers.Adam(0.02)


class Uneven(Program):
    """Replicas with different rows, and other ones from step to step."""

    def run(self):
        sizes = [8, 7, 5, 8, 3, 6, 5, 7, 4, 8, 6, 3]  # after a few, replicas are followed at any size
        rows = zip(np.concatenate([X, X]), np.concatenate([Y, Y]), sizes, strict=True)
        return [float(self.whole(self.parts(x[:n]), self.parts(y[:n]))) for x, y, n in rows]


class Failing(Program):
    """A step that raises in one replica, of Python and of TensorFlow, and goes on."""

    def step(self, x, y):
        replica = int(context().replica_id_in_sync_group)
        scaled = x * 2.0
        if replica == 1 and len(self.log) == 3:
            self.log.append("raises")
            raise KeyError("mine")
        if len(self.log) == 5:
            self.log.append("fails")
            tf.debugging.assert_less(scaled, -100.0)
        return super().step(scaled, y)

    def run(self):
        found = []
        for x, y in zip(X, Y, strict=True):
            try:
                found.append(float(self.whole(self.parts(x), self.parts(y))))
            except (KeyError, tf.errors.InvalidArgumentError) as error:
                found.append(type(error).__name__)
            self.log.append("step")
        return found, self.log


class Alternating(Program):
    """The same step on all replicas, in the strategy's scope, and without the strategy."""

    def step(self, x, y):
        logits = self.model(x)
        return tf.reduce_sum(OBJECTIVE(y, logits)) + tf.reduce_sum(logits)

    def run(self):
        found = []
        for i, (x, y) in enumerate(zip(X, Y, strict=True)):
            if i % 2:
                found.append(float(self.whole(self.parts(x), self.parts(y))))
            else:
                found.append(float(self.step(tf.constant(x), tf.constant(y))))
            with self.strategy.scope():
                found.append(float(self.step(tf.constant(x), tf.constant(y))))
                self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.9)
        return found


class Datasets(Program):
    """A distributed dataset, whose iterator the function around `run` asks."""

    def whole(self, x, y):
        x, y = next(self.iterator)
        return super().whole(x, y)

    def run(self):
        rows = tf.data.Dataset.from_tensor_slices((X.reshape(-1, 4), Y.reshape(-1))).batch(ROWS)
        self.iterator = iter(self.strategy.experimental_distribute_dataset(rows))
        return super().run()


COMPILED = ("Training", "Reads", "Reductions")  # with every segment launched
PROGRAMS = {kind.__name__: kind for kind in Program.__subclasses__()}


class Trained:
    """A trainer, with everything that it does to gradients, on one device and on several; `fit` is the whole of it."""

    def __init__(self, policy="float32", batch_size=8, every=None, **options):
        self.policy, self.batch_size, self.every, self.options = policy, batch_size, every, options

    def step(self, state, batch, training):
        x, y = batch
        words = tf.cast(tf.abs(x[:, :2]) * 2.0, tf.int32)
        logits = state.model([x, words], training=training)
        wrong = float(np.mean(logits.numpy().argmax(1) != y.numpy()))
        state.accuracy.update_state(y, logits)
        own = tf.reduce_mean(tf.square(tf.cast(logits, tf.float32)))  # Keras scales only its own losses on replicas
        return {"loss": OBJECTIVE_MEAN(y, logits) + 0.1 * own, "wrong": wrong}

    def trainer(self, strategy, directory=None):
        keras.config.set_dtype_policy(self.policy)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            keras.utils.set_random_seed(4)
            inputs = keras.Input((4,)), keras.Input((2,), dtype="int32")
            table = keras.layers.Flatten()(keras.layers.Embedding(12, 3)(inputs[1]))
            hidden = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()([inputs[0], table]))
            model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
            state = {"model": model, "optimizer": keras.optimizers.Adam(0.02, epsilon=1e-2)}
            state["accuracy"] = keras.metrics.SparseCategoricalAccuracy()
        kept = None if directory is None else coexec.Checkpoint(directory, every=self.every)
        return coexec.Trainer(self.step, state, checkpoint=kept, jit_compile=False, **self.options)

    def fit(self, trainer, callbacks=()):
        data = X.reshape(-1, 4), Y.reshape(-1)
        others = X.reshape(-1, 4)[: ROWS + 3], Y.reshape(-1)[: ROWS + 3]  # the last batch is a smaller one
        trainer._callbacks = list(callbacks)
        history = trainer.fit(data, batch_size=self.batch_size, epochs=2, validation_data=others, verbose=0).history
        scores = trainer.evaluate(others, batch_size=self.batch_size, verbose=0)
        weights = [np.array(v) for v in trainer.model.get_weights()]
        return history, scores, weights

    def compare(self, strategy):
        """Returns what was followed; raises if the two differ."""
        one, several = self.trainer(None), self.trainer(strategy)
        tolerance = 1e-4 if self.policy == "float32" else 3e-2
        with coexec.imperative():
            expected = self.fit(one)
        found = snapshot(self.fit(several))
        assert_same(snapshot(expected), found, rtol=tolerance, atol=tolerance, path="")
        stats = several.train_step.stats()
        if self.every is not None:
            self.resume(strategy, tolerance, found)
        return ["same", stats.calls, stats.followed, stats.launches, several.train_step.explain()]

    def resume(self, strategy, tolerance, whole):
        """Stops in mid-epoch and goes on; the whole run is the oracle."""

        class Stopped(Exception):
            pass

        def run(directory, last):
            def stop(batch, logs):
                ended.append(batch)
                if len(ended) == last:
                    raise Stopped

            ended = []
            callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
            return self.fit(self.trainer(strategy, directory), [callback])

        with tempfile.TemporaryDirectory() as directory:
            with contextlib.suppress(Stopped):
                run(directory, 8)
                raise AssertionError("it was not stopped")
            parts = run(directory, 0)
        assert_same(whole, snapshot(parts), rtol=tolerance, atol=tolerance, path="")


OBJECTIVE_MEAN = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
TRAINED = {
    "trainer": Trained(),
    "trainer, uneven": Trained(batch_size=7),
    "trainer, clipped": Trained(clip_norm=0.05, batch_size=7),
    # What is kept at step 5, to go on from, is in the middle of an epoch and of an accumulation.
    "trainer, accumulated and resumed": Trained(accumulate_steps=2, clip_norm=0.05, every=5, batch_size=7),
    "trainer, scaled": Trained(policy="mixed_float16", clip_norm=0.5),
}


def one(kind, strategy, way):
    """Runs a program in one of the ways; returns what it gave, and the statistics of what was co-executed."""
    program = kind(strategy)
    function = None
    decorate = coexec.function(jit_compile="auto" if way == "compiled" else False)  # XLA would take its time
    if way in ("inside", "compiled"):
        function = program.step = decorate(program.step)
    elif way == "around":
        function = program.whole = decorate(program.whole)
    with testing.always_follow():
        result = program.run()
    return snapshot((result, program.state())), function


def single(strategy):
    """The losses and weights of one device that is given the whole batch, without a strategy."""
    program = Training(tf.distribute.get_strategy())
    losses = [float(program.step(tf.constant(x), tf.constant(y))) for x, y in zip(X, Y, strict=True)]
    distributed = Training(strategy)
    distributed.step = coexec.function(jit_compile=False)(distributed.step)
    np.testing.assert_allclose(losses, distributed.run(), rtol=1e-4, atol=1e-5)
    for expected, found in zip(program.state(), distributed.state(), strict=True):
        for part in found:
            np.testing.assert_allclose(expected[0], part, rtol=1e-3, atol=1e-4)


def main(names):
    faulthandler.dump_traceback_later(800, exit=True)
    cpu, *_ = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    for name in names:
        report = {"name": name}
        try:
            if name in TRAINED:
                print(json.dumps({**report, "several": TRAINED[name].compare(strategy)}), flush=True)
                continue
            if name == "single":
                single(strategy)
                print(json.dumps({**report, "several": ["same"]}), flush=True)
                continue
            expected, _ = one(PROGRAMS[name], strategy, "plain")
            for way in ("inside", "around", *(["compiled"] if name in COMPILED else [])):
                with testing.compile_everything() if way == "compiled" else contextlib.nullcontext():
                    found, function = one(PROGRAMS[name], strategy, way)
                stats = function.stats()
                try:
                    assert_same(expected, found, rtol=1e-3, atol=1e-4, path="")
                    report[way] = ["same"]
                except AssertionError as error:
                    report[way] = [str(error)[:600]]
                report[way] += [stats.calls, stats.followed, stats.launches, function.explain()]
        except Exception:
            report["error"] = traceback.format_exc()
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    with testing.always_follow():
        main(sys.argv[1:] or ["single", *PROGRAMS, *TRAINED])
