"""Memoized calls at sizes that keep changing: skipped at new ones, unless the sizes of their arguments do not agree."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.coexec import run_both

WIDTH = 4


def batch(size, labels=None, dtype=np.int64):
    """Rows of numbers and as many labels, or of another number."""
    rng = np.random.default_rng(size)
    return rng.normal(size=(size, WIDTH)).astype(np.float32), rng.integers(0, WIDTH, size if labels is None else labels)


SIZES = np.random.default_rng(0).integers(20, 60, 50).tolist()

CALLS = {
    "cross entropy": lambda x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, x),
    "a loss of Keras": lambda x, y: keras.losses.sparse_categorical_crossentropy(y, x, from_logits=True),
    "one hot": lambda x, y: keras.losses.huber(tf.one_hot(y, WIDTH), x),
    "a shape alone": lambda x, y: x + tf.ones_like(y, tf.float32)[:, None],
    "a shape alone, in a function": lambda x, y: tf.nn.silu(x) + tf.ones_like(y, tf.float32)[:1],
    "a norm": lambda x, y: tf.nn.l2_normalize(x, 0) * tf.cast(y, tf.float32)[:, None],
    "moments": lambda x, y: tf.stack([*tf.nn.moments(x, 0), *tf.nn.moments(x * tf.cast(y, tf.float32)[:, None], 0)]),
    "rows repeated": lambda x, y: tf.repeat(x, 2, axis=0) + tf.cast(tf.repeat(y, 2), tf.float32)[:, None],
    "a size": lambda x, y: tf.nn.gelu(x) / tf.cast(tf.size(y), tf.float32),
    "what it was given": lambda x, y: (tf.identity(x), tf.nn.silu(x), tf.shape(y)),
}  # fmt: skip


def training(call, within):
    """Makes programs that train on what a call returns; `within`: whether the tensors are made in the step."""

    def make(decorate):
        weight = tf.Variable(tf.eye(WIDTH))

        @decorate
        def step(x, y):
            if within:
                x, y = tf.constant(x), tf.constant(y)
            with tf.GradientTape() as tape:
                found = call(tf.tanh(x @ weight), y)
                loss = tf.add_n([tf.reduce_mean(tf.cast(v, tf.float32)) for v in tf.nest.flatten(found)])
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss, found

        return step

    return make


@pytest.mark.parametrize("within", [False, True], ids=["given", "made"])
@pytest.mark.parametrize("name", CALLS)
def test_other_sizes(name, within):
    data = [batch(size) for size in SIZES]
    calls = data if within else [(tf.constant(x), tf.constant(y)) for x, y in data]
    run_both(training(CALLS[name], within), calls, jit_compile=False)


@pytest.mark.parametrize("within", [False, True], ids=["given", "made"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("labels", [1, 19])
def test_sizes_that_do_not_agree(name, within, labels):
    """They did, forty times: what is broadcast now, or fails, is so here, too."""
    data = [batch(size) for size in SIZES[:40]] + [batch(30, labels), batch(31), batch(1, labels), batch(41, 41)]
    calls = data if within else [(tf.constant(x), tf.constant(y)) for x, y in data]
    run_both(training(CALLS[name], within), calls, jit_compile=False)


@pytest.mark.parametrize("within", [False, True], ids=["given", "made"])
@pytest.mark.parametrize("name", ["cross entropy", "a loss of Keras"])
def test_calls_are_skipped_at_new_sizes(name, within):
    """With their gradients: once each has been proven, no size has to be learnt."""
    data = [batch(size) for size in range(20, 70)]
    calls = data if within else [(tf.constant(x), tf.constant(y)) for x, y in data]
    step = run_both(training(CALLS[name], within), calls, jit_compile=False)
    stats = step.stats()
    assert stats.regions >= 2 * 30, step.explain()
    assert stats.compiles <= 2, step.explain()


def reading(decorate):
    """Training on rows whose number differs, after as many reads as the data asks for: each ends a segment."""
    weight = tf.Variable(tf.eye(WIDTH))
    norm = keras.layers.LayerNormalization()
    norm.build((None, WIDTH))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])

    @decorate
    def step(x, y, reads):
        for _ in range(reads):
            x = x * (1.0 if float(tf.reduce_sum(x)) > 0 else 2.0)
        with tf.GradientTape() as tape:
            found = tf.nn.sparse_softmax_cross_entropy_with_logits(y, norm(x @ weight))
            loss = tf.reduce_mean(found) / x.shape[0]
        gradient = tape.gradient(loss, weight)
        optimizer.apply([tf.clip_by_norm(gradient, 1.0)], [weight])
        return loss

    return step


def test_what_comes_before_does_not_matter():
    """However many segments for any size have ended before a call, it is skipped at new sizes."""
    draw = np.random.default_rng(1)
    calls = [(*map(tf.constant, batch(int(size))), int(draw.integers(1, 4))) for size in draw.integers(20, 90, 60)]
    step = run_both(reading, calls, jit_compile=False)
    stats = step.stats()
    assert stats.regions > 5 * 35, step.explain()  # of five in each call


def test_sizes_on_a_tape_matter():
    """A gradient's tape has records of a segment of other sizes, whose operations follow from these."""

    def make(decorate):
        weight = tf.Variable(tf.eye(WIDTH))

        @decorate
        def step(x, y, several):
            with tf.GradientTape() as tape:
                x = tf.nn.silu(x @ weight)
                if float(tf.reduce_sum(x)) > 1e9:  # a read: what follows is another segment
                    return x
                y = tf.nn.l2_normalize(y, 0)
                rows = tf.reduce_mean(x, 0 if several else [0, 1])  # divides by a size of the first segment
                loss = tf.reduce_sum(y * rows)
            return tape.gradient(loss, weight), loss

        return step

    draw = np.random.default_rng(2)
    sizes = [(n, n) for n in range(20, 45)] + [(int(n), int(m)) for n, m in draw.integers(5, 60, (20, 2))]
    calls = [(tf.constant(batch(n)[0]), tf.constant(batch(m)[0]), True) for n, m in sizes]
    calls += [(tf.constant(batch(n)[0]), tf.constant(batch(m)[0]), False) for n, m in sizes]
    run_both(make, calls, jit_compile=False)


