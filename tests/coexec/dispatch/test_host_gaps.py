"""Launches beside Python: where a step's Python is known to take its time, operations before it run meanwhile."""

import _thread
import concurrent.futures
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuning
from coexec.compile.executable import Executable
from coexec.dispatch import host_gaps
from tests.coexec import TIMEOUT

pytestmark = pytest.mark.paused
CALLS = 40  # enough to time the eighth and ninth call, to compile what then ends at the pause, and to launch it
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def busy(seconds=4 * tuning.pause_long):
    """Python that takes its time."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(100))


class Step:
    """Operations, a pause, operations again; `pause` and `between` can be replaced."""

    def __init__(self, decorate):
        self.total = tf.Variable(0.0)
        self.log = []
        self.pause, self.between = busy, lambda x: None
        self.call = decorate(self.step)

    def step(self, x):
        y = x
        for _ in range(6):
            y = tf.tanh(y) * 1.5 + 0.25
        self.total.assign_add(tf.reduce_sum(y))
        self.pause()
        self.log.append(self.between(y))
        z = tf.square(y) - y
        self.total.assign_add(tf.reduce_mean(z))
        return z


def compare(between=None, pause=None, inputs=lambda i: tf.constant(X * (1 + i % 3)), calls=CALLS):
    """Makes calls eagerly and co-executed; `between` is what the step does behind the pause."""
    steps = Step(lambda f: f), Step(coexec.function)
    for step in steps:
        step.between, step.pause = between or step.between, pause or step.pause
        step.results = [step.call(inputs(i)).numpy() for i in range(calls)]
    eager, followed = steps
    np.testing.assert_allclose(followed.results, eager.results, rtol=1e-5)
    np.testing.assert_allclose(followed.total, eager.total, rtol=1e-5)
    assert followed.log == pytest.approx(eager.log) if between else followed.log == eager.log
    stats = followed.call.stats()
    assert stats.followed == calls - 1, followed.call.explain()
    return stats


def test_operations_before_a_pause_run_beside_it():
    """Once the pause is known, one launch of each call runs beside Python; values and state are eager's."""
    stats = compare()
    assert stats.beside >= CALLS - 20


def test_without_a_pause_nothing_runs_beside():
    """What takes no time is no pause."""
    assert compare(pause=lambda: None).beside == 0


@pytest.mark.parametrize(
    "between",
    [
        lambda y: float(tf.reduce_max(y)),
        lambda y: float(y[0, 0]),
        lambda y: float(y.numpy().sum()),
        lambda y: float(np.asarray(y).mean()),
        lambda y: float(tf.numpy_function(lambda a: a.sum(), [y], tf.float32)),
    ],
)
def test_whatever_comes_next_waits(between):
    """Operations, reads and host calls behind the pause see the values of what is in flight."""
    assert compare(between).beside >= CALLS - 20


def test_a_read_in_the_pause_waits():
    """Python that reads a variable in the middle of its pause finds what the operations before have written."""
    steps = Step(lambda f: f), Step(coexec.function)
    for step in steps:
        step.reads = []

        def pause(step=step):
            busy()
            step.reads.append(float(step.total.numpy()))
            busy()

        step.pause = pause
        for _ in range(CALLS):
            step.call(tf.constant(X))
    np.testing.assert_allclose(steps[1].reads, steps[0].reads, rtol=1e-5)
    assert steps[1].call.stats().beside >= CALLS - 20


def test_another_thread_waits():
    """A thread that reads a variable which a launch in flight writes sees it written."""
    step, plain = Step(coexec.function), Step(lambda f: f)
    found = []

    def pause():
        busy()
        thread = threading.Thread(target=lambda: found.append(float(step.total)))
        thread.start()
        thread.join(TIMEOUT)

    expected = []
    step.pause, plain.pause = pause, lambda: expected.append(float(plain.total))
    for _ in range(CALLS):
        step.call(tf.constant(X))
        plain.call(tf.constant(X))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert step.call.stats().beside >= CALLS - 20


def test_a_pause_may_come_to_an_end():
    """Where Python no longer takes its time, segments are whole again."""
    step = Step(coexec.function)
    for _ in range(CALLS):
        step.call(tf.constant(X))
    step.pause = lambda: None
    for _ in range(100):  # a busy machine may look like a pause once more
        before = step.call.stats()
        step.call(tf.constant(X))
        after = step.call.stats()
        if after.beside == before.beside:
            break
    assert after.beside == before.beside
    assert after.launches - before.launches == 1


def test_a_failed_flight_is_replayed(monkeypatch):
    """If the launch fails for reasons of its own, the operations run one by one."""
    step, plain = Step(coexec.function), Step(lambda f: f)
    launch = Executable.launch

    def refuse(self, *values):
        if threading.current_thread().name.startswith("coexec-runner"):
            raise tf.errors.ResourceExhaustedError(None, None, "no memory")
        return launch(self, *values)

    for i in range(CALLS):
        if i == 30:
            assert step.call.stats().beside > 0
            monkeypatch.setattr(Executable, "launch", refuse)
        np.testing.assert_allclose(step.call(tf.constant(X)), plain.call(tf.constant(X)), rtol=1e-5)
    np.testing.assert_allclose(step.total, plain.total, rtol=1e-5)


