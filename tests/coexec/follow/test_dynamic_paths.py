"""Dynamic paths: programs whose sizes are new in each call are followed at any size, with eager's values and shapes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.testing import compile_everything
from tests.coexec import outcomes, run_both, unchanged
from tests.snapshots import assert_same
from tracer.check import check

RNG = np.random.default_rng(5)
SIZES = [7, 12, 5, 23, 9, 31, 4, 17, 40, 6, 13, 28, 3, 19, 8, 50, 2, 11, 33, 14, 21, 10, 64, 15]
ODD = [0, 1, 7, 2, 1, 16, 0, 5, 3, 1, 100, 2]  # at 0 and 1, broadcasting, or TensorFlow's Python, does something else


def rows(n, width=6):
    """Returns `n` rows of random numbers."""
    return tf.constant(np.random.default_rng(n).normal(size=[n, width]).astype(np.float32))


W = tf.constant(RNG.normal(size=[6, 6]).astype(np.float32))
B = tf.constant(RNG.normal(size=[6]).astype(np.float32))
HALF = tf.constant(RNG.normal(size=[12, 6]).astype(np.float32))


def picked(x, count=None, below=6):
    """Returns a list of integers that depend on rows, as many as these."""
    count = len(x) if count is None else count
    return np.random.default_rng(abs(int(np.sum(x) * 100.0))).integers(0, below, size=count).tolist()


# Of rows `x` and a variable `w`, which has gradients, too.
BODIES = {
    "dense": lambda x, w: tf.nn.relu(x @ w + B) @ W,
    "attention": lambda x, w: tf.nn.softmax((x @ w) @ tf.transpose(x) / 6.0**0.5) @ x,
    "means": lambda x, w: (x @ w) - tf.reduce_mean(x, 0) + tf.reduce_mean(x @ w) + tf.math.reduce_std(x @ w, 0),
    "reshapes": lambda x, w: tf.reshape(tf.reshape(x @ w, [-1]), [x.shape[0], 6]),
    "by -1": lambda x, w: tf.reshape(tf.reshape(x @ w, [x.shape[0] * 2, 3]), [-1, 6]),
    "shape operations": lambda x, w: tf.reshape(x @ w, tf.concat([tf.shape(x)[:1], [2, 3]], 0)),
    "numbers from sizes": lambda x, w: (x @ w) / x.shape[0] * float(x.shape[0]) ** 0.5 + len(x),
    "made at that size": lambda x, w: (x @ w) + tf.ones([x.shape[0], 1]) - tf.zeros_like(x) + tf.fill([len(x), 6], 2.0),
    "eye": lambda x, w: tf.eye(x.shape[0]) @ (x @ w),
    "range": lambda x, w: (x @ w) * tf.cast(tf.range(x.shape[0]), tf.float32)[:, None],
    "one hot": lambda x, w: tf.one_hot(tf.range(x.shape[0]) % 4, 4) @ (x @ w)[:4] if x.shape[0] >= 4 else x @ w,
    "concatenated": lambda x, w: tf.concat([x @ w, HALF, x], 0),
    "twice as long": lambda x, w: tf.repeat(x @ w, 2, 0) * tf.tile(x, [2, 1]),
    "stacked": lambda x, w: tf.reduce_sum(tf.stack([x @ w, x, x * 2.0]), 0),
    "padded": lambda x, w: tf.pad(x @ w, [[0, 70 - x.shape[0]], [1, 0]])[:, :6] if x.shape[0] < 70 else x @ w,
    "padded by one": lambda x, w: tf.pad(x @ w, [[1, 1], [0, 0]]),
    "slices": lambda x, w: (x @ w)[1:] - (x @ w)[:-1] if x.shape[0] > 1 else x @ w,
    "the first ten": lambda x, w: (x @ w)[:10] * 2.0,
    "the first forty": lambda x, w: (x @ w)[:40] * 2.0,
    "the last thirty": lambda x, w: tf.reduce_mean((x @ w)[-30:], 0) * tf.ones([min(x.shape[0], 30), 6]),
    "the last three": lambda x, w: (x @ w)[-3:],
    "every other": lambda x, w: (x @ w)[::2],
    "half": lambda x, w: (x @ w)[: x.shape[0] // 2],
    "by column": lambda x, w: tf.concat(tf.split(x @ w, 3, 1), 0),
    "unstacked columns": lambda x, w: tf.add_n(tf.unstack(x @ w, axis=1)),
    "gathered": lambda x, w: tf.gather(x @ w, tf.range(x.shape[0])[::-1]),
    "sorted": lambda x, w: tf.sort(x @ w, 0),
    "cumulative": lambda x, w: tf.cumsum(x @ w) + tf.math.cumprod(tf.tanh(x @ w), reverse=True),
    "broadcast": lambda x, w: (x @ w)[:, None, :] - x[None, :, :],
    "distances": lambda x, w: tf.reduce_sum(((x @ w)[:, None] - x[None]) ** 2, -1),
    "einsum": lambda x, w: tf.einsum("ni,mi,ij->nmj", x, x @ w, W),
    "normalised": lambda x, w: tf.nn.l2_normalize(x @ w, 1) + keras.ops.layer_normalization(x),
    "pooled": lambda x, w: tf.nn.max_pool1d((x @ w)[None], 2, 2, "SAME")[0],
    # Of no rows, TensorFlow's gradient for the filter is whatever was in memory.
    "convolved": lambda x, w: tf.nn.conv1d((x @ w)[None], tf.stack([w, w * 0.5, W]), 1, "SAME")[0] if len(x) else x @ w,
    "strided": lambda x, w: tf.nn.conv1d((x @ w)[None], tf.stack([w, W]), 2, "VALID")[0] if x.shape[0] > 1 else x @ w,
    "branch": lambda x, w: tf.tanh(x @ w) if x.shape[0] % 2 else tf.sin(x @ w) * 2.0,
    "loop": lambda x, w: [x := tf.tanh(x @ w) for _ in range(x.shape[0] % 3 + 1)][-1],
    "clamped": lambda x, w: (x @ w) * float(min(x.shape[0], 16)),
    "matrices": lambda x, w: tf.linalg.matmul(x, x @ w, transpose_a=True),
    "segments": lambda x, w: tf.math.unsorted_segment_sum(x @ w, tf.range(x.shape[0]) % 3, 3),
    "losses": lambda x, w: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x), x @ w),
    "variances": lambda x, w: tf.nn.moments(x @ w, [0])[1] + tf.math.reduce_variance(x @ w),
    "labels in a list": lambda x, w: tf.one_hot(picked(x), 6) * tf.nn.log_softmax(x @ w),
    "weights in a list": lambda x, w: (x @ w) * [[float(i)] for i in picked(x)] if len(x) else x @ w,
    "rows in a list": lambda x, w: tf.gather(x @ w, picked(x, len(x) // 2 + 1, max(len(x), 1))) if len(x) else x @ w,
    "indices counted up": lambda x, w: tf.gather(x @ w, list(range(len(x)))[::-1]) if len(x) else x @ w,
    "a loss of a list": lambda x, w: keras.losses.sparse_categorical_crossentropy(
        tf.constant(picked(x), tf.int32), x @ w, from_logits=True),
    "a list for a shape": lambda x, w: tf.reshape(x @ w, [*([1] * (len(x) % 3)), len(x), 6]),
    "a list of axes": lambda x, w: tf.reduce_sum(x @ w, list(range(1 + len(x) % 2))),
    "norms": lambda x, w: tf.linalg.norm(x @ w, axis=0) + tf.reduce_max(x @ w, 0) if x.shape[0] else x @ w,
}  # fmt: skip


# What is clamped or divided, of other ranks, or made of a range of known numbers: a path for each size.
EXACT = {
    "a list for a shape", "eye", "every other", "gathered", "half", "one hot", "padded", "pooled", "range", "segments",
    "strided", "the first forty", "the first ten", "the last thirty", "the last three",
}  # fmt: skip


def is_dynamic(step):
    """Returns whether some of a function's paths are followed at any size."""
    return step._controller.dynamic.made > 0


