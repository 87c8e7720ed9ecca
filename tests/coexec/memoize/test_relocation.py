"""Known calls on new paths: they are copied there, and what only looks the same is learnt."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuned
from tracer.library import layer_call

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def floats(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


def ways(x, choices):
    """As many paths as there are choices: what follows is on a path of its own for each."""
    for number, choice in enumerate(choices):
        x = x * (number + 1.5) if choice == "a" else tf.tanh(x) if choice == "b" else x + x
    return x


# Three ways, on which each operation comes, and new ones.
KNOWN = ["aab", "bbc", "cca", "aab", "bbc", "cca"]
CHOICES = [*KNOWN, "aab", "bca", "ccc", "aaa", "cab", "bca", "bbb", "abc", "bac", "aab", "cca"]


def values(result):
    return [np.asarray(v) for v in tf.nest.flatten(result)]


def run(make, function, calls):
    """Runs a program; returns its results, its state, and how many library calls each call has skipped."""
    keras.utils.set_random_seed(3)
    step, state = make()
    step, skipped, results = function(step), [], []
    for args in calls:
        before = step.stats().regions if hasattr(step, "stats") else 0
        results.append(values(step(*args)))
        skipped.append(step.stats().regions - before if hasattr(step, "stats") else 0)
    return results, values(state()), skipped


def check(make, calls):
    """Compares a program with eager's; returns how many library calls each call has skipped."""
    expected, expected_state, _ = run(make, lambda f: f, calls)
    with testing.always_follow():
        results, state, skipped = run(make, coexec.function, calls)
    for number, (one, other) in enumerate(zip(expected, results, strict=True)):
        for v, w in zip(one, other, strict=True):
            assert v.dtype == w.dtype
            assert v.shape == w.shape
            np.testing.assert_allclose(v, w, rtol=1e-4, atol=1e-5, err_msg=f"call {number}")
    for v, w in zip(expected_state, state, strict=True):
        np.testing.assert_allclose(v, w, rtol=1e-4, atol=1e-5)
    return skipped


