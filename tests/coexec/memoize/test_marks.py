"""Marks: what Keras notes on tensors that a memoized call is given, and takes off them or puts on."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src import backend

import coexec
from coexec import testing
from tests.coexec import unchanged
from tests.snapshots import assert_same, snapshot

SIZES = [6, 6, 5, 6, 4, 6, 6, 5, 6, 4, 6, 6, 6, 6]
IDS = np.random.default_rng(0).integers(1, 9, (14, 3, 6))
IDS[:, 0, 4:] = 0


def mark(tensor):
    found = getattr(tensor, "_keras_mask", None)
    return "no mask" if found is None else tf.identity(found)


class Embedded(layers.Layer):
    """Its output has a mask, which it computes."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(9, 8, mask_zero=True)

    def compute_mask(self, *args, **kwargs):
        return self.embedding.compute_mask(*args, **kwargs)

    def call(self, x):
        return self.embedding(x) * 2.0


class Attending(layers.Layer):
    """Takes the mask off its input, deep inside."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)
        self.norm, self.plus = layers.LayerNormalization(), layers.Add()

    def call(self, x):
        return self.norm(self.plus([x, self.attention(query=x, value=x, key=x)]))


class Marking(layers.Layer):
    """Puts another mask on its input, and returns this."""

    def call(self, x):
        backend.set_keras_mask(x, tf.reduce_max(x, -1) > 0.5)
        return x


class Noting(layers.Layer):
    """Keeps something of each call: it is never memoized, but what it calls is."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)

    def call(self, x, memory):
        y, scores = self.attention(query=x, key=memory, value=memory, return_attention_scores=True)
        self.last = scores
        return y


def attention():
    embedded, attend = Embedded(), layers.MultiHeadAttention(2, 4)

    def step(ids, i):
        x = embedded(ids)
        return attend(x, x), mark(x), attend(x, x), mark(x)

    return step


def attention_inside_of_a_layer():
    embedded, attend = Embedded(), Attending()

    def step(ids, i):
        x = embedded(ids)
        y = attend(x)
        return y, mark(x), mark(y)

    return step


def attention_to_something_else():
    embedded, memory, attend, note = Embedded(), Embedded(), Attending(), Noting()

    def step(ids, i):
        x, context = embedded(ids), attend(memory(ids))
        before = mark(x), mark(context)
        return before, note(x, context), mark(x), mark(context), tf.reduce_mean(note(x, context))

    return step


def attention_in_a_helper():
    embedded, attend = Embedded(), layers.MultiHeadAttention(2, 4)

    @coexec.pure
    def attended(x):
        return attend(x, x) + x

    def step(ids, i):
        x = embedded(ids)
        return attended(x), mark(x), layers.GlobalAveragePooling1D()(x)

    return step


def attention_on_several_ways():
    embedded, attend, pool = Embedded(), layers.MultiHeadAttention(2, 4), layers.GlobalAveragePooling1D()

    def step(ids, i):
        x = embedded(ids)
        if i % 4 == 1:
            x = layers.Add()([x, tf.tanh(x)])
        if i % 3 == 1:
            x = layers.Add()([x, x])
        y = attend(x, x)
        return y, mark(x), mark(y), pool(x)

    return step


def a_mask_that_a_layer_puts_on():
    embedded, marking, pool = Embedded(), Marking(), layers.GlobalAveragePooling1D()

    def step(ids, i):
        x = embedded(ids)
        y = marking(x)
        return mark(x), y is x, pool(y), pool(x)

    return step


class Holding(layers.Layer):
    """Attends to a tensor of its own, on which the program may put a mask."""

    def __init__(self):
        super().__init__()
        self.attention, self.memory = layers.MultiHeadAttention(2, 4), tf.reshape(tf.range(96.0), [3, 4, 8]) / 50

    def call(self, x):
        return self.attention(x, self.memory)


def a_tensor_that_a_layer_holds(every=4):
    embedded, holding = Embedded(), Holding()

    def step(ids, i):
        if i % every == every - 1:
            holding.memory._keras_mask = tf.constant([[True, True, False, False]] * 3)
        return holding(embedded(ids)), mark(holding.memory)

    return step


def a_tensor_that_a_layer_holds_with_another_mask_each_time():
    return a_tensor_that_a_layer_holds(1)


def what_was_not_there():
    attend = layers.MultiHeadAttention(2, 4)

    def step(ids, i):
        x = tf.one_hot(ids % 8, 8) * 2.0
        y = attend(x, x)
        return y, hasattr(x, "_keras_mask"), hasattr(y, "_keras_mask"), attend(x, y), hasattr(y, "_keras_mask")

    return step


def a_gradient_through_it():
    embedded, attend, pool = Embedded(), Attending(), layers.GlobalAveragePooling1D()

    def step(ids, i):
        with tf.GradientTape() as tape:
            x = embedded(ids)
            loss = tf.reduce_sum(pool(attend(x)) * pool(x))
        return loss, tape.gradient(loss, attend.trainable_variables), mark(x)

    return step


PROGRAMS = [
    attention, attention_inside_of_a_layer, attention_to_something_else, attention_in_a_helper,
    attention_on_several_ways, a_mask_that_a_layer_puts_on, a_gradient_through_it, a_tensor_that_a_layer_holds,
    a_tensor_that_a_layer_holds_with_another_mask_each_time, what_was_not_there,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", PROGRAMS)
def test_the_arguments_of_a_skipped_call_are_marked_as_eagerly(make):
    steps = []
    for decorate in (unchanged, coexec.function):
        keras.utils.set_random_seed(3)
        step = make()
        step(tf.constant(IDS[0]), 0)  # builds the layers
        steps.append(decorate(step))
    eager, followed = steps
    with testing.always_follow():
        for i, size in enumerate(SIZES):
            ids = tf.constant(IDS[i, :, :size])
            wanted, found = snapshot(eager(ids, i)), snapshot(followed(ids, i))
            assert_same(wanted, found, rtol=1e-5, atol=1e-6, path=f"call {i}: ")
    stats = followed.stats()
    assert stats.followed >= 9
    assert stats.regions >= 10 or make.__name__.startswith("a_tensor_that_a_layer_holds")
