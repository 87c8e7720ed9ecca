"""Testing: forces what is hard to bring about from outside."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from coexec import account, sizes
from coexec.runtime import following, pauses, segments


@contextlib.contextmanager
def diverge_at(event: int) -> Iterator[None]:
    """Makes the cursor report a mismatch at operation number `event` (from 0) of every call that is followed."""
    before = following.forced_event
    following.forced_event = event
    try:
        yield
    finally:
        following.forced_event = before


@contextlib.contextmanager
def compile_everything() -> Iterator[None]:
    """Makes every segment, however small, an executable on its second visit: XLA's, if XLA may have it."""
    before = segments.thresholds
    segments.thresholds = segments.Thresholds(visits=2, small=1, at_once=True)
    try:
        yield
    finally:
        segments.thresholds = before


@contextlib.contextmanager
def trust_compiled() -> Iterator[None]:
    """Has what is compiled launched without comparing it with its operations first, whose values would be used."""
    before = segments.validates_new
    segments.validates_new = False
    try:
        yield
    finally:
        segments.validates_new = before


@contextlib.contextmanager
def always_follow(paused: bool = False) -> Iterator[None]:
    """Has the clock decide nothing: all calls are followed, and pauses of Python cut no segment, but where `paused`."""
    before = account.doubtful, sizes.few, pauses.timed
    account.doubtful = sizes.few = math.inf
    if not paused:
        pauses.timed = ()
    try:
        yield
    finally:
        account.doubtful, sizes.few, pauses.timed = before


def count_events(function: Any) -> int:
    """Returns how many operations the last followed call of a decorated function issued."""
    return int(function._controller.last_events)


def is_settled(function: Any) -> bool:
    """Returns whether XLA has been asked for the segment that was launched last, and the faster backend was found."""
    last = max(function._controller.segments._all, key=lambda compiled: compiled.used, default=None)
    return last is None or last.refused or (last.asked and last.rival is None)
