"""Spellings: how what surrounds operations is written decides neither what they do nor how they are launched."""

import contextlib
import logging
import sys
import textwrap
import threading
import time
import warnings  # noqa: F401 - for a spelling

import numpy as np
import pytest
import tensorflow as tf

import coexec
from tracer import frame_slots

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="names decide before Python 3.11")


class Timer:
    """Says how long something took."""

    def __init__(self):
        self.times, self.count, self.elapsed = [], 0, 0.0

    def __enter__(self):
        self.start = time.perf_counter()
        return self

    def __exit__(self, kind, error, traceback):
        self.elapsed = time.perf_counter() - self.start
        self.times.append(self.elapsed)
        self.count += 1


class Logger:
    def __init__(self):
        self.logger = logging.getLogger("spellings")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.done("left")
        return False

    def done(self, what):
        self.logger.debug(f"{what} now")


class Sees(Timer):
    """Notes whether there was an error."""

    def __exit__(self, kind, error, traceback):
        self.times.append(kind)


class Swallows(Timer):
    def __exit__(self, *_):
        self.count += 1
        return True


class Chooses(Timer):
    """Swallows where it is told to: by what is no constant."""

    swallows = False

    def __exit__(self, *_):
        return self.swallows


class Writes(Timer):
    """Issues an operation with an effect."""

    def __init__(self):
        super().__init__()
        self.variable = tf.Variable(0.0)

    def __exit__(self, *_):
        self.variable.assign_add(1.0)


@contextlib.contextmanager
def plain():
    yield


@contextlib.contextmanager
def scoped():
    with tf.name_scope("scoped"):
        yield


@contextlib.contextmanager
def timed():
    times, start = [], time.perf_counter()
    try:
        yield times
    finally:
        times.append(time.perf_counter() - start)


@contextlib.contextmanager
def swallowing():
    try:
        yield
    except tf.errors.InvalidArgumentError:
        pass


class Trainer:
    """Holds what a step may reach by attributes."""

    def __init__(self):
        self.tf, self.depth, self.lock = tf, 0, threading.Lock()
        self.counts, self.stages = {"steps": 0}, []

    @contextlib.contextmanager
    def stage(self, name):
        self.stages.append(name)
        try:
            yield self
        finally:
            self.stages.pop()


# BODY computes the loss, of which an operation fails for some `x`; TAPED is that in a tape, indented by one.
BODY = "loss = compute(x)"
TAPED = "    with tf.GradientTape() as tape:\n        BODY"
PLAIN = "with tf.GradientTape() as tape:\n    BODY"
SPELLINGS = {
    "imported inside": "import tensorflow as tf\nwith tf.GradientTape() as tape:\n    BODY",
    "from an import inside": "from tensorflow import GradientTape\nwith GradientTape() as tape:\n    BODY",
    "a closure": "with tensors.GradientTape() as tape:\n    BODY",
    "an attribute": "with self.tf.GradientTape() as tape:\n    BODY",
    "an alias": "Tape = tf.GradientTape\nwith Tape() as tape:\n    BODY",
    "made before": "tape = tf.GradientTape()\nwith tape:\n    BODY",
    "made by a call": "with (lambda: tf.GradientTape())() as tape:\n    BODY",
    "several managers": "with self.tf.name_scope('a'), self.tf.GradientTape() as tape, tf.name_scope('b'):\n    BODY",
    "a scope of version 1": "with self.tf.compat.v1.name_scope('a'), tf.GradientTape() as tape:\n    BODY",
    "control dependencies": "with self.tf.control_dependencies([]), tf.GradientTape() as tape:\n    BODY",
    "a generator": "with plain(), tf.GradientTape() as tape:\n    BODY",
    "a generator with a scope": "with scoped(), tf.GradientTape() as tape:\n    BODY",
    "a generator that cleans up": "with timed(), tf.GradientTape() as tape:\n    BODY",
    "a timer": "with Timer(), tf.GradientTape() as tape:\n    BODY",
    "a timer from a variable": "timer = Timer()\nwith timer:\nTAPED",
    "a logger": "with Logger(), tf.GradientTape() as tape:\n    BODY",
    "a lock": "with self.lock, tf.GradientTape() as tape:\n    BODY",
    "nothing": "with contextlib.nullcontext(), tf.GradientTape() as tape:\n    BODY",
    "raised again": "try:\nTAPED\nexcept Exception:\n    raise",
    "raised again without a class": "try:\nTAPED\nexcept:\n    raise",
    "raised again by name": (
        "try:\nTAPED\nexcept tf.errors.OpError as error:\n    raise"
    ),
    "finally": "self.depth += 1\ntry:\nTAPED\nfinally:\n    self.depth -= 1",
    "a stack of managers": (
        "with contextlib.ExitStack() as stack:\n    tape = stack.enter_context(tf.GradientTape())\n    BODY"
    ),
    "warnings caught": "with warnings.catch_warnings():\nTAPED",
    "a manager's method": "with self.stage('loss'):\nTAPED",
    "errors of Python's": "try:\nTAPED\nexcept (KeyError, StopIteration):\n    return None",
    "errors of Python's, and all": "try:\nTAPED\nexcept KeyError:\n    return None\nexcept Exception:\n    raise",
    "too large": "try:\nTAPED\nexcept tf.errors.ResourceExhaustedError:\n    print('too large')\n    raise",
    "finally with a dict": "try:\nTAPED\nfinally:\n    self.counts['steps'] += 1",
    "finally with a clock": (
        "start, times = time.time(), []\ntry:\nTAPED\n"
        "finally:\n    times.append(time.time() - start)"
    ),
}  # fmt: skip

