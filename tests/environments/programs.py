"""Three small programs, each eagerly and co-executed in turns: results, state, effects in Python and counts."""

import numpy as np

CALLS = 8


class Differs(Exception):
    """Co-executed, a program does something else. (No assertion: those are left out by `python -O`.)"""


def keras_mlp(decorate):
    """A training step of Keras' layers, loss and optimizer."""
    import keras
    import tensorflow as tf

    weights = keras.initializers.GlorotUniform(seed=1)  # not of Keras' generator, which all threads share
    layers = [keras.layers.Dense(n, activation="relu", kernel_initializer=weights) for n in (4, 1)]
    model = keras.Sequential(layers)
    model.build((4, 3))
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step, lambda: [v.numpy() for v in model.variables + optimizer.variables]


def raw_tape(decorate):
    """A step of plain operations and a tape."""
    import tensorflow as tf

    weights = tf.Variable(tf.reshape(tf.range(12.0), [3, 4]) / 12.0)
    bias = tf.Variable(tf.zeros([4]))

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.tanh(x @ weights + bias)
            loss = tf.reduce_sum(y * y)
        for variable, gradient in zip((weights, bias), tape.gradient(loss, [weights, bias]), strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss, y[0]

    return step, lambda: [weights.numpy(), bias.numpy()]


def python_effects(decorate):
    """A step that reads values, branches on them, and changes Python objects."""
    import tensorflow as tf

    total = tf.Variable(0.0)
    log, counts = [], {"large": 0, "small": 0}

    def noted(value):
        log.append(round(value, 4))
        return value

    @decorate
    def step(x):
        score = tf.reduce_sum(tf.sin(x)) + total
        if noted(float(score)) > 0.0:
            counts["large"] += 1
            total.assign_sub(0.5)
        else:
            counts["small"] += 1
            total.assign_add(0.25)
        try:
            tf.gather(x, [7])
        except tf.errors.InvalidArgumentError:
            log.append("refused")
        return {"score": score * 2.0, "steps": len(log)}

    return step, lambda: [total.numpy(), list(log), dict(counts)]


PROGRAMS = {each.__name__: each for each in (keras_mlp, raw_tape, python_effects)}


class Run:
    """A program eagerly and co-executed, call by call."""

    def __init__(self, name):
        import coexec

        self.name = name
        self.eager, self.eager_state = PROGRAMS[name](lambda function: function)
        self.step, self.state = PROGRAMS[name](coexec.function)
        self.calls = 0

    def call(self):
        """Makes one call each way."""
        import tensorflow as tf

        x = tf.reshape(tf.range(12.0), [4, 3]) / 10.0 - 0.1 * (self.calls % 3)
        self.calls += 1
        same(self.eager(x), self.step(x), f"{self.name}, call {self.calls}")
        same(self.eager_state(), self.state(), f"{self.name}, state behind call {self.calls}")

    def step_alone(self):
        """Makes one call of what is co-executed only: from here on the two are apart."""
        import tensorflow as tf

        self.step(tf.ones([4, 3]))

    def finish(self, plainly=False):
        """Checks that calls were followed, or ran plainly."""
        stats = self.step.stats()
        if stats.calls != self.calls:
            raise Differs(f"{self.name}: {stats.calls} calls of {self.calls}")
        if plainly and stats.imperative != stats.calls:
            raise Differs(f"{self.name}: {stats.imperative} calls of {stats.calls} ran plainly")
        if not plainly and (stats.followed < self.calls // 2 or not stats.launches):
            raise Differs(f"{self.name}: {stats}\n{self.step.explain()}")


def same(expected, found, where):
    """Fails where the two differ by more than rounding."""
    import tensorflow as tf

    if isinstance(expected, dict):
        same(list(expected.items()), list(found.items()), where)
    elif isinstance(expected, (list, tuple)):
        if type(expected) is not type(found) or len(expected) != len(found):
            raise Differs(f"{where}: {found} for {expected}")
        for one, other in zip(expected, found, strict=True):
            same(one, other, where)
    elif isinstance(expected, (tf.Tensor, np.ndarray, np.generic, float)):
        if np.asarray(expected).dtype != np.asarray(found).dtype or not np.allclose(expected, found, 1e-4, 1e-4):
            raise Differs(f"{where}: {found} for {expected}")
    elif expected != found:
        raise Differs(f"{where}: {found!r} for {expected!r}")


def check(names=tuple(PROGRAMS), calls=CALLS, plainly=False):
    """Runs programs both ways, and fails where they differ."""
    for name in names:
        run = Run(name)
        for _ in range(calls):
            run.call()
        run.finish(plainly)
