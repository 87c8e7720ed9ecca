"""The border: what the runtime itself raises while a call runs reaches nobody, and the call does what eager does."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.budget import Budget
from coexec.base.tuning import tuning
from coexec.dispatch.controller import Controller
from coexec.follow.follower import Follower
from coexec.launch.executor import SegmentExecutor
from tests.faults import ROOT
from tracer import intercept
from tracer.cursor import Cursor
from tracer.recorder import Recorder

X = tf.constant([1.0, 2.0, 3.0])

# What raises, and what is kept from working by that.
BROKEN = [
    (Follower, "_step_of"), (Follower, "expected"), (Follower, "flush"), (SegmentExecutor, "run"),
    (SegmentExecutor, "_compile"),
    (Cursor, "advance"), (Cursor, "adopt"), (Cursor, "cut"), (Recorder, "_note"),
]  # fmt: skip


class Planned(Exception):
    """What the tests raise."""


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Every segment is launched, and failures of the runtime are dealt with as for users."""
    monkeypatch.setenv("COEXEC_DEBUG", "0")
    with testing.compile_everything():
        yield
    assert intercept.current_handler() is None
    assert not intercept._running


class Program:
    """A step of two writes, an effect and a read."""

    def __init__(self):
        self.count, self.weight, self.log = tf.Variable(0.0), tf.Variable([1.0, 1.0, 1.0]), []

    def step(self, x, new=False):
        self.count.assign_add(1.0)
        y = tf.tanh(x) * self.weight
        if new:
            y = tf.sin(y)
        self.log.append(round(float(tf.reduce_sum(y)), 4))
        self.weight.assign_add(y)
        return y + self.count

    def after(self, function, calls):
        found = [function(X, *rest).numpy() for rest in calls]
        return [*found, self.count.numpy(), self.weight.numpy(), self.log]


def broken(monkeypatch, owner, name, times, kind=Planned):
    """Has a function of the runtime raise so often, as if its own code did; returns how often it has."""
    original, raised = getattr(owner, name), []
    source = (
        "def wrapped(*args, **kwargs):\n    if len(raised) < times:\n        raised.append(1)\n"
        "        raise kind('planned')\n    return original(*args, **kwargs)\n"
    )
    names = {"original": original, "raised": raised, "times": times, "kind": kind}
    exec(compile(source, sys.modules[owner.__module__].__file__, "exec"), names)
    monkeypatch.setattr(owner, name, names["wrapped"])
    return raised


@pytest.mark.parametrize(("owner", "name"), BROKEN, ids=lambda part: getattr(part, "__name__", part))
def test_a_failure_shows_nowhere_but_in_explain(owner, name, monkeypatch):
    """Values, state and effects are eager's; the reason is kept, with the traceback; later calls are followed again."""
    calls = [(), (), (), (), (True,), (), (), ()]
    eager, program = Program(), Program()
    expected = eager.after(eager.step, calls)
    fn = coexec.function(program.step, jit_compile=False)
    fn(X), fn(X)
    program.count.assign(0.0), program.weight.assign([1.0, 1.0, 1.0]), program.log.clear()
    raised = broken(monkeypatch, owner, name, 1)
    found = program.after(fn, calls)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert raised
    assert "failure of the runtime itself" in fn.explain()
    assert "Traceback" in fn.explain()
    assert "Planned: planned" in fn.explain()
    assert fn.stats().followed >= 3


@pytest.mark.parametrize("how", ["debug", "strict"])
def test_failures_are_raised_for_who_asks(how, monkeypatch):
    """`COEXEC_DEBUG=1` and `strict` raise what was raised, with the state as it is at that line."""
    program = Program()
    if how == "debug":
        monkeypatch.setenv("COEXEC_DEBUG", "1")
    fn = coexec.function(program.step, strict=how == "strict")
    for _ in range(3):
        fn(X)
    broken(monkeypatch, Cursor, "match", 1)
    monkeypatch.setattr(Follower, "expected", lambda *_: None)
    with pytest.raises(Planned):
        fn(X)
    assert float(program.count) == 3.0
    fn(X)
    assert float(program.count) == 4.0


