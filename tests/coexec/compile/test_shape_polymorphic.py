"""Graphs that sizes share: right at each size, also where sizes were equal by accident, and few."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.compile.shape_polymorphic import Sized
from tests.coexec.memoize.test_shape_variants import floats, training

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def two_dimensions(n, m):
    """Each is an argument of some operation, and so is what is made of both."""
    x = floats(n, m)
    turned = tf.reshape(tf.transpose(x), [m * n]) * 2.0 + 1.0
    back = tf.reshape(turned, (m, n)) - tf.ones((m, 1)) * tf.zeros([n])
    return tf.reduce_sum(tf.matmul(back, x), axis=0) / float(m)


def coinciding(n, m):
    """A kernel, a number of heads and an axis that look like sizes."""
    x = tf.reshape(floats(n, 4 * m), [n, m, 4])
    for _ in range(4):
        x = tf.concat([x, x[:, :, 1:]], 2)[:, :, :4]
    x = tf.reshape(tf.pad(x, [[0, 0], [1, 1], [0, 0]]), [-1, 2, 2])
    return tf.reduce_max(tf.tile(x, [4, 1, 1]), axis=1) + tf.cast(tf.shape(x)[0], tf.float32)


def repeated(n, m):
    """Broadcast where a size is one, and gradients that sum over what was."""
    x, y = floats(n, m), floats(1, m)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        z = tf.nn.relu(x * y + x[:1]) - tf.reduce_mean(x, axis=0) * tf.broadcast_to(y, [n, m])
        w = tf.reduce_sum(z * z) / tf.cast(tf.size(x), tf.float32)
    dx, dy = tape.gradient(w, [x, y])
    return tf.concat([dx, dy], 0)


def of_integers(n, m):
    """Ranges, masks and places made of sizes that Python knows."""
    x = floats(n, m)
    mask = tf.sequence_mask([min(n, 2), m], m, dtype=tf.float32)
    places = tf.range(n)[:, tf.newaxis] * m + tf.range(m)[tf.newaxis]
    taken = tf.gather(tf.reshape(x, [-1]), tf.reshape(places[::-1], [-1]))
    hot = tf.one_hot(tf.range(n) % max(m, 1), m) * tf.fill([n, m], 2.0)
    return tf.reshape(taken, [n, m]) + hot + tf.reduce_sum(mask) * tf.linspace(0.0, 1.0, m)


def weighted(n, m):
    """Numbers of Python's that follow from sizes, as floats."""
    x = floats(n, m)
    y = x * (1.0 / n) + m**0.5
    for _ in range(3):
        y = tf.tanh(y) * (1 + 1 / m) - tf.reduce_logsumexp(y, axis=-1, keepdims=True)
    return tf.clip_by_value(y, -1.0 / m, float(n)) + tf.cast(n, tf.float32)


def random(n, m):
    """Random numbers of shapes that vary: from seeds that TensorFlow draws, given ones, and of a generator."""
    x = tf.random.uniform([n, m]) + tf.nn.dropout(tf.ones((n, m)), 0.5)
    y = tf.random.stateless_normal((m, n), seed=[n, m]) + 0 * tf.random.stateless_uniform([m, n], [1, 2])
    return tf.matmul(x, y) + float(n) - tf.random.normal([n, 1])


def lists(n, m):
    """As many tensors as there are rows, and ragged ones."""
    rows = [floats(k + 1, m) for k in range(n)]
    stacked = tf.concat(rows, 0)
    parts = tf.split(stacked, [k + 1 for k in range(n)])
    return tf.add_n([tf.reduce_sum(part * (k + 1), 0) for k, part in enumerate(parts)]) + tf.stack(rows[0])[0]


FUNCTIONS = [two_dimensions, coinciding, repeated, of_integers, weighted, random, lists]
EQUAL = [(2, 2), (3, 3), (4, 4), (5, 5), (3, 5), (4, 2), (2, 4), (7, 3), (1, 1), (1, 4), (4, 1)]
APART = [(4, 4), (5, 4), (6, 4), (6, 3), (6, 6), (8, 7), (1, 2), (2, 1), (9, 4)]
EMPTY = [(3, 2), (4, 2), (0, 2), (5, 2), (0, 3)]


