"""Observation: one run of a library call's Python, to learn what a region that stands for it has to do."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from coexec.base.tuning import tuning
from coexec.follow.backward import FunctionEntry, FunctionRecord, LibraryEntry
from coexec.follow.follower import Follower
from coexec.follow.unwatched import Unwatched
from coexec.guards.call_key import CallArguments, CannotMemoize, CannotMemoizeForLong, marks_changed, marks_emptied
from coexec.guards.library_reads import LibraryReads
from coexec.guards.purity import Contents, PurityProof, containers_in, is_shared
from coexec.guards.state import LOOKED_AT
from coexec.guards.watch import Watch
from coexec.guards.watched_state import Effect
from coexec.launch.keras_error_context import note_of
from coexec.memoize.entry import Region, anchor, form_of, shapes_of
from coexec.memoize.feed_sources import FeedSources
from coexec.memoize.gradient_spans import BackwardCalls, HeardCalls
from coexec.memoize.known_calls import KnownCalls
from coexec.memoize.proven_sizes import ProvenSizes
from coexec.memoize.redirect import original_of
from coexec.memoize.region_tape_entry import RegionEntry
from coexec.memoize.shape_variants import interior_of
from coexec.memoize.step_range import (
    Outputs,
    asks,
    constants_of,
    is_fed_the_same,
    slot_before,
    slots_of,
    steps_between,
)
from tracer import intercept, library, seeds
from tracer.effects import Effects, watch
from tracer.errors import Refused
from tracer.faults import call, is_fault, passes
from tracer.graph import Step
from tracer.intercept import handling, tape_is_empty
from tracer.lazy import LazyTensor, unwrap
from tracer.library import call_context, gradient
from tracer.location import place_of
from tracer.old_generation import hand_over
from tracer.op import Const
from tracer.sizes import SizedConst, const_at
from tracer.spec import RESOURCE

_NONE: Any = object()  # no result yet
_CALLS = "it calls a graph function"
_CUT = "its operations are not followed in one go"
# CPython's words where a C function has set an exception, and calls Python before it returns, as `TFE_Py_TapeGradient`
# does: the profile function is called meanwhile, and seems to fail. The exception is the error's cause.
_MASKING = "returned a result with an exception set"


def _holds_any(value: Any, contents: Any) -> bool:
    """Returns whether a result holds a list or dict that was there before: a skipped call would return another."""
    if isinstance(value, (list, dict)) and id(value) in contents:
        return True
    if isinstance(value, (list, tuple)):
        return any(_holds_any(item, contents) for item in value)
    return isinstance(value, dict) and any(_holds_any(item, contents) for item in value.values())


def _is_of_sizes(tensor: Any) -> bool:
    """Returns whether this is one of the few integers that TensorFlow's functions make of sizes, and keep."""
    return bool(tensor.dtype.is_integer and tensor._num_elements() <= tuning.few_sizes)


@passes
def _raise_masked(cause: BaseException, error: SystemError) -> NoReturn:
    """Raises the exception that a C function has set, where it would have come without the profile function."""
    raise cause.with_traceback(error.__traceback__)


