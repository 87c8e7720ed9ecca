"""What `explain()` says: a small program for each cause in the table, word for word, and the verdict above them."""

import inspect
import io
import json
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

import coexec
from coexec import testing
from coexec.base.causes import Cause, Kind, Tally
from coexec.base.explanation import Pace, explained
from coexec.base.stats import Stats
from coexec.base.tuning import tuned, tuning
from coexec.compile.compile_thread import background
from coexec.compile.executable import Executable
from coexec.lowering.function_body import Body
from tracer.cursor import Cursor

X = tf.constant([1.0, 2.0])


def called(function, *calls, **options):
    """Makes calls, of which none differs from eager's, and returns the decorated function."""
    name = function.__name__ if function.__name__ != "<lambda>" else "step"
    fn = coexec.function(function, **{"name": name, **options})
    for arguments in calls:
        try:
            expected = function(*arguments)
        except Exception as error:
            with pytest.raises(type(error)):
                fn(*arguments)
        else:
            np.testing.assert_allclose(np.asarray(fn(*arguments)), np.asarray(expected), rtol=1e-4)
    return fn


def long(x):
    for _ in range(30):
        x = tf.tanh(x * 1.1 + 0.1)
    return x


# Each returns something that explains itself; what it then says of its cause is its docstring.


def cx_fault(monkeypatch):
    """
    CX-FAULT, failure of the runtime itself: coexec's own code raised an error; the call went on imperatively
      1 x Traceback
        at long
        a call: 0.25 x
        expected: no error of coexec's
        what to do: report it; the call went on imperatively
    """
    monkeypatch.setenv("COEXEC_DEBUG", "0")
    raised = []
    source = "def cut(self):\n  if not raised:\n    raised.append(1)\n    raise KeyError('planned')\n  cut_of(self)"
    names = {"raised": raised, "cut_of": Cursor.cut}
    exec(compile(source, inspect.getsourcefile(Cursor), "exec"), names)
    monkeypatch.setattr(Cursor, "cut", names["cut"])
    return called(long, *[(X,)] * 4)


def cx_validation(monkeypatch):
    """
    CX-VALIDATION, found by validation: an executable, or a memoized call, gave other values than eager
      1 x graph: Sub at FILE in step: 2 of 2 values differ, at [0] 0.15852904319763184 one by one, 1.8414709568023682 compiled
        at FILE in step
        | return x - tf.sin(x)
        a call: 0.25 x
        expected: eager's values
        what to do: if it is more than the rounding of sums that cancel, report it; it is not used any more
    """  # noqa: E501 (values in full)
    add = Body.add
    monkeypatch.setattr(Body, "add", lambda self, op, *rest: add(self, "AddV2" if op == "Sub" else op, *rest))

    def step(x):
        return x - tf.sin(x)

    with tuned(validates_new=True), testing.compile_everything():
        return called(step, *[(X,)] * 4, jit_compile=False)


def cx_diverge(monkeypatch):
    """
    CX-DIVERGE, divergence: the program did something new: the rest of that call was recorded
      1 x new operation: expected Mul at FILE in step, saw Square
        at FILE in step
        | return tf.square(y) if kind else y * 2.0
        a call: 0.1 x
        what to do: nothing, if this path is one of few; each is recorded once
    """

    def step(x, kind):
        y = x + 1.0
        return tf.square(y) if kind else y * 2.0

    return called(step, *[(X, n == 4) for n in range(10)])


def cx_learn(monkeypatch):
    """
    CX-LEARN, new way: a call did known operations in a way that no call had, and was learnt like a first one
      1 x the same operations come in another way: on other tensors, or after others
        at step
        a call: 0.0833 x
        expected: a way that an earlier call has taken
        what to do: nothing, if such ways are few; choices in one call multiply, so make fewer of them in each
    """

    def step(x, ways):
        y = tf.tanh(x)
        for way in ways:
            y = y * x if way else y
        return tf.sin(y)

    return called(step, *[(X, (True, True))] * 8, *[(X, (True, False))] * 4)


