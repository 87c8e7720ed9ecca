"""What is compiled is compared with its operations before it is trusted, and library calls with what they did."""

import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuned, tuning
from coexec.compile.executable import Executable
from coexec.launch import executor
from coexec.launch.rounding import otherwise_rounded
from coexec.launch.validate import _difference
from coexec.lowering.emit import Emitter
from coexec.lowering.function_body import Body
from coexec.lowering.plan import make_plan
from tests.coexec import outcomes, unchanged
from tests.snapshots import assert_same
from tracer import cursor, meetings

pytestmark = pytest.mark.distrusting

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
JIT = {"graph": False, "xla": True}


def accumulator(decorate):
    """A step with a variable, a constant, and a Python effect."""
    total, log = tf.Variable(0.0), []

    @decorate
    def step(x):
        log.append(len(log))
        for _ in range(4):
            x = tf.tanh(x) * 1.5 + 0.25
        y = x - tf.sin(x)
        total.assign_add(tf.reduce_sum(y))
        return y, total + 0.0, len(log)

    return step


def compared(backend, calls=12, make=accumulator, given=X):
    """Runs a step eagerly and decorated, and returns the latter; each call does what it does eagerly."""
    expected = outcomes(make(unchanged), [(given,)] * calls)
    step = make(coexec.function(jit_compile=JIT[backend]))
    with testing.compile_everything():
        found = outcomes(step, [(given,)] * calls)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, path=f"call {number}: ")
    return step


def test_once_for_each_executable(backend):
    """The first launch at each size is compared, no later one; XLA compiles for each size, one graph serves both."""
    step = compared(backend)
    stats = step.stats()
    assert (stats.validated, stats.compiles, stats.launches) == (1, 1, 10)
    assert "found by validation" not in step.explain()
    with testing.compile_everything():
        for _ in range(4):
            step(X[:2])
    stats = step.stats()
    assert (stats.validated, stats.compiles) == (2, 2 if JIT[backend] else 1)


def test_it_can_be_switched_off(backend):
    """Where nobody wants it, and nothing else changes there."""
    with coexec.validate(every=0):
        step = compared(backend)
    assert (step.stats().validated, step.stats().launches) == (0, 10)


def test_both_backends_of_a_competition():
    """The graph is compared when it comes, and XLA's when that comes from the background."""
    from coexec.compile.compile_thread import background

    step = accumulator(coexec.function)
    with tuned(launch_operations=1, xla_price=0.0):
        for _ in range(4):
            step(X)
        background.wait()
        for _ in range(16):
            step(X)
    assert step.stats().compiles == 2
    assert step.stats().validated == 2


# Planted faults. Each is found in the first call that it could spoil, whose values are eager's, and never used again.


def wrong_operation(monkeypatch):
    """Differences are emitted as sums."""
    add = Body.add

    def wrong(self, op, *rest):
        return add(self, "AddV2" if op == "Sub" else op, *rest)

    monkeypatch.setattr(Body, "add", wrong)


def stale_constant(monkeypatch):
    """A constant has the value of another time."""
    constant = Body.constant

    def wrong(self, value, enum):
        stale = isinstance(value, float) and value == 1.5
        return constant(self, 1.25 if stale else value, enum)

    monkeypatch.setattr(Body, "constant", wrong)


def missing_write(monkeypatch):
    """What is written to a variable is lost."""
    monkeypatch.setattr(Emitter, "_set", lambda self, k, value: self.state.update({k: value}))


