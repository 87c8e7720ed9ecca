"""Shape polymorphism: one graph shared by segments that differ only in tensor sizes.

A TensorFlow graph does not specify shapes: at another size it has the same operations on other constants (the shape to
reshape to, the axes to sum over, the divisor of a mean). So the second segment of a form is emitted with the constants
that differ from the first one's lifted to arguments, and later segments that differ in no other constant pass their
own. If one does, which then was equal by coincidence, the segment is emitted again with more arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.compile.executable import BoundGraph, Executable
from coexec.compile.platform_key import digest
from coexec.lowering.lifted_constants import may_vary
from coexec.lowering.op_failures import can_fail
from coexec.lowering.plan import Plan
from coexec.lowering.row_updates import SCATTERS
from tracer.block import STRUCTURES
from tracer.graph import Step, spec_of_constant
from tracer.intercept import make_constant
from tracer.nodedef import write_constant
from tracer.op import Const
from tracer.private import node_def_pb2
from tracer.spec import RESOURCE, Spec

Make = Callable[[dict[Any, int] | None], Executable | None]


class Sized(BoundGraph):
    """A shared graph bound to the lifted constants of one size."""

    def __init__(self, shared: Executable, plan: Plan, more: list[Any]) -> None:
        values = [tensor.numpy().tobytes() for tensor in more]
        super().__init__(shared, plan, f"{shared.name}_{digest(repr((plan.feeds, values)).encode())}")
        self._more = more

    def arguments(self, feeds: list[Any]) -> list[Any]:
        """Returns the lifted constants."""
        return self._more


class PolymorphicGraphs:
    """The shape-polymorphic graphs of one function, by the form of the segment."""

    def __init__(self) -> None:
        self._known: dict[Any, PolymorphicGraph] = {}
        self._outlines: set[int] = set()  # hashes, of the segments that graphs were made for

    def may_know(self, last: Step) -> bool:
        """Returns whether the segment up to `last` may have a graph by another size: one has the same operations.

        To plan a segment and find its form takes as long as its operations: 20 ms for 600, on each new path.
        """
        return bool(self._outlines) and _outline(last) in self._outlines

    def graph(self, plan: Plan, make: Make | None = None) -> Executable | None:
        """Returns a graph for a segment: a known one, or one from `make`, called with the constants to lift.

        None if none is known and `make` is None or returns None.
        """
        found = _form_of(plan)
        if found is None:
            return None if make is None else make(None)
        form, constants = found
        family = self._known.get(form)
        if family is None:
            if len(self._known) >= tuning.max_families:
                del self._known[next(iter(self._known))]
            family = self._known[form] = PolymorphicGraph()
        known = family.shared(plan, constants)
        if known is not None or make is None:
            return known
        given = family.arguments(constants)
        made = make(given)
        if made is None:
            family.give_up()
            return None
        if len(self._outlines) >= tuning.max_families:
            self._outlines.clear()
        self._outlines.add(_outline(plan.steps[-1]))
        return family.add(made, plan, constants, given or {})

    def give_up(self, executable: Executable) -> None:
        """Stops sharing a graph that was found wrong at some size, and all others of the same form."""
        shared = executable.shared if isinstance(executable, Sized) else executable
        for family in self._known.values():
            if family.has(shared):
                family.give_up()


class PolymorphicGraph:
    """The graphs of one form: segments that differ only in sizes, and in constants that depend on them."""

    def __init__(self) -> None:
        self._members: list[tuple[Any, ...]] = []  # constants of the segments that graphs were made for
        self._graphs: list[tuple[weakref.ref[Executable], list[int | None], tuple[Const, ...]]] = []
        self._sized: weakref.WeakValueDictionary[Any, Executable] = weakref.WeakValueDictionary()  # by size
        self._given_up = False

    def give_up(self) -> None:
        """Stops sharing."""
        self._given_up = True
        self._graphs.clear()
        self._sized.clear()

    def has(self, graph: Executable) -> bool:
        """Returns whether this is one of its graphs."""
        return any(reference() is graph for reference, _, _ in self._graphs)

    def shared(self, plan: Plan, constants: list[Constant]) -> Executable | None:
        """Returns a known graph, bound to this segment's constants; None if none fits."""
        values = tuple(constant.const for constant in constants)
        known = self._sized.get((plan.feeds, values))
        if known is not None and known.given.issuperset(plan.outputs):
            return known
        for reference, numbers, fixed in reversed(self._graphs):
            graph = reference()
            if graph is None or not graph.given.issuperset(plan.outputs):
                continue
            if _admits(numbers, fixed, values):
                return self._at_size(graph, plan, values, numbers, graph.varying)
        return None

    def arguments(self, constants: list[Constant]) -> dict[Any, int] | None:
        """Returns the argument number of each constant to lift, by (step, path); equal numbers share an argument.

        None if this is the first segment of its form, or nothing can be shared. Remembers the constants.
        """
        if self._given_up or len(self._graphs) >= tuning.max_family_graphs:
            return None
        values = tuple(constant.const for constant in constants)
        self._members.append(values)
        if len(self._members) == 1:
            return None
        found: dict[Any, int] = {}
        numbers: dict[Any, int] = {}
        last = len(self._graphs) == tuning.max_family_graphs - 1  # lift every liftable constant, each on its own
        for constant, *known in zip(constants, *self._members, strict=True):
            able = all(may_vary(const.value) for const in known)
            if any(const != known[0] for const in known) and not able:
                self._members.pop()
                return None
            if able and last:
                found[constant.step, constant.path] = len(found)
            elif able and any(const != known[0] for const in known):
                found[constant.step, constant.path] = numbers.setdefault(tuple(known), len(numbers))
        return found

    def add(self, graph: Executable, plan: Plan, constants: list[Constant], given: dict[Any, int]) -> Executable:
        """Adds a graph with these constants lifted, and returns it bound to this segment's constants."""
        if self._given_up:
            return graph
        values = tuple(constant.const for constant in constants)
        numbers = [given.get((constant.step, constant.path)) for constant in constants]
        self._graphs = [known for known in self._graphs if known[0]() is not None]
        if len(self._graphs) < tuning.max_family_graphs:
            self._graphs.append((weakref.ref(graph), numbers, values))
        if graph.varying:
            return self._at_size(graph, plan, values, numbers, graph.varying)
        self._sized[plan.feeds, values] = graph
        return graph

    def _at_size(
        self, graph: Executable, plan: Plan, values: tuple[Const, ...], numbers: list[int | None],
        arguments: list[tuple[int, int]],
    ) -> Executable:  # fmt: skip
        """Binds a graph to one size: evaluates its lifted constants, given by number and dtype in `arguments`."""
        known = {number: const for number, const in zip(numbers, values, strict=True) if number is not None}
        sized = Sized(graph, plan, [_tensor(known[number].value, enum) for number, enum in arguments])
        self._sized[plan.feeds, values] = sized
        return sized


