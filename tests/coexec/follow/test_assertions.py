"""Assertions: `tf.debugging`'s checks of values cut no segment, and fail as they do eagerly."""

import contextlib
import threading
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec import testing
from coexec.base.tuning import tuning
from coexec.memoize.observe import Observation
from tests.coexec import assert_quiet, holders, in_threads, outcomes, registered, run_both, unchanged
from tests.snapshots import assert_same, snapshot
from tracer import check, library, show
from tracer.intercept import current_handler

GOOD, BAD = tf.constant([1.0, 2.0, 4.0]), tf.constant([1.0, -3.0, 4.0])
CALLS = [GOOD, GOOD, GOOD, BAD, GOOD, BAD, BAD, GOOD]

JIT = {"graph": False, "xla": True}


@pytest.fixture(autouse=True)
def compiled():
    """Every segment is launched, however small."""
    with testing.compile_everything():
        yield


# Each holds for `GOOD` and not for `BAD`, which it says in words of its own.
FAILING = {
    "equal": lambda x: tf.debugging.assert_equal(x, tf.abs(x)),
    "equal to a number": lambda x: tf.debugging.assert_equal(tf.reduce_sum(x), 7.0, message="the sum"),
    "none equal": lambda x: tf.debugging.assert_none_equal(x, -3.0),
    "less": lambda x: tf.debugging.assert_less(-x, 3.0, "too large", summarize=1),
    "less equal": lambda x: tf.debugging.assert_less_equal(-x, 2.5, summarize=-1),
    "greater": lambda x: tf.debugging.assert_greater(x, -3.0, summarize=0),
    "greater equal": lambda x: tf.debugging.assert_greater_equal(tf.cast(x, tf.int64), tf.constant(0, tf.int64)),
    "positive": lambda x: tf.debugging.assert_positive(x, message="not above zero"),
    "negative": lambda x: tf.debugging.assert_negative(-x),
    "non-negative": lambda x: tf.debugging.assert_non_negative(x * 2.0, "below zero"),
    "non-positive": lambda x: tf.debugging.assert_non_positive(-x),
    "near": lambda x: tf.debugging.assert_near(x, tf.abs(x) + 0.001, atol=0.01, message="far away"),
    "Assert": lambda x: tf.debugging.Assert(tf.reduce_all(x > 0.0), [x, tf.reduce_sum(x)]),
    "Assert, in words": lambda x: tf.Assert(tf.reduce_sum(x) > 5.0, ["the sum of", x, 3, np.arange(2)], summarize=9),
    "all finite": lambda x: tf.debugging.assert_all_finite(tf.math.log(x), "its logarithm"),
    "numerics": lambda x: tf.debugging.check_numerics(tf.sqrt(x), "its root"),
    "first version": lambda x: tf.compat.v1.assert_less(x, 5.0, data=["it is", x, x + 1.0]) or (
        tf.compat.v1.assert_greater(x, 0.0, data=["not above", x, "nor", 0.5])),
    "several": lambda x: [tf.debugging.assert_less(x, 9.0), tf.debugging.assert_positive(x), tf.debugging.assert_near(
        x, tf.abs(x))],
    "shapes, then values": lambda x: [tf.debugging.assert_shapes([(x * 1.0, ("n",)), (x, (3,))]),
        tf.debugging.assert_rank(x + 1.0, 1), tf.debugging.assert_rank_in(x, (0, 1)),
        tf.debugging.assert_rank_at_least(x, 1), tf.debugging.assert_type(x, tf.float32),
        tf.debugging.assert_scalar(tf.reduce_sum(x)), tf.debugging.assert_same_float_dtype([x, x * 2.0]),
        tf.debugging.assert_positive(tf.ensure_shape(x * 1.0, [3]))],
}  # fmt: skip


