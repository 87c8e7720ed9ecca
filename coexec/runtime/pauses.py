"""Pauses: where in a call Python takes its time between two operations, found by timing a few calls.

Timing an operation takes 0.3 us, a fifth of what following one does, so only some calls are timed, in pairs. A place
counts where both calls of a pair paused; it is given up once it is found to pause no more.
"""

from __future__ import annotations

import time
from typing import Any

from tracer.graph import Step

# Seconds: to another thread and back takes 0.3 ms (two cores), and the segment that ends costs a launch.
LONG = 2e-3
# For each operation before it, another: what ends there is compiled anew, which takes 0.25 ms an operation, twice.
LONGER = 1e-5
# And this share of the call: of a long one, others would not be missed.
SHARE = 0.1


# Two calls to be compared; tests set it.
timed: tuple[int, ...] = (8, 9)


def is_timed(call: int) -> bool:
    """Whether the followed call of this number is timed: the eighth and ninth, the eightieth and ninetieth, ..."""
    while call % 10 == 0:
        call //= 10
    return call in timed


# Operations: a segment with fewer is not launched as a whole.
SMALL = 8

_TIMED = "expected", "fast", "execute", "library", "flush"


class Pauses:
    """Times one followed call."""

    def __init__(self, run: Any) -> None:
        self._found: list[tuple[Step, float]] = []  # behind which Python paused, and how long
        self._run = run
        self._cursor = run.cursor
        self._start = self._last = time.perf_counter()
        self._untimed = {name: getattr(run, name) for name in _TIMED}
        for name, function in self._untimed.items():
            setattr(run, name, self._timed(function))

    def end(self) -> list[Step]:
        """Ends the timing; returns the steps behind which Python paused."""
        for name, function in self._untimed.items():
            if callable(getattr(type(self._run), name, None)):  # a method, which is behind what was set
                delattr(self._run, name)
            else:
                setattr(self._run, name, function)
        least = SHARE * (time.perf_counter() - self._start)
        return [step for step, paused in self._found if paused >= least]

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any) -> Any:
            paused = time.perf_counter() - self._last
            if paused > LONG:
                step = self._cursor.step
                if step.live >= SMALL and not step.risky and paused > LONG + LONGER * step.live:
                    self._found.append((step, paused))
            try:
                return function(*args)
            finally:
                self._last = time.perf_counter()

        return timed


def note(one: list[Step], other: list[Step]) -> int:
    """Marks the steps behind which two calls have paused; returns how many are new."""
    new = [step for step in set(one) & set(other) if not step.pause]
    for step in new:
        step.pause, step.risky = True, None
        step.settle_plain()  # no step for the cursor's shortest way any more
    return len(new)
