"""Notes: operations that may fail inside of a Keras layer cut no segment, and fail in Keras' own words."""

import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import assert_quiet, holders, unchanged
from tests.snapshots import assert_same, snapshot
from tracer import check, show

GOOD, OTHER = tf.constant([[0, 1, 2]]), tf.constant([[3, 2, 1]])
BAD, WORSE = tf.constant([[0, 99, 2]]), tf.constant([[7, 1, -8]])
CALLS = [GOOD, OTHER, GOOD, BAD, GOOD, OTHER, WORSE, BAD, GOOD]

JIT = {"graph": False, "xla": True}


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


class Words(keras.layers.Layer):
    """Looks words up in a table, with Python of its own, so that it is run every time."""

    def __init__(self, log=None, **options):
        super().__init__(**options)
        self.table = self.add_weight(shape=(4, 3), initializer="ones", name="table")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.seen = log if log is not None else []

    def call(self, ids, scale=1.0, extra=None, training=False):
        self.count.assign_add(1.0)
        x = tf.gather(self.table, ids)  # here
        self.seen.append(len(self.seen))
        self.count.assign_add(10.0)
        return x * scale


class Outer(keras.Model):
    """A model of the user's around it."""

    def __init__(self):
        super().__init__()
        self.words, self.head = Words(), keras.layers.Dense(2, kernel_initializer="ones")

    def call(self, ids, training=False):
        x = tf.sin(self.words(ids, training=training))
        return self.head(x) * 2.0


def told(step, *given):
    """What a call returns or raises: its class, words and marks, and the innermost line of this file."""
    try:
        return snapshot(step(*given)), None, None
    except Exception as error:
        lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
        marks = getattr(error, "_keras_call_info_injected", None), error.__suppress_context__
        message = getattr(error, "message", str(error))
        words = message, getattr(error, "op", 0), getattr(error, "node_def", 0)
        return None, (type(error), words, marks), lines[-1]


def same(make, calls, state, lines=True, **options):
    """Compares calls of what `make` makes with eager's; returns the decorated function."""
    keras.utils.set_random_seed(0)
    eager, one = make(unchanged)
    keras.utils.set_random_seed(0)
    step, other = make(coexec.function(**options))
    for given in calls:
        given = given if isinstance(given, tuple) else (given,)
        expected, found = told(eager, *given), told(step, *given)
        assert_same(expected[0], found[0], rtol=1e-5)
        assert found[1] == expected[1]
        assert not lines or found[2] == expected[2]
        assert_same(snapshot(state(one)), snapshot(state(other)), rtol=1e-5)
    check.check(step.trace_graph)
    assert str(show.parse(str(step.trace_graph))) == str(step.trace_graph)
    return step


def state_of(layer):
    """What calls have written: tensors, and Python up to the last call that did not fail."""
    return [v.numpy() for v in layer.variables]


def test_one_launch_and_keras_words(backend):
    """A lookup in the `call` of a layer inside of a model: one segment, the innermost layer in the words."""
    before = holders()

    def make(decorate):
        model = Outer()

        @decorate
        def step(ids):
            return tf.reduce_sum(model(ids, training=True), -1) + 1.0

        return step, model

    launched = []
    step = same(make, CALLS, state_of, jit_compile=JIT[backend])
    stats = step.stats()
    assert (stats.recorded, stats.followed) == (1, len(CALLS) - 1 - 3), step.explain()
    for ids in (GOOD, OTHER):
        launches = step.stats().launches
        step(ids)
        launched.append(step.stats().launches - launches)
    assert launched == [1, 1], step.explain()
    if backend == "xla":
        assert "not compiled by XLA" not in step.explain()
    assert_quiet(before)


def test_library_layers_are_told_with_their_name(backend):
    """An `Embedding`, followed as one: its Python has not run, and the words are those that it would have written."""

    def make(decorate):
        inputs = keras.Input((3,), dtype="int32")
        x = keras.layers.Dense(2, kernel_initializer="ones")(keras.layers.Embedding(4, 3, name="table")(inputs))
        model = keras.Model(inputs, x, name="model")

        @decorate
        def step(ids):
            return model(ids) * 2.0

        return step, model

    step = same(make, [GOOD, OTHER] * 4 + [BAD, GOOD, WORSE, OTHER], state_of, jit_compile=JIT[backend])
    assert step.stats().regions > 4
    assert "Embedding.call" in told(step, BAD)[1][1][0]


