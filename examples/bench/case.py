"""What a case of the benchmark is made of."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """One fresh instance of a case: the function, and the arguments of its calls without end."""

    step: Callable
    inputs: Iterator[tuple]


@dataclass(frozen=True)
class Case:
    """What is measured, and what is expected of it."""

    name: str
    what: str
    build: Callable[[], Program]
    calls: int  # calls of one variant in one round, which are timed together
    at_most: float | None = None  # goal for the time of a call, as a multiple of eager's
    of_graphs: float | None = None  # the same, of the faster of `tf.function` and `jit_compile=True`
    of_function: float | None = None  # the same, of `tf.function` as it is
    of_host: float | None = None  # the same, of co-execution that leaves all decisions to Python
    follows: bool = True  # whether some call must have been followed for the figures to mean anything
    no_graphs: str | None = None  # why `tf.function` and `jit_compile=True` are left out
    wrappers: Mapping[str, Callable] | None = None  # how each variant is made, if not by a decorator


def forever(*args: object) -> Iterator[tuple]:
    """The same arguments for every call."""
    while True:
        yield args