def counting(assertion):
    """A step that writes before and behind an assertion."""

    def make(decorate):
        v, log = tf.Variable(0.0), []

        @decorate
        def step(x):
            v.assign_add(1.0)
            y = tf.sin(x) * 2.0
            assertion(x * 1.0)  # here
            v.assign_add(10.0)
            log.append(len(log))
            return y + v

        return step, v

    return make


def told(step, x):
    """What a call returns or raises, down to the exact words, and the innermost line of this file in its traceback."""
    try:
        return snapshot(step(x)), None, None
    except tf.errors.OpError as error:
        lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
        return snapshot(error), (type(error), error.op, error.node_def, error.message), lines[-1]


@pytest.mark.parametrize("name", FAILING)
def test_each_fails_as_eagerly(name, backend):
    """Words, line and state are eager's; good calls are one launch, and nothing is read."""
    before = holders()
    make = counting(FAILING[name])
    (eager, ve), (step, v) = make(unchanged), make(coexec.function(jit_compile=JIT[backend]))
    for x in CALLS:
        launches = step.stats().launches
        expected, found = told(eager, x), told(step, x)
        assert_same(expected[0], found[0])
        if name not in ("all finite", "numerics"):  # the kernel's own error names a node
            assert found[1] == expected[1]
        assert bool(expected[1]) == (x is BAD)
        assert found[2] == expected[2]
        assert v.numpy() == ve.numpy()
        if x is GOOD and step.stats().followed > 2:
            assert step.stats().launches == launches + 1
        assert current_handler() is None
    stats = step.stats()
    assert (stats.recorded, stats.followed, stats.diverged, stats.decisions) == (1, 4, 3, 0), step.explain()
    assert "a value was read" not in step.explain()
    assert stats.launches >= 3
    check.check(step.trace_graph)
    assert str(show.parse(str(step.trace_graph))) == str(step.trace_graph)
    assert_quiet(before)


def test_good_calls_are_followed_without_a_cut(backend):
    """Eight assertions of different kinds in one segment of a training step, and a tape."""

    def make(decorate):
        w = tf.Variable([0.5, 0.25, 1.0])

        @decorate
        def step(x):
            tf.debugging.assert_all_finite(x, "inputs")
            tf.debugging.assert_less(x, 100.0, "inputs")
            with tf.GradientTape() as tape:
                y = x * w
                tf.debugging.assert_greater(y, -100.0)
                loss = tf.reduce_sum(tf.square(y))
                tf.debugging.assert_non_negative(loss)
            gradient = tape.gradient(loss, w)
            tf.debugging.assert_near(gradient, 2.0 * x * x * w, atol=1.0, rtol=1.0)
            tf.debugging.Assert(tf.reduce_all(tf.abs(gradient) < 1e6), [gradient])
            w.assign_sub(0.001 * gradient)
            tf.debugging.assert_equal(tf.shape(gradient), [3])
            tf.debugging.assert_less_equal(w, 100.0)
            return loss

        return step

    step = run_both(make, [(x,) for x in (GOOD, BAD, GOOD * 2.0, BAD, GOOD, GOOD * 10.0)], jit_compile=JIT[backend])
    stats = step.stats()
    assert (stats.recorded, stats.followed, stats.diverged, stats.decisions) == (1, 5, 0, 0)
    assert stats.launches == 4, step.explain()
    assert stats.ops_per_segment[0] > 30


