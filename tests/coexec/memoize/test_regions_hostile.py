"""Programs that are meant to fool regions: what they change, read, tape and share behind their backs.

Each program is run eagerly and decorated; values, gradients, Python effects, state and errors must be the same.
"""

import contextlib
import gc
import threading
import warnings
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import coexec
from coexec import testing
from tests.coexec import assert_quiet, holders, in_threads, outcomes, run_both, unchanged
from tests.snapshots import assert_same, snapshot

CALLS = 13  # enough for learning, confirming, jumping and running again
PROGRAMS = {}


def program(calls=CALLS, regions=1):
    """Registers `make(decorate)`, which returns a step that takes a number; `regions`: how many are jumped over."""

    def register(make):
        PROGRAMS[make.__name__] = pytest.param(make, calls, regions, id=make.__name__)
        return make

    return register


def fresh():
    """Brings both runs of a program to the same seeds and names."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)


def check(make, calls, **options):
    """Compares all calls of `make(decorate)` with eager's, and returns what was decorated."""
    decorated = []

    def decorate(function):
        decorated.append(coexec.function(function, **options))
        return decorated[-1]

    numbers = [(i,) for i in range(calls)]
    fresh()
    expected = outcomes(make(unchanged), numbers)
    fresh()
    found = outcomes(make(decorate), numbers)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, rtol=1e-4, atol=1e-5, path=f"call {number}: ")
    return decorated


def batch(i, features=4):
    numbers = np.random.default_rng(i)
    return tf.constant(numbers.normal(size=(6, features)), tf.float32), tf.constant(numbers.integers(3, size=6))


def mlp(*extra):
    return keras.Sequential([keras.Input((4,)), layers.Dense(8, activation="relu"), *extra, layers.Dense(3)])


def dense(units=3, features=4, **options):
    layer = layers.Dense(units, **options)
    layer(tf.ones([1, features]))
    return layer


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Trainer:
    """What most programs train: `step` is one plain training step."""

    def __init__(self, *extra, optimizer=None):
        self.model, self.objective = mlp(*extra), cross_entropy()
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.objective(y, self.model(x, training=True))
        return loss, tape.gradient(loss, self.model.trainable_variables)

    def apply(self, gradients):
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def step(self, i):
        loss, gradients = self.gradients(*batch(i))
        self.apply(gradients)
        return loss, self.model.variables, self.optimizer.variables


# Tapes that the call does not own.


@program()
def a_tape_around_some_calls(decorate):
    model = mlp()
    forward = decorate(lambda x: model(x))

    def step(i):
        x, _ = batch(i)
        if i < 8:
            return forward(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = forward(x)
        return out, tape.gradient(out, x)

    return step


@program()
def a_tape_around_calls_that_take_gradients(decorate):
    trainer = Trainer()
    inner = decorate(trainer.gradients)

    def step(i):
        x, y = batch(i)
        if i % 5 != 4:
            return inner(x, y)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss, gradients = inner(x, y)
            norm = tf.reduce_sum(gradients[0] ** 2)
        return loss, gradients, tape.gradient(norm, x)

    return step


@program()
def a_tape_of_an_earlier_call_goes_on(decorate):
    model, kept = mlp(), {}

    @decorate
    def step(i):
        x, _ = batch(i)
        first = model(x)
        if i % 2 == 0:
            kept["tape"] = tf.GradientTape(persistent=True)
        with kept["tape"] as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x) ** 2)
        return first, tape.gradient(loss, [x, *model.trainable_variables])

    return step


@program()
def a_forward_accumulator_behind_a_region(decorate):
    model = mlp()

    @decorate
    def step(i):
        x, _ = batch(i)
        first = model(x)
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
            out = tf.tanh(model(x))
        return first, forward.jvp(out)

    return step


@program()
def gradients_in_another_thread(decorate):
    trainer = Trainer()
    variables = trainer.model.trainable_variables

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            loss = trainer.objective(y, trainer.model(x))
        found = []
        thread = threading.Thread(target=lambda: found.append(tape.gradient(loss, variables)))
        thread.start()
        thread.join()
        return loss, found

    return step


@program(calls=20)
def gradients_of_tapes_from_outside(decorate):
    model, kernel = mlp(), dense(use_bias=False)
    fixed = batch(0)[0]

    @decorate
    def backward(tape, out, x):
        return model(x), tape.gradient(out, kernel.trainable_variables)

    def step(i):
        x, _ = batch(i)
        with tf.GradientTape() as tape:
            out = kernel(fixed if i < 14 else x)
        return backward(tape, out, x)

    return step


@program(calls=20)
def gradients_of_tapes_of_the_call_before(decorate):
    model, kept = mlp(), {}

    @decorate
    def step(i):
        x, _ = batch(i)
        out, gradient = model(x), None
        if kept:
            tape, target, source = kept["tape"]
            gradient = tape.gradient(target, source)
        with tf.GradientTape() as tape:
            tape.watch(x)
            target = -x if i < 14 else tf.identity(x)
        kept["tape"] = tape, target, x
        return out, gradient

    return step


@program()
def tapes_that_stop_watching_variables(decorate):
    trainer = Trainer()
    values = [v.value for v in trainer.model.trainable_variables]

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape(watch_accessed_variables=i % 12 < 9) as tape:
            tape.watch(values[0])
            loss = trainer.objective(y, trainer.model(x))
        return tape.gradient(loss, values), len(tape.watched_variables())

    return step


