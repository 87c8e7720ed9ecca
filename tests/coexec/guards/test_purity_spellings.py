"""Harmless Python in code that only computes: it is followed as one with it, and what it looks at is looked at."""

import contextlib
import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec.guards.test_purity import CALLS, Layer, batch, compare, outcomes
from tests.snapshots import assert_same, snapshot

rate = 2.0
seen: list = []


@contextlib.contextmanager
def span(name):
    yield name


@contextlib.contextmanager
def other_span(name):
    yield "other"


@contextlib.contextmanager
def noting(name):
    seen.append(name)
    yield


def imports(x):
    import tensorflow as T
    from tensorflow import math

    return T.nn.relu(math.tanh(x)) * rate


def name_scope(x):
    with tf.name_scope("block"):
        return tf.tanh(x) * rate


def manager(x):
    with span("block") as name, tf.name_scope(name):
        return tf.tanh(x) * (rate if name == "block" else 0.0)


def raises_again(x):
    try:
        return tf.tanh(x) * rate
    except Exception:
        raise


def goes_on(x):
    try:
        factor = {}["missing"]
    except KeyError:
        factor = rate
    finally:
        x = tf.tanh(x)
    return x * factor


def deletes(x):
    shape = x.shape
    if shape[0] > 1:
        del shape
    return tf.tanh(x) * rate


def members(x):
    return tf.tanh(x) * (rate if x.dtype in {tf.float32, tf.float64} else 0.0)


def lambdas(x):
    scaled = lambda value: value * rate  # noqa: E731
    return scaled(tf.tanh(x))


def functions(x):
    hidden = tf.tanh(x)

    def scaled():
        return hidden * rate

    return scaled()


def kinds(x):
    if isinstance(x, (keras.layers.Dropout, list)):
        return x
    return tf.tanh(x) * rate


table = {"scaled": lambda value: value * rate}


def tables(x):
    return table["scaled"](tf.tanh(x))


class Namespace:
    """Functions that belong together."""

    @staticmethod
    def scaled(x):
        return x * rate


def namespaces(x):
    return Namespace.scaled(tf.tanh(x))


logger = logging.getLogger("tests.spellings")


def logs(x):
    logger.debug(f"{x.shape}")
    logger.info("called with %s", x.dtype)
    return tf.tanh(x) * rate


def spectra(x):
    return tf.abs(tf.signal.rfft(tf.signal.frame(tf.tanh(x), 2, 1))) * rate


def windows(x):
    return tf.signal.overlap_and_add(tf.signal.dct(tf.tanh(x)) * tf.signal.hann_window(4), 2) * rate


