"""Account: whether following a function's calls pays, by the clock."""

from __future__ import annotations

import statistics
import threading
from collections import deque

# So much in doubt a function must be before it is timed: a call that met something new adds two, another takes one off.
doubtful: float = 16

# What following may cost before it has to pay, in plain calls: paths are recorded, learnt and compiled once.
ALLOWANCE = 24
# What plain calls add to that, as a share of their time.
SHARE = 0.01

MIN_PAUSE, MAX_PAUSE = 32, 512  # calls
# What the calls that are followed between pauses may cost over plain ones, as a share of the time.
TRIES_SHARE = 0.04

# Calls that are followed after a pause: what has become stable is recorded, wired and compiled, one after the other.
TRIES = 4

# How many plain calls are known, and how many followed ones lie between the first of them, twice as many each time:
# two in a row may both have met a busy moment, and what seems slow would be left behind for good.
KNOWN, AGAIN = 8, 2


class Account:
    """What following has saved over plain calls, less what it has cost, in seconds; in debt, most calls run plainly.

    Nothing is timed until there is doubt. Then two plain calls say what a call takes, a few more at growing distances,
    and whatever calls run plainly later. In debt, a few calls are followed now and then: if none was faster than a
    plain call, the next run plainly for twice as long as before, or longer if these cost more than their share; each
    one that was halves that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plain: deque[float] = deque(maxlen=KNOWN)
        self._per_call = 0.0  # what most of them took at most
        self._before: deque[float] = deque(maxlen=64)  # what followed calls took before there was a plain one
        self._doubt = 0.0
        self._balance = 0.0
        self._tries = TRIES
        self._since = 0  # how many calls were followed since a plain one
        self._again = AGAIN  # after how many of those a plain one is timed
        self._lost = 0.0  # by the tries since the last pause
        self.pause = 0  # how many calls ran plainly last time
        self.paused = 0  # how many still will

    def follows(self) -> bool:
        """Returns whether the next call is to be followed."""
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
            self._per_call = statistics.median_low(self._plain)
            self._since = 0
            self._balance = min(self._balance + SHARE * seconds, self._most())
            if self._before and len(self._plain) > 1:
                plain = self._per_call
                self._balance = ALLOWANCE * plain - sum(took - plain for took in self._before)
                self._before.clear()

    def followed(self, seconds: float, clean: bool) -> bool:
        """Notes a followed call, and whether it met nothing new; returns whether that was one too many."""
        with self._lock:
            self._doubt = min(max(self._doubt + (-1 if clean else 2), 0), 2 * doubtful)
            if len(self._plain) < 2:
                self._before.append(seconds)
                if self._doubt >= doubtful:
                    self.paused = 2
                return False
            plain = self._per_call
            self._balance = max(min(self._balance + plain - seconds, self._most()), -ALLOWANCE * plain)
            self._since += 1
            if self._since >= self._again and len(self._plain) < KNOWN:
                self._again *= 2
                self.paused = 1
            if seconds < plain:
                self.pause //= 2
                self._tries, self._lost = TRIES, 0.0
                return False
            if self._balance >= 0:
                return False
            self._tries -= 1
            self._lost += seconds - plain
            if self._tries > 0:
                return False
            share = round(self._lost / (TRIES_SHARE * plain))
            self._tries, self._lost = TRIES, 0.0
            self.pause = self.paused = min(max(MIN_PAUSE, 2 * self.pause, share), MAX_PAUSE)
            return True

    def affords(self) -> bool:
        """Returns whether following has saved enough to find out about other sizes; False while nothing is timed."""
        with self._lock:
            return len(self._plain) > 1 and self._balance > ALLOWANCE * self._per_call

    def _most(self) -> float:
        return 2 * ALLOWANCE * self._per_call
