"""Placement: whether a decision is faster on the device or in Python, by timing calls with each placement.

The cost of a decision shows only in the whole call: on the device there is no wait for it, and in Python it may split a
segment. So whole calls are timed, for one decision at a time. Inputs often come in cycles: so of two calls one has each
placement, in pseudo-random order, and each placement gets its share of all inputs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

from coexec.base.stats import EventLog, Kind
from coexec.base.tuning import tuning
from coexec.follow.device_control import FollowedCall, TimedCall

if TYPE_CHECKING:
    from coexec.control_flow.run.sites import Site

_ORDER = 0x9E3779B97F4A7C15  # one bit per pair of calls: which placement is first


class Comparison:
    """The times of calls in which the device makes the decisions of a `site`, and of those in which Python does."""

    def __init__(self, site: Site, place: str) -> None:
        self.site, self.place = site, place
        self._times: tuple[list[float], list[float]] = ([], [])  # Python's, the device's
        self._calls = 0

    def next(self) -> bool:
        """Returns whether the device decides in the next call."""
        theirs, ours = map(len, self._times)
        return ours < theirs if ours != theirs else bool(_ORDER >> ours % 64 & 1)

    def took(self, on_device: bool, seconds: float | None) -> str | None:
        """Notes a call's time, None if that is meaningless; returns the outcome once it is known."""
        self._calls += 1
        if seconds is not None:
            self._times[on_device].append(seconds)
        known = min(map(len, self._times)) - tuning.contest_first
        if self._calls >= tuning.contest_calls and known < tuning.contest_most:
            return "too few calls were alike to tell if Python were faster"
        if len(self._times[0]) != len(self._times[1]) or known <= 0 or known % tuning.contest_trials:
            return None
        (theirs, ours), sure = _compared([times[tuning.contest_first:] for times in self._times])
        if known < tuning.contest_most and (not sure or min(ours, theirs) > tuning.contest_clear * max(ours, theirs)):
            return None
        times = f"{1000 * ours:.2f} ms with it on the device, {1000 * theirs:.2f} with Python's decisions"
        if sure and theirs < tuning.contest_margin * ours:
            self.site.leave(f"calls took {times}")
        return f"calls took {times}"


class Placements:
    """The comparisons of one function's calls, one at a time."""

    def __init__(self, ledger: EventLog) -> None:
        self._ledger = ledger
        self._running: Comparison | None = None
        self._on_cpu = not tf.config.list_physical_devices("GPU")

    def leaves(self, run: FollowedCall, site: Site) -> bool:
        """Returns whether Python decides in this call, for timing."""
        comparison = self._running
        if comparison is None or comparison.site is not site:
            return False
        trial = run.trial
        if trial is None:
            trial = TimedCall(comparison, comparison.next())
            run.time_as(trial)
        return bool(trial.comparison is comparison and not trial.on_device)

    def begin(self, run: FollowedCall, site: Site, place: Callable[[], str]) -> None:
        """Starts a comparison for a decision that the device has just made for the first time, if none is running.

        On devices other than the CPU launches are asynchronous, so times are meaningless.
        """
        if self._running is None and not site.contested and self._on_cpu and not math.isinf(tuning.doubt_before_timing):
            site.contested = True
            self._running = Comparison(site, place())
            run.time_as(TimedCall(None, True))  # this call began before

    def took(self, trial: TimedCall, seconds: float | None) -> None:
        """Notes the time of a timed call, None if it is meaningless."""
        comparison = trial.comparison
        if not isinstance(comparison, Comparison) or comparison is not self._running:
            return
        found = comparison.took(trial.on_device, seconds)
        if found is not None:
            self._running = None
            site = comparison.site
            whose = site.left if site.reason is not None else site.taken
            self._ledger.cause(Kind.DECISION, f"{whose}: {found}", comparison.place)

    def clear(self) -> None:
        """Drops the comparison that is running."""
        self._running = None


def _compared(ways: list[list[float]]) -> tuple[list[float], bool]:
    """Returns each placement's mean time per call, outliers clipped, and whether the difference is significant."""
    most = tuning.contest_unusual * max(map(statistics.median, ways))
    kept = [[min(seconds, most) for seconds in times] for times in ways]
    theirs, ours = means = [*map(statistics.fmean, kept)]
    error = math.sqrt(sum(statistics.variance(times) / len(times) for times in kept))
    return means, abs(ours - theirs) > tuning.contest_sure * error