def cx_sizes(monkeypatch):
    """
    CX-SIZES, backed off: arguments keep coming in new sizes, and such calls run imperatively
      9 x its arguments come in ever other sizes: calls run plainly until one has come often
        at long
        a call: 0.9 x
        expected: arguments of few shapes
        what to do: coexec.dynamic pads arguments to few sizes
    """
    with tuned(sizes_at_once=1, sizes_followed=1):
        return called(long, *[(tf.ones([n]),) for n in range(1, 11)], reduce_retracing=False)


def cx_backoff(monkeypatch):
    """
    CX-BACKOFF, backed off: some calls run imperatively, since following them has not paid
      23 x following took longer than plain calls, so some run plainly
        at step
        a call: 0.767 x
        expected: followed calls that take less than plain ones
        what to do: see the other causes: the dearest one is why
    """

    def step(x, alpha):
        return tf.nn.leaky_relu(x + 1.0, alpha=alpha) * 2.0

    with tuned(doubt_before_timing=4, following_patience=0.0, following_progress=0.0):
        fn = called(step, *[(X, 0.1 + n / 30) for n in range(30)])
    (count,) = [cause["count"] for cause in fn.explain().as_dict()["causes"] if cause["id"] == "CX-BACKOFF"]
    assert 1 < count <= fn.stats().imperative
    return fn


def cx_gradient(monkeypatch):
    """
    CX-GRADIENT, library call not followed as one: the Python of a gradient runs on each call
      4 x GradientTape.gradient: its tape records the gradient
        at FILE in step
        | slope = tape.gradient(y, x)
        a call: 0.8 x
        expected: a gradient of what only memoized calls and followed operations have recorded
        what to do: ask a tape once it has ended, or one that is not persistent
    """

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.reduce_sum(x * x)
            slope = tape.gradient(y, x)
        return slope

    return called(step, *[(X,)] * 5)


def cx_library(monkeypatch):
    """
    CX-LIBRARY, library call not followed as one: the Python of a library call runs on each call
      3 x Layer.__call__: it calls print
        at FILE in <lambda>
        | return called(lambda x: layer(x), *[(X,)] * 5)
        a call: 0.6 x
        expected: a call that runs no Python of yours, changes nothing, and is given the same again
        what to do: give it tensors and values that stay the same; coexec.pure marks helpers that only compute
    """

    class Printing(keras.layers.Layer):
        def call(self, x):
            print("called")
            return x * 2.0

    layer = Printing()
    return called(lambda x: layer(x), *[(X,)] * 5)


def cx_read(monkeypatch):
    """
    CX-READ, segment cut: Python read a value: what computes it was launched, and waited for
      4 x a value was read
        at FILE in step
        | scale = float(tf.reduce_sum(x))
        a call: 0.8 x
        expected: no read before the end of the call
        what to do: read it later, or together with others, if the program does not need it here
    """

    def step(x):
        scale = float(tf.reduce_sum(x))
        return x * scale

    return called(step, *[(X,)] * 5)


def cx_alone(monkeypatch):
    """
    CX-ALONE, segment cut: an operation runs on its own, between two launches
      4 x AsString runs on its own: strings cannot be compiled
        at FILE in step
        | tf.strings.as_string(y)
        a call: 0.8 x
        expected: operations that can be launched together
        what to do: move it to the beginning or end of the step, or out of it
    """

    def step(x):
        y = x * 2.0
        tf.strings.as_string(y)
        return y + 1.0

    return called(step, *[(X,)] * 5)


def cx_uncompiled(monkeypatch):
    """
    CX-UNCOMPILED, not compiled: a segment's operations run one by one
      1 x RuntimeError: no compiler today
        at FILE in long
        | x = tf.tanh(x * 1.1 + 0.1)
        a call: 0.2 x
        expected: a segment that a graph or XLA can run
        what to do: have coexec.opaque keep out what cannot be compiled
    """

    def refuse(self, *_, **__):
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(Executable, "__init__", refuse)
    monkeypatch.setattr(Executable, "__del__", lambda self: None, raising=False)
    return called(long, *[(X,)] * 5)