@pytest.fixture(autouse=True)
def followed():
    """Every segment is launched, however small."""
    with compile_everything():
        yield


def trained(body, extra=None):
    """Returns a maker of a step that differentiates the sum of a body's squares, and updates its variable."""

    def make(decorate):
        w = tf.Variable(np.linspace(-0.4, 0.5, 36, dtype=np.float32).reshape([6, 6]))

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                found = body(x, w)
                loss = tf.reduce_sum(tf.cast(found, tf.float32) ** 2) / 50.0
            for_w, for_x = tape.gradient(loss, [w, x])
            if for_w is not None:
                w.assign_sub(0.001 * tf.clip_by_value(for_w, -1.0, 1.0))
            return found, found.shape, loss, for_w, for_x, float(loss)

        return step

    return make


def compare(make, sizes):
    """Compares calls at these sizes with eager's, up to the rounding of sums, and returns what was decorated."""
    expected, decorated = outcomes(make(unchanged), [(rows(n),) for n in sizes]), make(coexec.function)
    for n, one, other in zip(sizes, expected, outcomes(decorated, [(rows(n),) for n in sizes]), strict=True):
        assert_same(one, other, 1e-4, 1e-5, f"at {n}: ")
    return decorated


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name):
    """Values, shapes, gradients and state, at sizes that are new in each call."""
    step = compare(trained(BODIES[name]), SIZES)
    assert is_dynamic(step) is (name not in EXACT)
    check(step.trace_graph)


