"""Learning: one run of a library call's Python, to find what a region that stands for it would have to do."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.runtime.premises import LOOKED_AT
from coexec.runtime.proofs import Contents, Proof, containers_in, is_shared
from coexec.runtime.records import RegionEntry
from coexec.runtime.references import referenced
from coexec.runtime.regions import Arguments, Opaque, Region, anchor, form_of
from coexec.runtime.stretches import constants_of, output_of, slots_of, steps_between
from coexec.runtime.twins import interior_of
from tracer import seeds
from tracer.effects import Effects, watch
from tracer.errors import Refused
from tracer.graph import Step
from tracer.inputs import small
from tracer.intercept import handling, tape_is_empty
from tracer.lazy import LazyTensor, unwrap
from tracer.library import call_context, gradient
from tracer.location import call_stack, place_of
from tracer.op import Const
from tracer.private import EagerTensor
from tracer.spec import RESOURCE, spec_of


class Learning:
    """One run of a library call; `remark` says afterwards why it is not followed as one, or not yet."""

    def __init__(self, run: Any, region: Region, args: tuple[Any, ...], arguments: Arguments) -> None:
        self.remark: str | None = None
        self._run, self._region, self._arguments = run, region, arguments
        self._args = args
        self._gradient = region.function is gradient
        self._tape = run.tapes.number(args[0]._tape._tape) if self._gradient else -1
        self._entries = run.tapes.entries_of(self._tape)
        self._recorded: list[Step] = []  # what tapes have recorded
        self._accessed: list[Any] = []  # the variables that they have heard of
        self._made: list[int] = []  # the numbers of the tensors that came out
        self._elders = run.segments.twins.of(region, arguments.anchors, call_stack()[0])
        self._watched: set[int] | None = None  # the ids of the objects that are looked at, in a region's first run

    def call(self, kwargs: dict[str, Any]) -> Any:
        """Makes the call, and notes in the region what it did."""
        run, region, arguments, args = self._run, self._region, self._arguments, self._args
        cursor, tapes = run.cursor, run.tapes
        self._given = args, kwargs
        roots = [v for v in arguments.anchors if v is not args[0]] if self._gradient else arguments.anchors
        roots = [*roots, *(v for reached in region.reached if (v := reached()) is not None)]
        if region.is_new():
            roots += self._elders.reached
            self._watched = set(map(id, roots))
        ended, alone = len(cursor.ended), tape_is_empty()
        arguments.settle()
        tapes.catch_up()
        first = len(tapes.entries)
        tapes.steps, tapes.variables, tapes.touched = [], [], False
        run.open = False
        proof = None if self._gradient else Proof(region.function, arguments.anchors)
        effects = Effects(roots, self._give_up, proof)
        held, given = region.premises is None or region.premises.hold(), containers_in(self._given)
        if not held:  # it may do something else now, and nobody is to wonder
            region.confirmed = 0
        self._context = dict(call_context() or {})
        try:
            with seeds.listing() as drawn, handling(_Unseen(run, effects)), effects:
                result = region.function(*args, **kwargs)
        finally:
            run.open = True
            self._recorded, tapes.steps = tapes.steps or [], None
            self._accessed, tapes.variables = tapes.variables or [], None
        if run.recorder is not None:  # what it does was not known yet
            known, region.confirmed = region.confirmed, 0
            if known > 1 and run.error is None:
                self._found()
            return result
        reason = effects.reason
        if reason is None and (len(cursor.ended) != ended or cursor.step is region.start):
            reason = "its operations are not followed in one go"
        if alone and tape_is_empty():
            self._recorded, self._accessed = [], []  # the tapes of its own are nobody else's
        elif reason is None and tapes.touched and not self._gradient:
            reason = "it works on tapes itself"
        if reason is None:
            try:
                if proof is not None:
                    self._rest_on(proof, held, given, result)
                    own = effects.held | proof.premises.tensors
                    if any(id(v) in own for v in arguments.tensors):  # which of the two it takes where nobody knows
                        raise Opaque("it holds a tensor that it is given")
                with run.lock:
                    self._fill(result, effects.read, drawn)
                    self._record_as_one(first)
            except (Opaque, Refused) as error:
                reason = str(error)
        if reason is None:
            watch(effects.objects, region)
        else:
            # User code will hardly go away, and learning keeps the library calls that it makes from being jumped over.
            region.refuse(reason, effects.runs_user_code)
            self.remark = reason
        if self._tape >= 0 and args[0]._tape is None:
            tapes.finished(self._tape)
        return result

    def _give_up(self) -> None:
        """Lets the library calls inside of one that is no region be jumped over, and learnt, from now on."""
        self._run.tapes.steps = self._run.tapes.variables = None
        self._run.open = True

    def _rest_on(self, proof: Proof, held: bool, given: Contents, result: Any) -> None:
        """Notes what code of the program's that has run looks at, and that it was the same before and behind this run.

        `held`: whether what the run before has looked at was the same when this one began.
        """
        region = self._region
        premises, variables, objects = proof.end() if proof.is_needed else (None, [], [])
        if premises is not None:
            if containers_in(self._given) != given:
                raise Opaque("it changes a container that it was given")
            if is_shared(result, given):
                raise Opaque("its result holds a container that somebody else holds, too")
        if region.premises is not None and not held:
            region.changed(LOOKED_AT)
            self.remark = f"{LOOKED_AT} is not what it was"
        elif region.premises is not None and not region.premises.hold():
            raise Opaque("it changes what it looks at")
        if premises is None or region.premises is None or not held:
            if region.premises is not None or premises is not None:
                region.confirmed = 0
            if self._watched is not None and not self._watched.issuperset(map(id, objects)):
                self._watched = None  # what it did to these nobody has seen
            region.premises = premises
            region.reached = [weakref.ref(v) for v in objects]  # the next run, which must agree, watches them
            anchor(region, variables)

    def _fill(self, result: Any, read: set[int], drawn: list[seeds.Pair]) -> None:
        """Writes down what the call did; `read`: the ids of tensors whose values its Python has read."""
        run, region, arguments = self._run, self._region, self._arguments
        cursor = run.cursor
        start, end = region.start, cursor.step
        steps = steps_between(start, end)
        if steps is None or any(step.host for step in steps):
            raise Opaque("its operations are not followed in one go")
        if any(step in run.assertions for step in steps):
            raise Opaque("what an assertion says where it fails keeps changing")
        outputs = output_of(steps)
        for number, out in output_of(start.chain()).items():
            outputs[number] = out
        numbers = {v._key - cursor.base for v in arguments.tensors if type(v) is LazyTensor}
        pins: dict[int, Any] = {}
        for step in steps:
            for slot in slots_of(step):
                if 0 <= slot < start.end and slot not in numbers and not self._gradient:
                    raise Opaque("it uses a tensor that it was not given")
                if slot < 0 and -1 - slot < start.external:
                    known = cursor.externals[-1 - slot]
                    # What a gradient takes from before was recorded by its tape, whose history is part of the key.
                    if not self._gradient and not any(known is v for v in arguments.tensors):
                        pins[-1 - slot] = known
        feeds = [self._source(v) for v in cursor.externals[start.external : end.external]]
        form = form_of(result, lambda tensor: self._place(tensor, start.end, end.end))
        window = run.values[start.end : end.end]
        del run.values[start.end : end.end]
        interior = [start.end + i for i in referenced(window) if window[i]._out.const is None]
        run.values[start.end : start.end] = window
        new = cursor.externals[start.external : end.external]
        region.handles = {id(v) for v in new if v._datatype_enum() == RESOURCE}
        region.outputs = outputs
        region.first = steps[0] if steps else None
        before = region.confirmed
        known = list(zip(arguments.tensors, arguments.consts, strict=True))
        constants = {id(v) for v, const in known if const is not None}
        constants.update(id(unwrap(v)) for entry in self._entries for v in entry.constants())
        if not read <= constants:
            raise Opaque("its Python reads the value of a tensor")
        # The value of an argument that some operation has taken for a constant, or Python has read, decides what the
        # operations are. Others are equal to some constant by chance: not each time that the operations are the same.
        used = {const for step in steps for const in constants_of(step)}
        taken = [(n, const) for n, (v, const) in enumerate(known) if const in used and id(v) not in read]
        if before and region.end is end:
            taken = [each for each in taken if each in region.taken]
        region.taken = taken
        region.places = [self._slot(v) for v in arguments.tensors]
        used_seeds = seeds.places(cursor.seeds[start.draws : end.draws], drawn)
        if used_seeds is None:
            raise Opaque("it draws random numbers from seeds of its own")
        agreed = region.fill(
            read=[(n, const) for n, (v, const) in enumerate(known) if id(v) in read],
            end=end,
            feeds=feeds,
            pins=sorted(pins.items()),
            context=self._noted_for_others(),
            notes={step: run.notes[step] for step in steps if step in run.notes},
            result=form,
            recorded=self._recorded,
            accessed=self._accessed,
            seeds=used_seeds,
        )
        interior = interior if self._recorded else []
        region.interior = sorted({*region.interior, *interior}) if agreed else interior
        if before == 0 and self._watched is not None and (twin := self._elders.twin_of(region)) is not None:
            region.confirmed, region.interior = 2, sorted({*interior, *interior_of(twin, region)})
        if region.confirmed > 1:
            self._elders.confirmed(region)
        if before > 1 and not agreed:
            self._found()
        elif before and not agreed:
            self.remark = "two runs of it did not agree"

    def _noted_for_others(self) -> dict[str, Any]:
        """Returns what the call has changed in Keras' call context, which layers behind it look at."""
        before, now = self._context, call_context() or {}
        changed = {name: value for name, value in now.items() if name not in before or before[name] is not value}
        if (
            not all(value is None or type(value) is bool for value in changed.values())
            or not now.keys() >= before.keys()
        ):
            raise Opaque("it leaves something else than yes or no for the layers behind it")
        return changed

    def _found(self) -> None:
        text = f"{self._region.function.__qualname__} did something else than what was known of it"
        self._run.segments.found(text, str(place_of()), self._run.options)

    def _source(self, value: Any) -> tuple[str, Any]:
        """Returns where a tensor from outside comes from: an argument, the tape, a number of Python's, or itself."""
        for number, known in enumerate(self._arguments.tensors):
            if known is value:
                return "argument", number
        for at, entry in enumerate(self._entries):
            place = entry.find(value)
            if place is not None:
                return "earlier", (at, place)
        if id(value) in self._run.cursor.numbers and small(array := np.asarray(value._numpy_internal())):
            return "number", (spec_of(value), Const(array))  # made anew on every call
        return "same", value

    def _slot(self, value: Any) -> int | None:
        """Returns the slot at which the segment knew an argument before the call; None if it did not."""
        cursor, start = self._run.cursor, self._region.start
        if type(value) is LazyTensor and value._value is None and value._out.const is None:
            return int(value._key - cursor.base)
        return next((-1 - k for k, known in enumerate(cursor.externals[: start.external]) if known is value), None)

    def _place(self, tensor: Any, first: int, end: int) -> Any:
        """Returns where a tensor of the result comes from."""
        for number, known in enumerate(self._arguments.given):
            if known is tensor:
                return "argument", number
        if type(tensor) is LazyTensor:
            if tensor._out.const is not None:
                return "constant", tensor._out
            number = tensor._key - self._run.cursor.base
            if first <= number < end:
                self._made.append(number)
                return "tensor", number
        raise Opaque("its result is a tensor from elsewhere")

    def _record_as_one(self, first: int) -> None:
        """Notes for the tapes, from their entry `first` on, one region that did what it is known to do.

        The key of a gradient names what its tape has seen. So it is the same whether a layer was jumped over or run
        again, as every layer is now and then.
        """
        run, region, tapes = self._run, self._region, self._run.tapes
        entries = tapes.entries[first:]
        if region.confirmed < 2 or self._gradient or not self._recorded or not tapes.waiting:
            return
        if [getattr(entry, "step", None) for entry in entries] != self._recorded:
            return
        if any(entry.tapes != tapes.active for entry in entries):  # one of its own; jumped over, there would be none
            return
        tensors = {n: run.values[n] for n in (*self._made, *region.interior) if run.values[n] is not None}
        tapes.join(first, RegionEntry(region, self._arguments, tensors, run, tapes.active))