def cx_large(monkeypatch):
    """
    CX-LARGE, segment cut: a segment is so long that compiling it would hold up a call
      3 x to compile its 90 operations holds up a call
        at FILE in long
        | x = tf.tanh(x * 1.1 + 0.1)
        a call: 0.6 x
        expected: segments of at most some thousand operations
        what to do: read a value in between: shorter segments take less
    """
    with tuned(graph_operation=1.0, hopeless_visits=9):
        return called(long, *[(X,)] * 5)


def cx_input(monkeypatch):
    """
    CX-INPUT, segment cut: TensorFlow refuses what an operation is given
      1 x Mul refuses its input: Cannot convert 'a' to EagerTensor of dtype float
        at FILE in <lambda>
        | return called(lambda x, n: x * n, (X, 1.0), (X, 2.0), (X, "a"))
        a call: 0.333 x
        expected: an input that a tensor can be made of
        what to do: give it a tensor, or a value that becomes one
    """
    return called(lambda x, n: x * n, (X, 1.0), (X, 2.0), (X, "a"))


def cx_xla(monkeypatch):
    """
    CX-XLA, not compiled by XLA: a segment, or a part of it, runs as a TensorFlow graph
      1 x MatrixInverse at FILE in step may fail on some values, which XLA would not tell
        at FILE in step
        | return tf.linalg.inv(x[:, None, None])
        a call: 0.2 x
        expected: operations that XLA computes as eager does
        what to do: nothing, unless the graph is slow: keep them out of the step
    """

    def step(x):
        return tf.linalg.inv(x[:, None, None])

    with testing.compile_everything():
        return called(step, *[(X,)] * 5, jit_compile=True)


def cx_failed(monkeypatch):
    """
    CX-FAILED, failed operation: an operation raised, as it does eagerly
      1 x InvalidArgumentError: {{function_node __wrapped__GatherV2_device_/job:localhost/replica:0/task:0/device:CPU:0}} indices = 9 is not in [0, 2) [Op:GatherV2] name:
        at FILE in <lambda>
        | return called(lambda x, i: tf.gather(x, i), *[(X, tf.constant(i)) for i in (1, 1, 1, 9)])
        a call: 0.25 x
        expected: an operation that succeeds
        what to do: see the error
    """  # noqa: E501 (TensorFlow's words)
    return called(lambda x, i: tf.gather(x, i), *[(X, tf.constant(i)) for i in (1, 1, 1, 9)])


def cx_decision(monkeypatch):
    """
    CX-DECISION, decision on a tensor: who decides a branch or a loop on a tensor, and why
      1 x an `if` is decided on the device: both ways are computed, and one is selected
        at FILE in step
        | if tf.reduce_sum(x) > 0.0:
        a call: 0.1 x
        expected: a branch or loop that only computes
        what to do: nothing, unless its reads are dear: see CX-READ
    """

    def step(x):
        if tf.reduce_sum(x) > 0.0:
            y = x * 2.0
        else:
            y = x + 1.0
        return y

    with tuned(decision_patience=1):
        return called(step, *[((-1.0) ** n * X,) for n in range(10)], control_flow=True)


def cx_pause(monkeypatch):
    """
    CX-PAUSE, segment cut: Python takes its time: the operations before it run beside it
      1 x Python takes its time here: operations before it are launched beside it
        at step
        a call: 0.0667 x
        expected: launches beside Python
        what to do: nothing
    """

    def step(x):
        y = long(x)
        time.sleep(0.02)
        return y * 2.0

    with tuned(pause_timed=(8, 9)):
        return called(step, *[(X,)] * 15)


def cx_backend(monkeypatch):
    """
    CX-BACKEND, backend chosen by measurement: XLA or the graph, whichever was faster
      1 x XLA is faster than the graph: T a launch against T
        at FILE in long
        | x = tf.tanh(x * 1.1 + 0.1)
        a call: 0.0156 x
        expected: the faster one
        what to do: nothing
    """
    launch = Executable.launch

    def slowed(self, *given):
        if self.backend == "graph":
            time.sleep(0.005)
        return launch(self, *given)

    monkeypatch.setattr(Executable, "launch", slowed)
    with tuned(xla_price=0.0):
        fn = called(long, *[(X,)] * 4)
        assert background.wait(120)
        for _ in range(60):
            fn(X)
    return fn