@pytest.mark.sample(*list(BODIES)[::2])
@pytest.mark.parametrize("name", BODIES)
def test_odd_sizes(name):
    """Sizes of none and one come between others, before and after the path is dynamic."""
    sizes = [*ODD, *SIZES[:8], *ODD]
    compare(trained(BODIES[name]), sizes)


def rows_of_arrays(body):
    """Returns a maker of a step that is given arrays and keeps some, and differentiates as `trained` does."""

    def make(decorate):
        w = tf.Variable(np.linspace(-0.4, 0.5, 36, dtype=np.float32).reshape([6, 6]))
        kept = [np.ones([4, 6], np.float32)]

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                found = body(x, w)
                loss = tf.reduce_sum(tf.cast(found, tf.float32) ** 2) / 50.0 + tf.reduce_mean(tf.tanh(kept[-1] @ w))
            for_w = tape.gradient(loss, w)
            if for_w is not None:
                w.assign_sub(0.001 * tf.clip_by_value(for_w, -1.0, 1.0))
            kept.append(np.tanh(x) if len(x) else kept[0])
            return found, found.shape, loss, for_w, float(loss)

        return step

    return make


@pytest.mark.sample(*(f"{name}-{'odd' if n % 3 == 0 else 'new'}" for n, name in enumerate(BODIES)))
@pytest.mark.parametrize("sizes", ["new", "odd"])
@pytest.mark.parametrize("name", BODIES)
def test_arrays(name, sizes):
    """The same, given NumPy arrays, which operations take as they are."""
    calls = [(rows(n).numpy(),) for n in (SIZES if sizes == "new" else [*ODD, *SIZES[:8], *ODD])]
    make = rows_of_arrays(BODIES[name])
    decorated = make(coexec.function)
    for n, (one, other) in enumerate(zip(outcomes(make(unchanged), calls), outcomes(decorated, calls), strict=True)):
        assert_same(one, other, 1e-4, 1e-5, f"call {n}: ")
    if sizes == "new":
        assert is_dynamic(decorated) is (name not in EXACT)
        assert decorated.stats().followed > len(calls) // 2
    check(decorated.trace_graph)


def test_gradients_are_memoized():
    """Once the path is dynamic, calls at new sizes meet nothing new: one launch, and no Python of gradients."""

    def make(decorate):
        w = tf.Variable(np.linspace(-0.4, 0.5, 36, dtype=np.float32).reshape([6, 6]))

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.nn.relu(x @ w + B) @ W - x) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step

    step = run_both(make, [(rows(n),) for n in SIZES])
    before = step.stats()
    for n in (71, 45, 38, 90, 29):
        step(rows(n))
    after = step.stats()
    assert after.launches - before.launches == 5
    assert after.compiles == before.compiles
    assert after.regions - before.regions >= 5
    assert after.followed - before.followed == 5


def test_counts():
    """A path is made dynamic after three sizes, and a size seen before or not is the same to it."""
    step = compare(trained(BODIES["attention"]), SIZES)
    stats = step.stats()
    assert stats.recorded == 1
    assert stats.followed == len(SIZES) - 1
    assert stats.launches >= len(SIZES) - 8
    assert stats.compiles <= 3


def test_two_sizes_stay_paths_of_their_own():
    """A function whose last batch of an epoch is smaller has two paths, which are compiled for their sizes."""
    step = compare(trained(BODIES["dense"]), [32, 32, 32, 17] * 6)
    assert not any(last.dynamic for last in step._controller.ran)


