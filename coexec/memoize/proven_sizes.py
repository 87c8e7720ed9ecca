"""Proven sizes: at which sizes a call memoized on a dynamic path may be skipped.

What such a call does with sizes was fitted to those of two calls. By chance, a function of other sizes may have had
the same values there. So it must have agreed with runs of the call's Python: a size may be any once two others than
those it was fitted to have been seen in such runs, and until then must be one that was. Where that Python may choose by
`n < 20`, and both ways give results of one shape, it may be any in between those. (`tf.image.central_crop` crops
nothing of small images.) Nor may two sizes compare otherwise than in a run. (`tf.linalg.lstsq` solves tall and wide
systems by other formulas.) Nor may their sum, difference or product be another one, if it was the same in all runs:
what follows from it was a constant, as the tokens of batches that are cut into few long rows or many short ones.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from coexec.base.tuning import tuning
from tracer.graph import Step
from tracer.sizes import DynamicSpec
from tracer.spec import RESOURCE, VARIANT, Spec


class ProvenSizes:
    """The sizes at which one call's runs have agreed, by open dimension."""

    def __init__(self, start: Step, end: Step) -> None:
        specs = [spec for step in end.chain() for spec in step.specs]
        self._new = specs[start.external :]
        self._open = [
            (k, axis, {shape[axis] for shape in spec.fitted})
            for k, spec in enumerate(specs)
            if isinstance(spec, DynamicSpec)
            for axis, dim in enumerate(spec.dims)
            if dim is None
        ]
        # The sizes of runs: of these dimensions, and, of a gradient, of those of earlier segments on its tape.
        self._runs: dict[tuple[int, ...], None] = {}
        self._seen: list[_Seen] = []  # by dimension
        # How two that differ have compared, and which of `_RELATIONS` were the same in all runs; None: too many.
        self._pairs: dict[tuple[int, int], _Pair] | None = {}
        self._held: set[tuple[bool, tuple[Any, ...]]] = set()  # sizes that are known to hold

    def add(self, feeds: Sequence[Any], before: Sequence[Any]) -> None:
        """Adds the sizes of a run, given the segment's feeds, and the shapes of those of segments on its tape."""
        sizes = self._sizes(feeds, before)
        if sizes in self._runs:
            return
        if len(self._seen) != len(sizes):
            self._runs.clear()
        if len(self._runs) >= tuning.max_proven_sizes:
            del self._runs[next(iter(self._runs))]
        self._runs[sizes] = None
        # Hundreds of dimensions are of few sizes, as all of a batch: those that never differed are compared as one.
        first: dict[tuple[int, ...], int] = {}
        columns = list(zip(*self._runs, strict=True))
        like = [first.setdefault(column, number) for number, column in enumerate(columns)]
        self._seen = [_Seen.of(like[n], column, self._fitted(n)) for n, column in enumerate(columns)]
        pairs = itertools.combinations(first.values(), 2) if len(first) <= tuning.max_compared_sizes else None
        self._pairs = None if pairs is None else {(i, j): _Pair.of(columns[i], columns[j]) for i, j in pairs}
        self._held.clear()

    def hold(self, earlier: Sequence[Any], new: Sequence[Any], before: Sequence[Any], bounded: bool) -> bool:
        """Returns whether the call may be skipped with these feeds: those from before it, and its own.

        Of those that are numbers, `new` has None. `before`: the shapes of the feeds of segments on its tape; `bounded`:
        whether its Python may choose by sizes.
        """
        if not self.admit(earlier, new):
            return False
        sizes = self._sizes([*earlier, *new], before)
        if (bounded, sizes) in self._held or sizes in self._runs:
            return True
        if len(sizes) != len(self._seen) or self._pairs is None:
            return False
        known = [(n, size, self._seen[n]) for n, size in enumerate(sizes) if size is not None]
        if not all(seen.admits(size, bounded) and sizes[seen.like] in (size, None) for _, size, seen in known):
            return False
        firsts = [(n, size) for n, size, seen in known if seen.like == n]
        if not all(self._pairs[i, j].admits(a, b) for (i, a), (j, b) in itertools.combinations(firsts, 2)):
            return False
        if len(self._held) >= tuning.max_sizes:
            self._held.clear()
        self._held.add((bounded, sizes))
        return True

    def _sizes(self, feeds: Sequence[Any], before: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the sizes of all; None for what is made of Python's numbers, whose sizes follow from others."""
        own = (None if feeds[k] is None else feeds[k]._shape_tuple()[axis] for k, axis, _ in self._open)
        return *own, *_flat(before)

    def _fitted(self, number: int) -> set[int]:
        """Returns the sizes that a dimension was fitted to: of one of an earlier segment, the first one seen here."""
        return self._open[number][2] if number < len(self._open) else {next(iter(self._runs))[number]}

    def admit(self, earlier: Sequence[Any], new: Sequence[Any]) -> bool:
        """Returns whether the call's steps take such feeds, given those from before it."""
        feeds = [*earlier, *new]
        specs = enumerate(zip(self._new, new, strict=True), len(earlier))
        return all(feed is None or _admits(spec, feed, feeds[:k]) for k, (spec, feed) in specs)


def _flat(shapes: Any) -> Iterator[int]:
    for shape in shapes:
        if isinstance(shape, tuple):
            yield from _flat(shape)
        else:
            yield shape


def _admits(spec: Spec, feed: Any, before: Sequence[Any]) -> bool:
    if spec.enum in (RESOURCE, VARIANT):
        return True
    if feed._datatype_enum() != spec.enum:
        return False
    shape = feed._shape_tuple()
    return spec.admits(shape, before) if isinstance(spec, DynamicSpec) else bool(shape == spec.shape)


class _Seen(NamedTuple):
    """The sizes of one dimension in runs."""

    like: int  # the first dimension that has had the same ones
    sizes: frozenset[int]
    least: int
    largest: int
    may_be_others: bool

    @classmethod
    def of(cls, like: int, column: Sequence[int], fitted: set[int]) -> _Seen:
        sizes = frozenset(column)
        both = sizes | fitted
        return cls(like, sizes, min(both), max(both), len(sizes - fitted) >= tuning.proven_sizes)

    def admits(self, size: int, bounded: bool) -> bool:
        """Returns whether the dimension may be of a size; if `bounded`, only of one in between."""
        if size in self.sizes:
            return True
        return self.may_be_others and (not bounded or self.least < size < self.largest)


class _Pair(NamedTuple):
    """How two dimensions have been to each other in runs."""

    orders: frozenset[int]
    same: tuple[int | None, ...]  # for each relation, what it has given in all runs

    @classmethod
    def of(cls, one: Sequence[int], other: Sequence[int]) -> _Pair:
        found = [set(map(relation, one, other)) for relation in _RELATIONS]
        return cls(
            frozenset(map(_order, one, other)), tuple([each.pop() if len(each) == 1 else None for each in found])
        )

    def admits(self, one: int, other: int) -> bool:
        """Returns whether the dimensions may be of these sizes."""
        return _order(one, other) in self.orders and all(
            known is None or relation(one, other) == known
            for relation, known in zip(_RELATIONS, self.same, strict=True)
        )


_RELATIONS = operator.add, operator.sub, operator.mul


def _order(one: int, other: int) -> int:
    return (one > other) - (one < other)
