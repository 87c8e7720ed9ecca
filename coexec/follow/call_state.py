"""Call state: what one followed call holds while it runs, the phase it is in, and what leads from phase to phase.

Only this folder writes to it. Others read it, and change it by the methods of `CallState`. The table below is printed
in coexec/README.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any, NamedTuple, Protocol

from coexec.base.budget import Budget
from coexec.base.causes import Tally
from coexec.base.options import Options
from coexec.base.stats import EventLog
from coexec.base.tuning import tuning
from coexec.follow.device_control import TimedCall
from coexec.follow.liveness import Reference, referenced
from coexec.follow.tapes import Tapes
from coexec.launch.async_launch import AsyncLaunch
from coexec.launch.executor import SegmentExecutor
from tracer import hooks, intercept
from tracer.cursor import Cursor
from tracer.graph import Step, TraceGraph
from tracer.lazy import LazyTensor
from tracer.library import has_strategy
from tracer.recorder import Recorder
from tracer.seeds import Pair
from tracer.trace import Trace

# One for all calls: they may use each other's tensors and variables, in any order. In a forked child it is free.
lock = threading.RLock()
hooks.held_by_fork(__name__, lock)


class Phase(IntEnum):
    """What happens to the operations that the call issues."""

    NEW = auto()  # there are none yet
    FOLLOWING = auto()  # they are matched with the graph, answered with lazy tensors and held back
    OBSERVING = auto()  # the same, while the Python of a library call runs to be memoized: calls inside it run, too
    IN_FLIGHT = auto()  # those held back are being launched beside Python; the launch lands before the next one
    RECORDING = auto()  # they run at once, and a recorder notes them
    FAILED = auto()  # they raise the error of an operation that was held back
    ENDED = auto()  # there are no more


class Event(IntEnum):
    """What changes the phase."""

    BEGIN = auto()
    OBSERVE = auto()
    OBSERVED = auto()
    LAUNCH = auto()
    LAND = auto()
    HAND_OVER = auto()
    DIVERGE = auto()
    FAIL_IN_PLACE = auto()
    FAIL_LATE = auto()
    RELENT = auto()
    FAULT = auto()
    END = auto()


class Transition(NamedTuple):
    """One event: the phases in which it may come, each with the phase that follows, and what is done."""

    event: Event
    phases: dict[Phase, Phase]
    action: str


_NEW, _FOLLOWING, _OBSERVING, _IN_FLIGHT, _RECORDING, _FAILED, _ENDED = Phase
_FOLLOWED = (_FOLLOWING, _OBSERVING, _IN_FLIGHT)

TRANSITIONS = (
    Transition(Event.BEGIN, {_NEW: _FOLLOWING}, "other threads may ask the call to carry out what it holds back"),
    Transition(
        Event.OBSERVE,
        {_FOLLOWING: _OBSERVING},
        "tapes list what they record; library calls are not skipped, and nothing is launched beside Python",
    ),
    Transition(
        Event.OBSERVED,
        {p: _FOLLOWING if p is _OBSERVING else p for p in (_FOLLOWING, _OBSERVING, _RECORDING, _FAILED)},
        "the library call has returned, or turned out to be no candidate: calls inside it may be skipped again",
    ),
    Transition(Event.LAUNCH, {_FOLLOWING: _IN_FLIGHT}, "launches what is held back on a thread of the runtime"),
    Transition(Event.LAND, {_IN_FLIGHT: _FOLLOWING, _ENDED: _ENDED}, "waits for that launch, and cuts the segment"),
    Transition(Event.HAND_OVER, {_IN_FLIGHT: _FOLLOWING}, "the launch outlives the call, whose end does not wait"),
    Transition(
        Event.DIVERGE,
        dict.fromkeys(_FOLLOWED, _RECORDING),
        "what was held back has been carried out; a recorder takes over at the operation that no step matches",
    ),
    Transition(
        Event.FAIL_IN_PLACE,
        {**dict.fromkeys((*_FOLLOWED, _RECORDING), _RECORDING), _FAILED: _FAILED, _ENDED: _ENDED},
        "an operation failed that was launched at its place in the program: its error is raised there, and recorded on",
    ),
    Transition(
        Event.FAIL_LATE,
        {**dict.fromkeys((*_FOLLOWED, _RECORDING, _FAILED), _FAILED), _ENDED: _ENDED},
        "an operation failed behind its place: its error is raised where that shows, by later operations, at the end",
    ),
    Transition(Event.RELENT, {_FAILED: _RECORDING}, "the error has been raised often enough: operations run again"),
    Transition(
        Event.FAULT,
        {**dict.fromkeys((_NEW, *_FOLLOWED, _RECORDING), _RECORDING), _FAILED: _FAILED, _ENDED: _ENDED},
        "the runtime itself failed: what is held back is carried out, operations run at once and are not recorded",
    ),
    Transition(
        Event.END,
        dict.fromkeys((_FOLLOWING, _OBSERVING, _IN_FLIGHT, _RECORDING, _FAILED, _ENDED), _ENDED),
        "everything is carried out; an error that has not reached the program is raised",
    ),
)

_NEXT = {phase: {row.event: row.phases[phase] for row in TRANSITIONS if phase in row.phases} for phase in Phase}


def after(phase: Phase, event: Event) -> Phase:
    """Returns the phase that follows; an event that cannot come in this phase is an error of the runtime's own."""
    following = _NEXT[phase].get(event)
    assert following is not None, f"{event.name} cannot come in phase {phase.name}"
    return following