def masks(decorate):
    """A number of rows that depends on values: of a mask, of the rows above a mean, of distinct numbers."""
    w = tf.Variable(np.linspace(-0.4, 0.5, 36, dtype=np.float32).reshape([6, 6]))

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            chosen = tf.boolean_mask(x, x[:, 0] > 0.0)
            h = tf.nn.tanh(chosen @ w)
            hard = tf.where(h[:, 1] > tf.reduce_mean(h[:, 1]))[:, 0]
            few, places = tf.unique(tf.cast(h[:, 2] * 4.0, tf.int32))
            sums = tf.math.unsorted_segment_sum(h, places, tf.size(few))
            loss = tf.reduce_sum(tf.gather(h, hard) ** 2) + tf.reduce_mean(sums**2)
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.01 * gradient)
        return chosen, hard, few, sums, loss, gradient

    return step


def test_masks():
    """What depends on values runs on its own; between two of them, segments are for any size."""
    step = compare(masks, [n + 20 for n in SIZES])
    assert is_dynamic(step)
    assert step.stats().launches > 0


def two_sizes(decorate):
    """A bilinear form of two lists, whose lengths are equal by chance in some calls."""
    w, seen = tf.Variable(np.linspace(-0.4, 0.5, 36, dtype=np.float32).reshape([6, 6])), []

    @decorate
    def step(x):
        n, m = SIZES[len(seen) % 7], SIZES[len(seen) % 5]
        seen.append(n == m)
        y = rows(m)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, y])
            table = (x @ w) @ tf.transpose(y)
            loss = tf.reduce_mean(table**2) + tf.reduce_sum(tf.concat([x, y], 0) ** 2) / float(n + m)
            if table.shape[0] == table.shape[1]:
                loss += tf.linalg.trace(table)
        found = tape.gradient(loss, [w, x, y]), tape.gradient(table, y)
        w.assign_sub(0.01 * found[0][0])
        return table, loss, found, list(seen)

    return step


def test_two_sizes():
    """Two sizes are two numbers, though they are equal now and then."""
    assert is_dynamic(compare(two_sizes, [SIZES[n % 7] for n in range(40)]))


def kept(decorate):
    """Tensors of earlier calls, of their sizes, are used and asked for their shapes later."""
    w, log = tf.Variable(np.linspace(-0.4, 0.5, 36, dtype=np.float32).reshape([6, 6])), []

    @decorate
    def step(x):
        h = tf.nn.tanh(x @ w)
        log.append(h)
        old = log[max(len(log) - 3, 0)]
        w.assign_sub(0.01 * tf.matmul(old, old, transpose_a=True))
        return h.shape, old.shape, tf.concat([h, old], 0), len(h), [v.shape[0] for v in log], old[-1]

    return step


def test_kept_tensors():
    """A lazy tensor has the shape of its own call."""
    assert is_dynamic(compare(kept, SIZES))


def second_order(decorate):
    """A gradient of a gradient, as of a penalty."""
    w = tf.Variable(np.linspace(-0.4, 0.5, 36, dtype=np.float32).reshape([6, 6]))

    @decorate
    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.nn.tanh(x @ w) ** 2, 1)
            slopes = inner.gradient(y, x)
            penalty = tf.reduce_mean((tf.norm(slopes, axis=1) - 1.0) ** 2)
        gradient = outer.gradient(penalty, w)
        w.assign_sub(0.01 * gradient)
        return slopes, penalty, gradient

    return step


def test_second_order():
    """Gradients of gradients at any size."""
    assert is_dynamic(compare(second_order, SIZES))


def drawn(decorate):
    """Random numbers of that size, from TensorFlow's and from Keras' seeds."""
    keras.utils.set_random_seed(3)
    dropout = keras.layers.Dropout(0.3, seed=1)

    @decorate
    def step(x):
        noise = tf.random.normal(tf.shape(x), seed=4) + tf.random.uniform([x.shape[0], 1], seed=2)
        return dropout(x + noise, training=True), tf.nn.dropout(x, 0.5, seed=9), tf.random.shuffle(x, seed=1)

    return step


def test_random_numbers():
    """Eager's, at any size."""
    assert is_dynamic(compare(drawn, SIZES))


