"""Testing: forces behaviour that is hard to trigger from outside."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

from coexec.base.tuning import tuned


def diverge_at(event: int) -> AbstractContextManager[None]:
    """Makes the cursor report a mismatch at operation number `event` (from 0) of every followed call."""
    return tuned(forced_event=event)


def compile_everything() -> AbstractContextManager[None]:
    """Compiles every segment, however small, on its second visit, with XLA where possible."""
    return tuned(launch_visits=2, launch_operations=1, xla_at_once=True)


def trust_compiled() -> AbstractContextManager[None]:
    """Launches executables without validating them first, as that returns the values of their operations."""
    return tuned(validates_new=False)


def always_follow(paused: bool = False) -> AbstractContextManager[None]:
    """Turns off decisions by timing: all calls are followed, and host gaps cut no segment unless `paused`.

    Executables are validated at their first launch only.
    """
    following = {"doubt_before_timing": math.inf, "sizes_at_once": math.inf, "audit_share": 0.0}
    return tuned(**following) if paused else tuned(**following, pause_timed=())


def always_batch() -> AbstractContextManager[None]:
    """Batches all calls; programs of groups are traced at their second use."""
    return tuned(batches_all=True, batching_worth=0.0)


def count_events(function: Any) -> int:
    """Returns how many operations the last followed call of a decorated function issued."""
    return int(function._controller.last_events)


def is_settled(function: Any) -> bool:
    """Returns whether XLA has been tried for the segment launched last, and the backend race is over."""
    last = max(function._controller.segments._all, key=lambda compiled: compiled.used, default=None)
    return last is None or last.refused or (last.asked and last.rival is None)
