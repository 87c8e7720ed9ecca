"""Decisions: whether a function's decisions on tensors are worth leaving to the device, where nobody has said so.

Each one that Python takes waits for the device, and the operations before it are launched on their own. A function
whose `while` loops take many gets control flow on the device (`coexec.control_flow`) between two calls, and loses it if
the device takes none of them: with it, calls are not followed at any size, and not cut where ways meet.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from coexec.base.tuning import tuning
from tracer.location import is_user
from tracer.syntax import decision_at

if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

    from coexec.base.stats import EventLog
    from coexec.follow.device_control import DeviceControl, Places


class DecisionPolicy:
    """The decisions of one function's calls."""

    def __init__(self, asked: bool | None, ledger: EventLog) -> None:
        """`asked`: whether the device is to decide; None if that is left open."""
        self._ledger = ledger
        self._open = asked is None
        self._in_vain = self._on_device = 0
        # Where decisions are taken, until the device gets control; and whether that is the test of a `while` loop.
        self.places: Places | None = {} if asked is None else None
        self._are_loops: dict[tuple[CodeType, int], bool] = {}
        self.control: DeviceControl | None = None
        if asked:
            self._begin(by_itself=False)

    def called(self, at_any_size: bool) -> None:
        """Notes that a followed call has ended, after which the device may get control, or lose it.

        `at_any_size`: whether the function is followed at any size of its arguments.
        """
        control = self.control
        if not self._open:
            return
        if control is not None:
            control.called()
            before, self._on_device = self._on_device, self._ledger.counts["decisions_on_device"]
            self._in_vain = 0 if self._on_device > before else self._in_vain + 1
            if self._in_vain >= tuning.decisions_in_vain or (at_any_size and control.is_idle):
                self.end()
        elif self._asked_in_loops() >= tuning.decisions_many and not at_any_size:
            self._begin(by_itself=True)

    def _asked_in_loops(self) -> int:
        """Returns how often the loops of the last call have asked whether to go on."""
        places = self.places
        if not places:
            return 0
        if len(self._are_loops) >= tuning.max_decisions:
            self._are_loops.clear()
        # Telling loops from branches takes parsing source: not for a call that can't have asked enough.
        often = [item for item in list(places.items()) if item[1][0] > 1]  # other threads' calls may add to it
        if sum(times for _, (times, _) in often) < tuning.decisions_many:
            often = []
        asked = 0
        for (code, at), (times, space) in often:
            is_loop = self._are_loops.get((code, at))
            if is_loop is None:
                is_loop = self._are_loops[code, at] = _is_loop(code, at, space)
            asked += times if is_loop else 0
        places.clear()
        return asked

    def end(self) -> bool:
        """Leaves decisions to Python from now on, unless the device was asked for; returns whether that is a change."""
        had, self._open, self.places = self._open and self.control is not None, False, None
        self._are_loops.clear()
        if had:
            self.control = None
        return had

    def _begin(self, by_itself: bool) -> None:
        try:
            from coexec.control_flow import OnDevice  # optional, and imported where it is needed
        except ImportError:
            if not by_itself:
                raise
            self.end()
            return
        self.control, self.places = OnDevice(self._ledger, by_itself), None
        self._are_loops.clear()


def _is_loop(code: CodeType, at: int, space: dict[str, Any]) -> bool:
    decision = decision_at(code, at, space) if is_user(code) else None
    return decision is not None and isinstance(decision.statement, ast.While)
