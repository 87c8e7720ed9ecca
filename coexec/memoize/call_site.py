"""Call sites: the library calls of one followed call, skipped where a region is known, else run and observed."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from coexec.base.stats import Kind
from coexec.base.tuning import tuning
from coexec.follow.flush import cut_at_join, launch_beside
from coexec.follow.follower import Follower
from coexec.follow.tapes import use_up
from coexec.guards.arguments import ArgumentGuard, GivenTensors, argument_guard_of
from coexec.guards.call_key import CallArguments, CannotMemoize, CannotMemoizeArray
from coexec.guards.class_lookup import is_object, is_watched_object
from coexec.guards.state import LOOKED_AT
from coexec.memoize.array_arguments import call_with_tensors, converts_arrays
from coexec.memoize.call_keys import CallKeys
from coexec.memoize.entry import Region, admit, anchor, fill_form, find, has_other_numbers, repeat_effects, shapes_of
from coexec.memoize.gradient_spans import BackwardCalls
from coexec.memoize.known_calls import KnownCalls, StackCounts
from coexec.memoize.observe import Observation
from coexec.memoize.passage import Passage
from coexec.memoize.redirect import helper_of
from coexec.memoize.region_tape_entry import RegionEntry
from coexec.memoize.relocation import alike_key, relocate
from coexec.memoize.shape_variants import place_of_call
from coexec.memoize.tape_form import Given, TapeForm
from tracer.faults import absorbs, call
from tracer.graph import Step
from tracer.intercept import answering_handler, make_constant, tape_is_empty
from tracer.lazy import LazyTensor, Output, eager_constant, new_lazy, unwrap
from tracer.library import call_context, functions, gradient, is_pure, labelled, without_iterators
from tracer.location import CAUGHT, call_stack, fate, place_of, user_frames
from tracer.sizes import settled
from tracer.variables import notify_watchers, watchers

_new = LazyTensor.__new__


class _NoConstants:
    """Stands for the arguments of a gradient with constants on its tape, whose numbers are part of a full key."""

    @staticmethod
    def key(value: Any) -> Any:
        raise CannotMemoize("a constant is on its tape")


_NO_CONSTANTS: Any = _NoConstants()


class CallSites:
    """The library calls of one followed call."""

    def __init__(self, run: Follower, known: KnownCalls) -> None:
        self.run = run
        self._known = known
        known.calls += 1
        known.recorded.called()
        self._watch_where_affordable()
        self._keys, self._counts = CallKeys(run), StackCounts(run.cursor)
        self._inside = 0.0  # seconds in library calls nested in the running one

    def _watch_where_affordable(self) -> None:
        watching = self._known.watching
        self.run.watch(watching if watching.affords() or self.run.options.validating else None)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a library call for the user: skips it, observes it, or just runs it."""
        if function is not gradient:
            return self._make(function, args, kwargs)
        tapes = self.run.tapes
        before = tapes.around
        if tapes.functions:
            tapes.around = BackwardCalls(self.run)
        try:
            return self._make(function, args, kwargs)
        finally:
            tapes.around = before
            self._keys.entries = []

    def _make(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            args = without_iterators(function, args)
            return self._call(function, args, kwargs)
        except Exception as error:
            if not self.run.fault(error):
                raise
        return call(function, args, kwargs)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arrays: bool = True) -> Any:
        """Finds the region of a call, by its argument guard or its key; skips, observes or just runs the call.

        `arrays`: whether arrays among the arguments may yet become tensors.
        """
        run = self.run
        tapes = run.tapes
        if run.recorder is not None or tapes.foreign:
            return call(function, args, kwargs)
        for known, tally, onward in run.cursor.step.joins:
            if known is function:
                tally.count += 1
                cut_at_join(run, onward)
                break
        pattern: ArgumentGuard[Region] | None = run.cursor.step.pattern
        if pattern is not None and pattern.function is function:
            with run.lock:
                given = self._given(pattern, args, kwargs)
                if given is not None:
                    if pattern.region.calls:
                        passage = self._begin(pattern.region, args, kwargs, given)
                    else:
                        return self._jump(pattern.region, function, args, given)
            if given is not None:
                return self._end(passage, args)
        if run.flight is not None:
            run.flush()
        start: Step = run.cursor.step
        helper = helper_of(function)
        objects = is_watched_object if helper is not None else is_object if is_pure(function) else None
        arguments = CallArguments(run.cursor, objects, function in functions and function not in labelled)
        try:
            key = self._keys.of(function, args, kwargs, arguments)
        except CannotMemoize as reason:
            if arrays and isinstance(reason, CannotMemoizeArray):
                if converts_arrays(function, args):
                    return call_with_tensors(function, args, kwargs, functools.partial(self._call, arrays=False))
            self._known.tell(run.ledger, function, str(reason))
            return self._run_plainly(function, args, kwargs)
        if start.regions is None:
            start.regions = {}
        key, region = find(start.regions, key, arguments.tensors)
        other: Any = None  # a key that leaves out what may not matter
        named: Given | None = None
        if region is None or (region.confirmed < 2 and region.reason is None):
            if function is gradient:
                with run.lock:
                    found, other, named = self._find_by_form(key, args, kwargs, arguments)
                    if region is None and found is not None:
                        return self._jump(found[0], function, args, found[1])
            else:
                other = self._keys.without_sizes(key, args, kwargs, arguments)
                region = region or self._known_without_sizes(other, arguments)
        if region is None:
            place = place_of_call(function, arguments.anchors, call_stack()[0])
            if self._is_at_join(function, start, key, place, arguments.anchors):
                text = f"calls reach {function.__qualname__} by ever other ways: what comes before it"
                tally = run.ledger.cause(Kind.CUT, f"{text} is launched on its own", place_of())
                start.joins = (*start.joins, (function, tally, run.graph.onward_from(place)))
                return self._call(function, args, kwargs)
            if not admit(start.regions, function) and not self._known.recurs(start, key):
                self._known.tell(run.ledger, function, "what it is given keeps changing")
                return self._run_plainly(function, args, kwargs)
            if len(start.regions) >= tuning.max_regions:
                del start.regions[next(iter(start.regions))]
            region = start.regions[key] = Region(start, key, function)
            anchor(region, [*arguments.anchors, *self._keys.kept])
            if function is gradient:
                for entry in self._keys.entries:
                    entry.goes_into(region)
        region.visits += 1
        # Effects cannot be observed under a profiler.
        profiled = sys.getprofile() is not None or (helper is not None and sys.gettrace() is not None)
        due = region.confirmed > 1 and not profiled and region.is_due() and (helper is None or run.watches is not None)
        if due:
            region.schedule()
        fits = False
        if region.confirmed > 1:
            skips = profiled or not (due or run.options.validating)
            with run.lock:
                fits = self._fits(region, arguments)
                if fits and skips:
                    self._note(region, key, args, kwargs)
                    if region.calls:
                        passage = self._begin(region, args, kwargs, arguments)
                    else:
                        return self._jump(region, function, args, arguments)
            if fits and skips:
                return self._end(passage, args)
        if profiled or (helper is not None and run.watches is None):
            return self._run_plainly(function, args, kwargs)
        if region.reason is not None:
            if region.visits < region.retry:
                return self._run_plainly(function, args, kwargs)
            region.retry += min(region.retry, tuning.region_last_retry)
            region.reason = None
        place = place_of_call(function, arguments.anchors, call_stack()[0])
        if region.confirmed == 0:
            region.alike = alike_key(run.cursor, region, args, kwargs)
            if region.is_new() and not run.options.validating and self._relocate(region, arguments, place):
                return self._jump(region, function, args, arguments)
        if region.visits == 1 and (has_other_numbers(start.regions, region) or self._known.is_late(place)):
            return self._run_plainly(function, args, kwargs)
        if function is gradient and self._keys.number in tapes.unsettled and not run.options.validating:
            return self._run_unsettled(region, args, kwargs)
        if run.budget.left <= 0.0:
            text = "learning has taken long enough in this call: what is left is learnt in later ones"
            self._known.tell(run.ledger, function, text)
            return self._run_plainly(function, args, kwargs)
        if region.is_new() and not self._known.admits(place):
            return self._run_plainly(function, args, kwargs)
        learning = Observation(run, region, args, arguments, self._known, fits, place)
        began, before = time.perf_counter(), run.cursor.count()
        try:
            return learning.call(kwargs, functools.partial(self._known.tell, run.ledger, function))
        finally:
            try:
                eager = tuning.eager_operation * (run.cursor.count() - before)
                seconds = time.perf_counter() - began
                if named is not None and named.is_all_of(region):
                    region.given = named
                    self._known.see_otherwise(region, other)
                elif named is None and other is not None and region.end.dynamic:
                    self._known.see_otherwise(region, other)
                run.budget.spend(max(seconds - (tuning.call_times + 1) * eager, 0.0))
                if helper is not None:
                    self._known.watching.spend(seconds)
                    self._watch_where_affordable()
            except Exception as error:  # the library call has run, and must not run again
                if not run.fault(error):
                    raise

    def _find_by_form(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: CallArguments
    ) -> tuple[tuple[Region, GivenTensors] | None, Any, Given | None]:
        """Returns the region of a gradient known on another path, if it may be skipped, and what it is given.

        Also the key of its form, and what to find again by it. (The form itself would keep the tape's tensors alive.)
        """
        form = self._keys.form(key, args, kwargs, arguments)
        return (None, None, None) if form is None else (self._known_by_form(form), form.key, form.given(arguments))

    def _known_by_form(self, form: TapeForm) -> tuple[Region, GivenTensors] | None:
        run = self.run
        region = self._known.known_otherwise(run.cursor.step, form.key)
        if region is None or region.confirmed < 2 or region.is_due() or run.options.validating:
            return None
        given = None if region.given is None else form.arguments(region.given)
        if given is None:
            return None
        entries, self._keys.entries = self._keys.entries, form.entries(region.given)
        if self._fits(region, given):
            return region, given
        self._keys.entries = entries
        return None

    def _known_without_sizes(self, key: Any, arguments: CallArguments) -> Region | None:
        """Returns the region of a call at the beginning of a segment whose steps are this one's, proven or not."""
        region = None if key is None else self._known.known_otherwise(self.run.cursor.step, key)
        if region is None or (region.unfed and shapes_of(arguments.tensors, region.unfed) != region.shapes):
            return None
        is_for = region.sizes is not None and region.sizes.admit([], self._new_feeds(region, arguments))
        return region if is_for else None

    def _run_plainly(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call without memoizing; charges its time, less that of nested calls, to the last reason reported."""
        tally = self._known.reasons.get(getattr(function, "__code__", function))
        if tally is None:
            return self._run_untimed(function, args, kwargs)
        outside, self._inside, began = self._inside, 0.0, time.perf_counter()
        try:
            return self._run_untimed(function, args, kwargs)
        finally:
            took = time.perf_counter() - began
            tally.seconds += took - self._inside
            self._inside = outside + took

    def _run_unsettled(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a gradient that is not observed yet, as its key will be another one in the next call; notes its end."""
        run, base = self.run, self.run.cursor.base
        result = self._run_plainly(region.function, args, kwargs)
        if run.recorder is None and run.cursor.base == base:
            region.end = run.cursor.step
        return result

    def _run_untimed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the call; releases the records of a tape that is used up by it."""
        if (helper := helper_of(function)) is not None:
            helper.misses += 1
        if function is not gradient or args[0]._tape is None:
            return call(function, args, kwargs)
        tapes = self.run.tapes
        number = tapes.number(args[0]._tape._tape)
        self.run.cut_where_ways_meet(False)  # its operations follow from choices that were made before
        try:
            result = call(function, args, kwargs)
        finally:
            try:
                self.run.cut_where_ways_meet(True)
            except Exception as error:  # the gradient has been asked for, and cannot be again
                if not self.run.fault(error):
                    raise
        try:
            if args[0]._tape is None and number >= 0 and self.run.recorder is None:
                tapes.finished(number)
        except Exception as error:
            if not self.run.fault(error):
                raise
        return result

    def _is_at_join(self, function: Any, start: Step, key: Any, place: Any, objects: list[Any]) -> bool:
        """Returns whether to cut before a call that is new here, as calls keep coming to it by other ways."""
        cursor = self.run.cursor
        if start.dynamic or start.parent is None or start.node is None:
            return False
        if function is gradient and any(region.function is gradient for region in (start.regions or {}).values()):
            return False  # its key changes while calls on its tape are learnt
        _, _, frames = place
        ways = self._known.ways_to(place)
        meets = ways.came_to(cursor.graph, frames, self._counts.of(frames), start.node)
        if meets and cursor.cuts_at_joins:
            return True
        return cursor.is_branch() and self._known.is_at_join(start, key, objects) and cursor.graph.meetings.cut()

    def _relocate(self, region: Region, arguments: CallArguments, place: Any) -> bool:
        """Fills a new region with what the call is known to do on another path; returns whether it may be skipped."""
        known = self._known.variants.of(place)
        source = known.same_as(region)
        with self.run.lock:
            if source is None or not relocate(source, region, self.run, arguments) or not self._fits(region, arguments):
                return False
        known.confirmed(region)
        self._known.confirmed(place)
        return True

    # Skipped calls.

    def _given(
        self, pattern: ArgumentGuard[Region], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GivenTensors | None:
        """Returns the tensors among the arguments if the guard of the region last skipped here accepts them."""
        run, region = self.run, pattern.region
        if run.recorder is not None or run.flight is not None or run.options.validating:
            return None
        if region.confirmed < 2:
            return None
        if region.uses >= region.run_again and (region.helper is None or run.watches is not None):
            return None
        taped = not tape_is_empty()
        if pattern.around is None:
            if answering_handler() is None:
                return None
        else:
            around = self._keys.surroundings.environment([])
            if around is not pattern.around and around != pattern.around:
                return None
        if region.function is not gradient:
            given = pattern.given(args, kwargs, run.cursor) if pattern.before == taped else None
        else:
            given = self._given_to_gradient(pattern, args, kwargs)
        if given is None or not self._fits(region, given):
            return None
        region.visits += 1
        return given

    def _given_to_gradient(
        self, pattern: ArgumentGuard[Region], args: Any, kwargs: dict[str, Any]
    ) -> GivenTensors | None:
        given = pattern.given(args[1:], kwargs, self.run.cursor)
        if given is None:
            return None
        try:
            place = functools.partial(self._keys.place, _NO_CONSTANTS)
            seen = *self._keys.seen(args[0], place), tuple([place(v) for v in given.given])
        except CannotMemoize:
            return None
        return given if seen == pattern.before and not self._keys.knows_handles() else None

    def _note(self, region: Region, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Sets the guard by which the next call at this place is compared with this one, without a key."""
        if region.pattern is None and not region.uses & (region.uses - 1):
            given = args[1:] if region.function is gradient else args
            pattern = argument_guard_of(region, given, kwargs, self.run.cursor, *key[1:3])
            if pattern is not None and region.function is gradient:
                # A guard that would reject even this call (with constants on the tape, say) is of no use.
                known = self._given_to_gradient(pattern, args, kwargs)
                pattern = pattern if known is not None else None
            region.pattern = pattern
        region.start.pattern = region.pattern

    def _fits(self, region: Region, arguments: CallArguments | GivenTensors) -> bool:
        """Returns whether a region may be skipped here and now: whether it starts here and its guards hold."""
        run = self.run
        cursor = run.cursor
        if cursor.step is not region.start or len(run.values) != region.start.end:
            return False
        if 0 <= run.forced <= cursor.count() + region.end.depth - region.start.depth:
            return False
        first = region.first
        if first is not None and first.checked and not first.is_inside(user_frames()):
            return False
        if region.asks and fate() == CAUGHT:
            return False
        if region.handles and not cursor.handles.isdisjoint(region.handles):
            return False
        if region.read or region.taken:
            for number, const in (*region.read, *region.taken):
                if arguments.const(number) != const:
                    return False
        for k, value in region.pins:
            if cursor.externals[k] is not value:
                return False
        if region.end.dynamic and not self._holds_at_sizes(region, arguments):
            return False
        if region.reads is not None and not region.reads.hold():
            region.changed("what it reads")
            return False
        if region.state_guards is not None:
            if sys.gettrace() is not None or sys.getprofile() is not None:  # they must see the program's code run
                return False
            if not region.state_guards.hold():
                region.changed(LOOKED_AT)
                return False
        return True

    def _holds_at_sizes(self, region: Region, arguments: CallArguments | GivenTensors) -> bool:
        """Returns whether a region of a dynamic path may be skipped at the sizes of this call."""
        new = self._new_feeds(region, arguments)
        before = self.run.tapes.sizes_of(self._keys.number) if region.function is gradient else ()
        bounded = region.reads is None or region.reads.chooses_by_sizes
        return region.sizes is not None and region.sizes.hold(self.run.cursor.externals, new, before, bounded)

    def _new_feeds(self, region: Region, arguments: CallArguments | GivenTensors) -> list[Any]:
        """Returns what a region of a dynamic path would be fed; None for what is no tensor yet."""
        return [
            None
            if source in ("number", "size")
            else unwrap(arguments.tensors[value] if source == "argument" else self._feed(source, value))
            for source, value in region.feeds
        ]

    def _jump(
        self, region: Region, function: Any, args: tuple[Any, ...], arguments: CallArguments | GivenTensors
    ) -> Any:
        """Skips a region's operations; returns the call's result."""
        run = self.run
        cursor, tapes = run.cursor, run.tapes
        # What may raise comes before the call counts as skipped, or is tried once more.
        taken: list[Any] = []
        for source, value in region.feeds:
            if source == "size":
                number = value.value.at([*cursor.externals, *taken])
                taken.append(make_constant(np.asarray(number, value.dtype.as_numpy_dtype), None))
            else:
                taken.append(unwrap(arguments.tensors[value]) if source == "argument" else self._feed(source, value))
        region.uses += 1
        if region.helper is not None:
            region.helper.misses = 0
            region.helper.known = True
        if function is not gradient and region.recorded and not tapes.waiting:
            tapes.wait()
        values = run.skip(region.start, region.end, taken, region.handles, region.seeds)
        try:
            return self._behind(region, function, args, arguments, values)
        except Exception as error:
            if run.options.strict or not absorbs(error):
                raise
            run.note_fault(error)
        return self._behind(region, function, args, arguments, values)

    def _begin(
        self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: CallArguments | GivenTensors
    ) -> Passage:
        """Skips the first span of a gradient that calls the program's backward functions."""
        plainly = functools.partial(self._run_plainly, gradient, args, kwargs)
        passage = Passage(self.run, region, arguments, self._keys.number, plainly)
        passage.begin()
        return passage

    def _end(self, passage: Passage, args: tuple[Any, ...]) -> Any:
        """Calls those functions, without holding the lock, and returns the gradient."""
        tape = args[0]
        if not tape._persistent and tape._recording:
            tape._pop_tape()
        number = self._keys.number
        result, skipped = passage.go_on()
        if skipped:
            use_up(tape)
            if not tape._persistent:
                self.run.tapes.finished(number)
        return result

    def _behind(self, region: Region, function: Any, args: tuple[Any, ...], arguments: Any, values: list[Any]) -> Any:
        """Returns the result of a skipped call, and replays its side effects other than operations.

        Adds the lazy tensors among the result to `values`, the segment's.
        """
        run = self.run
        tapes, base = run.tapes, run.cursor.base
        if function is gradient:
            use_up(args[0])
        if region.context:
            (call_context() or {}).update(region.context)  # not None: it is part of the key
        if region.notes:
            run.add_notes(region.notes)
        for number, name in region.emptied:
            vars(arguments.given[number]).setdefault(name)
        if watchers:
            notify_watchers(_alive(region.accessed))
        if region.gives_nothing and not (region.recorded or region.end.pause or function is gradient):
            return None
        made: dict[int, Any] = {}
        feeds = run.cursor.externals
        for number, out in region.made:
            lazy = made[number] = values[number] = _new(LazyTensor)  # `new_lazy`, without the call
            lazy._out = out if out.__class__ is Output else settled(out, feeds)
            lazy._key = base + number
            lazy._run = run
            lazy._value = None
        build = region.build
        if build is None or region.effects or region.marks:
            tensor = self._tensors_of(region, made, arguments.given, values)
            repeat_effects(region, arguments.given, tensor)
            result = fill_form(region.result, tensor)
        else:
            result = build(made, arguments.given)
        if region.recorded:
            tapes.reads(_alive(region.accessed))
            before = self._keys.entries if function is gradient else []
            tapes.add(RegionEntry(region, arguments, made, run, tapes.active, earlier=before))
        if function is gradient and not args[0]._persistent:
            tapes.finished(self._keys.number)
        if region.end.pause:
            launch_beside(run)
        return result

    def _tensors_of(
        self, region: Region, made: dict[int, Any], given: list[Any], values: list[Any]
    ) -> Callable[[Any], Any]:
        """Returns a function that finds or makes the tensors of forms; adds those it makes to `made` and `values`."""
        run = self.run
        base = run.cursor.base

        def tensor(form: Any) -> Any:
            kind, number = form
            if kind == "constant":
                return new_lazy(number, -1, run)
            if kind == "argument":
                return given[number]
            lazy = made.get(number)
            if lazy is None:
                out = settled(region.outputs[number], run.cursor.externals)
                lazy = made[number] = values[number] = new_lazy(out, base + number, run)
            return lazy

        return tensor

    def _feed(self, source: str, value: Any) -> Any:
        if source == "same":
            return value
        if source == "number":
            spec, const = value
            return eager_constant(const.value, spec)
        at, place = value
        return unwrap(self._keys.entries[at].get(place))


def _alive(refs: list[Any]) -> list[Any]:
    return [value for ref in refs if (value := ref()) is not None]
