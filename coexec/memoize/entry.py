"""Regions: library calls that are followed as one unit, their Python not run.

A region hangs on the step before it, under a key: the function, its arguments (tensors by their place in the call,
Python values by value, objects by identity) and the scopes around it. It leads to the step behind its operations, so
the cursor jumps, and says which tensors the operations between take from outside, and which come out.

It is learnt by running the library's Python twice: the operations must be followed without a cut, nothing else may have
happened (`tracer.effects`), and both runs must agree. It is learnt anew when an object it depends on is written to, and
is run again now and then to see that it still holds.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.guards.call_key import BY_IDENTITY, CannotMemoize, marks_of
from coexec.guards.library_reads import LibraryReads
from coexec.memoize.door import helper_of
from coexec.memoize.step_range import Outputs
from tracer.effects import Watcher
from tracer.graph import Step
from tracer.inputs import PLAIN
from tracer.lazy import LazyTensor, Output
from tracer.op import Const, same
from tracer.private import EagerTensor, is_resource_variable


class Region(Watcher):
    """What one library call does, at one place of a segment."""

    def __init__(self, start: Step, key: Any, function: Any) -> None:
        self.start = start
        self.key = key
        self.function = function
        self.helper = helper_of(function)  # if it is one of the program's functions
        self.confirmed = 0  # runs in a row that agreed
        self.version = 0  # of what it does
        self.reason: str | None = None  # why it is none
        self.visits = self.uses = self.changes = 0
        self.disagreed = 0  # how often a run has found something else than the one before
        self.retry = tuning.region_first_retry
        self.run_again = tuning.region_first_check
        self.reads: LibraryReads | None = None  # what its Python may have read
        self.held: list[Any] = []  # what is compared by identity
        self.end = start
        self.first: Step | None = None
        self.asks = False  # whether one of its operations may fail inside of a manager that lets errors pass, so far
        self.outputs = Outputs(start, [])  # by number: the segment's up to the region's end
        self.feeds: list[tuple[str, Any]] = []  # where each tensor from outside comes from
        self.seeds: tuple[int, list[int]] = 0, []  # how many its Python draws, which of them its operations take
        self.handles: set[int] = set()  # ids of the variables among them
        self.read: list[tuple[int, Const]] = []  # arguments whose value its Python reads
        self.taken: list[tuple[int, Const]] = []  # and those whose value operations have taken for a constant
        self.pins: list[tuple[int, Any]] = []  # feeds of operations before that must be these objects
        self.own: list[Any] = []  # tensors that it holds itself, of which a gradient may be asked
        self.context: dict[str, Any] = {}  # what its layers leave in Keras' call context for those behind them
        self.notes: dict[Step, Any] = {}  # what Keras adds to errors of its operations, where others have it otherwise
        self.result: Any = None  # its form
        self.build: Any = None  # what makes it of its tensors, where that is simple
        self.made: list[tuple[int, Output]] = []  # these, without those that were given
        self.gives_nothing = False  # as an assertion
        self.recorded: list[Step] = []  # what tapes record
        self.accessed: list[Any] = []  # the variables that tapes hear of
        self.gradients: weakref.WeakSet[Region] = weakref.WeakSet()  # whose keys name this region
        self.interior: list[int] = []  # tensors that nobody but tapes hold
        self.places: list[int | None] = []  # the slots of the arguments that its segment knew before
        self.closed = False  # whether those are all, and the segment's own: the key says which they are
        self.stretches: list[Any] = []  # of a gradient that calls backward functions of the program's: see `stretches`
        self.calls: list[Any] = []
        self.parts: Any = None  # these, with what follows from them
        self.pattern: Any = None  # the arguments in the key, to be compared one by one
        self.premises: Any = None  # what code of the program's that it runs looks at
        self.reached: list[Any] = []  # the objects of Keras' among that

    def fill(self, **parts: Any) -> bool:
        """Takes what a run has found; returns whether it is what the run before has found."""
        same = self.confirmed > 0 and all(_same(getattr(self, name), value) for name, value in parts.items())
        self.disagreed = 0 if same else self.disagreed + (self.confirmed > 0)
        for name, value in parts.items():
            setattr(self, name, value)
        held = [*(v for source, v in self.feeds if source == "same"), *(v for _, v in self.pins)]
        self.own = [v for v in held if v.dtype.is_floating or v.dtype.is_complex]
        self.closed = not self.own and all(place is not None and place >= 0 for place in self.places)
        self.gives_nothing = self.result[0] == "object" and self.result[1] is None
        self.confirmed = self.confirmed + 1 if same else 1
        self.version += not same
        self.build, self.made = builder_of(self.result, self.outputs)
        return same

    def is_new(self) -> bool:
        """Returns whether nothing is known of it yet, good or bad."""
        return self.confirmed == self.version == self.changes == 0 and self.retry == tuning.region_first_retry

    def refuse(self, reason: str, for_long: bool = False) -> None:
        """Gives the region up until it is tried again."""
        self.reason = reason
        self.confirmed = 0
        later = tuning.region_last_retry if for_long else min(self.visits, tuning.region_last_retry)
        self.retry = max(self.retry, self.visits + later)

    def changed(self, what: str) -> None:
        """An object has been written to: the region must be learnt anew."""
        self.confirmed = 0
        self.changes += 1
        if self.changes > tuning.max_region_changes:
            self.reason = f"{what} keeps changing"

    def end_of_objects(self, _: Any = None) -> None:
        """An object that the key names is gone; another may get its id. What is known of it is let go."""
        self.confirmed = 0
        self.start.regions.pop(self.key, None)
        self.feeds, self.pins, self.accessed, self.result, self.premises, self.reads = [], [], [], None, None, None
        self.stretches, self.calls, self.parts = [], [], None
        for region in list(self.gradients):
            region.end_of_objects()

    def is_due(self) -> bool:
        """Returns whether the call should run instead of being jumped over."""
        return self.uses >= self.run_again

    def schedule(self) -> None:
        """Sets when the call should run next: ten times as many uses from now."""
        self.run_again = self.uses + min(9 * max(self.uses, 1), tuning.region_last_check)


def admit(regions: dict[Any, Region], function: Any) -> bool:
    """Returns whether a call with a key of its own is to be learnt: not where most such keys never came again.

    Each refusal brings the oldest of those keys nearer to its end.
    """
    once = [region for region in regions.values() if region.visits == 1 and region.function is function]
    if len(once) < tuning.max_regions_once:
        return True
    once[0].retry += 1
    # Now and then one of another kind gets its chance.
    if once[0].retry > tuning.region_last_retry // tuning.max_regions_once:
        del regions[once[0].key]
    return False


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, Const):
        return bool(one == other)
    return isinstance(one, PLAIN) and same(one, other)


def anchor(region: Region, objects: list[Any]) -> None:
    """Ends a region with the objects that its key names by their ids."""
    for value in objects:
        try:
            region.held.append(weakref.ref(value, region.end_of_objects))
        except TypeError:
            region.held.append(value)


_RETURNED = (*BY_IDENTITY, int, float, str, type, tf.DType)


def form_of(value: Any, place: Any) -> Any:
    """Returns the form of a result with its tensors replaced by what `place` says of them."""
    kind = type(value)
    if kind is LazyTensor or kind is EagerTensor:
        marks = marks_of(value)
        if not marks:
            return place(value)
        return "marked", place(value), {name: form_of(mark, place) for name, mark in marks.items()}
    if kind is list or kind is tuple:
        return kind, [form_of(v, place) for v in value]
    if kind is dict:
        return kind, {k: form_of(v, place) for k, v in value.items()}
    if isinstance(value, tf.IndexedSlices):
        return "slices", form_of(value.values, place), form_of(value.indices, place), form_of(value.dense_shape, place)
    if value is None or isinstance(value, _RETURNED) or is_resource_variable(value):
        return "object", value
    raise CannotMemoize(f"its result is a {kind.__name__}")


def fill_form(form: Any, tensor: Any) -> Any:
    """Returns a result of this form; `tensor` makes its tensors."""
    kind = form[0]
    if kind is list or kind is tuple:
        return kind([fill_form(f, tensor) for f in form[1]])
    if kind is dict:
        return {k: fill_form(f, tensor) for k, f in form[1].items()}
    if kind == "slices":
        return tf.IndexedSlices(*[fill_form(f, tensor) for f in form[1:]])
    if kind == "marked":
        made = tensor(form[1])
        for name, mark in form[2].items():
            setattr(made, name, fill_form(mark, tensor))
        return made
    return form[1] if kind == "object" else tensor(form)


def builder_of(form: Any, outputs: Outputs) -> tuple[Any, list[tuple[int, Output]]]:
    """Returns what makes a result of its tensors by number, and of those given, and which it takes; None: `fill_form`.

    Lists and tuples of tensors, which is what most layers return, are made without asking each time what they are.
    """
    numbers: dict[int, Output] = {}

    def written(form: Any) -> str | None:
        kind = form[0]
        if kind == "tensor":
            numbers[form[1]] = outputs[form[1]]
            return f"made[{form[1]}]"
        if kind == "argument":
            return f"given[{form[1]}]"
        if kind is list or kind is tuple:
            items = [written(f) for f in form[1]]
            if None in items:
                return None
            inner = "".join(f"{item}, " for item in items)
            return f"[{inner}]" if kind is list else f"({inner})"
        return "None" if kind == "object" and form[1] is None else None

    source = written(form) if form is not None else None
    if source is None:
        return None, []
    return eval(f"lambda made, given: {source}"), list(numbers.items())