def test_an_error_in_the_pause_leaves_the_state_of_its_line():
    """What was issued before the error has been done when it arrives."""
    step, plain = Step(coexec.function), Step(lambda f: f)
    for one in (step, plain):
        for _ in range(CALLS):
            one.call(tf.constant(X))

        def fail():
            busy()
            raise KeyError("user")

        one.pause = fail
        with pytest.raises(KeyError):
            one.call(tf.constant(X))
    np.testing.assert_allclose(step.total, plain.total, rtol=1e-5)
    assert step.call.stats().beside >= CALLS - 20


def test_an_interrupt_waits_for_what_is_in_flight(monkeypatch):
    """Whoever catches Ctrl-C finds written what was issued before, and nothing is written later."""
    step, plain = Step(coexec.function), Step(lambda f: f)
    for _ in range(CALLS):
        step.call(tf.constant(X))
        plain.call(tf.constant(X))
    assert step.call.stats().beside >= CALLS - 20
    launch = Executable.launch

    def slowly(self, *values):
        if threading.current_thread().name.startswith("coexec-runner"):
            time.sleep(1.0)
        return launch(self, *values)

    monkeypatch.setattr(Executable, "launch", slowly)
    timer = threading.Timer(0.5, _thread.interrupt_main)

    def read(y):
        timer.start()
        return float(y[0, 0])  # waits for the launch, and is interrupted

    step.between = read
    with pytest.raises(KeyboardInterrupt):
        step.call(tf.constant(X))
    plain.between = lambda y: 1 / 0
    with pytest.raises(ZeroDivisionError):
        plain.call(tf.constant(X))
    np.testing.assert_allclose(step.total, plain.total, rtol=1e-5)
    time.sleep(1.2)
    np.testing.assert_allclose(step.total, plain.total, rtol=1e-5)


def test_without_threads_calls_go_on(monkeypatch):
    """Where no thread is to be had, as when the interpreter ends, the launch runs in front of the pause."""
    step, plain = Step(coexec.function), Step(lambda f: f)
    for i in range(CALLS):
        if i == 30:
            monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", refuse)
        np.testing.assert_allclose(step.call(tf.constant(X)), plain.call(tf.constant(X)), rtol=1e-5)
    assert 0 < step.call.stats().beside <= 30
    assert step.call.stats().followed == CALLS - 1


def refuse(*_):
    raise RuntimeError("cannot schedule new futures after shutdown")


def test_divergence_behind_a_pause():
    """A new path behind the pause is carried on imperatively, from what is in flight."""

    def between(y, seen=[]):  # noqa: B006
        seen.append(1)
        return float(tf.reduce_sum(tf.exp(y))) if len(seen) % 40 == 35 else 0.0

    steps = Step(lambda f: f), Step(coexec.function)
    for step in steps:
        step.between = between
        step.results = [step.call(tf.constant(X)).numpy() for _ in range(CALLS)]
    np.testing.assert_allclose(steps[0].results, steps[1].results, rtol=1e-5)
    np.testing.assert_allclose(steps[0].total, steps[1].total, rtol=1e-5)
    assert steps[0].log == pytest.approx(steps[1].log)
    assert steps[1].call.stats().diverged == 1
    assert steps[1].call.stats().beside >= CALLS - 20


@pytest.mark.parametrize("everything", [False, True], ids=["graph", "xla"])
def test_a_training_step_of_keras(everything):
    """The pause behind a region: the optimizer's launch runs beside Python, then the loss is read."""

    def make(decorate):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
        optimizer, objective = keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError()
        losses = []

        @decorate
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = objective(y, model(x, training=True))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            busy()
            losses.append(float(loss))

        return step, model, losses

    y = tf.ones((3, 3))
    outcomes = []
    for decorate in (lambda f: f, coexec.function):
        step, model, losses = make(decorate)
        for _ in range(CALLS):
            if everything:
                with testing.compile_everything():
                    step(tf.constant(X), y)
            else:
                step(tf.constant(X), y)
        outcomes.append((losses, [v.numpy() for v in model.variables]))
    np.testing.assert_allclose(outcomes[1][0], outcomes[0][0], rtol=1e-4)
    for one, other in zip(outcomes[1][1], outcomes[0][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert step.stats().beside >= CALLS - 25


@pytest.mark.parametrize("pause", [busy, lambda: None])
def test_accumulators_behind_an_operation_that_is_launched_at_once(pause):
    """An accumulator's operations come behind it; its result is still its own, in a `try` and before a pause."""

    def make(decorate):
        found = []

        @decorate
        def step(x, indices):
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
                y = x
                for _ in range(4):
                    y = tf.sin(y) * x
                try:
                    z = tf.gather(y, indices)
                except tf.errors.InvalidArgumentError:
                    z = y
                pause()
                z = tf.exp(z)
                pause()
                found.append(float(tf.reduce_sum(z)))
            return z, accumulator.jvp(z)

        return step, found

    (step, found), (plain, expected) = make(coexec.function), make(lambda f: f)
    for i in range(CALLS):
        arguments = tf.constant(X), tf.constant([2, 0, 1 if i % 7 else 3])
        with testing.compile_everything():
            ours = step(*arguments)
        for one, other in zip(ours, plain(*arguments), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert step.stats().launches > CALLS / 2


def test_calls_that_are_timed():
    """In pairs, ever rarer."""
    assert [call for call in range(1, 1000) if host_gaps.is_timed(call)] == [8, 9, 80, 90, 800, 900]
