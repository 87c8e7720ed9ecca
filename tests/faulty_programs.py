"""The programs of `tests.faults`: small, of every kind, each with its state and its effects."""

import itertools
import threading
from typing import ClassVar

import keras
import numpy as np
import tensorflow as tf


class Program:
    """A program: `begin` brings its state back, `call` makes one call of the step, decorated or not."""

    calls = 5
    options: ClassVar[dict] = {"jit_compile": False}

    def __init__(self):
        self.log, self.variables = [], []
        self.make()
        self._initial = [v.numpy() for v in self.variables]

    def make(self):
        pass

    def begin(self):
        self.log.clear()
        for variable, value in zip(self.variables, self._initial, strict=True):
            variable.assign(value)
        tf.random.set_seed(1)

    def call(self, step, number):
        return step(tf.constant([1.0, 2.0, 3.0]) + float(number))

    def state(self):
        return [v.numpy() for v in self.variables], list(self.log)


class Keras(Program):
    def make(self):
        keras.utils.set_random_seed(1)
        self.model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
        self.model.build([None, 3])
        self.optimizer = self.make_optimizer()
        self.optimizer.build(self.model.trainable_variables)
        self.variables = [v.value for v in (*self.model.variables, *self.optimizer.variables)]

    def make_optimizer(self):
        return keras.optimizers.SGD(0.1)

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x[None]) - 1.0) ** 2)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.log.append(round(float(loss), 4))
        return loss


class KerasAdam(Keras):
    def make_optimizer(self):
        return keras.optimizers.Adam(0.1)


class RawTape(Program):
    def make(self):
        self.variables = [tf.Variable([1.0, 2.0, 3.0]), tf.Variable(0.0)]

    def step(self, x):
        w, count = self.variables
        count.assign_add(1.0)
        self.log.append("before")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((w * x - 1.0) ** 2) * 0.01
        w.assign_sub(0.1 * tape.gradient(loss, w))
        self.log.append("behind")
        count.assign_add(10.0)
        return loss, count * 1.0


class Tries(RawTape):
    def step(self, x):
        w, count = self.variables
        count.assign_add(1.0)
        try:
            y = tf.gather(w, tf.cast(x[0], tf.int32))
            self.log.append("went")
        except tf.errors.InvalidArgumentError:
            y = w[0]
            self.log.append("caught")
        count.assign_add(10.0)
        return y + count


class Assertions(RawTape):
    def step(self, x):
        w, count = self.variables
        count.assign_add(1.0)
        tf.debugging.assert_less(x[0], 4.0)
        count.assign_add(10.0)
        w.assign_add(x)
        return w * 2.0


class MakesVariables(RawTape):
    def step(self, x):
        v = tf.Variable(x)
        v.assign_add([1.0, 1.0, 1.0])
        self.variables[1].assign_add(tf.reduce_sum(v))
        return v * 2.0


class Draws(RawTape):
    def step(self, x):
        y = tf.random.normal([3]) + tf.random.uniform([3])
        self.variables[0].assign_add(y)
        self.log.append(float(tf.reduce_sum(y)))
        return tf.nn.dropout(x, 0.5) + y


class Dropout(Keras):
    def make(self):
        super().make()
        self.drop = keras.layers.Dropout(0.5, seed=3)
        self.variables += [v.value for v in self.drop.variables]

    def step(self, x):
        y = self.drop(x[None], training=True)
        return self.model(y) + tf.random.uniform([1])


class Reads(RawTape):
    def step(self, x):
        w, count = self.variables
        for _ in range(3):
            count.assign_add(tf.reduce_sum(w * x))
            self.log.append(float(count))
            w.assign_add(x * 0.1)
        return w + 1.0


class Branches(RawTape):
    def step(self, x):
        w, count = self.variables
        count.assign_add(1.0)
        if tf.reduce_sum(x) + count > 15.0:
            self.log.append("large")
            w.assign_add(x)
        else:
            self.log.append("small")
            w.assign_sub(x)
        return w * 1.0


class NestedTapes(RawTape):
    def step(self, x):
        w = self.variables[0]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(w * w * w * x)
            first = inner.gradient(y, w)
            z = tf.reduce_sum(first * x)
        return first, outer.gradient(z, w)


class Jacobian(RawTape):
    calls = 4

    def step(self, x):
        w = self.variables[0]
        with tf.GradientTape(persistent=True) as tape:
            y = tf.tanh(w * x) + tf.pow(w, 2.0)
        return tape.jacobian(y, w), tape.gradient(y, w)