def trained(model, optimizer, loss_of):
    model.build((None, 4))
    optimizer.build(model.trainable_variables)

    def step(x, choices):
        with tf.GradientTape() as tape:
            loss = loss_of(model(ways(x, choices), training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step, lambda: [*model.variables, *optimizer.variables]


def calls_of(choices, rows=8):
    return [(floats(rows, 4, seed=n), choice) for n, choice in enumerate(choices)]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop", "lion", "ftrl"])
def test_new_ways_to_a_model_and_an_optimizer(optimizer):
    def make():
        layers = [keras.layers.Dense(8, "silu"), keras.layers.LayerNormalization(), keras.layers.Dense(2)]
        return trained(keras.Sequential(layers), keras.optimizers.get(optimizer), lambda y: tf.reduce_mean(y**2))

    skipped = check(make, calls_of(CHOICES))
    assert all(count >= 2 for count in skipped[6:])  # the model and the optimizer, also on ways that are new


def test_a_new_way_is_skipped_in_its_first_call():
    layer = keras.layers.Dense(8, "relu")
    layer.build((None, 4))
    step = coexec.function(lambda x, choices: layer(ways(x, choices)))
    with testing.always_follow():
        for x, choice in calls_of(KNOWN):
            step(x, choice)
        for x, choice in calls_of(["ccc", "abc", "cab"]):
            before = step.stats().regions
            np.testing.assert_allclose(step(x, choice), layer(ways(x, choice)), rtol=1e-5)
            assert step.stats().regions == before + 1


def test_two_ways_agree_where_each_was_taken_once():
    layer = keras.layers.Dense(8, "relu")
    layer.build((None, 4))
    step = coexec.function(lambda x, choices: layer(ways(x, choices)))
    with testing.always_follow():
        for x, choice in calls_of(["abc", "aac", "bbc"]):  # recorded, and observed on two ways
            step(x, choice)
        before = step.stats().regions
        ((x, choice),) = calls_of(["abb"])
        np.testing.assert_allclose(step(x, choice), layer(ways(x, choice)), rtol=1e-5)
        assert step.stats().regions == before + 1


def test_turns_of_a_loop():
    """The call is known in some turns, and made in others."""

    def make():
        layer = keras.layers.Dense(4, "tanh")
        layer.build((None, 4))

        def step(x, choices):
            for choice in choices:
                x = ways(x, choice)
                x = layer(x) if choice != "b" else layer(layer(x))
            return x

        return step, lambda: layer.variables

    check(make, calls_of(["a", "ab", "aab", "aabb", "ba", "abab", "bbb", "aaaa", "abba", "b"]))


def test_the_same_tensor_twice():
    """A loss of two tensors is known; of one that is given twice, it is another."""

    def make():
        loss = keras.losses.MeanSquaredError()

        def step(x, choices, twice):
            y = ways(x, choices)
            return loss(y, y) if twice else loss(x, y)

        return step, list

    calls = [(x, choice, number % 3 == 2) for number, (x, choice) in enumerate(calls_of(CHOICES))]
    check(make, calls)


def test_a_constant_in_place_of_a_tensor():
    def make():
        loss = keras.losses.MeanAbsoluteError()
        constants = tf.zeros([8, 4]), tf.ones([8, 4])

        def step(x, choices, which):
            y = ways(x, choices)
            return loss([y, tf.ones_like(y), *constants][which], y)

        return step, list

    check(make, [(x, choice, number % 4) for number, (x, choice) in enumerate(calls_of(CHOICES * 2))])


def test_a_variable_that_the_segment_has_used_before():
    """Its handle is a feed already, on some ways."""

    def make():
        layer = keras.layers.Dense(4)
        layer.build((None, 4))

        def step(x, choices):
            x = ways(x, choices)
            if choices[0] != "a":
                x = x + tf.reduce_sum(layer.kernel)
            if choices[1] == "b":
                layer.bias.assign_add(tf.ones([4]))
            return layer(x)

        return step, lambda: layer.variables

    check(make, calls_of(CHOICES * 2))


def test_what_it_reads_changes_between_ways():
    class Scaled(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.scale = 1.0
            self.inner = keras.layers.Dense(4)

        def build(self, shape):
            self.inner.build(shape)

        def call(self, x):
            return self.inner(x) * self.scale

    def make():
        layer, plain = Scaled(), keras.layers.Dense(4)
        layer.build((None, 4))

        def step(x, choices, scale):
            layer.scale = scale
            plain.activation = keras.activations.relu if scale > 1 else keras.activations.tanh
            return plain(layer(ways(x, choices)))

        return step, list

    scales = [1.0] * 9 + [3.0, 3.0, 0.5, 3.0, 1.0, 1.0, 4.0, 4.0]
    check(make, [(x, choice, scale) for (x, choice), scale in zip(calls_of(CHOICES), scales, strict=True)])


@pytest.mark.parametrize("moment", [-1, 1, 2, 3, 4])
def test_what_it_reads_is_written_past_its_hooks(moment):
    """Between calls, or between the turns of a loop, in most of which the call has been copied."""

    def make():
        layer = keras.layers.Rescaling(0.9)

        def step(x, scale):
            for turn in range(6):
                if turn == max(moment, 0):
                    vars(layer)["scale"] = scale
                x = layer(x)
            return x

        return step, list

    scales = [0.9, 0.9, 0.9, 0.5, 0.9, 0.7, 0.7, 0.7, 0.9, 0.4]
    skipped = check(make, [(x, scale) for (x, _), scale in zip(calls_of(CHOICES), scales, strict=False)])
    assert max(skipped) >= 3


def test_what_it_reads_is_written():
    """The layer's hooks say so to the copies, too."""

    def make():
        layer = keras.layers.Dense(4)
        layer.build((None, 4))

        def step(x, activation):
            layer.activation = keras.activations.get(activation)
            for _ in range(5):
                x = layer(x)
            return x

        return step, list

    activations = ["relu", "relu", "relu", "tanh", "relu", "tanh", "tanh", "silu"]
    skipped = check(make, [(x, name) for (x, _), name in zip(calls_of(CHOICES), activations, strict=False)])
    assert max(skipped) >= 3


def test_what_code_of_the_programs_in_it_reads():
    class Shifted(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.shifts = [1.0]

        def call(self, x):
            return tf.tanh(x) + self.shifts[0]

    def make():
        layer = Shifted()

        def step(x, shift, turns):
            layer.shifts[0] = shift
            for _ in range(turns):
                x = layer(x)
            return x

        return step, list

    shifts, turns = [1.0] * 5 + [2.0, 1.0, 3.0, 3.0, 3.0, 1.0], [3] * 4 + [6] * 7
    skipped = check(make, [(x, *rest) for (x, _), *rest in zip(calls_of(CHOICES), shifts, turns, strict=False)])
    assert skipped[4] == 6  # the last three turns are new


def test_sizes_that_are_tensors():
    """The value of a constant among the arguments decides the shape of the result."""

    def make():
        depths = tf.constant(3), tf.constant(4)

        def step(numbers, choices):
            return [tf.one_hot(numbers, depths[choice == "b"]) for choice in choices]

        return step, list

    check(make, [(tf.constant([0, 1, 2]), choice) for choice in ["aaab", "aaab", "aaaa", "abab", "bbbb", "baab"]])


@pytest.mark.parametrize("persistent", [False, True])
def test_gradients_of_copied_calls(persistent):
    """Second derivatives, and gradients with respect to what the calls return."""

    def make():
        first, second = keras.layers.Dense(4, "tanh"), keras.layers.Dense(4, "silu")
        for layer in (first, second):
            layer.build((None, 4))

        def step(x, choices):
            with tf.GradientTape(persistent=persistent) as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = second(first(ways(x, choices)))
                slope = inner.gradient(y, x)
                loss = tf.reduce_sum(slope**2) + tf.reduce_mean(y)
            if persistent:
                return outer.gradient(loss, first.trainable_variables), outer.gradient(y, x)
            return outer.gradient(loss, [x, *second.trainable_variables])

        return step, list

    check(make, calls_of(CHOICES))


def test_a_copied_call_fails_as_it_would():
    """Its operation fails by what it is given: the error is eager's, and names the layer."""
    table = keras.layers.Embedding(5, 4)
    table.build()

    def lookup(numbers, choices):
        return table(tf.cast(ways(tf.cast(numbers, tf.float32), choices), tf.int32))

    step, errors = coexec.function(lookup), []
    with testing.always_follow():
        for choice in KNOWN:
            step(tf.zeros([3], tf.int32), choice)
        for function in (lookup, step):
            with pytest.raises(Exception) as caught:
                np.asarray(function(tf.constant([1, 2, 30]), "acc"))
            errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_rows_of_variables():
    """Updates of rows that optimizers make: no segment both uses the whole variable and updates rows of it."""

    def make():
        table, optimizer = keras.layers.Embedding(6, 4), keras.optimizers.Adam(0.01)
        table.build()
        optimizer.build(table.trainable_variables)

        def step(numbers, choices):
            if choices[0] == "b":
                table.embeddings.assign(table.embeddings * 0.5)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(ways(table(numbers), choices) ** 2)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, table.trainable_variables), table.trainable_variables, strict=True)
            )
            return loss

        return step, lambda: [*table.variables, *optimizer.variables]

    data = np.random.default_rng(0).integers(0, 6, (len(CHOICES), 5))
    check(make, [(tf.constant(row), choice) for row, choice in zip(data, CHOICES, strict=True)])


def test_random_numbers_and_states():
    def make():
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=4)]
        return trained(keras.Sequential(layers), keras.optimizers.SGD(0.1), lambda y: tf.reduce_mean(y**2))

    check(make, calls_of(CHOICES))