@pytest.mark.parametrize("plant", [wrong_operation, stale_constant, missing_write], ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(monkeypatch, plant, backend):
    plant(monkeypatch)
    step = compared(backend)
    text = step.explain()
    assert "found by validation" in text
    assert f"{backend}: " in text
    if plant is missing_write:
        assert "a variable of shape [] that it writes" in text
    else:
        assert "12 of 12 values differ" in text
        assert "test_validate.py" in text
    stats = step.stats()
    # XLA's is followed by a graph's, which has the same fault.
    assert stats.validated == stats.compiles == stats.launches == {"graph": 1, "xla": 2}[backend]
    assert stats.followed == 11


def test_a_planted_fault_in_large_tensors(monkeypatch, tune, backend):
    """Of these, evenly spaced values are compared."""
    tune(validated_numbers=4)
    wrong_operation(monkeypatch)
    text = compared(backend).explain()
    assert "found by validation" in text
    assert "4 of 4 values differ, at one" in text


def test_a_planted_fault_that_is_xlas_alone(monkeypatch):
    """The graph takes over."""
    launch = Executable.launch

    def wrong(self, *values):
        results = launch(self, *values)
        return [results[0] + 1.0, *results[1:]] if self.backend == "xla" else results

    monkeypatch.setattr(Executable, "launch", wrong)
    step = compared("xla")
    assert "xla: " in step.explain()
    assert step.stats().validated == 2
    assert step.stats().launches == 10


def test_equal_segments_share_what_was_found(monkeypatch):
    """An executable that two segments share is compared once; where it is wrong, neither launches it again."""

    def make(decorate):
        @decorate
        def step(x):
            parts = []
            for _ in range(2):
                parts.append(float(tf.reduce_sum(tf.sin(x) - x)))
            return parts

        return step

    step = compared("graph", make=make, given=X + 2.0)
    assert (step.stats().validated, step.stats().compiles) == (1, 1)
    assert step.stats().launches >= 20
    wrong_operation(monkeypatch)
    step = compared("graph", make=make, given=X + 2.0)
    assert step.stats().launches <= 2


def test_strict_functions_raise(monkeypatch):
    """A fault is an error there, by default, too."""
    wrong_operation(monkeypatch)
    step = accumulator(coexec.function(strict=True))
    with testing.compile_everything():
        step(X)
        step(X)
        with pytest.raises(coexec.Divergence, match="values differ"):
            step(X)


@pytest.mark.parametrize("found", ["late", "at once"])
def test_a_missed_epoch_is_found(found, monkeypatch):
    """The code of a function of Keras': by one of the next hundred calls; at once, where all are compared."""

    def call(self, inputs):
        return activations.leaky_relu(inputs, negative_slope=self.negative_slope / 2.0)  # noqa: F821

    layer = keras.layers.LeakyReLU(negative_slope=0.5)

    @coexec.function
    def step(x):
        return layer(x) + 1.0

    for _ in range(5):
        step(X)
    assert step.stats().regions > 0
    monkeypatch.setattr(keras.layers.LeakyReLU.call, "__code__", call.__code__)
    expected = np.where(X > 0, X, 0.25 * X) + 1.0
    if found == "at once":
        with coexec.validate():
            np.testing.assert_allclose(step(X), expected, rtol=1e-6)
    else:
        for _ in range(tuning.region_first_check):
            step(X)
    np.testing.assert_allclose(step(X), expected, rtol=1e-6)
    assert "did something else than what was known of it" in step.explain()


# What is right is not reported, however it rounds.


def test_numbers_that_are_nothing_but_rounding():
    """The gradient of a bias in front of a batch normalisation is zero, but for rounding, under XLA another one."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dense(16),
         keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )  # fmt: skip
    x, y = np.random.default_rng(0).normal(size=(2, 64, 16)).astype(np.float32)
    model(x)
    optimizer = keras.optimizers.SGD(0.1)

    @coexec.function(jit_compile=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y[:, :1]))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss, gradients

    with testing.compile_everything():
        for _ in range(4):
            _, gradients = step(x, y)
        with coexec.validate():
            for _ in range(4):
                _, gradients = step(x, y)
    assert np.abs(gradients[1]).max() < 1e-6  # the bias
    assert step.stats().validated >= 5
    assert "found by validation" not in step.explain()
    assert "not compiled by XLA" not in step.explain()


@pytest.mark.parametrize("fused", [True, False])
def test_a_classifier_that_is_sure(backend, fused):
    """Its loss is what rounding leaves of a sum next to one: compiled code may have another one, and is used."""
    labels = np.arange(32) % 10
    sure = 12.5 * np.eye(10, dtype=np.float32)[labels] + np.random.default_rng(3).normal(size=(32, 10), scale=0.3)
    bias = tf.Variable(tf.zeros(10))

    @coexec.function(jit_compile=JIT[backend])
    def step(logits):
        with tf.GradientTape() as tape:
            given = logits + bias
            if fused:
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, given)
            else:
                loss = -tf.math.log(tf.gather(tf.nn.softmax(given), labels, batch_dims=1))
            loss = tf.reduce_mean(loss)
        bias.assign_sub(1e-3 * tape.gradient(loss, bias))
        return loss

    with testing.compile_everything():
        losses = [float(step(tf.constant(sure * scale, tf.float32))) for scale in (1.0, 1.0, 1.0, 1.1, 1.2)]
        with coexec.validate():
            losses += [float(step(tf.constant(sure * scale, tf.float32))) for scale in np.linspace(0.9, 1.4, 40)]
    assert 0 <= min(losses) < 1e-6
    assert step.stats().validated >= 40
    assert "found by validation" not in step.explain()


def test_sums_of_short_numbers():
    """A bias's gradient may add up in 16 bits, or in 32 where a graph has it made otherwise: both are rounding."""
    numbers = np.random.default_rng(2)
    terms = tf.constant(numbers.normal(size=(8, 10, 10, 8)) * 0.01, tf.bfloat16)
    short = tf.raw_ops.BiasAddGrad(out_backprop=terms)
    longer = tf.reduce_sum(tf.cast(terms, tf.float64), (0, 1, 2))
    changed = otherwise_rounded(numbers)
    step = types.SimpleNamespace(op="BiasAddGrad")
    shaken = [tf.cast(changed(step, [terms], [short])[0], tf.float64) for _ in range(3)]
    noise = max(np.abs(one - tf.cast(short, tf.float64)).max() for one in shaken)
    off = np.abs(longer - tf.cast(short, tf.float64)).max()
    assert off / 4 < noise < 10 * off


def test_a_fault_among_rounding_is_found(monkeypatch):
    """A wrong number beside sums that cancel is one, however large those are."""
    launch = Executable.launch

    def wrong(self, *values):
        results = launch(self, *values)
        return [results[0], results[1] * 1.01]

    monkeypatch.setattr(Executable, "launch", wrong)
    numbers = np.random.default_rng(0).normal(size=4096).astype(np.float32)

    @coexec.function(jit_compile=True)
    def step(x):
        return tf.reduce_sum(x * 1e6) - tf.reduce_sum(tf.reverse(x, [0])) * 1e6, tf.reduce_mean(tf.square(x))

    with testing.compile_everything():
        for _ in range(3):
            step(numbers)
    assert "1 of 1 values differ" in step.explain()
    assert "Mean at" in step.explain()


def test_state_is_left_as_it_was(backend):
    """Random numbers, generators and variables go on as without the comparison."""

    def make(decorate):
        tf.random.set_seed(5)
        generator, v = tf.random.Generator.from_seed(7), tf.Variable([1.0, 2.0])

        @decorate
        def step(x):
            v.assign(v * 0.5 + tf.random.uniform([2]) + generator.uniform([2]))
            v.assign_add(x[0, :2])
            return v + 0.0, generator.state + 0

        return step

    step = compared(backend, make=make)
    assert step.stats().validated == 1
    assert step.stats().launches > 5


def test_scalars_of_dtypes_that_numpy_does_not_have(backend):
    """A loss, and a variable, of half the digits are compared like any other."""

    def make(decorate):
        v = tf.Variable(tf.constant(1.0, tf.bfloat16))

        @decorate
        def step(x):
            v.assign(v * 0.5 + tf.reduce_max(tf.cast(x, tf.bfloat16)))
            return v * 2.0, tf.cast(tf.reduce_max(x) * 0.25, tf.dtypes.experimental.float8_e4m3fn)

        return step

    step = compared(backend, make=make)
    assert step.stats().validated == 1
    assert step.stats().launches > 5


def test_failures(backend):
    """An operation that fails in the first launch of all fails as eagerly; later calls are launched."""

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x):
            v.assign_add(1.0)
            tf.debugging.assert_less(v, 2.5)
            y = tf.gather(x, tf.cast(v, tf.int32) - 1)
            v.assign_add(1.0)
            return y

        def call(x):
            try:
                return step(x)
            finally:
                v.assign(float(call.count % 2))
                call.count += 1

        call.count, call.stats, call.explain = 0, getattr(step, "stats", None), getattr(step, "explain", None)
        return call

    step = compared(backend, make=make)
    assert step.stats().launches > 3
    assert "found by validation" not in step.explain()