def test_arguments_are_those_of_the_call(backend):
    """Numbers, strings, lists and shapes that differ from call to call are told as they were at the operation."""
    notes = []

    def make(decorate):
        layer = Words()

        @decorate
        def step(ids, scale, extra):
            y = layer(ids, scale=scale, extra=extra, training=scale > 2)
            if isinstance(extra, list):
                extra.append("later")  # behind the operation: eager has failed by then
            return y + 1.0

        return step, layer

    values = [1.0, 2, 3.5, 2.0]
    calls = [(ids, values[n % 4], extra) for n, (ids, extra) in enumerate(
        (ids, extra) for extra in ("none", None) for ids in (GOOD, GOOD, BAD, OTHER, WORSE))]  # fmt: skip
    calls += [(ids, 1.0, {"a": (tf.ones(2), 1), "b": [True, None, b"x"]}) for ids in (GOOD, GOOD, OTHER, BAD)]
    same(make, calls, state_of, jit_compile=JIT[backend])
    eager, _ = make(unchanged)
    step, _ = make(coexec.function(jit_compile=JIT[backend]))
    for function in (eager, step):
        found = [told(function, ids, 1.0, ["now"]) for ids in (GOOD, GOOD, GOOD, BAD)]
        notes.append(found[-1][1])
    assert notes[0] == notes[1]
    assert "now" in notes[1][1][0]
    assert "later" not in notes[1][1][0]


def test_an_object_is_asked_for_its_words_by_keras_alone(backend):
    """Where Keras would call a `__repr__` of the program's, the operation is carried out at its place."""

    def make(decorate):
        layer, log = Words(), []

        class Thing:
            def __repr__(self):
                log.append("asked")
                return f"<thing {len(log)}>"

        thing = Thing()

        @decorate
        def step(ids):
            log.append("before")
            y = layer(ids, scale=2.0, extra=thing)
            log.append("behind")
            return y + 1.0

        return step, (layer, log)

    step = same(make, CALLS, lambda made: (state_of(made[0]), made[1]), jit_compile=JIT[backend])
    launches = step.stats().launches
    step(GOOD)
    assert step.stats().launches > launches + 1


def test_without_keras_words(backend):
    """Where Keras' filtering is off, nothing is added; turned on again, it is."""

    def make(decorate):
        model = Outer()

        @decorate
        def step(ids):
            return model(ids) + 1.0

        return step, model

    try:
        eager, _ = make(unchanged)
        step, _ = make(coexec.function(jit_compile=JIT[backend]))
        for on in (True, False, True, False):
            (keras.config.enable_traceback_filtering if on else keras.config.disable_traceback_filtering)()
            for ids in (GOOD, GOOD, OTHER, BAD, GOOD, GOOD, WORSE):
                expected, found = told(eager, ids), told(step, ids)
                assert_same(expected[0], found[0], rtol=1e-5)
                assert found[1] == expected[1]
                if expected[1]:
                    assert ("Words.call" in found[1][1][0]) is on
    finally:
        keras.config.enable_traceback_filtering()


def test_who_catches_it_hears_at_once(backend):
    """A `try` in an outer layer: its handler runs where eager's does, with Keras' words."""

    class Careful(keras.layers.Layer):
        def __init__(self, log):
            super().__init__()
            self.words, self.log = Words(), log

        def call(self, ids):
            try:
                return self.words(ids)
            except tf.errors.InvalidArgumentError as error:
                self.log.append((error.message, float(self.words.count)))
                return tf.zeros((*ids.shape, 3))

    def make(decorate):
        log = []
        layer = Careful(log)

        @decorate
        def step(ids):
            return layer(ids) + 1.0

        return step, (layer, log)

    same(make, CALLS, lambda made: (state_of(made[0]), list(made[1])), jit_compile=JIT[backend])


def test_a_handler_that_begins_later_hides_nothing(backend):
    """What fails in a layer surfaces at a read; a `try` around that did not exist when it was issued."""

    def make(decorate):
        layer = Words()

        @decorate
        def step(ids):
            y = layer(ids)
            try:
                return float(tf.reduce_sum(y))
            except tf.errors.InvalidArgumentError:
                return -1.0

        return step, layer

    same(make, CALLS, state_of, lines=False, jit_compile=JIT[backend])


