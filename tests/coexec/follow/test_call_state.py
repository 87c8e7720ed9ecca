"""The phases of a followed call: the table of transitions, row by row, and the calls that go through each row."""

import collections
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuning
from coexec.follow import call_state, follower
from coexec.follow.call_state import TRANSITIONS, CallState, Event, Phase, after
from coexec.follow.follower import Follower
from tests.coexec import in_thread
from tracer import intercept
from tracer.cursor import Cursor

README = Path(coexec.__file__).parent / "README.md"
X = tf.constant([1.0, 2.0, 4.0])
ROWS = [(row.event, phase) for row in TRANSITIONS for phase in Phase]


@pytest.mark.parametrize(("event", "phase"), ROWS, ids=lambda part: part.name)
def test_a_transition(event, phase):
    """Each cell of the table: where it leads, or that it raises."""
    expected = next(row for row in TRANSITIONS if row.event is event).phases.get(phase)
    if expected is None:
        with pytest.raises(AssertionError, match=f"{event.name} cannot come in phase {phase.name}"):
            after(phase, event)
    else:
        assert after(phase, event) is expected


def test_each_event_has_one_row():
    assert [row.event for row in TRANSITIONS] == list(Event)


def test_what_no_transition_may_do():
    """Nothing leads out of the end; nothing leads from a recorder back to following; only a failure leads to FAILED."""
    for row in TRANSITIONS:
        for before, behind in row.phases.items():
            if before is Phase.ENDED:
                assert behind is Phase.ENDED, row
            if before in (Phase.RECORDING, Phase.FAILED):
                assert behind in (Phase.RECORDING, Phase.FAILED, Phase.ENDED), row
            if behind is Phase.FAILED and before is not Phase.FAILED:
                assert row.event is Event.FAIL_LATE, row


def table():
    """The table as the README prints it."""
    lines = ["| event | " + " | ".join(phase.name for phase in Phase) + " | what is done |"]
    lines.append("| --- |" + " --- |" * (len(Phase) + 1))
    for row in TRANSITIONS:
        cells = [row.phases[phase].name if phase in row.phases else "" for phase in Phase]
        lines.append(f"| {row.event.name} | " + " | ".join(cells) + f" | {row.action} |")
    return "\n".join(lines)


def test_the_readme_prints_the_table():
    assert table() in README.read_text(), f"it should be:\n{table()}"


# The events that calls go through.


@pytest.fixture
def events(monkeypatch):
    """Notes the events of all calls, as (phase, event, phase behind)."""
    found = []

    def noting(phase, event):
        found.append((phase, event, after(phase, event)))
        return found[-1][-1]

    monkeypatch.setattr(call_state, "after", noting)
    monkeypatch.setattr("coexec.follow.flush.after", noting)
    monkeypatch.setattr("coexec.follow.follower.after", noting)
    return found


def names(events):
    return [event.name for _, event, _ in events]


def test_a_followed_call(events):
    fn = coexec.function(lambda x: x * 2.0 + 1.0)
    for _ in range(3):
        fn(X)
    assert names(events) == ["BEGIN", "END"] * 2
    assert fn.stats().followed == 2


def test_a_divergence(events):
    def step(x, other):
        y = x * 2.0
        return tf.exp(y) if other else y + 1.0

    fn = coexec.function(step)
    fn(X, False), fn(X, False)
    found = fn(X, True)
    assert names(events)[-3:] == ["BEGIN", "DIVERGE", "END"]
    np.testing.assert_allclose(found, step(X, True))
    assert fn.stats().diverged == 1


def test_a_failure_in_place(events):
    """An operation inside of a `try` is launched there; what comes behind it is recorded."""

    def step(index):
        try:
            y = tf.gather(X * 2.0, index)
        except tf.errors.InvalidArgumentError:
            y = tf.zeros([])
        return y + 1.0

    fn = coexec.function(step)
    for _ in range(3):
        fn(tf.constant(1))
    del events[:]
    assert float(fn(tf.constant(7))) == 1.0
    assert names(events) == ["BEGIN", "FAIL_IN_PLACE", "END"]


def test_an_error_that_is_deferred_until_it_was_raised_often_enough(events):
    def step(index):
        y = tf.gather(X * 2.0, index)
        tries = 0
        with tf.name_scope("outside"):
            pass
        try:
            float(y)
        except tf.errors.InvalidArgumentError:
            tries += 1
        while tries:
            try:
                tf.raw_ops.Neg(x=X)
                break
            except tf.errors.InvalidArgumentError:
                tries += 1
        return tries

    fn = coexec.function(step)
    for _ in range(3):
        fn(tf.constant(1))
    del events[:]
    with pytest.raises(tf.errors.InvalidArgumentError):
        fn(tf.constant(7))
    assert names(events) == ["BEGIN", "FAIL_LATE", "RELENT", "END"]


def test_a_failure_of_the_runtime(events, monkeypatch):
    monkeypatch.setenv("COEXEC_DEBUG", "0")
    fn = coexec.function(lambda x: tf.exp(x * 2.0) + 1.0)
    fn(X), fn(X)
    del events[:]
    match, raised = Cursor.match, []

    def failing(self, *args):
        if not raised:
            raised.append(1)
            raise RuntimeError("planned")
        return match(self, *args)

    monkeypatch.setattr(Cursor, "match", failing)
    np.testing.assert_allclose(fn(X), tf.exp(X * 2.0) + 1.0)
    assert raised
    assert names(events) == ["BEGIN", "FAULT", "END"]