# What may make a difference where an operation fails.
OTHERS = {
    "a stack that suppresses": (
        "with contextlib.ExitStack() as stack:\n    stack.enter_context(contextlib.suppress(tf.errors.OpError))\nTAPED"
    ),
    "a stack that calls": (
        "with contextlib.ExitStack() as stack:\n    stack.callback(seen.append, 1)\nTAPED"
    ),
    "errors of operations": "try:\nTAPED\nexcept (KeyError, tf.errors.InvalidArgumentError):\n    return None",
    "a name for errors of operations": "try:\nTAPED\nexcept self.tf.errors.OpError:\n    return None",
    "an item that the body writes": (
        "done = {'all': 0}\ntry:\nTAPED\n    done['all'] = 1\n"
        "finally:\n    seen.append(done['all'])"
    ),
    "a dict of tensors": (
        "sums = {'x': tf.constant(0.0)}\ntry:\nTAPED\nfinally:\n    sums['x'] += 1.0"
    ),
    "suppressed": "with contextlib.suppress(tf.errors.OpError):\nTAPED",
    "looked at": "sees = Sees()\nseen.append(sees.times)\nwith sees, tf.GradientTape() as tape:\n    BODY",
    "swallowed": "with Swallows():\nTAPED",
    "swallowed by a choice": "with Chooses():\nTAPED",
    "swallowed by a generator": "with swallowing():\nTAPED",
    "written behind": "with writes, tf.GradientTape() as tape:\n    BODY",
    "another error": "try:\nTAPED\nexcept Exception as e:\n    raise KeyError from e",
    "said": "try:\nTAPED\nexcept Exception:\n    seen.append(1)\n    raise",
    "a flag": (
        "done = False\ntry:\nTAPED\n    done = True\n"
        "finally:\n    seen.append(done)"
    ),
    "left by finally": (
        "for _ in range(1):\n    try:\n        with tf.GradientTape() as tape: BODY\n    finally:\n        break"
    ),
    "a flag of the manager": "with Timer() as timer, tf.GradientTape() as tape:\n    BODY\n    timer.count = 3",
}  # fmt: skip


class Program:
    """One step written in one way, with state of its own."""

    def __init__(self, spelling):
        self.weights = tf.Variable([[0.5, -0.25], [0.125, 1.0]])
        self.writes = Writes()
        self.seen = []
        body = textwrap.indent(spelling.replace("TAPED", TAPED).replace("BODY", BODY), " " * 8)
        source = (
            "def outer(tensors):\n    def step(self, x):\n        tensors\n        loss = None\n"
            f"{body}\n        if loss is None:\n            return None\n"
            "        weights.assign_sub(0.1 * tape.gradient(loss, weights))\n        return loss\n    return step\n"
        )
        own = {"compute": self.compute, "weights": self.weights, "seen": self.seen, "writes": self.writes}
        names = {**globals(), **own}
        exec(compile(source, "<spelling>", "exec"), names)
        self.step = names["outer"](tf)
        self.holder = Trainer()

    def compute(self, x):
        hidden = x @ self.weights
        for _ in range(12):
            hidden = tf.tanh(hidden)
        picked = tf.gather(hidden, tf.cast(x[0, :1], tf.int32) + 1)  # an index out of range fails
        return tf.reduce_sum(tf.square(picked)) + tf.reduce_sum(hidden)

    def run(self, step, x):
        try:
            loss = step(self.holder, tf.constant(x))
            return "loss", None if loss is None else loss.numpy()
        except Exception as error:
            return "error", type(error)

    def state(self):
        return self.weights.numpy().tolist(), self.writes.variable.numpy(), self.seen, self.holder.counts


