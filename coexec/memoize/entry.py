"""Regions: memoized library calls, followed as one unit without running their Python.

A region is stored on the step before it, by a key: the function, its arguments (tensors by their place in the call,
Python values by value, objects by identity) and the surrounding scopes. It names the step after its operations, to
which the cursor skips, their feeds, and the tensors that the call returns.

It is learnt by running the library's Python twice, the first time maybe in the recorded call (`recorded_runs`): the
operations must be followed without a cut, there may be no other effects (`tracer.effects`), and both runs must agree.
It is invalidated when an object that it depends on is written to, and the call is rerun now and then to check it.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.follow.backward import Closed, FunctionRecord
from coexec.guards.call_key import CannotMemoize, is_by_identity, marks_of
from coexec.guards.library_reads import LibraryReads
from coexec.guards.watched_state import Effect
from coexec.memoize.proven_sizes import ProvenSizes
from coexec.memoize.redirect import helper_of
from coexec.memoize.step_range import Outputs
from tracer.effects import Watcher
from tracer.graph import Step
from tracer.inputs import PLAIN
from tracer.lazy import LazyTensor, Output
from tracer.library import functions
from tracer.location import user_frames
from tracer.op import Const, same
from tracer.private import EagerTensor, UnreadVariable, is_resource_variable
from tracer.variables import unread


class Region(Watcher):
    """What one library call does at one place of a segment."""

    def __init__(self, start: Step, key: Any, function: Any) -> None:
        super().__init__()
        self.start = start
        self.key = key
        self.function = function
        self.helper = helper_of(function)  # if it is a function of the program
        self.confirmed = 0  # consecutive runs that agreed
        self.version = 0  # incremented when it turns out to do something else
        self.reason: str | None = None  # why the call cannot be memoized
        self.visits = self.uses = self.changes = 0
        self.disagreed = 0  # consecutive runs that disagreed with the one before
        self.retry = tuning.region_first_retry
        self.run_again = tuning.region_first_check
        self.reads: LibraryReads | None = None  # guards of what its Python may have read
        self.held: list[Any] = []  # keeps what the key compares by identity
        self.alike: Any = None  # equal for calls that run the same code, wherever they are made: see `alike_key`
        self.end = start
        self.first: Step | None = None
        self.asks = False  # whether one may fail inside a manager that has let errors pass so far
        self.outputs = Outputs(start, [])  # by number: the segment's up to the region's end
        self.feeds: list[tuple[str, Any]] = []  # the source of each feed
        self.seeds: tuple[int, list[int]] = 0, []  # how many its Python draws, which of them operations use
        self.handles: set[int] = set()  # ids of the variables among them
        self.read: list[tuple[int, Const]] = []  # arguments whose values its Python reads
        self.taken: list[tuple[int, Const]] = []  # and those whose values operations use as constants
        self.pins: list[tuple[int, Any]] = []  # earlier feeds that must be these objects
        self.sizes: ProvenSizes | None = None  # on a dynamic path: those at which it may be skipped
        self.own: list[Any] = []  # its own tensors that may be differentiated
        self.effects: list[tuple[Effect, Any]] = []  # what it changes of earlier state, with the forms of the values
        self.marks: list[tuple[int, dict[str, Any]]] = []  # the forms of what it leaves noted on arguments, if changed
        self.emptied: set[tuple[int, str]] = set()  # what it notes on arguments as None where there was nothing
        self.context: dict[str, Any] = {}  # what its layers set in Keras' call context for later ones
        self.notes: dict[Step, Any] = {}  # Keras' additions to errors, where they differ from the steps'
        self.result: Any = None  # the form of its result
        self.build: Any = None  # a function that builds it from tensors, if simple
        self.made: list[tuple[int, Output]] = []  # those tensors, except arguments
        self.gives_nothing = False  # returns None, like an assertion
        self.recorded: list[Step | FunctionRecord] = []  # what tapes record
        self.accessed: list[weakref.ref[Any]] = []  # trainable variables reported to tapes and watchers
        self.gradients: weakref.WeakSet[Region] = weakref.WeakSet()  # gradients whose keys include this region
        self.interior: list[int] = []  # tensors held by tapes only
        # Of a gradient that tapes record: the sources of the recorded operations' inputs from before it, by slot.
        self.early: dict[int, tuple[str, Any]] = {}
        self.places: list[int | None] = []  # the arguments' slots, where the segment knew them before
        self.unfed: list[int] = []  # on a dynamic path: the numbers of arguments that no operation takes,
        self.shapes: tuple[Any, ...] = ()  # of which a shape may be all that matters
        self.closed = False  # whether all are of the segment itself, and so implied by the key
        self.given: Any = None  # to a gradient, in the form of its tape: a `Given`
        self.form: tuple[int, Any] | None = None  # its version, and what it then does on tapes
        self.spans: list[Any] = []  # of a gradient with backward functions: see `gradient_spans`
        self.calls: list[Any] = []
        self.parts: Any = None  # a `GradientParts`, or None
        self.pattern: Any = None  # an `ArgumentGuard`, tried before the key
        self.state_guards: Any = None  # guards of what the program's code in it reads
        self.reached: list[Any] = []  # Keras objects among that

    def fill(self, **parts: Any) -> bool:
        """Stores the findings of a run; returns whether they equal those of the run before."""
        same = self.confirmed > 0 and all(_same(getattr(self, name), value) for name, value in parts.items())
        self.disagreed = 0 if same else self.disagreed + (self.confirmed > 0)
        # Freed at the end only: what dies with them may drop the region.
        replaced = [getattr(self, name) for name in parts]
        for name, value in parts.items():
            setattr(self, name, value)
        held = [*(v for source, v in self.feeds if source == "same"), *(v for _, v in self.pins)]
        self.own = [v for v in held if v.dtype.is_floating or v.dtype.is_complex]
        self.closed = not self.own and all(place is not None and place >= 0 for place in (*self.places, *self.early))
        self.gives_nothing = self.result[0] == "object" and self.result[1] is None and not (self.effects or self.marks)
        self.confirmed = self.confirmed + 1 if same else 1
        self.version += not same
        self.build, self.made = builder_of(self.result, self.outputs)
        del replaced
        return same

    def is_new(self) -> bool:
        """Returns whether it has never been learnt or refused."""
        return self.confirmed == self.version == self.changes == 0 and self.retry == tuning.region_first_retry

    def refuse(self, reason: str, for_long: bool = False) -> None:
        """Gives the region up, until a later retry."""
        self.reason = reason
        self.confirmed = 0
        later = tuning.region_last_retry if for_long else min(self.visits, tuning.region_last_retry)
        self.retry = max(self.retry, self.visits + later)

    def changed(self, what: str) -> None:
        """Invalidates the region, as an object that it depends on has changed; refuses it if that recurs."""
        self.confirmed = 0
        self.changes += 1
        if self.changes > tuning.max_region_changes:
            self.reason = f"{what} keeps changing"

    def end_of_objects(self, _: Any = None) -> None:
        """Drops the region and dependent gradients, as an object in its key was freed, whose id may be reused."""
        self.confirmed = 0
        self.start.regions.pop(self.key, None)
        self.feeds, self.pins, self.accessed, self.result, self.state_guards, self.reads = [], [], [], None, None, None
        self.spans, self.calls, self.parts = [], [], None
        for region in list(self.gradients):
            region.end_of_objects()

    def is_due(self) -> bool:
        """Returns whether to rerun the call for a check instead of skipping it."""
        return self.uses >= self.run_again

    def schedule(self) -> None:
        """Schedules the next check, at ten times as many uses."""
        self.run_again = self.uses + min(9 * max(self.uses, 1), tuning.region_last_check)


def shapes_of(tensors: list[Any], numbers: list[int]) -> tuple[Any, ...]:
    """Returns the shapes of some of a call's tensors."""
    given = [tensors[n] for n in numbers]
    return tuple([v._out.spec.shape if type(v) is LazyTensor else v._shape_tuple() for v in given])


