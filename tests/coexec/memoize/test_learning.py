"""What learning costs: calls that bring nothing are not observed again and again."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.layers.core import dense as dense_module

import coexec
from coexec.base.tuning import tuned, tuning
from coexec.memoize import entry
from coexec.memoize.observe import Observation
from tests.coexec import run_both
from tracer.library import gradient, layer_call

X = tf.constant([[0.5, -1.0, 2.0]])


@pytest.fixture
def observed(monkeypatch):
    """How often calls of each function were observed."""
    counts = collections.Counter()
    original = Observation.call

    def call(self, kwargs, tell):
        counts[self._region.function] += 1
        return original(self, kwargs, tell)

    monkeypatch.setattr(Observation, "call", call)
    return counts


def run_training(calls):
    def make():
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(2)
        dense.build((None, 3))

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(dense(x) ** 2)
            return tape.gradient(loss, dense.trainable_variables)

        return step

    plain, step = make(), coexec.function(make())
    for n in range(calls):
        for one, other in zip(plain(X + float(n)), step(X + float(n)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert step.stats().followed >= calls - 4, step.explain()
    return step.stats().regions


def test_runs_that_keep_disagreeing_are_observed_ever_less(observed, monkeypatch):
    """A few runs in a row, and then two at ever doubling distances, where each call was; gradients need but one run."""
    assert run_training(40) > 60
    observed.clear()
    monkeypatch.setattr(entry, "_same", lambda one, other: False)
    assert 20 < run_training(40) < 40
    assert tuning.region_disagreements < observed[layer_call] <= 12
    assert observed[gradient] <= 8  # as there are records of the layer's operations, or of the layer


def walk(model):
    """Some operations, and then a call: with another number of them it is a call at a place that is new."""

    def step(x, turns):
        for _ in range(turns):
            x = tf.tanh(x + 0.25)
        return model(x)

    return step


def test_on_ever_new_paths_calls_are_learnt_when_they_come_again(observed):
    """Behind the first calls of a function, which are like each other most often, one call that is new says little."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    plain, step = walk(model), coexec.function(walk(model))
    turns = [2, *range(3, 30)]
    for n in turns:
        np.testing.assert_allclose(step(X, n), plain(X, n), rtol=1e-6)
    assert sum(observed.values()) <= tuning.calls_learnt_at_once
    for _ in range(6):
        before = step.stats().regions
        np.testing.assert_allclose(step(X, 29), plain(X, 29), rtol=1e-6)
    assert step.stats().regions > before, step.explain()
    assert sum(observed.values()) <= tuning.calls_learnt_at_once + 2


