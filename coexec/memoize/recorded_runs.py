"""Recorded runs: library calls of the last recorded call, each of which counts as the first of two runs that agree.

Two runs must agree on what a library call does, as a single one might have done something that it does only once. The
first may be one of a recorded call: its operations, what they took, and the tensors of arguments and result are in the
trace. Then one observed run suffices, of a call that does nothing but issue operations.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from coexec.base.tuning import tuning
from coexec.follow.follower import Follower
from coexec.guards.call_key import CallArguments
from coexec.memoize.entry import Region
from tracer.graph import CONST, LIST, Node, Step
from tracer.inputs import PLAIN
from tracer.library import gradient
from tracer.op import Const, OpCall, array_in, freeze
from tracer.private import is_resource_variable
from tracer.spec import Spec
from tracer.trace import ARRAY, LibraryRun, TensorName, Trace, described, name_of

_MAKES_VARIABLES = "VarHandleOp"


class RecordedRuns:
    """The library calls of the last recorded call of one function."""

    def __init__(self) -> None:
        self._calls: list[OpCall] = []
        self._nodes: list[Node] = []
        self._runs: dict[Any, list[LibraryRun]] = {}  # by the function and the last operation
        self._left = 0  # followed calls for which they are kept

    def learn(self, trace: Trace, nodes: list[Node]) -> None:
        """Replaces what is known by the library calls of a trace; `nodes`: those of its operations.

        The trace of a call that has left the known paths has none: what was recorded before has not been repeated.
        """
        self.clear()
        if not trace.runs or not trace.in_turn or len(nodes) > tuning.max_recorded_operations:
            return
        self._calls, self._nodes, self._left = trace.calls, nodes, tuning.recorded_runs_kept
        self._runs = {}
        for known in trace.runs:
            if known.begin < known.end:
                self._runs.setdefault((known.function, nodes[known.end - 1].head), []).append(known)

    def clear(self) -> None:
        """Forgets them."""
        self._calls, self._nodes, self._runs, self._left = [], [], {}, 0

    def called(self) -> None:
        """Notes another followed call, after a few of which they are of no use any more."""
        self._left -= 1
        if self._left < 0 and self._runs:
            self.clear()

    def have(self, region: Region, steps: list[Step], run: Follower, arguments: CallArguments, told: Any) -> bool:
        """Returns whether the region's call was recorded doing what it has just done in its first observed run.

        `told`: its arguments and its result. What a recorded run has done besides its operations is not known, so an
        observed one must do nothing else.
        """
        if not steps or steps[-1].node is None or region.function is gradient or not _only_computes(region):
            return False
        candidates = self._runs.get((region.function, steps[-1].node.head), ())
        if not candidates:
            return False
        mine = described(told)
        return any(
            self._agree(known, steps, mine, _Names(region, run, arguments))
            for known in candidates[: tuning.max_recorded_candidates]
        )

    def _agree(self, known: LibraryRun, steps: list[Step], mine: Any, names: _Names) -> bool:
        places, (_, given, result) = self._aligned(known, steps), mine
        if places is None or not names.match(known.given, given):
            return False
        for step, at in zip(steps, places, strict=True):
            if not names.take(step, self._calls[at]):
                return False
            names.make(step, self._calls[at])
        return names.match(known.result, result)

    def _aligned(self, known: LibraryRun, steps: list[Step]) -> list[int] | None:
        """Returns the positions of the recorded operations that the steps repeat; None if there are others.

        A run that makes variables builds what it needs besides, once: operations that precede those that recur.
        """
        builds = any(call.op == _MAKES_VARIABLES for call in self._calls[known.begin : known.end])
        if not builds and known.end - known.begin != len(steps):
            return None
        places, at = [], known.end
        for step in reversed(steps):
            at -= 1
            while at >= known.begin and not _is_same_operation(step.node, self._nodes[at]):
                if not builds:
                    return None
                at -= 1
            places.append(at)
        return places[::-1] if at >= known.begin else None


def _is_same_operation(one: Node | None, other: Node) -> bool:
    """Returns whether two nodes are one operation at one line, maybe in different turns of a loop."""
    if one is None or one.head is not other.head:
        return False
    return one is other or freeze(one.attrs) == freeze(other.attrs)


def _only_computes(region: Region) -> bool:
    """Returns whether all that a region's run has done is known of a recorded one, too."""
    if region.read or region.calls or region.effects or region.marks or region.context or region.seeds != (0, []):
        return False
    return all(isinstance(each, Step) for each in region.recorded) and _is_plain(region.result)


def _is_plain(form: Any) -> bool:
    """Returns whether a result, of this form, consists of what `described` tells apart."""
    kind = form[0]
    if kind is list or kind is tuple:
        return all(map(_is_plain, form[1]))
    if kind is dict:
        return all(map(_is_plain, form[1].values()))
    if kind == "object":
        return isinstance(form[1], PLAIN) or is_resource_variable(form[1])
    return kind in ("tensor", "argument")


