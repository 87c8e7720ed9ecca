"""Proven sizes: at which sizes a call memoized on a dynamic path may be skipped.

What such a call does with sizes was fitted to those of two calls. By chance, a function of other sizes may have had
the same values there. So it must have agreed with runs of the call's Python: a size may be any once two others than
those it was fitted to have been seen in such runs, and until then must be one that was. Where that Python may choose by
`n < 20`, and both ways give results of one shape, it may be any in between those. (`tf.image.central_crop` crops
nothing of small images.) Nor may two sizes compare otherwise than in a run. (`tf.linalg.lstsq` solves tall and wide
systems by other formulas.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

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
        # The sizes seen in runs: of these dimensions, and, of a gradient, of those of earlier segments on its tape.
        self._seen: list[set[int]] = []
        self._orders: dict[tuple[int, int], set[int]] = {}  # how two of them have compared
        self._held: set[tuple[bool, tuple[Any, ...]]] = set()  # sizes that are known to hold

    def add(self, feeds: Sequence[Any], before: Sequence[Any]) -> None:
        """Adds the sizes of a run, given the segment's feeds, and the shapes of those of segments on its tape."""
        sizes = self._sizes(feeds, before)
        if len(self._seen) != len(sizes):
            self._seen, self._orders = [set() for _ in sizes], {}
        for seen, size in zip(self._seen, sizes, strict=True):
            if len(seen) >= tuning.max_proven_sizes:
                if min(seen) <= size <= max(seen):
                    continue
                seen.remove(min(seen) if size < min(seen) else max(seen))
            seen.add(size)
        for pair, order in _orders(sizes):
            self._orders.setdefault(pair, set()).add(order)
        self._held.clear()

    def hold(self, earlier: Sequence[Any], new: Sequence[Any], before: Sequence[Any], bounded: bool) -> bool:
        """Returns whether the call may be skipped with these feeds: those from before it, and its own.

        Of those that are numbers, `new` has None. `before`: the shapes of the feeds of segments on its tape; `bounded`:
        whether its Python may choose by sizes.
        """
        if not self.admit(earlier, new):
            return False
        sizes = self._sizes([*earlier, *new], before)
        if (bounded, sizes) in self._held:
            return True
        if len(sizes) != len(self._seen) or not all(self._is_proven(n, size, bounded) for n, size in enumerate(sizes)):
            return False
        if not all(order in self._orders[pair] for pair, order in _orders(sizes)):
            return False
        if len(self._held) >= tuning.max_sizes:
            self._held.clear()
        self._held.add((bounded, sizes))
        return True

    def _sizes(self, feeds: Sequence[Any], before: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the sizes of all; None for what is made of Python's numbers, whose sizes follow from others."""
        own = (None if feeds[k] is None else feeds[k]._shape_tuple()[axis] for k, axis, _ in self._open)
        return *own, *_flat(before)

    def _is_proven(self, number: int, size: int | None, bounded: bool) -> bool:
        seen = self._seen[number]
        fitted = self._open[number][2] if number < len(self._open) else set()
        others = len(seen - fitted) - (not fitted)  # of earlier segments, nothing was fitted here
        if size is None or size in seen:
            return True
        if others < tuning.proven_sizes:
            return False
        return not bounded or min(seen | fitted) < size < max(seen | fitted)

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


def _orders(sizes: Sequence[int | None]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yields pairs of dimensions with how their sizes compare: -1, 0 or 1."""
    for (i, one), (j, other) in itertools.combinations(enumerate(sizes), 2):
        if one is not None and other is not None:
            yield (i, j), (one > other) - (one < other)