@program()
def a_tape_that_is_asked_outside(decorate):
    trainer = Trainer()

    @decorate
    def forward(x, y):
        with tf.GradientTape(persistent=True) as tape:
            out = trainer.model(x)
            loss = trainer.objective(y, out)
        return tape, out, loss

    def step(i):
        tape, out, loss = forward(*batch(i))
        if i % 2:
            with tape:
                loss = loss * 2.0
        variables = trainer.model.trainable_variables
        return tape.gradient(loss, variables), tape.gradient(out, variables), tape.gradient(loss, out)

    return step


# Tapes of the call.


@program()
def sources_and_targets_of_all_forms(decorate):
    model, objective = mlp(), cross_entropy()

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            hidden = model.layers[0](x)
            tape.watch(hidden)
            out = model.layers[1](hidden)
            loss, total = objective(y, out), tf.reduce_sum(hidden)
        values = [v.value for v in model.trainable_variables]
        nothing = tf.UnconnectedGradients.ZERO if i % 2 else tf.UnconnectedGradients.NONE
        return (
            tape.gradient(loss, {"x": x, "others": [hidden, (values[0], {"more": values[1]})]}),
            tape.gradient({"a": loss, "b": [total]}, (x,)),
            tape.gradient([loss, total], values),
            tape.gradient(total, values, unconnected_gradients=nothing),
            tape.gradient(out, hidden, output_gradients=tf.ones_like(out) * (1.0 if i < 9 else 2.0)),
        )

    return step


@program()
def sources_change_places(decorate):
    layer = dense()

    @decorate
    def step(i):
        x, z = batch(i)[0], batch(i + 99)[0]
        with tf.GradientTape() as tape:
            tape.watch([x, z])
            one, other = tf.reduce_sum(layer(x) ** 2), tf.reduce_sum(layer(z) ** 3)
        return tape.gradient([one, other] if i % 3 else [other, one], (x, z) if i % 4 < 2 else (z, x))

    return step


@program()
def two_players(decorate):
    """Two tapes over the same outputs, two optimizers."""
    generator = keras.Sequential([keras.Input((2,)), layers.Dense(4, activation="relu"), layers.Dense(4)])
    critic = keras.Sequential([keras.Input((4,)), layers.Dense(4, activation="tanh"), layers.Dense(1)])
    optimizers = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.02)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @decorate
    def step(i):
        real, _ = batch(i)
        with tf.GradientTape() as one, tf.GradientTape() as other:
            fake = generator(real[:, :2], training=True)
            said, lied = critic(real, training=True), critic(fake, training=True)
            losses = entropy(tf.ones_like(lied), lied), entropy(tf.ones_like(said), said) + tf.reduce_mean(lied)
        for tape, loss, model, optimizer in zip((one, other), losses, (generator, critic), optimizers, strict=True):
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return losses, generator.variables, critic.variables

    return step


@program()
def a_gradient_penalty(decorate):
    trainer = Trainer()
    model = trainer.model

    @decorate
    def step(i):
        x, _ = batch(i)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = model(x)
            norm = tf.norm(inner.gradient(out, [x])[0], axis=1)
            loss = tf.reduce_mean(out) + tf.reduce_mean((norm - 1.0) ** 2)
        trainer.apply(outer.gradient(loss, model.trainable_variables, unconnected_gradients="zero"))
        return loss, model.variables

    return step


@program()
def recording_stops_and_goes_on(decorate):
    model, objective = mlp(), cross_entropy()

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            hidden = model.layers[0](x)
            with tape.stop_recording():
                weights, extra = tf.nn.softmax(model(x)), model.layers[1](hidden)
            loss = objective(y, model.layers[1](hidden) * weights)
            with tape.stop_recording() if i % 3 == 0 else contextlib.nullcontext():
                loss = loss + tf.reduce_sum(extra)
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


@program(calls=12)
def one_tape_again_and_again(decorate):
    trainer = Trainer()
    model, objective = trainer.model, trainer.objective

    @decorate
    def step(i):
        x, y = batch(i)
        tape = tf.GradientTape(persistent=True)
        with tape:
            one = objective(y, model(x))
        first = tape.gradient(one, model.trainable_variables)
        with tape:
            other = objective(y, model(x * 2.0)) + one
        if i % 4 == 1:
            with tape:
                tape.reset()
        return first, tape.gradient(other, model.trainable_variables), len(tape.watched_variables())

    return step


@program()
def a_tape_opened_by_hand(decorate):
    trainer = Trainer()

    @decorate
    def step(i):
        x, y = batch(i)
        tape = tf.GradientTape()
        tape.__enter__()
        loss = trainer.objective(y, trainer.model(x))
        if i % 3:
            tape.__exit__(None, None, None)
        gradients = tape.gradient(loss, trainer.model.trainable_variables)
        return gradients, trainer.objective(y, trainer.model(x * 2.0))

    return step


