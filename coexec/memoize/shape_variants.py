"""Shape variants: regions that do the same at other sizes, or on another path; with one, one run suffices.

Two runs must agree on what a library call does, as a single one might have done something that it does only once. If
the same call at the same place, on the same objects, has performed the same operations twice at another size, the first
run at a new size is the third that agrees. The region is still learnt from that run; only the second one is saved. On
another path, at the same sizes, the second run of the call may as well be the first there.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from coexec.base.tuning import tuning
from coexec.follow.backward import FunctionRecord
from coexec.memoize.entry import Region
from coexec.memoize.step_range import steps_between
from tracer.graph import CONST, LIST, Step
from tracer.library import gradient
from tracer.op import Const, freeze, same


class ShapeVariants:
    """The regions of one function that have been learnt, by call and place."""

    def __init__(self) -> None:
        self._known: dict[Any, deque[weakref.ref[Region]]] = {}  # confirmed ones
        self._once: dict[Any, deque[weakref.ref[Region]]] = {}  # the first runs of others

    def of(self, place: Any) -> KnownVariants:
        """Returns the possible variants of a region that is about to be learnt; `place`: see `place_of_call`."""
        return KnownVariants(self._known, self._once, place)


def place_of_call(function: Any, anchors: list[Any], frames: Any) -> Any:
    """Returns what identifies a call on all paths and in all iterations: the function, its objects, the lines."""
    return function, tuple(map(id, anchors)), frames


class KnownVariants:
    """The known variants of one call at one place; false if there are none."""

    def __init__(
        self, all_known: dict[Any, deque[weakref.ref[Region]]], once: dict[Any, deque[weakref.ref[Region]]], key: Any
    ) -> None:
        self._all, self._once, self._key = all_known, once, key
        known = all_known.get(key, ())
        self._before = [(r, r.version) for ref in known if (r := ref()) is not None and r.confirmed > 1]
        self._ran_once = [r for ref in once.get(key, ()) if (r := ref()) is not None and r.confirmed == 1]
        # Those whose guards hold before the run; they are checked again after it.
        both = *(r for r, _ in self._before), *self._ran_once
        self._held = {id(r) for r in both if r.state_guards is None or r.state_guards.hold()}

    def __bool__(self) -> bool:
        return bool(self._before)

    def same_as(self, region: Region) -> Region | None:
        """Returns one that runs the same code as a region that has not been learnt yet, and whose guards hold."""
        for known, _ in self._before:
            if region.alike is None or known.alike != region.alike or known.reads is None or known.end.dynamic:
                continue
            if id(known) in self._held and known.reads.hold():
                return known
        return None

    @property
    def reached(self) -> list[Any]:
        """The Keras objects that the program's code reads in any of them."""
        both = *(region for region, _ in self._before), *self._ran_once
        return [v for region in both for ref in region.reached if (v := ref()) is not None]

    def variant_of(self, region: Region) -> Region | None:
        """Returns a variant that does what this region did in its first run; None if there is none."""
        for known, version in self._before:
            if known is region or known.version != version or known.confirmed < 2 or id(known) not in self._held:
                continue
            if (known.state_guards is None) is not (region.state_guards is None):
                continue
            if (known.state_guards is None or known.state_guards.hold()) and _agree(region, known):
                return known
        return None

    def repeated(self, region: Region) -> Region | None:
        """Returns one on another path that did in its only run what this region, of the same code, did in its first."""
        for known in self._ran_once:
            if known is region or known.confirmed != 1 or region.alike is None or known.alike != region.alike:
                continue
            if known.state_guards is None:
                holds = region.state_guards is None and known.reads is not None and known.reads.hold()
            else:
                holds = region.state_guards is not None and id(known) in self._held and known.state_guards.hold()
            if holds and _agree(region, known, exact=True):
                return known
        return None

    def ran_once(self, region: Region) -> None:
        """Adds a region after its first run."""
        self._add(self._once, region)

    def confirmed(self, region: Region) -> None:
        """Adds a confirmed region as the most recent variant."""
        self._add(self._all, region)

    def _add(self, places: dict[Any, deque[weakref.ref[Region]]], region: Region) -> None:
        known = places.get(self._key)
        if known is None:
            if len(places) >= tuning.max_twin_places:
                places.clear()
            known = places[self._key] = deque(maxlen=tuning.max_twins)
        elif known and known[0]() is region:
            return
        for ref in list(known):
            if ref() is None or ref() is region:
                known.remove(ref)
        known.appendleft(weakref.ref(region))


def _agree(one: Region, other: Region, exact: bool = False) -> bool:
    """Whether two regions do the same, up to tensor sizes and numbers derived from them, or with the same numbers."""
    mine, its = steps_between(one.start, one.end), steps_between(other.start, other.end)
    if mine is None or its is None or len(mine) != len(its) or one.read or other.read or one.calls or other.calls:
        return False
    wiring, other_wiring = _Wiring(one, exact), _Wiring(other, exact)
    if not all(_alike(a, wiring, b, other_wiring) for a, b in zip(mine, its, strict=True)):
        return False
    return (
        one.seeds == other.seeds
        and one.context == other.context
        and _recorded(one, wiring) == _recorded(other, other_wiring)
        and list(map(id, one.accessed)) == list(map(id, other.accessed))
        and _form(one.result, wiring) == _form(other.result, other_wiring)
    )


