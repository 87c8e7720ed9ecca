"""Structures: loops and functions, made operations of a call that is followed though no program issues them as such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coexec.events import Kind, Ledger
from coexec.lowering.failures import can_fail, differs, needs_check
from tracer.block import CALL, LOOP, STRUCTURES, Block, Recursion, blocks_of, steps_of
from tracer.errors import Refused
from tracer.functions import Call, take_apart
from tracer.graph import Step, Variant
from tracer.lazy import LazyTensor, Output, new_lazy
from tracer.location import Location, call_stack, place_of
from tracer.op import plain_name, signature_of
from tracer.private import EagerTensor
from tracer.spec import Spec, spec_of

MAX_FUNCTIONS = 256  # of one decorated function, with the specs of what they were given; more start anew


class Functions:
    """The graph functions that one decorated function calls."""

    def __init__(self, ledger: Ledger, followed: bool) -> None:
        self.ledger = ledger
        self.followed = followed
        self._known: dict[Any, Call | None] = {}

    def call(self, run: Any, op: Any, inputs: Any) -> list[LazyTensor] | None:
        """Makes a function's operations the next ones of a call that is followed; None if it must run on its own."""
        name = op.decode() if isinstance(op, bytes) else op
        if not self.followed or not all(isinstance(v, EagerTensor) for v in inputs):
            return None
        key = name, tuple(map(spec_of, inputs))
        if key not in self._known:
            if len(self._known) >= MAX_FUNCTIONS:
                self._known.clear()
            self._known[key] = self._taken_apart(*key)
        found = self._known[key]
        if found is None:
            return None
        try:
            arguments = zip(found.sources, found.block.arguments, strict=True)
            given = [read(run, inputs[k], spec) if held else inputs[k] for (k, held), spec in arguments]
            return issue(run, CALL, ("structure", found.block), given, list(found.outputs))
        except Refused as refused:
            self.ledger.cause(Kind.CUT, f"{plain_name(name)} runs on its own: {refused}", place_of())
            return None

    def _taken_apart(self, name: str, specs: tuple[Spec, ...]) -> Call | None:
        try:
            found = take_apart(name, specs)
            refuse_failures(found.block, checked=False)  # TensorFlow's errors of a function tell where it was traced
        except (Refused, Exception) as refused:  # whatever is not understood runs as TensorFlow runs it
            self.ledger.cause(Kind.CUT, f"{plain_name(name)} runs on its own: {refused}", place_of())
            return None
        return found


def is_function(op: Any) -> bool:
    """Returns whether this is the name of a function, and of no operation."""
    return signature_of(op.decode() if isinstance(op, bytes) else op) is None


def read(run: Any, handle: Any, held: Spec) -> LazyTensor:
    """Reads a variable that holds a tensor of a spec, as the next operation of a call that is followed."""
    return issue(run, "ReadVariableOp", ("dtype", held.enum), (handle,), [held])[0]


def issue(run: Any, op: str, attrs: tuple[Any, ...], inputs: Sequence[Any], specs: list[Any]) -> list[LazyTensor]:
    """Makes an operation that no program has issued the next one of a call that is followed, and answers it.

    Raises `Refused` where the cursor does not take it.
    """
    with run.lock:
        if run.flight is not None:
            run.flush()
        given, cursor = tuple(inputs), run.cursor
        step = cursor.step.hot
        if step is not None and step.risky is False and not step.host and cursor.fits(step, op, given, attrs):
            cursor.step = step
        else:
            step = issued(run, op, attrs, given, specs)
            step.risky = False  # a loop stops before what would fail, and functions that may are not taken apart
        base, values = cursor.base + step.first, run.values
        lazies = [new_lazy(out, base + n, run) for n, out in enumerate(step.outputs)]
        values += lazies
        return lazies  # in the order of `specs`: none is a list


def issued(run: Any, op: str, attrs: tuple[Any, ...], inputs: tuple[Any, ...], specs: list[Any]) -> Step:
    """Moves the cursor of a call that is followed over an operation that no program has issued; under its lock."""
    cursor = run.cursor
    step = cursor.advance(op, inputs, attrs)
    if step is None:
        frames, guarded = call_stack()
        location = Location(frames, cursor.counts()[frames, op])
        node = cursor.graph.add(op, "execute", attrs, location)
        node.guarded = max(node.guarded, guarded)
        node.inputs = node.inputs or [set() for _ in inputs]
        key = tuple(v._out.spec if type(v) is LazyTensor else spec_of(v) for v in inputs)
        if key not in node.variants:
            outputs = tuple(Output(spec, None, node) for spec in specs)
            node.variants[key] = Variant(key, outputs, list(range(len(specs))))
        step = cursor.adopt("execute", op, inputs, attrs, ())
        if step is None:
            raise Refused(f"it cannot be followed: {cursor.mismatch}")
        if op in STRUCTURES:  # a loop is always worth a launch
            step.live += max(len(steps_of(step)), 8 if op == LOOP else 0)
    if step.host:  # it would be left out
        raise Refused("it has been written down in too many ways")
    return step


def refuse_failures(part: Any, checked: bool = True) -> None:
    """Refuses what has operations inside that may fail; with `checked`, but for those of which a check tells before.

    So does one in a function that calls itself: what is found there, all of its calls leave to Python.
    """
    step = Step(None, CALL if isinstance(part, (Block, Recursion)) else LOOP, None, None, (), {}, {}, ())
    step.attrs = ("structure", part)
    ahead = [inner for block in blocks_of(step) for inner in block.steps]
    while ahead:
        inner = ahead.pop()
        if inner.op in STRUCTURES:
            if isinstance(inner.attrs[1], Recursion):
                refuse_failures(inner.attrs[1])
            else:
                ahead += [s for block in blocks_of(inner) for s in block.steps]
            continue
        if difference := differs(inner.op or ""):
            raise Refused(f"{inner.op} {difference}")
        if can_fail(inner) and not (checked and needs_check(inner)):
            raise Refused(f"{inner.op} may fail on some values")