def find(
    regions: dict[Any, Region], key: tuple[Any, ...], tensors: list[Any]
) -> tuple[tuple[Any, ...], Region | None]:
    """Returns the full key of a call that is given `tensors`, and its region if there is one.

    The same call may be made at several lines after one cut, and goes on by other operations at each: the lines behind
    the first have their frames in the key. So have calls that are given other shapes, where nothing else tells.
    """
    region = regions.get(key)
    if region is not None and region.unfed and (shapes := shapes_of(tensors, region.unfed)) != region.shapes:
        key = *key, shapes
        region = regions.get(key)
    first = None if region is None else region.first
    if first is not None and first.checked and not first.is_inside(frames := user_frames()):
        key = *key, frames
        region = regions.get(key)
    return key, region


def admit(regions: dict[Any, Region], function: Any) -> bool:
    """Returns whether there is room to learn a call with a new key: not if many such keys were seen only once.

    Each refusal ages the oldest of those keys, which is evicted in the end.
    """
    once = [region for region in regions.values() if region.visits == 1 and region.function is function]
    if len(once) < tuning.max_regions_once:
        return True
    once[0].retry += 1
    # Evicted now and then, so that a new key gets a chance.
    if once[0].retry > tuning.region_last_retry // tuning.max_regions_once:
        del regions[once[0].key]
    return False