def test_assertions_in_a_layer(backend):
    """`tf.debugging`'s checks inside of a `call` cut nothing, and are told with the layer."""

    class Checked(keras.layers.Layer):
        def call(self, x, most=3.0):
            tf.debugging.assert_less(x, most, message="too large")  # here
            return tf.sin(x) * 2.0

    def make(decorate):
        layer = Checked()

        @decorate
        def step(x, most):
            return layer(x * 1.0, most=most) + 1.0

        return step, layer

    low, high = tf.constant([1.0, 2.0]), tf.constant([1.0, 5.0])
    calls = [(low, 3.0), (low, 3.0), (low, 3.0), (high, 3.0), (low, 3.0), (low, 3.0), (high, 3.0), (low, 3.0)]
    step = same(make, calls, state_of, jit_compile=JIT[backend])
    launches = step.stats().launches
    step(low, 3.0)
    assert step.stats().launches == launches + 1, step.explain()


def test_training_steps(backend):
    """`fit` of an accelerated model with a lookup of its own: values and words are eager's."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.words, self.head = Words(), keras.layers.Dense(1)

        def call(self, ids):
            return self.head(tf.reduce_mean(self.words(ids), 1))

    numbers = np.random.default_rng(0)
    x, y = numbers.integers(4, size=(40, 3)).astype("int32"), numbers.normal(size=(40, 1)).astype("float32")
    wrong = x.copy()
    wrong[37, 1] = 9
    found = []
    for eager in (True, False):
        keras.utils.set_random_seed(1)
        model = Model()
        if not eager:
            coexec.accelerate(model, jit_compile=JIT[backend])
        model.compile("adam", "mse", run_eagerly=eager)
        history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False).history["loss"]
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"Words.call\(\)") as caught:
            model.fit(wrong, y, batch_size=8, verbose=0, shuffle=False)
        found.append((history, caught.value.message, state_of(model)))
        del caught
    assert_same(snapshot(found[0]), snapshot(found[1]), rtol=1e-4)
    assert model.train_function.stats().launches >= 15


def test_nothing_is_kept_of_the_call():
    """The notes hold no tensor: what dies in the call is not among the results of its segment."""
    model = Outer()

    @coexec.function
    def step(ids):
        return model(ids)

    for _ in range(6):
        step(GOOD)
    for ids in (GOOD, OTHER) * 4:
        step(ids)
    alive = [len(s.executables.wanted) for s in _steps(step.trace_graph) if s.executables is not None]
    assert max(alive) <= 2  # the result; nothing of what the layers have passed on


def _steps(graph):
    """All steps of a graph."""
    found = [node.after for node in graph.nodes if node.after is not None]
    for step in found:
        found.extend(step.next)
    return found


class Within(keras.layers.Layer):
    """Gives another layer what it has computed, and what it was given in lists."""

    def __init__(self):
        super().__init__()
        self.words = Words()

    def call(self, ids, others):
        shifted = ids + 0 * tf.shape(ids)[0]
        first = self.words(shifted, extra=[others, tf.ones_like(shifted)])
        return first + self.words(tf.concat([ids, ids], 1), scale=2.0)[:, : ids.shape[1]]


@pytest.mark.parametrize("kind", [keras.layers.Embedding, Words, Within])
def test_of_ever_other_sizes(kind):
    """The words have the shapes of the call that fails, also where the layer's Python did not run in it."""

    def make(decorate):
        keras.utils.set_random_seed(2)
        layer = kind(4, 3) if kind is keras.layers.Embedding else kind()
        layer(GOOD, GOOD) if kind is Within else layer(GOOD)

        @decorate
        def step(ids):
            ids = ids * 1
            y = layer(ids, tf.transpose(ids)) if kind is Within else layer(ids)
            return tf.reduce_mean(y, 0)

        return step

    draw = np.random.default_rng(0)
    calls = []
    for number, size in enumerate(draw.integers(3, 90, 60).tolist()):
        ids = draw.integers(0, 4, [size, 5])
        if number % 7 == 5:
            ids[-1, 2] = 99 if number % 2 else -8
        calls.append(tf.constant(ids))
    eager = make(unchanged)
    expected = [snapshot(told(eager, ids)) for ids in calls]
    step = make(coexec.function)
    for one, ids in zip(expected, calls, strict=True):
        assert_same(one, snapshot(told(step, ids)))
    if kind is keras.layers.Embedding:
        assert step.stats().regions > 30, step.explain()
    assert "disagree" not in str(step.explain())
