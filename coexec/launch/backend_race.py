"""Backend race: which backend runs a segment, from single operations to compiled code.

A TensorFlow graph takes 0.2 ms an operation to build, and is built at once. XLA takes 2 to 20 ms an operation, so it
compiles, in the background, only segments that have run for about as long. Its executable then races the graph for a
few launches, and the faster one stays: XLA took 0.2 to 4 times the graph's time, depending on the segment. Later
processes recall the winner: where XLA won, it compiles at once and races again; where it lost, it does not.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from coexec.base.tuning import tuning
from coexec.compile.backend_choice import Choice, keep, recall
from coexec.compile.executable import Executable


@dataclass
class Compiled:
    """The executables of the segment that ends at a cut, and what is known of them."""

    executable: Executable | None = None
    rival: Executable | None = None  # XLA's, while it races the graph
    stand_in: Executable | None = None  # a graph, for while XLA's code must not run
    wanted: set[int] = field(default_factory=set)  # numbers of the tensors read after the cut
    widenings: int = 0
    alarms: int = 0
    refused: bool = False  # cannot be compiled: its operations run one by one
    succeeded: bool = False  # whether a launch of it has
    asked: bool = False  # XLA has been asked to compile it, or never will be
    used: int = 0  # logical time of its last run
    seconds: float = 0.0  # spent running this segment since it last changed
    ops: int | None = None  # how many XLA would compile; None: not counted yet
    choice: Choice | None = None  # of an earlier process
    sizes: Any = None  # on a dynamic path: the `FrequentSizes` of the segment
    _times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def adopt(self, executable: Any) -> None:
        """Takes a graph, which may return more tensors than were asked for, or None."""
        self.executable = executable
        if executable is not None:
            self.wanted |= executable.given

    def widen(self) -> None:
        """Resets, as tensors are read after the cut that the executables do not return."""
        self.executable = self.rival = self.stand_in = None
        self.asked, self.seconds, self.choice, self.ops = False, 0.0, None, None

    def recall(self) -> str | None:
        """Recalls the backend that an earlier process chose; returns why, if it is the graph and that is compiled."""
        if self.executable is None or self.asked:
            return None
        self.choice = recall(self.executable.name)
        if self.choice is None or self.choice.backend == "xla":
            return None
        self.asked = True
        return f"{self.choice.reason} (found by an earlier process)"

    def is_worth_xla(self, price: float, live: int) -> bool:
        """Whether the segment, of `live` operations, has run long enough to amortize XLA's `price` seconds for each.

        Also if an earlier process found it worth that. Of many operations, rerolling may remove most.
        """
        hoped = live // tuning.folded_hope if live >= tuning.many_operations else live
        return self.choice is not None or self.seconds >= price * (hoped if self.ops is None else self.ops)

    def is_uncounted(self, live: int) -> bool:
        """Whether to count first how many of its `live` operations rerolling would remove."""
        return self.ops is None and self.choice is None and live >= tuning.many_operations

    def declined(self, reason: str) -> None:
        """Notes for later processes that XLA cannot compile the segment."""
        if self.executable is not None and self.executable.backend == "graph":
            keep(self.executable.name, Choice("graph", reason))

    def compete(self, rival: Executable, on_cpu: bool) -> None:
        """Starts a race of XLA's executable against the graph; XLA wins at once if there is no graph.

        It also wins on devices other than the CPU: launches are asynchronous there, so their times mean nothing. The
        choice of an earlier process decides only what is worth compiling: it may have been measured under load, which
        would stay with a DQN step for good (0.68 ms a call with the graph, 0.85 with XLA).
        """
        if self.executable is None:
            self.executable = rival
        elif not on_cpu:
            keep(self.executable.name, Choice("xla", "XLA takes over on devices other than the CPU"))
            self.executable = rival
        elif self.executable.outputs == rival.outputs:
            self._times = ([], [])
            self.executable.call_inline()
            self.rival = rival

    def discard(self, executable: Executable) -> None:
        """Drops an executable that was found wrong, and its backend for this segment."""
        if executable is self.rival:
            self.rival, self.asked = None, True
        elif executable is self.executable:
            self.asked = True  # XLA does not compile it again; the graph is what is left
            self.refused = executable.backend == "graph"
            self.executable = self.rival = None
        if executable is self.stand_in:
            self.stand_in = None

    def next(self) -> Executable | None:
        """Returns the executable to launch."""
        if self.rival is not None and len(self._times[1]) < len(self._times[0]):
            return self.rival
        return self.executable

    def took(self, executable: Executable, seconds: float) -> str | None:
        """Notes how long a launch took; returns the outcome of the race if this ends it."""
        self.seconds += seconds
        graph, rival = self.executable, self.rival
        if rival is None or graph is None:
            return None
        self._times[executable is rival].append(seconds)
        pairs = list(zip(*self._times, strict=False))[1:]
        faster = sum(its < tuning.race_margin * mine for mine, its in pairs)
        unclear = max(faster, len(pairs) - faster) < tuning.race_clear * len(pairs)
        if len(pairs) < tuning.race_trials or (len(pairs) < tuning.race_most and unclear):
            return None
        ours, theirs = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
        self.rival = None
        if 2 * faster > len(pairs):
            self.executable = rival
            choice = Choice("xla", f"XLA is faster than the graph: {theirs:.2f} ms a launch against {ours:.2f}")
        else:
            choice = Choice("graph", f"the graph is no slower than XLA: {ours:.2f} ms a launch against {theirs:.2f}")
        keep(graph.name, choice)
        return choice.reason
