"""The corpus: plain programs, one feature of Python or TensorFlow each, that know nothing of co-execution.

A program is a factory. It is given the decorator under test (or one that does nothing, for the eager side)
and returns an `Instance` with state of its own, so that an eager and a co-executed one can be compared:

    @program()
    def running_total(function):
        "A list outside the step grows by one number a call."
        log = []

        @function
        def step(x):
            log.append(float(tf.reduce_sum(x)))
            return x * log[-1]

        return Instance(step, each(lambda i: args(vector(i))), state=lambda: log)

Floats that are printed or that decide a branch are whole numbers or halves: every order of summation agrees.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

CallArguments = tuple[tuple, dict]
CALLS = 8


def nothing(*_):
    return None


@dataclass
class Instance:
    """One run's worth of a program: what to call, with what, and what to compare."""

    step: Callable
    calls: Sequence[Callable[[], CallArguments]]
    state: Callable[[], Any] = nothing  # what the program has done so far: logs, variables, attributes
    after: Callable[[Any], Any] = nothing  # what a caller does with a result, outside the step
    function: Any = None  # the decorated object that counts, where it is not `step` itself

    def __post_init__(self):
        self.function = self.step if self.function is None else self.function


@dataclass(frozen=True)
class Program:
    """A factory of instances, and what to expect of a co-executed one.

    `follows` is the least number of calls that must be followed from start to end. 0 needs a reason, `why`, and so has
    it where nothing is to be launched because every operation runs on its own.
    """

    name: str
    make: Callable[[Callable], Instance] = field(repr=False)
    follows: int
    launches: bool
    why: str
    rtol: float
    atol: float


PROGRAMS: dict[str, Program] = {}


def program(follows: int = 5, launches: bool = True, why: str = "", rtol: float = 1e-5, atol: float = 1e-6):
    """Register a factory. The first call records, a new path costs one more: 5 of 8 leaves room for two."""
    if not (follows and launches) and not why:
        raise ValueError("a program that is never followed, or never launched, says why")

    def register(make):
        name = f"{make.__module__.rpartition('.')[2]}.{make.__name__}"
        if name in PROGRAMS:
            raise ValueError(f"two programs are called {name}")
        PROGRAMS[name] = Program(name, make, follows, launches and follows > 0, why, rtol, atol)
        return make

    return register


def args(*positional, **keywords) -> CallArguments:
    return positional, keywords


def each(arguments: Callable[[int], CallArguments], count: int = CALLS) -> list[Callable[[], CallArguments]]:
    """The thunks of `count` calls. `arguments` gets the number of the call and builds fresh inputs."""
    return [lambda number=number: arguments(number) for number in range(count)]


def vector(number: int, *shape: int, dtype=np.float32) -> tf.Tensor:
    """Normal numbers that depend on `number` alone."""
    return tf.constant(np.random.default_rng(number).normal(size=shape or (4,)).astype(dtype))


def integers(number: int, *shape: int, low=-4, high=5, dtype=np.int32) -> tf.Tensor:
    """Small whole numbers that depend on `number` alone; as floats, their sums are exact in any order."""
    return tf.constant(np.random.default_rng(number).integers(low, high, size=shape or (4,)).astype(dtype))


def signed(number: int) -> tf.Tensor:
    """Exact floats whose sum is above zero in even calls and below zero in odd ones."""
    sign = 1.0 if number % 2 == 0 else -1.0
    return tf.constant(np.array([1.0, 2.0, 3.0, 0.5 * number], np.float32) * sign)


def whole(number: int) -> tf.Tensor:
    """A float scalar: 0.0, 1.0, 2.0, ..."""
    return tf.constant(float(number))


for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
