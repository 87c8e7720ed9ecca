"""Library calls of one followed call: jumped over where a region is known, else run and learnt."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coexec.events import Kind
from coexec.runtime.records import RegionEntry
from coexec.runtime.references import referenced
from coexec.runtime.regions import (
    LAST_RUN_AGAIN,
    MAX_REGIONS,
    Arguments,
    Opaque,
    Region,
    anchor,
    constants_of,
    fill_form,
    form_of,
    output_of,
    slots_of,
    steps_between,
)  # fmt: skip
from tracer.effects import Effects, watch
from tracer.graph import Step
from tracer.inputs import small
from tracer.intercept import make_constant, tape_is_empty
from tracer.lazy import LazyTensor, eager_constant, new_lazy, unwrap
from tracer.library import environment, gradient, layer_call, loss_call
from tracer.location import call_stack, place_of
from tracer.op import Const
from tracer.private import EagerTensor, pywrap_tfe
from tracer.spec import RESOURCE, spec_of


class LibraryCalls:
    """The library calls of one followed call."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self._origin = run.cursor.base
        self._outsiders: dict[int, tuple[int, Any]] = {}  # eager tensors by id: in which order they appeared
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
        start: Step = run.cursor.step
        arguments = Arguments(run.cursor)
        if function is layer_call or function is loss_call:
            args, kwargs = _with_tensors(args, kwargs)
        try:
            key = self._key(function, args, kwargs, arguments)
        except Opaque as reason:
            self._tell(function, str(reason))
            return function(*args, **kwargs)
        if start.regions is None:
            start.regions = {}
        region = start.regions.get(key)
        if region is None:
            if len(start.regions) >= MAX_REGIONS:
                del start.regions[next(iter(start.regions))]
            region = start.regions[key] = Region(start, key, function)
            anchor(region, [*arguments.anchors, *self._kept])
            if function is gradient:
                for entry in tapes.entries_of(self._number):
                    entry.goes_into(region)
        region.visits += 1
        profiled = sys.getprofile() is not None  # then effects cannot be observed
        if region.confirmed > 1 and (profiled or not region.is_due()):
            with run.lock:
                if self._fits(region, arguments):
                    return self._jump(region, function, args, arguments)
        if profiled:
            return function(*args, **kwargs)
        if region.reason is not None:
            if region.visits < region.retry:
                return function(*args, **kwargs)
            region.retry += min(region.retry, LAST_RUN_AGAIN)
            region.reason = None
        return self._learn(region, function, args, kwargs, arguments)

    def _tell(self, function: Any, reason: str) -> None:
        told = self.run.segments.told
        if (function, reason) not in told and len(told) < 1000:  # finding the place takes time
            told.add((function, reason))
            self.run.ledger.cause(Kind.LIBRARY, f"{function.__qualname__}: {reason}", place_of())

    # Keys.

    def _key(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments) -> Any:
        self._kept, self._arguments = [], arguments
        taped = not tape_is_empty()
        around = environment(self._kept)
        if function is not gradient:
            given = arguments.key(args), arguments.key(kwargs) if kwargs else None
            return function, taped, around, given
        tape, rest = args[0], args[1:]
        if tape._tape is None:
            raise Opaque("its tape has been used")
        number = self._number = self.run.tapes.number(tape._tape._tape)
        if taped and (tape._persistent or any(active != number for active in self.run.tapes.active)):
            raise Opaque("a tape records the gradient")
        history = self.run.tapes.history(number, self._place)
        if history is None or number < 0:
            raise Opaque("its tape has records of operations outside of known library calls")
        places = [self._place(v) for v in tf.nest.flatten((rest, kwargs))]
        kind = tape._persistent, tape._watch_accessed_variables
        return function, kind, around, arguments.key(rest), arguments.key(kwargs), history, tuple(places)

    def _place(self, value: Any) -> Any:
        """Names a tensor or variable by where in the call it has come from.

        Constants count as arguments: the gradient's operations may take them for what they are.
        """
        if type(value) is LazyTensor:
            if value._out.const is not None:
                return self._arguments.key(value)
            if value._key >= self._origin:
                return value._key - self._origin
        elif isinstance(value, EagerTensor):
            if self.run.cursor.constant_of(value) is not None:
                return self._arguments.key(value)
        else:
            value = getattr(value, "handle", None)
        if value is None:
            return None
        return "outside", self._outsiders.setdefault(id(value), (len(self._outsiders), value))[0]

    # Jumps.

    def _fits(self, region: Region, arguments: Arguments) -> bool:
        run = self.run
        cursor = run.cursor
        if cursor.step is not region.start or len(run.values) != region.start.end:
            return False
        if 0 <= run.forced <= cursor.count() + region.end.depth - region.start.depth:
            return False
        first = region.first
        if first is not None and first.checked and first.frames != call_stack()[0]:
            return False
        if not cursor.handles.isdisjoint(region.handles):
            return False
        if any(arguments.consts[number] != const for number, const in region.baked):
            return False
        return all(cursor.externals[k] is value for k, value in region.pins)

    def _jump(self, region: Region, function: Any, args: tuple[Any, ...], arguments: Arguments) -> Any:
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
        cursor.handles |= region.handles
        values, base = run.values, cursor.base
        first = region.start.end
        values.extend([None] * (region.end.end - first))
        made: dict[int, Any] = {}

        def tensor(form: Any) -> Any:
            kind, number = form
            if kind == "constant":
                return new_lazy(number, -1, run)
            if kind == "argument":
                return arguments.given[number]
            lazy = made.get(number)
            if lazy is None:
                lazy = made[number] = values[number] = new_lazy(region.outputs[number], base + number, run)
            return lazy

        cursor.step = region.end
        run.regions += 1
        run.segments.has_regions = True
        if region.recorded and function is not gradient:
            for variable in region.accessed:
                pywrap_tfe.TFE_Py_TapeVariableAccessed(variable)
            inner = {a._key - base: a for a in arguments.tensors if type(a) is LazyTensor and a._out.const is None}
            result = fill_form(region.result, tensor)
            tapes.add(RegionEntry(region, arguments.given, {**inner, **made}, run, tapes.active))
            return result
        result = fill_form(region.result, tensor)
        if function is gradient and not args[0]._persistent:
            tapes.finished(self._number)
        return result

    def _feed(self, source: str, value: Any) -> Any:
        if source == "same":
            return value
        if source == "number":
            spec, const = value
            return eager_constant(const.value, spec)
        at, place = value
        return unwrap(self.run.tapes.entries_of(self._number)[at].get(place))

    # Learning.

    def _learn(
        self, region: Region, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments
    ) -> Any:
        run = self.run
        cursor, tapes = run.cursor, run.tapes
        roots = [v for v in arguments.anchors if v is not args[0]] if function is gradient else arguments.anchors
        ended = len(cursor.ended)
        number = tapes.number(args[0]._tape._tape) if function is gradient else -1
        entries = tapes.entries_of(number)
        arguments.settle()
        tapes.catch_up()
        tapes.steps, tapes.variables, tapes.touched = [], [], False
        run.open = False
        effects = Effects(roots)
        try:
            with effects:
                result = function(*args, **kwargs)
        finally:
            run.open = True
            recorded, tapes.steps = tapes.steps, None
            accessed, tapes.variables = tapes.variables, None
        if run.recorder is not None:
            return result  # what it does was not known yet
        reason = effects.reason
        if reason is None and (len(cursor.ended) != ended or cursor.step is region.start):
            reason = "its operations are not followed in one go"
        if reason is None and tapes.touched and function is not gradient:
            reason = "it works on tapes itself"
        if reason is None:
            try:
                with run.lock:
                    read, is_gradient = effects.read, function is gradient
                    self._fill(region, arguments, read, result, recorded, accessed, entries, is_gradient)
            except Opaque as error:
                reason = str(error)
        if reason is not None:
            # User code will hardly go away, and learning keeps the library calls that it makes from being jumped over.
            region.refuse(reason, effects.runs_user_code)
            self._tell(function, reason)
        else:
            watch(effects.objects, region)
        if number >= 0 and args[0]._tape is None:
            tapes.finished(number)
        return result

    def _fill(
        self,
        region: Region,
        arguments: Arguments,
        read: set[int],
        result: Any,
        recorded: list[Step],
        accessed: list[Any],
        entries: list[Any],
        is_gradient: bool,
    ) -> None:
        run = self.run
        cursor = run.cursor
        start, end = region.start, cursor.step
        steps = steps_between(start, end)
        if steps is None or any(step.host for step in steps):
            raise Opaque("its operations are not followed in one go")
        outputs = output_of(steps)
        for number, out in output_of(start.chain()).items():
            outputs[number] = out
        numbers = {v._key - cursor.base for v in arguments.tensors if type(v) is LazyTensor}
        pins: dict[int, Any] = {}
        for step in steps:
            for slot in slots_of(step):
                if 0 <= slot < start.end and slot not in numbers and not is_gradient:
                    raise Opaque("it uses a tensor that it was not given")
                if slot < 0 and -1 - slot < start.external:
                    known = cursor.externals[-1 - slot]
                    # What a gradient takes from before was recorded by its tape, whose history is part of the key.
                    if not is_gradient and not any(known is v for v in arguments.tensors):
                        pins[-1 - slot] = known
        feeds = [self._source(v, arguments, entries) for v in cursor.externals[start.external : end.external]]
        form = form_of(result, lambda tensor: self._result(tensor, arguments, start.end, end.end))
        window = run.values[start.end : end.end]
        del run.values[start.end : end.end]
        interior = [start.end + i for i in referenced(window) if window[i]._out.const is None]
        run.values[start.end : start.end] = window
        new = cursor.externals[start.external : end.external]
        region.handles = {id(v) for v in new if v._datatype_enum() == RESOURCE}
        region.outputs = outputs
        region.first = steps[0] if steps else None
        before = region.confirmed
        # The value of an argument that some operation has taken for a constant, or Python has read, decides what the
        # operations are.
        used = {const for step in steps for const in constants_of(step)}
        known = list(zip(arguments.tensors, arguments.consts, strict=True))
        baked = [
            (n, const) for n, (v, const) in enumerate(known) if const is not None and (const in used or id(v) in read)
        ]
        if not read.issubset(id(v) for v, const in known if const is not None):
            raise Opaque("its Python reads the value of a tensor")
        agreed = region.fill(
            baked=baked,
            end=end,
            feeds=feeds,
            pins=sorted(pins.items()),
            result=form,
            recorded=recorded,
            accessed=accessed,
        )
        interior = interior if recorded else []
        region.interior = sorted({*region.interior, *interior}) if agreed else interior
        if before and not agreed:
            self._tell(region.function, "two runs of it did not agree")

    def _source(self, value: Any, arguments: Arguments, entries: list[Any]) -> tuple[str, Any]:
        for number, known in enumerate(arguments.tensors):
            if known is value:
                return "argument", number
        for at, entry in enumerate(entries):
            place = entry.find(value)
            if place is not None:
                return "earlier", (at, place)
        if id(value) in self.run.cursor.numbers and small(array := np.asarray(value._numpy_internal())):
            return "number", (spec_of(value), Const(array))  # made anew on every call
        return "same", value

    def _result(self, tensor: Any, arguments: Arguments, first: int, end: int) -> Any:
        for number, known in enumerate(arguments.given):
            if known is tensor:
                return "argument", number
        if type(tensor) is LazyTensor:
            if tensor._out.const is not None:
                return "constant", tensor._out
            number = tensor._key - self.run.cursor.base
            if first <= number < end:
                return "tensor", number
        raise Opaque("its result is a tensor from elsewhere")