class KerasMetric(Program):
    def make(self):
        self.metric = keras.metrics.MeanSquaredError()
        self.variables = [v.value for v in self.metric.variables]

    def step(self, x):
        self.metric.update_state(x, x * 2.0)
        return self.metric.result()


class CustomLayer(Keras):
    def make(self):
        super().make()
        inner = self.model

        class Positions(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.inner = inner

            def call(self, x):
                return self.inner(x + keras.ops.arange(0, 3, dtype="float32"))

        self.layer = Positions()

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.layer(x[None]) ** 2)
        return tape.gradient(loss, self.model.trainable_variables)


class Turns(Keras):
    """Known calls that come in other turns of a loop, and by other ways."""

    calls = 6

    def step(self, x):
        turns = 2 + len(self.log) % 3
        with tf.GradientTape() as tape:
            loss = 0.0
            for _ in range(turns):
                x = x * 0.5 if turns == 3 else tf.tanh(x)
                loss += tf.reduce_sum(self.model(x[None]))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.log.append(round(float(loss), 4))
        return loss


class DeviceLoop(RawTape):
    options: ClassVar[dict] = {"jit_compile": False, "control_flow": True}
    calls = 4

    def step(self, x):
        w, count = self.variables
        total, i = tf.reduce_sum(x), tf.constant(0)
        while total < 1000.0:
            total = total * 1.1 + 1.0
            i = i + 1
        count.assign_add(total)
        if tf.reduce_sum(w) > 6.0:
            y = w * 2.0
        else:
            y = w - 1.0
        w.assign_add(x)
        return i, y


class LoopUnasked(DeviceLoop):
    options: ClassVar[dict] = {"jit_compile": False}
    calls = 6


class ListGrowth(RawTape):
    def step(self, x):
        kept = []
        for i in range(4):
            kept.append(x * float(i))
            self.log.append(len(kept))
        self.variables[0].assign_add(tf.add_n(kept))
        return tf.stack(kept), kept


class Threads(RawTape):
    def step(self, x):
        w, count = self.variables
        count.assign_add(1.0)
        w.assign_add(x)

        def other():
            self.log.append(w.numpy().tolist())
            count.assign_add(100.0)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        w.assign_add(x)
        return w + count


class GraphFunction(RawTape):
    def make(self):
        super().make()
        w = self.variables[0]

        @tf.function
        def inner(x):
            w.assign_add(x)
            return w * 2.0

        inner(tf.zeros([3]))
        self.inner = inner

    def step(self, x):
        y = tf.tanh(x) + 1.0
        z = self.inner(y)
        self.variables[1].assign_add(tf.reduce_sum(z))
        return z + y


class UsersError(RawTape):
    def step(self, x):
        w, count = self.variables
        count.assign_add(1.0)
        w.assign_add(x)
        if len(self.log) % 2:
            self.log.append("raise")
            raise ValueError("the program's own")
        self.log.append("pass")
        return w * count


class Generators(RawTape):
    def step(self, x):
        def parts():
            for i in range(3):
                self.variables[1].assign_add(1.0)
                self.log.append(i)
                yield x * float(i)

        return list(itertools.accumulate(parts()))


class PythonCallback(RawTape):
    def step(self, x):
        def callback(y):
            self.log.append(np.round(y, 3).tolist())
            return y + 1.0

        y = tf.numpy_function(callback, [x * 2.0], tf.float32)
        self.variables[0].assign_add(tf.ensure_shape(y, [3]))
        return y * 2.0


class Shapes(RawTape):
    calls = 6

    def call(self, step, number):
        return step(tf.ones([2 + number % 3]) * float(number))

    def step(self, x):
        self.variables[1].assign_add(tf.reduce_sum(x))
        return tf.concat([x, x * 2.0], 0)[1:]


class Escapes(RawTape):
    """Tensors and tapes that outlive their call."""

    def begin(self):
        super().begin()
        self.kept = None

    def step(self, x):
        w = self.variables[0]
        if self.kept is not None:
            tape, y, before = self.kept
            self.log.append(tape.gradient(y, w).numpy().tolist())
            x = x + before
        with tf.GradientTape() as tape:
            y = w * x
        self.kept = tape, y, tf.tanh(x)
        w.assign_add(x * 0.1)
        return {"y": y}


PROGRAMS = [
    Keras, KerasAdam, RawTape, Tries, Assertions, MakesVariables, Draws, Dropout, Reads, Branches, NestedTapes,
    Jacobian, KerasMetric, CustomLayer, DeviceLoop, LoopUnasked, ListGrowth,
    Threads, Turns, GraphFunction, UsersError, Generators, PythonCallback,
    Shapes, Escapes,
]  # fmt: skip