class _Wiring:
    """Names the inputs of a region's operations by source, independent of where in its segment the region begins."""

    def __init__(self, region: Region, exact: bool) -> None:
        self.exact = exact  # whether numbers must be the same
        self._first, self._external = region.start.end, region.start.external
        self._absolute = region.function is gradient  # it takes what its tape has recorded
        self._places, self._feeds, self._pins = region.places, region.feeds, dict(region.pins)

    def name(self, slot: int) -> Any:
        """Returns the name of a slot."""
        if slot in (CONST, LIST):
            return slot
        if slot >= self._first:
            return "inside", slot - self._first
        if slot in self._places:
            return "argument", self._places.index(slot)
        feed = -1 - slot
        if feed >= self._external:  # as it would be named if the segment had fed it before
            return _source(self._feeds[feed - self._external], self.exact)
        if feed in self._pins:
            return _source(("same", self._pins[feed]), self.exact)
        return "earlier", slot if self._absolute else None


def _recorded(region: Region, wiring: _Wiring) -> list[Any]:
    """Returns what tapes record of a region, independent of where it begins."""
    return [
        (each.op, each.closed, [wiring.name(slot) if isinstance(slot, int) else None for slot in each.slots()])
        if isinstance(each, FunctionRecord)
        else each.depth - region.start.depth
        for each in region.recorded
    ]


def _alike(one: Step, wiring: _Wiring, other: Step, other_wiring: _Wiring) -> bool:
    """Whether two steps are the same operation with the same wiring, up to sizes."""
    a, b = one.node, other.node
    if a is None or b is None or a.head is not b.head or (a is not b and freeze(a.attrs) != freeze(b.attrs)):
        return False
    if one.variant is None or other.variant is None or one.variant.template != other.variant.template:
        return False
    if len(one.slots) != len(other.slots) or len(one.outputs) != len(other.outputs):
        return False
    if any(wiring.name(x) != other_wiring.name(y) for x, y in zip(one.slots, other.slots, strict=True)):
        return False
    if not _consts_alike(one.consts, other.consts, wiring.exact) or one.lists.keys() != other.lists.keys():
        return False
    for i, (slots, consts) in one.lists.items():
        known, its = other.lists[i]
        if list(map(wiring.name, slots)) != list(map(other_wiring.name, known)):
            return False
        if not _consts_alike(consts, its, wiring.exact):
            return False
    return all(
        x.spec.enum == y.spec.enum and (x.const is None) is (y.const is None)
        for x, y in zip(one.outputs, other.outputs, strict=True)
    )


def _consts_alike(some: dict[int, Const], others: dict[int, Const], exact: bool) -> bool:
    alike = same if exact else _alike_but_for_sizes
    return some.keys() == others.keys() and all(alike(c.value, others[i].value) for i, c in some.items())


def _alike_but_for_sizes(one: Any, other: Any) -> bool:
    """Whether two plain values are the same, or both numbers: a mean's gradient divides by a size as a float."""
    if _is_of_sizes(one) and _is_of_sizes(other):
        return True
    return same(one, other)


def _is_of_sizes(value: Any) -> bool:
    kind = type(value)
    if kind is int or kind is float:
        return True
    if kind is list or kind is tuple:
        return all(map(_is_of_sizes, value))
    return getattr(getattr(value, "dtype", None), "kind", None) in ("i", "f")


def _source(feed: tuple[str, Any], exact: bool) -> Any:
    source, value = feed
    if source == "same":
        return source, id(value)
    if source == "number":
        spec, const = value
        return source, spec.enum, None if _is_of_sizes(const.value) and not exact else freeze(const.value)
    return source, value


def _form(form: Any, wiring: _Wiring) -> Any:
    """Returns the form of a result with its tensors named by `wiring`, for comparison."""
    kind = form[0]
    if kind is list or kind is tuple:
        return kind, [_form(f, wiring) for f in form[1]]
    if kind is dict:
        return kind, [(name, _form(f, wiring)) for name, f in form[1].items()]
    if kind == "slices":
        return kind, [_form(f, wiring) for f in form[1:]]
    if kind == "marked":
        return kind, _form(form[1], wiring), [(name, _form(f, wiring)) for name, f in form[2].items()]
    if kind == "tensor":
        return kind, wiring.name(form[1])
    if kind == "constant":
        return kind, form[1].spec.enum
    if kind == "object":
        value = form[1]
        return kind, freeze(value) if type(value) in (str, float, int) else id(value)
    return form


def interior_of(twin: Region, region: Region) -> list[int]:
    """Returns the numbers of a region's tensors that only tapes hold, translated from a variant."""
    return [n - twin.start.end + region.start.end for n in twin.interior]
