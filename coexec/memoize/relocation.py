"""Relocation: copies a region to another path of the trace graph, so that the call is not learnt there anew.

Calls reach a line by many paths: by branches before it, at sizes before it. Each path has steps of its own for what
follows, and regions that start there. The same call (function, objects, Python values, specs of its tensors, state that
guards compare) runs the same Python on each; only the places of its tensors in the segment differ. So its steps are
copied, with their inputs rewired. Where a model chose experts by its data, learning the update behind it again (584
operations of Adam) was most of each new path: 100 to 145 ms; it takes 13 to copy.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from coexec.follow.backward import FunctionRecord
from coexec.follow.follower import Follower
from coexec.guards.call_key import CallArguments, CannotMemoize, SpecArguments
from coexec.memoize.entry import Region, anchor
from coexec.memoize.step_range import Outputs, asks, slot_before, steps_between
from tracer.cursor import Cursor
from tracer.effects import watch_as
from tracer.errors import Refused
from tracer.graph import CONST, LIST, Node, Step, Variant, splits
from tracer.lazy import unwrap
from tracer.library import gradient
from tracer.location import Location
from tracer.spec import RESOURCE, spec_of
from tracer.variable_ops import is_variable_op


def alike_key(cursor: Cursor, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a key that is equal for calls that run the same code, as far as guards hold; None if there is none."""
    if region.function is gradient or region.helper is not None:
        return None
    try:
        return *region.key[:3], SpecArguments(cursor).key((args, kwargs))
    except CannotMemoize:
        return None


def relocate(source: Region, region: Region, run: Follower, arguments: CallArguments) -> bool:
    """Fills `region`, which starts at the running call's last step, with what `source` does; returns whether it could.

    Both are of the same call: see `Region.alike`. Adds the steps to the graph, but does not move the cursor there.
    """
    here = run.cursor.step
    steps = steps_between(source.start, source.end)
    if steps is None or not _can_move(source, steps) or here.dynamic or here.opened:
        return False
    arguments.settle()
    if any(arguments.const(number) != const for number, const in source.taken):
        return False
    try:
        copy = _Copy(source, run, arguments)
        copied = dict(zip(steps, map(copy.step, steps), strict=True))
        recorded = [copied[each] if isinstance(each, Step) else copy.record(each) for each in source.recorded]
        shift = here.end - source.start.end
        result = _moved(source.result, shift)
        marks = [(n, {name: _moved(form, shift) for name, form in changed.items()}) for n, changed in source.marks]
    except Refused:
        return False
    run.add_steps(copy.added)
    moved = list(copied.values())
    region.handles = copy.handles
    region.outputs = Outputs(here, moved)
    region.first = moved[0] if moved else None
    region.asks = asks(moved)
    region.places = copy.places
    region.taken = list(source.taken)
    region.fill(
        read=[], calls=[], spans=[], early={}, effects=[], seeds=(0, []),
        end=moved[-1] if moved else here,
        feeds=copy.feeds,
        pins=sorted(copy.pins.items()),
        marks=marks,
        context=source.context,
        notes={copied[step]: note for step, note in source.notes.items()},
        result=result,
        recorded=recorded,
        accessed=list(source.accessed),
    )  # fmt: skip
    region.interior = [number + shift for number in source.interior]
    region.emptied = set(source.emptied)
    region.confirmed = 2  # as `source` is
    region.reads, region.state_guards, region.reached = source.reads, source.state_guards, list(source.reached)
    if source.state_guards is not None:
        held = [each() if isinstance(each, weakref.ref) else each for each in source.held]
        anchor(region, [value for value in held if value is not None])
    watch_as(region, source)
    return True


def _can_move(region: Region, steps: list[Step]) -> bool:
    """Returns whether a region is of a kind that can be copied."""
    if region.confirmed < 2 or region.read or region.calls or region.effects or region.seeds[0]:
        return False
    # What has been warned of is known by the line that issued it, which may be another at other places.
    if region.reads is not None and region.reads.silence is not None:
        return False
    return not any(
        step.variant is None or step.node is None or step.node.callee is not None or step.assertion is not None
        or step.host or step.dynamic or step.opened or step.window or step.seeded
        for step in steps
    )  # fmt: skip


