"""Placement: calls with a decision on the device and calls with Python's are timed, and the faster way stays.

No clock decides here: what calls took is made up.
"""

import numpy as np
import pytest
import tensorflow as tf

import coexec
from coexec.base.tuning import tuning
from coexec.control_flow.run import placement
from coexec.control_flow.run.placement import Comparison
from coexec.control_flow.run.sites import Site
from tests.marks import needs_places

pytestmark = [needs_places, pytest.mark.usefixtures("eager_to_stage")]

ROWS = [tf.constant(v, tf.float32) for v in ([1.0, 2.0], [-3.0, 1.0], [0.5, 0.25], [-1.0, -1.0])]


def timed(monkeypatch, tune, of_device, of_python):
    """Has calls take what is said here; returns a list of which way each call took that was timed, and if it counts."""
    ways = []
    original = placement.Placements.took

    def took(self, trial, seconds):
        ways.append((trial.on_device, seconds is not None))
        original(self, trial, None if seconds is None else of_device if trial.on_device else of_python)

    tune(doubt_before_timing=1e9)  # the clock is asked, but not whether following pays
    monkeypatch.setattr(placement.Placements, "took", took)
    return ways


def settled(times, comparison=None):
    """What a comparison says to a function of way and number, and after how many calls."""
    comparison = comparison or Comparison(Site(None, None), "here")
    for number in range(10 * tuning.contest_calls):
        on_device = comparison.next()
        found = comparison.took(on_device, times(on_device, number))
        if found is not None:
            return comparison, found, number + 1
    raise AssertionError("no end")


def test_the_faster_way_stays():
    """What is clearly faster is found by few calls, either way."""
    comparison, found, calls = settled(lambda on_device, _: 0.5 if on_device else 1.0)
    assert comparison.site.reason is None
    assert "500.00 ms with it on the device, 1000.00" in found
    assert calls <= 2 * (tuning.contest_first + tuning.contest_trials) + 2
    comparison, found, calls = settled(lambda on_device, _: 1.0 if on_device else 0.5)
    assert comparison.site.reason == found
    assert "1000.00 ms with it on the device, 500.00" in found
    assert calls <= 2 * (tuning.contest_first + tuning.contest_trials) + 2


def test_equal_ways_stay_on_the_device():
    """A busy machine makes differences of a few hundredths; more calls are looked at before."""
    comparison, _, calls = settled(lambda on_device, _: 1.0 if on_device else 0.97)
    assert comparison.site.reason is None
    assert calls >= 2 * tuning.contest_most
    comparison, _, calls = settled(lambda on_device, _: 1.0 if on_device else 0.9)
    assert comparison.site.reason is not None
    assert calls >= 2 * tuning.contest_most


@pytest.mark.parametrize("factor", [3.0, 30.0])
@pytest.mark.parametrize("period", range(1, 13))
def test_inputs_that_come_in_a_cycle_decide_nothing(period, factor):
    """One input in so many takes far longer: each way gets its share of those, and what may be chance is none."""
    for first in range(period):

        def times(on_device, n, first=first):
            return factor if n % period == first else 1.0

        assert settled(times)[0].site.reason is None
        assert settled(lambda on_device, n: times(on_device, n) * (1.0 if on_device else 1.2))[0].site.reason is None
        if factor == 3.0:
            slower = settled(lambda on_device, n: times(on_device, n) * (2.0 if on_device else 1.0))[0]
            assert slower.site.reason is not None


def test_busy_moments_decide_nothing():
    """A call in ten that takes a hundred times as long, always the same way."""
    counts = {True: 0, False: 0}

    def times(on_device, _):
        counts[on_device] += 1
        return 100.0 if on_device and counts[True] % 10 == 0 else 1.0 if on_device else 1.5

    comparison, _, _ = settled(times)
    assert comparison.site.reason is None


def test_what_is_learnt_at_first_decides_nothing():
    """The first calls of each way may be slow."""
    counts = {True: 0, False: 0}

    def times(on_device, _):
        counts[on_device] += 1
        return 50.0 if counts[on_device] <= tuning.contest_first and on_device else 1.0 if on_device else 1.3

    assert settled(times)[0].site.reason is None


def test_calls_that_say_nothing_end_it():
    """Where something is new in each call, nothing is found out, and the device keeps it."""
    comparison, found, calls = settled(lambda *_: None)
    assert comparison.site.reason is None
    assert calls == tuning.contest_calls
    assert "too few" in found


def gate(x, w):
    if tf.reduce_sum(x * w) > 0.0:
        x = x * 2.0 + w
    else:
        x = x - w * tf.reduce_max(x)
    return tf.reduce_sum(x * w)


@pytest.mark.parametrize("on_device", [True, False])
def test_decisions_go_where_they_are_faster(monkeypatch, tune, on_device):
    """Values are eager's meanwhile and afterwards, and `explain` says what was found."""
    of_device, of_python = (0.001, 0.002) if on_device else (0.002, 0.001)
    ways = timed(monkeypatch, tune, of_device, of_python)
    w = tf.Variable([0.5, 2.0])
    fn = coexec.function(gate, control_flow=True)

    def called(count):
        before = fn.stats()
        for n in range(count):
            assert float(fn(ROWS[n % 4], w)) == float(gate(ROWS[n % 4], w))
        after = fn.stats()
        assert after.decisions - before.decisions == count - (before.calls == 0)  # the first is recorded
        return after.decisions_on_device - before.decisions_on_device

    assert 0 < called(tuning.contest_calls) < tuning.contest_calls
    assert called(8) == (8 if on_device else 0), fn.explain()
    where = "is decided on the device" if on_device else "is decided by Python"
    assert f"an `if` {where}: calls took {'1.00' if on_device else '2.00'} ms with it on the device" in fn.explain()
    assert {way for way, _ in ways} == {True, False}
    assert len(ways) <= tuning.contest_calls


