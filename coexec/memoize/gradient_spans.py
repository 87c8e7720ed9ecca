"""Gradient spans: what a gradient does between calls of the program's own backward functions.

The Python of such a function runs in every gradient. What TensorFlow does before the first, between them and after the
last is skipped if the functions return what they did before: tensors from the same sources. Otherwise the gradient's
Python runs, with the results of the functions already called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from coexec.follow.backward import Backward, FunctionEntry
from coexec.follow.follower import Follower
from coexec.follow.tape_entry import identities
from coexec.guards.call_key import CallArguments, CannotMemoize
from coexec.memoize.entry import form_of
from coexec.memoize.feed_sources import FeedSources
from coexec.memoize.step_range import Outputs, constants_of, slots_of, steps_between
from tracer.faults import OURS, absorbs, call, passes
from tracer.graph import Step
from tracer.inputs import small
from tracer.intercept import handling
from tracer.lazy import LazyTensor
from tracer.op import Const, array_in
from tracer.private import EagerTensor
from tracer.seeds import Pair
from tracer.spec import RESOURCE, spec_of


class Span(NamedTuple):
    """A part of a gradient that is skipped: its operations, and the sources of their inputs."""

    start: Step
    end: Step
    feeds: list[tuple[str, Any]]
    pins: list[tuple[int, tuple[str, Any]]]  # earlier feeds that must come from these sources
    kept: list[int]  # numbers of its tensors that are needed outside
    notes: dict[Step, Any]


class BackwardCall(NamedTuple):
    """A call of a backward function: the index of its tape entry, the form of its arguments, the key of its results."""

    at: int
    cotangents: Any
    key: Any
    same: list[tuple[int, tuple[str, Any]]]  # results that are tensors from these sources, as an argument that it has
    taken: list[tuple[int, Const]]  # results whose values operations use as constants


class GradientParts(NamedTuple):
    """The parts of a gradient: its spans, the backward calls between them, and its result's form."""

    spans: list[Span]
    calls: list[BackwardCall]
    result: Any
    handles: list[set[int]]
    outputs: list[Outputs]
    steps: list[list[Step]]


