"""When calls of helpers are watched: late, for a share of the time, and no more where it brings nothing."""

import tensorflow as tf

import coexec
from coexec.base.tuning import tuned, tuning
from coexec.memoize.watch_budget import WatchBudget, Watching
from tracer import value_stack

X = tf.constant([[1.0, -2.0], [3.0, 4.0]])


def settled(seconds=1.0):
    """A budget that has just begun to pay."""
    budget = WatchBudget()
    for _ in range(tuning.watched_from):
        assert budget.phase is Watching.WAITING
        assert not budget.affords()
        budget.called(seconds, True, tuning.watched_operations)
    assert budget.phase is Watching.LEARNING
    return budget


def test_nothing_is_watched_where_calls_never_settle():
    budget = WatchBudget()
    for _ in range(10 * tuning.watched_from):
        budget.called(1.0, False, 100)
    assert budget.phase is Watching.WAITING
    assert not budget.affords()


def test_nothing_is_watched_where_little_is_left_to_skip():
    budget = WatchBudget()
    for _ in range(10 * tuning.watched_from):
        budget.called(1.0, True, tuning.watched_operations - 1)
    assert budget.phase is Watching.WAITING


def test_watching_takes_a_share_of_the_time():
    """A watched call may cost more than is left; then no other is watched until that is paid off."""
    budget = settled()
    assert budget.affords()
    budget.spend(10.0)
    assert not budget.affords()
    calls = 0
    while not budget.affords():
        budget.called(1.0, True, 100)
        calls += 1
    assert abs(calls - (10.0 / tuning.watched_share - tuning.watched_from)) <= 1


def test_watching_has_an_end():
    budget = settled()
    budget.spend(tuning.watched_in_all + 1.0)
    for _ in range(10_000):
        budget.called(1.0, True, 100)
    assert not budget.affords()


def test_the_clock_decides_whether_to_keep_it():
    for seconds, phase in ((0.5, Watching.LEARNT), (1.0, Watching.IN_VAIN)):
        budget = settled()
        for _ in range(tuning.watched_idle + tuning.pace_calls):
            budget.called(seconds, True, 100)
        assert budget.phase is phase
        assert budget.affords() == (phase is Watching.LEARNT)


def helper(x):
    for _ in range(4):
        x = tf.stack([tf.sin(x)[0] * 0.5, tf.cos(x)[1]])
    return x


def outer(x):
    return tf.reduce_sum(helper(x)) + tf.reduce_sum(helper(x * 2.0))


def make():
    def step(x):
        y = outer(x)
        if float(tf.reduce_max(x)) > 1000.0:  # no `assert`: pytest rewrites it, and the source would not be the code's
            raise ValueError(x)
        return y

    return step


def test_a_function_that_has_settled_skips_its_helpers():
    """From then on; the twin that does so gives the same locations, so that nothing is recorded again."""
    if not value_stack.available():
        return
    step, calls = make(), 5
    with tuned(watched_from=calls, watched_share=1e9, watched_in_all=1e9, watched_calls=1e9):
        function = coexec.function(step, regions="all")
        plain = coexec.function(step)
        for number in range(4 * calls):
            x = X * float(number)
            tf.debugging.assert_near(function(x), step(x))
            plain(x)
            if number < calls:
                assert function.stats().regions == 0
    assert function.stats().regions > 0, function.explain()
    assert (function.stats().diverged, function.stats().recorded) == (0, 1), function.explain()
    assert plain.stats().regions == 0


def test_a_function_is_itself_again_where_it_was_in_vain():
    step = make()
    with tuned(watched_from=2, watched_share=1e9, watched_idle=4, watched_worth=0.0):
        function = coexec.function(step, regions="all")
        for number in range(3 * tuning.pace_calls):
            number = float(number % 7)
            tf.debugging.assert_near(function(X * number), step(X * number))
    controller = function._controller
    if value_stack.available():
        assert controller.known_calls.watching.phase is Watching.IN_VAIN
    assert controller.function is controller._plain