def cx_loops(monkeypatch):
    """
    CX-LOOPS, compiled as loops: operations that repeat were written as a loop, which compiles faster
      1 x of 183 operations 9 are left: what comes again and again are turns of loops
        at FILE in step
        | x = tf.tanh(tf.matmul(x, WEIGHTS) + 0.1)
        a call: 0.25 x
        expected: a loop, which XLA compiles once
        what to do: nothing
    """

    def step(x):
        for _ in range(60):
            x = tf.tanh(tf.matmul(x, WEIGHTS) + 0.1)
        return x

    with testing.compile_everything():
        return called(step, *[(tf.ones([2, 4]),)] * 4)


WEIGHTS = tf.reshape(tf.linspace(-0.5, 0.5, 16), [4, 4])
TRIGGERS = (
    cx_fault, cx_validation, cx_diverge, cx_learn, cx_sizes, cx_backoff, cx_gradient, cx_library, cx_read, cx_alone,
    cx_uncompiled, cx_large, cx_input, cx_xla, cx_failed, cx_decision, cx_pause, cx_backend, cx_loops,
)  # fmt: skip


def said_of(name, explanation):
    """The lines about one kind of cause, without line numbers, tracebacks and times."""
    text = explanation.replace(__file__, "FILE")
    found = re.search(rf"^{name}, .*?(?=^CX-|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, text
    text = re.sub(r"FILE:\d+ in (?:[\w]+\.<locals>\.)*", "FILE in ", found[0])
    text = re.sub(r"\(most recent call last\):\n.*?planned'\n", "\n", text, flags=re.DOTALL)
    text = re.sub(r"(a call: [\d.]+ x).*", r"\1", text)
    if name == "CX-BACKOFF":  # the clock decides how many calls run plainly
        text = re.sub(r"\d+ x following", "23 x following", re.sub(r"a call: [\d.]+ x", "a call: 0.767 x", text))
    text = re.sub(r"[\d.]+( ms)? (a launch against) [\d.]+( ms)?", r"T \2 T", text)
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def test_every_id_has_a_program_and_every_program_an_id():
    ids = [kind.value.id for kind in Kind]
    assert len(set(ids)) == len(ids)
    assert sorted(t.__name__.upper().replace("_", "-") for t in TRIGGERS) == sorted(ids)


@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda t: t.__name__)
def test_what_is_said_of_each_cause(trigger, monkeypatch):
    name = trigger.__name__.upper().replace("_", "-")
    explanation = trigger(monkeypatch).explain()
    assert said_of(name, explanation) == inspect.cleandoc(trigger.__doc__)
    found = [cause for cause in explanation.as_dict()["causes"] if cause["id"] == name]
    assert found
    assert all(c["expected"] and c["seen"] and c["what_to_do"] and c["count"] > 0 for c in found)
    assert all(c["source"] in explanation for c in found)


# The verdict.

STATS = Stats(calls=1000, followed=990, diverged=5, recorded=1, imperative=4)


def read(count, seconds=0.0, kind=Kind.READ):
    return {Cause(kind, "a value was read", f"{__file__}:1 in step", "read it later"): Tally(count, seconds)}


def test_the_verdict_comes_first_in_three_lines():
    """What share of eager's time a call takes, what it could take, and the one thing to change."""
    text = explained("step", STATS, read(1000), Pace(64, now=0.002, steady=0.00155, eager=0.01))
    assert text.splitlines()[:4] == [
        "step: a call takes 0.20 of eager's time, 2 ms of 10 ms (mean of the last 64)",
        "at best: 0.15 of eager's time, 1.5 ms, as steady calls without the causes below",
        f"to change: CX-READ at {__file__}:1, 50 us a call: read it later",
        "1000 calls, 990 followed, 5 diverged, 1 recorded, 4 imperative; 0 launches, 0 compiles, "
        "0.0 % of the operations followed",
    ]
    verdict = text.as_dict()["verdict"]
    assert (verdict["share"], verdict["best_share"]) == pytest.approx((0.2, 0.15))
    assert verdict["to_change"]["id"] == "CX-READ"


