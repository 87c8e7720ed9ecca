"""Families: segments that are the same but for the sizes of tensors, and the graph that they share.

A TensorFlow graph says nothing of shapes: at another size its operations are the same, on other constants (what to
reshape to, which axes to sum over, by what a mean divides). So the second segment of a form is emitted with those that
differ from the first one's as arguments, and whichever comes later and differs in no other constant gives its own.
One that does is emitted anew, with more arguments: two sizes may have been equal by accident.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.compile.environment import digest
from coexec.compile.executable import FINE_GRAIN, Executable
from coexec.lowering.emit import SCATTERS
from coexec.lowering.failures import can_fail
from coexec.lowering.plan import Plan
from coexec.lowering.varying import may_vary
from tracer.block import STRUCTURES
from tracer.graph import Step, spec_of_constant
from tracer.intercept import make_constant
from tracer.nodedef import write_constant
from tracer.op import Const, freeze
from tracer.private import node_def_pb2
from tracer.spec import RESOURCE, Spec

MAX_FAMILIES = 64  # of one function
MAX_SHARED = 6  # graphs of one family: with more arguments each time


Make = Callable[[dict[Any, int] | None], Executable | None]


class Sized(Executable):
    """A graph that several sizes share, as it is launched at one of them."""

    def __init__(self, shared: Executable, plan: Plan, more: list[Any]) -> None:
        self.backend = "graph"
        self.feeds, self.size = plan.feeds, plan.size
        self.outputs, self.given = shared.outputs, shared.given  # more than are wanted, perhaps
        self.name = f"{shared.name}_{digest(repr((plan.feeds, [tensor.numpy().tolist() for tensor in more])).encode())}"
        self.ops = self.folded = 0  # it holds no operations of its own
        self.checked = self.loaded = self.trusted = False
        self.parts, self.varying = [], []
        self.launches = 0
        self.shared, self._more = shared, more

    def _execute(self, feeds: list[Any], into: list[Any]) -> None:
        self.shared._execute([*feeds, *self._more], into)


class Families:
    """The families of one function's segments."""

    def __init__(self) -> None:
        self._known: dict[Any, Family] = {}
        self.shares = False  # whether there is a graph that sizes share

    def graph(self, plan: Plan, make: Make | None = None) -> Executable | None:
        """Returns a graph for a segment: a known one, or what `make` makes, given which constants are arguments."""
        found = _form_of(plan)
        if found is None:
            return None if make is None else make(None)
        form, constants = found
        family = self._known.get(form)
        if family is None:
            if len(self._known) >= MAX_FAMILIES:
                del self._known[next(iter(self._known))]
            family = self._known[form] = Family()
        known = family.shared(plan, constants)
        if known is not None or make is None:
            return known
        given = family.arguments(constants)
        made = make(given)
        if made is None:
            family.give_up()
            return None
        self.shares = True
        return family.add(made, plan, constants, given or {})

    def give_up(self, executable: Executable) -> None:
        """Shares a graph no more that was found to be wrong at some size, nor others of its family."""
        shared = executable.shared if isinstance(executable, Sized) else executable
        for family in self._known.values():
            if family.has(shared):
                family.give_up()


