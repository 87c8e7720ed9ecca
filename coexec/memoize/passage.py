"""Passage: one memoized gradient, skipped except for the program's backward functions in it, which are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coexec.follow.flush import launch_beside
from coexec.follow.follower import Follower
from coexec.follow.tape_entry import identities
from coexec.guards.call_key import CallArguments, CannotMemoize
from coexec.memoize.entry import Region, fill_form
from coexec.memoize.gradient_spans import GradientParts
from tracer.faults import is_fault
from tracer.lazy import eager_constant, new_lazy, unwrap
from tracer.library import call_context
from tracer.location import user_frames


class Passage:
    """One run through such a gradient; `plainly` runs its Python if a function returns something else than before."""

    def __init__(self, run: Follower, region: Region, arguments: Any, number: int, plainly: Callable[[], Any]) -> None:
        self._run, self._region, self._arguments = run, region, arguments
        self._plainly = plainly
        parts: GradientParts = region.parts
        self._parts = parts
        self._entries = run.tapes.entries_of(number)
        self._made: dict[tuple[int, int], Any] = {}
        self._results: list[CallArguments] = []

    def begin(self) -> None:
        """Skips the first span; the region's guards have been checked."""
        self._skip(0)
        self._region.uses += 1

    def go_on(self) -> tuple[Any, bool]:
        """Makes the calls and skips the spans between them; returns the gradient, and whether it was skipped."""
        around = self._run.tapes.around
        assert around is not None
        try:
            for k, known in enumerate(self._parts.calls):
                cotangents = fill_form(known.cotangents, self._tensor)
                try:
                    results = around(self._entries[known.at].backward, cotangents)
                except Exception as error:
                    if is_fault(error):
                        raise
                    return self._plainly(), False  # raises it again, through TensorFlow
                with self._run.lock:
                    if not self._goes_on(k, results):
                        self._region.changed("what a backward function gives")
                        return self._plainly(), False
                    self._skip(k + 1)
            if self._region.context:
                (call_context() or {}).update(self._region.context)
            result = fill_form(self._parts.result, self._tensor)
        except Exception as error:
            if not is_fault(error) or not self._run.fault(error):
                raise
            return self._plainly(), False
        if self._parts.spans[-1].end.pause:
            launch_beside(self._run)
        return result, True

    def _goes_on(self, k: int, results: Any) -> bool:
        """Whether a backward function returned what it did before, so that the next span can be skipped."""
        run, known = self._run, self._parts.calls[k]
        if run.recorder is not None:
            return False
        if run.flight is not None:
            run.flush()
        cursor, span = run.cursor, self._parts.spans[k + 1]
        if cursor.step is not span.start or len(run.values) != span.start.end:
            return False
        if 0 <= run.forced <= cursor.count() + span.end.depth - span.start.depth:
            return False
        steps = self._parts.steps[k + 1]
        if steps and steps[0].checked and not steps[0].is_inside(user_frames()):
            return False
        if not cursor.handles.isdisjoint(self._parts.handles[k + 1]):
            return False
        given = CallArguments(cursor)
        try:
            if given.key(results) != known.key:
                return False
        except CannotMemoize:
            return False
        self._results.append(given)
        if any(cursor.externals[place] is not self._feed(*source) for place, source in span.pins):
            return False
        if not all(self._is_from(source, given.tensors[number]) for number, source in known.same):
            return False
        return all(given.const(number) == const for number, const in known.taken)

    def _is_from(self, source: tuple[str, Any], result: Any) -> bool:
        """Whether a result is the tensor from a source; computes none."""
        tensor = self._arguments.tensors[source[1]] if source[0] == "argument" else self._tensor(source)
        return any(known is result for known in identities(tensor))

    def _skip(self, j: int) -> None:
        run, span = self._run, self._parts.spans[j]
        cursor = run.cursor
        feeds = [self._feed(source, value) for source, value in span.feeds]
        values = run.skip(span.start, span.end, feeds, self._parts.handles[j], first=j == 0)
        if span.notes:
            run.add_notes(span.notes)
        for number in span.kept:
            lazy = new_lazy(self._parts.outputs[j][number], cursor.base + number, run)
            self._made[j, number] = values[number] = lazy

    def _feed(self, source: str, value: Any) -> Any:
        if source == "number":
            spec, const = value
            return eager_constant(const.value, spec)
        return unwrap(self._arguments.tensors[value] if source == "argument" else self._tensor((source, value)))

    def _tensor(self, form: Any) -> Any:
        """Returns a tensor by its source."""
        source, value = form
        if source == "same":
            return value
        if source == "argument":
            return self._arguments.given[value]
        if source == "made":
            return self._made[value]
        if source == "constant":
            return new_lazy(value, -1, self._run)
        if source == "earlier":
            at, place = value
            return self._entries[at].get(place)
        k, number = value
        return self._results[k].given[number]
