"""Operations that run as an object is freed: CPython reports their errors, and the program goes on behind."""

import contextlib
import gc
import sys
import weakref

import pytest
import tensorflow as tf

import coexec
from coexec import testing
from tests.coexec import unchanged
from tests.snapshots import assert_same, snapshot

CALLS = 20
LIMIT = 8.0


def check(x):
    tf.debugging.assert_less(tf.reduce_max(x), LIMIT)


class Checked:
    def __init__(self, x):
        self.x, self.y = x, x * 2.0

    def __del__(self):
        check(self.y)


class Plain:
    pass


def checked(x):
    try:
        yield x * 2.0
        yield x * 3.0
    finally:
        check(x)


def managed(x):
    with contextlib.nullcontext(x) as y:
        try:
            yield y * 2.0
        except GeneratorExit:
            try:
                raise KeyError
            except KeyError:
                check(y)
            raise


def a_generator_nobody_keeps(x):
    return next(checked(x)) + 1.0


def a_generator_that_is_deleted(x):
    generator = checked(x)
    y = next(generator) + 1.0
    del generator
    return y * 2.0


def a_loop_that_ends_early(x):
    for y in checked(x):
        x = y
        break
    return x + 1.0


def a_generator_that_is_closed(x):
    generator = checked(x)
    y = next(generator)
    generator.close()  # raises
    return y


def a_generator_that_ends(x):
    return sum(checked(x))  # raises


def a_handler_inside_of_a_generator(x):
    return next(managed(x)) + 1.0


def an_object_that_is_replaced(x):
    held = Checked(x)
    y = held.y
    held = None
    return y + 1.0 if held is None else y


def an_object_of_the_frame(x):
    held = Checked(x)
    return held.y + 1.0


def an_argument(x):
    return len([Checked(x)]) * x


def an_attribute(x):
    held = Plain()
    held.checked = Checked(x)
    held.checked = None
    return x + 1.0


def an_object_in_a_circle(x):
    held = Checked(x)
    held.itself = held
    del held
    gc.collect()
    return x + 1.0


def a_weak_reference(x):
    target = Plain()
    reference = weakref.ref(target, lambda _: check(x))
    y = x * 2.0
    del target
    return y if reference() is None else x


# An error that leaves a frame drops what the frame's statements hold, the innermost first: the manager of a `with` is
# freed before the iterator of the loop around it, whose cleanup then runs while the frame still shows to be inside.


def ignoring(x):
    try:
        yield x * 2.0
    except GeneratorExit:
        pass
    check(x)


class Twice:
    def __init__(self, x):
        self.items = [x * 2.0, x * 3.0]

    def __iter__(self):
        return self

    def __next__(self):
        if not self.items:
            raise StopIteration
        return self.items.pop(0)


def divided(x):
    """Raises by itself where `check(2 * x)` does, and nowhere else."""
    return tf.constant(8, tf.int32) // tf.cast(x[:1] < LIMIT / 2, tf.int32)


def stop_at(x):
    if float(x[0]) >= LIMIT / 2:
        raise tf.errors.InvalidArgumentError(None, None, "stopped")


def a_loop_that_an_error_leaves(x):
    for _ in checked(x):
        with contextlib.nullcontext():
            quotient = int(divided(x)[0])
    return quotient


def a_loop_that_an_error_leaves_behind_a_handler(x):
    for _ in ignoring(x):
        with contextlib.nullcontext():
            stop_at(x)
    return x


def a_weak_reference_that_an_error_drops(x):
    held = [Twice(x)]
    reference = weakref.ref(held[0], lambda _: check(x))
    for _ in held.pop():
        with contextlib.nullcontext():
            stop_at(x)
    return x, reference() is None


class Stop(Exception):
    pass


class Freed:
    def __init__(self, log):
        self.log = log

    def __del__(self):
        self.log.append("freed")


def freed_behind_finally(log, total, x, call):
    held = Freed(log)
    try:
        x = x + 1.0
    finally:
        total.assign_add(1.0)
    del held
    log.append("behind")
    return x


def freed_behind_a_handler(log, total, x, call):
    held = Freed(log)
    try:
        x = x + 1.0
        if call % 2:
            raise Stop
    except Stop as stopped:
        x = x * len(stopped.args)
    finally:
        total.assign_add(1.0)
    del held
    log.append("behind")
    return x


def freed_behind_a_handler_of_ours(log, total, x, call):
    local = Stop
    held = Freed(log)
    try:
        x = tf.debugging.check_numerics(x, "x") + 1.0
        if call % 2:
            raise local("why")
    except local as stopped:
        total.assign_add(float(len(stopped.args)))
    del held
    log.append("behind")
    return x


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("program", [freed_behind_finally, freed_behind_a_handler, freed_behind_a_handler_of_ours])
def test_they_are_freed_where_eager_frees_them(program, jit_compile):
    gc.collect()
    gc.disable()
    try:
        log, total = [], tf.Variable(0.0)
        step = coexec.function(program, jit_compile=jit_compile)
        for call in range(CALLS):
            step(log, total, tf.constant(1.0), call)
            assert log == (call + 1) * ["freed", "behind"], f"call {call}"
    finally:
        gc.enable()
    assert step.stats().followed >= CALLS // 4, step.explain()


PROGRAMS = [
    a_generator_nobody_keeps, a_generator_that_is_deleted, a_loop_that_ends_early, a_generator_that_is_closed,
    a_generator_that_ends, a_handler_inside_of_a_generator, an_object_that_is_replaced, an_object_of_the_frame,
    an_argument, an_attribute, an_object_in_a_circle, a_weak_reference,
    a_loop_that_an_error_leaves, a_loop_that_an_error_leaves_behind_a_handler, a_weak_reference_that_an_error_drops,
]  # fmt: skip


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_their_errors_are_reported(program, jit_compile, monkeypatch):
    """Each value comes twice, so that the second time the path is known."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: reported.append(type(told.exc_value).__name__))
    sides = []
    for decorate in (unchanged, lambda step: coexec.function(step, jit_compile=jit_compile)):
        step, outcomes = decorate(program), []
        with testing.always_follow(), testing.compile_everything():
            for call in range(CALLS):
                try:
                    outcome = snapshot(step(tf.constant([float(call // 2), 1.0])))
                except tf.errors.InvalidArgumentError as error:
                    outcome = type(error).__name__
                outcomes.append((outcome, len(reported)))
        reported.clear()
        sides.append((step, outcomes))
    (_, expected), (followed, found) = sides
    for call, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one[1] == other[1], f"call {call} reports {other[1]} errors, eagerly {one[1]}"
        assert_same(one[0], other[0], path=f"call {call}: ")
    raised = sum(outcome == "InvalidArgumentError" for outcome, _ in expected)
    assert (raised or expected[-1][1]) >= 4
    assert followed.stats().followed >= CALLS // 4, followed.explain()