def test_nothing_is_claimed_of_eager_where_it_was_not_timed():
    """Whoever wants to know it has some calls run imperatively."""
    stats = Stats(calls=110, imperative=10, ops_followed=9900, ops_recorded=100)
    text = explained("step", stats, {}, Pace(64, now=0.0003, steady=0.0003))
    assert text.splitlines()[:2] == [
        "step: a call takes 300 us (mean of the last 64); eager's time was not measured: "
        "`with coexec.imperative()` around a few calls does that",
        "at best: 300 us, as now",
    ]
    verdict = text.as_dict()["verdict"]
    assert [verdict[name] for name in ("share", "best_share", "eager_seconds", "gained_seconds")] == [None] * 4


def test_what_was_gained_counts_all_calls_with_what_they_have_learnt():
    for spent, gained in ((3.0, 7.0), (12.0, -2.0)):
        pace = Pace(64, now=0.001, steady=0.001, eager=0.01, made=1000, spent=spent)
        assert explained("step", STATS, {}, pace).as_dict()["verdict"]["gained_seconds"] == pytest.approx(gained)


@pytest.mark.parametrize(
    ("pace", "lines"),
    [
        (Pace(), ["step: a call takes a time that is not known yet: none has been followed", "at best: not known yet"]),
        (
            Pace(3, now=0.002),
            ["step: a call takes 2 ms (mean of the last 3); eager's time was not measured: "
             "`with coexec.imperative()` around a few calls does that", "at best: not known yet"],
        ),
        (
            Pace(64, now=0.002, steady=0.002, eager=0.002),
            ["step: a call takes 1.00 of eager's time, 2 ms of 2 ms (mean of the last 64)",
             "at best: 1.00 of eager's time, 2 ms, as now"],
        ),
    ],
)  # fmt: skip
def test_the_verdict_says_what_is_not_known(pace, lines):
    assert explained("step", STATS, {}, pace).splitlines()[:3] == [
        *lines, "to change: nothing that is known to cost time",
    ]  # fmt: skip


def test_causes_come_by_cost():
    """Not by count; what is a fault comes before all others, and notes come last."""
    causes = {
        **read(500),
        **read(1, kind=Kind.FOLDED),
        **read(2, seconds=2.0, kind=Kind.DIVERGENCE),
        **read(3, seconds=0.5, kind=Kind.LIBRARY),
        **read(1, kind=Kind.FAULT),
    }
    found = explained("step", STATS, causes, Pace(64, 0.01, 0.001, 0.02)).as_dict()
    assert [(c["id"], round(c["seconds_per_call"], 9)) for c in found["causes"]] == [
        ("CX-FAULT", 0.0), ("CX-DIVERGE", 0.001998), ("CX-LIBRARY", 0.0005), ("CX-READ", 0.000025), ("CX-LOOPS", 0.0),
    ]  # fmt: skip
    assert found["verdict"]["to_change"]["id"] == "CX-FAULT"
    assert found["verdict"]["best_seconds"] == pytest.approx(0.001 - 0.000525)


@pytest.mark.clocked
def test_times_are_those_of_the_clock():
    """Where calls are timed plainly and followed, the share is what the clock has seen."""

    class Printing(keras.layers.Layer):
        def call(self, x):
            time.sleep(0.002)
            return x * 2.0

    layer = Printing()

    @coexec.function
    def step(x):
        return long(layer(x))

    for _ in range(3 * tuning.pace_calls):
        step(X)
    before = step.explain().as_dict()["verdict"]
    with coexec.imperative():
        for _ in range(3):
            step(X)
    verdict = step.explain().as_dict()["verdict"]
    assert before["eager_seconds"] is before["gained_seconds"] is None
    calls = 3 * tuning.pace_calls - 1 + 3  # of which the first is recorded, and not timed
    assert verdict["gained_seconds"] < calls * verdict["eager_seconds"] - calls * 0.002
    assert verdict["seconds"] > 0.002 < verdict["eager_seconds"]
    assert verdict["share"] == pytest.approx(verdict["seconds"] / verdict["eager_seconds"])
    assert verdict["best_seconds"] <= verdict["seconds"]
    assert verdict["to_change"]["id"] == "CX-LIBRARY"
    assert 0.001 < verdict["to_change"]["seconds_per_call"] < verdict["seconds"] + 0.001


