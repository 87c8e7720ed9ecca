"""Cursor: walks a trace graph beside the running program.

`advance` compares the operation that the program issues with the steps that may come next. The common case is one
comparison of names, one of attributes, and one of a number per input; nothing there depends on the size of the
graph. Where no step fits, `adopt` looks for the operation's node by its location: a known node reached in a new way
(after a join, at a new cut, wired differently) becomes a new step; an unknown one is a mismatch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tracer import seeds
from tracer.derive import derive
from tracer.graph import CONST, Node, Step, TraceGraph
from tracer.inputs import Unsupported, has_tensors
from tracer.intercept import make_constant
from tracer.lazy import LazyTensor
from tracer.location import Location, call_stack
from tracer.op import Const, signature_of
from tracer.private import EagerTensor, core
from tracer.spec import RESOURCE
from tracer.wiring import Wiring

MAX_STEPS = 256  # alternatives kept behind one step; the oldest go

_runs = itertools.count(1)


@dataclass(frozen=True)
class Mismatch:
    """What the cursor met: a kind, what was expected, what was seen, and where."""

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
    """Follows one call along `graph`; every tensor of the call has a key that no tensor of another call has."""

    def __init__(self, graph: TraceGraph) -> None:
        self.graph = graph
        self.base = next(_runs) << 32
        self.step = graph.entry.start_after()
        self.externals: list[Any] = []  # the feeds of the running segment
        self.seeds: list[seeds.Pair] = []  # of its operations that draw random numbers, in order
        self.handles: set[int] = set()  # ids of those that are resources: an alias needs wiring of its own
        self.numbers: set[int] = set()  # ids of those that were made of constants
        self.ended: list[Step] = []  # the last step of each segment so far
        self.made: set[int] = set()  # ids of eager tensors that operations of this call have made
        self._counts: Counter[Any] | None = None
        self._counted: list[Step] = []  # the steps up to which places were counted
        self.adopted = 0  # operations that no known step fitted
        self.mismatch: Mismatch | None = None

    # The hot path.

    def advance(self, op: str, inputs: tuple[Any, ...], attrs: tuple[Any, ...] | None) -> Step | None:
        """Returns the step that this operation is, after moving there; None if no known step fits.

        `attrs` is None where `inputs` carries them at its end, as the fast path of TensorFlow passes them.
        """
        here = self.step
        step = here.hot
        if step is None or not self.fits(step, op, inputs, attrs):
            for step in _in_turn(here):
                if self.fits(step, op, inputs, attrs):
                    here.hot = step
                    break
            else:
                return None
        self.step = step
        return step

    def is_next(self, step: Step, op: str, args: tuple[Any, ...]) -> bool:
        """Returns whether an operation is this plain step: known tensors in, one tensor out, no place to compare."""
        if step.op != op or args[step.arity :] != step.attrs:
            return False
        base = self.base
        for want, value in zip(step.slots, args):  # noqa: B905  (attributes follow the inputs)
            if want >= 0:
                if type(value) is not LazyTensor or value._key - base != want:
                    return False
            elif want > CONST and self.externals[-1 - want] is not (
                value._value if type(value) is LazyTensor else value
            ):
                return False
        return not step.consts or self._consts_fit(step.consts, args)

    def fits(self, step: Step, op: str, inputs: tuple[Any, ...], attrs: tuple[Any, ...] | None) -> bool:
        """Returns whether an operation is this step, and notes the feeds that it adds if so."""
        if step.op != op or step.fast is not (attrs is None) or (step.checked and step.frames != call_stack()[0]):
            return False
        if step.host:
            return True
        if attrs is None:
            attrs = inputs[step.arity :]
        pair = None
        if step.seeded:
            pair, attrs = seeds.split(op, attrs)
        if attrs != step.attrs or (step.exact and repr(attrs) != repr(step.attrs)):
            return False
        base = self.base
        mark = len(self.externals)
        for want, value in zip(step.slots, inputs):  # noqa: B905  (attributes may follow the inputs)
            if want >= 0:
                if type(value) is not LazyTensor or value._key - base != want:
                    break
            elif want > CONST:
                if not self._feed(value, -1 - want, step):
                    break
        else:
            if (not step.consts or self._consts_fit(step.consts, inputs)) and (
                not step.lists or self._lists_fit(step, inputs)
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

    def _draw(self, step: Step, pair: seeds.Pair) -> None:
        """Takes the seeds of a step, which it is decided is the next."""
        seeds.take(pair)
        self.seeds[step.draws - 1 :] = [pair]

    def _feed(self, value: Any, k: int, step: Step) -> bool:
        externals = self.externals
        if k > len(externals):
            return False
        kind = type(value)
        if kind is EagerTensor:
            real = value
        elif kind is LazyTensor:
            real = value._value
            if real is None:
                if value._out.const is None:
                    return False  # still to come: another wiring
                real = value.resolve()
        elif k == len(externals) and value is not None and not has_tensors(value):
            spec = step.specs[k - step.parent.external]  # type: ignore[union-attr]
            try:
                real = make_constant(value, spec.dtype)
            except (TypeError, ValueError):
                return False
        else:
            return False
        if k < len(externals):
            return externals[k] is real
        spec = step.specs[k - step.parent.external]  # type: ignore[union-attr]
        if real._datatype_enum() != spec.enum or real._shape_tuple() != spec.shape:
            return False
        if spec.enum == RESOURCE:
            if id(real) in self.handles or self.graph.handle_spec(real) is not spec:
                return False
            self.handles.add(id(real))
        elif kind is not EagerTensor and (kind is not LazyTensor or value._out.const is not None):
            self.numbers.add(id(real))
        externals.append(real)
        return True

    def _consts_fit(self, consts: dict[int, Const], inputs: Any) -> bool:
        for i, const in consts.items():
            value = inputs[i]
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
        """Returns the value of an eager tensor from outside of the call that may stand for a shape."""
        return None if tensor._id in self.made else self.graph.constant_of(tensor)

    def _lists_fit(self, step: Step, inputs: tuple[Any, ...]) -> bool:
        base = self.base
        for i, (slots, consts) in step.lists.items():
            values = inputs[i]
            if len(values) != len(slots):
                return False
            for want, value in zip(slots, values, strict=True):
                if want >= 0:
                    if type(value) is not LazyTensor or value._key - base != want:
                        return False
                elif want > CONST and not self._feed(value, -1 - want, step):
                    return False
            if not self._consts_fit(consts, values):
                return False
        return True

    # Cuts.

    def cut(self) -> None:
        """Ends the segment: what follows is wired to its tensors as to any other feed."""
        step = self.step
        assert step.node is not None
        self.ended.append(step)
        self.base += step.end
        self.externals, self.seeds = [], []
        self.handles, self.numbers = set(), set()
        self.step = step.node.start_after()

    def close(self) -> None:
        """Lets go of the call's tensors; nothing is followed any more."""
        self.externals, self.handles, self.numbers = [], set(), set()
        self.made.clear()
        self._counts = None

    # The slow path.

    @property
    def last(self) -> Node | None:
        """The node of the last operation so far, if any."""
        node = self.step.node
        return None if node is self.graph.entry else node

    def count(self) -> int:
        """Returns how many operations have been followed."""
        count = self.step.depth
        for step in self.ended:
            count += step.depth
        return count

    def counts(self) -> Counter[Any]:
        """Returns how often each place has issued each operation so far in this call."""
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
        """Returns a new step for an operation whose node is known, after moving there; else None and a mismatch."""
        self.adopted += 1
        here = self.step
        signature = signature_of(op)
        frames, _ = call_stack()
        location = Location(frames, self.counts()[frames, op])
        pair, attrs = seeds.split(op, given)
        node = self.graph.find(op, entry, attrs, location)
        if node is None:
            if entry == "fast" and (op, Location(frames, 0)) in self.graph.slow:
                raise core._FallbackException("this operation takes TensorFlow's slow path")
            node = self.graph.repeat(op, entry, attrs, location)
        if node is None:
            return self._mismatch("new operation", location, self._expected(), f"{op}{list(attrs) or ''}")
        if node.host is not None:
            return self._move(Step(here, op, node, None, (), {}, {}, ()), node)
        if signature is None:
            return self._mismatch("new operation", location, self._expected(), op)
        wiring = Wiring(self, node, op, signature, args)
        try:
            parts = wiring.build(inputs)
            variant = node.variants.get(parts)
            if variant is None:
                variant = derive(node, parts, wiring.outside)
                if variant is not None:
                    wiring = Wiring(self, node, op, signature, args)
                    wiring.build(inputs)
        except (Unsupported, TypeError, ValueError, OverflowError) as error:
            return self._mismatch("unsupported input", location, "a tensor or a number", str(error))
        if node.host is not None:
            step = Step(here, op, node, None, (), {}, {}, ())
            if wiring.keep_shaping(here):  # from the next call on; here it runs on its own
                node.host = None
            return self._move(step, node)
        if variant is None:
            known = "; ".join(str(v.key) for v in list(node.variants.values())[-3:])
            return self._mismatch("new shapes", location, known, str(parts))
        # The same place with another Python number, none that decides a shape: from now on the number is fed.
        constants = wiring.numbers(parts)
        changed = {path for path, const in constants.items() if node.constants.setdefault(path, const) != const}
        if changed:
            node.fed |= changed
            here.next = [s for s in here.next if s.node is not node or not changed.intersection(_constant_inputs(s))]
            here.hot = None
            return self.adopt(entry, op, inputs, given, args)
        wiring.commit()
        step = Step(here, op, node, variant, tuple(wiring.slots), wiring.consts, wiring.lists, tuple(wiring.specs))
        if pair is not None:
            self._draw(step, pair)
        return self._move(step, node)

    def _move(self, step: Step, node: Node) -> Step:
        here = self.step
        assert here.node is not None
        self.graph.link(here.node, node)
        here.add(step, MAX_STEPS)
        self.graph.steps += 1
        self.step = step
        return step

    def _expected(self) -> str:
        last = self.step.node
        assert last is not None
        names = [f"{n.op} at {n.location}" for n in list(last.successors.values())[:4]]
        return " or ".join(names) if names else "the end of the call"

    def _mismatch(self, kind: str, location: Any, expected: str, seen: str) -> Any:
        self.mismatch = Mismatch(kind, expected, seen, str(location))


def _in_turn(here: Step) -> list[Step]:
    """Returns the alternatives behind a step, beginning behind the last taken: loops take them in order."""
    if here.hot is None:
        return here.next
    at = here.next.index(here.hot)
    return here.next[at + 1 :] + here.next[:at]


def _constant_inputs(step: Step) -> list[Any]:
    """Returns which inputs of a step are constants, by input, or by input and item."""
    return [*step.consts, *((i, j) for i, (_, consts) in step.lists.items() for j in consts)]