def refused(decorate):
    """Rows that do not fit in some calls; the program catches what TensorFlow raises."""

    @decorate
    def step(x):
        other = rows(x.shape[0] + (x.shape[0] % 4 == 0))
        h = tf.tanh(x @ W)
        try:
            h = h + tf.tanh(other)
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            return type(error).__name__, h
        return h, tf.reduce_mean(h)

    return step


def test_refused_sizes():
    """What does not fit fails where it does eagerly."""
    compare(refused, SIZES + SIZES[::-1])


def test_uncaught_errors():
    """The same, raised to the caller."""

    def make(decorate):
        @decorate
        def step(x):
            other = rows(x.shape[0] + (x.shape[0] in (33, 64)))
            return tf.reduce_sum(tf.tanh(x @ W) + other)

        return step

    compare(make, SIZES + SIZES[::-1])


LAYERS = {
    "mlp": lambda: [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(6)],
    "norm": lambda: [keras.layers.LayerNormalization(), keras.layers.Dropout(0.2, seed=3), keras.layers.Dense(6)],
    "conv": lambda: [
        keras.layers.Reshape([6, 1]), keras.layers.Conv1D(4, 3, padding="same"), keras.layers.GlobalMaxPooling1D(),
        keras.layers.Dense(6),
    ],
    "lstm": lambda: [keras.layers.Reshape([3, 2]), keras.layers.LSTM(5), keras.layers.Dense(6)],
    "gru over time": lambda: [
        keras.layers.Lambda(lambda x: x[None]), keras.layers.GRU(5, return_sequences=True), keras.layers.Dense(6)
    ],
    "attention over time": lambda: [
        keras.layers.Lambda(lambda x: x[None]), keras.layers.Dense(8), SelfAttention(), keras.layers.Dense(6)
    ],
}  # fmt: skip


class SelfAttention(keras.layers.Layer):
    """Attention of a sequence to itself."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.MultiHeadAttention(2, 4)

    def call(self, x):
        return self.inner(x, x, use_causal_mask=True)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    """Keras models, losses and optimizers, at batches or sequences of any length."""

    def make(decorate):
        keras.utils.set_random_seed(2)
        model, optimizer = keras.Sequential(LAYERS[name]()), keras.optimizers.Adam(0.01)
        loss_of = keras.losses.MeanSquaredError()

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                made = model(x, training=True)
                loss = loss_of(tf.zeros_like(made), made)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return made, loss, [tf.reduce_sum(g**2) for g in gradients], made.shape

        return step

    expected, decorated = outcomes(make(unchanged), [(rows(n),) for n in SIZES]), make(coexec.function)
    for n, one, other in zip(SIZES, expected, outcomes(decorated, [(rows(n),) for n in SIZES]), strict=True):
        assert_same(one, other, 1e-3, 1e-4, f"at {n}: ")


def given(make, calls, rtol=1e-4):
    """Compares calls with these pairs of sizes with eager's."""
    calls = [tuple(rows(n) if isinstance(n, int) else n for n in sizes) for sizes in calls]
    expected, decorated = outcomes(make(unchanged), calls), make(coexec.function)
    for number, (one, other) in enumerate(zip(expected, outcomes(decorated, calls), strict=True)):
        assert_same(one, other, rtol, 1e-5, f"call {number}: ")
    return decorated


