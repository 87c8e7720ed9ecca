"""On device: the implementation of `DeviceControl`, for functions whose decisions the device takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from coexec.base.stats import EventLog
from coexec.control_flow.run.decisions import Decisions
from coexec.control_flow.run.graph_functions import GraphFunctions
from coexec.control_flow.trace.read_guards import is_tensor
from coexec.follow.device_control import FollowedCall, TimedCall
from tracer.lazy import LazyTensor

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Tensor, Value


class OnDevice:
    """Implements `DeviceControl` for one co-executed function."""

    def __init__(self, ledger: EventLog, by_itself: bool = False) -> None:
        """`by_itself`: nobody asked for it, so nothing may differ: which object a tensor is, or what a profiler sees.

        Then one call passes in which Python decides, and all tensors that tapes watch are noted.
        """
        self._decisions = Decisions(ledger, by_itself)
        self._functions = GraphFunctions(ledger)
        self._waits = self._by_itself = by_itself

    @property
    def is_idle(self) -> bool:
        """Whether the device has taken no decision so far."""
        return self._decisions.are_idle

    def decide(self, run: FollowedCall, lazy: LazyTensor, frame: FrameType) -> bool:
        """Returns the truth value of a tensor, or the answer that takes Python to where the device is."""
        return self._decisions.wait(lazy) if self._waits else self._decisions.decide(run, lazy, frame)

    def call_function(self, run: FollowedCall, op: str | bytes, inputs: Sequence[Tensor]) -> list[LazyTensor] | None:
        """Follows a call of a graph function; None if it must run on its own."""
        return None if self._by_itself else self._functions.call(run, op, inputs)

    def watched(self, value: Value) -> None:
        """Notes what watches tensors; variables keep their identity."""
        if is_tensor(value):
            self._decisions.watchers.note(sys._getframe(1))

    def took(self, trial: TimedCall, seconds: float | None) -> None:
        """Notes the time of a timed call."""
        self._decisions.placements.took(trial, seconds)

    def called(self) -> None:
        """Notes that a call has ended: its tapes are known."""
        self._waits = False

    def clear(self) -> None:
        """Clears everything learnt about decisions."""
        self._decisions.clear()
