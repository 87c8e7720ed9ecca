"""Contests: whether a decision takes less time on the device or in Python, by calls that take it one way or the other.

What a decision costs shows only in the whole call: on the device nobody waits for it, and Python's may cut a segment in
two. So whole calls are timed, of one decision after the other. Inputs often come in a cycle: of two calls one goes each
way, and chance says which does first, so that each way gets its share of all inputs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from coexec import account
from coexec.events import Kind, Ledger

# Calls of each way: behind a few, in which things are still learnt, one is found to be faster by as many as this, or by
# two, three or four times as many, that takes less than a share of the other's time. Where neither does, it stays on
# the device, unless Python is faster by more than what a busy machine makes of equal calls. Differences count if they
# are more than so many times what the calls of one way differ by, over the root of their number.
FIRST = 4
TRIALS = 16
MOST = 64
CLEAR = 0.85
MARGIN = 0.95
SURE = 3

# So many times what is usual, a call has met a busy moment: it counts for no more.
UNUSUAL = 3

_ORDER = 0x9E3779B97F4A7C15  # a bit for two calls: which way is first

CALLS = 4 * MOST  # of which most did not count, as something was new in them: no more are looked at


class Contest:
    """The times of calls in which the device takes the decisions of a `site`, and of those in which Python does."""

    def __init__(self, site: Any, place: str) -> None:
        self.site, self.place = site, place
        self._times: tuple[list[float], list[float]] = ([], [])  # Python's, the device's
        self._calls = 0

    def next(self) -> bool:
        """Returns whether the device is to decide in the next call."""
        theirs, ours = map(len, self._times)
        return ours < theirs if ours != theirs else bool(_ORDER >> ours % 64 & 1)

    def took(self, on_device: bool, seconds: float | None) -> str | None:
        """Notes how long a call took, None if that says nothing; returns what came of it, once that is known."""
        self._calls += 1
        if seconds is not None:
            self._times[on_device].append(seconds)
        known = min(map(len, self._times)) - FIRST
        if self._calls >= CALLS and known < MOST:
            return "too few calls were alike to tell if Python were faster"
        if len(self._times[0]) != len(self._times[1]) or known <= 0 or known % TRIALS:
            return None
        (theirs, ours), sure = _compared([times[FIRST:] for times in self._times])
        if known < MOST and (not sure or min(ours, theirs) > CLEAR * max(ours, theirs)):
            return None
        times = f"{1000 * ours:.2f} ms with it on the device, {1000 * theirs:.2f} with Python's decisions"
        if sure and theirs < MARGIN * ours:
            self.site.leave(f"calls took {times}")
        return f"calls took {times}"


class Trial(NamedTuple):
    """What a call is timed for: which contest, and which way it takes."""

    contest: Contest | None
    on_device: bool


class Contests:
    """The contests of one function's calls, one at a time."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._running: Contest | None = None
        self._on_cpu = not tf.config.list_physical_devices("GPU")

    def leaves(self, run: Any, site: Any) -> bool:
        """Returns whether Python is to decide in this call, for its time."""
        contest = self._running
        if contest is None or contest.site is not site:
            return False
        if run.trial is None:
            run.trial = Trial(contest, contest.next())
        return bool(run.trial.contest is contest and not run.trial.on_device)

    def begin(self, run: Any, site: Any, place: Callable[[], str]) -> None:
        """Begins a contest over decisions that the device has just taken for the first time, if none goes on.

        On other devices than the CPU launches return before they are done, so times say nothing.
        """
        if self._running is None and not site.contested and self._on_cpu and not math.isinf(account.doubtful):
            site.contested = True
            self._running = Contest(site, place())
            run.trial = Trial(None, True)  # this call has begun before

    def took(self, trial: Trial, seconds: float | None) -> None:
        """Notes how long a call took that was timed, None if it says nothing."""
        contest = trial.contest
        if contest is None or contest is not self._running:
            return
        found = contest.took(trial.on_device, seconds)
        if found is not None:
            self._running = None
            site = contest.site
            whose = site.left if site.reason is not None else site.taken
            self._ledger.cause(Kind.DECISION, f"{whose}: {found}", contest.place)

    def clear(self) -> None:
        """Ends the contest that goes on."""
        self._running = None


def _compared(ways: list[list[float]]) -> tuple[list[float], bool]:
    """Returns the mean of what calls took, for each way, and whether the difference is no chance."""
    most = UNUSUAL * max(map(statistics.median, ways))
    kept = [[min(seconds, most) for seconds in times] for times in ways]
    theirs, ours = means = [*map(statistics.fmean, kept)]
    error = math.sqrt(sum(statistics.variance(times) / len(times) for times in kept))
    return means, abs(ours - theirs) > SURE * error
