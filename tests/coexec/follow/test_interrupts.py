"""Faults: an interrupt or an error inside of the runtime itself, at any of its functions, in calls of every kind.

Afterwards the state is eager's prefix, nothing is installed or locked, and the next calls are right.
"""

import gc
import inspect
import os
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import coexec
import tracer
from coexec import testing
from coexec.compile.compile_thread import Background, background
from coexec.compile.executable import Executable
from coexec.follow import flush, follower
from coexec.launch import executor
from coexec.launch.interpreter import replay
from tests.coexec import TIMEOUT, in_thread
from tracer import hooks, intercept, merge
from tracer.private import pywrap_tfe
from tracer.recorder import Recorder

pytestmark = pytest.mark.slow

PACKAGES = tuple(os.path.dirname(os.path.abspath(m.__file__)) + os.sep for m in (coexec, tracer))

# Python has no way to keep an interrupt from coming when these have been called and have done nothing yet; then hooks,
# or a call's entry in a list, stay, which costs time. (A real one comes there once in some ten thousand.) What
# finalizers raise reaches nobody. As `hook` begins, nothing has been done for a tape that is given up: TensorFlow's own
# Python leaves it recording, too, where an interrupt comes right before its C function is called.
UNPROTECTED = {
    "hook", "hold", "release", "_install", "_uninstall", "enter_run", "leave_run", "__enter__", "__exit__", "close",
    "_settle", "_remove", "drop", "tidy_up",
}  # fmt: skip

X = tf.constant([1.0, 2.0, 3.0])
POINTS = {False: 20, True: 8}  # of each kind of call; XLA compiles anew for most


@pytest.fixture(autouse=True)
def compiled(tune):
    """Every segment is launched, however small and however busy the machine is."""
    tune(compile_allowance=1000.0)
    with testing.compile_everything():
        yield


class Fault:
    """Raises when so many functions of the runtime have been called."""

    def __init__(self, error, at):
        self.error, self.at = error, at
        self.count, self.place = 0, None

    def _called(self, frame, event, arg):
        code = frame.f_code
        ends_alone = code.co_flags & inspect.CO_GENERATOR  # when it is collected, what it raises reaches nobody
        if code.co_filename.startswith(PACKAGES) and code.co_name not in UNPROTECTED and not ends_alone:
            self.count += 1
            if self.count > self.at >= 0:
                self.place = f"{os.path.basename(code.co_filename)}: {code.co_name}"
                sys.settrace(None)
                raise self.error

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


class Program:
    """A step whose writes and effects come in turns: four counters, a log, a weight, a tape, a read and a `try`."""

    def __init__(self):
        self.counters = [tf.Variable(0.0) for _ in range(4)]
        self.weight, self.log = tf.Variable([1.0, 2.0, 3.0]), []

    def step(self, x, other=False):
        a, b, c, d = self.counters
        a.assign_add(1.0)
        self.log.append(0)
        y = tf.tanh(x) * 2.0 + a * self.weight
        b.assign_add(1.0)
        self.log.append(1)
        with tf.GradientTape() as tape:
            tape.watch(y)
            z = tf.reduce_sum(y * y) * 0.01
        gradient = tape.gradient(z, y)
        if float(z) > 100.0:
            gradient = gradient * 2.0
        c.assign_add(1.0)
        self.log.append(2)
        if other:
            y = tf.sin(y)
        self.weight.assign(tf.clip_by_value(self.weight - 0.1 * gradient, -5.0, 5.0))
        drawn = tf.random.uniform([3])
        try:
            y = tf.gather(y, tf.cast(a * 0.0, tf.int32))
        except tf.errors.InvalidArgumentError:
            self.log.append("caught")
        d.assign_add(1.0)
        self.log.append(3)
        return z + y, self.weight * 1.0, drawn

    def values(self):
        return [v.numpy() for v in (*self.counters, self.weight)]

    def reset(self):
        for counter in self.counters:
            counter.assign(0.0)
        self.log.clear()

    def assert_right(self, function):
        """One more call does what the plain function does in the same state."""
        before, found = self.values(), []
        for call in (function, self.step):
            for variable, value in zip((*self.counters, self.weight), before, strict=True):
                variable.assign(value)
            tf.random.set_seed(3)
            found.append([np.asarray(t) for t in call(X)] + self.values())
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def assert_nothing_is_left(place):
    """No handler, run, tape or lock is; holders are looked at when all is over."""
    assert intercept.current_handler() is None, place
    assert not intercept._running, place
    assert pywrap_tfe.TFE_Py_TapeSetIsEmpty(), place

    def acquire():
        for lock in (follower.lock, hooks._lock):
            assert lock.acquire(timeout=TIMEOUT), place
            lock.release()

    in_thread(acquire)