class _Names:
    """Which tensors of an observed run are which of a recorded one."""

    def __init__(self, region: Region, run: Follower, arguments: CallArguments) -> None:
        self._start, self._feeds, self._pins = region.start, region.feeds, dict(region.pins)
        self._base, self._externals = run.cursor.base, run.cursor.externals
        self._given = arguments.given
        self._numbers = {id(tensor): number for number, tensor in enumerate(arguments.tensors)}
        self._there: dict[int, int] = {}  # the names in the recorded run, by those in the observed one
        self._here: dict[int, int] = {}
        self._arrays: set[int] = set()  # the names of tensors that were given as arrays
        self._sizes: set[tuple[int, int]] = set()  # dimensions in the recorded run and in the observed one

    def match(self, known: Any, mine: Any) -> bool:
        """Returns whether two descriptions are the same, up to the names of tensors."""
        if isinstance(mine, TensorName):
            if known is ARRAY:  # which has been converted
                self._arrays.add(mine.name)
            return known is ARRAY or (isinstance(known, TensorName) and self._are_one(mine.name, known.name))
        if isinstance(mine, weakref.ref):
            return isinstance(known, weakref.ref) and known() is not None and known() is mine()
        if isinstance(mine, (list, tuple)):
            return type(known) is type(mine) and len(known) == len(mine) and all(map(self.match, known, mine))
        return bool(known == mine)

    def take(self, step: Step, call: OpCall) -> bool:
        """Returns whether a step takes what the recorded operation has taken."""
        if step.variant is None or call.host is not None or len(call.taken) != len(step.slots):
            return False
        if not self._are_alike(call.parts, step.variant.key):
            return False
        for n, slot in enumerate(step.slots):
            if slot != LIST:
                fits = self._takes(slot, step.consts.get(n), call.taken[n], _constant(call, n))
            else:
                slots, consts = step.lists[n]
                named = call.taken[n]
                fits = len(named) == len(slots) and all(
                    self._takes(each, consts.get(item), named[item], _constant(call, n, item))
                    for item, each in enumerate(slots)
                )
            if not fits:
                return False
        return True

    def make(self, step: Step, call: OpCall) -> None:
        """Notes which of its results are those of the recorded operation."""
        for n, name in enumerate(call.made):
            self._are_one(-1 - (self._base + step.first + n), name)

    def _takes(self, slot: int, mine: Const | None, named: int | None, known: Const | None) -> bool:
        if slot == CONST:
            return mine is not None and known is not None and self._is_same_number(known, mine)
        if slot >= 0:
            return named is not None and self._are_one(-1 - (self._base + slot), named)
        feed = -1 - slot
        tensor, new = self._externals[feed], feed - self._start.external
        if new >= 0:
            source, value = self._feeds[new]
        elif feed in self._pins:
            source, value = "same", self._pins[feed]
        else:
            source, value = "argument", self._numbers.get(id(tensor))
        if source == "argument":
            name = None if value is None else name_of(self._given[value])
            if name is None or named is None:
                return name is not None and name in self._arrays
            return self._are_one(name, named)
        if source == "number":
            return known is not None and _is_number(array_in(tensor), known)
        return source == "same" and tensor is value and named == name_of(tensor)

    def _are_alike(self, known: Any, mine: Any) -> bool:
        """Returns whether two operations' inputs have the same dtypes, ranks and constants, up to sizes."""
        if isinstance(known, tuple):
            return isinstance(mine, tuple) and len(known) == len(mine) and all(map(self._are_alike, known, mine))
        if isinstance(known, Const) and isinstance(mine, Const):
            return self._is_same_number(known, mine)
        if type(mine) is not Spec:
            return False
        if isinstance(known, Const) and isinstance(array := known.value, np.ndarray):  # that of few integers is known
            same, shape = mine.dtype == array.dtype, array.shape
        else:
            same, shape = type(known) is Spec and known.enum == mine.enum, getattr(known, "shape", ())
        if not same or len(shape) != len(mine.shape):
            return False
        self._sizes.update(zip(shape, mine.shape, strict=True))
        return True

    def _is_same_number(self, known: Const, mine: Const) -> bool:
        """Returns whether two constants are the same, or integers of which each is a size where they differ."""
        if known == mine:
            return True
        one, other = np.asarray(known.value), np.asarray(mine.value)
        if type(known.value) is not type(mine.value) or one.dtype.kind != "i" or one.shape != other.shape:
            return False
        pairs = zip(one.ravel().tolist(), other.ravel().tolist(), strict=True)
        return one.dtype == other.dtype and all(a == b or (a, b) in self._sizes for a, b in pairs)

    def _are_one(self, mine: int, known: int) -> bool:
        return self._there.setdefault(mine, known) == known and self._here.setdefault(known, mine) == mine


def _constant(call: OpCall, n: int, item: int | None = None) -> Const | None:
    """Returns the value of a recorded input, or of one in a list, if it was a constant."""
    part = call.parts[n] if item is None else call.parts[n][item]
    return part if isinstance(part, Const) else call.numbers.get(n if item is None else (n, item))


def _is_number(fed: Any, known: Const) -> bool:
    """Returns whether a tensor was made of this value."""
    return Const(fed) == Const(np.asarray(known.value).astype(fed.dtype))
