"""Cursor: matches the running program's operations against a trace graph.

`advance` compares an operation with the steps that may come next. The common case costs one comparison of names, one of
attributes, and one integer comparison per input, independent of the size of the graph. If no step matches, `adopt`
looks up the operation's node by location: a known node reached by a new path (after a join, at a new cut, with other
wiring) becomes a new step; an unknown one is a mismatch, and the call diverges.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tracer import seeds
from tracer.callees import CALLED, Callee, name_in
from tracer.derive import derive, feed_changed, folded
from tracer.fed_numbers import is_from_elsewhere, is_same_number, note_fed
from tracer.graph import (
    CONST,
    DECIDES,
    OPEN_VARIABLE,
    VALUE_SHAPED,
    Node,
    Step,
    TraceGraph,
    Variant,
    has_open,
    has_open_variable,
    is_written,
    splits,
)
from tracer.index import Index
from tracer.inputs import NATURAL, Unsupported, has_tensors, overflows, shape_like
from tracer.intercept import tape_is_empty
from tracer.lazy import LazyTensor, Output
from tracer.location import Location, call_stack, user_frames
from tracer.op import Const, same, signature_of
from tracer.open_sizes import close, is_opening, leads_to, open_variant, opens_anew
from tracer.private import EagerTensor, core
from tracer.rebuild import results_of
from tracer.sizes import SizedConst
from tracer.spec import RESOURCE, Spec
from tracer.variable_ops import is_variable_op
from tracer.windows import size_at, window
from tracer.wiring import Wiring, is_given, number_fed

MAX_STEPS = 256  # alternatives kept after one step; the oldest are dropped
# How often a path may come to a known operation or library call in the middle of a segment by another way before it is
# a join, before which the segment is cut. (A GAN's step that mixes its images with those of earlier calls was wired
# anew in every call, and took as long as eagerly; with the cut, 0.04 of the time. With 2 ways it is learnt later.)
MAX_WAYS = 1
MAX_CALL_WAYS = 3  # the same for a call of a graph function

_runs = itertools.count(1)


@dataclass(frozen=True)
class Mismatch:
    """Why a call diverged: the kind, what was expected, what was seen, and where."""

    kind: str
    expected: str
    seen: str
    location: str

    def __str__(self) -> str:
        return f"{self.kind}: expected {self.expected}, saw {self.seen}"

    @property
    def hint(self) -> str:
        """What a user may do about it."""
        return _HINTS.get(self.kind, "")


FORCED = Mismatch("forced", "nothing", "a test that asks for a divergence", "coexec.testing.diverge_at")

_HINTS = {
    "new operation": "nothing, if this path is one of few; each is recorded once",
    "new shapes": "give inputs of few shapes, for example by padding the last batch of an epoch",
}


class Cursor:
    """Follows one call along `graph`.

    Tensor keys are `base` plus the number in the segment. Bases are unique per call, so no two calls share a key.
    """

    def __init__(self, graph: TraceGraph) -> None:
        self.graph = graph
        graph.begin_call()
        self.base = next(_runs) << 32
        self.step, self._behind = graph.entry.start_after(), graph.entry  # the latter: what came before the segment
        self.externals: list[Any] = []  # the current segment's feeds
        self._index = Index(self.externals)
        self.seeds: list[seeds.Pair] = []  # seeds of the current segment's random operations, in order
        self.handles: set[int] = set()  # ids of feeds that are resources: an alias needs its own wiring
        self.numbers: set[int] = set()  # ids of feeds made from Python values
        self.ended: list[Step] = []  # the last step of each finished segment
        self.made: dict[int, Node | None] = {}  # eager tensors computed by this call, by id: what made them
        self.decided: dict[int, Const] = {}  # the values of those that decide shapes
        self._counts: Counter[Any] | None = None
        self._counted: list[Step] = []  # per segment, the step up to which `_counts` is complete
        self.adopted = 0  # operations that no known step matched
        self.sizes: list[tuple[Any, ...]] = []  # of the feeds of ended segments that are for any size
        self.adopted_in: list[tuple[Step, dict[int, Any]]] = []  # segments with such: last step, fed Python numbers
        self.cuts_at_joins = True  # whether `adopt` may ask for a cut,
        self.meets = True  # and where ways meet
        self.opens = False  # whether sizes that depend on values may be open (`open_sizes`)
        self.closing = False  # whether some were, or numbers were fed, that are known from the next call on
        self._newest: Step | None = None  # the last step that `adopt` added
        self.mismatch: Mismatch | None = None

    # Hot path.

    def advance(
        self, op: str, inputs: tuple[Any, ...], attrs: tuple[Any, ...] | None, tried: Step | None = None
    ) -> Step | None:
        """Moves to the step that matches this operation and returns it; None if no known step does.

        `attrs` is None if they follow the inputs in `inputs`, as TensorFlow's fast path passes them. `tried` is the
        step taken last time, if it is known not to match.
        """
        here = self.step
        step = here.hot
        if step is None or step is tried or not self.match(step, op, inputs, attrs):
            for step in _in_turn(here):
                if self.match(step, op, inputs, attrs):
                    here.hot = step
                    break
            else:
                return None
        self.step = step
        return step

    def is_next(self, step: Step, op: str, args: tuple[Any, ...]) -> bool:
        """Returns whether an operation is this `plain` step: known tensors in, one tensor out, no stack to compare."""
        try:
            if step.op != op or args[step.arity :] != step.attrs:
                return False
        except ValueError:  # `!=` is elementwise on arrays among the attributes
            return False
        base = self.base
        for want, value in zip(step.slots, args):  # noqa: B905  (attributes follow the inputs)
            if want >= 0:
                if type(value) is not LazyTensor or value._key - base != want:
                    return False
            elif want > CONST and self.externals[-1 - want] is not (
                value._value if type(value) is LazyTensor else value
            ):
                if not self._feed(value, -1 - want, step, args):  # a constant that has no tensor yet
                    return False
        return not step.consts or self._consts_fit(step.consts, args)

    def match(self, step: Step, op: str, inputs: tuple[Any, ...], attrs: tuple[Any, ...] | None) -> bool:
        """Returns whether an operation is this step; if so, takes its feeds and seeds, else changes nothing."""
        if step.op != op or step.fast is not (attrs is None) or (step.checked and step.frames != user_frames()):
            return False
        if step.open and not self.may_open():
            return False
        if step.host:
            if step.join:
                cuts = self.cuts_at_joins or step.parent.dynamic or step.node.callee is not None  # type: ignore[union-attr]
                return cuts and _is_at(step, op, inputs if attrs is None else (*inputs, *attrs))
            if step.node.host == CALLED and attrs is not None and (name := name_in(attrs)) is not None:  # type: ignore[union-attr]
                return self.graph.callees.runs_alone(name)
            return step.node.host != DECIDES or not self._is_decided(op, inputs)  # type: ignore[union-attr]
        if attrs is None:
            attrs = inputs[step.arity :]
        pair = None
        if step.seeded:
            pair, attrs = seeds.split(op, attrs)
        try:
            if not same(attrs, step.attrs) if step.exact else attrs != step.attrs:
                return False
        except ValueError:  # `!=` is elementwise on arrays among them
            return False
        base = self.base
        mark = len(self.externals)
        for want, value in zip(step.slots, inputs):  # noqa: B905  (attributes may follow the inputs)
            if want >= 0:
                if type(value) is not LazyTensor or value._key - base != want:
                    break
            elif want > CONST:
                if not self._feed(value, -1 - want, step, inputs):
                    break
        else:
            fits = not step.window or size_at(step.node, inputs, self.constant_of) == step.outputs[0].spec.shape
            if (fits and (not step.consts or self._consts_fit(step.consts, inputs))) and (
                not step.lists or self._match_lists(step, inputs)
            ):
                if pair is not None:
                    self._draw(step, pair)
                return True
        if len(self.externals) > mark:
            for real in self.externals[mark:]:
                self.handles.discard(id(real))
                self.numbers.discard(id(real))
            del self.externals[mark:]
        return False

    def may_open(self) -> bool:
        """Returns whether sizes may be left open here: not where a tape would record the operation."""
        return self.opens and tape_is_empty()

    def _draw(self, step: Step, pair: seeds.Pair) -> None:
        """Records the seeds of a matched step, and marks them as used."""
        seeds.take(pair)
        self.seeds[step.draws - 1 :] = [pair]

    def _feed(self, value: Any, k: int, step: Step, inputs: tuple[Any, ...]) -> bool:
        """Returns whether a value is, or can become, feed `k` of a step; appends a new feed to `externals`."""
        externals = self.externals
        if k > len(externals):
            return False
        kind = type(value)
        key = None  # of a number: what it was converted from
        if kind is EagerTensor:
            real = value
        elif kind is LazyTensor:
            real = value._value
            if value._out.const is not None:
                key = value._out
                known = step.numbers.get(k) if real is None else None
                real = value._value = known[1] if known is not None and known[0] is key else value.resolve()
            elif real is None:
                return False  # not computed yet, so not a feed: another wiring
        elif k == len(externals) and (known := step.numbers.get(k)) is not None and is_same_number(known[0], value):
            self.numbers.add(id(known[1]))
            externals.append(known[1])
            return True
        elif k == len(externals) and value is not None and not has_tensors(value) and not overflows(value):
            spec = step.specs[k - step.parent.external]  # type: ignore[union-attr]
            try:
                if NATURAL.get(kind) != spec.enum and not is_given(value, spec, k, step, inputs):
                    return False  # 1, 1.0 and True differ in dtype unless another input decides it
                real = number_fed(value, spec, k, step, inputs)
            except (Unsupported, TypeError, ValueError):
                return False
            key = value
        else:
            return False
        if k < len(externals):
            return externals[k] is real
        spec = step.specs[k - step.parent.external]  # type: ignore[union-attr]
        if real._datatype_enum() != spec.enum or (
            real._shape_tuple() != spec.shape
            if spec.__class__ is Spec
            else not spec.admits(real._shape_tuple(), externals)
        ):
            return False
        if spec.enum == RESOURCE:
            if id(real) in self.handles or self.graph.handle_spec(real) is not spec:
                return False
            self.handles.add(id(real))
        elif key is not None:
            self.numbers.add(id(real))
            note_fed(step, k, key, real)
        externals.append(real)
        return True

    def _consts_fit(self, consts: dict[int, Const], inputs: Any) -> bool:
        for i, const in consts.items():
            value = inputs[i]
            if isinstance(const, SizedConst):
                const = const.at(self.externals)
            if type(value) is LazyTensor:
                other = value._out.const
                if other is not const and (other is None or other != const):
                    return False
            elif type(value) is EagerTensor:
                if self.constant_of(value) != const:
                    return False
            elif not const.holds(value):
                return False
        return True

    def constant_of(self, tensor: Any) -> Const | None:
        """Returns the value of an eager tensor that may be used as a shape, else None.

        It comes from outside this call, or decides shapes.
        """
        number = tensor._id
        return self.decided.get(number) if number in self.made else self.graph.constant_of(tensor)

    def _is_decided(self, op: str, inputs: tuple[Any, ...]) -> bool:
        """Returns whether an operation's inputs are constants, or tensors of this call that decide shapes."""
        signature = signature_of(op)
        assert signature is not None
        given = inputs[: len(signature.inputs)]
        values = [v for value in given for v in (value if isinstance(value, (list, tuple)) else (value,))]
        return all(
            v._out.const is not None if type(v) is LazyTensor else type(v) is not EagerTensor or v._id in self.decided
            for v in values
        )

    def decide(self, tensors: list[Any]) -> None:
        """Has the values of tensors that the call has just made count as shapes."""
        for tensor in tensors:
            value = shape_like(tensor)
            if value is not None:
                self.decided[tensor._id] = value

    def _match_lists(self, step: Step, inputs: tuple[Any, ...]) -> bool:
        base = self.base
        for i, (slots, consts) in step.lists.items():
            values = inputs[i]
            if isinstance(values, tf.Tensor) or len(values) != len(slots):  # iterating over one issues operations
                return False
            for want, value in zip(slots, values, strict=True):
                if want >= 0:
                    if type(value) is not LazyTensor or value._key - base != want:
                        return False
                elif want > CONST and not self._feed(value, -1 - want, step, inputs):
                    return False
            if not self._consts_fit(consts, values):
                return False
        return True

    # Cuts.

    def cut(self) -> None:
        """Ends the segment: later operations take its tensors as feeds, like any other tensor."""
        step = self.step
        assert step.node is not None
        start = step.node.start_after()  # may raise, so it comes before any change
        if step.dynamic:
            self.sizes.append(tuple([feed._shape_tuple() for feed in self.externals]))
        if self._newest is not None:
            fed = {k: v for k, v in enumerate(self.externals) if id(v) in self.numbers}
            self.adopted_in.append((step, fed))
            self._newest = None
        self.ended.append(step)
        self.base += step.end
        self.externals, self.seeds = [], []
        self.handles, self.numbers = set(), set()
        self.step, self._behind = start, step.node

    def place(self, tensor: Any) -> int | None:
        """Returns the number of a tensor among the current segment's feeds, or None."""
        if self._index.values is not self.externals:
            self._index = Index(self.externals)
        return self._index.find(tensor)

    def close(self) -> None:
        """Releases the call's tensors; the cursor can no longer follow."""
        self._index = Index([])
        self.externals, self.handles, self.numbers = [], set(), set()
        self.made.clear()
        self.decided.clear()
        self._counts = None

    # Slow path.

    @property
    def last(self) -> Node | None:
        """The node of the last operation, if any."""
        node = self.step.node or self._behind
        return None if node is self.graph.entry else node

    def count(self) -> int:
        """Returns the number of operations followed."""
        count = self.step.depth
        for step in self.ended:
            count += step.depth
        return count

    def counts(self) -> Counter[Any]:
        """Returns how often each operation was issued at each call stack so far in this call, over all segments."""
        if self._counts is None:
            self._counts = Counter()
        for number, step in enumerate([*self.ended, self.step]):
            if number == len(self._counted):
                self._counted.append(step.root())
            until, self._counted[number] = self._counted[number], step
            at: Step | None = step
            while at is not None and at is not until and at.parent is not None:
                assert at.node is not None
                self._counts[at.node.location.frames, at.node.op] += 1
                at = at.parent
        return self._counts

    def adopt(
        self, entry: str, op: str, inputs: tuple[Any, ...], given: tuple[Any, ...], args: tuple[Any, ...]
    ) -> Step | None:
        """Adds a step for an operation of a known node and moves there; else returns None and sets `mismatch`.

        `inputs` are the op's inputs, `given` its attributes, `args` both in fast-path order. May mark inputs as fed,
        or turn the node into a host op. Raises `core._FallbackException` for an operation that is known to take
        TensorFlow's slow path here, so that TensorFlow issues it through `execute`.
        """
        here = self.step
        signature = signature_of(op)
        frames, _ = call_stack()
        location = Location(frames, self.counts()[frames, op])
        if signature is None and name_in(given) is not None:
            return self._adopt_call(op, inputs, given, location)
        pair, attrs = seeds.split(op, given)
        node = self.graph.find(op, entry, attrs, location)
        if node is None:
            if entry == "fast" and (op, Location(frames, 0)) in self.graph.slow:
                raise core._FallbackException("this operation takes TensorFlow's slow path")
            node = self.graph.repeat(op, entry, attrs, location)
        self.adopted += 1
        if node is None:
            self._mismatch("new operation", location, self._expected(), f"{op}{list(attrs) or ''}")
            return None
        opening = is_opening(node) and self.may_open()
        if node.host is not None and not opening and not (node.host == DECIDES and self._is_decided(op, inputs)):
            return self.append(Step(here, op, node, None, (), {}, {}, ()))
        if signature is None:
            self._mismatch("new operation", location, self._expected(), op)
            return None
        if here.dynamic:  # shapes are inferred for exact sizes, so it takes its inputs as feeds of another segment
            return self.append(Step.at_join(here, node, len(inputs)))
        wiring = Wiring(self, node, op, signature, args)
        try:
            parts = wiring.build(inputs)
            if opens_anew(node, parts):
                self._drop_constants(here, node)
                return self.adopt(entry, op, inputs, given, args)
            variant = node.variants.get(parts) or window(node, parts, size_at(node, inputs, self.constant_of))
            if opening or has_open(parts) or (here.opened and leads_to(node, here, wiring.tensors())):
                variant = open_variant(node, parts) if self.may_open() else None
                if variant is None:  # what it is given has to be computed first
                    node.sized = close(here, wiring.tensors()) or opening
                    step = Step(here, op, node, None, (), {}, {}, ()) if opening else None
                    return self.append(step or Step.at_join(here, node, len(inputs)))
            elif node.host is not None:
                variant = variant if variant is not None and variant.folded else folded(node, parts)
            else:
                fed = len(node.fed)
                if variant is None:
                    variant = derive(node, parts, wiring.outside, wiring.known)
                else:
                    variant = feed_changed(node, parts, wiring.outside, wiring.known) or variant
                if node.host == VALUE_SHAPED and node.windows is None and wiring.unfeed():
                    node.host = None
                    return self.adopt(entry, op, inputs, given, args)
                if len(node.fed) > fed:
                    self._drop_constants(here, node)
                    wiring = Wiring(self, node, op, signature, args)
                    wiring.build(inputs)
        except (Unsupported, TypeError, ValueError, OverflowError) as error:
            self._mismatch("unsupported input", location, "a tensor or a number", str(error))
            return None
        if node.host is not None and variant is None:
            step = Step(here, op, node, None, (), {}, {}, ())
            # What comes behind takes what has been computed by then, and is no more of a reason.
            self.closing |= wiring.keep_shaping(here)
            if not (close(here, wiring.tensors()) or self.closing):
                return self.append(step)
            node.host, self.step = None, step  # a segment may contain it from the next call on; now it runs on its own
            return step
        if variant is None:
            known = "; ".join(str(v.key) for v in list(node.variants.values())[-3:])
            self._mismatch("new shapes", location, known, str(parts))
            return None
        # A Python number decides no shape, and changed, is fed to another operation, or likely to change: feed it.
        constants = wiring.numbers(parts)
        changed = {path for path, const in constants.items() if node.constants.setdefault(path, const) != const}
        changed |= {path for path in constants if path in wiring.known or is_from_elsewhere(op, path, constants[path])}
        if changed:
            node.fed |= changed
            self._drop_constants(here, node)
            return self.adopt(entry, op, inputs, given, args)
        if self.graph.updates_rows and is_variable_op(op) and splits(here, op, wiring.slots):
            return self.append(Step.at_join(here, node, len(inputs)))
        if self._is_join(here, node, variant):
            step = Step.at_join(here, node, len(inputs))
            step.onward = self.graph.onward_from(node.head)
            return self.append(step)
        wiring.commit()
        step = Step(here, op, node, variant, tuple(wiring.slots), wiring.consts, wiring.lists, tuple(wiring.specs))
        if pair is not None:
            self._draw(step, pair)
        return self.append(step)

    def _adopt_call(self, op: str, inputs: tuple[Any, ...], attrs: tuple[Any, ...], location: Location) -> Step | None:
        """Adds a step for a call of a function, whose name is in `attrs`, and moves there; see `adopt`."""
        here, entry = self.step, "execute"
        node = self.graph.find(op, entry, attrs[:-2], location) or self.graph.repeat(op, entry, attrs[:-2], location)
        if node is None:
            self.adopted += 1
            self._mismatch("new operation", location, self._expected(), op)
            return None
        self.graph.link(here.node or self._behind, node)
        callee = self.graph.callees.of(attrs[-1]) if node.host == CALLED else None
        if callee is not None and not here.dynamic and (step := self._call_of(callee, node, inputs, attrs)) is not None:
            self.adopted += 1
            return step
        for step in here.next:
            if step.node is node:
                here.hot = self.step = step
                return step
        self.adopted += 1
        return self.append(Step(here, op, node, None, (), {}, {}, ()))

    def _call_of(self, callee: Callee, place: Node, inputs: tuple[Any, ...], attrs: tuple[Any, ...]) -> Step | None:
        """Adds a step for a call as part of the segment, and moves there; None if it has to run on its own."""
        here, callees = self.step, self.graph.callees
        wiring = Wiring(self, place, place.op, None, ())
        try:
            parts = wiring.call(inputs)
        except (Unsupported, TypeError, ValueError) as error:
            callees.refuse(callee.name, str(error))
            return None
        specs = None if has_open_variable(parts) else results_of(callee, parts)
        if specs is None:
            callees.refuse(callee.name, OPEN_VARIABLE if has_open_variable(parts) else VALUE_SHAPED)
            return None
        node = self.graph.calling(place, callee, attrs, len(inputs))
        if node is None:
            callees.refuse(callee.name, "other functions keep being called here")
            return None
        variant = node.variants.get(parts)
        if variant is None:
            outputs = tuple(Output(spec, None, node) for spec in specs)
            variant = node.variants[parts] = Variant(parts, outputs, list(range(len(specs))))
        if is_written(here, wiring.slots) or self._has_ways(here, node, variant):
            return self.append(Step.at_join(here, node, len(inputs)))
        wiring.commit()
        step = Step(here, node.op, node, variant, tuple(wiring.slots), wiring.consts, {}, tuple(wiring.specs))
        return self.append(step)

    def _has_ways(self, here: Step, node: Node, variant: Variant) -> bool:
        """Returns whether to cut before a function's call, as calls come to it by ever other ways: see `_is_join`.

        Also where the ways part long before, as by the position from which a batch is taken: functions are large. Ways
        are counted from the last cut: behind one they are the same.
        """
        way = variant, here.root().node
        known = node.joined.get(way, 0)
        node.joined[way] = known + 1
        return known >= MAX_CALL_WAYS and here.parent is not None

    def _is_join(self, here: Step, node: Node, variant: Variant) -> bool:
        """Returns whether to cut before a known operation, as calls keep coming to it by other ways.

        Each way has steps of its own for all that follows in the segment, which are adopted and compiled for it alone:
        after ten choices between two, there are a thousand. Behind a cut they are the same for all.
        """
        if self.meets and not here.dynamic:
            meets = self.graph.came_to(node.location.frames, node.ways, here.node or self._behind)
            if meets and self.cuts_at_joins and here.parent is not None:
                return True
        if not here.next or not self.is_branch():
            return False
        known = node.joined.get(variant, 0)
        node.joined[variant] = known + 1
        return known >= MAX_WAYS and self.graph.meetings.cut()

    def is_branch(self) -> bool:
        """Returns whether what comes next, if it is not known here, is the first to be new, inside a segment."""
        here = self.step
        return self.cuts_at_joins and here is not self._newest and here.parent is not None and not here.dynamic

    def _drop_constants(self, here: Step, node: Node) -> None:
        """Drops the steps after `here` whose constants are fed from now on."""
        here.next = [s for s in here.next if s.node is not node or not node.fed.intersection(s.constant_inputs())]
        here.hot = None

    def append(self, step: Step) -> Step:
        """Adds a step behind the last one, and moves there."""
        here, node = self.step, step.node
        assert node is not None
        self.graph.link(here.node or self._behind, node)
        here.add(step, MAX_STEPS)
        self.graph.steps += 1
        self.step = self._newest = step
        return step

    def _expected(self) -> str:
        last = self.step.node or self._behind
        names = [f"{n.op} at {n.location}" for n in list(last.successors.values())[:4]]
        return " or ".join(names) if names else "the end of the call"

    def _mismatch(self, kind: str, location: Any, expected: str, seen: str) -> None:
        self.mismatch = Mismatch(kind, expected, seen, str(location))


def _is_at(step: Step, op: str, args: tuple[Any, ...]) -> bool:
    """Returns whether an operation is the one at a join, whatever its inputs are."""
    attrs = seeds.split(op, args[step.arity :])[1]
    try:
        return same(attrs, step.attrs) if step.exact else attrs == step.attrs
    except ValueError:  # `==` is elementwise on arrays among them
        return False


def _in_turn(here: Step) -> list[Step]:
    """Returns the alternatives after a step, starting after the last one taken: loops take them in order."""
    if here.hot is None:
        return here.next
    at = here.next.index(here.hot)
    return here.next[at + 1 :] + here.next[:at]
