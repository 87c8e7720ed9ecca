"""XLA in the background: what it compiles takes over only where it is faster, and nothing waits for it."""

import logging
import re
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.stats import Kind
from coexec.base.tuning import tuning
from coexec.compile.compile_thread import Background, background
from coexec.compile.executable import Executable
from coexec.launch import backend_race, executor

X = tf.reshape(tf.linspace(-1.0, 1.0, 32), [4, 8])


@pytest.fixture(autouse=True)
def cheap(tune):
    """XLA is asked as soon as a segment has come twice."""
    tune(xla_price=0.0)


def training():
    """A step on variables, its state, and a count of what its Python did."""
    weights = [tf.Variable(tf.random.stateless_normal([8, 8], [n, 1]) * 0.3) for n in range(4)]
    seen = []

    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for w in weights:
                y = tf.tanh(y @ w)
            loss = tf.reduce_mean(y * y)
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * g)
        seen.append(len(seen))
        return loss

    return step, weights, seen


def backends(fn):
    """The backends that the segments of a function are launched with now."""
    found = [c.executable.backend for c in fn._controller.segments._all if c.executable is not None]
    assert found
    return found


def settled(fn, *args, calls=3 + 2 * (tuning.race_most + 1)):
    """Makes calls until nothing more is going to change, and returns their results."""
    results = [fn(*args).numpy() for _ in range(3)]
    assert background.wait(120)
    return results + [fn(*args).numpy() for _ in range(calls)]


def test_a_step_stays_right_while_executables_change():
    """Losses, variables and Python effects are eager's before, during and after the competition of backends."""
    step, weights, seen = training()
    plain, right, noted = training()
    fn = coexec.function(step)
    results = settled(fn, X)
    np.testing.assert_allclose(results, [plain(X).numpy() for _ in results], rtol=1e-4)
    for mine, other in zip(weights, right, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-4, atol=1e-6)
    assert seen == noted
    assert fn.stats().compiles == 2
    assert "backend chosen by measurement:" in fn.explain()


@pytest.mark.parametrize(("slow", "winner"), [("graph", "xla"), ("xla", "graph")])
def test_the_faster_backend_stays(slow, winner, monkeypatch):
    """Whichever backend takes longer is given up."""
    launch = Executable.launch

    def slowed(self, *given):
        if self.backend == slow:
            time.sleep(0.02)
        return launch(self, *given)

    monkeypatch.setattr(Executable, "launch", slowed)
    fn = coexec.function(training()[0])
    settled(fn, X)
    assert testing.is_settled(fn)
    assert backends(fn) == [winner]
    (cause,) = [c for c in fn._controller.ledger.causes if c.kind is Kind.BACKEND]
    assert cause.text.startswith("XLA is faster" if winner == "xla" else "the graph is no slower")


TIMES = {
    "clearly": ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1], "xla"),
    "clearly not": ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1], "graph"),
    "but for one moment": ([2, 2, 2, 2, 2], [1, 1, 9, 1, 1], "xla"),
    "after two bad moments": ([2, 2, 2, 2, 2, 2, 2, 2, 2, 2], [9, 1, 9, 1, 1, 1, 1, 1, 1, 1], "xla"),
    "never clearly": ([2, 2, 2, 2, 2] * 5, [1, 1, 1, 3, 3] * 5, "xla"),
    "never clearly, and mostly not": ([2, 2, 2, 2, 2] * 5, [1, 1, 3, 3, 3] * 5, "graph"),
}


@pytest.mark.parametrize("name", TIMES)
def test_moments_of_a_busy_machine(name):
    """The competition goes on until one backend is the faster in four pairs of five, or it has lasted long."""
    graph = SimpleNamespace(backend="graph", name=name, outputs=(), call_inline=lambda: None)
    rival = SimpleNamespace(backend="xla", name=name, outputs=())
    compiled = backend_race.Compiled(graph)
    compiled.compete(rival, on_cpu=True)
    ours, theirs, winner = TIMES[name]
    left = [9.0, *ours], [9.0, *theirs]  # the first pair does not count
    for number, pair in enumerate(zip(*left, strict=True)):
        for executable, took in zip((graph, rival), pair, strict=True):
            assert compiled.next() is executable, f"decided after {number} pairs"
            reason = compiled.took(executable, took)
    assert reason is not None
    assert (compiled.rival, compiled.executable.backend) == (None, winner)


