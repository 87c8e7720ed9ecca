"""Stats: counters of a function's calls, and the causes for which something missed the fast path."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from coexec.base import logs
from coexec.base.causes import Cause, Kind, Tally
from coexec.base.tuning import tuning

__all__ = ["Cause", "EventLog", "Kind", "Stats"]


@dataclass(frozen=True)
class Stats:
    """Counters of one function's calls and operations."""

    calls: int = 0
    followed: int = 0  # calls followed from start to end
    recorded: int = 0  # calls recorded from the start
    diverged: int = 0  # calls that were followed up to a divergence
    imperative: int = 0  # calls that ran imperatively, because of back-off or a mode
    launches: int = 0
    compiles: int = 0
    loaded: int = 0  # compiles for which XLA's code came from an earlier process
    beside: int = 0  # async launches, which ran while Python continued
    validated: int = 0  # segments that ran compiled and op by op, and were compared
    ops_followed: int = 0
    ops_recorded: int = 0
    decisions: int = 0  # times that Python tested a tensor's truth value while following
    decisions_on_device: int = 0  # made without Python: loop iterations, and branches
    regions: int = 0  # memoized calls, whose Python was skipped
    batched: int = 0  # calls whose operations were batched, as each took another way
    ops_batched: int = 0
    ops_per_segment: tuple[int, ...] = ()

    @property
    def share_followed(self) -> float:
        """Followed operations as a share of recorded and followed ones, 0 to 1."""
        seen = self.ops_followed + self.ops_recorded
        return self.ops_followed / seen if seen else 0.0


class EventLog:
    """Collects counters and causes; owned by one function, shared by its threads."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.segments: list[int] = []
        self.causes: dict[Cause, Tally] = {}

    def count(self, *names: str, **by: int) -> None:
        """Increments these counters of `Stats` by one, or by the value of a keyword."""
        counts = self.counts
        with self._lock:
            for name in names:
                counts[name] += 1
            if by:
                for name, more in by.items():
                    counts[name] += more

    def cause(
        self, kind: Kind, text: str, location: object, hint: str = "", *, expected: str = "", seen: str = ""
    ) -> Tally:
        """Counts a cause and logs a new one; returns its tally. Drops new ones beyond `tuning.max_causes`."""
        cause = Cause(kind, text, str(location), hint, expected, seen)
        with self._lock:
            tally = self.causes.get(cause)
            if tally is None:
                tally = Tally()
                if len(self.causes) < tuning.max_causes:
                    self.causes[cause] = tally
            tally.count += 1
        if tally.count == 1 and logs.wanted:
            logs.event(kind.value.topic, f"{self.name}: {kind.value.id}: {text}, at {location}")
        return tally

    def compiled(self, ops: int) -> None:
        """Counts a compiled segment of `ops` operations."""
        with self._lock:
            self.counts["compiles"] += 1
            if len(self.segments) < tuning.max_segments_told:
                self.segments.append(ops)
        if logs.wanted:
            logs.event("compile", f"{self.name}: a segment of {ops} operations is compiled")

    def stats(self) -> Stats:
        """Returns a snapshot of the counters."""
        with self._lock:
            return Stats(**self.counts, ops_per_segment=tuple(self.segments))

    def noted(self) -> dict[Cause, Tally]:
        """Returns a snapshot of the causes."""
        with self._lock:
            return {cause: Tally(tally.count, tally.seconds) for cause, tally in self.causes.items()}