def test_a_function_that_keeps_failing_is_given_up(monkeypatch):
    """It runs plainly then, and says so."""
    eager, program = Program(), Program()
    expected = eager.after(eager.step, [()] * 12)
    fn = coexec.function(program.step)
    raised = broken(monkeypatch, Cursor, "adopt", 10**6)
    found = program.after(fn, [()] * 12)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert len(raised) == tuning.max_faults
    assert f"the runtime has failed in {tuning.max_faults} calls" in fn.explain()
    assert fn.stats().imperative >= 12 - 2 * tuning.max_faults


def test_errors_of_the_program_are_no_failures():
    """Operations that fail, layers that are given the wrong thing, conversions, Python: all arrive, none is ours."""
    layer = keras.layers.Dense(2)
    layer(tf.zeros([1, 3]))

    class Odd:
        def __array__(self, *_, **__):
            raise KeyError("odd")

    def step(x, what):
        y = x * 2.0
        if what == "operation":
            return tf.gather(y, 7)
        if what == "layer":
            return layer(tf.zeros([1, 4]))
        if what == "shapes":
            return tf.matmul(y, y)
        if what == "conversion":
            return y + tf.constant("a")
        if what == "array":
            return tf.raw_ops.Mul(x=y, y=Odd())
        if what == "truth":
            return bool(y > 1.0)
        if what == "python":
            return {}[what]
        if what == "callback":
            return tf.numpy_function(lambda v: 1 // 0, [y], tf.float32)
        return y

    fn = coexec.function(step)
    for what in ("operation", "layer", "shapes", "conversion", "array", "truth", "python", "callback") * 3:
        fn(X, "")
        with pytest.raises(Exception) as eager:
            step(X, what)
        with pytest.raises(type(eager.value)):
            fn(X, what)
    assert "failure of the runtime itself" not in fn.explain()
    assert not fn._controller.given_up


def test_what_fails_behind_a_library_call_does_not_run_it_again(monkeypatch):
    """The gradient of a tape that is not persistent can be asked for once."""
    weight, log = tf.Variable([1.0, 2.0, 3.0]), []

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weight * x) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        log.append(len(log))
        return weight * 1.0

    expected = [step(X).numpy() for _ in range(4)]
    weight.assign([1.0, 2.0, 3.0])
    log.clear()
    raised = broken(monkeypatch, Budget, "spend", 2)
    found = [fn(X).numpy() for fn in [coexec.function(step)] for _ in range(4)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (len(raised), log) == (2, [0, 1, 2, 3])


def test_a_recursion_without_end_hides_no_error_that_is_being_handled(monkeypatch):
    """It ends in the runtime's code, and so does what follows: the program's `except` has had its own error before."""

    def step(x):
        try:
            return x.nothing
        except AttributeError:
            return tf.sin(x)

    fn = coexec.function(step)
    fn(X), fn(X), fn(X)
    raised = [
        broken(monkeypatch, Follower, "fault", 1, RecursionError),
        broken(monkeypatch, Follower, "expected", 1),
        broken(monkeypatch, Controller, "_leave", 1),
    ]
    with pytest.raises(RecursionError, match="planned"):
        fn(X)
    assert [len(times) for times in raised] == [1, 1, 1]
    np.testing.assert_allclose(fn(X), tf.sin(X))


@pytest.mark.slow
def test_faults_in_all_functions(request):
    """A sample of the points of `make test-faults`; the whole takes an hour."""
    seconds = float(os.environ.get("COEXEC_FAULTS", "60"))
    arguments = [sys.executable, "-m", "tests.faults", f"--seconds={seconds}", "--seed=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds + 200)
    last = done.stdout.splitlines()[-1]
    print(last)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(last.split()[0]) > seconds