class Family:
    """Segments that differ in sizes, and in the constants that follow from them."""

    def __init__(self) -> None:
        self._members: list[tuple[Any, ...]] = []  # the constants of those that graphs were made for
        self._graphs: list[tuple[weakref.ref[Executable], list[int | None], tuple[Const, ...]]] = []
        self._sized: weakref.WeakValueDictionary[Any, Executable] = weakref.WeakValueDictionary()  # by size
        self._given_up = False

    def give_up(self) -> None:
        """Shares nothing any more."""
        self._given_up = True
        self._graphs.clear()
        self._sized.clear()

    def has(self, graph: Executable) -> bool:
        """Returns whether this is one of its graphs."""
        return any(reference() is graph for reference, _, _ in self._graphs)

    def shared(self, plan: Plan, constants: list[Constant]) -> Executable | None:
        """Returns a known graph as this segment launches it; None if there is none."""
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
        """Returns which constants are to be arguments of a graph for this segment, and which ones of them are one.

        None: it is the first of its family, or one that shares nothing.
        """
        if self._given_up or len(self._graphs) >= MAX_SHARED:
            return None
        values = tuple(constant.const for constant in constants)
        self._members.append(values)
        if len(self._members) == 1:
            return None
        found: dict[Any, int] = {}
        numbers: dict[Any, int] = {}
        last = len(self._graphs) == MAX_SHARED - 1  # whatever may be an argument is one of its own
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
        """Notes a graph with these constants as arguments, and returns it as this segment launches it."""
        if self._given_up:
            return graph
        values = tuple(constant.const for constant in constants)
        numbers = [given.get((constant.step, constant.path)) for constant in constants]
        self._graphs = [known for known in self._graphs if known[0]() is not None]
        if len(self._graphs) < MAX_SHARED:
            self._graphs.append((weakref.ref(graph), numbers, values))
        if graph.varying:
            return self._at_size(graph, plan, values, numbers, graph.varying)
        self._sized[plan.feeds, values] = graph
        return graph

    def _at_size(
        self, graph: Executable, plan: Plan, values: tuple[Const, ...], numbers: list[int | None],
        arguments: list[tuple[int, int]],
    ) -> Executable:  # fmt: skip
        known = {number: const for number, const in zip(numbers, values, strict=True) if number is not None}
        sized = Sized(graph, plan, [_tensor(known[number].value, enum) for number, enum in arguments])
        self._sized[plan.feeds, values] = sized
        return sized


def _admits(numbers: list[int | None], fixed: tuple[Const, ...], values: tuple[Any, ...]) -> bool:
    """Whether a graph is right for these constants: those that are no arguments are its own, others may be any."""
    given: dict[int, Const] = {}
    for number, known, const in zip(numbers, fixed, values, strict=True):
        if number is None:
            if const is not known and const != known:
                return False
        elif given.setdefault(number, const) != const or not may_vary(const.value):
            return False
    return True


def _tensor(value: Any, enum: int) -> Any:
    """Returns a constant as the tensor that it is in a graph."""
    node = node_def_pb2.NodeDef(name="constant")
    write_constant(node, value, enum)
    return make_constant(tf.make_ndarray(node.attr["value"].tensor), tf.dtypes.as_dtype(enum))


class Constant:
    """A constant of a segment: of which step, at which input, or input and item."""

    __slots__ = ("const", "path", "step")

    def __init__(self, step: Step, path: tuple[int, ...], const: Const) -> None:
        self.step, self.path, self.const = step, path, const


def _form_of(plan: Plan) -> tuple[Any, list[Constant]] | None:
    """Returns what is the same of a segment at all sizes, and its constants in order; None if it is to share nothing.

    The form holds all that is emitted but for constants and results, and that follows from shapes.
    """
    steps: list[Any] = []
    constants: list[Constant] = []
    specs: dict[int, Spec] = {}
    for step in plan.steps:
        assert step.node is not None
        assert step.variant is not None
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
        steps.append((step.op, node.entry, freeze(step.attrs), step.slots, tuple(lists), kinds, outputs, more))
    feeds = tuple([spec if spec.enum == RESOURCE else (spec.enum, len(spec.shape)) for spec in plan.feeds])
    return (tuple(steps), feeds, plan.words, plan.grain <= FINE_GRAIN), constants


def _kind(constant: Constant) -> Any:
    """Returns what the type of the tensor follows from that a constant becomes."""
    spec, value = spec_of_constant(constant.step, *constant.path), constant.const.value
    return type(value), getattr(value, "dtype", None), np.size(value) == 0, None if spec is None else spec.enum


def _is_whole(step: Step, specs: dict[int, Spec], plan: Plan) -> Any:
    """Whether what is scattered has the shape of the places that it goes to; else that shape is part of the form."""
    indices, updates = (
        specs.get(slot) if slot >= 0 else plan.feeds[-1 - slot] if -1 - slot < len(plan.feeds) else None
        for slot in step.slots[1:3]
    )
    handle = plan.feeds[-1 - step.slots[0]].handle
    if indices is None or updates is None or not handle:
        return tuple([None if spec is None else spec.shape for spec in (indices, updates)])
    shape = (*indices.shape, *(handle[0][1] or ())[1:])
    return updates.shape == shape or shape  # what is said of the variable is part of the feeds
