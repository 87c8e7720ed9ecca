"""Warnings that libraries issue in memoized calls: shown as often as eagerly, in the same calls."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import unchanged
from tests.snapshots import assert_same, snapshot
from tracer import warning_filters

CALLS = 16


class Plain(keras.layers.Layer):
    """Destroys masks, of which Keras warns in each call."""

    def __init__(self):
        super().__init__(name="plain")
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return self.dense(x)


def masked():
    """A step with a layer that Keras warns of, at two places."""
    embedding, plain = keras.layers.Embedding(5, 4, mask_zero=True), Plain()
    plain(embedding(tf.ones([1, 3], tf.int32)))

    def step(i):
        x = embedding(tf.constant(np.arange(12).reshape(4, 3) % 4 + i % 2))
        y = plain(x)
        if i % 5 == 4:
            y = tf.tanh(y)
        return tf.reduce_sum(y), tf.reduce_sum(plain(x)) * 2.0

    return step


def without_gradients():
    """A step with a variable that the loss does not depend on, of which the optimizer warns in each call."""
    dense, idle, optimizer = keras.layers.Dense(2), keras.Variable(1.0, name="idle"), keras.optimizers.SGD(0.1)
    dense.build((None, 3))
    variables = [*dense.trainable_variables, idle]
    optimizer.build(variables)

    def step(i):
        x = tf.constant(np.random.default_rng(i).normal(size=(4, 3)), tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense(x) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss, idle

    return step


def nothing(i):
    """Leaves the filters as they are."""


def always_from_the_ninth_call(i):
    if i == 8:
        warnings.simplefilter("always")


def restored_before_each_fifth_call(i):
    if i % 5 == 4:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")


def an_error_in_the_tenth_call(i):
    warnings.simplefilter("error" if i == 9 else "default")


def reset_in_the_tenth_call(i):
    if i == 9:
        warnings.resetwarnings()


def forgotten_before_the_tenth_call(i):
    if i == 9:
        vars(keras.src.layers.layer).get("__warningregistry__", {}).clear()
        vars(keras.src.optimizers.base_optimizer).pop("__warningregistry__", None)


def other_filters_without_a_word(i):
    if i == 9:
        warnings.filters.insert(0, ("always", None, Warning, None, 0))


def no_filters_and_another_default(i):
    if i == 9:
        warnings.filters.clear()
        warnings.defaultaction = "always"


CHANGES = [nothing, forgotten_before_the_tenth_call, other_filters_without_a_word, no_filters_and_another_default,
           always_from_the_ninth_call, restored_before_each_fifth_call, an_error_in_the_tenth_call,
           reset_in_the_tenth_call]  # fmt: skip


def outcomes(make, decorate, change, first):
    """What each call gives, and which warnings it shows."""
    keras.utils.set_random_seed(1)
    shown: list[str] = []
    found = []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "defaultaction", warnings.defaultaction)
        warnings.simplefilter("ignore")
        step = decorate(make())
        warnings.resetwarnings()
        warnings.simplefilter(first)
        warnings.showwarning = lambda message, *_: shown.append(str(message)[:40])
        for i in range(CALLS):
            change(i)
            try:
                result = step(i)
            except UserWarning as error:
                result = type(error).__name__
            found.append(snapshot((result, list(shown))))
            del shown[:]
    return found, step


@pytest.mark.parametrize("first", ["default", "ignore", "always", "once"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [masked, without_gradients])
def test_warnings_are_shown_as_eagerly(make, change, first):
    expected, _ = outcomes(make, unchanged, change, first)
    with testing.always_follow():
        found, step = outcomes(make, coexec.function, change, first)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, rtol=1e-5, atol=1e-6, path=f"call {number}: ")
    assert step.stats().followed >= 12
    if change is nothing and first != "always":  # what warns is skipped, too: the layer, the optimizer
        assert step.stats().regions >= 3 * (CALLS - 6)


def test_what_an_unknown_size_is_warned_of():
    """On a path for any size, the text may have a size that was not shown yet."""
    dense = keras.layers.Dense(1)
    dense.build((None, 4))

    def step(x, y):
        return tf.reduce_sum(keras.losses.categorical_crossentropy(y, dense(x)))

    shown = []
    for decorate in (unchanged, coexec.function):
        followed = decorate(step)
        with testing.always_follow(), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            for n in (2, 3, 4, 5, 6, 5, 4, 7, 8, 9, 10, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 2, 21):
                followed(tf.ones([n, 4]), tf.ones([n, 1]))
        shown.append({str(each.message) for each in found})
    assert len(shown[0]) == 20
    assert shown[0] == shown[1]


def test_silence_ends_where_filters_change():
    silence = warning_filters.Silence()
    assert silence.holds()
    with warnings.catch_warnings():
        assert not silence.holds()
        inner = warning_filters.Silence()
        warnings.filterwarnings("ignore", "of something")
        assert not inner.holds()
    assert not silence.holds()
    assert warning_filters.Silence().holds()


def test_a_function_of_the_program_in_place_of_python_s(monkeypatch):
    assert warning_filters.is_known()
    monkeypatch.setattr(warnings, "_showwarnmsg", print)
    assert not warning_filters.is_known()