FIRST = {
    "a layer": lambda layer, x, y: layer(x),
    "two tensors": lambda layer, x, y: layer(x) + tf.reduce_sum(tf.nn.softmax(y), 1, keepdims=True),
    "a function of both": lambda layer, x, y: keras.losses.huber(x, y),
    "one that broadcasts": lambda layer, x, y: tf.nn.silu(x) + tf.nn.softmax(y)[:, :1],
    "one that takes a shape": lambda layer, x, y: tf.zeros_like(y) + layer(x),
    "in a list": lambda layer, x, y: tf.clip_by_global_norm([x, y], 1.0)[0],
    "what is not used": lambda layer, x, y: layer(x, training=False) if layer.name else tf.nn.silu(y),
    "a gradient": lambda layer, x, y: gradient_of(layer, x, y),
}  # fmt: skip


def gradient_of(layer, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(layer(x) ** 2) + tf.reduce_sum(tf.nn.l2_normalize(y, 0))
    return tape.gradient(loss, layer.trainable_variables)


def beginning(call):
    """Makes programs that begin with the call, twice in the step: behind a read, too."""

    def make(decorate):
        keras.utils.set_random_seed(1)
        layer = keras.layers.Dense(WIDTH, "tanh", name="head")
        layer.build((None, WIDTH))

        @decorate
        def step(x, y):
            first = call(layer, x, y)
            total = float(tf.add_n([tf.reduce_sum(v) for v in tf.nest.flatten(first)]))
            return first, total, call(layer, y, x)

        return step

    return make


@pytest.mark.parametrize("name", FIRST)
def test_calls_at_the_beginning(name):
    """Nothing tells yet that the segment is for any size: they are skipped at new ones all the same."""
    sizes = np.random.default_rng(4).permutation(range(20, 90)).tolist()
    calls = [(tf.constant(batch(n)[0]), tf.constant(batch(n)[0] * 2)) for n in sizes]
    step = run_both(beginning(FIRST[name]), calls, jit_compile=False)
    assert step.stats().regions > 2 * 40, step.explain()


@pytest.mark.parametrize("name", FIRST)
def test_sizes_at_the_beginning_that_do_not_agree(name):
    """Other numbers of rows than the other one's, none, one, other ranks, dtypes: once any size is skipped."""
    sizes = [(n, n) for n in np.random.default_rng(4).permutation(range(20, 60)).tolist()]
    sizes += [(5, 1), (1, 5), (1, 1), (0, 0), (0, 1), (7, 7), (8, 9), (9, 8), (12, 12), (1, 1), (33, 1), (77, 77)]
    calls = [(tf.constant(batch(n)[0]), tf.constant(batch(m)[0])) for n, m in sizes]
    wide = [tf.constant(np.ones(shape, np.float32)) for shape in ([6, WIDTH], [6, 2, WIDTH], [6, 1], [6], [2, 2])]
    calls += [(a, b) for a in wide for b in wide] + calls[20:24]
    calls += [(tf.cast(calls[3][0], tf.float64), tf.cast(calls[3][1], tf.float64)), calls[4]]
    run_both(beginning(FIRST[name]), calls, jit_compile=False)


def test_objects_and_masks_at_the_beginning():
    """Which layer is called, with which flag, on which mask, changes at each size."""

    def make(decorate):
        keras.utils.set_random_seed(1)
        kinds = keras.layers.BatchNormalization, keras.layers.LayerNormalization
        layers = [keras.layers.Dropout(0.5, seed=3), *(kind() for kind in kinds)]
        for layer in layers:
            layer.build((None, None, WIDTH))
        masking = keras.layers.Masking()

        @decorate
        def step(x, number, training):
            y = layers[number](x, training=training)
            return masking(y), float(tf.reduce_sum(y)), layers[0](masking(x)), [v.value for v in layers[1].variables]

        return step

    draw = np.random.default_rng(6)
    calls = []
    for size in draw.permutation(range(5, 80)).tolist():
        x = draw.normal(size=(3, size, WIDTH)).astype(np.float32)
        x[0, size // 2 :] = 0.0
        calls.append((tf.constant(x), int(draw.integers(3)), bool(draw.integers(2))))
    run_both(make, calls, jit_compile=False)