@pytest.mark.parametrize("how", ["except", "suppress", "finally", "a caller's"])
def test_inside_of_a_try(how, backend):
    """The error comes where the assertion is made: handlers see the state of that line."""

    def make(decorate):
        v, log = tf.Variable(0.0), []

        def checked(x):
            v.assign_add(1.0)
            tf.debugging.assert_positive(x * 2.0, message=f"call {len(log)}")
            v.assign_add(10.0)

        @decorate
        def step(x):
            y = x + 1.0
            if how == "except":
                try:
                    tf.debugging.assert_positive(x * 2.0, message=f"call {len(log)}")
                    v.assign_add(10.0)
                except tf.errors.InvalidArgumentError as error:
                    log.append((error.message, v.numpy()))
                    y = y * 2.0
            elif how == "suppress":
                with contextlib.suppress(tf.errors.OpError):
                    tf.debugging.Assert(tf.reduce_all(x > 0.0), [x])
                    v.assign_add(10.0)
            elif how == "finally":
                try:
                    tf.debugging.assert_positive(x * 2.0)
                finally:
                    log.append("finally")
                    v.assign_add(100.0)
            else:
                try:
                    checked(x)
                except tf.errors.InvalidArgumentError as error:
                    log.append(error.message)
            return y * 2.0 + v, list(log)

        return step

    step = run_both(make, [(x,) for x in CALLS], jit_compile=JIT[backend])
    assert step.stats().recorded == 1
    assert step.stats().launches > 0
    assert step.stats().decisions == 0


def test_what_is_said_is_what_was_given(backend):
    """Words that differ from call to call; lists and arrays that are changed behind the assertion; other tensors."""
    outside = [tf.constant([5, 6, 7]), tf.constant([8, 9])]

    def make(decorate):
        v, numbers = tf.Variable(1.0), np.arange(3.0)

        @decorate
        def step(x, call):
            numbers[:] = call
            data = ["call", call, x, outside[call % 2], numbers, v, {True: 2.5, False: "odd"}[call % 2 == 0]]
            v.assign_add(1.0)
            tf.debugging.Assert(tf.reduce_all(x * 2.0 > 0.0), data, summarize=10)
            tf.debugging.assert_positive(x * 3.0, message=f"call {call}", summarize=call + 1)
            data.clear()
            numbers[:] = -1.0
            v.assign_add(1.0)
            return x + v

        return step

    calls = [(x, n) for n, x in enumerate([*CALLS, BAD, GOOD, BAD])]
    step = run_both(make, calls, jit_compile=JIT[backend])
    assert step.stats().decisions == 0
    assert step.stats().launches == {"graph": 4, "xla": 9}[backend]  # XLA's tell by a result that one does not hold


def test_what_cannot_be_kept_is_read():
    """Objects of the user's, whose words may be others by then, and conditions of other kinds: these cut."""

    class Words:
        count = 0

        def __str__(self):
            Words.count += 1
            return f"in words {Words.count}"

    def make(decorate):
        Words.count = 0

        @decorate
        def step(x):
            tf.compat.v1.assert_positive(x * 2.0, data=[Words(), x])
            tf.debugging.Assert(tf.reduce_sum(x) - 2.0, [x])  # a float
            return x * 2.0

        return step

    step = run_both(make, [(x,) for x in (*CALLS, tf.constant([1.0, 0.5, 0.5]), GOOD)])
    assert step.stats().decisions > 0


@pytest.mark.parametrize(
    "condition",
    [True, False, np.bool_(True), np.bool_(False), 1, 0.0, *map(tf.constant, (True, False, [True, True], [1]))],
)
def test_conditions_from_outside(condition):
    """Python's values, tensors from outside, and shapes that have no truth."""

    def make(decorate):
        @decorate
        def step(x):
            y = x * 2.0
            tf.debugging.Assert(condition, [y])
            return y

        return step

    step = run_both(make, [(GOOD,)] * 4)
    assert step.stats().calls == 4


def test_conditions_that_are_no_scalars():
    """Eager asks a vector of two for its truth, too, and says that it has none."""

    def make(decorate):
        @decorate
        def step(x, n):
            y = x * 2.0
            tf.debugging.Assert((y > -100.0)[:n], [y])
            return y

        return step

    run_both(make, [(GOOD, 1)] * 4 + [(GOOD, 2)] * 4 + [(GOOD, 1)])


