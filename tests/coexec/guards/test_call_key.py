"""Patterns: a library call that came before is recognised by its arguments, and no other one is."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import coexec
from coexec.memoize.call_keys import CallKeys
from coexec.memoize.call_site import CallSites
from tests.coexec import run_both
from tests.snapshots import assert_same, snapshot

X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")


@pytest.fixture
def looked_up(monkeypatch):
    """The library calls whose key was made, by name."""
    calls, make = [], CallKeys.of

    def key(self, function, *given):
        calls.append(function.__qualname__)
        return make(self, function, *given)

    monkeypatch.setattr(CallKeys, "of", key)
    return calls


@pytest.fixture
def jumps(monkeypatch):
    """The library calls that were followed as one, their Python not run, by name."""
    calls, jump = [], CallSites._jump

    def jumped(self, region, function, *given):
        calls.append(function.__qualname__)
        return jump(self, region, function, *given)

    monkeypatch.setattr(CallSites, "_jump", jumped)
    return calls


def seeded(make):
    """The same weights, eagerly and decorated."""

    def made(decorate):
        keras.utils.set_random_seed(0)
        return make(decorate)

    return made


def test_a_training_step_makes_no_key(looked_up):
    """Layers, losses, metrics, the optimizer and the gradient are recognised."""

    def make(decorate):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(5, "relu"), layers.Dense(2)])
        optimizer, loss, metric = keras.optimizers.Adam(0.1), keras.losses.MeanSquaredError(), keras.metrics.Mean()

        @decorate
        def step(x, y):
            with tf.GradientTape() as tape:
                error = loss(y, model(x, training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(error, variables), variables, strict=True))
            metric.update_state(error)
            return error, metric.result()

        return step

    calls = [(tf.constant(X * n), tf.constant(X[:, :2])) for n in range(9)]
    fn = run_both(seeded(make), calls)
    regions = fn.stats().regions
    looked_up.clear()
    fn(*calls[0])
    assert fn.stats().regions == regions + 6, fn.explain()
    assert not looked_up


# What comes for the layer `double`, which adds up what it is given, call after call.
ONE, TWO, THREE = (tf.constant(X * n) for n in (1.0, 2.0, 3.0))
GIVEN = {
    "the same twice": [[ONE, TWO], [TWO, ONE], [ONE, ONE], [ONE, TWO], [TWO, TWO]],
    "twice, then two": [[ONE, ONE], [TWO, TWO], [ONE, TWO], [TWO, ONE], [ONE, ONE]],
    "one more": [[ONE, TWO], [ONE, TWO, THREE], [ONE, TWO], [THREE, THREE, THREE]],
    "a tuple": [[ONE, TWO], (ONE, TWO), [TWO, ONE], (TWO, TWO)],
    "another shape": [[ONE, TWO], [ONE[:2], TWO[:2]], [ONE, TWO], [ONE[:1], TWO]],
    "another dtype": [[ONE, TWO], [tf.cast(ONE, tf.float16), TWO], [ONE, TWO]],
    "arrays": [[ONE, TWO], [X, X], [ONE, TWO], [X, TWO]],
    "a dict": [{"a": ONE, "b": TWO}, {"b": ONE, "a": TWO}, {"a": ONE, "c": TWO}, [ONE, TWO]],
}


@pytest.mark.parametrize("name", GIVEN)
def test_other_arguments_are_others(name):
    """What looks alike and is not: each is what eager makes of it, wherever it comes among the calls."""

    def make(decorate):
        layer = layers.Add()
        flat = layers.Lambda(keras.tree.flatten)

        @decorate
        def step(given, scale):
            return layer(list(flat(given))) * scale, layer([ONE * 2.0, TWO + 1.0])

        return step

    calls = [(given, scale) for _ in range(4) for given in GIVEN[name] for scale in (1.0, 2.0)]
    fn = run_both(make, calls)
    assert fn.stats().regions > 20


@pytest.mark.parametrize("values", [(True, False), (True, 1), (0.0, -0.0), (1, 1.0), (None, False), ("a", "b")])
def test_other_numbers_are_others(values):
    """Python values that are equal, or look so, are told apart; so is one that is there from one that is not."""

    class Told(layers.Layer):
        def call(self, x, how=None, training=None):
            kind = {bool: 1.0, int: 2.0, float: 3.0, str: 4.0}.get(type(how), 5.0)
            sign = np.copysign(1.0, how) if isinstance(how, float) else 1.0
            return x * kind * sign + float(str(how) == "b") + float(bool(training))

    def make(decorate):
        layer, drop = Told(), layers.Dropout(0.5, seed=1)

        @decorate
        def step(how, given):
            x = tf.constant(X)
            y = layer(x, how=how) if given else layer(x)
            return y, drop(x, training=how is values[0])

        return step

    calls = [(values[n % 2], n % 3 > 0) for n in range(30)]
    run_both(seeded(make), calls)


def test_tensors_of_before_are_others():
    """A tensor that a call before has made, or that was read meanwhile, or that Keras has marked, is looked up anew."""

    def make(decorate):
        dense, add, masking = layers.Dense(3), layers.Add(), layers.Masking()
        kept = []

        @decorate
        def step(x, how):
            y = dense(x)
            if how == 1:
                float(y[0, 0])
            if how == 2 and kept:
                y = kept[-1]
            if how == 3:
                y = masking(y[:, None])[:, 0]
            kept.append(y)
            return add([y, x]), add([y, y])

        return step

    ways = [0, 0, 0, 0, 1, 0, 2, 0, 3, 1, 2, 3, 0, 0, 1, 1, 2, 2, 3, 3]
    run_both(seeded(make), [(tf.constant(X), how) for how in ways])


def test_tensors_may_hold_each_other(jumps):
    """Attributes of tensors that lead back to them: such a call is run as it is."""

    def make(decorate):
        act = layers.LeakyReLU()

        @decorate
        def step(x, turned):
            y = act(x)
            z = y * 2.0
            if turned:
                y.after, z.before, x.own = z, [y], {"x": x}
            return act(y), act(z), act(x)

        return step

    run_both(make, [(tf.constant(X), n % 3 > 0) for n in range(20)])
    assert len(jumps) > 10  # of the 21 calls on other tensors


def test_scopes_are_looked_at():
    """The same call under another policy, in a tape, or in an outer layer is another."""

    class Outer(layers.Layer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x, training=None):
            return self.inner(x) + 1.0

    def make(decorate):
        drop = layers.Dropout(0.5, seed=3)
        norm = layers.BatchNormalization()
        outer, other = Outer(norm), Outer(drop)

        @decorate
        def step(x, how):
            if how == 0:
                return norm(x), drop(x)
            if how == 1:
                return outer(x, training=True), other(x, training=True)
            if how == 2:
                return outer(x), other(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = norm(x, training=True)
            return y, tape.gradient(y, x)

        return step

    ways = [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5 + [0, 1, 2, 3] * 3
    run_both(seeded(make), [(tf.constant(X), how) for how in ways])


def test_objects_that_are_gone_are_not_taken_for_others():
    """A layer that ends, and another one in its place in memory: never the one for the other."""

    def run(decorate):
        found = []

        @decorate
        def step(layer, x):
            return layer(x)

        for n in range(12):
            keras.utils.set_random_seed(n)
            layer = layers.Dense(2, kernel_initializer=keras.initializers.RandomNormal(seed=n))
            found += [step(layer, tf.constant(X)).numpy() for _ in range(4)]
            del layer
            gc.collect()
        return found

    assert_same(snapshot(run(lambda f: f)), snapshot(run(coexec.function)))


def test_what_is_written_to_is_learnt_anew(looked_up):
    """An attribute of a layer changes: the pattern is the same, and the layer is run."""

    def make(decorate):
        layer, drop = layers.LeakyReLU(0.25), layers.Rescaling(2.0)

        @decorate
        def step(x, slope):
            layer.negative_slope, drop.scale = slope, slope
            return drop(layer(x))

        return step

    slopes = [0.5] * 6 + [0.75] * 6 + [0.5, 0.75] * 4
    run_both(make, [(tf.constant(X), slope) for slope in slopes])


# What a step may do otherwise from one call to the next, for the same operations: two ways each.
GRADIENTS = {
    "which tensor is watched": lambda m, x, y, odd: m.gradient(x, y, watched=(x, y)[odd]),
    "watched or not": lambda m, x, y, odd: m.gradient(x, y, watched=(None, x)[odd]),
    "the order of the sources": lambda m, x, y, odd: m.gradient(x, y, turned=odd),
    "one source twice": lambda m, x, y, odd: m.gradient(x, y, sources=[m.one.kernel, (m.two, m.one)[odd].kernel]),
    "the same tensor twice": lambda m, x, y, odd: m.gradient(x, (y, x)[odd], watched=x),
    "the order of the layers": lambda m, x, y, odd: m.gradient(*((x, y), (y, x))[odd], watched=x),
    "another layer": lambda m, x, y, odd: m.gradient(x, y, last=(m.two, m.one)[odd]),
    "not recorded": lambda m, x, y, odd: m.gradient(x, y, paused=odd),
    "variables by themselves": lambda m, x, y, odd: m.gradient(x, y, scale=(m.scale, m.shift)[odd]),
    "what is not connected": lambda m, x, y, odd: m.gradient(x, y, sources=[m.shift], none=("none", "zero")[odd]),
    "gradients of the outputs": lambda m, x, y, odd: m.gradient(x, y, upstream=(None, 2.0)[odd]),
    "a tape that lasts": lambda m, x, y, odd: m.gradient(x, y, persistent=odd),
    "variables that are not watched": lambda m, x, y, odd: m.gradient(x, y, watched=x, variables=not odd),
    "a constant": lambda m, x, y, odd: m.gradient(x, tf.constant(X * (1.0, 2.0)[odd]), watched=x),
    "an outer tape": lambda m, x, y, odd: m.outer(x, y, odd),
}


KEYED = {"variables by themselves", "gradients of the outputs", "a constant", "an outer tape"}  # now or always


class Model:
    """Two layers, two variables, and a gradient that is asked for in many ways."""

    def __init__(self):
        self.one, self.two = layers.Dense(3, "tanh"), layers.Dense(3)
        self.one.build((4, 3))
        self.two.build((4, 3))
        self.scale, self.shift = tf.Variable(1.5), tf.Variable(0.5)

    def gradient(
        self, x, y, watched=None, turned=False, sources=None, last=None, paused=False, scale=None, none="none",
        upstream=None, persistent=False, variables=True,
    ):  # fmt: skip
        with tf.GradientTape(persistent=bool(persistent), watch_accessed_variables=variables) as tape:
            if watched is not None:
                tape.watch(watched)
            if paused:
                with tape.stop_recording():
                    z = self.one(x)
            else:
                z = self.one(x)
            z = (last or self.two)(z) + self.one(y)
            if scale is not None:
                z = z * scale
            loss = tf.reduce_sum(z)
        if sources is None:
            sources = [self.one.kernel, self.two.bias, x, y]
        sources = sources[::-1] if turned else sources
        upstream = None if upstream is None else tf.constant(upstream)
        return tape.gradient(loss, sources, upstream, unconnected_gradients=none)

    def outer(self, x, y, odd):
        with tf.GradientTape() as tape:
            tape.watch((x, y)[odd])
            first = self.gradient(x, y, watched=x)[2]
        return first, tape.gradient(first, [x, y, self.one.kernel])


@pytest.mark.parametrize("name", GRADIENTS)
def test_other_gradients_are_others(name, jumps, looked_up):
    """A gradient that a tape with other records, or in another state, is asked for is what eager makes of it."""

    def make(decorate):
        model = Model()

        @decorate
        def step(x, y, odd):
            return GRADIENTS[name](model, x, y, odd)

        return step

    ways = [False] * 12 + [True, False] * 4 + [True] * 12 + [False, False, True, True] * 3
    calls = [(tf.constant(X * (1 + n % 3)), tf.constant(X + 1.0), odd) for n, odd in enumerate(ways)]
    run_both(seeded(make), calls)
    assert jumps.count("GradientTape.gradient") > 30
    assert (looked_up.count("GradientTape.gradient") < 20) is (name not in KEYED)


def test_what_was_recorded_before_a_tensor_is_watched_is_not_watched(jumps):
    """A tensor or variable that is watched before, between or behind the layers that take it."""

    def make(decorate):
        act, dense = layers.LeakyReLU(0.25), layers.Dense(3)
        dense.build((4, 3))

        @decorate
        def step(x, when):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                y = tf.zeros((4, 3))
                for n in range(4):
                    if n == when:
                        tape.watch([x, dense.kernel.value])
                    y = y + (dense(x) if n else act(x))
            return tape.gradient(y, [x, dense.kernel, dense.bias])

        return step

    whens = [3] * 9 + [0] * 9 + [3, 1, 0, 4, 2] * 4
    fn = run_both(seeded(make), [(tf.constant(X * (1 + n % 3)), when) for n, when in enumerate(whens)])
    assert fn.stats().regions > 100, fn.explain()
    assert jumps.count("GradientTape.gradient") > 15


HELD = tf.constant(X * 2.0)


class Holding(layers.Layer):
    """A layer with a tensor of its own, which the program has, too."""

    def call(self, x):
        return tf.tanh(x) * HELD + x


@coexec.pure
def holding(x):
    """A function that shares a tensor with the program."""
    return tf.tanh(x) * HELD + x


def normalizing():
    """Keras' own: its mean is a tensor."""
    layer = layers.Normalization(mean=X[0], variance=np.abs(X[1]) + 1.0)
    layer.build((4, 3))
    return layer