# Calls before the one with the fault; whether that takes a new way; whether each operation runs in a launch there.
KINDS = {
    "recorded": (0, False, False), "first followed": (1, False, False), "compiled": (2, False, False),
    "launched": (5, False, True), "diverging": (5, True, False),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("planned")], ids=["interrupt", "error"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_a_fault_anywhere(kind, error, jit_compile):
    """The error arrives, the same one; writes are a prefix of eager's, none twice, and calls go on as if nothing was.

    Where all is launched, an interrupt loses nothing that Python has gone past.
    """
    (calls, other, launched), points = KINDS[kind], POINTS[jit_compile]
    gc.collect()
    holders, program = intercept.holders(), None

    def prepared(program):
        if program is None or calls < 5 or other:
            program = Program()
            program.function = coexec.function(program.step, jit_compile=jit_compile)
            for _ in range(calls):
                program.function(X)
        program.reset()
        return program

    with Fault(error, -1) as counting:
        pass
    program = prepared(None)
    with Fault(error, -1) as counting:
        program.function(X, other)
    arrived = 0
    for at in range(0, counting.count, max(1, counting.count // points)):
        program = prepared(program)
        try:
            with Fault(error, at) as fault:
                program.function(X, other)
        except BaseException as raised:
            # Else a tensor was read that was to come from what failed.
            same = raised is error or raised.__cause__ is error
            arrived += raised is error
            raised = None  # with all frames that it has come through
            assert same, fault.place
        error.__traceback__ = error.__context__ = None
        written = [int(v) for v in program.counters]
        assert written in ([1] * n + [0] * (4 - n) for n in range(5)), f"{fault.place}: {written}"
        noted = [n for n in program.log if n != "caught"]
        assert noted == list(range(len(noted))), f"{fault.place}: {noted}"
        if launched and isinstance(error, KeyboardInterrupt):
            assert sum(written) >= len(noted), f"{fault.place}: {written} {noted}"
        assert_nothing_is_left(fault.place)
        try:
            program.assert_right(program.function)
        except BaseException as failure:
            raise AssertionError(f"the call behind a fault in {fault.place}") from failure
    assert arrived >= points // 4  # errors in compiling are met there
    del program
    gc.collect()
    assert intercept.holders() <= holders


def chain(x):
    for _ in range(4):
        x = tf.tanh(x) * 2.0
    return x


def once(monkeypatch, owner, name, error):
    """Has a function raise the first time that it is called from now on; returns what tells how often it was."""
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == 1:
            raise error
        return original(*args, **kwargs)

    wrapped = compiled_as_the_runtimes(wrapped, original, calls, error)
    monkeypatch.setattr(owner, name, wrapped)
    return calls


def compiled_as_the_runtimes(function, original, calls, error):
    """Debug wrappers around the runtime's functions must not count as the user's frames."""
    source = (
        "def wrapped(*args, **kwargs):\n    calls.append(1)\n    if len(calls) == 1:\n        raise error\n"
        "    return original(*args, **kwargs)\n"
    )
    names = {"original": original, "calls": calls, "error": error}
    exec(compile(source, follower.__file__, "exec"), names)
    return names["wrapped"]


def out_of_memory(fn, x):
    """Calls the function eight times; returns how often memory ran out. All other results are eager's."""
    raised = 0
    for n in range(8):
        try:
            np.testing.assert_allclose(fn(x + n), chain(x + n), rtol=1e-6)
        except MemoryError:
            raised += 1
    return raised


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Executable, "__init__"), (Executable, "launch"), (executor, "make_plan")],
    ids=["emitting", "launching", "planning"],
)
def test_memory_runs_out_where_the_runtime_works(owner, name, jit_compile, monkeypatch):
    """In compiling or launching: operations run one by one, and nobody hears of it where that can be."""
    calls = once(monkeypatch, owner, name, MemoryError("planned"))
    fn = coexec.function(chain, jit_compile=jit_compile)
    raised = out_of_memory(fn, X)
    assert len(calls) >= 1
    assert raised <= (name == "make_plan")
    assert fn.stats().followed + raised >= 7
    assert name == "make_plan" or "planned" in fn.explain()


