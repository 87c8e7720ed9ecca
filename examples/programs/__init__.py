"""The programs that papers of this field are judged by, each written as its authors would write it eagerly.

A program is one module with one factory. It is given the decorator of its training steps (`coexec.function`,
`tf.function`, or one that does nothing) and builds everything anew, so that two runs can be compared:

    @program(origin="JANUS", data="generated")
    def lenet(function, published=False):
        "What it is, and which Python in its step makes it hard for a graph."
        ...
        @function
        def train(images, labels): ...

        return Training(step=lambda: train(*next(batches)), state=lambda: (model.variables, log))
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PROGRAMS: dict[str, "Program"] = {}


@dataclass(frozen=True)
class Training:
    """One run of a program, at the start of its training.

    `step` makes the next training step, the choice of its batch included, and returns its losses. `state` returns all
    that steps change, to be compared: variables, optimizers' state, and what Python objects hold.
    """

    step: Callable[[], Any]
    state: Callable[[], Any]


@dataclass(frozen=True)
class Program:
    """A factory of trainings, where it comes from and on what data it trains."""

    name: str
    origin: str  # the paper that made it a benchmark: Terra, JANUS, Cocktailer, ...
    data: str  # a data set that a package ships, or "generated", with the published shapes
    about: str
    build: Callable[..., Training]
    # Ten steps amplify differences of the last place: how far losses and state may be from eager's then.
    rtol: float
    atol: float


def program(*, origin: str, data: str, rtol: float = 1e-4, atol: float = 1e-5) -> Callable[[Callable], Callable]:
    """Registers the decorated factory, `(function, published=False) -> Training`, under its own name.

    `published` asks for the size of the publication, for a GPU; without it an eager step takes 20 ms to 1 s.
    """

    def register(build: Callable[..., Training]) -> Callable[..., Training]:
        assert build.__doc__ is not None, f"{build.__name__} says nothing about itself"
        PROGRAMS[build.__name__] = Program(build.__name__, origin, data, build.__doc__.strip(), build, rtol, atol)
        return build

    return register


def load() -> dict[str, Program]:
    """Every program by name; imports their modules."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        importlib.import_module(f"{__name__}.{module.name}")
    return PROGRAMS