class _Copy:
    """A region's steps, written for the place where a call is now; `Refused` where one cannot be."""

    def __init__(self, source: Region, run: Follower, arguments: CallArguments) -> None:
        self._source, self._run, self._arguments = source, run, arguments
        self._start, self._here = source.start, run.cursor.step
        self._last = self._here
        self._by_slot = {slot: number for number, slot in enumerate(source.places) if slot is not None}
        self._pinned = dict(source.pins)
        self._new: dict[Any, int] = {}  # the numbers of the feeds that it adds, by their ids, or as numbers of Python
        self._specs: list[Any] = []  # of those that the step added
        self._issued: Counter[Any] = Counter()
        self.added: list[Step] = []
        self.feeds: list[tuple[str, Any]] = []
        self.pins: dict[int, Any] = {}
        self.handles: set[int] = set()
        self.places = [slot_before(self._here, value, run.cursor) for value in arguments.tensors]
        self._given = {id(value) for value in arguments.tensors}

    def step(self, step: Step) -> Step:
        """Returns the step that does the same behind the last one: one that is there, or a copy."""
        graph, here, (node, variant) = self._run.graph, self._last, self._node(step)
        self._specs = []
        key = variant.key
        slots = tuple([s if s in (CONST, LIST) else self._slot(s, key[i]) for i, s in enumerate(step.slots)])
        lists = {
            i: (tuple([s if s == CONST else self._slot(s, key[i][j]) for j, s in enumerate(listed)]), consts)
            for i, (listed, consts) in step.lists.items()
        }
        if graph.updates_rows and is_variable_op(node.op) and splits(here, node.op, list(slots)):
            raise Refused("a cut is needed in it")
        for known in here.next:
            if known.node is node and known.variant is variant and known.slots == slots and known.specs == tuple(
                self._specs
            ) and known.consts == step.consts and known.lists == lists:  # fmt: skip
                self._last = known
                return known
        copy = Step(here, step.op, node, variant, slots, step.consts, lists, tuple(self._specs))
        copy.risky, copy.notes, copy.tape = step.risky, step.notes, step.tape
        copy.settle_plain()
        self.added.append(copy)
        self._last = copy
        return copy

    def record(self, record: FunctionRecord) -> FunctionRecord:
        """Returns what tapes record of an operation with a library's backward function."""
        added = len(self.feeds)
        some = record.inputs, record.outputs, record.held
        inputs, outputs, held = ([self._slot(s, None) if isinstance(s, int) else s for s in each] for each in some)
        if len(self.feeds) > added:
            raise Refused("a backward function in it takes a tensor that no operation takes")
        return record._replace(inputs=inputs, outputs=outputs, held=held)

    def _node(self, step: Step) -> tuple[Node, Variant]:
        """Returns the node of the operation in this turn of the loops around, and its variant."""
        graph, node, variant = self._run.graph, step.node, step.variant
        assert node is not None
        assert variant is not None
        frames, op = node.location.frames, node.op
        location = Location(frames, self._run.cursor.counts()[frames, op] + self._issued[frames, op])
        self._issued[frames, op] += 1
        if node.location != location:
            found = graph.find(op, node.entry, node.attrs, location)
            found = found or graph.repeat(op, node.entry, node.attrs, location)
            if found is None or found.head is not node.head or variant.key not in found.variants:
                raise Refused("an operation of it is not known in this turn of a loop")
            node, variant = found, found.variants[variant.key]
        if (node.host is not None and not variant.folded) or node.fed.intersection(step.constant_inputs()):
            raise Refused("an operation of it is not what it was")
        return node, variant

    def _slot(self, slot: int, part: Any) -> int:
        """Returns the place of a tensor in the running segment; `part`: its spec as the operation knows it."""
        if slot >= self._start.end:
            return slot - self._start.end + self._here.end
        number = self._by_slot.get(slot)
        if number is not None:
            return self._argument(number, part)
        if slot >= 0:
            raise Refused("it uses a tensor that it was not given")
        k = -1 - slot
        if k < self._start.external:
            return self._feed(self._pinned[k], ("same", self._pinned[k]), part)
        source, value = self._source.feeds[k - self._start.external]
        if source == "argument":
            return self._argument(value, part)
        if source == "same":
            return self._feed(value, (source, value), part)
        if source == "number":  # converted anew in each call
            return self._add(("number", k), (source, value), value[0])
        raise Refused(f"it is fed a {source}")

    def _argument(self, number: int, part: Any) -> int:
        place = self.places[number]
        if place is not None:
            return place
        return self._feed(unwrap(self._arguments.tensors[number]), ("argument", number), part)

    def _feed(self, real: Any, source: tuple[str, Any], part: Any) -> int:
        """Returns the slot of a feed, which is a new one, or that of an operation before."""
        if source[0] == "same" and id(real) in self._given:
            raise Refused("it holds a tensor that it is given")
        place = self._run.cursor.place(real)
        if place is not None:
            self.pins[place] = real
            return -1 - place
        spec = spec_of(real)
        if part is not None and spec is not part:
            raise Refused("a tensor that it takes is of another spec")
        if spec.enum == RESOURCE:
            self.handles.add(id(real))
        return self._add(id(real), source, spec)

    def _add(self, key: Any, source: tuple[str, Any], spec: Any) -> int:
        """Returns the slot of a new feed, once for each key."""
        if key not in self._new:
            self._new[key] = self._here.external + len(self.feeds)
            self._specs.append(spec)
            self.feeds.append(source)
        return -1 - self._new[key]


def _moved(form: Any, by: int) -> Any:
    """Returns the form of a result with the numbers of its tensors moved."""
    kind = form[0]
    if kind is list or kind is tuple:
        return kind, [_moved(each, by) for each in form[1]]
    if kind is dict:
        return kind, {name: _moved(each, by) for name, each in form[1].items()}
    if kind == "named":
        return kind, form[1], [_moved(each, by) for each in form[2]]
    if kind == "slices":
        return kind, *[_moved(each, by) for each in form[1:]]
    if kind == "marked":
        return kind, _moved(form[1], by), {name: _moved(each, by) for name, each in form[2].items()}
    return (kind, form[1] + by) if kind == "tensor" else form
