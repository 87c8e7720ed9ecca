"""Proven sizes: at which sizes a call memoized on a dynamic path may be skipped.

What such a call does with sizes was fitted to those of two calls. By chance, a function of other sizes may have had
the same values there. So it must have agreed with runs of the call's Python: a size may be any once two others than
those it was fitted to have been seen in such runs, and until then must be one that was.
"""

from __future__ import annotations

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
        self._seen = [
            (k, axis, {shape[axis] for shape in spec.fitted}, set[int]())
            for k, spec in enumerate(specs)
            if isinstance(spec, DynamicSpec)
            for axis, dim in enumerate(spec.dims)
            if dim is None
        ]
        self._before: list[set[int]] | None = None  # of a gradient: sizes of earlier segments on its tape
        self._any = False  # whether all may be any size

    def add(self, feeds: Sequence[Any], before: Sequence[Any]) -> None:
        """Adds the sizes of a run, given the segment's feeds, and the shapes of those of segments on its tape."""
        sizes = list(_flat(before))
        if self._before is None or len(self._before) != len(sizes):
            self._before = [set() for _ in sizes]
        for seen, size in zip(self._before, sizes, strict=True):
            if len(seen) < tuning.max_proven_sizes:
                seen.add(size)
        for k, axis, _, seen in self._seen:
            if len(seen) < tuning.max_proven_sizes:
                seen.add(feeds[k]._shape_tuple()[axis])
        self._any = all(len(seen - fitted) >= tuning.proven_sizes for _, _, fitted, seen in self._seen)

    def hold(self, earlier: Sequence[Any], new: Sequence[Any], before: Sequence[Any]) -> bool:
        """Returns whether the call may be skipped with these feeds: those from before it, and its own.

        Of those that are numbers, `new` has None. `before`: the shapes of the feeds of segments on its tape.
        """
        sizes = list(_flat(before))
        if self._before is None or len(self._before) != len(sizes):
            return False
        if not all(len(seen) > tuning.proven_sizes or n in seen for n, seen in zip(sizes, self._before, strict=True)):
            return False
        if not self.admit(earlier, new):
            return False
        if self._any:
            return True
        feeds = [*earlier, *new]
        return all(
            len(seen - fitted) >= tuning.proven_sizes or feeds[k]._shape_tuple()[axis] in seen
            for k, axis, fitted, seen in self._seen
        )


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
