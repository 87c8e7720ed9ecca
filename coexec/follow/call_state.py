"""Call state: the state of one followed call while it runs, its phase, and the transitions between phases.

Only this folder writes its attributes; other folders change it through the methods of `CallState`. The table below is
printed in coexec/README.md.
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
from coexec.follow.backward import LibraryEntry
from coexec.follow.device_control import TimedCall
from coexec.follow.liveness import Reference, referenced
from coexec.follow.tapes import Tapes
from coexec.launch.async_launch import AsyncLaunch
from coexec.launch.executor import SegmentExecutor
from tracer import hooks, intercept, seeds
from tracer.cursor import Cursor
from tracer.graph import Step, TraceGraph
from tracer.lazy import LazyTensor
from tracer.library import has_strategy
from tracer.recorder import Recorder
from tracer.trace import Trace

# One for all calls, which may use each other's tensors and variables in any order. Released in a forked child.
lock = threading.RLock()
hooks.held_by_fork(__name__, lock)


class Phase(IntEnum):
    """What happens to the operations that the call issues."""

    NEW = auto()  # none has been issued yet
    FOLLOWING = auto()  # matched with the graph, answered with lazy tensors, and left pending
    OBSERVING = auto()  # the same, while a library call's Python is observed to be memoized: calls inside it run, too
    IN_FLIGHT = auto()  # pending ones are in an async launch, which is waited for before the next operation
    RECORDING = auto()  # run at once, and recorded
    FAILED = auto()  # raise the error of an earlier operation that was pending
    ENDED = auto()  # the call is over


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
    """One event: its next phase for each phase in which it may occur, and what is done."""

    event: Event
    phases: dict[Phase, Phase]
    action: str


_NEW, _FOLLOWING, _OBSERVING, _IN_FLIGHT, _RECORDING, _FAILED, _ENDED = Phase
_FOLLOWED = (_FOLLOWING, _OBSERVING, _IN_FLIGHT)

TRANSITIONS = (
    Transition(Event.BEGIN, {_NEW: _FOLLOWING}, "other threads may ask the call to carry out its pending operations"),
    Transition(
        Event.OBSERVE,
        {_FOLLOWING: _OBSERVING},
        "tapes list what they record; library calls are not skipped, and nothing is launched beside Python",
    ),
    Transition(
        Event.OBSERVED,
        {p: _FOLLOWING if p is _OBSERVING else p for p in (_FOLLOWING, _OBSERVING, _IN_FLIGHT, _RECORDING, _FAILED)},
        "the library call has returned, or turned out to be no candidate: calls inside it may be skipped again",
    ),
    Transition(Event.LAUNCH, {_FOLLOWING: _IN_FLIGHT}, "launches the pending operations on a thread of the runtime"),
    Transition(Event.LAND, {_IN_FLIGHT: _FOLLOWING, _ENDED: _ENDED}, "waits for that launch, and cuts the segment"),
    Transition(Event.HAND_OVER, {_IN_FLIGHT: _FOLLOWING}, "the launch outlives the call, whose end does not wait"),
    Transition(
        Event.DIVERGE,
        dict.fromkeys(_FOLLOWED, _RECORDING),
        "pending operations have been carried out; a recorder takes over at the operation that no step matches",
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
        "the runtime itself failed: pending operations are carried out, operations run at once and are not recorded",
    ),
    Transition(
        Event.END,
        dict.fromkeys((_FOLLOWING, _OBSERVING, _IN_FLIGHT, _RECORDING, _FAILED, _ENDED), _ENDED),
        "everything is carried out; an error that has not reached the program is raised",
    ),
)

_NEXT = {phase: {row.event: row.phases[phase] for row in TRANSITIONS if phase in row.phases} for phase in Phase}


def after(phase: Phase, event: Event) -> Phase:
    """Returns the next phase; an event that cannot occur in this phase is a fault of the runtime."""
    following = _NEXT[phase].get(event)
    assert following is not None, f"{event.name} cannot come in phase {phase.name}"
    return following


class LateLaunch(Protocol):
    """The last launch of a call, in flight past its end (a tail launch)."""

    def outlive(self) -> None:
        """Ends the call, but not the launch."""

    def land(self) -> None:
        """Waits for the launch; raises its error, once."""


class CallState:
    """The state of one followed call."""

    records = False  # library calls come here to be handled, or not at all

    # Each call makes one; objects with a dict are slow to make if they have more than 30 attributes.
    __slots__ = (
        "_memoizes",
        "ahead",
        "arrays",
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
        "joins",
        "launched",
        "ledger",
        "notes",
        "open",
        "ops_skipped",
        "options",
        "owner",
        "phase",
        "ran",
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
        "watches",
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
        self.values: list[Any] = []  # lazy tensors of the running segment by number; None: unused
        self.constants: list[LazyTensor] = []  # those made from Python values
        self.arrays: dict[int, Any] = {}  # by id: tensors of large ones that the observed library call has made
        self.joins = True  # whether to cut where calls come by ever other ways
        self.forced = tuning.forced_event
        self.divergence: Tally | None = None  # of its cause
        self.recorder: Recorder | None = None  # handles operations after a divergence or failure
        self.error: BaseException | None = None  # why tensors of this call have no value
        self.owner, self.device = threading.get_ident(), intercept.device_in_scope()
        self.deferred: BaseException | None = None  # raised by the next operations
        self.refused = 0  # how many have raised it
        self.unseen: BaseException | None = None  # raised at the end of the call
        self.survivors: list[Reference] = []
        self.telling: list[LazyTensor] = []  # those that must be kept alive until the call ends
        self.tapes = Tapes(constant, self.cursor.sizes)
        self._memoizes = self.tapes.waiting = options.regions and not self.tapes.foreign and not has_strategy()
        self.open = self._memoizes  # whether library calls are handed to `library`
        self.assertions: dict[Step, Any] = {}  # of the running segment, where they differ from the step's own
        self.notes: dict[Step, Any] = {}  # the same for Keras' additions to errors
        self.regions = self.ops_skipped = 0  # library calls that were skipped, and their operations
        self.launched = self.replayed = 0  # segments run as a whole, and operation by operation
        self.ran: list[Step] = []  # the last steps of both, in order
        self.flight: tuple[Step, AsyncLaunch] | None = None  # the async launch, and up to which step
        self.trial: TimedCall | None = None  # what the call is timed for
        self.budget = Budget()
        self.watches: Any = None  # the `WatchBudget` that pays for learning calls of helpers, where it affords that
        self.before = before  # the tail launch of the call before
        self.ahead: LateLaunch | None = None  # the tail launch of this one
        self.faults: list[BaseException] = []  # errors of the runtime itself

    def move(self, event: Event) -> None:
        """Moves to the next phase on an event."""
        phase = self.phase = after(self.phase, event)
        self.open = self._memoizes and (phase is _FOLLOWING or phase is _IN_FLIGHT)
        self.cursor.cuts_at_joins = self.joins and phase is not _OBSERVING  # a call that is cut is no region

    def watch(self, budget: Any) -> None:
        """Has calls of helpers learnt at the expense of a budget, or no more if it is None."""
        self.watches = budget

    # Ends of following.

    def record(self, event: Event) -> Recorder:
        """Has a recorder handle operations from here on, and returns it; tapes catch up."""
        self.move(event)
        self.tapes.catch_up()
        self.tapes.waiting = False
        recorder = self.recorder = Recorder(Trace(start=self.cursor.last), self.cursor.counts())
        recorder.strict = self.options.strict
        return recorder

    def record_plainly(self, error: BaseException) -> None:
        """Runs the rest of the call imperatively, unrecorded, after a fault of the runtime."""
        self.move(Event.FAULT)
        self.tapes.waiting = False
        recorder = self.recorder or Recorder(Trace(start=self.cursor.last))
        recorder.failed = error
        self.recorder = recorder

    def errors(self) -> list[BaseException]:
        """Returns the runtime's own errors in this call."""
        recorder = self.recorder
        if not self.faults and recorder is not None and recorder.failed is not None:
            return [recorder.failed]
        return self.faults

    # Changes made by other folders.

    def observe(self) -> None:
        """Begins to observe a library call."""
        self.move(Event.OBSERVE)
        self.tapes.observe()
        self.arrays = {}

    def note_array(self, tensor: Any) -> None:
        """Notes a tensor made of a large Python value, if a library call is being observed."""
        if self.phase is _OBSERVING:
            self.arrays[id(tensor)] = tensor

    def observed(self) -> tuple[list[Step | LibraryEntry], list[Any]]:
        """Ends or abandons that; returns the steps that tapes have recorded, and the variables read."""
        self.move(Event.OBSERVED)
        return self.tapes.observed()

    def skip(
        self,
        start: Step,
        end: Step,
        feeds: list[Any],
        handles: set[int],
        draws: tuple[int, list[int]] = (0, []),
        first: bool = True,
    ) -> list[Any]:
        """Advances past the operations of a library call as if they had been issued; returns the segment's tensors.

        Those of the call are None: the caller fills in those that it returns. `draws`: how many seeds it draws, and
        which of them its operations take; nothing may raise once they are drawn, or they would be drawn again. `first`:
        whether this is the first part of the call to be skipped.
        """
        cursor, values = self.cursor, self.values
        drawn = seeds.draw(*draws) if draws[0] or len(cursor.seeds) > start.draws else None
        cursor.externals += feeds
        if handles:
            cursor.handles |= handles
        if drawn is not None:
            cursor.seeds[start.draws :] = drawn
        values += [None] * (end.end - start.end)
        cursor.step = end
        self.regions += first
        self.ops_skipped += end.depth - start.depth
        return values

    def add_steps(self, steps: list[Step]) -> None:
        """Adds steps of the running segment to the graph, each behind its parent, without following them."""
        cursor = self.cursor
        here = cursor.step
        for step in steps:
            assert step.parent is not None
            cursor.step = step.parent
            cursor.append(step)
        cursor.step = here

    def add_notes(self, notes: dict[Step, Any]) -> None:
        """Adds Keras' additions to errors of operations of the running segment."""
        self.notes.update(notes)

    def note_fault(self, error: BaseException) -> None:
        """Notes a fault of the runtime despite which the call is still followed."""
        self.faults.append(error)

    def referenced_between(self, first: int, end: int) -> list[int]:
        """Returns the numbers, in this range, of the segment's tensors that are referenced from elsewhere."""
        window = self.values[first:end]
        del self.values[first:end]
        try:
            return [first + i for i in referenced(window) if window[i]._out.const is None]
        finally:
            self.values[first:first] = window

    def hand_over(self, late: LateLaunch) -> tuple[Step, AsyncLaunch]:
        """Lets the launch in flight outlive the call, whose end will not wait for it; returns it with its last step."""
        assert self.flight is not None
        phase = after(self.phase, Event.HAND_OVER)
        flight, self.flight, self.ahead, self.phase = self.flight, None, late, phase
        return flight

    def take_back(self, flight: tuple[Step, AsyncLaunch]) -> None:
        """Has reads of the ended call's tensors wait for this launch."""
        self.flight, self.cursor.step = flight, flight[0]

    def time_as(self, trial: TimedCall) -> None:
        """Sets what the call is timed for."""
        self.trial = trial