@pytest.mark.parametrize(
    ("owner", "name", "new"),
    [(Recorder, "_note", False), (merge, "merge", False), (tracer.cursor.Cursor, "adopt", True)],
    ids=["recording", "learning", "wiring"],
)
def test_memory_runs_out_where_the_runtime_learns(owner, name, new, monkeypatch):
    """The program hears of it, as it might of any; the next calls are right, and are followed again."""
    from coexec.dispatch import controller

    owner = controller if owner is merge else owner
    fn = coexec.function(chain)
    for n in range(3 * new):
        fn(X + n)
    calls = once(monkeypatch, owner, name, MemoryError("planned"))
    raised = out_of_memory(fn, tf.ones([2, 2]) if new else X)
    assert (raised, len(calls) >= 1) == (1, True)
    assert fn.stats().followed >= 5
    assert_nothing_is_left(name)


def test_memory_runs_out_in_the_background(monkeypatch, tune):
    """XLA's compilation fails: the graph stays, with the reason, and the thread goes on with what is next."""
    tune(xla_price=0.0, launch_operations=1, xla_at_once=False)

    def prepare(self, device):
        raise MemoryError("no memory for a compiler")

    monkeypatch.setattr(Executable, "prepare", prepare)
    fn = coexec.function(chain)
    for n in range(4):
        np.testing.assert_allclose(fn(X + n), chain(X + n), rtol=1e-6)
    assert background.wait(TIMEOUT)
    launches = fn.stats().launches
    np.testing.assert_allclose(fn(X), chain(X), rtol=1e-6)
    assert fn.stats().launches == launches + 1
    assert "no memory for a compiler" in fn.explain()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_compiling_thread_dies():
    """Jobs that come after it are done, on another one."""
    queue, done = Background(), []

    def die():
        raise SystemExit

    assert queue.submit("dies", die)
    thread = queue._thread
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert queue.submit("next", lambda: done.append(threading.current_thread()))
    assert queue.wait(TIMEOUT)
    assert done
    assert done[0] is not thread


def test_a_callback_fails():
    """What a callback raises arrives as eagerly, from a recorded, followed and diverging call; state is eager's."""
    outcomes = []
    for wrap in (lambda f: f, coexec.function):
        v = tf.Variable(0.0)

        def callback(x):
            if x[0] > 3.0:
                raise MemoryError("planned")
            return x * 2.0

        @wrap
        def step(x, how, v=v, callback=callback):
            v.assign_add(1.0)
            y = how(callback, [x + 1.0], tf.float32) + 1.0
            v.assign_add(10.0)
            return y

        found = []
        for how in (tf.numpy_function, tf.py_function):
            for n in (5.0, 1.0, 1.0, 1.0, 5.0, 1.0, 5.0, 1.0):
                try:
                    found.append(step(tf.fill([3], n), how).numpy().tolist())
                except Exception as error:
                    found.append((type(error).__name__, "planned" in str(error)))
                found.append(float(v))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    assert step.stats().followed >= 8


def test_a_pending_segment_is_put_back():
    """What an interrupt keeps from being launched is carried out later, once; what was launched has its values."""
    program = Program()
    fn = coexec.function(program.step, jit_compile=False)
    for _ in range(4):
        fn(X)
    program.reset()
    original = flush.held_back
    assert replay
    interrupt = KeyboardInterrupt()

    def held_back(*args):
        flush.held_back = original
        raise interrupt

    flush.held_back = held_back
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            fn(X)
    finally:
        flush.held_back = original
    assert caught.value is interrupt
    assert [int(v) for v in program.counters] == [1, 1, 0, 0]
    assert program.log == [0, 1]


@pytest.mark.parametrize("regions", [True, False])
def test_records_that_an_interrupt_kept_from_their_tape_come_there_later(regions):
    """A program that catches an interrupt in a gradient, and asks again, gets eager's gradient."""
    interrupt, caught = KeyboardInterrupt(), []

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.tanh(x) * x
            z = tf.reduce_sum(y * y)
            try:
                tape.gradient(z, x)
            except KeyboardInterrupt:
                caught.append(x)
            z = z * 2.0
        return tape.gradient(z, x)

    fn, expected = coexec.function(regions=regions)(step), step(X)
    for _ in range(2):
        fn(X)
    with Fault(interrupt, -1) as counting:
        fn(X)
    for at in range(0, counting.count, max(1, counting.count // 60)):
        found = None
        try:
            with Fault(interrupt, at) as fault:
                found = fn(X)
        except KeyboardInterrupt:
            pass
        interrupt.__traceback__ = interrupt.__context__ = None
        assert_nothing_is_left(fault.place)
        if found is not None:
            np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=fault.place)
    assert caught
