"""Libraries of the user's: followed as one unit once registered, as far as they have no effects."""

import inspect
import pickle
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.stats import Kind
from tests.coexec import registered, run_both
from tests.coexec.memoize.test_regions import compare
from tracer import library, location


@pytest.fixture(autouse=True)
def library_of_the_user():
    """Registers the library for one test."""
    coexec.register_library("tests.coexec.registered")
    yield
    library.uninstall()
    library.install()


class Training:
    """A step that uses all of the library."""

    def __init__(self):
        registered.calls.clear()
        keras.utils.set_random_seed(1)
        self.gate, self.head = registered.Gate(), keras.layers.Dense(1)
        self.gate(tf.zeros((1, 4)))
        self.head(tf.zeros((1, 4)))
        self.optimizer = keras.optimizers.SGD(0.1)

    def step(self, x, y):
        variables = [*self.gate.trainable_variables, *self.head.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.head(registered.smooth(self.gate(x), 2)) - 1.0))
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return registered.counted(loss)

    def state(self):
        return self.gate.variables, self.head.variables, list(registered.calls)


def seeded_uniform():
    """What comes behind two draws from the seed that the library sets."""
    tf.random.set_seed(7)
    for _ in range(2):
        drawn = tf.random.uniform([])
    return drawn


def runs_of(code, call):
    """How often a function's code runs while `call` does."""
    ran = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: ran.append(1) if event == "call" and frame.f_code is code else None)
    try:
        call()
    finally:
        sys.setprofile(before)
    return len(ran)


def test_a_registered_library_is_followed_as_one():
    """Values, state and effects are eager's; functions and layers are regions, but for the one with an effect."""

    function = compare(Training)
    assert function.stats().regions >= 5 * 10  # gate, smooth, head, gradient, optimizer
    causes = [c.text for c in function._controller.ledger.causes if c.kind is Kind.LIBRARY]
    assert any("counted" in text for text in causes)


def test_its_python_does_not_run_again():
    """Once known, the library's code is not entered; the one with an effect is, on every call."""
    training = Training()
    step = coexec.function(training.step)
    x = tf.constant(np.random.default_rng(0).normal(size=(6, 4)), tf.float32)
    for _ in range(6):
        step(x, None)
    assert runs_of(registered.Gate.call.__code__, lambda: step(x, None)) == 0
    assert registered.calls == ["counted"] * 7


def test_attributes_of_its_objects_are_watched():
    """A write to a layer's attribute is noticed at once."""

    def change(training, i):
        if i in (7, 12):
            training.gate.scale = 0.5 * i

    compare(Training, change, regions=False)


def test_arguments_count_by_value():
    """Another Python argument is another call."""

    @coexec.function
    def step(x, rounds):
        return registered.smooth(x, rounds)

    x = np.arange(8, dtype=np.float32)
    for rounds in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3):
        with coexec.imperative():
            expected = registered.smooth(tf.constant(x), rounds).numpy()
        np.testing.assert_allclose(step(tf.constant(x), rounds), expected, rtol=1e-6)
    assert step.stats().regions >= 3


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("counted", lambda: len(registered.calls)),
        ("summed", lambda: registered.total),
        ("cached", lambda: len(registered.by_size)),
        ("of_class", lambda: registered.Gate.used),
        ("with_attribute", lambda: registered.with_attribute.used),
        ("closure", lambda: registered.closure(0.0)[1]),
        ("by_default", lambda: len(inspect.unwrap(registered.by_default).__defaults__[0])),
        ("seeding", lambda: 8 * (float(tf.random.uniform([])) == float(seeded_uniform()))),
    ],
)
def test_effects_happen_on_every_call(name, effect):
    """Whatever a function of the library writes to, it writes on every call."""

    @coexec.function
    def step(x):
        return getattr(registered, name)(x + 1.0)

    before = effect()
    for _ in range(8):
        step(tf.constant([1.0, 2.0]))
    assert effect() - before >= 8
    assert step.stats().regions == 0
    assert step.stats().followed == 7


def test_functions_of_tensorflow_are_followed_as_one():
    """Values and gradients are eager's; functions keep their names and can be pickled."""

    def make(decorate):
        weight = tf.Variable(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))

        @decorate
        def step(x):
            with tf.GradientTape() as tape:
                mean, variance = tf.nn.moments(tf.einsum("ij,kj->ik", x, weight), axes=[0])
                loss = tf.norm(tf.math.reduce_std(weight, axis=1)) + tf.reduce_sum(mean + variance)
            (gradient,), norm = tf.clip_by_global_norm(tape.gradient(loss, [weight]), 0.5)
            weight.assign_sub(0.1 * gradient)
            return loss, norm

        return step

    step, plain = make(coexec.function), make(lambda f: f)
    x = tf.constant(np.random.default_rng(0).normal(size=(5, 4)), tf.float32)
    for _ in range(10):
        for one, other in zip(step(x), plain(x), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    assert step.stats().regions >= 5 * 5
    assert tf.norm is tf.linalg.norm
    for function in (tf.norm, tf.linalg.norm, tf.einsum, tf.linalg.einsum, tf.nn.moments, tf.clip_by_global_norm):
        assert pickle.loads(pickle.dumps(function)) is function


def test_what_is_no_module_is_refused():
    """With a reason, and nothing is registered."""
    with pytest.raises(TypeError, match="module or its name"):
        coexec.register_library(registered.Gate)
    with pytest.raises(ModuleNotFoundError):
        coexec.register_library("no_such_library")


@pytest.mark.parametrize("name", ["absl", "optree", "typing_extensions"])
def test_what_keras_calls_is_known_wherever_it_is(tmp_path, monkeypatch, name):
    """A package that Python was told to find elsewhere is still one that Keras calls, and no code of the program's."""
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert location.files_of(name) == [str(tmp_path / f"{name}.py")]


class Loading(dict):
    """A registry that loads what it holds when asked, as that of a large library does."""

    def keys(self):
        raise ImportError("a module of it is not installed")

    values = items = keys


def test_the_methods_of_containers_do_not_run(monkeypatch):
    monkeypatch.setattr(registered, "KNOWN", Loading(one="module"), raising=False)
    function = compare(Training)
    assert function.stats().regions >= 5 * 10, function.explain()
    assert not [c for c in function._controller.ledger.causes if c.kind is Kind.FAULT]


def test_it_chooses_by_sizes():
    """It is skipped at new sizes between those at which it has run, and runs again beyond them."""
    sizes = [*np.random.default_rng(0).integers(3, 15, 50), 30, 25, 19, 40]
    draw = np.random.default_rng(1)
    calls = [(tf.constant(draw.normal(size=(size, 2)), tf.float32),) for size in sizes]
    with testing.always_follow():
        step = run_both(lambda decorate: decorate(lambda x: registered.of_many_or_few(x)), calls)
    assert step.stats().regions >= 35, step.explain()
