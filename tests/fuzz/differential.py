"""Runs a program eagerly and co-executed, compares all it does, and makes a program that fails small."""

import contextlib
import dataclasses
import functools
import linecache
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coexec
from coexec import testing
from tests.fuzz.programs import Program, smaller
from tests.fuzz.state import Planned, State, arguments
from tests.snapshots import assert_same, snapshot
from tracer import intercept

BACKENDS = {"graph": False, "xla": True}

# A branch of the other kind differs by more, rounding under XLA by less.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}

DEEPER = 20  # frames: what follows a call may take more than what makes it


@dataclasses.dataclass
class Call:
    """What one call did."""

    outcome: Any
    contents: Any
    failed: bool  # an operation failed, and nobody caught it: Python may have run on behind it


def unchanged(function: Callable) -> Callable:
    """The decorator of the eager side."""
    return function


def define(source: str, state: State) -> Callable:
    """Returns the program's step; its source can be shown in tracebacks."""
    file = f"<fuzz {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {"tf": tf, "np": np, "keras": keras, "coexec": coexec, "contextlib": contextlib, "functools": functools,
             "Planned": Planned, "S": state}  # fmt: skip
    exec(compile(source, file, "exec"), names)
    return names["step"]


def run(program: Program, wrap: Callable, ways: dict[str, int]) -> tuple[list[Call], Any]:
    """Makes all calls of a program; returns what each did, and the decorated step."""
    keras.utils.set_random_seed(program.seed % 1000)
    state = State(wrap)
    step = wrap(define(program.source, state))
    calls = []
    for number, kind in enumerate(program.inputs):
        given = arguments(kind)
        left = testing.diverge_at(ways["event"]) if number == ways.get("call") else contextlib.nullcontext()
        failed = False
        try:
            with left:
                outcome = step(*given, number)
        except (Exception, GeneratorExit) as error:
            failed = isinstance(error, tf.errors.OpError) and error.message != "mine"
            error.__cause__ = error.__context__ = None
            outcome = error.with_traceback(None)
        calls.append(Call(snapshot(outcome), snapshot(state.contents(failed)), failed))
        del outcome
        if failed:
            state.reset(number)
    return calls, step


def compare(program: Program, expected: list[Call], found: list[Call]) -> None:
    """Fails, naming the call, where two runs differ."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one.outcome, other.outcome, **TOLERANCE, path=f"call {number}: result")
        mine, its = one.contents.parts, dict(other.contents.parts)
        for name, part in mine.items():
            theirs = its[name]
            if one.failed and name == "['log']":  # what was logged up to the failure
                kept = dict(list(theirs.parts.items())[: len(part.parts)])
                theirs = dataclasses.replace(theirs, parts=kept)
            elif one.failed and name == "['layers']":  # a handler that began later may have made more of them
                kept = {key: value for key, value in theirs.parts.items() if key in part.parts}
                theirs = dataclasses.replace(theirs, parts=kept)
            assert_same(part, theirs, **TOLERANCE, path=f"call {number}: {name}")


class Unsteady(Exception):
    """The program does not repeat itself eagerly, either: how deep it may call itself depends on who calls it."""


@dataclasses.dataclass
class Counts:
    """How programs ran, so that none passes for want of being followed."""

    programs: int = 0
    unsteady: int = 0
    calls: int = 0
    followed: int = 0
    launches: int = 0
    raised: int = 0

    def add(self, step: Any, calls: list[Call]) -> None:
        stats = step.stats()
        self.programs += 1
        self.calls += stats.calls
        self.followed += stats.followed
        self.launches += stats.launches
        self.raised += sum(getattr(c.outcome, "kind", "").endswith(("Error", "Planned")) for c in calls)


def deeper(levels: int, function: Callable) -> Any:
    """Calls a function with so many more frames below it."""
    return deeper(levels - 1, function) if levels else function()


def repeat(program: Program, expected: list[Call]) -> None:
    """Raises `Unsteady` if a program does something else when it runs eagerly once more, with less room for frames."""
    again, _ = deeper(DEEPER, lambda: run(program, unchanged, {}))
    try:
        compare(program, expected, again)
    except AssertionError as error:
        raise Unsteady(f"eagerly, again: {error}\n\n{program.source}\nin {program.inputs}") from None


def check(program: Program, backends: tuple[str, ...] = tuple(BACKENDS), counts: Counts | None = None) -> None:
    """Fails if a program does something else than eagerly in one of the backends, and always the same eagerly."""
    with testing.always_follow(), testing.compile_everything(), testing.trust_compiled():
        expected, _ = run(program, unchanged, {})
        for backend in backends:
            wrap = functools.partial(coexec.function, jit_compile=BACKENDS[backend])
            try:
                found, step = run(program, wrap, program.ways)
                compare(program, expected, found)
                assert intercept.current_handler() is None, "a handler is left"
            except AssertionError as error:
                repeat(program, expected)
                raise AssertionError(f"{backend}: {error}\n\n{program.source}\nin {program.inputs}") from None
            if counts is not None:
                counts.add(step, found)


def fails(program: Program, backend: str, counts: Counts | None = None) -> str | None:
    """Returns how a program fails; None if it does not, or is none."""
    try:
        check(program, (backend,), counts)
    except AssertionError as error:
        return str(error)
    except Unsteady:
        if counts is not None:
            counts.unsteady += 1
        return None
    except SyntaxError:
        return None
    except Exception as error:
        return f"{backend}: {type(error).__name__}: {error}\n\n{program.source}\nin {program.inputs}"
    return None


def reduce(program: Program, backend: str, tries: int = 400) -> Program:
    """Returns a program that fails, too, with less in it."""
    candidates = _less(program)
    while tries:
        less = next(candidates, None)
        if less is None:
            break
        tries -= 1
        if fails(less, backend):
            program, candidates = less, _less(less)
    return program


def _less(program: Program):
    if program.ways:
        yield dataclasses.replace(program, ways={})
    for name, block in program.functions.items():
        for less in smaller(block):
            yield dataclasses.replace(program, functions={**program.functions, name: less})
    for n in range(len(program.inputs) - 1, 0, -1):
        yield dataclasses.replace(program, inputs=program.inputs[:n] + program.inputs[n + 1 :])


def quiet() -> None:
    """Keeps TensorFlow's own messages out of a run of many programs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tf.get_logger().setLevel("ERROR")