def test_time_inside_of_another_library_call_is_counted_once():
    slept = []  # seconds, eagerly and followed in turns: a busy machine wakes late

    class Inner(keras.layers.Layer):
        def call(self, x):
            began = time.perf_counter()
            time.sleep(0.01)
            slept.append(time.perf_counter() - began)
            return x * 2.0

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, x):
            return self.inner(x) + 1.0

    layer = Outer()
    fn = called(lambda x: layer(x), *[(X,)] * 20)
    costs = [c["seconds_per_call"] for c in fn.explain().as_dict()["causes"] if c["id"] == "CX-LIBRARY"]
    assert 0.002 < sum(costs) < 0.75 * sum(slept) / 20, fn.explain()


# For programs, processes and terminals.


def test_it_is_text_and_data():
    fn = cx_read(None)
    text = fn.explain()
    assert isinstance(text, str)
    assert json.loads(json.dumps(text.as_dict())) == json.loads(json.dumps(coexec.explain(fn, as_dict=True)))
    assert str(coexec.explain(fn)) == text
    assert set(text.as_dict()) == {"name", "verdict", "stats", "causes"}
    with pytest.raises(TypeError, match="a function that coexec has decorated"):
        coexec.explain(long)


def test_a_process_is_explained_as_a_whole():
    """Functions that have been called, those first that have taken most time."""
    never = coexec.function(long, name="never called")
    fast = called(long, *[(X,)] * 4, name="fast")
    slow = called(lambda x: time.sleep(0.01) or long(x), *[(X,)] * 12, name="slow")
    text = coexec.explain()
    names = [found["name"] for found in coexec.explain(as_dict=True)["functions"]]
    assert names.index("slow") < names.index("fast")
    assert "never called" not in names
    assert fast.explain() in text
    assert slow.explain() in text
    assert never.explain().startswith("never called: a call takes a time that is not known yet")


def test_colours_are_for_terminals(capsys):
    explanation = cx_read(None).explain()
    explanation.show()
    assert capsys.readouterr().out.rstrip("\n") == explanation
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, color_system="standard").print(explanation, soft_wrap=True)
    assert "\x1b[1;31mCX-READ" in screen.getvalue()
    assert re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()).rstrip("\n") == explanation


def test_the_verdict_of_a_function_that_has_backed_off_is_that():
    """Nothing that is to change in the calls that are followed would help the others."""
    stats = Stats(calls=100, followed=20, recorded=1, imperative=79)
    causes = {
        Cause(Kind.CUT, "an operation runs on its own", "model.py:7 in step"): Tally(20),
        Cause(Kind.BACKOFF, "following took longer", "step"): Tally(79, 7.9),
        Cause(Kind.LIBRARY, "a call keeps changing", "model.py:9 in step"): Tally(20, 0.4),
    }
    for steady in (0.02, None):
        explanation = explained("step", stats, causes, Pace(64, now=0.1, steady=steady, eager=0.1))
        change = explanation.as_dict()["verdict"]["to_change"]
        assert change["id"] == "CX-BACKOFF"
        assert change["what_to_do"].endswith("CX-LIBRARY at model.py:9")
        assert (change["seconds_per_call"] > 0.05) is (steady is not None)
    seldom = {cause: Tally(9, 0.9) if cause.kind is Kind.BACKOFF else tally for cause, tally in causes.items()}
    change = explained("step", stats, seldom, Pace(64, now=0.02, steady=0.09)).as_dict()["verdict"]["to_change"]
    assert change["id"] == "CX-LIBRARY"


def test_what_is_known_of_eager_without_a_timed_call():
    """Its operations take some time at least, which bounds the share."""
    text = explained("step", STATS, {}, Pace(64, now=0.0005, steady=0.0005, least=0.005))
    assert "at most 0.10 of eager's time" in text.splitlines()[0]
    text = explained("step", STATS, {}, Pace(64, now=0.006, steady=0.006, least=0.005))
    assert "at most" not in text.splitlines()[0]
