"""Feed sources: where the feeds of a library call come from, so that they can be had again without its Python."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.follow.follower import Follower
from coexec.guards.call_key import CallArguments, CannotMemoizeForLong
from coexec.memoize.region_tape_entry import RegionEntry
from tracer.graph import Step
from tracer.inputs import small
from tracer.lazy import unwrap
from tracer.op import Const, array_in
from tracer.sizes import UNKNOWN, DynamicSpec
from tracer.spec import Spec, spec_of


def is_kept(tensor: Any) -> bool:
    """Returns whether a tensor is small enough for a memoized call to keep the array that it was made of."""
    kind, size = tensor.dtype, tensor._num_elements() * tensor.dtype.size
    return bool(kind.is_numpy_compatible and kind != tf.string and size <= tuning.max_array)


class FeedSources:
    """The sources of the feeds of one run of a call: pairs of a kind and what finds the tensor again."""

    def __init__(self, run: Follower, start: Step, arguments: CallArguments, entries: list[Any]) -> None:
        """`start`: the step before the call; `entries`: of a gradient, the records on its tape."""
        self._run, self._start, self._arguments, self._entries = run, start, arguments, entries
        self._base, self._externals = run.cursor.base, run.cursor.externals  # of the segment in which the call begins

    @functools.cached_property
    def known(self) -> dict[int, tuple[str, Any]]:
        """Sources by id: of arguments, and of what the gradient's tape has recorded."""
        found: dict[int, tuple[str, Any]] = {}
        for number, known in enumerate(self._arguments.tensors):
            found.setdefault(id(known), ("argument", number))
        for at, entry in enumerate(self._entries):
            for tensor, place in entry.places():
                found.setdefault(id(tensor), ("earlier", (at, place)))
        return found

    def of(self, value: Any) -> tuple[str, Any]:
        """Returns the source of a feed: an argument, the tape, a Python number or array, or the tensor itself."""
        known = self.known.get(id(value))
        if known is not None:
            return known
        array = self._converted(value)
        return ("same", value) if array is None else ("number", (spec_of(value), Const(array)))

    def is_recorded(self, value: Any) -> bool:
        """Returns whether a feed is known to be the same one wherever a gradient's tape has recorded the same."""
        return id(value) in self.known or id(value) in self._constants or id(value) in self._fed_by_regions

    @functools.cached_property
    def _fed_by_regions(self) -> set[int]:
        """The ids of what memoized calls on the tape have fed to that segment."""
        found: set[int] = set()
        for entry in self._entries:
            if type(entry) is RegionEntry and entry.base >= self._base and entry.version == entry.region.version:
                region = entry.region
                found.update(map(id, self._externals[region.start.external : region.end.external]))
        return found

    def _converted(self, value: Any) -> Any:
        """Returns the array that a tensor was made of in this call; None if it was not, or if that is too large."""
        run = self._run
        if id(value) in run.cursor.numbers or id(value) in run.arrays or id(value) in self._recorded_constants:
            array = array_in(value)
            # On a dynamic path, what is not small may depend on sizes: only numbers are compared with these.
            if small(array) or (not run.cursor.step.dynamic and is_kept(value)):
                return array
        return None

    @functools.cached_property
    def _recorded_constants(self) -> set[int]:
        """The ids of tensors that a gradient's tape has for constants; these may depend on sizes on a dynamic path."""
        return set() if self._start.dynamic else self._constants

    @functools.cached_property
    def _constants(self) -> set[int]:
        return {id(unwrap(v)) for entry in self._entries for v in entry.constants()}

    def sized(self, feed: tuple[str, Any], spec: Spec) -> tuple[str, Any]:
        """Returns the source of a feed, by sizes if it is a number that follows from them."""
        if feed[0] == "number" and isinstance(spec, DynamicSpec) and spec.value is not None:
            if spec.value is UNKNOWN:
                raise CannotMemoizeForLong("a number in it may depend on sizes, which differ between calls")
            if feed[1][1].value == spec.value.at(self._run.cursor.externals):
                return "size", spec
        return feed
