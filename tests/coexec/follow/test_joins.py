"""Joins: where calls come to the same operations by ever other ways, these are learnt once, behind a cut."""

import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from coexec.reporting.segments import ends_in
from coexec.testing import always_follow, compile_everything
from tests.coexec import launches_a_call, run_both
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


def views(decorate):
    """Two views of the same rows, each with two choices, by plain operations: sixteen combinations of them."""
    weight, dice = tf.Variable([[1.0, -2.0, 0.5]] * 3), random.Random(4)

    def augmented(rows):
        if dice.random() < 0.5:
            rows = tf.reverse(rows, [1])
        rows = rows + dice.uniform(-0.1, 0.1)
        if dice.random() < 0.4:
            rows = tf.tile(tf.reduce_mean(rows, 1, keepdims=True), [1, 3])
        return tf.minimum(rows, 1.0)

    @decorate
    def step(rows):
        one, other = augmented(rows), augmented(rows)
        with tf.GradientTape() as tape:
            h = tf.concat([one, other], 0)
            for _ in range(8):
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h**2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return float(loss)

    return step


def views_by_layers(decorate):
    """The same, by layers of Keras, which ways meet before: what follows is memoized once."""
    keras.utils.set_random_seed(4)
    noise, dense, dice = keras.layers.Dense(3), keras.layers.Dense(3, activation="tanh"), random.Random(9)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    for layer in (noise, dense):
        layer.build([None, 3])
    weights = [*noise.trainable_variables, *dense.trainable_variables]
    optimizer.build(weights)

    @decorate
    def step(rows):
        with tf.GradientTape() as tape:
            views = []
            for _ in range(2):
                h = tf.sin(rows) if dice.random() < 0.5 else rows
                h = noise(h)
                h = tf.abs(h) * 2.0 if dice.random() < 0.5 else h
                views.append(dense(h))
            loss = tf.reduce_mean((views[0] - views[1]) ** 2) + tf.reduce_mean(views[0] ** 2)
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return step


@pytest.mark.parametrize("make", [views, views_by_layers])
def test_what_follows_choices_is_learnt_once(make):
    step = run_both(make, CALLS[:40])
    check(step.trace_graph)
    stats = step.stats()
    assert stats.diverged <= 5
    assert stats.followed >= 34
    # Each combination on its own would have a segment with all operations, and there are sixteen.
    whole = max(last.depth for last in ends_in(step.trace_graph))
    assert sum(last.depth > 0.8 * whole for last in ends_in(step.trace_graph)) <= 6
    for rows, in CALLS[:20]:
        step(rows)
    after = step.stats()
    assert after.compiles - stats.compiles <= 2
    assert after.followed - stats.followed == 20


def test_one_choice_is_no_reason_to_cut():
    def make(decorate):
        weight, dice = tf.Variable([1.0, -2.0, 0.5]), random.Random(4)

        @decorate
        def step(rows):
            h = tf.exp(-rows) * weight
            if dice.random() < 0.5:
                h = tf.sin(h)
            return tf.reduce_sum(tf.tanh(h) ** 2)

        return step

    step = run_both(make, CALLS[:20])
    assert launches_a_call(step, CALLS[:20]) == 1