HOLDING = {
    "a layer": lambda: (Holding(), HELD),
    "a function": lambda: (holding, HELD),
    "Keras": lambda: (layer := normalizing(), layer.mean),
}


@pytest.mark.parametrize("name", HOLDING)
@pytest.mark.parametrize("own", [True, False])
def test_what_is_held_may_be_given(name, own, jumps):
    """A call that holds a tensor is given that, first or later, or it is watched beside: other tensors are others."""

    def make(decorate):
        call, held = HOLDING[name]()
        other = held * 1.5

        @decorate
        def step(x, how):
            given = held if how else other
            with tf.GradientTape() as tape:
                tape.watch(given)
                y = tf.reduce_sum(call(x)) + tf.reduce_sum(given * 3.0)
            return call(given), y, tape.gradient(y, given)

        @decorate
        def alone(how):
            x = held if how else other
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(x)
            return y, tape.gradient(y, x)

        def both(x, how):
            return step(x, how), alone(how)

        both.stats = getattr(step, "stats", None)
        return both

    ways = [own] * 8 + [not own] * 12 + [own, not own] * 4 + [own] * 8
    fn = run_both(seeded(make), [(tf.constant(X * (1 + n % 3)), how) for n, how in enumerate(ways)])
    assert fn.stats().regions > 30
    assert jumps.count("GradientTape.gradient") > 40