class Lost(keras.layers.Layer):
    """A layer of which no call can be memoized."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        self.log.append(len(self.log))
        return self.dense(x)


def test_a_lost_call_is_not_observed_on_each_new_path(monkeypatch):
    """Each path has a place of its own for it."""
    observed = []
    original = Observation.call
    monkeypatch.setattr(
        Observation, "call", lambda self, *given: observed.append(self._args[0]) or original(self, *given)
    )
    model = Lost()
    model(X)
    plain, step = walk(model), coexec.function(walk(model))
    for n in [2, *range(2, 14)] * 2:  # a path is learnt at its second call
        np.testing.assert_allclose(step(X, n), plain(X, n), rtol=1e-6)
    assert len(model.log) - 2 == 2 * 2 * 13, "with two of the build"
    assert 2 <= len([v for v in observed if v is model]) <= 6
    assert step.stats().followed >= 12, step.explain()


def test_an_observation_ends_where_the_call_is_cut(observed):
    """What comes behind it in the same call is learnt at once."""

    class Reading(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.before, self.behind = keras.layers.Dense(4), keras.layers.Dense(4)

        def call(self, x):
            y = self.before(x)
            assert float(tf.reduce_max(y)) < 1e9
            return self.behind(y)

    model = Reading()
    model(X)
    plain, step = walk(model), coexec.function(walk(model))
    for n in range(3):
        np.testing.assert_allclose(step(X + float(n), 2), plain(X + float(n), 2), rtol=1e-6)
    assert observed[layer_call] >= 3, "the outer layer, and in the same call the one behind the cut"
    for n in range(8):
        np.testing.assert_allclose(step(X + float(n), 2), plain(X + float(n), 2), rtol=1e-6)
    assert step.stats().regions >= 8, step.explain()


@pytest.fixture
def runs(monkeypatch):
    """The observed runs of each function, in order: whether they were light."""
    found = collections.defaultdict(list)
    original = Observation._known_code

    def known_code(self, kwargs, around):
        reads = original(self, kwargs, around)
        found[self._region.function].append(reads is not None)
        return reads

    monkeypatch.setattr(Observation, "_known_code", known_code)
    return found


def test_a_second_run_need_not_be_seen_in_full(runs):
    """It runs the code of the first, as long as the guards of the first hold. The first rerun is like it."""
    with tuned(region_first_check=4, recorded_runs_kept=0):
        assert run_training(60) > 80
    assert runs[layer_call][:3] == [False, True, True]
    assert False in runs[layer_call][3:]  # later reruns see everything again


def test_a_gradient_waits_for_the_calls_on_its_tape(runs):
    """In the call in which they are learnt its key is another than in later ones."""
    assert run_training(8) > 6
    assert runs[gradient] == [False]  # one run tells enough


def replace(what, patch, dense, heard):
    """Replaces some code that the layer runs by code that is heard."""

    def louder(original):
        return lambda *args, **kwargs: (heard.append(1), original(*args, **kwargs))[1]

    if what == "class":
        patch.setattr(keras.layers.Dense, "call", louder(keras.layers.Dense.call))
    elif what == "instance":
        dense.activation = louder(dense.activation)
    elif what == "module":
        patch.setattr(dense_module, "ops", Spy(dense_module.ops, heard))
    else:
        patch.setattr(dense_module.ops, "matmul", louder(dense_module.ops.matmul))


@pytest.mark.parametrize("moment", range(1, 8))
@pytest.mark.parametrize("what", ["class", "instance", "module", "function of the module"])
def test_code_that_is_replaced_while_a_call_is_learnt_runs_each_time(monkeypatch, moment, what):
    """Whichever call it is replaced before, its effects are those of eager TensorFlow."""

    def run(decorate):
        keras.utils.set_random_seed(1)
        dense, heard, found = keras.layers.Dense(2, activation="relu"), [], []
        dense.build((None, 3))
        step = decorate(lambda x: dense(x))
        with monkeypatch.context() as patch:
            for n in range(12):
                if n == moment:
                    replace(what, patch, dense, heard)
                found.append(step(X + float(n)).numpy())
        return found, heard

    eager, followed = run(lambda f: f), run(coexec.function)
    np.testing.assert_allclose(eager[0], followed[0], rtol=1e-6)
    assert eager[1] == followed[1]
    assert len(eager[1]) >= 12 - moment


class Spy:
    """Stands for a module, and hears what is asked of it."""

    def __init__(self, module, heard):
        self._module, self._heard = module, heard

    def __getattr__(self, name):
        if name == "matmul":
            self._heard.append(1)
        return getattr(self._module, name)


def test_one_iteration_is_seen_for_all(runs):
    """They run the same code, on the same objects and specs; one at another size, or in training, does not."""

    def make():
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(3)
        dense.build((None, 3))
        dense(X)

        def step(x):
            for _ in range(4):
                x = dense(x)
            return x + tf.reduce_sum(dense(tf.concat([x, x], 0))) + dense(x, training=True)

        return step

    plain, step = make(), coexec.function(make())
    with tuned(recorded_runs_kept=0):
        for n in range(8):
            np.testing.assert_allclose(plain(X + float(n)), step(X + float(n)), rtol=1e-6)
    assert runs[layer_call] == [False, True, False, False, True, True]
    assert step.stats().regions >= 6 * 4


@pytest.mark.parametrize("moment", [1, 2, 3, 6])
def test_an_iteration_that_runs_other_code_is_seen(moment):
    """The code is replaced between the iterations of one call."""

    def run(decorate):
        keras.utils.set_random_seed(1)
        dense, heard, calls = keras.layers.Dense(3), [], iter(range(20))
        dense.build((None, 3))
        activation = dense.activation

        def louder(x):
            heard.append(1)
            return activation(x)

        def step(x):
            number = next(calls)
            for turn in range(4):
                if turn == 2 and number == moment:
                    dense.activation = louder
                x = dense(x)
            return x

        step = decorate(step)
        return [step(X + float(n)).numpy() for n in range(10)], heard

    eager, followed = run(lambda f: f), run(coexec.function)
    np.testing.assert_allclose(eager[0], followed[0], rtol=1e-6)
    assert eager[1] == followed[1] != []


def test_a_call_that_recurs_is_learnt_though_what_it_was_given_kept_changing():
    """There is no room for more keys that were seen only once, but for one that comes again there is."""
    keras.utils.set_random_seed(2)
    layer = keras.layers.Dense(3)
    layer.build((None, 2))
    calls = [(tf.constant([[0.5, float(i)]]), i + 1) for i in range(20)] + [(tf.ones([1, 2]), 100)] * 12

    step = run_both(lambda decorate: decorate(lambda x, training: layer(x, training=training) + 1.0), calls)
    before = step.stats().regions
    for _ in range(5):
        step(*calls[-1])
    assert step.stats().regions == before + 5, step.explain()
