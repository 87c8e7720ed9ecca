"""Timers: signals that arrive again and again, as sampling profilers have them sent, and code that XLA compiles."""

import signal

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.base import timer_signals
from tests.coexec import run_both


@pytest.fixture
def ignored():
    """Signals of timers do nothing, and no timer is left."""
    before = {number: signal.signal(number, lambda *_: None) for number in timer_signals.TIMERS}
    yield
    for number, timer in timer_signals.TIMERS.items():
        signal.setitimer(timer, 0)
        signal.signal(number, before[number])


@pytest.mark.parametrize("number", timer_signals.TIMERS)
@pytest.mark.parametrize(("left", "interval", "runs"), [(500.0, 500.0, True), (0.9, 0.0, True), (500.0, 0.0, False)])
def test_which_timers_count(ignored, number, left, interval, runs):
    assert not timer_signals.is_running()
    signal.setitimer(timer_signals.TIMERS[number], left, interval)
    assert timer_signals.is_running() is runs


def draw(*shape):
    return (np.random.default_rng(len(shape)).normal(size=shape) * 0.1).astype(np.float32)


def test_a_convolution_net_is_trained_without_xla(ignored):
    """The timer is armed, and no signal comes: TensorFlow's own kernels do not always survive those."""

    def make(decorate):
        weights = [tf.Variable(v) for v in (draw(3, 3, 1, 8), draw(3, 3, 8, 16), draw(7 * 7 * 16, 10))]

        @decorate
        def step(x):
            first, second, last = weights
            with tf.GradientTape() as tape:
                hidden = tf.nn.relu(tf.nn.conv2d(x, first, 2, "SAME"))
                hidden = tf.nn.relu(tf.nn.conv2d(hidden, second, 2, "SAME"))
                loss = tf.reduce_mean(tf.square(tf.reshape(hidden, [16, -1]) @ last - 1.0))
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.01 * gradient)
            return loss

        return step

    signal.setitimer(signal.ITIMER_PROF, 500.0, 500.0)
    fn = run_both(make, [(tf.constant(draw(16, 28, 28, 1)),)] * 12, jit_compile=True)
    assert fn.stats().launches >= 9
    used = [s.executables for s in steps_with_executables(fn)]
    assert all(e.executable is None or e.executable.launches == 0 or e.executable.backend == "graph" for e in used)
    assert "an interval timer runs" in fn.explain()


def steps_with_executables(fn):
    ahead = [n.start_after() for n in fn.trace_graph.nodes if n.head is n]
    while ahead:
        step = ahead.pop()
        ahead += step.next
        if step.executables is not None and step.executables.executable is not None:
            yield step


def test_xla_takes_over_once_the_timer_ends(ignored):
    @coexec.function(jit_compile=True)
    def step(x):
        for _ in range(20):
            x = tf.tanh(x * 1.1 + 0.1)
        return x

    x = tf.ones([8])
    for _ in range(4):
        step(x)
    executables = [s.executables for s in steps_with_executables(step)]
    assert executables
    assert {e.executable.backend for e in executables} == {"xla"}
    before = [e.executable.launches for e in executables]
    signal.setitimer(signal.ITIMER_PROF, 500.0, 500.0)
    launches = step.stats().launches
    with_timer = [step(x).numpy() for _ in range(3)]
    assert [e.executable.launches for e in executables] == before
    assert sum(e.stand_in.launches for e in executables) == 3
    assert step.stats().launches == launches + 3
    signal.setitimer(signal.ITIMER_PROF, 0)
    np.testing.assert_allclose(with_timer[-1], step(x).numpy(), rtol=1e-5)
    assert sum(e.executable.launches for e in executables) == sum(before) + 1