def test_a_library_call_is_observed(events):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    fn = coexec.function(lambda x: model(x))
    for _ in range(6):
        fn(X[None])
    assert names(events).count("OBSERVE") == names(events).count("OBSERVED") == 1
    assert (Phase.FOLLOWING, Event.OBSERVE, Phase.OBSERVING) in events
    assert (Phase.OBSERVING, Event.OBSERVED, Phase.FOLLOWING) in events
    assert fn.stats().regions > 0


def test_only_follow_writes_to_the_state():
    """Attributes of `CallState` are set in its folder alone: read from the source of both packages."""
    import ast

    slots = {name for name in CallState.__slots__ if not name.startswith("_")} | set(Cursor(_graph()).__dict__)
    found = []
    for path in sorted(README.parent.rglob("*.py")):
        if path.parent.name == "follow":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in slots:
                owner = ast.unparse(node.value)
                if owner.split(".")[-1] in ("run", "_run", "following", "cursor", "tapes"):
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def _graph():
    from tracer.graph import TraceGraph

    return TraceGraph("none")


# One routine matches.


def as_the_runtimes(function):
    """Marks a wrapper as the runtime's own: else its frame would be part of each operation's location."""
    function.__code__ = function.__code__.replace(co_filename=follower.__file__)
    return function


def test_a_miss_compares_each_known_step_once(monkeypatch):
    """At a fork, in whatever order its ways come; also where the operation is new."""
    compared = collections.Counter()  # by call, place in it, and step

    def counting(original):
        def count(self, step, *rest):
            compared[self, self.step, step] += 1
            return original(self, step, *rest)

        return as_the_runtimes(count)

    ways = tf.raw_ops.Exp, tf.raw_ops.Neg, tf.raw_ops.Sin, tf.raw_ops.Cos, tf.raw_ops.Tanh

    def step(x, way):
        return ways[way](x=x * 2.0)

    fn = coexec.function(step)
    for way in (0, 0, 1, 2, 3, 0, 1):
        fn(X, way)
    monkeypatch.setattr(Cursor, "match", counting(Cursor.match))
    monkeypatch.setattr(Cursor, "is_next", counting(Cursor.is_next))
    seen = fn.stats().followed
    for way in (3, 1, 2, 0, 0, 3):
        np.testing.assert_allclose(fn(X, way), step(X, way))
    assert fn.stats().followed == seen + 6
    known = len(compared)
    assert known > 2 * 6  # ways that were compared before the one that it was
    np.testing.assert_allclose(fn(X, 4), step(X, 4))
    assert len(compared) >= known + 4
    assert set(compared.values()) == {1}


def test_the_short_way_answers_as_the_long_one(monkeypatch):
    """`expected` and `fast`'s head are `_step_of` and `_answer` written out: the same steps, tensors, and counts."""

    def step(x, v):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.split(x * v, 3)[0] + tf.reshape([1.0, 2.0, 3.0], [3]))
        v.assign_sub(0.1 * tape.gradient(y, v))
        return y + v

    def calls():
        v, seen = tf.Variable(2.0), []
        fn = coexec.function(lambda x: step(x, v), jit_compile=False)
        for n in range(6):
            result = fn(X + float(n))
            seen.append((np.asarray(result), float(v)))
        stats = fn.stats()
        return seen, (stats.followed, stats.diverged, stats.ops_followed, stats.launches)

    def long(self, op, name, args):
        if self.recorder is not None:
            return self.recorder.fast(op, name, args)
        before = self.cursor.step
        found, args = self._step_of(op, args, None)
        if found is None or found.host:
            return intercept.run_fast(op, name, args) if self.recorder is None else self.recorder.fast(op, name, args)
        assert found is not before
        result = self._answer(found)
        if not intercept.tape_is_empty():
            self.tapes.record(found, op, args, result, self.cursor.externals)
        return result

    as_the_runtimes(long)
    short = in_thread(calls)
    monkeypatch.setattr(Follower, "fast", long)
    monkeypatch.setattr(Follower, "expected", lambda *_: None)
    _assert_same(in_thread(calls), short)


def _assert_same(one, other):
    np.testing.assert_array_equal(np.stack([r for r, _ in one[0]]), np.stack([r for r, _ in other[0]]))
    assert [v for _, v in one[0]] == [v for _, v in other[0]]
    assert one[1] == other[1]


@pytest.mark.paused
def test_a_launch_beside_python(events):
    """Where Python pauses, a launch goes on beside it, and lands before the next operation."""

    def step(x):
        y = x
        for _ in range(6):
            y = tf.tanh(y) * 1.5 + 0.25
        until = time.perf_counter() + 4 * tuning.pause_long
        while time.perf_counter() < until:
            sum(range(100))
        return y * 2.0 + 1.0

    fn = coexec.function(step, jit_compile=False)
    with testing.compile_everything():
        for _ in range(40):
            found = fn(X)
    np.testing.assert_allclose(found, step(X), rtol=1e-5)
    assert names(events)[-4:] == ["BEGIN", "LAUNCH", "LAND", "END"]
    assert fn.stats().beside > 0


def test_a_last_launch_that_outlives_its_call(events):
    """It is handed over at the end, and lands before the first launch of the call behind it."""
    total = tf.Variable(tf.ones((4, 4)))

    def step(x):
        y = total
        for _ in range(8):
            y = tf.tanh(tf.matmul(x, y)) + 0.5
        total.assign_add(y)

    fn = coexec.function(step, jit_compile=False)
    fn._controller.ahead = True
    with testing.compile_everything():
        for _ in range(12):
            fn(tf.eye(4))
    fn._controller.land()
    # The launch of the call before lands as the next one is launched.
    assert names(events)[-6:] == ["BEGIN", "LAND", "LAUNCH", "HAND_OVER", "END", "LAND"]
    assert events[-1] == (Phase.ENDED, Event.LAND, Phase.ENDED)