class LateLaunch(Protocol):
    """The last launch of a call, under way behind its end."""

    def outlive(self) -> None:
        """The call has ended."""

    def land(self) -> None:
        """Waits for the launch; raises what came of it, once."""


class CallState:
    """The state of one call that is followed."""

    # Each call makes one; objects with more than 30 attributes are slow to make where they have a dict.
    __slots__ = (
        "_memoizes",
        "ahead",
        "assertions",
        "before",
        "budget",
        "constants",
        "control",
        "cursor",
        "deferred",
        "device",
        "divergence",
        "error",
        "faults",
        "flight",
        "forced",
        "graph",
        "jumped",
        "launched",
        "ledger",
        "notes",
        "open",
        "options",
        "owner",
        "phase",
        "recorder",
        "refused",
        "regions",
        "replayed",
        "segments",
        "survivors",
        "tapes",
        "telling",
        "trial",
        "unseen",
        "values",
    )  # fmt: skip
    lock = lock

    def __init__(
        self,
        graph: TraceGraph,
        segments: SegmentExecutor,
        ledger: EventLog,
        options: Options,
        before: LateLaunch | None,
        constant: Callable[[Any, Any], Any],
    ) -> None:
        self.graph, self.segments, self.ledger, self.options = graph, segments, ledger, options
        self.phase = Phase.NEW
        self.cursor = Cursor(graph)
        self.values: list[Any] = []  # the lazy tensors of the running segment by their numbers; None: nobody wants it
        self.constants: list[LazyTensor] = []  # those that were made of Python values
        self.forced = tuning.forced_event
        self.divergence: Tally | None = None  # of the cause of it
        self.recorder: Recorder | None = None  # who answers operations from a divergence or failure on
        self.error: BaseException | None = None  # of the operation for which tensors of this call have no value
        self.owner, self.device = threading.get_ident(), intercept.device_in_scope()
        self.deferred: BaseException | None = None  # an error that the next operations raise
        self.refused = 0  # how many have
        self.unseen: BaseException | None = None  # an error that the call raises at its end
        self.survivors: list[Reference] = []
        self.telling: list[LazyTensor] = []  # those that must not end before the call does
        self.tapes = Tapes(constant)
        self._memoizes = self.tapes.waiting = options.regions and not self.tapes.foreign and not has_strategy()
        self.open = self._memoizes  # whether library calls are handed to `library`
        self.assertions: dict[Step, Any] = {}  # messages of the running segment's, where they differ from call to call
        self.notes: dict[Step, Any] = {}  # the same of what Keras adds to errors
        self.regions = self.jumped = 0  # library calls that were skipped, and their operations
        self.launched = self.replayed = 0  # segments, as a whole and operation by operation
        self.flight: tuple[Step, AsyncLaunch] | None = None  # what is being launched beside Python, up to which step
        self.trial: TimedCall | None = None  # what the call is timed for
        self.budget = Budget()
        self.before = before  # what the call before has left under way
        self.ahead: LateLaunch | None = None  # what this one leaves
        self.faults: list[BaseException] = []  # errors of the runtime's own

    def move(self, event: Event) -> None:
        """Goes to the phase that follows on an event."""
        phase = self.phase = after(self.phase, event)
        self.open = self._memoizes and (phase is _FOLLOWING or phase is _IN_FLIGHT)

    # What ends the following.

    def record(self, event: Event) -> Recorder:
        """Lets a recorder answer from here on."""
        self.move(event)
        self.tapes.catch_up()
        self.tapes.waiting = False
        recorder = self.recorder = Recorder(Trace(start=self.cursor.last), self.cursor.counts())
        recorder.strict = self.options.strict
        return recorder

    def record_plainly(self, error: BaseException) -> None:
        """Lets the rest of the call run at once, unrecorded."""
        self.move(Event.FAULT)
        self.tapes.waiting = False
        recorder = self.recorder or Recorder(Trace(start=self.cursor.last))
        recorder.failed = error
        self.recorder = recorder

    def errors(self) -> list[BaseException]:
        """Returns the errors of the runtime's own in this call."""
        recorder = self.recorder
        if not self.faults and recorder is not None and recorder.failed is not None:
            return [recorder.failed]
        return self.faults

    # What other folders do to the state.

    def observe(self) -> None:
        """A library call's Python begins to run to be memoized."""
        self.move(Event.OBSERVE)
        self.tapes.observe()

    def observed(self) -> tuple[list[Step], list[Any]]:
        """That has ended, or been given up; returns the steps that tapes have recorded, and the variables read."""
        self.move(Event.OBSERVED)
        return self.tapes.observed()

    def skip(
        self, start: Step, end: Step, feeds: list[Any], handles: set[int], drawn: list[Pair] | None, first: bool = True
    ) -> list[Any]:
        """Moves over the operations of a library call as if they had been issued; returns the segment's tensors.

        Those of the call are None there: the caller puts in those that it returns. `first`: whether they are the first
        ones of their call to be skipped.
        """
        cursor, values = self.cursor, self.values
        cursor.externals += feeds
        if handles:
            cursor.handles |= handles
        if drawn is not None:
            cursor.seeds[start.draws :] = drawn
        values += [None] * (end.end - start.end)
        cursor.step = end
        self.regions += first
        self.jumped += end.depth - start.depth
        return values

    def add_notes(self, notes: dict[Step, Any]) -> None:
        """Takes what Keras adds to errors of these operations of the running segment in this call."""
        self.notes.update(notes)

    def note_fault(self, error: BaseException) -> None:
        """Takes an error of the runtime's own in spite of which the call is still followed."""
        self.faults.append(error)

    def referenced_between(self, first: int, end: int) -> list[int]:
        """Returns the numbers of this part of the segment's tensors that are referenced from elsewhere."""
        window = self.values[first:end]
        del self.values[first:end]
        try:
            return [first + i for i in referenced(window) if window[i]._out.const is None]
        finally:
            self.values[first:first] = window

    def hand_over(self, late: LateLaunch) -> tuple[Step, AsyncLaunch]:
        """Lets the launch under way outlive the call: the end of the call does not wait for it."""
        assert self.flight is not None
        phase = after(self.phase, Event.HAND_OVER)
        flight, self.flight, self.ahead, self.phase = self.flight, None, late, phase
        return flight

    def take_back(self, flight: tuple[Step, AsyncLaunch]) -> None:
        """The call has ended: its tensors wait for this launch where they are read."""
        self.flight, self.cursor.step = flight, flight[0]

    def time_as(self, trial: TimedCall) -> None:
        """Says what the call is timed for."""
        self.trial = trial
