"""Watch budget: when calls of the program's own functions are learnt, and how much time that may take.

Watching a call (`guards/watch`) takes some thirty times as long as making it. So it begins once a function has settled,
where calls still follow enough operations one by one, is paid for out of a share of the time that calls have taken, and
ends where nothing is left to learn. If calls take no less time then, it is undone.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque

from coexec.base.tuning import tuning


class Watching(enum.Enum):
    """The phases of a function, as far as its helpers are concerned."""

    WAITING = "until it has settled"
    LEARNING = "calls of helpers are watched"
    LEARNT = "calls of helpers are skipped, and watched again where they changed"
    IN_VAIN = "skipping them brought nothing"


class WatchBudget:
    """The time that one function's calls may spend on watching."""

    def __init__(self) -> None:
        self.phase = Watching.WAITING
        self.spent = 0.0  # seconds, in all
        self._earned = 0.0
        self._calls = 0  # steady ones while it waits; then those since one was watched
        self._watched = False  # whether the running call has watched one
        self._pace: deque[float] = deque(maxlen=tuning.pace_calls)  # of the last steady calls, in seconds
        self._before = 0.0  # seconds of a steady call before the first was watched

    def affords(self) -> bool:
        """Returns whether calls may be watched now; one may cost more than is left, which is then paid off first."""
        return self.phase in _OPEN and self.spent <= self._earned and not self._is_spent()

    def most(self) -> float:
        """Returns the seconds that watching one call may take."""
        return tuning.watched_calls * self._before

    def _is_spent(self) -> bool:
        return self.spent > tuning.watched_in_all * self._before

    def spend(self, seconds: float) -> None:
        """Notes the time of a watched call."""
        self.spent += seconds
        self._watched = True

    def called(self, seconds: float, steady: bool, single: int) -> None:
        """Notes a followed call, and moves on to the next phase where it is time.

        `seconds`: without what was spent on watching; `steady`: whether it met nothing new; `single`: operations that
        it followed one by one.
        """
        if self.phase is Watching.IN_VAIN:
            return
        watched, self._watched = self._watched, False
        self._earned += tuning.watched_share * seconds
        if steady and not watched:
            self._pace.append(seconds)
        if self.phase is Watching.WAITING:
            self._calls += steady
            if self._pace and self._calls >= tuning.watched_from and single >= tuning.watched_operations:
                self.phase, self._calls, self._before = Watching.LEARNING, 0, statistics.median(self._pace)
                self._pace.clear()
        elif self.phase is Watching.LEARNING:
            self._calls = 0 if watched else self._calls + (self.spent <= self._earned or self._is_spent())
            if self._calls >= tuning.watched_idle and len(self._pace) == self._pace.maxlen:
                paid = statistics.median(self._pace) <= tuning.watched_worth * self._before
                self.phase = Watching.LEARNT if paid else Watching.IN_VAIN


_OPEN = frozenset({Watching.LEARNING, Watching.LEARNT})
