"""Other people's programs: steps on libraries from PyPI, and in plain TensorFlow, as their documentation writes them.

An example is one function that builds everything anew, from seeds that are set before it is called:

    @example()
    def linear_regression():
        "What it is."
        weights = tf.Variable(tf.zeros([3]))

        def step(x, y):
            ...
            return loss

        return Example(step, state=lambda: weights, arguments=[(x, y)])

Those in `chosen_after` were written after the runtime had been tuned for the others, all of them before one of them was
measured; the table has both halves apart. Nothing in them is written for co-execution: they do not know whether their
step is decorated. A module whose library is not installed is skipped (`pip install '.[ecosystem]'`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EXAMPLES: dict[str, "Registered"] = {}


@dataclass(frozen=True)
class Example:
    """A program before its first step. Call number n is given `arguments[n % len(arguments)]`."""

    step: Callable[..., Any]
    state: Callable[[], Any]  # all that steps change: variables, optimizers' state, what Python objects hold
    arguments: Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Registered:
    """A function that builds an example."""

    name: str
    build: Callable[[], Example]
    # How far values may be from eager's, as training amplifies differences of the last place.
    rtol: float
    atol: float


def example(rtol: float = 2e-3, atol: float = 2e-4) -> Callable[[Callable[[], Example]], Callable[[], Example]]:
    """Registers a function that builds an example, under its own name."""

    def register(build: Callable[[], Example]) -> Callable[[], Example]:
        EXAMPLES[build.__name__] = Registered(build.__name__, build, rtol, atol)
        return build

    return register
