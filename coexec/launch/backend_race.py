"""Tiers: what a segment is carried out with, from one operation after the other to compiled code.

A TensorFlow graph takes 0.2 ms an operation to have and is had at once. XLA takes 2 to 20 ms an operation, so it is
asked only once a segment has taken about as much time, and works in the background. What comes of it competes with the
graph for a few launches, and the faster of the two stays: XLA took 0.2 to 4 times the graph's time, by segment. Later
processes recall which it was: what XLA has won is asked for at once, and competes again; what it has lost is not.
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
    """What has been compiled for the segment that ends at a cut, and what is known of it."""

    executable: Executable | None = None
    rival: Executable | None = None  # XLA's, while it competes with the graph
    stand_in: Executable | None = None  # a graph, for when XLA's code must not run
    wanted: set[int] = field(default_factory=set)  # numbers of the tensors that have been read behind the cut
    widenings: int = 0
    alarms: int = 0
    refused: bool = False  # nothing can be compiled: its operations run one by one
    asked: bool = False  # XLA was asked, or never will be
    used: int = 0  # when it was last run, as a number that grows
    seconds: float = 0.0  # spent on running this segment since it last changed
    ops: int | None = None  # how many XLA would compile, once that was found out
    choice: Choice | None = None  # what an earlier process has found
    _times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def adopt(self, executable: Any) -> None:
        """Takes a graph, which may give out more than was asked for; or None."""
        self.executable = executable
        if executable is not None:
            self.wanted |= executable.given

    def widen(self) -> None:
        """Starts anew, as other tensors are read behind the cut than what was compiled gives out."""
        self.executable = self.rival = self.stand_in = None
        self.asked, self.seconds, self.choice, self.ops = False, 0.0, None, None

    def recall(self) -> str | None:
        """Recalls which backend an earlier process has chosen; returns why, if that is the graph, which is there."""
        if self.executable is None or self.asked:
            return None
        self.choice = recall(self.executable.name)
        if self.choice is None or self.choice.backend == "xla":
            return None
        self.asked = True
        return f"{self.choice.reason} (found by an earlier process)"

    def is_worth_xla(self, price: float, live: int) -> bool:
        """Whether the segment, of `live` operations, has taken so long that XLA may take `price` seconds for each.

        So it is where an earlier process found it to be worth that; of many operations, loops may save most.
        """
        hoped = live // tuning.folded_hope if live >= tuning.many_operations else live
        return self.choice is not None or self.seconds >= price * (hoped if self.ops is None else self.ops)

    def is_uncounted(self, live: int) -> bool:
        """Whether it is to be found out how many of its `live` operations loops would save."""
        return self.ops is None and self.choice is None and live >= tuning.many_operations

    def declined(self, reason: str) -> None:
        """Notes for later processes that XLA cannot have the segment."""
        if self.executable is not None and self.executable.backend == "graph":
            keep(self.executable.name, Choice("graph", reason))

    def compete(self, rival: Executable, on_cpu: bool) -> None:
        """Lets XLA's executable compete with the graph; it has won where there is none.

        On other devices than the CPU, too: launches return there before they are done, so their times say nothing. An
        earlier process may have measured in a busy moment, which would stay with a DQN step for good: 0.68 ms a call
        with the graph, 0.85 with XLA. So its choice says only what is worth compiling.
        """
        if self.executable is None:
            self.executable = rival
        elif not on_cpu:
            keep(self.executable.name, Choice("xla", "XLA takes over on devices other than the CPU"))
            self.executable = rival
        elif self.executable.outputs == rival.outputs:
            self._times = ([], [])
            self.rival = rival

    def discard(self, executable: Executable) -> None:
        """Uses an executable no more, nor another one of its backend: it was found to be wrong."""
        if executable is self.rival:
            self.rival, self.asked = None, True
        elif executable is self.executable:
            self.asked = True  # XLA is not asked again; without it, there is the graph
            self.refused = executable.backend == "graph"
            self.executable = self.rival = None
        if executable is self.stand_in:
            self.stand_in = None

    def next(self) -> Executable | None:
        """Returns what is to be launched."""
        if self.rival is not None and len(self._times[1]) < len(self._times[0]):
            return self.rival
        return self.executable

    def took(self, executable: Executable, seconds: float) -> str | None:
        """Notes how long a launch took; returns what came of a competition that this has ended."""
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