adjacency = tf.sparse.from_dense(tf.constant([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))


def sparse(x):
    return tf.sparse.sparse_dense_matmul(adjacency, tf.tanh(x)) * rate


WORKS = [imports, name_scope, manager, raises_again, goes_on, deletes, members, lambdas, functions, kinds, spectra,
         windows, sparse, tables, namespaces, logs, lambda x: tf.tanh(x) * rate]  # fmt: skip


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_it_is_followed_as_one_and_looks_again(work, inner):
    """A number that it reads changes in the ninth call."""

    def around(x):
        return work(x * 1.5)

    def make():
        return make_step(around if inner else work)

    def change(_, i):
        globals()["rate"] = 2.0 if i < 8 else 3.0

    compare(make, change, regions=6)


class Flags(keras.layers.Layer):
    """Asks for attributes that there may be."""

    def call(self, x):
        if getattr(self, "doubled", False):
            x = x * 2.0
        if hasattr(self, "tripled"):
            x = x * 3.0
        try:
            x = x * self.factor
        except AttributeError:
            x = tf.tanh(x)
        return tf.nn.relu(x)


def plainly(method):
    @functools.wraps(method)
    def inner(self, *args, **kwargs):
        return method(self, *args, **kwargs) * rate

    return inner


class Decorated(keras.layers.Layer):
    """Has a method that another function stands for."""

    @plainly
    def call(self, x):
        return tf.tanh(x)


class Outer(keras.layers.Layer):
    """Has another one of the kind in it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    @plainly
    def call(self, x):
        return self.inner(x) * 2.0


def test_methods_of_two_classes_may_have_one_decorator():
    def make():
        globals().update(rate=2.0)
        kept = type("Inner", (Decorated,), {})
        layer = Outer(kept())
        return lambda x: layer(x), kept

    def change(kept, i):
        if i == 8:
            kept.call = plainly(lambda self, x: tf.nn.relu(x))

    step = compare(make, change, regions=6)
    assert not step.explain().count("more than compute")


DECORATED = {
    "what the decorator looks at": lambda kind: globals().update(rate=3.0),
    "another method": lambda kind: setattr(kind, "call", lambda self, x: tf.nn.relu(x)),
    "another decorated method": lambda kind: setattr(kind, "call", plainly(lambda self, x: tf.nn.relu(x))),
}


@pytest.mark.parametrize("change", DECORATED.values(), ids=DECORATED)
def test_a_decorated_method_is_found_by_the_name_in_its_class(change):
    def make():
        globals().update(rate=2.0)
        kind = type("Derived", (Decorated,), {})
        layer = kind()
        return lambda x: layer(x), kind

    compare(make, lambda kind, i: change(kind) if i == 8 else None, regions=4)
    globals().update(rate=2.0)


CHANGES = {
    "an attribute": lambda layer: setattr(layer, "doubled", True),
    "one that was not there": lambda layer: setattr(layer, "tripled", None),
    "one that failed": lambda layer: setattr(layer, "factor", 5.0),
    "past `__setattr__`": lambda layer: vars(layer).update(tripled=1),
    "one of the class": lambda layer: setattr(type(layer), "factor", 7.0),
    "one of the class that says no": lambda layer: setattr(type(layer), "doubled", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_attributes_that_may_be_missing(change):
    def make():
        layer = type("Flags", (Flags,), {})()
        return lambda x: layer(x), layer

    compare(make, lambda layer, i: change(layer) if i == 8 else None, regions=6)


@pytest.mark.parametrize("change", ["level", "disable", "method"])
def test_a_logger_that_is_asked_to_speak_is_heard(change, caplog, monkeypatch):
    heard = []
    for decorate in (lambda f: f, coexec.function):
        caplog.clear()
        step = decorate(make_step(logs)[0])
        spoken: list = []
        for i in range(CALLS):
            if i == 8 and change == "level":
                logger.setLevel(logging.DEBUG)
            if i == 8 and change == "method":
                monkeypatch.setattr(logging.Logger, "debug", lambda self, *args, into=spoken: into.append(args))
            if change == "disable":
                logging.disable(logging.NOTSET if i >= 8 else logging.CRITICAL)
                logger.setLevel(logging.DEBUG)
            step(tf.ones((2, 2)) * i)
        logger.setLevel(logging.NOTSET)
        monkeypatch.undo()
        # Ours says how long XLA takes.
        heard.append(([r.getMessage() for r in caplog.records if r.name == logger.name], spoken))
    assert heard[0] == heard[1]
    assert len(heard[0][0]) + len(heard[0][1]) >= CALLS - 8
    assert step.stats().regions >= 3, step.explain()


def test_what_is_imported_is_looked_up_again(monkeypatch):
    def make():
        return make_step(imports)

    def change(_, i):
        if i == 0:
            monkeypatch.undo()
        if i == 8:
            monkeypatch.setattr(tf.nn, "relu", tf.nn.sigmoid)

    compare(make, change)
    monkeypatch.undo()


def test_managers_are_looked_up_again(monkeypatch):
    def make():
        return make_step(manager)

    def change(_, i):
        if i == 0:
            monkeypatch.undo()
        if i == 8:
            monkeypatch.setitem(globals(), "span", other_span)

    compare(make, change)


def test_a_function_that_was_made_before_is_not_taken_for_one_that_is_made_in_the_call():
    """Both have one code; a variable of the older is set."""

    def maker(factor):
        return lambda x: x * factor

    def make():
        old = [2.0]
        kept = maker(old)

        def work(x):
            scaled = (lambda factor: maker(factor))(3.0)
            return scaled(tf.tanh(x)) + kept(tf.constant(1.0))[0]

        layer = Layer(work)
        return lambda x: layer(x), old

    def change(old, i):
        old[0] = 2.0 if i < 8 else 4.0

    compare(make, change, regions=0)


def appends(x):
    with span("a"):
        seen.append(1)
    return tf.tanh(x)


def notes(x):
    with noting("a"):
        return tf.tanh(x)


appending = lambda x: seen.append(1) or tf.tanh(x)  # noqa: E731


def logs_aloud(x):
    logger.critical("%s", x.shape)
    return tf.tanh(x)


def sets_a_level(x):
    logger.setLevel(logging.WARNING)
    return tf.tanh(x)


def asks_for_any(x):
    name = "shape" if seen is None else "dtype"
    return tf.tanh(x) * (1.0 if getattr(x, name) == tf.float32 else 2.0)


def prints(x):
    if rate > 0.0:
        print("seen")
    return tf.tanh(x)


def maps(x):
    list(map(print, ["seen"]))
    return tf.tanh(x)


def suppresses(x):
    with contextlib.suppress(KeyError):
        seen.append(1)
    return tf.tanh(x)


def counts_inside(x):
    count = 0

    def more():
        nonlocal count
        count += 1
        seen.append(count)

    more()
    return tf.tanh(x)


def make_step(work):
    layer = Layer(work)
    return lambda x: layer(x), None


REFUSED = [appends, appending, logs_aloud, sets_a_level, notes, asks_for_any, prints, maps, suppresses, counts_inside]


@pytest.mark.parametrize("work", REFUSED, ids=lambda work: work.__name__)
def test_what_may_do_more_runs_on_every_call(work, capsys):
    found = []
    for decorate in (lambda f: f, coexec.function):
        seen.clear()
        results, step = outcomes(functools.partial(make_step, work), decorate)
        found.append((len(seen), capsys.readouterr().out, results))
    assert found[0][:2] == found[1][:2]
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert_same(one, other, rtol=1e-4, atol=1e-5)
    assert step.stats().regions == 0, step.explain()
    assert step.stats().followed >= CALLS - 2


def test_what_is_never_said_costs_nothing():
    """A `print` on a path that is not taken; one that is taken later is heard."""

    def work(x):
        if rate > 100.0:
            print("large")
        return tf.tanh(x) * rate

    def make():
        return make_step(work)

    def change(_, i):
        globals()["rate"] = 2.0 if i < 8 else 200.0

    compare(make, change, regions=4)
    globals()["rate"] = 2.0


def caught(x):
    try:
        found = tf.gather(x, tf.cast(x[:1, 0], tf.int32))
    except tf.errors.InvalidArgumentError:
        found = -x[:1]
    return tf.tanh(x) + found


def cleaned(x):
    with span("a"):
        try:
            found = tf.gather(x, tf.cast(x[:1, 0], tf.int32))
        finally:
            x = tf.tanh(x)
    return x + found


@pytest.mark.parametrize("work", [caught, cleaned], ids=lambda work: work.__name__)
def test_an_operation_that_fails_in_it_fails_as_eagerly(work):
    """An index out of range, in some of the calls, caught by the code itself or by nobody."""
    found = []
    for decorate in (lambda f: f, coexec.function):
        step = decorate(make_step(work)[0])
        results = []
        for i in range(CALLS):
            x = tf.constant([[7.0 if i in (5, 9, 10, 15) else 1.0, 2.0], [0.5, 0.25], [0.0, 1.0]])
            try:
                results.append(step(x).numpy().tolist())
            except tf.errors.InvalidArgumentError:
                results.append("fails")
        found.append(results)
    assert [r == "fails" for r in found[0]] == [r == "fails" for r in found[1]]
    for one, other in zip(*found, strict=True):
        if one != "fails":
            np.testing.assert_allclose(one, other, rtol=1e-5)
    assert ("fails" in found[0]) is (work is cleaned)
    assert step.stats().followed >= CALLS / 2


class Sums(keras.layers.Layer):
    """Has layers under names that methods of containers have, as TensorFlow's tutorial of Transformers does."""

    def __init__(self, kind):
        super().__init__()
        self.add = kind()
        self.update = keras.layers.Dense(4, kernel_initializer="ones")

    def call(self, x):
        return self.update(self.add([x, tf.tanh(x)])) * rate


def test_layers_under_the_names_of_containers_methods():
    """Another one takes the place of the first in the ninth call."""

    def make():
        globals().update(rate=2.0)
        layer = Sums(keras.layers.Add)
        layer(batch(0))
        return (lambda x: tf.reduce_sum(layer(x))), layer

    def change(layer, i):
        globals()["rate"] = 2.0 if i < 6 else 3.0
        if i == 8:
            vars(layer)["add"] = keras.layers.Multiply()

    compare(make, change, regions=5)


class Remembers(keras.layers.Layer):
    """Changes a list by an attribute that is called like the method."""

    def __init__(self):
        super().__init__()
        self.append = seen.append

    def call(self, x):
        self.append(1)
        return tf.tanh(x) * rate


class AddsItself(keras.layers.Layer):
    """Has a method of its own that only sounds as if it were a layer."""

    def add(self, x):
        seen.append(1)
        return x * rate

    def call(self, x):
        return self.add(tf.tanh(x))


@pytest.mark.parametrize("kind", [Remembers, AddsItself])
def test_what_changes_containers_runs_each_time(kind):
    def make():
        globals().update(rate=2.0)
        layer = kind()
        return (lambda x: tf.reduce_sum(layer(x))), layer

    found = []
    for decorate in (lambda f: f, coexec.function):
        del seen[:]
        found.append((outcomes(make, decorate)[0], len(seen)))
    assert_same(*found, rtol=1e-4, atol=1e-5)
    assert found[0][1] == CALLS


def test_a_function_that_appends_to_its_argument_runs_each_time():
    """It is told from a layer's method only as it is called."""

    def grows(kept, x):
        kept.append(x.shape[0])
        return tf.tanh(x) * rate

    def make():
        globals().update(rate=2.0)
        kept = []
        return (lambda x: (tf.reduce_sum(grows(kept, x)), len(kept))), kept

    compare(make, regions=0)


class Convolution(keras.layers.Layer):
    """A graph convolution, whose matrix the program may replace, as a whole or in part."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def call(self, x):
        return tf.sparse.sparse_dense_matmul(self.matrix, tf.tanh(x))


def test_a_sparse_matrix_that_changes():
    def make():
        layer = Convolution(tf.sparse.from_dense(tf.constant([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])))
        return (lambda x: tf.reduce_sum(layer(x))), layer

    def change(layer, i):
        if i == 8:
            layer.matrix = tf.sparse.from_dense(tf.constant([[0.0, 1.0, 2.0], [4.0, 3.0, 0.0]]))
        if i == 12:
            layer.matrix._values = layer.matrix.values * 2.0

    compare(make, change, regions=6)


class Masked(keras.layers.Layer):
    """Attention with a mask that is an array of NumPy, as models that were written for PyTorch have it."""

    def __init__(self, size=16):
        super().__init__()
        self.query = keras.layers.Dense(4, kernel_initializer="ones")
        self.mask = np.tril(np.ones((size, size), np.float32))

    def call(self, x):
        count = x.shape[0]
        scores = tf.matmul(self.query(x), x, transpose_b=True)
        return tf.nn.softmax(tf.where(self.mask[:count, :count] == 0, float("-inf"), scores)) @ x


@pytest.mark.parametrize("size", [4, 16, 80])
@pytest.mark.parametrize("gradient", [False, True])
def test_an_array_that_a_layer_looks_at(gradient, size):
    """It is changed in place, replaced by an equal one, and by another."""

    def make():
        layer = Masked(size)
        layer(batch(0))

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x) ** 2)
            return (loss, tape.gradient(loss, [x, layer.query.kernel])) if gradient else loss

        return step, layer

    def change(layer, i):
        if i == 7:
            layer.mask[0, 1] = 1.0
        if i == 9:
            layer.mask = layer.mask.copy()
        if i == 11:
            layer.mask = np.ones_like(layer.mask)
        if i == 13:
            layer.mask = layer.mask.astype(np.int64)

    compare(make, change, regions=8 if gradient else 4)


def test_labels_that_recur_are_data():
    """As constants, each mixture of labels that were seen and others would be another way."""
    labels = (np.random.default_rng(0).random((40, 8, 9)) < 0.1).astype(np.float32)
    weight = tf.Variable(np.full((4, 4), 0.1, np.float32))

    def step(x, given):
        with tf.GradientTape() as tape:
            loss = 0.0
            for t in range(8):
                x = tf.tanh(x @ weight)
                loss += tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(given[:, t], x[:, 0]))
        return loss, tape.gradient(loss, weight)

    followed = coexec.function(step)
    with testing.always_follow():
        for i in range(40):
            x = tf.constant(np.random.default_rng(i).normal(size=(8, 4)), tf.float32)
            wanted, found = snapshot(step(x, labels[i])), snapshot(followed(x, labels[i]))
            assert_same(wanted, found, rtol=1e-4, atol=1e-5, path=f"call {i}: ")
    stats = followed.stats()
    assert stats.followed == 39
    assert stats.compiles <= 3
    assert stats.regions >= 25
