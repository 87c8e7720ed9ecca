"""Library calls of one followed call: jumped over where a region is known, else run and learnt."""

from __future__ import annotations

import functools
import sys
from typing import Any

from coexec.events import Kind
from coexec.runtime.learning import Learning
from coexec.runtime.patterns import Given, Pattern, pattern_of
from coexec.runtime.pending import launch_beside
from coexec.runtime.premises import LOOKED_AT
from coexec.runtime.records import RegionEntry
from coexec.runtime.regions import (
    LAST_RETRY,
    MAX_REGIONS,
    Arguments,
    Opaque,
    OpaqueArray,
    Region,
    anchor,
    fill_form,
    is_worth_learning,
    with_tensors,
)  # fmt: skip
from tracer import seeds
from tracer.graph import Step
from tracer.intercept import answering_handler, tape_is_empty
from tracer.lazy import LazyTensor, eager_constant, new_lazy, unwrap
from tracer.library import Surroundings, call_context, gradient, is_pure, layer_call, loss_call
from tracer.location import call_stack, place_of
from tracer.private import EagerTensor
from tracer.spec import RESOURCE

_new = LazyTensor.__new__


class LibraryCalls:
    """The library calls of one followed call."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self._origin = run.cursor.base
        self._outsiders: dict[int, tuple[int, Any]] = {}  # eager tensors by id: in which order they appeared
        self._surroundings = Surroundings()
        self._kept: list[Any] = []  # what the key names by its id, beside arguments

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a library call of the user's."""
        run = self.run
        tapes = run.tapes
        if run.recorder is not None or tapes.foreign:
            return function(*args, **kwargs)
        if args and function.__name__ == "apply_gradients" and hasattr(args[1] if len(args) > 1 else None, "__next__"):
            args = (args[0], list(args[1]), *args[2:])  # a `zip`, most often: it would be used up
            if run.recorder is not None or tapes.foreign:  # since then
                return function(*args, **kwargs)
        pattern: Pattern | None = run.cursor.step.pattern
        if pattern is not None and pattern.function is function:
            with run.lock:
                given = self._given(pattern, args, kwargs)
                if given is not None:
                    return self._jump(pattern.region, function, args, given)
        if run.flight is not None:
            run.flush()
        start: Step = run.cursor.step
        arguments = Arguments(run.cursor, is_pure(function))
        try:
            try:
                key = self._key(function, args, kwargs, arguments)
            except OpaqueArray:
                if function is layer_call or function is loss_call:
                    args, kwargs = with_tensors(args, kwargs)
                arguments = Arguments(run.cursor)
                key = self._key(function, args, kwargs, arguments)
        except Opaque as reason:
            self._tell(function, str(reason))
            return self._run_plainly(function, args, kwargs)
        if start.regions is None:
            start.regions = {}
        region = start.regions.get(key)
        if region is None:
            if not is_worth_learning(start.regions, function):
                self._tell(function, "what it is given keeps changing")
                return self._run_plainly(function, args, kwargs)
            if len(start.regions) >= MAX_REGIONS:
                del start.regions[next(iter(start.regions))]
            region = start.regions[key] = Region(start, key, function)
            anchor(region, [*arguments.anchors, *self._kept])
            if function is gradient:
                for entry in tapes.entries_of(self._number):
                    entry.goes_into(region)
        region.visits += 1
        profiled = sys.getprofile() is not None  # then effects cannot be observed
        if region.confirmed > 1 and (profiled or not (region.is_due() or run.options.validating)):
            with run.lock:
                if self._fits(region, arguments):
                    self._note(region, key, args, kwargs)
                    return self._jump(region, function, args, arguments)
        if profiled:
            return self._run_plainly(function, args, kwargs)
        if region.reason is not None:
            if region.visits < region.retry:
                return self._run_plainly(function, args, kwargs)
            region.retry += min(region.retry, LAST_RETRY)
            region.reason = None
        learning = Learning(run, region, args, arguments)
        try:
            return learning.call(kwargs)
        finally:
            if learning.remark is not None:
                self._tell(function, learning.remark)

    def _tell(self, function: Any, reason: str) -> None:
        told = self.run.segments.told
        if (function, reason) not in told and len(told) < 1000:  # finding the place takes time
            told.add((function, reason))
            self.run.ledger.cause(Kind.LIBRARY, f"{function.__qualname__}: {reason}", place_of())

    def _run_plainly(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call as the program does; a tape that has given its gradient has no more use for its records."""
        if function is not gradient or args[0]._tape is None:
            return function(*args, **kwargs)
        tapes = self.run.tapes
        number = tapes.number(args[0]._tape._tape)
        result = function(*args, **kwargs)
        if args[0]._tape is None and number >= 0 and self.run.recorder is None:
            tapes.finished(number)
        return result

    # Keys.

    def _key(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments) -> Any:
        self._kept = []
        taped = not tape_is_empty()
        around = self._surroundings.environment(self._kept)
        if function is not gradient:
            given = arguments.key(args), arguments.key(kwargs) if kwargs else None
            return function, taped, around, given
        tape, rest = args[0], args[1:]
        if tape._tape is None:
            raise Opaque("its tape has been used")
        number = self._number = self.run.tapes.number(tape._tape._tape)
        if taped and (tape._persistent or any(active != number for active in self.run.tapes.active)):
            raise Opaque("a tape records the gradient")
        place = functools.partial(self._place, arguments)
        history = self.run.tapes.history(number, place, self._origin)
        if history is None or number < 0:
            raise Opaque("its tape has records of operations outside of known library calls")
        kind = tape._persistent, tape._watch_accessed_variables
        given = arguments.key(rest), arguments.key(kwargs)
        places = [place(v) for v in arguments.given]
        if any(v._datatype_enum() == RESOURCE for _, v in self._outsiders.values()):  # else none can be a source's
            places += [place(v) for v in arguments.anchors]
        return function, kind, around, given, history, tuple(places)

    def _place(self, arguments: Arguments, value: Any) -> Any:
        """Names a tensor or variable by where in the call it has come from.

        Constants count as arguments: the gradient's operations may take them for what they are.
        """
        if type(value) is LazyTensor:
            if value._out.const is not None:
                return arguments.key(value)
            if value._key >= self._origin:
                return value._key - self._origin
        elif isinstance(value, EagerTensor):
            if self.run.cursor.constant_of(value) is not None:
                return arguments.key(value)
        else:
            value = getattr(value, "handle", None)
        if value is None:
            return None
        return "outside", self._outsiders.setdefault(id(value), (len(self._outsiders), value))[0]

    # Jumps.

    def _given(self, pattern: Pattern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        """Returns the tensors among the arguments if they are those of the region that came last here."""
        run, region = self.run, pattern.region
        if run.recorder is not None or run.flight is not None or run.options.validating:
            return None
        if region.confirmed < 2 or region.uses >= region.run_again or pattern.taped is tape_is_empty():
            return None
        if pattern.around is None:
            if answering_handler() is None:
                return None
        else:
            around = self._surroundings.environment([])
            if around is not pattern.around and around != pattern.around:
                return None
        given = pattern.given(args, kwargs, run.cursor)
        if given is None or not self._fits(region, given):
            return None
        region.visits += 1
        return given

    def _note(self, region: Region, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Lets the next call at this place be compared with this one directly."""
        if region.function is gradient:  # what its tape has seen counts, too
            return
        if region.pattern is None and not region.uses & (region.uses - 1):
            region.pattern = pattern_of(region, args, kwargs, self.run.cursor, *key[1:3])
        region.start.pattern = region.pattern

    def _fits(self, region: Region, arguments: Arguments | Given) -> bool:
        run = self.run
        cursor = run.cursor
        if cursor.step is not region.start or len(run.values) != region.start.end:
            return False
        if 0 <= run.forced <= cursor.count() + region.end.depth - region.start.depth:
            return False
        first = region.first
        if first is not None and first.checked and not first.is_inside(call_stack()[0]):
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
        if region.premises is not None:
            if sys.gettrace() is not None or sys.getprofile() is not None:  # they are to see the program's code
                return False
            if not region.premises.hold():
                region.changed(LOOKED_AT)
                return False
        return True

    def _jump(self, region: Region, function: Any, args: tuple[Any, ...], arguments: Arguments | Given) -> Any:
        run = self.run
        cursor, tapes = run.cursor, run.tapes
        region.uses += 1
        if function is gradient:
            _use_up(args[0])
        elif region.recorded and not tapes.waiting:
            # From now on records wait in this call; the tape knows all that came before.
            tapes.waiting = True
        externals = cursor.externals
        for source, value in region.feeds:
            externals.append(unwrap(arguments.tensors[value]) if source == "argument" else self._feed(source, value))
        if region.handles:
            cursor.handles |= region.handles
        if region.seeds[0] or len(cursor.seeds) > region.start.draws:
            cursor.seeds[region.start.draws :] = seeds.draw(*region.seeds)
        values, base = run.values, cursor.base
        first = region.start.end
        values += [None] * (region.end.end - first)
        cursor.step = region.end
        run.regions += 1
        run.jumped += region.end.depth - region.start.depth
        if region.context:
            (call_context() or {}).update(region.context)  # there is one: it is part of the key
        if region.notes:
            run.notes.update(region.notes)
        if region.gives_nothing and not (region.recorded or region.end.pause or function is gradient):
            return None
        made: dict[int, Any] = {}
        for number, out in region.made:
            lazy = made[number] = values[number] = _new(LazyTensor)  # `new_lazy`, without the call
            lazy._out = out
            lazy._key = base + number
            lazy._run = run
            lazy._value = None
        build = region.build
        result = self._filled(region, made, arguments.given) if build is None else build(made, arguments.given)
        if region.recorded and function is not gradient:
            tapes.reads(region.accessed)
            tapes.add(RegionEntry(region, arguments, made, run, tapes.active))
        elif function is gradient and not args[0]._persistent:
            tapes.finished(self._number)
        if region.end.pause:
            launch_beside(run)
        return result

    def _filled(self, region: Region, made: dict[int, Any], given: list[Any]) -> Any:
        """Returns what a region gives, where that is not simple; adds the tensors that it makes for it to `made`."""
        run = self.run
        base, values = run.cursor.base, run.values

        def tensor(form: Any) -> Any:
            kind, number = form
            if kind == "constant":
                return new_lazy(number, -1, run)
            if kind == "argument":
                return given[number]
            lazy = made.get(number)
            if lazy is None:
                lazy = made[number] = values[number] = new_lazy(region.outputs[number], base + number, run)
            return lazy

        return fill_form(region.result, tensor)

    def _feed(self, source: str, value: Any) -> Any:
        if source == "same":
            return value
        if source == "number":
            spec, const = value
            return eager_constant(const.value, spec)
        at, place = value
        return unwrap(self.run.tapes.entries_of(self._number)[at].get(place))


def _use_up(tape: Any) -> None:
    """Leaves a tape as `gradient` leaves it."""
    if not tape._persistent:
        if tape._recording:
            tape._pop_tape()
        tape._watched_variables = tape._tape.watched_variables()
        tape._tape = None