def test_loops_of_python(backend):
    """Each turn asserts; the one that fails leaves the writes of those before it."""

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x, turns):
            for turn in range(turns):
                x = x * 0.5
                v.assign_add(1.0)
                tf.debugging.assert_greater(x, 0.1, message=f"turn {turn}")
            return x, v + 0.0

        return step

    calls = [(GOOD, 3), (GOOD, 3), (GOOD, 2), (GOOD, 3), (GOOD, 5), (GOOD, 2), (GOOD * 100.0, 5), (GOOD, 4), (BAD, 1)]
    step = run_both(make, calls + calls, jit_compile=JIT[backend])
    stats = step.stats()
    assert stats.decisions == 0
    assert stats.launches >= 6


def test_behind_a_cut_and_across_one(backend):
    """A condition of an earlier segment is known by then; what is read in between is eager's."""

    def make(decorate):
        seen, v = [], tf.Variable(0.0)

        @decorate
        def step(x):
            fine = tf.reduce_all(x > 0.0)
            y = tf.sin(x)
            seen.append(y.numpy().tolist())
            v.assign_add(1.0)
            tf.debugging.Assert(fine, [x, y])
            tf.debugging.assert_greater(y + 2.0, 0.0, message=str(len(seen)))
            z = y * 3.0
            seen.append(float(z[0]))
            tf.debugging.assert_less(z, y + 100.0)
            return z, v + 0.0, list(seen)

        return step

    step = run_both(make, [(x,) for x in CALLS], jit_compile=JIT[backend])
    assert step.stats().launches >= 6


def test_left_at_each_event(backend):
    """A call that goes on imperatively from any of its operations asserts as ever."""

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x):
            v.assign_add(1.0)
            tf.debugging.assert_positive(x * 2.0)
            v.assign_add(1.0)
            tf.debugging.Assert(tf.reduce_sum(x) < 100.0, [x])
            v.assign_add(1.0)
            return x + v

        return step, v

    (eager, ve), (step, v) = make(unchanged), make(coexec.function(jit_compile=JIT[backend]))
    for _ in range(4):
        eager(GOOD), step(GOOD)
    events = testing.count_events(step)
    assert events >= 9  # those of the assertions' own among them
    for x in (GOOD, BAD, GOOD * 100.0):
        for event in range(events + 1):
            with testing.diverge_at(event):
                found = outcomes(step, [(x,)])
            (expected,) = outcomes(eager, [(x,)])
            assert_same(expected, found[0], path=f"left at {event}: ")
            assert v.numpy() == ve.numpy()
    assert step.stats().diverged >= events


class Checked:
    """A step whose assertions are in a registered library and between calls of Keras."""

    def __init__(self):
        keras.utils.set_random_seed(2)
        self.layer, self.optimizer = keras.layers.Dense(3), keras.optimizers.SGD(0.1)
        self.layer(tf.zeros((1, 3)))
        self.total = tf.Variable(0.0)

    def step(self, x, most):
        self.total.assign_add(1.0)
        x = registered.bounded(x, most, "inputs")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.layer(x[None])))
        tf.debugging.assert_all_finite(loss, "loss")
        weights = self.layer.trainable_variables
        gradients = tape.gradient(loss, weights)
        tf.debugging.assert_less(loss, 1e6, "loss")
        self.optimizer.apply(gradients, weights)
        self.total.assign_add(10.0)
        return loss, self.total + 0.0


@pytest.fixture
def library_of_the_user():
    """Registers a library for one test."""
    coexec.register_library("tests.coexec.registered")
    yield
    library.uninstall()
    library.install()