@program()
def gradients_collected_and_filtered(decorate):
    """Gradients live in a list of the program's for some calls; those that are None are left out."""
    trainer, auxiliary, collected = Trainer(), dense(2, 3), []
    variables = [*trainer.model.trainable_variables, *auxiliary.trainable_variables]
    trainer.optimizer.build(variables)

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            out = trainer.model(x)
            loss = trainer.objective(y, out)
            if i % 3 == 0:
                loss = loss + tf.reduce_sum(auxiliary(out))
        collected.append(tape.gradient(loss, variables))
        if len(collected) == 2:
            sums = [[g for g in each if g is not None] for each in zip(*collected, strict=True)]
            trainer.optimizer.apply_gradients([(sum(g), v) for g, v in zip(sums, variables, strict=True) if g])
            collected.clear()
        return loss, variables

    return step


@program()
def results_escape_into_later_calls(decorate):
    model, objective, kept = mlp(), cross_entropy(), []

    @decorate
    def step(i):
        x, y = batch(i)
        before = list(kept)
        with tf.GradientTape() as tape:
            out = model(x)
            tape.watch(before)
            hidden = out
            for number, tensor in enumerate(before):
                hidden = hidden + tensor * (number + 1.0)
            loss = objective(y, hidden)
        kept[:] = [out, *kept[:1]]
        return loss, tape.gradient(loss, [*before, *model.trainable_variables])

    return step


@program(calls=12)
def generators_take_turns(decorate):
    trainer = Trainer()

    def training(i):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            out = trainer.model(x)
            yield out
            loss = trainer.objective(y, out)
        yield loss
        yield tape.gradient(loss, trainer.model.trainable_variables)

    @decorate
    def step(i):
        one, other = training(i), training(i + 100)
        found = list(zip(one, other, strict=True)) if i % 2 else list(zip(list(one), list(other), strict=True))
        trainer.apply(found[-1][1])
        return found

    return step


@program()
def errors_between_forward_and_backward(decorate):
    trainer = Trainer(layers.BatchNormalization())

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            loss = trainer.objective(y, trainer.model(x, training=True))
            if i in (8, 10):
                raise ValueError("between") if i == 8 else KeyboardInterrupt
        gradients = tape.gradient(loss, trainer.model.trainable_variables)
        if i == 12:
            raise KeyError("behind")
        trainer.apply(gradients)
        return loss, trainer.model.variables

    return step


@program()
def a_generator_diverges_inside_of_the_call(decorate):
    trainer, log = Trainer(), []

    @decorate
    def step(i):
        loss, gradients = trainer.gradients(*batch(i))
        log.append(float(loss))

        def pairs():
            if i == 12:
                log.append(tf.sinh(loss))
            yield from zip(gradients, trainer.model.trainable_variables, strict=True)

        trainer.optimizer.apply_gradients(pairs())
        return log[-2:], trainer.model.variables

    return step


# Arguments.


@program()
def one_tensor_at_two_places(decorate):
    multiply, other = layers.Multiply(), batch(1000)[0]

    @decorate
    def step(i):
        x, _ = batch(i)
        return multiply([x, (x if i < 8 else other) * 1.0])

    return step


@program(regions=0)
def training_as_a_tensor(decorate):
    dropout = layers.Dropout(0.5, seed=1)
    inner = decorate(lambda x, training: dropout(x, training=training))
    return lambda i: inner(batch(i)[0], tf.constant(i < 9))


@program()
def training_as_a_constant(decorate):
    model = mlp(layers.BatchNormalization())
    return decorate(lambda i: (model(batch(i)[0], training=tf.constant(i < 9)), model.variables))