def alternating(first):
    """Makes a step of two modes that take turns, each decided at three lines; the first calls have a third choice."""

    def make(decorate):
        weight, calls = tf.Variable([1.0, -2.0, 0.5]), itertools.count()

        @decorate
        def step(rows):
            call = next(calls)
            heads = call % 2 == 0
            with tf.GradientTape() as tape:
                h = rows * weight if heads else rows - weight
                h = tf.tanh(h)
                h = tf.sin(h) if heads else tf.cos(h)
                if call >= first:
                    h = tf.nn.softmax(h) * h
                h = tf.abs(h) + (1.0 if heads else h)
                loss = tf.reduce_sum(h**2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        return step

    return make


@pytest.mark.parametrize("first", [0, 2])
def test_choices_that_go_together_are_no_reason_to_cut(first):
    """There are two ways, however many lines choose: each is one launch, with its gradient."""
    step = run_both(alternating(first), CALLS)
    assert launches_a_call(step, CALLS[:8]) == 1, step.explain()
    assert "ever other ways" not in step.explain()


def test_lengths_of_a_loop_are_no_ways():
    def make(decorate):
        weight = tf.Variable([1.0, -2.0, 0.5])

        @decorate
        def step(rows, times):
            h = rows
            for _ in range(times):
                h = tf.tanh(h * weight)
            for _ in range(times):
                h = tf.sin(h - weight)
            return h

        return step

    step = run_both(make, [(ROWS[0], 2 + n % 2) for n in range(20)])
    assert launches_a_call(step, [(ROWS[0], 2 + n % 2) for n in range(10)]) == 1


class Energy(keras.Model):
    """A model of the program's, whose layers issue their operations in a frame of their own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, activation="tanh")

    def call(self, rows):
        return self.dense(rows)


@pytest.mark.parametrize("made", [lambda: keras.layers.Dense(3, activation="tanh"), Energy], ids=["Keras'", "own"])
def test_the_first_turn_of_a_loop_is_no_choice(made):
    """A layer is called first after one of two beginnings, and then after the turn before, for each item."""

    def make(decorate):
        keras.utils.set_random_seed(5)
        layer, dice = made(), random.Random(4)
        layer(ROWS[0])

        @decorate
        def step(rows):
            h = tf.exp(-rows) if dice.random() < 0.5 else tf.sin(rows)
            for _ in range(4):
                with tf.GradientTape() as tape:
                    tape.watch(h)
                    energy = tf.reduce_sum(layer(h))
                h = h - 0.1 * tape.gradient(energy, h)
            return [tf.clip_by_norm(row, 0.5) for row in tf.unstack(h)]

        return step

    step = run_both(make, CALLS)
    assert launches_a_call(step, CALLS[:20]) == 1


def test_a_program_that_changes_for_good_makes_no_choices():
    def make(decorate):
        weight, made = tf.Variable([1.0, -2.0, 0.5]), []

        @decorate
        def step(rows):
            made.append(1)
            h = rows
            for _ in range(3):
                h = tf.tanh(h * weight)
                if len(made) > 16:
                    h = tf.sin(h)
                h = h + 1.0
            return tf.reduce_sum(h)

        return step

    step = run_both(make, CALLS[:24])
    assert launches_a_call(step, CALLS[:10]) == 1


def test_a_gradient_is_not_cut_where_choices_before_it_meet():
    def make(decorate):
        weights, made = [tf.Variable([1.0, -2.0, float(n)]) for n in range(6)], random.Random(3)

        @decorate
        def step(rows):
            with tf.GradientTape() as tape:
                h = rows
                for weight in weights:
                    h = tf.tanh(h * weight + 0.5)
                loss = tf.reduce_mean(h**2) if made.random() < 0.5 else tf.reduce_sum(tf.abs(h))
                for weight in weights:
                    loss += 0.1 * tf.reduce_sum(weight**2)
            gradients = tape.gradient(loss, weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(0.01 * gradient)
            return loss

        return step

    step = run_both(make, CALLS[:30])
    assert launches_a_call(step, CALLS[:10]) <= 3


def test_the_gradient_of_what_follows_choices_is_skipped():
    """What was made before the cut differs from way to way, but not what the gradient is given."""

    def make(decorate):
        keras.utils.set_random_seed(4)
        dense, dice = keras.layers.Dense(3, activation="tanh"), random.Random(9)
        dense.build([None, 3])
        weights = dense.trainable_variables

        @decorate
        def step(rows):
            for _ in range(4):
                for _ in range(dice.randrange(5)):
                    rows = tf.sin(rows)
                if dice.random() < 0.5:
                    rows = rows * 2.0
                rows = rows / (1.0 + tf.abs(rows))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(dense(rows) ** 2)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        return step

    step = run_both(make, CALLS[:40])
    before = step.stats()
    for rows, in CALLS[:20]:
        step(rows)
    after = step.stats()
    assert after.followed - before.followed == 20
    assert after.regions - before.regions == 2 * 20


def test_a_gradient_of_either_of_two_earlier_tensors():
    """Which of them is used behind the cut decides what the gradient is, though it is the same feed."""

    def make(decorate):
        keras.utils.set_random_seed(4)
        layers, dice = [keras.layers.Dense(3, activation="tanh") for _ in range(2)], random.Random(9)
        for layer in layers:
            layer.build([None, 3])
        weights = [weight.value for layer in layers for weight in layer.trainable_variables]

        @decorate
        def step(rows):
            with tf.GradientTape() as tape:
                one, other = (layer(rows) for layer in layers)
                seen = float(tf.reduce_sum(one) + tf.reduce_sum(other))
                chosen = (one, other)[dice.randrange(2)]
                loss = tf.reduce_mean(layers[0](chosen) ** 2)
            gradients = tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(0.01 * gradient)
            return loss, gradients, seen

        return step

    step = run_both(make, CALLS[:40])
    assert step.stats().regions > 40


def test_a_gradient_behind_choices_within_its_tape_is_skipped():
    """Each choice is between paths of two lengths: 64 combinations, whose gradients are the same operations."""

    def make(decorate):
        keras.utils.set_random_seed(4)
        cell, dice = keras.layers.Dense(3, activation="tanh"), random.Random(9)
        cell.build([None, 3])
        weights = cell.trainable_variables

        @decorate
        def step(rows):
            with tf.GradientTape() as tape:
                words, loss = tf.cast(rows, tf.int32), 0.0
                for position in range(6):
                    made = cell(tf.cast(words, tf.float32))
                    loss += tf.reduce_mean(made**2)
                    drawn = rows * float(position) if dice.random() < 0.5 else tf.sign(tf.sin(made) + 0.1) * 2.0
                    words = tf.cast(drawn, tf.int32)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        return step

    step = run_both(make, CALLS, jit_compile=False)  # XLA's tanh rounds otherwise, which forty updates amplify
    before = step.stats()
    for rows, in CALLS[:20]:
        step(rows)
    after = step.stats()
    assert after.followed - before.followed == 20
    assert after.regions - before.regions >= 20 * 5