GOOD = [[0.0, 1.0], [0.5, 0.25]]
BAD = [[7.0, 1.0], [0.5, 0.25]]


def compared(spelling, inputs):
    """Runs a spelling eagerly and followed; returns what was followed."""
    eager, followed = Program(spelling), Program(spelling)
    fn = coexec.function(followed.step)
    for x in inputs:
        expected, got = eager.run(eager.step, x), followed.run(fn, x)
        assert expected[0] == got[0]
        if expected[0] == "error" or expected[1] is None:
            assert expected[1] == got[1]
        else:
            np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)
        one, other = eager.state(), followed.state()
        np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
        assert one[1:] == other[1:]
    return fn


def counts(spelling):
    fn = compared(spelling, [GOOD] * 8)
    before = fn.stats()
    fn(Program(spelling).holder, tf.constant(GOOD))
    after = fn.stats()
    return {name: getattr(after, name) - getattr(before, name) for name in ("launches", "regions", "followed")}


def test_the_value_stack_is_where_it_is_expected():
    assert frame_slots.READABLE


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_spelling_is_as_fast_as_the_plain_one(spelling):
    assert counts(spelling) == {**counts(PLAIN), "launches": 1, "followed": 1}


@pytest.mark.parametrize("spelling", [*SPELLINGS.values(), *OTHERS.values()], ids=[*SPELLINGS, *OTHERS])
def test_an_operation_fails_as_eagerly(spelling):
    fn = compared(spelling, [*[GOOD] * 5, BAD, GOOD, GOOD, BAD, GOOD])
    assert fn.stats().followed > 3


@pytest.mark.parametrize("spelling", OTHERS.values(), ids=OTHERS)
def test_what_may_make_a_difference_cuts(spelling):
    assert counts(spelling)["launches"] == 2


def test_a_manager_that_takes_the_place_of_another_is_noticed():
    """The same instruction enters a tape in some calls, and what swallows errors in others."""
    spelling = "with self.tf.GradientTape() as tape:\n    with self.manager:\n        BODY"
    eager, followed = Program(spelling), Program(spelling)
    fn = coexec.function(followed.step)
    for manager, x in [(Timer, GOOD)] * 6 + [(Swallows, GOOD), (Swallows, BAD), (Timer, GOOD), (Timer, BAD)] * 2:
        eager.holder.manager, followed.holder.manager = manager(), manager()
        expected, got = eager.run(eager.step, x), followed.run(fn, x)
        assert expected == pytest.approx(got) if expected[0] == "loss" and expected[1] is not None else expected == got
        assert eager.holder.manager.count == followed.holder.manager.count
        np.testing.assert_allclose(eager.state()[0], followed.state()[0], rtol=1e-5)
    assert fn.stats().followed > 6


def test_a_region_inside_of_another_manager_is_no_region():
    """A loss that may fail is jumped over in a tape, and run where a failure would be swallowed."""
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(manager, labels):
        with manager:
            return loss(labels, logits)
        return None

    logits = tf.constant([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25]])
    fn = coexec.function(step)
    good, bad = tf.constant([1, 0]), tf.constant([1, 5])
    for make, labels in [(Timer, good)] * 6 + [(Swallows, good), (Swallows, bad), (Timer, good)] * 2:
        expected, got = step(make(), labels), fn(make(), labels)
        assert (expected is None) == (got is None)
        if got is not None:
            np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert fn.stats().regions >= 3


def test_a_manager_is_asked_and_not_changed():
    """No property or method of a program's manager runs when it is looked at."""
    asked = []

    class Curious(Timer):
        def __getattribute__(self, name):
            asked.append(name)
            return super().__getattribute__(name)

    def step(x):
        with Curious():
            return tf.gather(x, tf.cast(x[:1], tf.int32)) * 2.0

    for run in (step, coexec.function(step)):
        for _ in range(5):
            before = len(asked)
            run(tf.constant([0.0, 1.0]))
            calls = asked[before:]
        if run is step:
            expected = calls
    assert calls == expected