@program(calls=30)
def constants_in_phases(decorate):
    """Small tensors stay the same for some calls, and then change: as inputs, indices, labels, weights."""
    layer, embedding, objective, mean = dense(), layers.Embedding(5, 3), cross_entropy(), keras.metrics.Mean()
    embedding(tf.constant([1]))

    @decorate
    def step(numbers):
        with tf.GradientTape() as tape:
            out = layer(tf.constant([[1.0, 2.0, 3.0, float(numbers[0])]]))
            found = embedding(numbers)
            loss = objective(numbers, found, sample_weight=numbers) + tf.reduce_sum(out)
        mean.update_state(numbers, sample_weight=[1.0, float(numbers[1])])
        return loss, tape.gradient(loss, [*layer.trainable_variables, *embedding.trainable_variables]), mean.result()

    phases = [[1, 2], [0, 2], [2, 2], [1, 2], [0, 1]]
    return lambda i: step(tf.constant(phases[i // 6]))


@program(calls=40)
def numbers_between_forward_and_backward(decorate):
    """Numbers that the program computes with, and that gradients depend on, change in phases of their own."""
    model, mean = mlp(), keras.metrics.Mean()

    @decorate
    def step(i):
        x, _ = batch(i)
        with tf.GradientTape(persistent=True) as tape:
            out = model(x)
            scaled = out * float(i // 5) + tf.constant(0.5 + i // 7)
            powers = tf.abs(out) ** (1.0 + i // 9) + tf.pow(tf.abs(out), tf.constant(2.0 + i // 11))
            rows = tf.gather(out, [0, i // 4 % 6]) * np.full((2, 3), i // 6, np.float32)
            losses = tf.reduce_sum(scaled), tf.reduce_sum(powers), tf.reduce_sum(rows), tf.reduce_sum(out[i // 8 :])
        mean.update_state(losses[0])
        if i < 15:
            return losses
        return losses, [tape.gradient(loss, model.trainable_variables) for loss in losses]

    return step


@program(calls=40)
def numbers_and_one_gradient(decorate):
    trainer, outside = Trainer(optimizer=keras.optimizers.SGD(0.001)), tf.constant([0, 1, 2, 3, 4, 5])

    @decorate
    def step(i, weights):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            out = trainer.model(x)
            picked = tf.gather(tf.gather(out, outside if i % 4 else outside[::-1]), weights)
            weighted = tf.sin(picked) * [[1.0, 2.0, float(i // 5)]]
            loss = trainer.objective(y, out * float(i // 3)) + tf.reduce_sum(weighted)
        trainer.apply(tape.gradient(loss, trainer.model.trainable_variables))
        return loss, trainer.model.variables

    return lambda i: step(i, tf.constant([0, i // 6 % 6]))


@program(calls=20)
def the_same_batch_and_then_others(decorate):
    trainer, first = Trainer(), batch(0)

    @decorate
    def step(i):
        loss, gradients = trainer.gradients(*(first if i < 9 else batch(i)))
        trainer.apply(gradients)
        return loss, trainer.model.variables

    return step


@program()
def arguments_of_other_kinds(decorate):
    """NumPy arrays, numbers, lists and variables as arguments."""
    model, objective, mean, layer = mlp(), cross_entropy(), keras.metrics.Mean(), dense()
    one, other, third = tf.Variable(tf.ones([2, 4])), tf.Variable(tf.zeros([2, 4])), keras.Variable(tf.ones([2, 4]))

    @decorate
    def step(i):
        x, y = batch(i)
        one.assign_add(tf.ones([2, 4]))
        mean.update_state([1, 2, 3] if i < 9 else [i, 2, 3], sample_weight=np.ones(3) * i)
        mean.update_state(float(i))
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(layer(one if i % 5 else other)) + tf.reduce_sum(layer(third))
        losses = objective(y.numpy(), model(x.numpy())), objective(y, model(x), sample_weight=[0.1 * max(i, 9)] * 6)
        return losses, mean.result(), tape.gradient(total, [one, other, third.value, layer.kernel.value])

    return step


@program(calls=16, regions=60)
def arrays_as_arguments(decorate):
    """NumPy arrays of several dtypes, changed in place, nested, refused; who sees them before they are tensors?"""
    seen, kept = [], np.zeros((6, 4), np.float32)

    class Seeing(keras.losses.Loss):
        def call(self, y_true, y_pred):
            seen.append((type(y_true).__name__, str(y_true.dtype)))
            return tf.reduce_mean((y_true - y_pred) ** 2, axis=-1)

    class Raw(layers.Layer):
        def __init__(self):
            super().__init__()
            self._convert_input_args = False
            self._allow_non_tensor_positional_args = True

        def call(self, x):
            seen.append(type(x).__name__)
            return tf.convert_to_tensor(x) * 2.0

    trainer, seeing, raw, rescaling = Trainer(), Seeing(), Raw(), layers.Rescaling(0.1)
    pair, lookup = layers.Concatenate(), layers.IntegerLookup(vocabulary=[1, 2])

    @decorate
    def step(i):
        x, y = (t.numpy() for t in batch(i))
        kept[:] = x
        with tf.GradientTape() as tape:
            out = trainer.model(kept)
            loss = trainer.objective(y, out) + trainer.objective(
                y.astype(np.uint8), trainer.model(x.astype(np.float64))
            )
        kept[:] = 7.0
        trainer.apply(tape.gradient(loss, trainer.model.trainable_variables))
        try:
            error = trainer.model(x.astype(object)) if i % 2 else trainer.model(x[:, :3])
        except Exception as raised:
            error = type(raised)
        others = (
            rescaling(y),
            rescaling(x > 0),
            pair([x, {0: x}[0]]),
            raw(x),
            lookup(y),
            seeing(x.astype(np.float64), x),
        )
        return loss, error, others, list(seen), trainer.model.variables

    return step


@program()
def models_with_dicts(decorate):
    one, other, shared = keras.Input((4,), name="one"), keras.Input((4,), name="other"), layers.Dense(3)
    outputs = {"sum": shared(one) + shared(other), "list": [shared(one), layers.Concatenate()([one, other])]}
    model = keras.Model({"one": one, "other": other}, outputs)

    @decorate
    def step(i):
        x, z = batch(i)[0], batch(i + 50)[0]
        with tf.GradientTape() as tape:
            out = model({"one": x, "other": z} if i % 4 else {"other": x, "one": z})
            loss = tf.reduce_sum(out["sum"] ** 2)
        out["mine"] = i
        out["list"].append(i)
        return out, list(out), tape.gradient(loss, model.trainable_variables)

    return step


@program()
def strings_and_tables(decorate):
    lookup = layers.StringLookup(vocabulary=["a", "b", "c"])
    words = layers.TextVectorization(vocabulary=["the", "cat"], output_sequence_length=4)
    normal = layers.Normalization()
    normal.adapt(np.arange(8.0).reshape(2, 4))

    @decorate
    def step(i):
        if i == 8:
            lookup.set_vocabulary(["c", "d", "a"])
        if i == 10:
            words.set_vocabulary(["dog", "the"])
        return (
            lookup(tf.constant(["a", "b", "other", "c"][: 2 + i % 3])),
            words(tf.constant(["the cat", f"the dog {i}"])),
            normal(batch(i)[0]),
        )

    def outer(i):
        if i == 9:
            normal.adapt(np.arange(8.0).reshape(2, 4) * 3.0)
        return step(i)

    return outer


@program()
def random_images(decorate):
    model = keras.Sequential([layers.RandomFlip(seed=1), layers.RandomTranslation(0.2, 0.2, seed=2)])

    @decorate
    def step(i):
        images = tf.random.stateless_uniform([2, 4, 4, 3], [i, 1])
        return model(images, training=True), model(images, training=False), keras.random.uniform([2])

    return step


@program()
def attention_with_flags(decorate):
    attention = layers.MultiHeadAttention(2, 3, dropout=0.1, seed=2)

    @decorate
    def step(i):
        x = tf.random.stateless_uniform([2, 5, 4], [i, 1])
        mask = tf.ones([5, 5], tf.bool) if i % 2 else None
        with tf.GradientTape() as tape:
            out, scores = attention(x, x, return_attention_scores=True, use_causal_mask=i % 4 > 1, attention_mask=mask)
            loss = tf.reduce_sum(out) + tf.reduce_sum(attention(x, x[:, :3], training=True))
        return out, scores, tape.gradient(loss, attention.trainable_variables)

    return step


@program()
def tensors_that_carry_masks_and_logits(decorate):
    """Keras notes masks and logits on tensors; the program may take them off, or put on others."""
    embedding, add, pool = layers.Embedding(5, 4, mask_zero=True), layers.Add(), layers.GlobalAveragePooling1D()
    gate, entropy = dense(4, activation="sigmoid"), keras.losses.BinaryCrossentropy()

    @decorate
    def step(i):
        tokens = tf.constant([[1, 2, 0], [3, i % 3, 0]])
        with tf.GradientTape() as tape:
            hidden = embedding(tokens)
            both = add([hidden, hidden * 2.0])
            if i % 5 == 4:
                hidden._keras_mask = tf.logical_not(hidden._keras_mask)
            pooled = pool(hidden), pool(both)
            opened = gate(pooled[0])
            if i in (6, 9, 12):
                del opened._keras_logits
            chances = tf.sigmoid(pooled[1])
            loss = entropy(tf.ones_like(opened), opened) + entropy(tf.ones_like(chances), chances)
        marks = [getattr(t, "_keras_mask", None) for t in (hidden, both, *pooled)], getattr(opened, "_keras_logits", 0)
        return loss, marks, tape.gradient(loss, [*embedding.trainable_variables, *gate.trainable_variables])

    return step


# Writes.


@program()
def losses_added_to_a_model(decorate):
    model = mlp()

    @decorate
    def step(i):
        out = model(batch(i)[0])
        if i >= 9:
            model.add_loss(tf.reduce_mean(out))
        return out, model.losses

    return step


@program()
def warnings_of_the_library(decorate):
    trainer, lonely = Trainer(), keras.Variable(1.0)
    variables = [*trainer.model.trainable_variables, lonely]
    trainer.optimizer.build(variables)

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            loss = trainer.objective(y, trainer.model(x))
        gradients = tape.gradient(loss, variables)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always" if i < 12 else "error")
            trainer.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss, [str(warning.message) for warning in seen]

    return step


@program()
def a_learning_rate_from_a_list(decorate):
    rates = [0.5] * 20 + [0.1] * 8
    trainer = Trainer(optimizer=keras.optimizers.SGD(rates.pop))
    step = decorate(trainer.step)
    return lambda i: (step(i), len(rates))


@program()
def writes_past_the_class(decorate):
    layer, other, third = dense(), dense(), dense()

    class Halved(layers.Dense):
        def call(self, inputs, training=None):
            return super().call(inputs, training) * 0.5

    @decorate
    def step(i):
        if i == 12:
            vars(layer)["activation"] = tf.tanh
            object.__setattr__(other, "activation", tf.tanh)
            third.__class__ = Halved
        return layer(batch(i)[0]), other(batch(i)[0]), third(batch(i)[0])

    return step


@program()
def a_patched_library(decorate):
    model = mlp()

    @decorate
    def step(i):
        patch = mock.patch.object(layers.Dense, "call", lambda self, x, training=None: x[:, :3] * 2.0)
        with patch if i >= 12 else contextlib.nullcontext():
            return model(batch(i)[0])

    return step


@program(calls=24)
def models_are_rebuilt(decorate):
    model = mlp(layers.Dense(8))

    @decorate
    def step(i):
        if i == 8:
            model.pop()
        if i == 10:
            model.add(layers.Dense(2))
        if i == 13:
            model.layers[1]._kernel = keras.Variable(tf.ones([8, 8]))
        if i == 15:
            model.layers[0].trainable = False
        if i == 17:
            model.layers[1].kernel.trainable = False
        if i == 19:
            model.trainable = i == 20
        if i == 21:
            model.layers[1].bias = None
            model.layers[1].use_bias = False
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch(i)[0]) ** 2)
        variables = model.trainable_variables
        return loss, len(variables), tape.gradient(loss, variables)

    return step


@program(calls=18)
def parts_of_layers_change(decorate):
    """Momentum, rates, seeds, constraints, regularizers, schedules: objects inside of objects."""
    normal, dropout = layers.BatchNormalization(), layers.Dropout(0.5, seed=2)
    middle = layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.1), kernel_constraint="max_norm")
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    trainer = Trainer(normal, dropout, middle, optimizer=keras.optimizers.SGD(schedule))

    @decorate
    def step(i):
        x, y = batch(i)
        if i == 6:
            normal.momentum, middle.kernel_regularizer.l2 = 0.1, 0.9
        if i == 9:
            dropout.rate, middle.kernel_constraint.max_value = 0.1, 0.3
        if i == 12:
            schedule.decay_rate = 0.9
            dropout.seed_generator.state.assign([5, 6])
        if i == 15:
            trainer.optimizer._learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.2])
            trainer.optimizer.iterations.assign(0)
        with tf.GradientTape() as tape:
            loss = trainer.objective(y, trainer.model(x, training=True)) + sum(trainer.model.losses)
        trainer.apply(tape.gradient(loss, trainer.model.trainable_variables))
        return loss, trainer.model.variables

    return step


@program(calls=20)
def losses_and_metrics_change(decorate):
    entropy, focal = keras.losses.BinaryCrossentropy(), keras.losses.CategoricalFocalCrossentropy()
    accuracy = keras.metrics.BinaryAccuracy(threshold=0.5)

    @decorate
    def step(i):
        x, _ = batch(i)
        if i == 8:
            entropy.label_smoothing = 0.5
            entropy.reduction = "sum"
        if i == 10:
            focal.gamma = 5.0
            accuracy.threshold = 0.9
        if i % 6 == 5:
            accuracy.reset_state()
        chances = tf.sigmoid(x)
        accuracy.update_state(tf.round(chances), chances)
        return entropy(tf.ones_like(x), chances), focal(tf.nn.softmax(x), chances), accuracy.result()

    return step


@program(calls=20)
def settings_change(decorate):
    model, objective, entropy = mlp(), cross_entropy(), keras.losses.BinaryCrossentropy()

    @decorate
    def step(i):
        x, y = batch(i)
        return objective(y, model(x)), entropy(tf.ones_like(x), tf.sigmoid(x * 10.0))

    def outer(i):
        if i == 14:
            keras.utils.clear_session(free_memory=False)
        if i == 16:
            keras.config.set_dtype_policy("mixed_bfloat16")
        epsilon = keras.config.epsilon()
        keras.config.set_epsilon(1e-7 if i < 10 else 1e-1)
        try:
            return step(i)
        finally:
            keras.config.set_epsilon(epsilon)
            if i == 19:
                keras.config.set_dtype_policy("float32")

    return outer


# Code and objects of the program's.


@program(calls=20)
def classes_of_the_user(decorate):
    """Models, losses, metrics, optimizers and schedules with Python of their own, on every call."""
    seen = []

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.calls = layers.Dense(4), layers.Dense(3), 0

        def call(self, inputs, training=None):
            self.calls += 1
            seen.append(training)
            hidden = self.one(inputs)
            return self.other(hidden * 2.0 if self.calls % 7 == 6 else hidden)

    class Loss(keras.losses.Loss):
        def call(self, y_true, y_pred):
            seen.append("loss")
            return tf.reduce_mean((y_pred - tf.cast(y_true, y_pred.dtype)[:, None]) ** 2) * (1.0 + len(seen) % 2)

    class Metric(keras.metrics.Mean):
        def update_state(self, values, sample_weight=None):
            seen.append("update")
            return super().update_state(values)

    class Optimizer(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            seen.append("step")
            super().update_step(gradient, variable, learning_rate)

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        calls = 0

        def __call__(self, step):
            self.calls += 1
            return 0.1 / self.calls

    model, objective, metric, optimizer = Model(), Loss(), Metric(), Optimizer(Schedule())

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            loss = objective(y, model(x))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        metric.update_state(loss)
        return loss, metric.result(), model.calls, list(seen), model.variables

    return step


@program()
def a_decorated_method(decorate):
    class Counting(Trainer):
        calls = 0

        def count(self, i):
            self.calls += 1
            return self.step(i), self.calls

    Counting.count = decorate(Counting.count)
    one, other = Counting(), Counting()
    return lambda i: (one.count(i), other.count(i + 1))


@program()
def objects_made_in_the_call(decorate):
    model = mlp()

    @decorate
    def step(i):
        x, y = batch(i)
        objective = keras.losses.SparseCategoricalCrossentropy(from_logits=i % 6 != 5)
        mean = keras.metrics.Mean(name="mean")
        mean.update_state(x)
        with tf.GradientTape() as tape:
            loss = objective(y, model(x))
        return loss, tape.gradient(loss, model.trainable_variables), mean.result()

    return step


@program(calls=24)
def clones_replace_the_model(decorate):
    kept, objective = {"model": mlp()}, cross_entropy()

    @decorate
    def step(i):
        x, y = batch(i)
        if i % 7 == 6:
            before = kept["model"].get_weights()
            kept["model"] = keras.models.clone_model(kept["model"])
            kept["model"].set_weights([w * 0.9 for w in before])
            gc.collect()
        with tf.GradientTape() as tape:
            loss = objective(y, kept["model"](x))
        return loss, tape.gradient(loss, kept["model"].trainable_variables)

    return step


@program(calls=12)
def one_region_twice_in_a_step(decorate):
    model, objective = mlp(layers.Dropout(0.5, seed=2), layers.BatchNormalization()), cross_entropy()

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            one, other = model(x, training=True), model(x if i % 4 else x * 2.0, training=True)
            loss = objective(y, one) + objective(y, other) + objective(y, one)
        return one, other, tape.gradient(loss, model.trainable_variables), model.variables

    return step


@program()
def models_on_other_threads(decorate):
    model = mlp(layers.BatchNormalization())

    @decorate
    def step(i):
        x, _ = batch(i)
        out, found = model(x, training=True), []
        thread = threading.Thread(target=lambda: found.append(model(x, training=True)))
        thread.start()
        thread.join()
        return out, found, model(x), model.variables

    return step


@program(regions=0)
def state_kept_outside_of_the_model(decorate):
    """Tensors that are watched stand in for variables, and are reached through objects that turn into tensors."""
    trainer = Trainer(layers.BatchNormalization())
    state = {"trained": [v.value + 0.0 for v in trainer.model.trainable_variables]}
    state["others"] = [v.value + 0.0 for v in trainer.model.non_trainable_variables]

    @decorate
    def step(i):
        x, y = batch(i)
        with tf.GradientTape() as tape:
            tape.watch(state["trained"])
            out, state["others"] = trainer.model.stateless_call(state["trained"], state["others"], x, training=True)
            loss = trainer.objective(y, out)
        gradients = tape.gradient(loss, state["trained"])
        state["trained"] = [v - 0.1 * g for v, g in zip(state["trained"], gradients, strict=True)]
        return loss, state

    return step


@program(calls=12, regions=20)
def a_scope_without_state_in_each_call(decorate):
    """What Keras keeps of its end, a list of variables to initialize, is another object each time."""
    trainer = Trainer(layers.Dense(3))

    @decorate
    def step(i):
        with keras.StatelessScope():
            kept = len(trainer.model.variables)
        return trainer.step(i), trainer.model(batch(i)[0]), kept

    return step


@program(calls=12)
def methods_of_a_compiled_model(decorate):
    model = mlp(layers.BatchNormalization(), layers.Dropout(0.3, seed=3))
    model.compile("adam", cross_entropy(), metrics=["accuracy"], run_eagerly=True)

    @decorate
    def step(i):
        x, y = batch(i)
        if i % 5 == 4:
            model.reset_metrics()
        return model.train_step((x, y)), model.train_on_batch(x, y), model.test_on_batch(x, y), model.variables

    return step


@pytest.mark.parametrize(("make", "calls", "regions"), PROGRAMS.values())
def test_programs(make, calls, regions):
    """A hostile program does what it does in eager, and library calls were jumped over meanwhile."""
    before = holders()
    decorated = check(make, calls)
    assert [f.explain() for f in decorated if f.stats().regions < regions] == []
    del decorated  # and what it has returned, if the program has kept it
    assert_quiet(before)


@pytest.mark.parametrize("jit_compile", [True, False])
@pytest.mark.parametrize("make", [a_gradient_penalty, recording_stops_and_goes_on])
def test_programs_compiled_early(make, jit_compile):
    """The same with every segment compiled at its second visit, by XLA and as a graph."""
    with testing.compile_everything():
        check(make, 9, jit_compile=jit_compile)


def test_divergence_at_every_place():
    """A call may leave the known path at any operation, whatever it jumped over before."""
    outcome = []
    for decorate in (unchanged, coexec.function):
        fresh()
        trainer = Trainer(layers.BatchNormalization(), layers.Dropout(0.3, seed=2))
        step = decorate(trainer.step)
        for i in range(8):
            step(i)
        found = []
        for event in range(0, 170, 9):
            with testing.diverge_at(event):
                found.append(snapshot(step(event)))
            found.append(snapshot(step(event + 1)))
        outcome.append(found)
    for number, (one, other) in enumerate(zip(*outcome, strict=True)):
        assert_same(one, other, rtol=1e-3, atol=1e-4, path=f"call {number}: ")
    assert step.stats().diverged > 5
    assert step.stats().regions > 20


def test_threads_that_train_and_write():
    """Threads share a function; each trains a model of its own, and writes to it, beside the others."""

    def train(model, objective, optimizer, x, y):
        with tf.GradientTape() as tape:
            loss = objective(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    step = coexec.function(train)

    def work(number):
        fresh()
        pairs = [(function, Trainer(layers.BatchNormalization())) for function in (train, step)]
        pairs[1][1].model.set_weights(pairs[0][1].model.get_weights())

        def run():
            for i in range(14):
                found = []
                for function, trainer in pairs:
                    model, optimizer = trainer.model, trainer.optimizer
                    if i % 6 == 5:
                        optimizer.learning_rate = 0.1 / i
                        model.layers[0].trainable = not model.layers[0].trainable
                    loss = function(model, trainer.objective, optimizer, *batch(i + number))
                    found.append(snapshot((loss, [v.numpy() for v in model.variables])))
                assert_same(*found, rtol=1e-3, atol=1e-4, path=f"thread {number}, call {i}: ")

        return run

    in_threads(*[work(number) for number in range(3)])
    assert step.stats().regions > 0


def test_objects_at_the_addresses_of_others():
    """Losses come and go in a loop; what is new at an old address is not taken for the old."""
    model = mlp()

    def backward(objective, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = objective(y, model(x))
        return loss, tape.gradient(loss, [x])

    step, seen, met = coexec.function(backward), set(), 0
    for number in range(18):
        objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=[None, 1, 2][number % 3])
        met += id(objective) in seen
        seen.add(id(objective))
        for i in range(3):
            expected = snapshot(backward(objective, *batch(i)))
            assert_same(expected, snapshot(step(objective, *batch(i))), rtol=1e-4, atol=1e-5)
        del objective
    assert met > 0
    assert step.stats().regions > 10


def test_variables_of_models_are_freed():
    """Where gradients are taken with respect to inputs, too."""

    @coexec.function
    def step(model, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(model(x))
        return tape.gradient(total, x)

    references = []
    for _ in range(4):
        model = mlp()
        for i in range(8):
            step(model, batch(i)[0])
        references += [weakref.ref(v.value) for v in model.variables]
        del model
        gc.collect()
    assert sum(reference() is not None for reference in references) <= len(references) // 4  # the last one's, at most


def test_collecting_garbage_is_no_part_of_a_call():
    """Libraries hang Python on the garbage collector, as JAX does; it may come in the middle of a call."""
    model, thresholds = mlp(), gc.get_threshold()
    step = coexec.function(lambda x: model(x))
    seen = []

    def callback(phase, info):
        seen.append(phase)

    gc.callbacks.append(callback)
    gc.set_threshold(5)
    try:
        for i in range(8):
            step(batch(i)[0])
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)
    assert seen
    assert step.stats().regions > 0


def test_nothing_grows():
    """Calls that are jumped over leave no objects behind, though a fresh loss and a write come with each."""
    fresh()
    trainer, inputs = Trainer(), [batch(i) for i in range(4)]

    @coexec.function(jit_compile=False)  # XLA's executable would come in between
    def step(i):
        trainer.objective = cross_entropy()
        trainer.optimizer.learning_rate = 0.1 / (i + 1)
        loss, gradients = trainer.gradients(*inputs[i % 4])
        trainer.apply(gradients)
        return loss

    counts = []
    for i in range(400):
        step(i)
        if i in (150, 399):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 4 * 249  # of these, Keras itself keeps about three for each loss's name
    assert step.stats().regions > 500


class Inheriting(keras.layers.Layer):
    """Its layers are not told whether they train: each takes itself for what the one before was told."""

    def __init__(self, log):
        super().__init__()
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.5, seed=4)
        self.dense = keras.layers.Dense(3, kernel_initializer="ones")
        self.log = log

    def call(self, x, how=None):
        self.log.append(how)
        x = self.dense(x)
        y = self.norm(x) if how is None else self.norm(x, training=how)
        return self.drop(self.dense(y))


def test_what_layers_leave_for_those_behind_them():
    """Keras notes, for the layers that follow, what one was told of training: also where it was jumped over."""

    def make(decorate):
        keras.utils.set_random_seed(5)
        log = []
        layer = Inheriting(log)

        @decorate
        def step(x, how):
            y = layer(x, how=how)
            return y, tf.identity(layer.norm.moving_mean), list(log)

        return step

    x = tf.constant(np.random.default_rng(0).normal(size=(8, 3)), tf.float32)
    ways = [None] * 6 + [True] * 6 + [False] * 5 + [True, None, False] * 4
    fn = run_both(make, [(x, how) for how in ways])
    assert fn.stats().regions > 60, fn.explain()


def test_a_loop_of_cells_is_known_at_once():
    """A cell called ten times in a `call` of the user's: its gradient is followed as one after a few steps."""

    class Recurrent(keras.Model):
        def __init__(self):
            super().__init__()
            self.cell, self.head = keras.layers.LSTMCell(4), keras.layers.Dense(1)

        def call(self, x):
            state = [tf.zeros((5, 4)), tf.zeros((5, 4))]
            for time in range(10):
                turns.append(time)  # so that it is run on every call
                hidden, state = self.cell(x[:, time], state)
            return self.head(hidden)

    turns = []

    def make(decorate):
        keras.utils.set_random_seed(5)
        model, optimizer = Recurrent(), keras.optimizers.SGD(0.1)

        @decorate
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )
            return loss

        return step

    numbers = np.random.default_rng(0)
    calls = [(tf.constant(numbers.normal(size=(5, 10, 2)), tf.float32), tf.ones((5, 1))) for _ in range(12)]
    fn = run_both(make, calls)
    regions = fn.stats().regions
    fn(*calls[0])
    assert fn.stats().regions - regions >= 13, fn.explain()  # the cells, the head, the gradient, the optimizer
    assert len(_outputs_of(fn)) == 1
    assert max(_outputs_of(fn)) <= 3


def _outputs_of(function):
    """How many tensors each executable of a function gives out."""
    return [len(e.outputs) for e in function._controller.segments._executables.values()]


FACTORS = tf.constant([0.25, -0.75, 1.25])


def operator(x):
    return tf.sin(x) * FACTORS


def operator_of_a_number(x):
    return (x + 1.0) * FACTORS


def matrix_product(x):
    return x[None] @ FACTORS[:, None]


def function(x):
    return tf.multiply(tf.sin(x), FACTORS)


@pytest.mark.parametrize("issued", [operator, operator_of_a_number, matrix_product, function])
def test_an_operation_that_fails_in_a_pure_function_raises_its_own_error(issued):
    made = []

    def make(decorate):
        pure = coexec.pure(issued)

        @decorate
        def step(x):
            try:
                return pure(x + 1.0)
            except Exception as error:
                return type(error).__name__, str(error)

        made.append(step)
        return step

    run_both(make, [(tf.ones([size]),) for size in (3, 4, 3, 4, 4, 3, 3)])
    assert "failed" not in made[1].explain()
