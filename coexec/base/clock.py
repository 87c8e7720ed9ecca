"""Clock: the time that calls take, without what other programs take of the processors meanwhile."""

from __future__ import annotations

import time
from typing import NamedTuple

from tracer import intercept


class Moment(NamedTuple):
    """A moment, by two clocks, in seconds."""

    elapsed: float
    computed: float  # what all threads of the process have computed


def now() -> Moment:
    """Returns the present moment."""
    return Moment(time.perf_counter(), time.process_time())


def since(began: Moment) -> tuple[float, float]:
    """Returns the seconds elapsed since a moment, and how many of them count.

    No more count than the process has computed: on a busy machine, a call of 5 ms may wait 50 for a processor, and one
    such call decides nothing. What waits for something else (a file, a timer) does so however the call runs. With other
    devices than one CPU, all count, as what a GPU computes is no time of the process.
    """
    elapsed = time.perf_counter() - began.elapsed
    if intercept.device_in_scope() is not None:
        return elapsed, elapsed
    return elapsed, min(elapsed, time.process_time() - began.computed)
