"""`COEXEC_LOGS`: each topic tells its events, one line each, and not too many; other names are told of."""

import logging
import os
import subprocess
import sys

import pytest
import tensorflow as tf

import coexec
from coexec.base import logs
from tests.faults import ROOT

X = tf.constant([1.0, 2.0])


@pytest.fixture
def lines(monkeypatch):
    """Has topics wanted for the test, and returns what is said."""
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())

    logger, handler = logging.getLogger("absl"), Handler()
    logger.addHandler(handler)
    yield lambda topics: monkeypatch.setattr(logs, "wanted", logs.parse(topics)) or found
    logger.removeHandler(handler)


def step(x, kind):
    y = tf.exp(x)
    for _ in range(8):
        y = y * 0.5
    if kind:
        y = tf.square(y)
    return float(tf.reduce_sum(y)), tf.exp(y)


@pytest.mark.parametrize(
    ("topic", "starts"),
    [
        ("diverge", ["coexec diverge: noisy: CX-DIVERGE: new operation: expected Sum at ",
                     "coexec diverge: noisy: CX-LEARN: the same operations come in another way"]),
        ("read", ["coexec read: noisy: CX-READ: a value was read, at "]),
        ("compile", ["coexec compile: noisy: a segment of 10 operations is compiled"]),
        ("region", []),
    ],
)
def test_each_topic_tells_its_events_once(lines, topic, starts):
    said = lines(topic)
    fn = coexec.function(step, name="noisy", jit_compile=False)
    for kind in (0, 0, 0, 0, 0, 0, 1, 1):
        fn(X, kind)
    assert fn.stats().diverged == 1
    assert len(said) == len(starts), said
    assert all(line.startswith(start) for line, start in zip(said, starts, strict=True)), said
    assert not any("\n" in line for line in said)


def test_a_library_call_is_told_of(lines):
    said = lines("region, compile")

    class Counting(tf.keras.layers.Layer):
        calls = 0

        def call(self, x):
            Counting.calls += 1
            return x * 2.0

    layer = Counting()
    fn = coexec.function(lambda x: layer(x), name="counting")
    for _ in range(4):
        fn(X)
    assert [line for line in said if line.startswith("coexec region: counting: CX-LIBRARY: Layer.__call__: ")]


def test_nothing_is_said_unasked(lines):
    said = lines("")
    fn = coexec.function(step)
    for kind in (0, 0, 1):
        fn(X, kind)
    assert not said


def test_too_many_are_left_out_and_counted(lines, tune, monkeypatch):
    """Of one topic; another one has its own count, and after a while the first goes on."""
    tune(log_lines=2, log_seconds=10.0)
    said = lines("all")
    now = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    for n in range(5):
        logs.event("read", f"read {n}")
    logs.event("compile", "one")
    assert said == ["coexec read: read 0", "coexec read: read 1", "coexec compile: one"]
    now[0] += 11.0
    logs.event("read", "read 5")
    assert said[3:] == ["coexec read: 3 more were left out", "coexec read: read 5"]


def test_unknown_names_are_told(lines):
    said = lines("diverge,foo, Bar")
    assert said == [
        "coexec: COEXEC_LOGS names 'foo' and 'bar': no such topic; there are diverge, compile, read, region, and all"
    ]
    assert list(logs.wanted) == ["diverge"]


def test_the_variable_is_read_when_coexec_is_imported():
    program = (
        "import coexec, tensorflow as tf\n"
        "step = coexec.function(lambda x: float(x * 2.0), name='doubling')\n"
        "for _ in range(3): step(tf.constant(1.0))\n"
    )
    given = {**os.environ, "COEXEC_LOGS": "read"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=given, capture_output=True, text=True, check=True
    )
    said = [line for line in done.stderr.splitlines() if "coexec" in line]
    assert len(said) == 1
    assert "coexec read: doubling: CX-READ: a value was read" in said[0]
