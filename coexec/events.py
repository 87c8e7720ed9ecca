"""Events: what a function's calls came to, counted and explained."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from dataclasses import dataclass


class Kind(enum.Enum):
    """The kinds of causes that `explain()` lists; each cause is kept once, with how often it came."""

    DIVERGENCE = "divergence"  # the program did what the trace graph does not know
    CUT = "segment cut"  # a value was read, or an operation runs on its own
    XLA = "not compiled by XLA"  # the segment runs as a TensorFlow graph
    BACKEND = "backend chosen by measurement"  # XLA or the graph, whichever took less time
    FOLDED = "compiled as loops"  # operations that come again and again
    IMPERATIVE = "not compiled"  # the segment's operations run one by one
    FAILURE = "failed operation"  # an operation raised
    DECISION = "decision on a tensor"  # taken by Python, which waits for it, or on the device
    VALIDATION = "found by validation"  # compiled code, or a library call followed as one, did something else
    LIBRARY = "library call not followed as one"  # its Python is run
    BACKOFF = "backed off"  # calls ran plainly, since following did not pay


@dataclass(frozen=True)
class Cause:
    """Why a call, or a part of it, did not go the fast way; with the place, what was expected and what was seen."""

    kind: Kind
    text: str
    location: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f"\n    what to do: {self.hint}" if self.hint else ""
        return f"{self.text}\n    at {self.location}{hint}"


@dataclass(frozen=True)
class Stats:
    """Counts of one function's calls and operations."""

    calls: int = 0
    followed: int = 0  # calls followed from start to end
    recorded: int = 0  # calls recorded from the start
    diverged: int = 0  # calls that were followed up to something new
    imperative: int = 0  # calls that ran plainly, while backing off or under a mode that asks for it
    launches: int = 0
    compiles: int = 0
    loaded: int = 0  # of them, those for which XLA's code was there, left by an earlier process
    beside: int = 0  # launches that ran while Python went on
    validated: int = 0  # segments that were carried out twice and compared
    ops_followed: int = 0
    ops_recorded: int = 0
    decisions: int = 0  # times that Python asked for the truth of a tensor while it was followed
    decisions_on_device: int = 0  # taken there without asking Python: turns of loops, and branches
    regions: int = 0  # library calls that were followed as one unit, their Python not run
    ops_per_segment: tuple[int, ...] = ()

    @property
    def share_followed(self) -> float:
        """The share of all recorded and followed operations that was followed, 0 to 1."""
        seen = self.ops_followed + self.ops_recorded
        return self.ops_followed / seen if seen else 0.0


class Ledger:
    """Counts what happens; owned by one function, shared by its threads."""

    MAX_CAUSES = 200
    MAX_SEGMENTS = 1000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.segments: list[int] = []
        self.causes: Counter[Cause] = Counter()

    def count(self, *names: str, **by: int) -> None:
        """Adds one to each of these counts of `Stats`, or as much as a keyword says."""
        counts = self.counts
        with self._lock:
            for name in names:
                counts[name] += 1
            if by:
                for name, more in by.items():
                    counts[name] += more

    def cause(self, kind: Kind, text: str, location: object, hint: str = "") -> None:
        """Notes a cause, once however often it comes; beyond a bound, new ones are dropped."""
        cause = Cause(kind, text, str(location), hint)
        with self._lock:
            if cause in self.causes or len(self.causes) < self.MAX_CAUSES:
                self.causes[cause] += 1

    def compiled(self, ops: int) -> None:
        """Notes a compiled segment of that many operations."""
        with self._lock:
            self.counts["compiles"] += 1
            if len(self.segments) < self.MAX_SEGMENTS:
                self.segments.append(ops)

    def stats(self) -> Stats:
        """Returns the counts so far."""
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