def test_data_made_in_the_call_is_recognised(looked_up, jumps):
    """A layer on tensors made of arrays, which are constants as far as shapes go, takes no key."""

    def make(decorate):
        layer, dense = layers.Add(), layers.Dense(2)

        @decorate
        def step(first, second, how):
            x = tf.constant(first)
            y = x if how == 1 else tf.constant(second)
            if how == 2:
                y = tf.convert_to_tensor(y) * 1.0
            return layer([x, y]), layer([y, x]), dense(x), dense(y)

        return step

    ways = [0] * 9 + [1, 0, 2, 0, 1, 2] * 4 + [0, 0, 1, 1, 2, 2] * 2
    calls = [(X * n, X * (n if n % 4 == 3 else 2.0), how) for n, how in enumerate(ways)]
    fn = run_both(seeded(make), calls)
    fn(*calls[0])
    looked_up.clear()
    jumps.clear()
    fn(*calls[1])
    assert len(jumps) == 4
    assert not looked_up


def test_dtypes_of_numpys_are_told_apart():
    """They are values, as those of TensorFlow's are."""

    def make(decorate):
        @decorate
        def step(x, dtype):
            return tf.ones_like(x, dtype) + tf.cast(tf.clip_by_norm(x, 1.0), dtype), tf.ones([3], dtype) * 2

        return step

    kinds = [np.dtype("float64"), np.dtype("float32"), np.dtype(">f8").newbyteorder("="), tf.float64]
    calls = [(tf.constant(X * n), kind) for n in range(4) for kind in kinds for _ in range(2)]
    fn = run_both(make, calls)
    assert "DType" not in fn.explain()
    assert fn.stats().regions > len(calls), fn.explain()  # not `clip_by_norm` alone