def test_a_segment_that_has_not_taken_its_price_is_not_settled(tune):
    """Benchmarks wait for that: XLA is asked later."""
    tune(xla_price=1e9)
    fn = coexec.function(training()[0])
    for _ in range(5):
        fn(X)
    assert backends(fn) == ["graph"]
    assert not testing.is_settled(fn)


def test_compiling_changes_nothing_of_the_programs():
    """While XLA compiles, on variables of its own, the program's variables keep their values."""
    step, weights, _ = training()
    fn = coexec.function(step)
    for _ in range(3):
        fn(X)
    before = [w.numpy() for w in weights]
    assert background.wait(120)
    for mine, other in zip(before, weights, strict=True):
        np.testing.assert_array_equal(mine, other.numpy())


def test_no_call_waits(monkeypatch):
    """Calls go on, launched as a graph, while a compilation never ends."""
    began, goes_on = threading.Event(), threading.Event()

    def prepare(self, device):
        began.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(Executable, "prepare", prepare)
    fn = coexec.function(training()[0])
    try:
        for _ in range(3):
            fn(X)
        assert began.wait(60)
        before = fn.stats()
        for _ in range(10):
            fn(X)
        assert fn.stats().launches - before.launches == 10
        assert backends(fn) == ["graph"]
    finally:
        goes_on.set()
        assert background.wait(60)


def test_a_failed_compilation_leaves_the_graph(monkeypatch):
    """What XLA cannot compile stays a graph, with the reason kept, and XLA is not asked again."""
    asked = []

    def prepare(self, device):
        asked.append(self)
        raise tf.errors.InvalidArgumentError(None, None, "no registered kernel")

    monkeypatch.setattr(Executable, "prepare", prepare)
    fn = coexec.function(training()[0])
    settled(fn, X)
    assert backends(fn) == ["graph"]
    assert len(asked) == 1
    assert "no registered kernel" in fn.explain()


@pytest.mark.parametrize(("jit", "expected"), [(True, "xla"), (False, "graph")])
def test_a_forced_backend_is_not_measured(jit, expected):
    """`jit_compile=True` and False have one backend from the first launch on."""
    fn = coexec.function(training()[0], jit_compile=jit)
    settled(fn, X)
    assert backends(fn) == [expected]
    assert fn.stats().compiles == 1
    assert "backend chosen" not in fn.explain()


def test_determinism_is_not_left_to_the_clock(monkeypatch):
    """Under `enable_op_determinism` time decides nothing: XLA is not asked."""
    monkeypatch.setattr(executor, "is_op_determinism_enabled", lambda: True)
    fn = coexec.function(training()[0])
    settled(fn, X)
    assert (backends(fn), fn.stats().compiles) == (["graph"], 1)


def test_tensors_that_are_read_later_than_compiled():
    """Where other tensors are read behind a cut while XLA compiles, what it compiled is not used."""
    kept = []

    def step(x, keep):
        y = x
        for _ in range(10):
            y = tf.tanh(y + 0.5)
        z = y * 2.0
        if keep:
            kept.append(y)
        return z

    fn = coexec.function(step)
    for number in range(40):
        np.testing.assert_allclose(fn(X, number > 4).numpy(), step(X, False).numpy(), rtol=1e-6)
        if number in (3, 6, 20):
            assert background.wait(60)
    for y in kept:
        np.testing.assert_allclose(y.numpy() * 2.0, step(X, False).numpy(), rtol=1e-6)


def test_everything_is_compiled_at_once_for_tests():
    """`testing.compile_everything` waits for XLA, so that tests can count on it."""
    with testing.compile_everything():
        fn = coexec.function(training()[0])
        for _ in range(3):
            fn(X)
        assert backends(fn) == ["xla"]


# The queue.


def test_jobs_are_done_in_order_and_failures_are_told(tune, caplog):
    """One job that fails is told of and keeps no other from being done; the thread ends and comes again."""
    queue, done = Background(), []
    tune(compile_idle=0.01)
    assert queue.submit("first", lambda: done.append(1))
    assert queue.submit("second", lambda: done.append(1 / 0))
    assert queue.submit("third", lambda: done.append(3))
    assert queue.wait(10)
    assert done == [1, 3]
    assert "second failed" in caplog.text
    deadline = time.monotonic() + 10
    while queue._thread is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert queue._thread is None
    assert queue.submit("fourth", lambda: done.append(4))
    assert queue.wait(10)
    assert done == [1, 3, 4]


