"""Library calls whose arguments are compared directly: nobody can tell, but for the time it takes."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.memoize.call_keys import CallKeys
from coexec.memoize.call_site import CallSites
from tests.coexec import run_both, unchanged
from tests.coexec.memoize.test_regions import Training, compare
from tests.snapshots import assert_same, snapshot

X = tf.constant([1.0, 2.0, 4.0])


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


@pytest.fixture
def keys(monkeypatch):
    """The functions for which a key was made, in order."""
    made, original = [], CallKeys.of

    def key(self, function, *rest):
        made.append(function.__name__)
        return original(self, function, *rest)

    monkeypatch.setattr(CallKeys, "of", key)
    return made


def settled(step, *args):
    """Calls until the step's library calls are known, and have been looked at again for the first time."""
    for _ in range(20):
        step(*args)


def test_a_training_step_needs_one_key(keys):
    """That of the gradient: what its tape has seen counts, too."""
    training = Training()
    step = coexec.function(training.step)
    x, y = tf.ones((6, 4)), tf.constant([0, 1, 2, 0, 1, 2])
    settled(step, x, y)
    keys.clear()
    regions = step.stats().regions
    for _ in range(5):
        step(x, y)
    assert keys == ["gradient"] * 5
    assert step.stats().regions == regions + 20


def test_assertions_need_none(keys):
    """Tensors of every kind, numbers and words."""
    outside = tf.constant([9, 9])

    @coexec.function
    def step(x, whole):
        y = x * 2.0
        tf.debugging.assert_less(y, 100.0, "words")
        tf.debugging.assert_less(x, 100.0, message="words", summarize=3)
        tf.debugging.assert_greater(outside, whole)
        tf.debugging.assert_near(y, [2.0, 4.0, 8.0], atol=10.0)
        tf.debugging.assert_equal(tf.shape(y), tf.cast(3, tf.int32))
        return y

    settled(step, X, tf.constant(3))
    keys.clear()
    regions = step.stats().regions
    step(X, tf.constant(3))
    assert keys == []
    assert step.stats().regions == regions + 5


