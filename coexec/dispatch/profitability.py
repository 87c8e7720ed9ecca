"""Account: whether following a function's calls pays, by the clock."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque

from coexec.base.explanation import Pace
from coexec.base.tuning import tuning


class Profitability:
    """What following saves over plain calls, in seconds; where that is not worth it, most calls run plainly.

    Nothing is timed until there is doubt. Then one plain call says what a call takes, and a few more at growing
    distances. What was spent on learning until then is gone and decides nothing: only the calls behind that plain one
    do. They may cost `following_patience` plain calls before they have to pay, and more once calls that met nothing new
    were fast: then what is slow is learnt, and paid once. Where they do not pay, calls run plainly for a while; then
    the next few are followed, with half of that patience, and if these do not pay, calls run plainly for so long that
    the loss is a small share of their time.

    A call that costs clearly less than the one before it is progress, and tries no patience. What following has saved
    makes good for slow calls later, up to a limit. One slow call that met nothing new hit a busy moment, most likely,
    and never leads to a pause alone; nor does one that compiles, which is done once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plain: deque[float] = deque(maxlen=tuning.plain_calls_kept)
        self._taken: deque[float] = deque(maxlen=tuning.pace_calls)  # by the last calls, however they ran
        self._steady: deque[float] = deque(maxlen=tuning.pace_calls)  # by followed ones that met nothing new
        self._asked: deque[float] = deque(maxlen=tuning.plain_calls_kept)  # by plain calls that the program asked for
        self._per_call = 0.0  # what most of them took at most
        self._doubt = 0.0
        self._balance = 0.0
        self._last = 0.0  # what the last followed call took
        self._since = 0  # how many calls were followed since a plain one
        self._again = tuning.plain_calls_apart  # after how many of those a plain one is timed
        self.pause = 0  # how many calls ran plainly last time
        self.paused = 0  # how many still will

    def admit(self) -> bool:
        """Returns whether the next call is to be followed; one that is not counts towards the end of the pause."""
        if self.paused == 0:
            return True
        with self._lock:
            if self.paused > 0:
                self.paused -= 1
                return False
            return True

    def ran_plainly(self, seconds: float) -> None:
        """Notes a call that ran plainly."""
        with self._lock:
            self._plain.append(seconds)
            self._taken.append(seconds)
            self._per_call = statistics.median_low(self._plain)
            self._since = 0

    def invested(self, seconds: float) -> None:
        """Notes a call that was followed to learn another size: savings pay for it, and no more than these."""
        with self._lock:
            if self._plain:
                self._balance = min(self._balance, max(self._balance + self._per_call - seconds, 0.0))

    def followed(self, seconds: float, clean: bool, most: float = math.inf) -> bool:
        """Notes a followed call; returns whether that was one too many.

        `clean`: whether it went as calls should; `most`: how many plain calls' time it may count for as a loss.
        """
        with self._lock:
            self._doubt = min(max(self._doubt + (-1 if clean else 2), 0), 2 * tuning.doubt_before_timing)
            last, self._last = self._last, seconds
            if not self._plain:
                if self._doubt >= tuning.doubt_before_timing:
                    self.paused = 1
                return False
            plain = self._per_call
            saved = max(plain - seconds, -(min(tuning.following_patience, most) if clean else most) * plain)
            if not 0.0 < seconds - plain <= tuning.following_progress * (last - plain):
                self._balance = min(self._balance + saved, tuning.following_allowance * plain)
            self._since += 1
            # Where following is clearly faster, plain calls are a waste, and there is less to find out.
            apart = self._again if 2 * seconds > plain else tuning.plain_calls_apart_fast * self._again
            if self._since >= apart and len(self._plain) < tuning.plain_calls_kept:
                self._again *= 2
                self.paused = 1
            if seconds < plain:
                self.pause //= 2
            patience = (tuning.promising_patience if self._promises() else tuning.following_patience) / (
                2 if self.pause else 1
            )
            if self._balance >= -patience * plain:
                return False
            share = round(-self._balance / (tuning.tries_share * plain))
            self._balance = 0.0
            longer = max(2 * self.pause, share) if self.pause else 0
            self.pause = self.paused = min(max(tuning.min_backoff, longer), tuning.max_backoff)
            return True

    def _promises(self) -> bool:
        """Returns whether calls that meet nothing new take clearly less than plain ones."""
        return bool(self._steady) and statistics.median(self._steady) < tuning.promising_share * self._per_call

    def affords(self) -> bool:
        """Returns whether following has saved enough to find out about other sizes; False while nothing is timed."""
        with self._lock:
            return bool(self._plain) and self._balance >= tuning.following_allowance * self._per_call / 2

    def ran_as_asked(self, seconds: float) -> None:
        """Notes what a call has taken that ran plainly because the program wants it so: that decides nothing."""
        self._asked.append(seconds)

    def timed(self, seconds: float, steady: bool) -> None:
        """Notes what a followed call has taken, for reports; `steady`: whether it met nothing new."""
        self._taken.append(seconds)
        if steady:
            self._steady.append(seconds)

    def pace(self) -> Pace:
        """Returns what calls take now, and what they take plainly, as far as they were timed."""
        with self._lock:
            taken, steady, plain = list(self._taken), list(self._steady), [*self._plain, *self._asked]
        if len(taken) < tuning.pace_calls:
            taken = taken[len(taken) // 2 :]  # the first ones learn
        return Pace(
            len(taken),
            statistics.fmean(taken) if taken else None,
            statistics.median(steady) if steady else None,
            statistics.median_low(plain) if plain else None,
        )