def _admits(numbers: list[int | None], fixed: tuple[Const, ...], values: tuple[Any, ...]) -> bool:
    """Whether a graph fits these constants: those not lifted must match, and lifted ones of one number be equal."""
    given: dict[int, Const] = {}
    for number, known, const in zip(numbers, fixed, values, strict=True):
        if number is None:
            if const is not known and const != known:
                return False
        elif given.setdefault(number, const) != const or not may_vary(const.value):
            return False
    return True


def _tensor(value: Any, enum: int) -> Any:
    """Returns a constant as an eager tensor, equal to the tensor that a graph would make of it."""
    node = node_def_pb2.NodeDef(name="constant")
    write_constant(node, value, enum)
    return make_constant(tf.make_ndarray(node.attr["value"].tensor), tf.dtypes.as_dtype(enum))


class Constant:
    """A constant of a segment: its step, and its path there (input, or input and list item)."""

    __slots__ = ("const", "path", "step")

    def __init__(self, step: Step, path: tuple[int, ...], const: Const) -> None:
        self.step, self.path, self.const = step, path, const


def _outline(last: Step) -> int:
    """Returns a hash of the names of a segment's operations."""
    names: list[str | None] = []
    step: Step | None = last
    while step is not None:
        names.append(step.op)
        step = step.parent
    return hash(tuple(names))


def _form_of(plan: Plan) -> tuple[Any, list[Constant]] | None:
    """Returns a segment's form, equal at all sizes, and its constants in order; None if it cannot be shared.

    The form holds everything that emission depends on, except constants, outputs and what follows from shapes.
    """
    if plan.row_updates.sized:  # it compares sizes with constants
        return None
    steps: list[Any] = []
    constants: list[Constant] = []
    specs: dict[int, Spec] = {}
    scatters = not SCATTERS.keys().isdisjoint([step.op for step in plan.steps])
    for step in plan.steps:
        assert step.node is not None
        assert step.variant is not None
        if scatters:
            specs.update((step.first + n, out.spec) for n, out in enumerate(step.outputs))
        if step.variant.folded:
            steps.append(len(step.outputs))
            continue
        if step.op in STRUCTURES:
            return None
        mine = [Constant(step, (i,), const) for i, const in step.consts.items()]
        lists = []
        for i, (slots, consts) in step.lists.items():
            mine += [Constant(step, (i, j), const) for j, const in consts.items()]
            lists.append((i, slots))
        kinds = tuple([(each.path, _kind(each)) for each in mine])
        outputs = tuple([(out.spec.enum, len(out.spec.shape)) for out in step.outputs])
        constants += mine
        node = step.node
        more = can_fail(step), _is_whole(step, specs, plan) if step.op in SCATTERS else None
        steps.append((step.op, node.entry, node.frozen, step.slots, tuple(lists), kinds, outputs, more))
    feeds = tuple([spec if spec.enum == RESOURCE else (spec.enum, len(spec.shape)) for spec in plan.feeds])
    shared = plan.words, plan.grain <= tuning.fine_grain, plan.row_updates
    return (tuple(steps), feeds, *shared), constants


def _kind(constant: Constant) -> Any:
    """Returns what determines the dtype of the tensor that a constant becomes."""
    spec, value = spec_of_constant(constant.step, *constant.path), constant.const.value
    return type(value), getattr(value, "dtype", None), np.size(value) == 0, None if spec is None else spec.enum


def _is_whole(step: Step, specs: dict[int, Spec], plan: Plan) -> Any:
    """Returns True if scattered updates need no broadcast; otherwise the shape, which becomes part of the form."""
    indices, updates = (
        specs.get(slot) if slot >= 0 else plan.feeds[-1 - slot] if -1 - slot < len(plan.feeds) else None
        for slot in step.slots[1:3]
    )
    handle = plan.feeds[-1 - step.slots[0]].handle
    if indices is None or updates is None or not handle:
        return tuple([None if spec is None else spec.shape for spec in (indices, updates)])
    shape = (*indices.shape, *(handle[0][1] or ())[1:])
    return updates.shape == shape or shape  # the variable's shape is part of the feeds
