"""Tape forms: what a tape has recorded, whatever path the call took, and where its segments began and ended.

A gradient's key names tensors by their places on the path. Calls that choose among ways have ever other paths, which
often differ in nothing that a gradient depends on, as in what a decoder is fed next, or in where a segment was cut:
then the gradient is known by its form. A form names tensors by the record that gave them, or by when they first appear,
and operations by what they do. (A decoder with scheduled sampling, of 500 records, learnt 1400 operations of its
gradient in each call, at 2.5 times eager's time.)

Records that give no differentiable tensors, or none that leads to a target, are left out. The former may have an
influence on the order in which TensorFlow sums up gradients, and so on their last bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from coexec.follow.backward import LibraryEntry
from coexec.follow.tape_entry import Entry, NamedEntry, identities
from coexec.guards.arguments import GivenTensors
from coexec.guards.call_key import CallArguments, CannotMemoize
from coexec.memoize.entry import Region
from coexec.memoize.fed_tensors import FedTensors
from coexec.memoize.region_tape_entry import RegionEntry
from coexec.memoize.step_range import steps_between
from tracer.cursor import Cursor
from tracer.graph import CONST, LIST, Step
from tracer.lazy import LazyTensor
from tracer.private import EagerTensor
from tracer.spec import spec_of

_NO_FORM = "its tape has records whose form is not known"


class TapeForm:
    """What a gradient is given, by names that do not depend on the path; `key` is equal where gradients do the same."""

    def __init__(
        self, cursor: Cursor, entries: Sequence[Any], watches: Iterable[tuple[Any, int]], targets: Iterable[Any]
    ) -> None:
        """`watches`: watched tensors, each with the number of records before. Raises `CannotMemoize`."""
        self._cursor = cursor
        self._entries = entries
        self._kept = _leading_to(targets, entries)  # the numbers of those records that the gradient goes through
        self._names = _Names(cursor)
        self._records = tuple([_record(entries[at], self._names) for at in self._kept])
        self._constants = FedTensors(cursor)  # their names do not tell where they are
        for number, at in enumerate(self._kept if self._constants.may_be_constants else ()):
            self._constants.add_constants(number, entries[at])
        self._watched = tuple([(self._names.of(tensor), bisect_left(self._kept, before)) for tensor, before in watches])
        self.key: Any = None

    def ask(self, kind: Any, args: Any, kwargs: Any, anchors: Iterable[Any], tape: Any) -> None:
        """Sets the key of a gradient with these arguments; `kind`: what else it depends on; `anchors`: variables.

        Raises `CannotMemoize`.
        """
        given = _NamedArguments(self._cursor, self._names).key((args, kwargs))
        trained = frozenset([self._names.known(getattr(v, "handle", None)) for v in tape.watched_variables()])
        handles = tuple(map(self._names.of, anchors))
        places = *self._names.places, *self._constants.all()
        self.key = kind, self._records, self._watched, given, handles, trained, places
        try:
            hash(self.key)
        except TypeError as error:  # attributes that cannot be compared
            raise CannotMemoize(str(error)) from None

    def given(self, arguments: CallArguments) -> Given:
        """Returns what to find again in another call whose form has this key."""
        entries = [self._entries[at] for at in self._kept]
        regions = [entry.region for entry in entries if type(entry) is RegionEntry]
        return Given(tuple(map(self._names.of, arguments.given)), self._kept, regions)

    def arguments(self, known: Given) -> GivenTensors | None:
        """Returns the arguments of a gradient known by this form as they are in this call; None if one is missing."""
        given = [self._names.tensors.get(name) for name in known.names]
        if any(tensor is None for tensor in given):
            return None
        return GivenTensors(self._cursor, [_taken(tensor) for tensor in given], given)

    def entries(self, known: Given) -> dict[int, Any]:
        """Returns the records of this call's tape by the numbers that they had in the other one."""
        return dict(zip(known.kept, (self._entries[at] for at in self._kept), strict=True))


class Given(NamedTuple):
    """What a gradient was given: the names of its arguments in order, and the numbers of the records in its form.

    The memoized calls among these keep alive what its key names by id.
    """

    names: tuple[Any, ...]
    kept: list[int]
    regions: list[Region]

    def is_all_of(self, region: Region) -> bool:
        """Returns whether it is all that a gradient was given, which is neither recorded nor calls any function."""
        earlier = {value[0] for source, value in region.feeds if source == "earlier"}
        return not (region.recorded or region.calls) and earlier.issubset(self.kept)


def _leading_to(targets: Iterable[Any], entries: Sequence[Any]) -> list[int]:
    """Returns the numbers of the records on which targets depend; TensorFlow goes through no others."""
    needed = {id(known) for target in targets for known in identities(target)}
    kept = []
    for at in range(len(entries) - 1, -1, -1):
        entry = entries[at]
        if any(id(known) in needed for tensor in entry.results() for known in identities(tensor)):
            kept.append(at)
            needed.update(id(known) for tensor in entry.given() for known in identities(tensor))
    return kept[::-1]


def _taken(tensor: Any) -> Any:
    """Returns a tensor as `CallArguments` has it."""
    return tensor if type(tensor) is not LazyTensor or tensor._value is None else tensor._value


