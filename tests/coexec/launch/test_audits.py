"""What is compiled is compared with its operations again, long after its first launch, within a share of the time."""

import time
import types
import warnings

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuning
from coexec.compile.executable import Executable
from coexec.launch import audits
from tests.coexec import outcomes, unchanged
from tests.coexec.launch.test_validate import JIT, X, accumulator
from tests.snapshots import assert_same
from tracer.intercept import handling

pytestmark = pytest.mark.distrusting

LATE = 20  # launches after which what was right is wrong


@pytest.fixture
def generous(tune):
    """Audits may take whatever they take."""
    tune(audit_share=1e9)


@pytest.fixture
def late(monkeypatch):
    """Executables are wrong from some launch on: what they give, and what they write."""
    launch = Executable.launch

    def wrong(self, *values):
        results = launch(self, *values)
        with handling(None):  # no operation of the program's
            return [results[0] + 1.0, *results[1:]] if self.launches > LATE else results

    monkeypatch.setattr(Executable, "launch", wrong)


def run(make, calls, **options):
    """Returns what calls do eagerly, what they do decorated, and the decorated function."""
    expected = outcomes(make(unchanged), [(X,)] * calls)
    step = make(coexec.function(**options))
    with testing.compile_everything():
        found = outcomes(step, [(X,)] * calls)
    return expected, found, step


def test_a_fault_that_shows_late_is_found_and_mended(generous, late, backend):
    """The author is told once; from the audit on all is eager's, each effect done once."""
    with pytest.warns(RuntimeWarning, match="Please report") as told:
        expected, found, step = run(accumulator, 100, jit_compile=JIT[backend])
    assert len(told) == 1
    text = str(told[0].message)
    assert "step that was wrong" in text
    assert "test_validate.py" in text
    assert "12 of 12 values differ" in text
    assert tf.__version__ in text
    assert "found by validation" in step.explain()
    same = []
    for one, other in zip(expected, found, strict=True):
        try:
            assert_same(one, other)
            same.append(True)
        except AssertionError:
            same.append(False)
    wrong = same.index(False)  # it was wrong while nobody looked
    mended = same.index(True, wrong)
    assert mended - wrong < tuning.audit_growth * LATE
    assert step.stats().followed == 99
    # What it wrote was right, so that all is well behind the audit; the graph behind XLA's becomes wrong in its turn.
    if backend == "graph":
        assert all(same[mended:])


def test_warnings_that_are_errors_do_not_end_the_call(generous, late):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found, step = run(accumulator, 60, jit_compile=False)
    assert {outcome.parts["[0]"] for outcome in found} == {"returned"}
    assert "found by validation" in step.explain()


def test_what_is_right_stays_as_it_is(generous, backend):
    """Values, random numbers and state are eager's with audits, which come at growing distances."""

    def make(decorate):
        tf.random.set_seed(5)
        generator, v = tf.random.Generator.from_seed(7), tf.Variable([1.0, 2.0])

        @decorate
        def step(x):
            v.assign(v * 0.5 + tf.random.uniform([2]) + generator.uniform([2]))
            return v + 0.0, generator.state + 0, tf.random.uniform([3], seed=3)

        return step

    expected, found, step = run(make, 60, jit_compile=JIT[backend])
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one, other, path=f"call {number}: ")
    assert 3 <= step.stats().validated <= 10
    assert "found by validation" not in step.explain()


@pytest.mark.parametrize("why", ["mode", "trusted", "determinism", "later"])
def test_where_there_is_none(generous, tune, monkeypatch, why):
    """Where a mode says what is validated, where runs are to be equal to the bit, and after the first calls."""
    step = accumulator(coexec.function(jit_compile=False))
    with testing.compile_everything():
        for _ in range(4):
            step(X)
    assert step.stats().validated == 1
    if why == "later":
        tune(audit_calls=5)
        step._controller.segments.audits._made = 1
        step(X)
    if why == "determinism":
        monkeypatch.setattr(audits, "is_op_determinism_enabled", lambda: True)
    if why == "mode":
        with coexec.validate(every=0):
            for _ in range(30):
                step(X)
    elif why == "trusted":
        with testing.trust_compiled():
            for _ in range(30):
                step(X)
    else:
        for _ in range(30):
            step(X)
    assert step.stats().validated == 1


def test_audits_take_a_small_share_of_the_time(tune):
    """What they take was saved up before, and is known from the audit before; behind the first calls there is none."""
    tune(audit_share=0.01)
    decided = audits.Audits()
    executable = types.SimpleNamespace(trusted=True, launches=8, audit_at=0, audited_in=0.0, ops=100, took=1e-3)
    spent = total = 0.0
    calls = 0
    while decided.open:
        calls += 1
        decided.called(0.01)
        total += 0.01
        executable.launches += 1
        if decided.wants(executable):
            decided.took(executable, 0.02)
            spent += 0.02
            assert spent <= 0.01 * total + 0.005
    assert calls == tuning.audit_calls
    assert spent >= 0.04


def test_there_is_one_where_calls_are_short(tune):
    """However long it takes to save up for it."""
    tune(audit_share=0.01)
    decided = audits.Audits()
    executable = types.SimpleNamespace(trusted=True, launches=8, audit_at=0, audited_in=0.0, ops=100, took=1e-4)
    calls = 0
    while not decided.wants(executable):
        decided.called(1e-4)
        calls += 1
    assert calls > 5 * tuning.audit_calls
    assert decided.open
    decided.took(executable, 0.01)
    decided.called(1e-4)
    assert not decided.open


@pytest.mark.clocked
def test_a_step_pays_little_for_them():
    """By the clock of a real step, nothing made up: its audits take no more than their share and one too many."""
    v = tf.Variable(np.ones((64, 64), np.float32))

    @coexec.function(jit_compile=False)
    def step(x):
        for _ in range(12):
            x = tf.tanh(x @ v) * 0.5
        return tf.reduce_sum(x)

    x = tf.ones((64, 64))
    began = time.perf_counter()
    for _ in range(400):
        float(step(x))
    took = time.perf_counter() - began
    executable = next(iter(step._controller.segments._executables.values()))
    assert step.stats().validated <= 1 + 5
    assert executable.audited_in <= 0.1 * took
