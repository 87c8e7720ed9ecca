"""What learning costs: calls that bring nothing are not observed again and again."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.base.tuning import tuning
from coexec.memoize import entry
from coexec.memoize.observe import Observation
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
    """A few runs in a row, and then two at ever doubling distances, where each call was."""
    assert run_training(40) > 60
    observed.clear()
    monkeypatch.setattr(entry, "_same", lambda one, other: False)
    assert run_training(40) == 0
    assert tuning.region_disagreements < observed[layer_call] <= 12
    assert tuning.region_disagreements < observed[gradient] <= 16


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