CHANGES = {
    "another number": lambda n: {"most": 100.0 + n % 3},
    "whole and float": lambda n: {"most": (100, 100.0)[n % 2]},
    "signs of zero": lambda n: {"scale": (0.0, -0.0)[n // 2 % 2]},
    "other words": lambda n: {"message": "abc"[n % 3]},
    "other names": lambda n: {("most", "more")[n % 2]: 50.0},
    "other tensors": lambda n: {"tensor": (X, X * 2.0, X[:2], tf.constant(3.0))[n // 2 % 4]},
    "the same tensor twice": lambda n: {"tensor": X, "other": (X, X + 0.0)[n // 3 % 2]},
    "other whole numbers": lambda n: {"tensor": tf.constant([n // 4, 2])},
    "an array": lambda n: {"tensor": (np.float32([1, 2, 3]), X)[n // 2 % 2]},
    "a list, longer": lambda n: {"tensor": [1.0, 2.0, 3.0][: 1 + n // 3 % 3]},
    "a list or a tuple": lambda n: {"tensor": ([1.0, 2.0], (1.0, 2.0))[n // 2 % 2]},
    "a list with a tensor": lambda n: {"tensor": [X, (X, 3.0)[n // 2 % 2]]},
    "truths": lambda n: {"flag": (True, 1, False, 0)[n // 2 % 4]},
    "dtypes": lambda n: {"dtype": (tf.float32, tf.float64)[n // 3 % 2]},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_seen(name):
    """Whatever differs from the call before decides what the call does; results, errors and their words are eager's."""

    def make(decorate):
        @decorate
        def step(x, most=100.0, more=100.0, message="", tensor=X, other=X, flag=True, scale=1.0, dtype=tf.float32):
            y = x * 2.0
            total = tf.norm(tensor) if not isinstance(tensor, tf.Tensor) or tensor.dtype.is_floating else y[0]
            tf.debugging.assert_less(y, most, message=message)
            tf.debugging.assert_less(y, more, message)
            if len(np.shape(tensor)) == 1:
                tf.debugging.assert_equal(tensor, tensor, message)
            same = tf.tensordot(other, tensor if np.shape(tensor) == (3,) else other, 1)
            moments = tf.nn.moments(tf.cast(y, dtype), [0], keepdims=bool(flag))
            clipped = tf.clip_by_norm(y, 1.0 + scale) if flag else y
            return total, same, moments, clipped, tf.math.atan2(y * scale, -y), tf.einsum("i,i->", y, other)

        return step

    change, plain, step = CHANGES[name], make(unchanged), make(coexec.function)
    for number in range(24):
        given = change(number)
        expected, found = told(plain, given), told(step, given)
        assert expected[0] == found[0], number
        assert_same(expected[1], found[1], rtol=1e-5, path=f"call {number}: ")
    assert step.stats().regions > 0


def told(step, given):
    """What a call returns, or the words of its error."""
    try:
        return "returned", snapshot(step(X, **given))
    except (tf.errors.OpError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", None


def test_scopes_and_settings():
    """Devices, Keras' float type and epsilon, tapes: the same arguments in other surroundings are other calls."""

    def make(decorate):
        layer = keras.layers.LayerNormalization()
        layer(tf.ones((1, 3)))

        @decorate
        def step(x, how):
            y = x * 2.0
            if how == "device":
                with tf.device("CPU:0"):
                    z = tf.norm(y), layer(y[None])
            elif how == "tape":
                with tf.GradientTape() as tape:
                    tape.watch(y)
                    z = tf.norm(y), layer(y[None])
                z = *z, tape.gradient(z[0], y)
            elif how == "graph":
                with tf.Graph().as_default():
                    z = type(tf.norm([3.0, 4.0])).__name__
            else:
                z = tf.norm(y), layer(y[None]), tf.norm([3.0, 4.0])
            return z

        return step

    ways = ["plain", "device", "tape", "graph"]
    run_both(make, [(X, way) for way in [*["plain"] * 8, *ways * 6, *["tape"] * 8, *ways * 3]])


def test_writes_to_objects():
    """What a layer was given anew, by attribute or behind the runtime's back, decides the next call."""

    def change(training, i):
        if i == 8:
            training.model.layers[0].activation = keras.activations.tanh
        if i == 12:
            training.model.layers[0].trainable = False

    compare(Training, change, calls=30)


def test_other_objects_at_the_same_place():
    """Layers that take turns, and layers that are let go of, whose ids others get."""

    def make(decorate):
        seen = []

        @decorate
        def step(x, layer):
            return layer(x[None]) * 2.0

        def call(number):
            if number % 20 == 0:
                seen[:] = [keras.layers.LeakyReLU(negative_slope=0.1 * k) for k in range(1, 4)]
                gc.collect()
            return step(-X, seen[number % 2])

        decorated.append(step)
        return call

    decorated = []
    run_both(make, [(n,) for n in range(80)])
    assert decorated[1].stats().regions > 5


def test_nothing_is_kept_alive():
    """What a call was given is not held by what is known of it."""

    @coexec.function
    def step(x, layer):
        y = layer(x[None] * 2.0)
        tf.debugging.assert_less(y, 100.0)
        tf.debugging.assert_less(x, 100.0)
        return y

    layer, x = keras.layers.LeakyReLU(), X + 1.0
    settled(step, x, layer)
    assert step.stats().regions > 10
    references = [weakref.ref(layer), weakref.ref(x)]
    del layer, x
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.slow
def test_masks():
    """What Keras has noted on a tensor decides what a layer does with it."""

    def make(decorate):
        keras.utils.set_random_seed(3)
        embedding, recurrent = keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.LSTM(2)
        embedding(tf.constant([[1]]))
        recurrent(tf.zeros((1, 2, 3)))

        @decorate
        def step(x, masked):
            y = embedding(x)
            if not masked:
                y = tf.identity(y)
            return recurrent(y)

        return step

    x = tf.constant([[1, 2, 0, 0], [3, 0, 0, 0]])
    for first in (0, 1):
        run_both(make, [(x, n // 4 % 2 == first) for n in range(40)])


FIRST, SECOND, LOW = tf.constant([1.0, 2.0, 3.0]), tf.constant([9.0, 7.5, 9.0]), tf.constant([0.5, 0.5, 0.5])
SHAPES = SECOND, tf.constant([9.0]), tf.constant(9.0), tf.constant([[0.5], [9.0]])
DOUBLE, VARIABLE = tf.constant([9.0, 9.0, 9.0], tf.float64), tf.Variable([9.0, 9.0, 3.0])
WHOLES = [tf.constant([1, 2]), tf.constant([1, 2]), tf.constant([1, 7])]


def twice(x, n):
    """One constant, which the assertion of equality sees, or two."""
    one, other = tf.constant(3.0), tf.constant(3.0)
    return one, (other, one)[n // 2 % 2]


def known(x, n):
    """Tensors from outside that the segment has taken before."""
    tf.identity_n([FIRST, SECOND, LOW])
    return FIRST, (SECOND, LOW)[n // 2 % 2]


# What is compared, in call `n`; some of it does not hold.
ASSERTED = {
    "constants": lambda x, n: (x, [tf.constant(most) for most in (9.0, 10.0, 1.5)][n % 3]),
    "one constant, or two": twice,
    "known": known,
    "new": lambda x, n: (x, (SECOND, LOW)[n // 2 % 2]),
    "new, once or twice": lambda x, n: ((FIRST, SECOND)[n // 2 % 2], SECOND),
    "whole numbers": lambda x, n: (WHOLES[n // 2 % 3], WHOLES[n // 3 % 3]),
    "shapes": lambda x, n: (x, SHAPES[n // 2 % 4]),
    "dtypes": lambda x, n: (x, (SECOND, DOUBLE)[n // 4 % 2]),
    "a tensor, or one before it": lambda x, n: (lambda y, z: ((y, z)[n // 2 % 2], y + 0.5))(x * 2.0, x * 3.0),
    "a number, or a tensor of it": lambda x, n: (x, (4.5, SHAPES[2], tf.constant(4.5))[n // 2 % 3]),
    "read before": lambda x, n: (lambda y: (y, SECOND + float(y[0] if n // 2 % 2 else 1.0)))(x * 1.0),
    "a variable": lambda x, n: (x, (SECOND, VARIABLE)[n // 2 % 2]),
}


@pytest.mark.parametrize("name", ASSERTED)
def test_assertions_are_passed_over_where_they_say_the_same(name, monkeypatch):
    """Arguments that are others, or other objects, are seen; those of the call before take no more than a look."""
    passed, original = [], CallSites._given
    monkeypatch.setattr(CallSites, "_given", lambda *given: passed.append(original(*given)) or passed[-1])

    def make(decorate):
        @decorate
        def step(x, n):
            x = x + 0.0
            one, other = ASSERTED[name](x, n)
            tf.debugging.assert_less_equal(one, other, "words")
            tf.debugging.assert_equal(one, one, "words", summarize=1 + n // 12)
            tf.debugging.assert_greater(other, tf.cast(0, getattr(other, "dtype", tf.float32)))
            return x * 2.0

        return step

    plain, step = make(unchanged), make(coexec.function)
    for number in range(-20, 24):  # known, and looked at again, by 0
        x = tf.constant([1.0, 2.0, 11.0 if number > 0 and number % 8 == 0 else 4.0])
        results = []
        for run in (plain, step):
            try:
                results.append(snapshot(run(x, max(number, 0))))
            except (tf.errors.OpError, TypeError, ValueError) as error:
                results.append(snapshot(error.with_traceback(None)))
        assert_same(*results, path=f"call {number}: ")
    assert any(passed)
    assert step.stats().followed > 20


# What an assertion's error shows beside what it checks.
SHOWN = {
    "constants": lambda n: tf.constant((9.0, 10.0, 1.5)[n % 3]),
    "numbers": lambda n: (9.0, 10.0, 1.5)[n % 3],
    "tensors": lambda n: (FIRST, SECOND, LOW)[n % 3],
    "fresh": lambda n: tf.constant(np.float32([n, 3.5])),
    "variables": lambda n: VARIABLE,
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_only_the_error_shows(name):
    """It is the call's own, whether the assertion was passed over or not."""

    def make(decorate):
        @decorate
        def step(x, n):
            x = x * 2.0
            tf.debugging.Assert(tf.reduce_sum(x) < 20.0, ["sum", x, [SHOWN[name](n)], n], summarize=4)
            tf.debugging.assert_less(x, 15.0, "words")
            return x - 1.0

        return step

    plain, step = make(unchanged), make(coexec.function)
    for number in range(-20, 24):
        x = tf.constant([1.0, 2.0, 11.0 if number > 0 and number % 4 == 0 else 4.0])
        results = []
        for run in (plain, step):
            try:
                results.append(snapshot(run(x, max(number, 0))))
            except tf.errors.OpError as error:
                results.append(snapshot(error.with_traceback(None)))
        assert_same(*results, path=f"call {number}: ")
    assert step.stats().followed > 20