# What a handler may be given without running anybody's code for it.
_PLAIN = frozenset({LazyTensor, EagerTensor, tf.DType, str, bytes, int, float, bool, type(None)})


def _is_plain(values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind not in _PLAIN and not ((kind is list or kind is tuple) and _is_plain(value)):
            return False
    return True


class _Unseen:
    """A handler whose own Python the observer of effects does not see.

    The first time that a GPT's optimizer is learnt takes 0.3 s of CPU time so, and 0.55 where all is seen.
    """

    def __init__(self, handler: Any, effects: Effects) -> None:
        self.behind = self._handler = handler
        self._effects = effects
        self.device, self.tapes = handler.device, handler.tapes
        self.constant, self.library, self.aside = handler.constant, handler.library, handler.aside

    @property
    def open(self) -> bool:
        return bool(self._handler.open)

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any:
        if not _is_plain(args):
            return self._handler.fast(op, name, args)
        with self._effects.averted():
            return self._handler.fast(op, name, args)

    def expected(self, op: str, args: tuple[Any, ...]) -> Any:
        if not _is_plain(args):
            return self._handler.expected(op, args)
        with self._effects.averted():
            return self._handler.expected(op, args)

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any:
        with self._effects.averted():
            return self._handler.execute(device, op, inputs, attrs, outputs, cancel)

    def index(self, index: tuple[tuple[int, ...], ...]) -> list[Any] | None:
        with self._effects.averted():
            return self._handler.index(index)