def _use_up(tape: Any) -> None:
    """Leaves a tape as `gradient` leaves it."""
    if not tape._persistent:
        if tape._recording:
            tape._pop_tape()
        tape._watched_variables = tape._tape.watched_variables()
        tape._tape = None


def _with_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a layer or loss with arrays as the tensors that it would make of them first of all."""
    if not _has_arrays(args) and not _has_arrays(tuple(kwargs.values())):
        return args, kwargs
    holder, wanted = args[0], None
    if isinstance(holder, keras.layers.Layer):
        if not getattr(holder, "_convert_input_args", False):
            return args, kwargs
    else:
        wanted = getattr(holder, "dtype", "")  # another float would be rounded by NumPy

    def convert(value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray and (wanted is None or value.dtype.kind in "iub" or value.dtype == wanted):
            try:
                return make_constant(value, None)
            except (TypeError, ValueError):
                return value  # the library shall say what is wrong with it
        if kind is list or kind is tuple:
            return kind([convert(v) for v in value])
        if kind is dict:
            return {k: convert(v) for k, v in value.items()}
        return value

    return convert(args), convert(kwargs)


def _has_arrays(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return any(_has_arrays(v) for v in value)
    return kind is np.ndarray or (kind is dict and _has_arrays(list(value.values())))