class Observation:
    """One run of a library call; `remark` says afterwards why it is not memoized, or not yet."""

    def __init__(
        self, run: Follower, region: Region, args: tuple[Any, ...], arguments: CallArguments, known: KnownCalls,
        fits: bool, place: Any,
    ) -> None:  # fmt: skip
        """`fits`: whether the call could have been skipped, and is rerun for a check; `place`: see `place_of_call`."""
        self.remark: str | None = None
        self._run, self._region, self._arguments = run, region, arguments
        self._args = args
        self._gradient = region.function is gradient
        self._tape = run.tapes.number(args[0]._tape._tape) if self._gradient else -1
        self._entries = run.tapes.entries_of(self._tape)
        self._sources = FeedSources(run, region.start, arguments, self._entries)
        self._recorded: list[Step | LibraryEntry] = []  # what tapes have recorded
        self._accessed: list[Any] = []  # the variables reported to them
        self._made: list[int] = []  # the numbers of the result's tensors
        self._place_of_call = place
        self._elders = known.variants.of(place)
        self._heard: HeardCalls | None = None  # of a gradient with backward functions on its tape
        self._effects: Sequence[Effect] = ()  # what it has changed
        self._watched: set[int] = set()  # ids of the observed objects, in a region's first run
        self._observes_all = False  # whether this is such a run, and its effects on all that it has read were observed
        self._known = known
        self._checks = fits
        self._before = region.confirmed
        self._reads: LibraryReads | None = None  # the guards by which this run is known to run code that was seen

    def call(self, kwargs: dict[str, Any], tell: Callable[[str], None]) -> Any:
        """Makes the call, and stores in the region what it did; `tell` is passed the reason if it is not memoized."""
        run, region, arguments, args = self._run, self._region, self._arguments, self._args
        cursor, tapes = run.cursor, run.tapes
        self._given = args, kwargs
        roots = [v for v in arguments.anchors if v is not args[0]] if self._gradient else arguments.anchors
        if region.helper is not None:  # its writes are watched
            roots = []
        roots = [*roots, *(v for reached in region.reached if (v := reached()) is not None)]
        if region.is_new():
            roots += self._elders.reached
            self._watched, self._observes_all = set(map(id, roots)), True
        ended, alone = len(cursor.ended), tape_is_empty()
        arguments.settle()
        tapes.catch_up()
        first = len(tapes.entries)
        run.observe()
        around = tapes.around
        self._reads = self._known_code(kwargs, around)
        proof: Any = None
        if self._lightly:
            pass
        elif region.helper is not None:
            proof = Watch(original_of, self._known.watching.most())
        elif not self._gradient:
            proof = PurityProof(region.function, arguments.anchors)
        effects = Effects(roots, self._give_up, proof, self._lightly)
        held, given = region.state_guards is None or region.state_guards.hold(), containers_in(self._given)
        if not held:  # then a disagreement is no finding
            region.confirmed = 0
        self._context = dict(call_context() or {})
        if self._gradient and isinstance(around, BackwardCalls):
            self._heard = around.heard = HeardCalls(run, effects.averted, self._entries)
        self._marks = [dict(vars(tensor)) for tensor in arguments.given]
        began, result = False, _NONE
        try:
            cut = None if self._heard is not None else functools.partial(effects.refuse, _CUT)
            handler = run if self._lightly else Unwatched(run, run, effects.averted, cut)
            with seeds.listing() as drawn, handling(handler), effects:
                began = True
                if self._heard is not None:
                    self._heard.drawn = drawn
                result = call(region.function, args, kwargs)
        except BaseException as error:
            run.observed()
            if isinstance(error, SystemError) and error.__cause__ is not None and str(error).endswith(_MASKING):
                _raise_masked(error.__cause__, error)
            if not isinstance(error, Exception) or not is_fault(error):
                raise
            self._give_way(error, effects)
            if result is _NONE:
                # It came before the call, or while an exception of the program was propagating.
                on_its_way = None if error.__suppress_context__ or not began else error.__context__
                raise on_its_way or error from None
            if not run.fault(error):
                raise
            return result
        finally:
            if isinstance(around, BackwardCalls):
                around.heard = None
        try:
            self._recorded, self._accessed = run.observed()
            self._conclude(result, effects, drawn, ended, alone, first, proof, held, given)
            hand_over()
            if self.remark is not None:
                tell(self.remark)
        except Exception as error:
            if not is_fault(error):
                raise
            self._give_way(error, effects)
            if not run.fault(error):
                raise
        return result

    @property
    def _lightly(self) -> bool:
        """Whether the calls that it makes need not be seen."""
        return self._reads is not None

    def _known_code(self, kwargs: dict[str, Any], around: Any) -> LibraryReads | None:
        """Returns guards that hold now, and by which the call runs only code that was seen; None if there are none.

        They are those of a library call's first run, by which it would be skipped, too: either of this one, or of one
        with the same objects and specs, such as another iteration's. Later reruns see the calls again, as they are for
        what no guard can tell.
        """
        region, reads = self._region, None
        if region.state_guards is not None or region.helper is not None or isinstance(around, BackwardCalls):
            return None
        if self._run.options.validating or region.uses > tuning.region_first_check:
            return None
        if region.confirmed > 0:
            reads = region.reads
        elif region.alike is not None:
            other = self._known.seen(region.alike)
            if other is not None and other.confirmed > 0 and not other.read and other.state_guards is None:
                reads = other.reads
        return reads if reads is not None and reads.hold() else None

    def _give_way(self, error: Exception, effects: Effects) -> None:
        """Cleans up after a run during which the runtime failed."""
        self._region.refuse(f"the runtime failed: {error}", for_long=True)
        effects.stop()
        intercept.handle(self._run)

    def _conclude(
        self, result: Any, effects: Effects, drawn: list[seeds.Pair], ended: int, alone: bool, first: int,
        proof: PurityProof | Watch | None, held: bool, given: Contents,
    ) -> None:  # fmt: skip
        """Stores in the region what the call did, or why it cannot be memoized."""
        run, region, arguments, args = self._run, self._region, self._arguments, self._args
        cursor, tapes = run.cursor, run.tapes
        if run.recorder is not None:  # it did something new
            known, region.confirmed = region.confirmed, 0
            if known > 1 and self._checks and run.error is None:
                self._found()
            return
        reason, for_long = effects.reason, effects.runs_user_code
        in_one = len(cursor.ended) == ended
        if reason is None and not in_one and not self._heard:
            reason = _CUT
        if alone and tape_is_empty():
            self._recorded = []  # its own tapes are private
        elif reason is None and tapes.touched and not self._gradient:
            reason = "it works on tapes itself"
        if reason is None:
            try:
                if effects.silence is not None and cursor.step.dynamic:
                    raise CannotMemoizeForLong("what it warns of may depend on sizes, which differ between calls")
                own = effects.held
                self._observes_all = self._observes_all and not effects.runs_registered
                if containers_in(self._given) != given:
                    raise CannotMemoize("it changes a container that it was given")
                if _holds_any(result, effects.contents):
                    raise CannotMemoize("its result holds a container that an object holds, too")
                if proof is not None:
                    self._rest_on(proof, held, given, result, effects)
                    own = effects.held | proof.state_guards.tensors
                if not self._gradient:
                    if any(id(v) in own for v in arguments.tensors):  # ambiguous which of the two an operation takes
                        raise CannotMemoize("it holds a tensor that it is given")
                with run.lock:
                    if self._heard:
                        self._fill_parts(self._heard, result, effects.read)
                    elif self._lightly:
                        self._fill(result, {id(arguments.tensors[number]) for number, _ in region.read}, drawn)
                    else:
                        self._fill(result, effects.read, drawn)
                    self._record_as_one(first)
            except (CannotMemoize, Refused) as error:
                reason, for_long = str(error), isinstance(error, CannotMemoizeForLong)
        if reason is None:
            watch(effects.objects, region)
            # After that, as it may set hooks on classes.
            if self._lightly:  # nothing is known of the code that it ran, if it disagreed
                region.reads = self._reads if region.confirmed > self._before else None
            elif region.confirmed > 1 or region.state_guards is None:
                region.reads = LibraryReads(effects.roots, effects.ran.values(), effects.contents, effects.silence)
                if region.alike is not None and region.state_guards is None and effects.silence is None:
                    self._known.see(region.alike, region)
            else:
                region.reads = None
        else:
            # It will most likely run user code again, and observing prevents library calls inside from being skipped.
            region.refuse(reason, for_long)
            self._known.refused(self._place_of_call)
            self.remark = reason
        if self._tape >= 0 and args[0]._tape is None:
            tapes.finished(self._tape)

    def _give_up(self) -> None:
        """Stops observing, so that library calls inside this one can be skipped and observed themselves."""
        self._run.observed()

    def _rest_on(self, proof: PurityProof | Watch, held: bool, given: Contents, result: Any, seen: Effects) -> None:
        """Stores the guards of what the program's code has read, which must hold before and after this run.

        `held`: whether the guards of the previous run held when this one began; `seen`: all code that ran, all objects
        that were observed.
        Raises `CannotMemoize` if the call changes what it reads, or shares containers.
        """
        region = self._region
        state_guards, variables, objects = proof.end(seen.ran) if proof.is_needed else (None, [], [])
        if state_guards is not None:
            if is_shared([result, *[effect.value for effect in proof.effects if not effect.is_old]], given):
                raise CannotMemoize("its result holds a container that somebody else holds, too")
            self._effects = proof.effects
        if region.state_guards is not None and not held:
            region.changed(LOOKED_AT)
            self.remark = f"{LOOKED_AT} is not what it was"
        elif region.state_guards is not None and not region.state_guards.hold():
            raise CannotMemoize("it changes what it looks at")
        if state_guards is None or region.state_guards is None or not held:
            if region.state_guards is not None or state_guards is not None:
                region.confirmed = 0
            if any(id(each) not in self._watched and id(each) not in seen.contents for each in objects):
                self._observes_all = False
            region.state_guards = state_guards
            region.reached = [weakref.ref(v) for v in objects]  # observed in the next run, which must agree
            anchor(region, variables)

    def _fill(self, result: Any, read: set[int], drawn: list[seeds.Pair]) -> None:
        """Stores what the call did; `read`: ids of tensors whose values its Python read. Raises `CannotMemoize`."""
        run, region, arguments = self._run, self._region, self._arguments
        cursor = run.cursor
        start, end = region.start, cursor.step
        steps = steps_between(start, end)
        if steps is None or any(step.host for step in steps):
            alone = any(step.host and step.node is not None and step.node.host is not None for step in steps or ())
            raise (CannotMemoizeForLong if alone else CannotMemoize)(_CUT)
        if any(step.node is not None and step.node.callee is not None for step in steps):
            # Which function is called is up to TensorFlow's Python, by what no guard can tell.
            raise CannotMemoizeForLong(_CALLS)
        if any(step in run.assertions for step in steps):
            raise CannotMemoize("what an assertion says where it fails keeps changing")
        if region.function in library.functions and any(note_of(step, run.notes) is not None for step in steps):
            raise CannotMemoizeForLong("where it fails, the error says what the layer around it was given")
        if end.dynamic and (region.state_guards is not None or region.helper is not None):
            raise CannotMemoizeForLong("code of the program's that it runs may read sizes, which differ between calls")
        numbers = {v._key - cursor.base for v in arguments.tensors if type(v) is LazyTensor}
        given = set(map(id, arguments.tensors))
        pins: dict[int, Any] = {}
        for step in steps:
            for slot in slots_of(step):
                if 0 <= slot < start.end and slot not in numbers and not self._gradient:
                    raise CannotMemoize("it uses a tensor that it was not given")
                if slot < 0 and -1 - slot < start.external:
                    known = cursor.externals[-1 - slot]
                    # The key of a gradient names what its tape has recorded, and where that was fed.
                    if id(known) not in given and not (self._gradient and self._sources.is_recorded(known)):
                        pins[-1 - slot] = known
        feeds = [self._sources.of(v) for v in cursor.externals[start.external : end.external]]
        form = form_of(result, place := functools.partial(self._place, first=start.end, end=end.end))
        if end.dynamic:
            specs = [spec for step in steps for spec in step.specs]
            feeds = [self._sources.sized(*pair) for pair in zip(feeds, specs, strict=True)]
            fed = {number for source, number in feeds if source == "argument"}
            region.unfed = [n for n, v in enumerate(arguments.tensors) if n not in fed and self._slot(v) is None]
            region.shapes = shapes_of(arguments.tensors, region.unfed)
        effects = [
            (effect._replace(value=None), ("object", effect.value) if effect.is_old else form_of(effect.value, place))
            for effect in self._effects
        ]
        interior = run.referenced_between(start.end, end.end)
        new = cursor.externals[start.external : end.external]
        region.handles = {id(v) for v in new if v._datatype_enum() == RESOURCE}
        region.outputs = Outputs(start, steps)
        region.first = steps[0] if steps else None
        region.asks = asks(steps)
        before = region.confirmed
        if before > 1 and region.end is not end:
            earlier = steps_between(start, region.end)
            self._checks = self._checks and not (earlier and is_fed_the_same(earlier, steps, cursor.externals))
        known_read = self._fill_values(steps, end, read)
        region.places = [self._slot(v) for v in arguments.tensors]
        used_seeds = seeds.places(cursor.seeds[start.draws : end.draws], drawn)
        if used_seeds is None:
            raise CannotMemoize("it draws random numbers from seeds of its own")
        agreed = region.fill(
            read=known_read,
            calls=[],
            spans=[],
            end=end,
            early=self._early_inputs() if self._gradient else {},
            feeds=feeds,
            pins=sorted(pins.items()),
            context=self._noted_for_others(),
            notes={step: run.notes[step] for step in steps if step in run.notes},
            effects=effects,
            marks=marks_changed(arguments.given, self._marks, lambda mark: form_of(mark, place)),
            result=form,
            recorded=[self._noted(each) if isinstance(each, LibraryEntry) else each for each in self._recorded],
            accessed=list(map(weakref.ref, self._accessed)),
            seeds=used_seeds,
        )
        region.emptied |= marks_emptied(arguments.given, self._marks)
        interior = interior if self._recorded else []
        region.interior = sorted({*region.interior, *interior}) if agreed else interior
        if before == 0:
            # One whose effects were not observed on all objects that it has read may be the first of two runs.
            twin = (self._elders.variant_of(region) or self._elders.repeated(region)) if self._observes_all else None
            if twin is not None:
                region.confirmed, region.interior = 2, sorted({*interior, *interior_of(twin, region)})
                if twin.confirmed == 1:
                    twin.confirmed, twin.interior = 2, sorted({*twin.interior, *interior_of(region, twin)})
            elif self._was_recorded(steps, result):
                region.confirmed = 2
            else:
                self._elders.ran_once(region)
        if before == 0 and self._is_certain():
            region.confirmed = 2
            region.run_again += 1  # not in the same call as what is on its tape
        if end.dynamic:
            self._prove_sizes(start, end, agreed)
        if region.confirmed > 1:
            self._elders.confirmed(region)
            self._known.confirmed(self._place_of_call)
        if region.confirmed == 1 and self._recorded:
            run.tapes.unsettled.update(run.tapes.active)
        self._compare(before, agreed)

    def _was_recorded(self, steps: list[Step], result: Any) -> bool:
        """Returns whether the recorded call did the same; what is fitted to sizes is checked by later runs alone."""
        if not self._observes_all or self._run.cursor.step.dynamic:
            return False
        return self._known.recorded.have(self._region, steps, self._run, self._arguments, (self._given, result))

    def _is_certain(self) -> bool:
        """Returns whether one run tells enough: of a gradient that no tape records, of TensorFlow's functions alone.

        These only compute, and its key names all that they are given. Its guards are the strictest that a run allows:
        each value that operations have taken has to be the same. Numbers follow from the sizes in the key. Only two
        runs tell whether a tensor that comes from elsewhere is the same in each call, but a constant of TensorFlow's.
        """
        if not self._gradient or self._recorded or self._checks:
            return False
        if any(source == "same" and not _is_of_sizes(value) for source, value in self._region.feeds):
            return False
        return not any(type(entry) is FunctionEntry for entry in self._entries)  # the program's: it runs each time

    def _prove_sizes(self, start: Step, end: Step, agreed: bool) -> None:
        """Notes the sizes of a run on a dynamic path: the others are those of runs that it agreed with."""
        region = self._region
        if region.sizes is None or not agreed:
            region.sizes = ProvenSizes(start, end)
        before = self._run.tapes.sizes_of(self._tape) if self._gradient else ()
        region.sizes.add(self._run.cursor.externals, before)

    def _early_inputs(self) -> dict[int, tuple[str, Any]]:
        """Returns the sources of what a gradient's recorded operations take from before it, by slot.

        Tapes know tensors by their objects, so these must be those of the records before. Raises `CannotMemoize`.
        """
        run, start, early = self._run, self._region.start, {}
        steps = [step for step in self._recorded if not isinstance(step, LibraryEntry)]
        if len(steps) < len(self._recorded):
            raise CannotMemoize("a tape records the gradient, and a backward function's operation in it")
        for slot in sorted({slot for step in steps for slot in slots_of(step)}):
            if slot >= start.end:
                continue
            tensor = run.values[slot] if slot >= 0 else run.cursor.externals[-1 - slot]
            source = self._sources.known.get(id(tensor))
            if source is not None:
                early[slot] = source
            elif slot >= 0:
                raise CannotMemoize("a tape records the gradient, which takes a tensor from elsewhere")
        return early

    def _noted(self, entry: LibraryEntry) -> FunctionRecord:
        """Returns what to record of an operation with a library's backward function. Raises `CannotMemoize`."""
        cursor, start = self._run.cursor, self._region.start

        def slot(tensor: Any) -> Any:
            if type(tensor) is LazyTensor and tensor._out.const is not None:
                if start.dynamic or self._run.cursor.step.dynamic:
                    raise CannotMemoize("a backward function in it holds a number that may depend on sizes")
                return tensor._out.spec, tensor._out.const
            if type(tensor) is LazyTensor and tensor._value is None:
                number = tensor._key - cursor.base
                if number >= start.end or any(tensor is v for v in self._arguments.tensors):
                    return number
            elif (place := cursor.place(tensor)) is not None:
                return -1 - place
            raise CannotMemoize("a backward function in it holds a tensor from elsewhere")

        return entry.noted(slot)

    def _compare(self, before: int, agreed: bool) -> None:
        """Reports a run that disagreed with the `before` earlier ones; raises `CannotMemoize` if that recurs."""
        if before > 1 and self._checks and not agreed:
            self._found()
        elif before and not agreed:
            self.remark = "two runs of it did not agree"
            if self._region.disagreed >= tuning.region_disagreements:
                raise CannotMemoize("its runs keep disagreeing")

    def _fill_values(self, steps: list[Step], end: Step, read: set[int]) -> list[tuple[int, Const]]:
        """Stores the arguments whose values operations use as constants; returns those that Python has read.

        An argument may equal a constant by chance, so only those count that do so in every run of the same operations.
        """
        region, arguments = self._region, self._arguments
        known = list(zip(arguments.tensors, arguments.consts, strict=True))
        constants = {id(v) for v, const in known if const is not None}
        constants.update(id(unwrap(v)) for entry in self._entries for v in entry.constants())
        if not read <= constants:
            raise CannotMemoize("its Python reads the value of a tensor")
        externals = self._run.cursor.externals
        used = {const_at(const, externals) for step in steps for const in constants_of(step)}
        for assertion in [step.assertion for step in steps if step.assertion is not None]:
            for shown in assertion.shown():
                const = shown if isinstance(shown, Const) else self._run.cursor.constant_of(shown)
                if const is None:
                    raise CannotMemoize("an assertion shows a tensor that no operation takes")
                used.add(const)
        if end.dynamic and not self._gradient:
            sized = {c.at(externals) for step in steps for c in constants_of(step) if isinstance(c, SizedConst)}
            if any(const in sized for _, const in known):
                raise CannotMemoizeForLong("a number that it is given may depend on sizes, which differ between calls")
        taken = [(n, c) for n, (v, c) in enumerate(known) if c is not None and c in used and id(v) not in read]
        if region.confirmed and region.end is end:
            before_taken = set(region.taken)
            taken = [each for each in taken if each in before_taken]
        region.taken = taken
        return [(n, const) for n, (v, const) in enumerate(known) if id(v) in read and const is not None]

    def _fill_parts(self, heard: HeardCalls, result: Any, read: set[int]) -> None:
        """Stores what a gradient did around the backward functions that it called."""
        if self._recorded:
            raise CannotMemoize("a tape records the gradient, and what a backward function of the program does in it")
        region = self._region
        parts = heard.parts(result, self._arguments, self._sources)
        steps = [step for some in parts.steps for step in some]
        if any(step.dynamic for step in steps):
            raise CannotMemoizeForLong("it calls code of the program's at sizes that differ between calls")
        first, before = parts.spans[0], region.confirmed
        known_read = self._fill_values(steps, first.end, read)
        region.handles, region.outputs = parts.handles[0], parts.outputs[0]
        region.first = parts.steps[0][0] if parts.steps[0] else None
        region.asks = asks(steps)
        region.pins = [(k, value) for k, (source, value) in first.pins if source == "same"]  # the key has the others
        region.seeds, region.recorded, region.accessed = (0, []), [], []
        agreed = region.fill(
            read=known_read,
            calls=parts.calls,
            spans=parts.spans,
            end=first.end,
            feeds=[],
            context=self._noted_for_others(),
            notes={},
            result=parts.result,
        )
        region.parts = parts
        self._compare(before, agreed)

    def _noted_for_others(self) -> dict[str, Any]:
        """Returns what the call has changed in Keras' call context, which later layers read."""
        before, now = self._context, call_context() or {}
        changed = {name: value for name, value in now.items() if name not in before or before[name] is not value}
        if (
            not all(value is None or type(value) is bool for value in changed.values())
            or not now.keys() >= before.keys()
        ):
            raise CannotMemoize("it leaves something else than yes or no for the layers behind it")
        return changed

    def _found(self) -> None:
        text = f"{self._region.function.__qualname__} did something else than what was known of it"
        self._run.segments.found(text, str(place_of()), self._run.options)

    @functools.cached_property
    def _given_numbers(self) -> dict[int, int]:
        """The numbers of the arguments as the program passed them, by id."""
        return {id(known): number for number, known in reversed(list(enumerate(self._arguments.given)))}

    def _slot(self, value: Any) -> int | None:
        """Returns an argument's slot in the segment before the call; None if it had none."""
        return slot_before(self._region.start, value, self._run.cursor)

    def _place(self, tensor: Any, first: int, end: int) -> Any:
        """Returns the source of a tensor of the result; raises `CannotMemoize` if it is unknown."""
        number = self._given_numbers.get(id(tensor))
        if number is not None:
            return "argument", number
        if type(tensor) is LazyTensor:
            if tensor._out.const is not None:
                return "constant", tensor._out
            number = tensor._key - self._run.cursor.base
            if first <= number < end:
                self._made.append(number)
                return "tensor", number
        raise CannotMemoize("its result is a tensor from elsewhere")

    def _record_as_one(self, first: int) -> None:
        """Replaces the tape entries from `first` on by one of the region, if it did what it is known to do.

        A gradient's key includes its tape's history. This makes it the same whether a layer was skipped or rerun for a
        check.
        """
        run, region, tapes = self._run, self._region, self._run.tapes
        entries = tapes.entries[first:]
        if region.confirmed < 2 or not self._recorded or not tapes.waiting:
            return
        if [getattr(entry, "step", None) for entry in entries] != self._recorded:
            return
        if any(entry.tapes != tapes.active for entry in entries):  # a tape opened inside, unlike in a skipped call
            return
        tensors = {n: run.values[n] for n in (*self._made, *region.interior) if run.values[n] is not None}
        given = set(map(id, self._arguments.given))  # they may vary
        constants = [v for entry in entries for v in entry.constants() if id(v) not in given]
        earlier = self._entries if self._gradient else None
        tapes.join(first, RegionEntry(region, self._arguments, tensors, run, tapes.active, constants, earlier))