def test_the_queue_is_bounded():
    """What does not fit is refused, and `wait` says so if there is more to do."""
    queue, began, goes_on = Background(), threading.Event(), threading.Event()
    assert queue.submit("long", lambda: began.set() or goes_on.wait(60))
    assert began.wait(10)
    taken = [queue.submit("more", lambda: None) for _ in range(2 * tuning.compile_queue)]
    assert sum(taken) == tuning.compile_queue
    assert not queue.wait(0.01)
    goes_on.set()
    assert queue.wait(10)


def test_long_work_is_told(caplog, tune):
    """Two lines say what takes long, when it does and when it is done."""
    tune(slow_seconds=0.05)
    queue = Background()
    with caplog.at_level(logging.WARNING, "coexec"):
        queue.submit("compiling it all", lambda: time.sleep(0.3))
        assert queue.wait(10)
    assert [m.partition(":")[0] for m in caplog.messages] == ["compiling it all"] * 2
    assert "in the background" in caplog.messages[0]


@pytest.mark.parametrize("validates", [False, True])
def test_long_work_in_a_call_is_told(caplog, tune, monkeypatch, validates):
    """With `jit_compile=True` the first launch waits for XLA; later ones take no time, and say nothing."""
    tune(slow_seconds=0.1, validates_new=validates)
    launch = Executable.launch

    def slowed(self, *given):
        if self.launches == 0:
            time.sleep(0.3)
        return launch(self, *given)

    monkeypatch.setattr(Executable, "launch", slowed)
    step = coexec.function(lambda x: tf.tanh(x * 1.1 + 0.1), jit_compile=True, name="waiting")
    with testing.compile_everything(), caplog.at_level(logging.WARNING, "coexec"):
        for _ in range(5):
            step(tf.ones([17]))
    assert step.stats().launches >= 3
    told = [m.removeprefix("waiting: the first launch of 3 operations before ") for m in caplog.messages]
    assert len(told) == 2
    assert told[0].endswith(": takes more than 0 s, as XLA has to compile them first")
    assert re.search(r": done after 0\.[3-9] s$", told[1])


EXITING = """
import time
import tensorflow as tf
import coexec
from coexec.base.tuning import tuning
tuning.xla_price = 0.0
weights = [tf.Variable(tf.random.normal([32, 32])) for _ in range(48)]

@coexec.function
def step(x):
    with tf.GradientTape() as tape:
        y = x
        for w in weights:
            y = tf.tanh(y @ w)
        loss = tf.reduce_sum(y)
    for w, g in zip(weights, tape.gradient(loss, weights)):
        w.assign_sub(g * 1e-3)
    return loss

for _ in range(4):
    step(tf.ones([8, 32]))
from coexec.compile import compile_thread
tuning.slow_seconds = 0.01
time.sleep(0.2)
assert compile_thread.background._working
print("ends", time.time(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "raise KeyboardInterrupt"])
def test_the_process_ends_during_a_compilation(how):
    """The process ends as it should, once XLA, which cannot be interrupted, is done; nothing crashes."""
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(EXITING) + how], capture_output=True, timeout=120)
    assert run.returncode == (0 if not how else -2), run.stderr[-2000:]
    assert b"waiting for XLA" in run.stderr


def test_xla_gets_a_bounded_number_of_shapes(monkeypatch, tune, exact_sizes):
    """XLA never frees what it has compiled: of one place it gets so many shapes, then no more, and all stay right."""
    tune(max_xla_shapes=3)
    step, _, _ = training()
    plain, _, _ = training()
    prepared = []
    prepare = Executable.prepare
    monkeypatch.setattr(Executable, "prepare", lambda self, device: prepared.append(self.name) or prepare(self, device))
    fn = coexec.function(step, name="shapes")
    for turn in range(2):  # what has been compiled once is asked for again after `clear`
        for rows in range(1, 7):
            x = tf.ones([rows, 8]) / rows
            for _ in range(5):
                np.testing.assert_allclose(fn(x).numpy(), plain(x).numpy(), rtol=1e-4)
            assert background.wait(60)
        assert len(set(prepared)) == 3
        assert ("never frees its code" in fn.explain()) is True
        assert fn.stats().followed >= 20 * (turn + 1)
        fn.clear()
    assert len(prepared) == 6