def has_other_numbers(regions: dict[Any, Region], region: Region) -> bool:
    """Returns whether a function is known with other floats or arrays, which may keep changing, as in a schedule.

    Not so for calls of layers and the like, which are dearer to follow.
    """
    others = (each for each in regions.values() if each is not region and each.function is region.function)
    return region.function in functions and any(_is_same_but_floats(each.key, region.key) for each in others)


def _is_same_but_floats(one: Any, other: Any) -> bool:
    if type(one) is not tuple or type(other) is not tuple or len(one) != len(other):
        return bool(one == other)
    if one[:1] and one[0] in _FLOATS and one[:-1] == other[:-1]:  # as `freeze` writes them
        return True
    return all(map(_is_same_but_floats, one, other))


_FLOATS = (float, np.float16, np.float32, np.float64, np.ndarray)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Closed):
        return bool(one == other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, Const):
        return bool(one == other)
    return isinstance(one, PLAIN) and same(one, other)


def anchor(region: Region, objects: list[Any]) -> None:
    """Drops a region with the objects whose ids are in its key; keeps those without weak references alive."""
    for value in objects:
        try:
            region.held.append(weakref.ref(value, region.end_of_objects))
        except TypeError:
            region.held.append(value)


_OF_UNREAD = ("_handle", "_dtype", "_shape", "_in_graph_mode", "_unique_id")  # of what a write to a variable returns
_RETURNED = (int, float, str, type, tf.DType)


def form_of(value: Any, place: Any) -> Any:
    """Returns the form of a result, its tensors replaced by `place` of them; raises `CannotMemoize` if it has none."""
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
    if isinstance(value, UnreadVariable):
        return "unread", *[getattr(value, name) for name in _OF_UNREAD]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return "named", kind, [form_of(v, place) for v in value]
    if isinstance(value, tf.IndexedSlices):
        return "slices", form_of(value.values, place), form_of(value.indices, place), form_of(value.dense_shape, place)
    if value is None or isinstance(value, _RETURNED) or is_by_identity(type(value)) or is_resource_variable(value):
        return "object", value
    raise CannotMemoize(f"its result is a {kind.__name__}")


def fill_form(form: Any, tensor: Any) -> Any:
    """Returns a result of this form; `tensor` makes its tensors."""
    kind = form[0]
    if kind is list or kind is tuple:
        return kind([fill_form(f, tensor) for f in form[1]])
    if kind is dict:
        return {k: fill_form(f, tensor) for k, f in form[1].items()}
    if kind == "named":
        return tuple.__new__(form[1], [fill_form(f, tensor) for f in form[2]])
    if kind == "unread":
        return unread(*form[1:])
    if kind == "slices":
        return tf.IndexedSlices(*[fill_form(f, tensor) for f in form[1:]])
    if kind == "marked":
        made = tensor(form[1])
        for name, mark in form[2].items():
            setattr(made, name, fill_form(mark, tensor))
        return made
    return form[1] if kind == "object" else tensor(form)


def repeat_effects(region: Region, given: list[Any], tensor: Any) -> None:
    """Changes what the call changes of earlier state, and what is noted on the tensors that it is given."""
    for effect, form in region.effects:
        effect.repeat(fill_form(form, tensor))
    for number, marks in region.marks:
        for name, form in marks.items():
            setattr(given[number], name, fill_form(form, tensor))


def builder_of(form: Any, outputs: Outputs) -> tuple[Any, list[tuple[int, Output]]]:
    """Returns a generated function that builds a result from its tensors by number and the arguments, and its tensors.

    For lists and tuples of tensors, which most layers return, this avoids interpreting the form on each call. None for
    other forms, which need `fill_form`.
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
