"""Joins: where calls come to the same operations by ever other ways, these are learnt once, behind a cut."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec.testing import always_follow, compile_everything
from tests.coexec import run_both
from tracer.check import check

RNG = np.random.default_rng(8)
ROWS = [tf.constant(RNG.normal(size=[4, 3]).astype(np.float32)) for _ in range(5)]
CALLS = [(ROWS[n % 5],) for n in range(60)]


@pytest.fixture(autouse=True)
def followed():
    """Every call is followed, and every segment launched, however small."""
    with always_follow(), compile_everything():
        yield


def pool(decorate):
    """A GAN's pool: each row is a new one or one of an earlier call, which takes its place there."""
    weight, kept, dice = tf.Variable([1.0, -2.0, 0.5]), [], random.Random(3)

    def mixed(rows):
        for row in tf.unstack(rows):
            if len(kept) < 6:
                kept.append(row)
                yield row
            elif dice.random() < 0.5:
                place = dice.randrange(6)
                old, kept[place] = kept[place], row
                yield old
            else:
                yield row

    @decorate
    def step(rows):
        some = tf.stack(list(mixed(tf.tanh(rows * weight))))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(some**2 * weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return float(loss), some

    return step


def choices(decorate):
    """Six choices between two, in each call anew, and between an assignment and none."""
    weight, written, dice = tf.Variable([1.0, -2.0, 0.5]), tf.Variable(0.0), random.Random(5)

    @decorate
    def step(rows):
        with tf.GradientTape() as tape:
            h = rows
            for _ in range(6):
                if dice.random() < 0.5:
                    h = tf.tanh(h * weight) + 1.0
                else:
                    written.assign_add(tf.reduce_sum(h))
                    h = tf.sin(h - weight)
                h = h / (1.0 + tf.abs(h))
            loss = tf.reduce_sum(h**2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss, h, float(written)

    return step


def drawn(decorate):
    """Random operations at a join."""
    dice = random.Random(1)

    @decorate
    def step(rows):
        h = rows
        for _ in range(4):
            h = tf.nn.relu(h) if dice.random() < 0.5 else tf.abs(h) * 2.0
            h = h + tf.random.normal([4, 3]) * tf.random.uniform([], 1, 3)
        return h

    def seeded(rows):
        tf.random.set_seed(len(seen))
        seen.append(rows)
        return step(rows)

    seen = []
    seeded.stats = getattr(step, "stats", None)
    seeded.trace_graph = getattr(step, "trace_graph", None)
    return seeded


def layers(decorate):
    """Library calls behind choices: they are memoized once, and not for each way."""
    keras.utils.set_random_seed(4)
    hidden, out = [keras.layers.Dense(3, activation="tanh") for _ in range(4)], keras.layers.Dense(2)
    optimizer, dice = keras.optimizers.Adam(0.01), random.Random(2)
    for layer in [*hidden, out]:
        layer.build([None, 3])
    weights = [w for layer in [*hidden, out] for w in layer.trainable_variables]
    optimizer.build(weights)

    @decorate
    def step(rows):
        with tf.GradientTape() as tape:
            h = rows
            for layer in hidden:
                h = layer(h if dice.random() < 0.5 else tf.sin(h))
            loss = tf.reduce_mean(out(h) ** 2)
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return step


def kept_by_others(decorate):
    """Tensors from before a join are read after it, by a persistent tape, a list and a later call."""
    weight, log, dice = tf.Variable([1.0, -2.0, 0.5]), [], random.Random(7)

    @decorate
    def step(rows):
        with tf.GradientTape(persistent=True) as tape:
            a = rows * weight
            tape.watch(rows)
            for _ in range(3):
                log.append(a)
                a = tf.exp(-a) if dice.random() < 0.5 else a * a
            b = tf.concat([a, log[dice.randrange(len(log))]], 0)
            loss = tf.reduce_sum(b)
        found = tape.gradient(loss, [weight, rows]), tape.gradient(b, a), tape.gradient(a, weight)
        return loss, found, [float(tf.reduce_sum(v)) for v in log[-3:]]

    return step


@pytest.mark.parametrize("make", [pool, choices, drawn, layers, kept_by_others])
def test_equals_eager(make):
    step = run_both(make, CALLS)
    check(step.trace_graph)
    assert step.stats().followed > len(CALLS) - 12


def test_wiring_of_its_own_in_each_call_is_learnt_once():
    step = run_both(pool, CALLS)
    before = step.stats()
    assert before.compiles <= 6
    for rows, in CALLS[:20]:
        step(rows)
    after = step.stats()
    assert after.compiles == before.compiles
    assert after.launches - before.launches <= 2 * 20 + 3
    assert "ever other ways" in str(step.explain())


def test_independent_choices_are_learnt_one_by_one():
    step = run_both(choices, CALLS * 2)
    # There are 64 combinations, whose segments have 30 operations and their gradients.
    assert step.stats().compiles < 64
    counted = sum(1 for node in step.trace_graph.nodes if node.after is not None)
    assert counted < 64


def test_library_calls_behind_choices_are_skipped():
    step = run_both(layers, CALLS)
    before = step.stats()
    assert before.regions > 0
    for rows, in CALLS[:20]:
        step(rows)
    assert step.stats().regions - before.regions >= 20 * 5


def test_sizes_are_no_ways():
    calls = [(tf.ones([n, 3]) * k,) for k, n in enumerate([4, 6, 8, 4, 6, 8, 4, 6, 8, 4, 6, 8] * 2)]

    def make(decorate):
        weight = tf.Variable([1.0, -2.0, 0.5])

        @decorate
        def step(rows):
            h = weight * 2.0
            h = tf.tanh(rows * h)
            weight.assign_sub(tf.reduce_mean(h, 0))
            return h

        return step

    step = run_both(make, calls)
    assert "ever other ways" not in str(step.explain())


def test_a_failure_before_a_join_is_the_programs():
    def make(decorate):
        dice, written = random.Random(3), tf.Variable(0.0)

        @decorate
        def step(rows, limit):
            h = rows
            try:
                for _ in range(4):
                    written.assign_add(1.0)
                    h = h * 2.0 if dice.random() < 0.5 else tf.exp(h)
                    h = tf.debugging.check_numerics(h, "too large") if limit else h
                    h = h + 1.0
            except tf.errors.InvalidArgumentError as error:
                return str(error.message), float(written)
            return h, float(written)

        return step

    large = tf.constant([[1.0, 2.0, 60.0]])
    run_both(make, [(large if n % 3 == 2 else ROWS[0][:1], True) for n in range(40)])


def test_a_choice_within_a_layer():
    @keras.saving.register_keras_serializable("tests")
    class Chooses(keras.layers.Layer):
        def __init__(self, dice):
            super().__init__()
            self.dice, self.dense = dice, keras.layers.Dense(3)

        def call(self, x):
            for _ in range(3):
                x = tf.sin(x) if self.dice.random() < 0.5 else x * 2.0
                x = x / (1.0 + tf.abs(x))
            return self.dense(x)

    def make(decorate):
        keras.utils.set_random_seed(3)
        layer = Chooses(random.Random(4))

        @decorate
        def step(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(rows) ** 2)
            gradients = tape.gradient(loss, layer.trainable_variables)
            for variable, gradient in zip(layer.trainable_variables, gradients, strict=True):
                variable.assign_sub(0.01 * gradient)
            return loss, gradients

        return step

    run_both(make, CALLS)