@pytest.mark.usefixtures("library_of_the_user")
def test_in_a_library_call_that_is_followed_as_one(backend):
    """Its Python does not run, and its assertion still says what it was given in this call."""
    eager, mine = Checked(), Checked()
    step = coexec.function(mine.step, jit_compile=JIT[backend])
    high, low = tf.constant(1000.0), tf.constant(3.0)
    regions = 0
    for number in range(24):
        given = GOOD + float(number), low if number in (9, 14, 20) else high
        if number in (9, 14, 20):
            regions = step.stats().regions
        (one,), (other,) = outcomes(eager.step, [given]), outcomes(step, [given])
        assert_same(one, other, path=f"call {number}: ")
        if number in (9, 14):
            assert step.stats().regions > regions  # the assertion that failed was jumped over, too
            assert "inputs" in str(other)
        assert_same(snapshot(eager.layer.variables), snapshot(mine.layer.variables))
    assert step.stats().regions > 40
    assert step.stats().decisions == 0
    assert step.stats().launches >= 20 - 3


@pytest.mark.usefixtures("library_of_the_user")
def test_in_a_library_call_that_says_something_else_each_time():
    """Its Python runs on each call, as nobody else knows the words."""

    def make(decorate):
        count = [0]

        @decorate
        def step(x):
            count[0] += 1
            return registered.bounded(x, 3.0 + 0.0 * count[0], f"call {count[0]}") * 2.0

        return step

    step = run_both(make, [(x,) for x in [tf.ones(3)] * 8 + [GOOD] + [tf.ones(3)] * 2 + [GOOD]])
    assert step.stats().decisions == 0


def test_words_that_never_come_again_are_not_learnt():
    """To learn a call takes a millisecond; one whose key is another one each time is made as it is."""
    said = []

    def make(decorate):
        count = [0]

        @decorate
        def step(x):
            count[0] += 1
            tf.debugging.assert_less(x, 100.0, f"call {count[0]}")
            return x * 2.0

        return step

    learn, words = Observation.call, [GOOD] * 60 + [GOOD * 100.0, GOOD]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Observation, "call", lambda *given: said.append(given) or learn(*given))
        step = run_both(make, [(x,) for x in words])
    assert len(said) <= tuning.max_regions_once + 2
    assert "what it is given keeps changing" in step.explain()
    assert step.stats().decisions == 0
    assert step.stats().launches >= 58


def test_calls_of_assertions_are_followed_as_one(backend):
    """Their Python takes ten times as long as their operations: it does not run again."""

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x, most):
            v.assign_add(1.0)
            tf.debugging.assert_less(x, most, "too large")
            tf.debugging.assert_near(x, x + 0.001, atol=0.01)
            tf.debugging.assert_positive(x)
            v.assign_add(1.0)
            return tf.sin(x) + v

        return step

    high, low = tf.constant(100.0), tf.constant(3.0)
    calls = [(GOOD, high)] * 8 + [(GOOD, low), (BAD, high), (GOOD * 2.0, high), (BAD, low), (GOOD, high)]
    step = run_both(make, calls, jit_compile=JIT[backend])
    assert step.stats().regions >= 3 * 9
    assert step.stats().decisions == 0


def test_threads():
    """One that fails leaves the others alone; each hears of its own."""
    v = tf.Variable(0.0)

    @coexec.function
    def step(x, name):
        y = tf.sin(x) * 2.0
        tf.debugging.assert_positive(x * 1.0, message=name)
        return y

    for _ in range(3):
        step(GOOD, "warm")

    def work(name, x):
        def run():
            heard = []
            for _ in range(20):
                try:
                    heard.append(step(x, name).numpy().tolist())
                except tf.errors.InvalidArgumentError as error:
                    heard.append(error.message.split(".")[0])
            return heard

        return run

    good = (np.sin(GOOD) * 2.0).tolist()
    found = in_threads(work("one", GOOD), work("two", BAD), work("three", GOOD))
    np.testing.assert_allclose(found[0], [good] * 20, rtol=1e-6)
    np.testing.assert_allclose(found[2], [good] * 20, rtol=1e-6)
    assert found[1] == ["two"] * 20
    assert v.numpy() == 0.0