@pytest.mark.sample(*(f"graph-{f.__name__}-{order}" for f in FUNCTIONS for order in ("equal", "apart", "empty")),
                    *(f"xla-{f.__name__}-apart" for f in FUNCTIONS))  # fmt: skip
@pytest.mark.parametrize("order", [EQUAL, APART, EMPTY], ids=["equal", "apart", "empty"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("xla", [False, True], ids=["graph", "xla"])
def test_values_at_all_sizes(function, order, xla):
    """They are eager's, whatever was equal at the sizes before."""
    if order is EMPTY and function in (weighted, lists, of_integers):
        order = [sizes for sizes in order if 0 not in sizes]
    calls = [sizes for sizes in order for _ in range(3)] + order
    if xla:
        calls, manner = calls[:12], testing.compile_everything()
    else:
        manner = testing.always_follow()
    tf.random.set_seed(5)
    expected = [function(*sizes) for sizes in calls]
    tf.random.set_seed(5)
    step = coexec.function(function)
    with manner:
        for sizes, want in zip(calls, expected, strict=True):
            np.testing.assert_allclose(step(*sizes), want, rtol=1e-5, atol=1e-5, err_msg=f"{sizes}")
    parting = len(order) if function is lists else 0  # as many parts as rows: another attribute
    assert step.stats().followed >= len(calls) - 1 - parting, step.explain()
    assert step.stats().launches >= len(calls) // 4, step.explain()


def dense():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(4)])
    forward = training(lambda x, y: tf.reduce_mean((model(x) - y) ** 2), model.trainable_variables)
    return forward, model


def test_few_graphs_for_many_sizes(exact_sizes):
    """The second size has one that all others take; they have it in their first call."""
    step = coexec.function(dense()[0])
    for n in (10, 11):
        for _ in range(4):
            step(floats(n, 4), floats(n, 4))
    before = step.stats()
    for n in range(12, 40):
        for _ in range(2):
            step(floats(n, 4), floats(n, 4))
    after = step.stats()
    assert after.compiles - before.compiles <= 1, step.explain()
    assert after.launches - before.launches >= 2 * 28 - 1, step.explain()


def test_a_graph_is_made_anew_where_sizes_were_equal_by_accident():
    """Two sizes that were always the same are one argument, until they are not."""

    def folded(n, m):
        x, y = tf.reshape(floats(n, 2, 2), [n, -1]) * 2.0, tf.reshape(floats(m, 2, 2), [m, -1]) + 1.0
        x, y = tf.reshape(tf.tanh(x), [-1, n]), tf.reshape(tf.tanh(y), [-1, m])
        return tf.reduce_sum(tf.matmul(x, x, transpose_b=True) - tf.matmul(y, y, transpose_b=True))

    step = coexec.function(folded)
    for sizes in EQUAL[:4]:
        for _ in range(4):
            step(*sizes)
    before = step.stats().compiles
    for sizes in [(6, 7), (7, 8), (9, 4), (10, 3)]:
        for _ in range(4):
            np.testing.assert_allclose(step(*sizes), folded(*sizes), rtol=1e-5, atol=1e-5)
    assert before < step.stats().compiles <= before + 2, step.explain()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_graphs_of_a_family_are_few(most, tune):
    """The last has all numbers as arguments; with none left, each size has its own."""
    tune(max_family_graphs=most)
    step = coexec.function(coinciding)
    for sizes in [*EQUAL, *APART]:
        for _ in range(3):
            np.testing.assert_allclose(step(*sizes), coinciding(*sizes), rtol=1e-5)
    assert step.stats().compiles <= len({*EQUAL, *APART})
    assert step.stats().launches >= len(EQUAL), step.explain()


