"""Known calls: what is known of a function's memoized calls besides the regions in its trace graph."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import Any, TypeVar

from coexec.base.causes import Kind, Tally
from coexec.base.stats import EventLog
from coexec.base.tuning import tuning
from coexec.memoize.entry import Region
from coexec.memoize.recorded_runs import RecordedRuns
from coexec.memoize.shape_variants import ShapeVariants
from coexec.memoize.watch_budget import WatchBudget
from tracer.cursor import MAX_WAYS, Cursor
from tracer.graph import Node, Step, TraceGraph
from tracer.library import gradient
from tracer.location import Frame, place_of

_Key = TypeVar("_Key")
_Known = TypeVar("_Known")


class Refusals:
    """When to observe a call on a new path that was not memoized on others: at its 2nd, 4th, 8th visit.

    Each path has regions of its own, which would all try at once.
    """

    __slots__ = ("_retry", "_visits")

    def __init__(self) -> None:
        self._visits, self._retry = 1, 2

    def admit(self) -> bool:
        """Counts a visit; returns whether to observe the call."""
        self._visits += 1
        return self._visits >= self._retry

    def count(self) -> None:
        """Counts another refusal."""
        self._retry = self._visits + min(self._visits, tuning.region_last_retry)


class StackCounts:
    """How often one call has been at each call stack so far, as far as operations were issued there.

    Found by one operation that was issued there, or a few frames further inside, as a layer of the program's issues its
    own there. Each operation's call stack is entered once, so that asking takes no longer in a call of many.
    """

    __slots__ = ("_cursor", "_entered", "_first")

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._entered = 0
        self._first: dict[Any, Any] = {}  # by call stack: the key of an operation in the cursor's counts

    def of(self, frames: tuple[Frame, ...]) -> int:
        """Returns how often the call has been at this call stack."""
        counts = self._cursor.counts()
        for key in itertools.islice(reversed(counts), len(counts) - self._entered):  # the latest ones
            inside, _ = key
            for outwards in range(min(len(inside), tuning.max_frames_inside)):
                self._first.setdefault(inside[outwards:], key)
        self._entered = len(counts)
        known = self._first.get(frames)
        return 0 if known is None else counts[known]


class Ways:
    """The ways by which calls have come to a library call at a line, by turn of a loop around it.

    The first turn comes there by another way than the others do, and that is no choice.
    """

    __slots__ = ("_meet", "_turns")

    def __init__(self) -> None:
        self._meet = False  # whether calls have come there by several, in any turn
        self._turns: dict[int, dict[int, int]] = {}

    def came_to(self, graph: TraceGraph, frames: tuple[Frame, ...], turn: int, way: Node) -> bool:
        """Notes that a call came there after a node by a new step; returns whether ways meet there."""
        ways = self._turns.setdefault(min(turn, tuning.max_keys_at_place), {})  # one for all very late ones
        self._meet = graph.came_to(frames, ways, way) or self._meet
        return self._meet


class KnownCalls:
    """The confirmed calls of one function, by call and place, and the reasons reported to `explain`."""

    def __init__(self) -> None:
        self.watching = WatchBudget()
        self.variants = ShapeVariants()
        self.recorded = RecordedRuns()
        self._seen: dict[Any, weakref.ref[Region]] = {}  # by objects and specs: regions whose runs were seen in full
        self._refused: dict[Any, Refusals] = {}  # by call and place
        # How often a call was new at a known place, by that and its key's hash, and the objects in the key.
        self._ways: dict[Any, dict[int, tuple[int, tuple[weakref.ref[Any], ...]]]] = {}
        # After which nodes calls came to a line first, by function and line, and the ids of the call's objects.
        self._came: dict[Any, dict[Any, Ways]] = {}
        self._without_room: set[int] = set()  # hashes of keys that were not admitted, with their steps
        # By the ids of their starts, and by keys that leave out what may not matter: regions at the beginning of a
        # segment for any size, without sizes, as their own keys are behind other steps of such a segment; gradients, by
        # the forms of their tapes.
        self._otherwise: dict[tuple[int, Any], Region] = {}
        self.calls = 0  # followed calls of the function
        self.reported: dict[tuple[Any, str], Tally] = {}  # by code and reason: finding the place takes time
        self.reasons: dict[Any, Tally] = {}  # by code: the last one reported, charged with its Python's time

    def see(self, key: Any, region: Region) -> None:
        """Notes that a run of a region was seen in full; `key` is equal for calls that run the same code."""
        if len(self._seen) >= tuning.max_twin_places:
            self._seen.clear()
        self._seen[key] = weakref.ref(region)

    def seen(self, key: Any) -> Region | None:
        """Returns a region whose run was seen in full, and which runs the code of calls with this key."""
        found = self._seen.get(key)
        return None if found is None else found()

    def is_at_join(self, start: Step, key: Any, objects: list[Any]) -> bool:
        """Counts a call that is new behind `start`; returns whether it keeps coming there by ever other ways.

        `objects` are those whose ids are in the key. One that is made anew in each call may have the id of the one
        before, which is no longer alive: then the call is another one, and did not come by another way.
        """
        # Not the key itself, which would keep its objects alive. By the variant, too: other sizes are no other ways.
        # Ways begin at the last cut: else each call behind a new one would be cut, too, as it was known before that.
        known = hash(key)
        latest = _latest(self._ways, (start.root().node, start.node, start.variant), known)
        times, alive = latest.get(known, (0, ()))
        if any(reference() is None for reference in alive):
            times = 0
        latest[known] = times + 1, _references(objects)
        return times >= MAX_WAYS

    def known_otherwise(self, start: Step, key: Any) -> Region | None:
        """Returns the region of a call by its other key, if it has been seen to do what such a region does."""
        region = self._otherwise.get((id(start), key))
        if region is None or not region.confirmed or (start.regions or {}).get(region.key) is not region:
            return None
        return region

    def see_otherwise(self, region: Region, key: Any) -> None:
        """Notes what a run has shown of a call with this other key."""
        known = self.known_otherwise(region.start, key)
        if not region.confirmed or (known is not None and not known.is_due()):  # one that is due has just run again
            return
        if len(self._otherwise) >= tuning.max_other_keys:  # one of a tape with hundreds of records may take 100 KB
            del self._otherwise[next(iter(self._otherwise))]
        self._otherwise[id(region.start), key] = region

    def ways_to(self, place: Any) -> Ways:
        """Returns the ways by which calls have come to a library call (see `place_of_call`)."""
        function, objects, frames = place
        return _latest(self._came, (function, frames), objects).setdefault(objects, Ways())

    def recurs(self, start: Step, key: Any) -> bool:
        """Notes a key that there was no room for after a step; returns whether it has been there before."""
        known = hash((id(start), key))  # not the key itself, which would keep its objects alive
        if known in self._without_room:
            return True
        if len(self._without_room) >= tuning.max_twin_places:
            self._without_room.clear()
        self._without_room.add(known)
        return False

    def is_late(self, place: Any) -> bool:
        """Returns whether a key is observed when it comes again only: calls of the function have long been known."""
        return self.calls > tuning.calls_learnt_at_once and not self.variants.of(place)

    def admits(self, place: Any) -> bool:
        """Returns whether to observe a call for the first time, as far as others at this place were refused."""
        refusals = self._refused.get(place)
        return refusals is None or refusals.admit()

    def refused(self, place: Any) -> None:
        """Notes that a call at this place was not memoized."""
        if len(self._refused) >= tuning.max_twin_places:
            self._refused.clear()
        known = self._refused.get(place)
        if known is None:
            self._refused[place] = Refusals()
        else:
            known.count()

    def confirmed(self, place: Any) -> None:
        """Notes that one was: others may be, too."""
        self._refused.pop(place, None)

    def clear(self) -> None:
        """Clears the calls; what was reported is not reported again."""
        self.variants, self._seen, self._refused, self._ways = ShapeVariants(), {}, {}, {}
        self.recorded.clear()
        self._came.clear()
        self._without_room.clear()
        self._otherwise.clear()

    def tell(self, ledger: EventLog, function: Any, reason: str) -> None:
        """Reports why a call is not memoized; its Python's time will be charged to that."""
        code = getattr(function, "__code__", function)  # shared by closures made anew on every call
        tally = self.reported.get((code, reason))
        if tally is not None:
            tally.count += 1
        elif len(self.reported) < tuning.max_reported:
            kind = Kind.GRADIENT if function is gradient else Kind.LIBRARY
            tally = ledger.cause(kind, f"{function.__qualname__}: {reason}", place_of())
            self.reported[code, reason] = tally
        if tally is not None:
            self.reasons[code] = tally


def _latest(places: dict[Any, dict[_Key, _Known]], place: Any, key: _Key) -> dict[_Key, _Known]:
    """Returns what is known at a place by the latest keys, with room for `key`: calls on new objects have new ones."""
    if len(places) >= tuning.max_twin_places:
        places.clear()
    known = places.setdefault(place, {})
    if key not in known and len(known) >= tuning.max_keys_at_place:
        del known[next(iter(known))]
    return known


def _references(objects: list[Any]) -> tuple[weakref.ref[Any], ...]:
    """Returns weak references to those of the objects that have them."""
    found = []
    for value in objects:
        with contextlib.suppress(TypeError):
            found.append(weakref.ref(value))
    return tuple(found)
