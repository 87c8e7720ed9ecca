"""The timeline: what happened in calls, in order, bounded, and only while somebody has asked for it."""

import time

import pytest
import tensorflow as tf

import coexec
from coexec.base import timeline
from coexec.base.timeline import Rate, Timeline
from tests.coexec import in_threads, run_both

X = tf.constant([1.0, 2.0])


@pytest.fixture
def events():
    """The timeline of the test."""
    made = timeline.start()
    yield made
    timeline.stop(made)
    assert timeline.current is None


def reading(decorated):
    @decorated
    def step(x, more):
        y = tf.exp(x) * 2.0
        if float(tf.reduce_sum(y)) > 0.0 and more:
            y = tf.square(y)
        return tf.tanh(y) + 1.0

    return step


def test_calls_and_launches_are_events(events):
    """Each call once, with how it ran; launches inside of their calls; the values are eager's."""
    with coexec.base.tuning.tuned(launch_visits=2, launch_operations=1):
        step = run_both(reading, [(X, False)] * 5 + [(X, True)], jit_compile=False)
    found, left_out = events.snapshot()
    stats = step.stats()
    kinds = [event.kind for event in found]
    assert left_out == 0
    assert [kind for kind in kinds if kind in timeline.CALLS] == ["recorded", *["followed"] * 4, "diverged"]
    assert kinds.count("launch") == stats.launches == 7
    assert kinds.count("compile") == stats.compiles == 2
    assert kinds.count("one by one") == 2
    assert kinds.count("divergence") == 1
    calls = [event for event in found if event.kind in timeline.CALLS]
    for event in found:
        assert event.name == "reading.<locals>.step"
        assert events.began <= event.began <= event.ended
        assert any(call.began <= event.began and event.ended <= call.ended for call in calls)
    assert all(__file__ in event.text for event in found if event.kind in ("launch", "divergence"))
    rate = events.rates["reading.<locals>.step"]
    assert sum(rate.calls) == 6
    assert sum(rate.seconds) == pytest.approx(sum(call.ended - call.began for call in calls))


def test_nothing_is_recorded_unless_asked_for():
    assert timeline.current is None
    events = timeline.start()
    timeline.stop(events)
    run_both(reading, [(X, False)] * 3)
    assert events.snapshot() == ([], 0)


def test_the_last_to_end_it_ends_it():
    one, other = timeline.start(), timeline.start()
    assert one is other is timeline.current
    timeline.stop(one)
    assert timeline.current is one
    timeline.stop(other)
    assert timeline.current is None


def test_a_call_that_raises_is_an_event(events):
    def make(decorated):
        return decorated(lambda x: tf.exp(x) + 1 / 0)

    run_both(make, [(X,)] * 3)
    assert next(event.kind for event in events.snapshot()[0] if event.kind in timeline.CALLS) == "recorded"
    assert sum(map(sum, (rate.calls for rate in events.rates.values()))) == 3


def test_the_first_and_the_last_events_are_kept():
    with coexec.base.tuning.tuned(timeline_first=3, timeline_last=2):
        events = Timeline()
        for n in range(10):
            events.add("launch", "step", events.began, str(n))
    found, left_out = events.snapshot()
    assert [event.text for event in found] == ["0", "1", "2", "8", "9"]
    assert left_out == 5


def test_threads_have_their_names(events):
    step = reading(coexec.function)
    in_threads(*[lambda: [step(X, False) for _ in range(5)]] * 2)
    threads = {event.thread for event in events.snapshot()[0]}
    assert len(threads) == 2
    assert threads == events.threads.keys()
    assert sum(events.rates["reading.<locals>.step"].calls) == 10


def test_what_the_compiler_does_is_on_its_thread(events):
    from coexec.compile.compile_thread import background

    background.submit("a job of this test", lambda: time.sleep(0.01))
    assert background.wait(10)
    (event,) = [event for event in events.snapshot()[0] if event.text == "a job of this test"]
    assert event.kind == "xla"
    assert events.threads[event.thread] == "coexec-compiler"
    assert event.ended - event.began >= 0.01


def test_the_rate_keeps_a_bounded_number_of_intervals():
    """They get twice as long when there are too many; no call is lost, and none is moved."""
    with coexec.base.tuning.tuned(rate_interval=1.0, rate_intervals=4):
        rate = Rate()
        for second in range(13):
            rate.add(second + 0.5, 0.1)
        assert rate.interval == 4.0
        assert rate.calls == [4, 4, 4, 1]
        rate.add(1000.0, 0.1)
    assert rate.interval == 256.0
    assert rate.calls == [13, 0, 0, 1]
    assert sum(rate.seconds) == pytest.approx(1.4)