def test_on_another_thread_of_a_call():
    """A thread that the program starts asks for a tensor of the call's: it gets the truth."""

    def make(decorate):
        @decorate
        def step(x):
            fine, found = tf.reduce_all(x > 0.0), []

            def ask():
                try:
                    tf.debugging.Assert(fine, [x])
                    found.append("fine")
                except tf.errors.InvalidArgumentError as error:
                    found.append(error.message)

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return x * 2.0, found

        return step

    run_both(make, [(x,) for x in CALLS])


def test_where_nothing_is_followed(backend):
    """Opaque functions, Python functions and graph functions assert for themselves."""
    graph = tf.function(lambda x: (tf.debugging.assert_positive(x, message="in the graph"), x * 2.0)[1])

    def python(x):
        tf.debugging.assert_positive(x, message="in Python")
        return x

    def make(decorate):
        hidden = python if decorate is unchanged else coexec.opaque(python)
        inner = decorate(lambda x: (tf.debugging.assert_positive(x, message="inside"), x + 1.0)[1])
        log = []

        @decorate
        def step(x, way):
            y = x * 1.0
            try:
                if way == "opaque":
                    y = hidden(y)
                elif way == "graph":
                    y = graph(y)
                elif way == "python":
                    y = tf.py_function(python, [y], tf.float32)
                elif way == "traced":
                    fine = tf.reduce_all(y > 0.0)
                    y = tf.function(lambda z: (tf.debugging.Assert(fine, [z]), z * 2.0)[1])(y)
                else:
                    y = inner(y)
            except tf.errors.InvalidArgumentError:
                log.append(way)
            return y + 1.0, list(log)

        return step

    for way in ("opaque", "graph", "python", "traced", "inner"):
        step = run_both(make, [(x, way) for x in CALLS], jit_compile=JIT[backend])
        assert step.stats().followed + step.stats().diverged == len(CALLS) - 1


@pytest.mark.usefixtures("eager_to_stage")
def test_in_a_loop_that_may_turn_on_the_device(backend):
    """Its turns assert, wherever they are taken."""

    def make(decorate):
        @decorate
        def step(x, least):
            n = tf.constant(0)
            while tf.reduce_sum(x) < 40.0:
                x = x * 1.5
                tf.debugging.assert_greater(x, least)
                n = n + 1
            return x, n

        return step

    calls = [(GOOD, tf.constant(-9.0))] * 6 + [(GOOD, tf.constant(2.0))] + [(BAD + 9.0, tf.constant(0.0))] * 2
    run_both(make, calls, jit_compile=JIT[backend], control_flow=True)


def test_modes(backend):
    """Under each mode assertions hold or fail as ever; a step that is known is wholly known."""
    make = counting(FAILING["less"])
    (eager, ve), (step, v) = make(unchanged), make(coexec.function(jit_compile=JIT[backend]))
    for _ in range(4):
        eager(GOOD), step(GOOD)
    modes = [coexec.fail_on_retrace, coexec.validate, coexec.imperative, coexec.debug_nans, coexec.fail_on_divergence]
    for mode in modes:
        for x in (GOOD, BAD, GOOD):
            (expected,) = outcomes(eager, [(x,)])
            with mode():
                (found,) = outcomes(step, [(x,)])
            assert_same(expected, found, path=f"{mode.__name__}: ")
            assert v.numpy() == ve.numpy()
    assert step.stats().validated >= 2
    assert "found by validation" not in step.explain()


