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

import keras
import numpy as np
import tensorflow as tf

from coexec.runtime.premises import is_object
from tracer.cursor import Cursor
from tracer.effects import Watcher
from tracer.graph import Step
from tracer.inputs import PLAIN
from tracer.intercept import make_constant
from tracer.lazy import LazyTensor, Output
from tracer.op import Const, freeze
from tracer.private import EagerTensor, is_resource_variable
from tracer.spec import spec_of

MAX_REGIONS = 64  # behind one step
MAX_ONCE = 8  # of them, those of one function whose key has come once: a message with a number in it, say
MAX_CHANGES = 16  # so often may the objects of a region be written to before it is given up

# A region is run again after this many uses, and then after ten times as many, until every four thousandth. A step of
# an MLP takes 0.2 ms where its four regions are jumped over, and 35 where they are run: every thousandth was a sixth.
FIRST_RUN_AGAIN, LAST_RUN_AGAIN = 10, 4000

# One that was refused is tried again after this many calls, and then after twice as many, until every thousandth.
FIRST_RETRY, LAST_RETRY = 2, 1000


class Opaque(Exception):
    """An argument or result that cannot be compared from call to call; never leaves the runtime."""


class OpaqueArray(Opaque):
    """An argument is an array, of which its layer would make a tensor."""


class Region(Watcher):
    """What one library call does, at one place of a segment."""

    def __init__(self, start: Step, key: Any, function: Any) -> None:
        self.start = start
        self.key = key
        self.function = function
        self.confirmed = 0  # runs in a row that agreed
        self.version = 0  # of what it does
        self.reason: str | None = None  # why it is none
        self.visits = self.uses = self.changes = 0
        self.retry = FIRST_RETRY
        self.run_again = FIRST_RUN_AGAIN
        self.held: list[Any] = []  # what is compared by identity
        self.end = start
        self.first: Step | None = None
        self.outputs: dict[int, Output] = {}  # by number: the segment's up to the region's end
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
        self.pattern: Any = None  # the arguments in the key, to be compared one by one
        self.premises: Any = None  # what code of the program's that it runs looks at
        self.reached: list[Any] = []  # the objects of Keras' among that

    def fill(self, **parts: Any) -> bool:
        """Takes what a run has found; returns whether it is what the run before has found."""
        same = self.confirmed > 0 and all(_same(getattr(self, name), value) for name, value in parts.items())
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
        return self.confirmed == 0 and self.version == 0 and self.changes == 0 and self.retry == FIRST_RETRY

    def refuse(self, reason: str, for_long: bool = False) -> None:
        """Gives the region up until it is tried again."""
        self.reason = reason
        self.confirmed = 0
        if for_long:
            self.retry = max(self.retry, self.visits + LAST_RETRY)

    def changed(self, what: str) -> None:
        """An object has been written to: the region must be learnt anew."""
        self.confirmed = 0
        self.changes += 1
        if self.changes > MAX_CHANGES:
            self.reason = f"{what} keeps changing"

    def end_of_objects(self, _: Any = None) -> None:
        """An object that the key names is gone; another may get its id. What is known of it is let go."""
        self.confirmed = 0
        self.start.regions.pop(self.key, None)
        self.feeds, self.pins, self.accessed, self.result, self.premises = [], [], [], None, None
        for region in list(self.gradients):
            region.end_of_objects()

    def is_due(self) -> bool:
        """Returns whether the call should run instead of being jumped over."""
        if self.uses < self.run_again:
            return False
        self.run_again = self.uses + min(9 * max(self.uses, 1), LAST_RUN_AGAIN)
        return True


def is_worth_learning(regions: dict[Any, Region], function: Any) -> bool:
    """Returns whether a call with a key of its own is to be learnt: not where most such keys never came again."""
    once = [region for region in regions.values() if region.visits == 1 and region.function is function]
    if len(once) < MAX_ONCE:
        return True
    once[0].retry += 1
    if once[0].retry > LAST_RETRY // MAX_ONCE:  # now and then one of another kind gets its chance
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
    return isinstance(one, PLAIN) and freeze(one) == freeze(other)