class BackwardCalls:
    """Calls the backward functions of one gradient: each once, however often the gradient's Python runs."""

    def __init__(self, run: Follower) -> None:
        self._run = run
        self._done: dict[int, tuple[Backward, Any, Exception | None]] = {}
        self.heard: HeardCalls | None = None  # set while the gradient is observed

    def __call__(self, backward: Backward, cotangents: tuple[Any, ...]) -> Any:
        """Returns what a function returns, or raises what it raises, cached after the first call."""
        if id(backward) not in self._done:
            self._done[id(backward)] = backward, *self._make(backward, cotangents)
        _, results, error = self._done[id(backward)]
        if error is not None:
            _raise_again(error)
        return results

    def _make(self, backward: Backward, cotangents: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        """Calls a function; returns its results and None, or None and its error."""
        tapes, heard = self._run.tapes, self.heard
        if heard is not None:
            heard.begins(backward, cotangents)
        tapes.around = None  # gradients inside the function are separate
        try:
            with contextlib.nullcontext() if heard is None else heard.aside():
                results = call(backward.function, cotangents, {})
        except Exception as error:
            return None, error
        finally:
            tapes.around = self
        if heard is not None:
            heard.ended(results)
        return results, None


@passes
def _raise_again(error: Exception) -> None:
    """Reraises an error of the program from here, without the runtime's frames of the first time."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
        trace = trace.tb_next
    raise error.with_traceback(trace)


class _Seen(NamedTuple):
    """A span while it is observed."""

    start: Step
    end: Step
    base: int
    steps: list[Step]
    fed: list[Any]
    pins: list[tuple[int, Any]]  # feeds of what came before that its operations take, too
    numbers: set[int]  # ids of the feeds converted from Python numbers
    notes: dict[Step, Any]
    held: list[tuple[int, LazyTensor]]  # its tensors that were referenced at its end


class HeardCalls:
    """Observes the spans of one gradient, and the calls between them."""

    def __init__(
        self, run: Follower, averted: Callable[[], contextlib.AbstractContextManager[Any]], entries: list[Any]
    ) -> None:
        self._run, self._averted = run, averted
        self._entries = entries
        self.drawn: list[Pair] = []  # the seeds drawn meanwhile
        self.reason: str | None = None  # why it cannot be memoized
        self._seen: list[_Seen] = []
        self._calls: list[tuple[int, Any, Any, CallArguments]] = []
        self._now: tuple[int, Any] = -1, None
        self._drawn = 0  # how many of them backward functions drew
        self._before = 0
        self._begin()

    def __bool__(self) -> bool:
        return bool(self._calls) or self.reason is not None

    def _begin(self) -> None:
        cursor = self._run.cursor
        self._start, self._base, self._ended = cursor.step, cursor.base, len(cursor.ended)

    def _end(self) -> None:
        """Stores the current span; raises `CannotMemoize`."""
        run, start = self._run, self._start
        cursor = run.cursor
        end = cursor.step
        steps = steps_between(start, end) if len(cursor.ended) == self._ended else None
        if run.recorder is not None or steps is None or any(step.host for step in steps):
            raise CannotMemoize("its operations are not followed in one go")
        if any(step.seeded for step in steps):
            raise CannotMemoize("it draws random numbers around a backward function")
        if any(step in run.assertions for step in steps):
            raise CannotMemoize("what an assertion says where it fails keeps changing")
        fed = cursor.externals[start.external : end.external]
        taken = {-1 - slot for step in steps for slot in slots_of(step) if slot < 0}
        pins = [(k, cursor.externals[k]) for k in sorted(taken) if k < start.external]
        held = [(n, run.values[n]) for n in run.referenced_between(start.end, end.end)]
        notes = {step: run.notes[step] for step in steps if step in run.notes}
        numbers = {id(v) for v in fed if id(v) in cursor.numbers}
        self._seen.append(_Seen(start, end, self._base, steps, fed, pins, numbers, notes, held))

    def _learn(self, part: Callable[..., None], *given: Any) -> None:
        """Observes a part; defers errors to `parts`, as the gradient is still running."""
        if self.reason is None:
            try:
                part(*given)
            except CannotMemoize as reason:
                self.reason = str(reason)
            except Exception as error:
                if self._run.options.strict or not absorbs(error):
                    raise
                self._run.note_fault(error)
                self.reason = f"the runtime failed: {error}"

    def begins(self, backward: Backward, cotangents: tuple[Any, ...]) -> None:
        """Notes that a backward function is about to be called."""
        self._learn(self._begins, backward, cotangents)

    def _begins(self, backward: Backward, cotangents: tuple[Any, ...]) -> None:
        found = [n for n, e in enumerate(self._entries) if isinstance(e, FunctionEntry) and e.backward is backward]
        if not found:
            raise CannotMemoize("its tape has records of operations outside of known library calls")
        self._end()
        self._now, self._before = (found[0], cotangents), len(self.drawn)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Runs the program's Python unobserved."""
        with self._averted(), handling(self._run):
            yield

    def ended(self, results: Any) -> None:
        """Notes that it has returned."""
        self._learn(self._returned, results)

    def _returned(self, results: Any) -> None:
        self._drawn += len(self.drawn) - self._before
        after = CallArguments(self._run.cursor)
        key = after.key(results)
        after.settle()
        self._calls.append((*self._now, key, after))
        self._begin()

    def parts(self, result: Any, arguments: CallArguments, sources: FeedSources) -> GradientParts:
        """Returns what the gradient did; `sources`: those of other tensors. Raises `CannotMemoize`."""
        self._learn(self._end)
        if self.reason is not None:
            raise CannotMemoize(self.reason)
        if len(self.drawn) > self._drawn:
            raise CannotMemoize("it draws random numbers around a backward function")
        places = _Places(self._seen, self._calls, arguments, sources.known)
        feeds = [[places.source(v, number, j) for v, number in _fed(seen)] for j, seen in enumerate(self._seen)]
        before = self._seen[0].base, self._seen[0].start.external  # what is recorded was fed as the gradient's key says
        pins = [
            [
                (k, places.source(v, False, j))
                for k, v in seen.pins
                if (seen.base, k) >= before or not sources.is_recorded(v)
            ]
            for j, seen in enumerate(self._seen)
        ]
        used = {const for seen in self._seen for step in seen.steps for const in constants_of(step)}
        calls = []
        for k, (at, cotangents, key, after) in enumerate(self._calls):
            taken = [(n, const) for n, const in enumerate(after.consts) if const is not None and const in used]
            given = form_of(cotangents, functools.partial(places.place, calls=k))
            calls.append(BackwardCall(at, given, key, places.same[k], taken))
        form = form_of(result, functools.partial(places.place, calls=len(calls)))
        spans = [
            Span(seen.start, seen.end, fed, pinned, sorted(kept), seen.notes)
            for seen, fed, pinned, kept in zip(self._seen, feeds, pins, places.kept, strict=True)
        ]
        handles = [{id(v) for v in seen.fed if v._datatype_enum() == RESOURCE} for seen in self._seen]
        outputs = [Outputs(seen.start, seen.steps) for seen in self._seen]
        return GradientParts(spans, calls, form, handles, outputs, [seen.steps for seen in self._seen])


class _Places:
    """The sources of one gradient's tensors."""

    def __init__(
        self, seen: list[_Seen], calls: list[Any], arguments: CallArguments, sources: dict[int, tuple[str, Any]]
    ) -> None:
        self._seen, self._sources = seen, dict(sources)
        self.kept: list[set[int]] = [set() for _ in seen]
        for number, tensor in enumerate(arguments.given):
            self._sources.setdefault(id(tensor), ("argument", number))
        for j, span in enumerate(seen):
            for number, lazy in span.held:
                if lazy._value is not None:
                    self._sources.setdefault(id(lazy._value), ("made", (j, number)))
        # A result with a value may be a tensor from elsewhere, and another one the next time, with the same key.
        self.same: list[list[tuple[int, tuple[str, Any]]]] = []
        for k, (*_, after) in enumerate(calls):
            known = [(n, self._known(v, k)) for n, v in enumerate(after.tensors) if type(v) is EagerTensor]
            self.same.append([(number, self._noted(source)) for number, source in known if source is not None])
            for number, pair in enumerate(zip(after.given, after.tensors, strict=True)):
                for tensor in pair:
                    for each in identities(tensor):
                        self._sources.setdefault(id(each), ("result", (k, number)))

    def source(self, value: Any, is_number: bool, calls: int) -> tuple[str, Any]:
        """Returns the source of a feed, after so many `calls`."""
        known = self._known(value, calls)
        if known is None and is_number and small(array := array_in(value)):
            return "number", (spec_of(value), Const(array))
        return self._noted(known) if known is not None else ("same", value)

    def place(self, tensor: Any, calls: int) -> tuple[str, Any]:
        """Returns the source of a tensor passed, after so many `calls`, to the next one or to the program."""
        if type(tensor) is LazyTensor:
            for j, span in enumerate(self._seen):
                number = tensor._key - span.base
                if tensor._out.const is None and span.start.end <= number < span.end.end:
                    return self._noted(("made", (j, number)))
        known = self._known(tensor, calls)
        if known is not None:
            return self._noted(known)
        if type(tensor) is not LazyTensor:
            return "same", tensor
        if tensor._out.const is not None:
            return "constant", tensor._out
        raise CannotMemoize("its result is a tensor from elsewhere")

    def _known(self, tensor: Any, calls: int) -> tuple[str, Any] | None:
        """Returns a tensor's known source; not a result of a later call, which may return its argument."""
        known = self._sources.get(id(tensor))
        return None if known is not None and known[0] == "result" and known[1][0] >= calls else known

    def _noted(self, place: tuple[str, Any]) -> tuple[str, Any]:
        if place[0] == "made":
            j, number = place[1]
            self.kept[j].add(number)
        return place


def _fed(seen: _Seen) -> list[tuple[Any, bool]]:
    return [(v, id(v) in seen.numbers) for v in seen.fed]
