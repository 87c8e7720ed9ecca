"""Timeline: the events of calls, as they happen, while a report is asked for.

Where something happens that a report shows, the code reads `timeline.current`, once: None, as long as nobody has asked.
What is kept is bounded: the first events, and the last ones.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import Any, NamedTuple

from coexec.base.tuning import tuning
from tracer import hooks

# How a call ran: names of counters in `Stats`.
CALLS = ("followed", "recorded", "diverged", "imperative")


class TimelineEvent(NamedTuple):
    """Something that took time on a thread, or happened at one moment."""

    kind: str  # one of CALLS, or "launch", "one by one", "validate", "wait", "beside", "compile", "xla", "divergence"
    name: str  # of the function
    thread: int
    began: float  # seconds, as `time.perf_counter` tells
    ended: float
    text: str  # where, and what


class Rate:
    """How many calls ended in each of equal intervals, and their time: a bounded number of ever longer ones."""

    def __init__(self) -> None:
        self.interval = tuning.rate_interval
        self.calls: list[int] = []
        self.seconds: list[float] = []

    def add(self, at: float, seconds: float) -> None:
        """Counts a call that ended `at` seconds after the beginning."""
        while at >= self.interval * tuning.rate_intervals:
            self.interval *= 2
            self.calls = [sum(self.calls[n : n + 2]) for n in range(0, len(self.calls), 2)]
            self.seconds = [sum(self.seconds[n : n + 2]) for n in range(0, len(self.seconds), 2)]
        number = int(at / self.interval)
        missing = number + 1 - len(self.calls)
        self.calls += [0] * missing
        self.seconds += [0.0] * missing
        self.calls[number] += 1
        self.seconds[number] += seconds


class Timeline:
    """The events since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.began_at = time.time()
        self.first: list[TimelineEvent] = []
        self.last: collections.deque[TimelineEvent] = collections.deque(maxlen=tuning.timeline_last)
        self.count = 0  # of all events
        self.held: dict[int, Any] = {}  # controllers of calls, by id: a report at the end shows what is gone by then
        self.users = 0  # who have begun it, and not ended it
        self.rates: dict[str, Rate] = {}  # by function
        self.threads: dict[int, str] = {}
        self._lock = threading.RLock()  # a signal's handler may make calls, too

    def add(self, kind: str, name: str, began: float, text: str = "", ended: float | None = None) -> None:
        """Adds an event, which ends now unless `ended` tells otherwise."""
        if ended is None:
            ended = time.perf_counter()
        thread = threading.get_ident()
        event = TimelineEvent(kind, name, thread, began, ended, text)
        with self._lock:
            self.count += 1
            if thread not in self.threads:
                self.threads[thread] = threading.current_thread().name
            (self.first if len(self.first) < tuning.timeline_first else self.last).append(event)
            if kind in CALLS:
                if name not in self.rates:
                    self.rates[name] = Rate()
                self.rates[name].add(ended - self.began, ended - began)

    def hold(self, controller: Any) -> None:
        """Keeps a controller until the timeline is released, unless there are many."""
        if id(controller) not in self.held and len(self.held) < tuning.report_functions:
            self.held[id(controller)] = controller

    def snapshot(self) -> tuple[list[TimelineEvent], int]:
        """Returns the events that are kept, and how many between the first and the last ones are not."""
        with self._lock:
            kept = [*self.first, *self.last]
            return kept, self.count - len(kept)


current: Timeline | None = None


def start() -> Timeline:
    """Begins to record events, or goes on with what somebody else has begun."""
    global current
    if current is None:
        current = Timeline()
    current.users += 1
    return current


def stop(timeline: Timeline) -> None:
    """Ends what `start` has returned, once everybody who began has ended it."""
    global current
    timeline.users -= 1
    if timeline.users == 0 and current is timeline:
        current = None


def _in_child() -> None:
    """Records nothing in a forked child, whose threads and reports are those of its parent."""
    global current
    current = None


hooks.at_fork(__name__, "events of a child are not those of its parent's report", in_child=_in_child)


def counts_of(counts: Any) -> list[int]:
    """Returns the counters of how calls ran, in the order of `CALLS`."""
    return [counts[kind] for kind in CALLS]
