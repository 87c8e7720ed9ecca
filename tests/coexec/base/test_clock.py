"""The clock: what other programs take of the processors is no time of a call."""

import time

import pytest
import tensorflow as tf

import coexec
from coexec.base import clock
from coexec.compile.executable import Executable
from tracer import intercept

X = tf.ones((4, 4))


def long(x):
    for _ in range(40):
        x = tf.tanh(x * 1.1 + 0.1)
    return x


@pytest.fixture
def clocks(monkeypatch):
    """Both clocks, set by hand."""
    found = {"elapsed": 100.0, "computed": 10.0}
    monkeypatch.setattr(clock.time, "perf_counter", lambda: found["elapsed"])
    monkeypatch.setattr(clock.time, "process_time", lambda: found["computed"])
    return found


@pytest.mark.parametrize(
    ("elapsed", "computed", "counts"),
    [(0.5, 0.5, 0.5), (0.5, 0.25, 0.25), (0.5, 2.0, 0.5), (0.5, 0.0, 0.0)],
    ids=["alone", "on a busy machine", "on several processors", "waiting only"],
)
def test_what_counts(clocks, elapsed, computed, counts):
    began = clock.now()
    clocks["elapsed"] += elapsed
    clocks["computed"] += computed
    assert clock.since(began) == (elapsed, counts)


def test_on_other_devices_all_counts(clocks, monkeypatch):
    """What a GPU computes is no time of the process."""
    monkeypatch.setattr(intercept, "device_in_scope", lambda: "/device:GPU:0")
    began = clock.now()
    clocks["elapsed"] += 0.5
    assert clock.since(began) == (0.5, 0.5)


def test_waiting_for_a_processor_is_no_reason_to_back_off(monkeypatch):
    """Launches that wait as on a busy machine; by the elapsed time, every call is slower than a plain one."""
    launch = Executable.launch

    def delayed(self, *given):
        time.sleep(0.03)
        return launch(self, *given)

    monkeypatch.setattr(Executable, "launch", delayed)
    step = coexec.function(long)
    for _ in range(40):
        step(X)
    assert "CX-BACKOFF" not in step.explain()
    assert step.stats().imperative <= 8
    assert step.stats().followed >= 30