class _NamedArguments(CallArguments):
    """A gradient's arguments, with tensors by their names."""

    def __init__(self, cursor: Cursor, names: _Names) -> None:
        super().__init__(cursor)
        self._names = names

    def _tensor(self, value: Any) -> Any:
        return self._names.of(value)


class _Names:
    """The names of tensors: record and number of what gave them; a number and spec of those from elsewhere."""

    def __init__(self, cursor: Cursor) -> None:
        self.tensors: dict[Any, Any] = {}  # by their names
        # The places that named tensors have in the running segment, where the gradient's operations find them.
        self.places: list[tuple[Any, int]] = []
        self.records = 0
        self._cursor = cursor
        self._known: dict[int, Any] = {}
        self._count = 0

    def of(self, tensor: Any) -> Any:
        """Returns the name of a tensor, or of a variable's handle; None for what has none."""
        if not isinstance(tensor, EagerTensor):
            tensor = getattr(tensor, "handle", None)
        if tensor is None:
            return None
        known = self._known.get(id(tensor))
        if known is None:
            self._count += 1
            spec = tensor._out.spec if type(tensor) is LazyTensor else spec_of(tensor)
            if spec.open:
                raise CannotMemoize("the size of a tensor on its tape depends on values")
            known = self._count, spec.enum, spec.shape, spec.handle
            self._note(tensor, known)
        return known

    def known(self, handle: Any) -> Any:
        """Returns the name of a variable's handle if it has one, else what memoized calls are known to be fed it by."""
        return self._known.get(id(handle), id(handle))

    def made(self, number: Any, tensor: Any) -> None:
        """Names a tensor that the last record has given."""
        self._note(tensor, ("made", self.records, number))

    def _note(self, tensor: Any, name: Any) -> None:
        self.tensors[name] = tensor  # which keeps the ids valid
        for known in identities(tensor):
            self._known[id(known)] = name
        if type(tensor) is LazyTensor and tensor._value is None:
            if tensor._key >= self._cursor.base:
                self.places.append((name, tensor._key - self._cursor.base))
        elif (feed := self._cursor.place(_taken(tensor))) is not None:
            self.places.append((name, -1 - feed))

    def started(self, number: int, base: int) -> None:
        """Notes where the last record's operations are, if that is in the running segment."""
        if base == self._cursor.base:
            self.places.append((("record", self.records), number))


def _record(entry: Any, names: _Names) -> Any:
    """Returns the form of a record, and names what it has given."""
    if type(entry) is RegionEntry:
        if entry.region.early or entry.version != entry.region.version:
            raise CannotMemoize(_NO_FORM)
        given: Sequence[Any] = entry.given()
        first, what = entry.region.start.end, _of_region(entry.region)
        made: Iterable[tuple[Any, Any]] = [(n - first, tensor) for n, tensor in entry.tensors.items() if n >= first]
    elif type(entry) is Entry:
        given, what, made = entry.given(), _operation(entry.step), enumerate(entry.result)
    elif isinstance(entry, (NamedEntry, LibraryEntry)):
        given, what, made = entry.given(), entry.identity(None), enumerate(entry.outputs)  # type: ignore[arg-type]
    else:
        raise CannotMemoize(_NO_FORM)
    form = what, tuple(map(names.of, given)), entry.tapes
    names.records += 1
    if type(entry) is RegionEntry:
        names.started(entry.region.start.end, entry.base)
    for number, tensor in made:
        names.made(number, tensor)
    return form


def _operation(step: Step) -> Any:
    """Returns what an operation does, apart from its tensors."""
    node, variant = step.node, step.variant
    if node is None or variant is None or step.dynamic or step.opened or step.window or node.callee is not None:
        raise CannotMemoize(_NO_FORM)
    lists = tuple([(i, tuple(consts.items())) for i, (_, consts) in step.lists.items()])
    return step.op, node.entry, node.frozen, variant.key, repr(variant.template), tuple(step.consts.items()), lists


def _of_region(region: Region) -> Any:
    """Returns what a memoized call has recorded, apart from what it is given."""
    if region.form is None or region.form[0] != region.version:
        region.form = region.version, _steps_of(region)
    return region.form[1]


def _steps_of(region: Region) -> Any:
    start = region.start
    steps = steps_between(start, region.end)
    if steps is None:
        raise CannotMemoize(_NO_FORM)
    arguments = {slot: n for n, slot in enumerate(region.places)}

    def source(slot: Any) -> Any:
        if isinstance(slot, tuple):  # a constant
            return slot
        if slot in (CONST, LIST) or slot >= start.end:
            return slot if slot < 0 else slot - start.end
        if (number := arguments.get(slot)) is not None:
            return "argument", number
        if slot < 0 and -1 - slot >= start.external:
            kind, value = region.feeds[-1 - slot - start.external]
            return (kind, id(value)) if kind == "same" else (kind, value)
        pinned = dict(region.pins).get(-1 - slot)
        if pinned is None:
            raise CannotMemoize(_NO_FORM)
        return "same", id(pinned)

    done = [
        (_operation(step), tuple(map(source, step.slots)), *(tuple(map(source, on)) for on, _ in step.lists.values()))
        for step in steps
    ]
    places = {id(step): place for place, step in enumerate(steps)}
    recorded = [
        places[id(each)] if isinstance(each, Step) else (each.op, each.closed, tuple(map(source, each.slots())))
        for each in region.recorded
    ]
    return tuple(done), tuple(recorded)