@pytest.mark.distrusting
def test_each_size_is_compared_before_it_is_trusted(monkeypatch, exact_sizes):
    """A graph that is wrong at some size is found out there, and not shared any more."""
    step = coexec.function(two_dimensions)
    for sizes in EQUAL[1:4]:
        for _ in range(4):
            step(*sizes)
    validated = step.stats().validated
    assert validated >= 3, step.explain()
    init = Sized.__init__

    def wrong(self, shared, plan, more):
        init(self, shared, plan, [tensor + 1 for tensor in more])

    monkeypatch.setattr(Sized, "__init__", wrong)
    for _ in range(4):
        np.testing.assert_allclose(step(7, 7), two_dimensions(7, 7), rtol=1e-5)
    assert step.stats().validated > validated
    monkeypatch.setattr(Sized, "__init__", init)
    assert "compiled" in step.explain()
    for _ in range(4):
        np.testing.assert_allclose(step(8, 8), two_dimensions(8, 8), rtol=1e-5)


def test_sparse_updates():
    """Rows of a table that are updated, as many as the batch has, of which some come twice."""

    def make():
        table = tf.Variable(tf.reshape(tf.range(20.0), (10, 2)))

        def step(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows) ** 2)
            gradient = tape.gradient(loss, table)
            table.scatter_sub(tf.IndexedSlices(gradient.values * 0.01, gradient.indices))
            table.scatter_nd_update([[0]], [[1.0 / rows.shape[0], 2.0]])
            return loss

        return step, table

    (plain, one), (mine, other) = make(), make()
    step = coexec.function(mine)
    numbers = np.random.default_rng(0)
    for n in [5, 5, 5, 6, 6, 6, 1, 1, 7, 7, 20, 20, 6, 5]:
        rows = tf.constant(numbers.integers(0, 10, n))
        np.testing.assert_allclose(plain(rows), step(rows), rtol=1e-5)
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert step.stats().launches >= 6, step.explain()


def test_variables_as_long_as_the_batch():
    """Each size has its own, whose values a launch writes."""
    held = {n: tf.Variable(tf.zeros(n)) for n in range(3, 9)}

    def step(x):
        variable = held[x.shape[0]]
        for _ in range(4):
            variable.assign_add(x * 2.0 - tf.reduce_mean(x))
        return tf.reduce_sum(variable) / float(x.shape[0])

    mine = coexec.function(step)
    wanted = {n: np.zeros(n, np.float32) for n in held}
    for n in [*np.repeat([3, 4, 5, 6, 7, 8], 3), 3, 8]:
        x = floats(n)
        wanted[n] = wanted[n] + 4 * (x.numpy() * 2 - x.numpy().mean())
        np.testing.assert_allclose(mine(x), wanted[n].mean(), atol=1e-4)
        np.testing.assert_allclose(held[n], wanted[n], rtol=1e-4, atol=1e-5)
    assert mine.stats().launches >= 6, mine.explain()


def test_clear_releases_what_sizes_share(exact_sizes):
    """The graph goes with the last segment that launches it."""
    step = coexec.function(dense()[0])
    for n in range(10, 16):
        for _ in range(3):
            step(floats(n, 4), floats(n, 4))
    shared = [
        weakref.ref(compiled.executable.shared)
        for compiled in step._controller.segments._all
        if isinstance(compiled.executable, Sized)
    ]
    assert len(shared) >= 4
    assert len({ref() for ref in shared}) <= 2
    step.clear()
    gc.collect()
    assert all(ref() is None for ref in shared)


def test_a_size_that_fails():
    """Its error is eager's, with what was assigned before it; other sizes go on."""
    seen = tf.Variable(0.0)

    def step(x):
        seen.assign_add(1.0)
        y = tf.tanh(x) * 2.0 + tf.reduce_sum(x) - tf.cast(tf.size(x), tf.float32)
        y = tf.reshape(y, [2, x.shape[0] // 2])
        return tf.reduce_sum(tf.matmul(y, y, transpose_b=True)) / x.shape[0]

    mine = coexec.function(step)
    for n in [4, 6, 8, 8, 6, 4, 10, 10]:
        before = float(seen)
        np.testing.assert_allclose(mine(floats(n)), step(floats(n)), rtol=1e-5)
        assert float(seen) == before + 2
    for n in (5, 7, 5):
        before = float(seen)
        with pytest.raises(tf.errors.InvalidArgumentError, match="reshape"):
            mine(floats(n))
        assert float(seen) == before + 1
    np.testing.assert_allclose(mine(floats(12)), step(floats(12)), rtol=1e-5)