def test_a_failure_before_it_and_behind_it(backend):
    """The first of several that fail is heard of: an index, then an assertion, then another index."""

    def make(decorate):
        v = tf.Variable(0.0)

        @decorate
        def step(x, first, most, last):
            v.assign_add(1.0)
            y = tf.gather(x, first)
            tf.debugging.assert_less(y, most)
            v.assign_add(1.0)
            z = tf.gather(x, last) + y
            tf.debugging.assert_less(z, most * 10.0, "in the end")
            return z, v + 0.0

        return step

    one, nine, high, low = tf.constant(1), tf.constant(9), tf.constant(100.0), tf.constant(0.0)
    good = (GOOD, one, high, one)
    calls = [good] * 3 + [(GOOD, nine, low, nine), good, (GOOD, one, low, nine), (GOOD, one, high, nine), good,
             (GOOD, one, tf.constant(0.3), one), (GOOD, one, tf.constant(2.5), one), good]  # fmt: skip
    run_both(make, calls, jit_compile=JIT[backend])


def test_nothing_is_kept_alive():
    """What an assertion was given lives no longer than the call."""
    step = coexec.function(lambda x: (tf.debugging.Assert(tf.reduce_all(x > 0.0), [x * 2.0, x]), x + 1.0)[1])
    before = holders()
    for _ in range(4):
        result = step(GOOD)
    del result
    assert_quiet(before)


def test_new_values_that_others_are_made_of(backend):
    """Written once or twice, the same by two variables, checked before, in between and behind: all of them or none."""

    def make(decorate):
        a, b, c, d, e, same = (tf.Variable([float(k), 1.0, 2.0]) for k in range(6))

        @decorate
        def step(x, most):
            tf.debugging.assert_less(x, most, "inputs")
            a.assign(x * 2.0)
            b.assign_add(a + 1.0)
            tf.debugging.assert_less(b, most * 10.0, "made of a new value")
            c.assign(a * b - c)
            a.assign_add(c)
            d.assign(x)
            e.assign(x)
            same.assign(a)
            c.assign_sub(a)
            loss = tf.reduce_sum(a * b + c)
            tf.debugging.assert_greater(tf.reduce_sum(x), -1.0, "in the end")
            return tf.debugging.check_numerics(loss, "loss"), [v.read_value() for v in (a, b, c, d, e, same)]

        def call(*args):
            try:
                return step(*args)
            except tf.errors.InvalidArgumentError as error:
                return type(error), [v.numpy() for v in (a, b, c, d, e, same)]

        call.stats = getattr(step, "stats", None)
        return call

    one, inf = tf.constant([1.0, 2.0, 3.0]), tf.constant([1.0, float("inf"), 3.0])
    high, mid, low = tf.constant(1e6), tf.constant(8.0), tf.constant(2.0)
    calls = [(one, high)] * 4 + [(one, low), (one, high), (one, mid), (-one, high), (inf, high * inf[1]), (one, high)]
    made = []
    run_both(lambda decorate: made.append(make(decorate)) or made[-1], calls * 2, jit_compile=JIT[backend])
    assert made[1].stats().launches > 3


class Tried(keras.layers.Layer):
    """A layer without `build`: Keras runs its `call` in a graph first, to have its inner layer built."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def call(self, x):
        return self.inner(x) * 2.0


@pytest.mark.parametrize("jit_compile", JIT.values(), ids=JIT)
def test_a_graph_in_the_making_takes_no_part(jit_compile):
    """An assertion is made eagerly where a graph that is being made, for a layer that Keras tries, wants the values."""

    def calls(decorator):
        keras.utils.set_random_seed(0)
        made, found = {}, []

        @decorator
        def step(x):
            if not made:
                made["layer"] = Tried()
            half = x * 0.5
            tf.debugging.Assert(tf.reduce_sum(x) < 150.0, [x])
            return tf.tanh(made["layer"](half))

        for size in (1.0, 1.0, 100.0, 100.0, 1.0, 100.0, 100.0):
            try:
                found.append(step(tf.fill((1, 3), size)).shape)
            except tf.errors.InvalidArgumentError as error:
                found.append(str(error))
                made.clear()
        return found, step

    fast, step = calls(coexec.function(jit_compile=jit_compile))
    assert calls(unchanged)[0] == fast
    assert step.stats().followed >= 2
