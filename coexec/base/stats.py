"""Stats: counts and explains what happened in a function's calls."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from dataclasses import dataclass

from coexec.base.tuning import tuning


class Kind(enum.Enum):
    """The kinds of causes that `explain()` lists; each distinct cause is kept once, with a count."""

    DIVERGENCE = "divergence"  # the program did something that is not in the trace graph
    CUT = "segment cut"  # a value was fetched, or an operation runs on its own
    XLA = "not compiled by XLA"  # the segment runs as a TensorFlow graph
    BACKEND = "backend chosen by measurement"  # XLA or the graph, whichever was faster
    FOLDED = "compiled as loops"  # repeated operations were rerolled
    IMPERATIVE = "not compiled"  # the segment's operations run one by one
    FAULT = "failure of the runtime itself"  # the call continued imperatively; a bug to report
    FAILURE = "failed operation"  # an operation raised
    DECISION = "decision on a tensor"  # taken by Python, which waits for the value, or on the device
    VALIDATION = "found by validation"  # an executable, or a memoized call, behaved differently
    LIBRARY = "library call not followed as one"  # its Python runs
    BACKOFF = "backed off"  # calls ran imperatively, since following did not pay


@dataclass(frozen=True)
class Cause:
    """Why a call, or a part of it, missed the fast path: the place, what was expected, and what was seen."""

    kind: Kind
    text: str
    location: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f"\n    what to do: {self.hint}" if self.hint else ""
        return f"{self.text}\n    at {self.location}{hint}"


@dataclass(frozen=True)
class Stats:
    """Counters of one function's calls and operations."""

    calls: int = 0
    followed: int = 0  # calls followed from start to end
    recorded: int = 0  # calls recorded from the start
    diverged: int = 0  # calls that were followed up to something new
    imperative: int = 0  # calls that ran imperatively, because of back-off or a mode
    launches: int = 0
    compiles: int = 0
    loaded: int = 0  # compiles for which XLA's code came from an earlier process
    beside: int = 0  # async launches, which ran while Python went on
    validated: int = 0  # segments that ran both ways and were compared
    ops_followed: int = 0
    ops_recorded: int = 0
    decisions: int = 0  # times that Python asked for a tensor's truth value while following
    decisions_on_device: int = 0  # taken without Python: loop iterations, and branches
    regions: int = 0  # memoized calls, whose Python was skipped
    ops_per_segment: tuple[int, ...] = ()

    @property
    def share_followed(self) -> float:
        """Followed operations as a share of recorded and followed ones, 0 to 1."""
        seen = self.ops_followed + self.ops_recorded
        return self.ops_followed / seen if seen else 0.0


class EventLog:
    """Collects counters and causes; owned by one function, shared by its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.segments: list[int] = []
        self.causes: Counter[Cause] = Counter()

    def count(self, *names: str, **by: int) -> None:
        """Increments these counters of `Stats` by one, or by the value of a keyword."""
        counts = self.counts
        with self._lock:
            for name in names:
                counts[name] += 1
            if by:
                for name, more in by.items():
                    counts[name] += more

    def cause(self, kind: Kind, text: str, location: object, hint: str = "") -> None:
        """Counts a cause; drops new ones beyond `tuning.max_causes`."""
        cause = Cause(kind, text, str(location), hint)
        with self._lock:
            if cause in self.causes or len(self.causes) < tuning.max_causes:
                self.causes[cause] += 1

    def compiled(self, ops: int) -> None:
        """Counts a compiled segment of `ops` operations."""
        with self._lock:
            self.counts["compiles"] += 1
            if len(self.segments) < tuning.max_segments_told:
                self.segments.append(ops)

    def stats(self) -> Stats:
        """Returns a snapshot of the counters."""
        with self._lock:
            return Stats(**self.counts, ops_per_segment=tuple(self.segments))

    def explain(self, name: str) -> str:
        """Returns the distinct causes, grouped by kind, most frequent first."""
        with self._lock:
            causes = sorted(self.causes.items(), key=lambda item: -item[1])
        stats = self.stats()
        lines = [
            f"{name}: {stats.calls} calls, {stats.followed} followed, {stats.diverged} diverged, "
            f"{stats.recorded} recorded, {stats.imperative} imperative; {stats.launches} launches, "
            f"{stats.compiles} compiles, {100 * stats.share_followed:.1f} % of the operations followed"
        ]
        for kind in Kind:
            of_kind = [(cause, times) for cause, times in causes if cause.kind is kind]
            if of_kind:
                lines.append(f"{kind.value}:")
                lines += [f"  {times} x {cause}" for cause, times in of_kind]
        return "\n".join(lines)