@pytest.mark.parametrize("share", [1, 4])
def test_new_combinations_of_compared_operations(share, monkeypatch):
    """Sixteen paths through eight parts: once all parts are compared, one in `share` of the new graphs is.

    None is planned at its first visit, as none has the operations of another. (With cuts at joins there would be fewer
    combinations.)
    """
    paths = list(itertools.product([False, True], repeat=4))
    monkeypatch.setattr(cursor, "MAX_WAYS", len(paths))
    monkeypatch.setattr(meetings, "MANY_LINES", len(paths))
    planned = []

    def noting(last, outputs):
        planned.append(last.visits)
        return make_plan(last, outputs)

    monkeypatch.setattr(executor, "make_plan", noting)
    calls = [(choices,) for choices in paths for _ in range(3)]

    def make(decorate):
        weight = tf.Variable(tf.eye(3) * 0.5)

        @decorate
        def step(choices):
            x = tf.ones([2, 3])
            x = tf.tanh(x @ weight) if choices[0] else tf.sigmoid(x - 1.0)
            x = tf.sin(x @ weight) if choices[1] else tf.square(x - 1.0)
            x = tf.cos(x @ weight) if choices[2] else tf.nn.softplus(x - 1.0)
            x = tf.exp(x @ weight) if choices[3] else tf.nn.elu(x - 1.0)
            weight.assign(tf.clip_by_value(weight * 0.9 + tf.reduce_mean(x) * 0.1, -1.0, 1.0))
            return x + 1.0

        return step

    with testing.always_follow(), tuned(validates_recombined=share):
        fn = make(coexec.function)
        found = outcomes(fn, calls)
    for number, (one, other) in enumerate(zip(outcomes(make(unchanged), calls), found, strict=True)):
        assert_same(one, other, rtol=1e-5, path=f"call {number}: ")
    stats = fn.stats()
    assert stats.followed + stats.diverged == len(calls) - 1, fn.explain()
    assert stats.compiles == len(paths), fn.explain()
    assert stats.launches >= len(paths), fn.explain()
    if share == 1:
        assert stats.validated == stats.compiles
    else:
        assert 4 <= stats.validated <= stats.compiles // 2
    assert min(planned) > 1


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (3,)], ids=str)
def test_a_variable_that_the_step_makes(shape, backend):
    """The private copy of one that is uninitialised is uninitialised, too: XLA would take it for one of shape [0]."""
    value = tf.ones(shape) * 3.0

    def make(decorate):
        @decorate
        def step(x):
            made = tf.Variable(value)
            return tf.debugging.check_numerics(x, "x"), made

        return step

    step = compared(backend, make=make)
    assert "CX-VALIDATION" not in step.explain(), step.explain()
    assert step.stats().validated >= 1


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_numbers_below_the_least_normal_one_are_equal(dtype):
    """A matrix that cannot be decomposed leaves NaN below the diagonal, and what memory held above it."""
    least = float(np.finfo(dtype.as_numpy_dtype).tiny)
    one = tf.constant([[np.nan, least / 4], [np.nan, np.nan]], dtype)
    assert _difference(one, tf.constant([[np.nan, least / 3], [np.nan, np.nan]], dtype), []) is None
    assert _difference(one, tf.constant([[np.nan, least * 3], [np.nan, np.nan]], dtype), []) is not None
    assert _difference(one, tf.constant([[np.nan, least / 4], [np.nan, 1.0]], dtype), []) is not None