def test_state_and_gradients_are_eagers_while_calls_are_timed(monkeypatch, tune):
    """A variable that a step changes by a gradient through the branch, with either way timed."""
    ways = timed(monkeypatch, tune, 0.001, 0.00101)  # so near that most calls are looked at
    ours, theirs = tf.Variable([0.5, 2.0]), tf.Variable([0.5, 2.0])
    noted = []

    def step(x, v):
        with tf.GradientTape() as tape:
            y = gate(x, v)
        gradient = tape.gradient(y, v)
        v.assign_sub(0.01 * tf.clip_by_norm(gradient, 1.0))
        noted.append(len(noted))
        return y, gradient

    fn = coexec.function(step, control_flow=True)
    for n in range(160):
        for one, other in zip(fn(ROWS[n % 4], ours), step(ROWS[n % 4], theirs), strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    assert noted == list(range(320))
    assert sum(on_device for on_device, counts in ways if counts) > tuning.contest_first + tuning.contest_trials
    assert sum(not on_device for on_device, counts in ways if counts) > tuning.contest_first + tuning.contest_trials
    assert fn.stats().decisions_on_device > 40


def scaled(x):
    if tf.reduce_sum(x) > 0.0:
        return x * 2.0
    w = x - 1.0
    return w


def calling(x):
    y = scaled(x + 0.5)
    return tf.reduce_sum(y * y)


def looping(x):
    for k in range(12):
        if tf.reduce_sum(x) > 20.0:
            break
        x = tf.abs(x) + tf.cast(k, tf.float32)
    return x


def choosing(x):
    z = x - 1.0
    y = x * 2.0 if tf.reduce_sum(x) > 0.0 else z
    return tf.reduce_sum(y)


@pytest.mark.parametrize("function", [calling, looping, choosing])
def test_other_decisions_are_timed_as_well(monkeypatch, tune, function):
    """What helpers return, loops over ranges, expressions: all go to Python where that is faster."""
    timed(monkeypatch, tune, 0.002, 0.001)
    fn = coexec.function(function, control_flow=True)
    for n in range(120):
        np.testing.assert_array_equal(fn(ROWS[n % 4]).numpy(), function(ROWS[n % 4]).numpy())
    before = fn.stats()
    assert before.decisions_on_device > 0
    for n in range(8):
        np.testing.assert_array_equal(fn(ROWS[n % 4]).numpy(), function(ROWS[n % 4]).numpy())
    assert fn.stats().decisions_on_device == before.decisions_on_device, fn.explain()
    assert fn.stats().decisions > before.decisions
    assert "calls took 2.00 ms with it on the device, 1.00 with Python's decisions" in fn.explain()


def gates(x, vs):
    for v in vs:
        if tf.reduce_sum(x * v) > 0.0:
            x = x + v
    y = x * 2.0 if tf.reduce_max(x) > 1.0 else x
    return tf.reduce_sum(y)


def test_statements_are_timed_one_after_the_other(monkeypatch, tune):
    """In each call that is timed, one statement goes one way, at all places of a loop; others do as they do."""
    timed(monkeypatch, tune, 0.001, 0.002)
    vs = [tf.constant([1.0, -1.0]), tf.constant([0.5, 0.5]), tf.constant([-2.0, 1.0])]
    fn = coexec.function(gates, control_flow=True)
    taken = set()
    for n in range(200):
        before = fn.stats().decisions_on_device
        assert float(fn(ROWS[n % 4], vs)) == float(gates(ROWS[n % 4], vs))
        if n >= 8:
            taken.add(fn.stats().decisions_on_device - before)
    assert taken == {1, 3, 4}, taken  # all, but for one of the two while it is timed
    assert fn.explain().count("with Python's decisions") == 2, fn.explain()


def test_without_a_clock_nothing_is_timed():
    """As tests have it: what the device can take, it takes."""
    fn = coexec.function(gate, control_flow=True)
    w = tf.Variable([0.5, 2.0])
    for n in range(60):
        fn(ROWS[n % 4], w)
    assert fn.stats().decisions_on_device == 59 - tuning.decision_patience  # the first call is recorded
    assert "calls took" not in fn.explain()


def test_an_error_in_a_call_that_is_timed_is_eagers(monkeypatch, tune):
    """Calls that fail say nothing, and what they raise is raised."""
    timed(monkeypatch, tune, 0.001, 0.00101)

    def failing(x, w, fails):
        y = gate(x, w)
        if fails:
            raise KeyError(float(y))
        return y

    fn, w = coexec.function(failing, control_flow=True), tf.Variable([0.5, 2.0])
    for n in range(90):
        x = ROWS[n % 4]
        if n % 5 == 4:
            with pytest.raises(KeyError) as caught:
                fn(x, w, True)
            assert caught.value.args == (float(gate(x, w)),)
        else:
            assert float(fn(x, w, False)) == float(gate(x, w))
    assert fn.stats().decisions_on_device > 20