CLAMPED = {
    "at 128": (lambda x, y: tf.tanh(x[:128]), [(n, 3) for n in (10, 20, 30, 40, 50, 150, 128, 129, 7)]),
    "the last 128": (lambda x, y: tf.tanh(x[-128:]), [(n, 3) for n in (10, 20, 30, 40, 50, 150, 128, 129, 7)]),
    "at 256": (lambda x, y: tf.tanh(x[:256]) * 2.0, [(n, 3) for n in (10, 20, 30, 40, 50, 300, 255, 257, 7)]),
    "at another size": (
        lambda x, y: (tf.tanh(x[: 2 * y.shape[0]]), tf.reduce_sum(y)),
        [(10, 20), (12, 25), (15, 14), (11, 21), (13, 17), (90, 20), (40, 21), (9, 30)],
    ),
    "at another size and ten": (
        lambda x, y: (tf.tanh(x[: y.shape[0] + 10]), tf.reduce_sum(y)),
        [(10, 20), (12, 25), (15, 14), (11, 21), (13, 17), (90, 20), (40, 21), (9, 30)],
    ),
    "at three": (
        lambda x, y: tf.tanh(tf.tile((x + tf.reduce_max(y))[:3], [2, 1])),
        [(55, 34), (6, 6), (2, 35), (59, 55), (27, 2), (49, 49), (43, 15), (2, 18), (3, 2), (2, 2)],
    ),
    "the last five of both": (
        lambda x, y: tf.tanh(tf.concat([x, y], 0)[-5:]),
        [(55, 34), (6, 6), (12, 35), (59, 55), (27, 12), (49, 49), (2, 18), (3, 2), (2, 2), (2, 3)],
    ),
    "every other": (lambda x, y: tf.tanh(x[::2]), [(n, 3) for n in (7, 50, 51, 8, 9, 52, 53, 10)]),
    "every third": (lambda x, y: tf.tanh(x[1::3]), [(n, 3) for n in (7, 50, 51, 8, 9, 52, 53, 10)]),
    "parity": (
        lambda x, y: tf.tile(tf.tanh(x), [tf.shape(x)[0] % 2 + 1, 1]) * tf.cast(tf.size(y) % 4, tf.float32),
        [(n, 3) for n in (8, 6, 12, 14, 7, 10, 9, 13, 2, 3)],
    ),
    "the larger one": (
        lambda x, y: tf.reduce_sum(x) * tf.ones([tf.maximum(len(x), len(y)), 2]) / tf.cast(len(x) // 3 + 1, tf.float32),
        [(10, 7), (12, 9), (15, 8), (11, 20), (13, 17), (9, 30), (30, 9), (31, 9), (32, 9)],
    ),
    "but five": (lambda x, y: tf.tanh(x[:-5]), [(n, 3) for n in (7, 50, 51, 8, 9, 52, 3, 10, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAMPED)
def test_clamped_sizes(name):
    """A size that is clamped to another, or to a number, is none that follows from it."""
    body, calls = CLAMPED[name]

    def make(decorate):
        @decorate
        def step(x, y):
            with tf.GradientTape() as tape:
                tape.watch(x)
                found = body(x, y)
                loss = sum(tf.reduce_mean(v**2) for v in tf.nest.flatten(found))
            return found, [v.shape for v in tf.nest.flatten(found)], tape.gradient(loss, x)

        return step

    given(make, calls)


def test_square_matrices():
    """One size on two axes of a tensor, which another call's need not have."""

    def make(decorate):
        @decorate
        def step(x, y):
            with tf.GradientTape() as tape:
                tape.watch(x)
                h = tf.tanh(x @ x) @ y
                loss = tf.reduce_mean(h**2)
            return h, tape.gradient(loss, x)

        return step

    given(make, [(rows(n, n), n) for n in (5, 7, 9, 4, 12, 20, 3, 2, 31, 1, 6)])


def sums(decorate):
    """Means over sums of sizes, which are equal in some calls by chance."""

    @decorate
    def step(x, y):
        h = tf.concat([tf.tanh(x @ W), y], 0)
        with tf.GradientTape() as tape:
            tape.watch(h)
            padded = tf.pad(h, [[2, 2], [0, 0]])
            loss = tf.reduce_mean(h) + tf.reduce_mean(padded**2)
        return tape.gradient(loss, h)

    return step


def test_sums_of_sizes():
    """What a gradient divides by follows from more than one size."""
    given(sums, [(10, 11), (12, 13), (14, 8), (21, 22), (20, 23), (23, 20), (60, 17), (5, 3), (21, 22), (50, 22)])
    given(sums, [(10, 11), (12, 13), (14, 8), (21, 22), (21, 35), (21, 20), (21, 19), (21, 17), (50, 22)])


TOGETHER = {
    "a sum": [(10, 33), (12, 31), (14, 29), (21, 22), (22, 21), (23, 20), (24, 19), (30, 13), (60, 17), (31, 22)],
    "a difference": [(10, 15), (12, 17), (14, 19), (21, 26), (22, 27), (23, 28), (30, 35), (60, 67), (31, 35)],
    "a product": [(6, 60), (10, 36), (12, 30), (15, 24), (18, 20), (20, 18), (24, 15), (30, 12), (12, 31), (18, 21)],
}


def divided(decorate):
    """Losses over a sum, a difference and a product of sizes."""

    @decorate
    def step(x, y):
        n, m = x.shape[0], y.shape[0]
        h = tf.tanh(x @ W)
        with tf.GradientTape() as tape:
            tape.watch(h)
            both = tf.concat([h, y], 0)
            more = tf.pad(h, [[0, max(m - n, 0)], [0, 0]])[min(n, m) - 1 :]
            table = h[:, None] * y[None]
            loss = tf.reduce_mean(both**2) + tf.reduce_mean(more**2) + tf.reduce_mean(table**2)
        return tape.gradient(loss, h)

    return step


@pytest.mark.parametrize("what", TOGETHER)
@pytest.mark.parametrize("make", [sums, divided])
def test_what_sizes_are_together_for_long(make, what):
    """What was the same in all calls so far need not be a constant."""
    given(make, TOGETHER[what])


def test_one_size_in_arrays_of_several_shapes():
    """A scalar, a vector and a row that hold the same size are three arguments of the graph."""

    def body(x, w):
        count = tf.shape(x)[0]
        whole = tf.cast(x * 50.0, tf.int32) // count + tf.reshape(tf.shape(x)[:1], [1, 1])
        return (x @ w) * tf.tile([0.5], [count])[:, None] + tf.cast(whole, tf.float32)

    step = compare(trained(body), SIZES)
    assert is_dynamic(step)
    assert "CX-UNCOMPILED" not in step.explain(), step.explain()


def test_numbers_given_to_libraries():
    """A number that a library call is given is one size or the other."""

    def make(decorate):
        calls = []

        @decorate
        def step(x, y):
            calls.append(x)
            n, m = tf.shape(x)[0], tf.shape(y)[0]
            k = n if len(calls) < 9 or len(calls) % 3 else m
            return tf.one_hot([0, 1], k) * 2.0, tf.pad(x, [[0, k], [0, 0]]) * 1.0, tf.reduce_sum(y)

        return step

    given(make, [(int(n), int(m)) for n, m in np.random.default_rng(2).integers(3, 40, [30, 2])])


@pytest.mark.parametrize("number", range(4))
def test_gradients_behind_cuts(number):
    """A gradient's segment begins behind another one, whose sizes its constants follow."""

    def make(decorate):
        w, v = tf.Variable(np.linspace(-0.4, 0.5, 36, dtype=np.float32).reshape([6, 6])), tf.Variable(tf.ones([6]))

        @decorate
        def step(x, y):
            with tf.GradientTape() as tape:
                h = tf.tanh(x @ w)
                loss = tf.reduce_mean(tf.nn.l2_normalize(h, 1) ** 2) + tf.reduce_mean(h / (tf.math.reduce_std(h) + 0.1))
                loss += tf.reduce_mean(h - tf.nn.moments(h, [0])[0]) + tf.reduce_mean(tf.linalg.matvec(x, v))
                loss += tf.reduce_sum(y)
            float(loss)
            return tape.gradient(loss, [w, v])

        return step

    rng = np.random.default_rng(number)
    sizes = zip(rng.choice([5, 8, 13, 21, 7], 30), rng.choice([1, 4, 6], 30), strict=True)
    given(make, [(int(n), int(m)) for n, m in sizes])


def test_values_that_decide_between_sizes():
    """Operations that run at once in the middle of a dynamic path, with sizes on both sides."""

    def make(decorate):
        def halved(x):
            return tf.cast(tf.cast(tf.size(tf.shape(x)), tf.float32) * 0.5, tf.int32)

        def rest(x, y):
            return tf.reduce_prod(tf.shape(y)) - tf.shape(x)[1]

        @decorate
        def step(x, y):
            count = tf.maximum(tf.cast(tf.constant(15.0) * 1.5, tf.int32), 25 % max(y.shape[0], 1))
            h = x[: tf.clip_by_value(count, 1, 50)] * 1.0
            both = tf.shape(y)[0] + tf.shape(h)[0] if x.shape[0] > 18 else y.shape[0] * 3
            most = tf.where(halved(x) > rest(x, y), halved(x), rest(x, y))
            h = h[: tf.clip_by_value(both % tf.maximum(most, 1), 1, 50)]
            return h, h.shape

        return step

    sizes = [(67, 67), (99, 4), (99, 77), (100, 11), (77, 5), (76, 49), (94, 20), (74, 74), (63, 63), (51, 51)]
    step = given(make, [*sizes, (59, 77), (23, 5)])
    assert is_dynamic(step)
    check(step.trace_graph)