def test_metrics_and_masks():
    def make():
        metric, masking = keras.metrics.MeanSquaredError(), keras.layers.Masking(0.0)
        cell = keras.layers.GRU(3, return_sequences=True, unroll=True)
        cell.build((None, 2, 4))

        def step(x, choices):
            y = cell(masking(tf.reshape(ways(x, choices), [-1, 2, 4])))
            metric.update_state(tf.zeros_like(y), y)
            return y, metric.result()

        return step, lambda: metric.variables

    check(make, [(x * tf.constant([[1.0], [0.0]] * 4), choice) for x, choice in calls_of(CHOICES)])


def test_an_instance_is_another_object():
    """Layers of one class, of which each is known on some way only."""

    def make():
        layers = {name: keras.layers.Dense(4, kernel_initializer="random_normal") for name in "abc"}
        for layer in layers.values():
            layer.build((None, 4))

        def step(x, choices):
            x = ways(x, choices)
            for choice in choices:
                x = layers[choice](x)
            return x

        return step, list

    check(make, calls_of(CHOICES * 2))


def test_sizes_beside_ways():
    def make():
        model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
        return trained(model, keras.optimizers.Adam(), lambda y: tf.reduce_mean(tf.reduce_sum(y**2, axis=0)))

    check(make, [(floats(3 + number % 5, 4, seed=number), choice) for number, choice in enumerate(CHOICES * 2)])


class Own(keras.layers.Layer):
    """A layer with code of the program's, which reads what it is given, and may change what it finds."""

    def __init__(self, found, change):
        super().__init__()
        self.inner, self.found, self.change = keras.layers.Dense(4, "tanh"), found, change

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        y = self.inner(x) * self.found["rate"]
        self.change(self, self.found)
        return y + sum(self.found["shifts"]) if self.found["adds"] else y


def nothing(layer, found):
    """It only computes."""


def counts(layer, found):
    found["rate"] += 1.0


def appends(layer, found):
    found["shifts"].append(0.5)


def changes_sides(layer, found):
    found["adds"] = not found["adds"]


def writes(layer, found):
    layer.seen = getattr(layer, "seen", 0) + 1


WAYS = ["".join(way) for way in itertools.product("abc", repeat=3)]


@pytest.mark.parametrize("taped", [True, False])
@pytest.mark.parametrize("outside", [None, counts, appends, changes_sides])
@pytest.mark.parametrize("inside", [nothing, counts, appends, changes_sides, writes])
def test_code_of_the_programs_where_no_way_recurs(inside, outside, taped, observed):
    """Its second run, on another way, is the one that it has to agree with; what it looks at may have changed."""

    def make():
        found = {"rate": 1.5, "shifts": [0.1, 0.2], "adds": True}
        layer = Own(found, inside)
        layer.build((None, 4))

        def step(x, choices, number):
            if outside is not None and number % 7 in (2, 5):
                outside(layer, found)
            with tf.GradientTape() if taped else contextlib.nullcontext() as tape:
                loss = tf.reduce_sum(layer(ways(x, choices)) ** 2)
            return (loss, *(tape.gradient(loss, layer.trainable_variables) if taped else ()))

        return step, lambda: [found["rate"], *found["shifts"], found["adds"], getattr(layer, "seen", 0)]

    with tuned(recorded_runs_kept=0):
        check(make, [(floats(8, 4, seed=n), way, n) for n, way in enumerate(WAYS)])
    if inside is nothing and outside is None:
        assert observed.count(layer_call) == 2
