"""Pauses: places in a call where Python takes long between two operations, found by timing a few calls.

Timing an operation takes 0.3 us, a fifth of what following one does, so only some calls are timed, in pairs. A place
counts if both calls of a pair paused there; it is dropped once it no longer pauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from coexec.base.tuning import tuning
from coexec.follow.follower import Follower
from tracer.graph import Step

_Result = TypeVar("_Result")


def is_timed(call: int) -> bool:
    """Whether the followed call of this number is timed: the eighth and ninth, the eightieth and ninetieth, ..."""
    while call % 10 == 0:
        call //= 10
    return call in tuning.pause_timed


class TimedFollower(Follower):
    """The handler of one followed call; also times the Python between the operations it handles."""

    __slots__ = ("_found", "_last", "_start")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._found: list[tuple[Step, float]] = []  # steps after which Python paused, and for how long
        self._start = self._last = time.perf_counter()
        self.library = self._timed(self.library)

    def expected(self, op: str, args: tuple[Any, ...]) -> Any:
        """Handles an operation if it is the one expected next."""
        return self._timed(super().expected)(op, args)

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Handles an operation issued by a generated wrapper."""
        return self._timed(super().fast)(op, name, args)

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any:
        """Handles an operation or function issued by name."""
        return self._timed(super().execute)(device, op, inputs, attrs, outputs, cancel)

    def flush(self) -> None:
        """Runs all pending operations."""
        self._timed(super().flush)()

    def pauses(self) -> list[Step]:
        """Returns the steps after which Python paused; to be called once the call has ended."""
        least = tuning.pause_share * (time.perf_counter() - self._start)
        return [step for step, paused in self._found if paused >= least]

    def _timed(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        def timed(*args: Any) -> _Result:
            paused = time.perf_counter() - self._last
            if paused > tuning.pause_long:
                step = self.cursor.step
                least = tuning.pause_long + tuning.pause_longer * step.live
                if step.live >= tuning.pause_operations and not step.risky and paused > least:
                    self._found.append((step, paused))
            try:
                return function(*args)
            finally:
                self._last = time.perf_counter()

        return timed


def note(one: list[Step], other: list[Step]) -> int:
    """Marks the steps after which both calls paused; returns how many are new."""
    new = [step for step in set(one) & set(other) if not step.pause]
    for step in new:
        step.pause, step.risky = True, None
        step.settle_plain()  # no longer eligible for the cursor's fast path
    return len(new)