class Arguments:
    """The arguments of one library call: its key, and the tensors among them."""

    def __init__(self, cursor: Cursor, objects: bool = False) -> None:
        self._objects = objects  # whether the program's own may be among them: the premises have what they hold
        self._base = cursor.base
        self._end = cursor.step.end
        self._externals = cursor.externals
        self._constant_of = cursor.constant_of
        self.tensors: list[Any] = []  # lazy tensors of the running segment, constants, else eager ones
        self._numbers: dict[int, int] = {}  # of these, by their ids
        self.given: list[Any] = []  # the same as the program gave them, which is how tapes know them
        self.consts: list[Const | None] = []  # the values of those that operations may take for constants
        self.anchors: list[Any] = []  # objects that count by identity
        self._inside: set[int] = set()  # the ids of the tensors whose notes are being looked at

    def settle(self) -> None:
        """Gives constants their values, for what compares tensors by identity."""
        self.tensors = [v.resolve() if type(v) is LazyTensor and v._out.const is not None else v for v in self.tensors]

    def key(self, value: Any) -> Any:
        """Returns a hashable stand-in of a value, equal exactly where the library would do the same.

        Asked some fifty times a training step: what a value is follows from its type, which is looked up.
        """
        kind = type(value)
        what = kind_of(value)
        if what is OBJECT:
            self.anchors.append(value)
            return id(value)
        if what is TENSOR:
            marks = value.__dict__ and marks_of(value)
            return self._marked(value, marks) if marks else self._tensor(value)
        if what is SEQUENCE:
            return kind, tuple([self.key(v) for v in value])
        if what is SCALAR:
            return freeze(value)
        if what is DICT:
            return dict, tuple([(self.key(k), self.key(v)) for k, v in value.items()])
        if what is SLICES:
            return "slices", self.key(value.values), self.key(value.indices), self.key(value.dense_shape)
        if self._objects and is_object(value):
            self.anchors.append(value)
            return id(value)
        raise (OpaqueArray if kind is np.ndarray else Opaque)(f"an argument is a {kind.__name__}")

    def _tensor(self, value: Any) -> Any:
        given = value
        if type(value) is LazyTensor:
            out = value._out
            if out.const is not None:
                # What has no value yet is no feed either; giving it one would be most of what a region costs.
                real, known = value._value, None
                if real is not None:
                    known = next((k for k, external in enumerate(self._externals) if external is real), None)
                number = self._add(value if real is None else real, given, out.const)
                return "constant", known, number, out.spec.enum, out.spec.shape
            place = value._key - self._base
            if value._value is None and 0 <= place < self._end:
                self._add(value, given)
                return "tensor", place
            value = value.resolve()
        for k, known in enumerate(self._externals):
            if known is value:
                self._add(value, given, self._constant_of(value))
                return "feed", k
        spec = spec_of(value)
        return "new", self._add(value, given, self._constant_of(value)), spec.enum, spec.shape

    def _marked(self, value: Any, marks: dict[str, Any]) -> Any:
        """Returns the key of a tensor on which something is noted, which may be noted on that in turn."""
        if id(value) in self._inside:
            raise Opaque("a tensor is noted on what is noted on it")
        self._inside.add(id(value))
        found = "marked", self._tensor(value), tuple([(name, self.key(mark)) for name, mark in marks.items()])
        self._inside.discard(id(value))
        return found

    def const(self, number: int) -> Const | None:
        """Returns the value of a tensor that operations may take for a constant."""
        return self.consts[number]

    def _add(self, value: Any, given: Any, const: Const | None = None) -> int:
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
            self.given.append(given)
            self.consts.append(const)
        return number


_SCALARS = (int, float, bool, complex, str, bytes, type(None))
_OBJECTS = (
    keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer, keras.Variable,
    tf.UnconnectedGradients,
)  # fmt: skip

_RESOURCE = "_should_act_as_resource_variable"  # asked of values, it may be code of the program's that answers

# What the values of a type are, as far as keys go.
TENSOR, SEQUENCE, DICT, SCALAR, SLICES, OBJECT, OTHER = (
    "tensor", "sequence", "dict", "scalar", "slices", "object", "other"
)  # fmt: skip
_WHAT: dict[type, str] = {}
MAX_TYPES = 1000  # of them; a program may make ever new ones


def kind_of(value: Any) -> str:
    """Returns what a value is, as far as keys go."""
    kind = type(value)
    return _WHAT.get(kind) or _what_is(value, kind)


def _what_is(value: Any, kind: type) -> str:
    if kind is LazyTensor or kind is EagerTensor:
        what = TENSOR
    elif kind is list or kind is tuple:
        what = SEQUENCE
    elif kind is dict:
        what = DICT
    elif issubclass(kind, tf.IndexedSlices):
        what = SLICES
    elif kind in _SCALARS or issubclass(kind, (tf.DType, tf.TensorShape)):
        what = SCALAR
    elif issubclass(kind, (*_OBJECTS, tf.Variable)) or (hasattr(kind, _RESOURCE) and is_resource_variable(value)):
        what = OBJECT
    else:
        what = OTHER
    if len(_WHAT) > MAX_TYPES:
        _WHAT.clear()
    _WHAT[kind] = what
    return what


def marks_of(tensor: Any) -> dict[str, Any]:
    """Returns what Keras has noted on a tensor: its mask, the logits it was made of."""
    return {name: value for name, value in vars(tensor).items() if value is not None}


def with_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a layer or loss with arrays as the tensors that it would make of them first of all."""
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


def anchor(region: Region, objects: list[Any]) -> None:
    """Ends a region with the objects that its key names by their ids."""
    for value in objects:
        try:
            region.held.append(weakref.ref(value, region.end_of_objects))
        except TypeError:
            region.held.append(value)


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
    if value is None or isinstance(value, (*_OBJECTS, int, float, str)) or is_resource_variable(value):
        return "object", value
    raise Opaque(f"its result is a {kind.__name__}")


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


def builder_of(form: Any, outputs: dict[int, Output]) -> tuple[Any, list[tuple[int, Output]]]:
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
