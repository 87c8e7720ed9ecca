"""Every program of the corpus, eager and co-executed side by side: values, effects, state and exceptions.

Each phase also says how the result was obtained: a program that was never followed is a failure here.
"""

import contextlib
import dataclasses
import functools
import io
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.src.backend.common.global_state import set_global_attribute

import coexec
from coexec import testing
from tests.programs import PROGRAMS, Instance, Program
from tests.snapshots import assert_same, snapshot

# A program of many operations is left at this many events, evenly spread, its first and its last among them.
MOST_EVENTS = 12
PARTS = 4  # of these events, of which `make test` has the first


@dataclasses.dataclass(frozen=True)
class Phase:
    """How the sequence of calls is run."""

    jit_compile: bool | str
    tape: bool = False  # a GradientTape of the caller's is open around each call
    # Results and state are looked at only after the last call: until then nothing forces a value.
    late: bool = False
    everything: bool = False  # small segments are compiled too, at once


PHASES = {
    "auto": Phase("auto"),
    "graph": Phase(False, late=True, everything=True),
    "xla": Phase(True, everything=True),
    "tape": Phase("auto", tape=True, everything=True),
}
DIVERGING = Phase(False, everything=True)


@dataclasses.dataclass
class Outcome:
    """What a run of all calls gave: one snapshot a call, and the last state."""

    calls: list[Any]
    state: Any
    printed: str
    instance: Instance
    events: list[int]


def unchanged(target=None, **_):
    """The decorator of the eager side."""
    return unchanged if target is None else target


def run(program: Program, decorator, phase: Phase, around=None) -> Outcome:
    """All calls of a fresh instance. `around(number)` is a context manager for one call."""
    keras.utils.set_random_seed(7)
    # With Keras 3.12, the last for Python 3.10, that leaves the global seed generator as the last program did.
    set_global_attribute("global_seed_generator", None)
    calls, events = [], []
    everything = testing.compile_everything() if phase.everything else contextlib.nullcontext()
    with contextlib.redirect_stdout(io.StringIO()) as printed, everything:
        instance = program.make(decorator)
        for number, thunk in enumerate(instance.calls):
            with around(number) if around else contextlib.nullcontext():
                result = call(instance, *thunk(), phase)
            calls.append(result if phase.late else snapshot((result, instance.state(), printed.getvalue())))
            if decorator is not unchanged:
                events.append(testing.count_events(instance.function))
        # The state first: with pending tensors in it, looking at a result must not be what made it right.
        state = snapshot(instance.state())
        calls = [snapshot(result) for result in calls] if phase.late else calls
    return Outcome(calls, state, printed.getvalue(), instance, events)


def call(instance: Instance, positional: tuple, keywords: dict, phase: Phase) -> Any:
    """One call: its result or exception, what the caller then made of it, and gradients through the call."""
    sources = differentiable((positional, keywords))
    tape = tf.GradientTape() if phase.tape else contextlib.nullcontext()
    try:
        with tape:
            if phase.tape:
                tape.watch(sources)
            result = instance.step(*positional, **keywords)
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit) as error:
        # A traceback would keep the frames, and with them every tensor of the call, alive.
        return "raised", error.with_traceback(None)
    if not phase.tape:
        return "returned", result, instance.after(result)
    watched = list(tape.watched_variables())
    targets = differentiable(result)
    try:
        gradients = tape.gradient(targets, sources + watched) if targets else None
    except Exception as error:  # some gradients cannot be had eagerly either
        gradients = error.with_traceback(None)
    return "returned", result, instance.after(result), gradients, len(watched)


def differentiable(value: Any) -> list[tf.Tensor]:
    """The tensors in `value` that have gradients. (tf.nest cannot flatten a dict whose keys do not sort.)"""
    if isinstance(value, tf.Tensor):
        return [value] if value.dtype.is_floating or value.dtype.is_complex else []
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [leaf for part in value for leaf in differentiable(part)] if isinstance(value, (list, tuple)) else []
    )


@functools.cache
def eager(name: str, tape: bool = False, late: bool = False) -> Outcome:
    """The eager run, shared by the phases of one process in which callers do the same."""
    return run(PROGRAMS[name], unchanged, Phase(False, tape, late))


def compare(program: Program, expected: Outcome, found: Outcome) -> None:
    tolerance = {"rtol": program.rtol, "atol": program.atol}
    for number, (one, other) in enumerate(zip(expected.calls, found.calls, strict=True)):
        assert_same(one, other, **tolerance, path=f"call {number}: ")
    assert_same(expected.state, found.state, **tolerance, path="state at the end: ")
    assert expected.printed == found.printed


# `make test` has two phases of each program.
@pytest.mark.sample(*(f"{name}-{phase}" for n, name in enumerate(PROGRAMS) for phase in list(PHASES)[n % 2 :: 2]))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_followed_program_is_the_eager_program(name, phase):
    program, phase = PROGRAMS[name], PHASES[phase]
    expected = eager(name, phase.tape, phase.late)
    found = run(program, functools.partial(coexec.function, jit_compile=phase.jit_compile), phase)
    compare(program, expected, found)
    stats = found.instance.function.stats()
    assert stats.followed >= program.follows, f"{stats}\n{found.instance.function.explain()}"
    launches = phase.everything and program.launches
    assert not launches or stats.launches > 0, f"{stats}\n{found.instance.function.explain()}"


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_is_left_at_any_event_is_the_eager_program(name, part):
    program = PROGRAMS[name]
    expected = eager(name)
    decorator = functools.partial(coexec.function, jit_compile=DIVERGING.jit_compile)
    unforced = run(program, decorator, DIVERGING)
    for event in spread(max(unforced.events, default=0), MOST_EVENTS)[part::PARTS]:
        # Every other call is forced: the calls between show whether what was recorded can be followed.
        def around(number, event=event):
            forced = (number + event) % 2 == 0
            return testing.diverge_at(event) if forced else contextlib.nullcontext()

        found = run(program, decorator, DIVERGING, around)
        try:
            compare(program, expected, found)
        except AssertionError as error:
            raise AssertionError(f"left at event {event}: {error}") from None
        forceable = [
            number
            for number, events in enumerate(unforced.events)
            if events > event and (number + event) % 2 == 0 and number > 1
        ]
        stats = found.instance.function.stats()
        assert program.follows == 0 or len(forceable) < 2 or stats.diverged > 0, f"event {event}: {stats}"


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread, the ends included."""
    if count <= most:
        return list(range(count))
    return sorted({round(number * (count - 1) / (most - 1)) for number in range(most)})


def test_spread():
    assert spread(3, 12) == [0, 1, 2]
    assert spread(100, 3) == [0, 50, 99] or spread(100, 3) == [0, 49, 99]


def test_the_corpus_is_whole():
    assert len(PROGRAMS) >= 80
    assert all(program.make.__doc__ for program in PROGRAMS.values())
