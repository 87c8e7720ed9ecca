"""Reads: the Python values that a traced statement relies on, each with its guard source."""

from __future__ import annotations

import builtins
import contextlib
import weakref
from collections.abc import Iterator
from types import CellType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.trace.attribute_guards import Lookup, lookup_of
from coexec.control_flow.trace.read_guards import (
    ATTRIBUTE,
    CELL,
    GLOBAL,
    ITEM,
    LENGTH,
    LOCAL,
    OBJECT,
    SHARED,
    VALUE,
    Read,
    is_local_function,
    is_tensor,
    written,
)
from coexec.guards.pure_calls import is_number
from tracer.effects import Watcher, watch
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.library import environment
from tracer.op import freeze
from tracer.seeds import generator
from tracer.spec import Spec, intern_spec, spec_of
from tracer.stage import Stage

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Tensor, Value
    from coexec.control_flow.trace.read_guards import Check, Guard, Key

CONTAINERS = (list, tuple, dict)

_MISSING = object()


class Reads(Watcher):
    """What was read while a statement was traced; `again` checks all of it, as guards.

    Objects are guarded by identity and not kept alive, numbers by value, lists and dicts by what was read of them.
    Tensors and the values of variables may differ each time: they are arguments of the traced statement.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(captured=self._captured)
        self.alone: set[int] = set()  # reads of lists that no other read may alias
        self.stale = False  # a Keras object that it relies on was written to
        self._scopes: tuple[object, ...] | None = None  # Keras' scopes, if a layer was called
        self._around: list[object] = []  # what those are compared by
        self.fetched: list[int] = []  # the reads that are arguments
        self.positions: list[int] = []  # and the positions of those arguments
        self._reads: list[Read] = []
        self._again: Check | None = None
        self._known: dict[tuple[int, int, Key], tuple[int, Value]] = {}
        self._places: dict[int, int] = {}  # by id: reads of objects and containers
        self._made: dict[int, tuple[int, int]] = {}  # by a cell's id: the read of its function, and its index
        self._held: dict[int, LazyTensor] = {}  # by the id of a variable's handle: the variable's value
        self._handles: dict[int, Spec] = {}  # of variables' values, by the handles' ids, never reused
        self._kept: list[Value] = []  # keeps ids valid while tracing

    def place(self, value: Value) -> int | None:
        """Returns the read that returned an object or container; None if the statement itself made it."""
        return self._places.get(id(value))

    def variable(self, place: int) -> str | None:
        """Returns the name of the local variable that was read; None if the read is of another kind."""
        read = self._reads[place]
        return read.key if read.kind == LOCAL else None

    def is_looked_into(self, place: int) -> bool:
        """Returns whether something was read from the value of this read."""
        return any(read.parent == place for read in self._reads)

    def local(self, name: str, value: Value) -> Value:
        """Reads a local variable of the frame; returns what represents it in the trace."""
        return self._read(-1, LOCAL, name, value)

    def name(self, namespace: dict[str, Value], name: str) -> Value:
        """Reads a global or built-in name."""
        value = namespace.get(name, _MISSING)
        if value is _MISSING:
            value = vars(builtins).get(name, _MISSING)
        if value is _MISSING:
            raise Refused(f"name {name!r} is not defined")
        self._kept.append(namespace)
        return self._read(-1, GLOBAL, (_Known(namespace), name), value)

    def cell(self, cell: CellType, name: str) -> Value:
        """Reads a variable of an enclosing function."""
        try:
            if id(cell) in self._made:
                place, number = self._made[id(cell)]
                return self._read(place, SHARED, number, cell.cell_contents)
            return self._read(-1, CELL, _Known(cell), cell.cell_contents)
        except ValueError:
            raise Refused(f"{name!r} has no value yet") from None

    def attribute(self, owner: Value, name: str, value: Value) -> Value:
        """Reads an attribute of an object that was read before; `value` is its value."""
        return self._read(self._places[id(owner)], ATTRIBUTE, name, value, lookup_of(owner, name))

    def item(self, owner: Value, key: Value) -> Value:
        """Reads an item of a container that was read before."""
        try:
            return self._read(self._places[id(owner)], ITEM, key, owner[key])
        except (LookupError, TypeError) as error:
            raise Refused(f"{type(error).__name__} on {key!r}") from None

    def length(self, owner: Value) -> int:
        """Reads the length of a container that was read before."""
        return self._read(self._places[id(owner)], LENGTH, None, len(owner))  # type: ignore[no-any-return]

    def _read(self, parent: int, kind: int, key: Key, value: Value, lookup: Lookup | None = None) -> Value:
        """Notes a read, once for each parent, kind and key; returns what represents its value in the trace."""
        known = self._known.get((parent, kind, key))
        if known is not None:
            return known[1]
        number = len(self._reads)
        if kind in (LOCAL, SHARED) and type(value) is FunctionType and is_local_function(value):
            expected, shown = self._function(value, number)
        else:
            expected, shown = self._classified(value, number)
        self._reads.append(Read(parent, kind, key, expected, lookup))
        self._known[parent, kind, key] = number, shown
        return shown

    def _classified(self, value: Value, number: int) -> tuple[Guard, Value]:
        """Returns the guard on a value, and what represents it in the trace: an argument for a tensor, else itself."""
        if is_tensor(value):
            spec = spec_of(value)
            return spec, self._argument(spec, number)
        self._kept.append(value)
        if computes_class(type(value)):
            raise Refused(f"attributes of a {type(value).__qualname__} are computed")
        if is_number(value):
            return ("equal", freeze(value)), value
        if isinstance(value, MethodType):
            self._places.setdefault(id(value.__func__), number)
            return ("method", (weakref.ref(value.__func__), weakref.ref(value.__self__))), value
        first = self._places.setdefault(id(value), number)
        if type(value) in CONTAINERS:
            return (("type", type(value)) if first == number else ("alias", first)), value
        if isinstance(value, keras.Variable):
            value = value.value
        if isinstance(value, tf.Variable):
            self._places.setdefault(id(value.handle), number)
        try:
            return ("same", weakref.ref(value)), self._kept[-1]
        except TypeError:
            return ("same", lambda: value), self._kept[-1]

    def _function(self, function: FunctionType, number: int) -> tuple[Guard, Value]:
        """Returns the same for a function that each call of the program creates: guarded by code, globals, cells."""
        self._kept.append(function)
        first = self._places.setdefault(id(function), number)
        if first != number:
            return ("alias", first), function
        for n, cell in enumerate(function.__closure__ or ()):
            self._kept.append(cell)
            self._made.setdefault(id(cell), (number, n))
        return ("made", (function.__code__, function.__globals__)), function

    def _argument(self, spec: Spec, number: int) -> LazyTensor:
        self.fetched.append(number)
        self.positions.append(len(self.stage.arguments))
        return self.stage.argument(spec)

    def _captured(self, value: Value) -> LazyTensor | None:
        """Returns the argument that represents a variable's value, given its handle; None if that is unknown."""
        known = self._held.get(id(value))
        if known is not None:
            return known
        place = self._places.get(id(value))
        spec = spec_of(value)
        if place is None or not spec.handle:
            return None
        enum, shape = spec.handle[0]
        if shape is None or -1 in shape:
            raise Refused("a variable has no fixed shape")
        number = len(self._reads)
        held = intern_spec(enum, shape)
        self._reads.append(Read(place, VALUE, None, held))
        known = self._held[id(value)] = self._argument(held, number)
        return known

    def changed(self, what: str) -> None:
        """Invalidates what was read: a layer changed."""
        self.stale = True

    def ran(self, layer: keras.layers.Layer, objects: list[Value]) -> None:
        """Notes a call of a layer that relies on the attributes of these objects, and on Keras' scopes."""
        watch(objects, self)
        if self._scopes is None:
            self._scopes = environment(self._around)

    def owned(self, layer: keras.layers.Layer) -> None:
        """Registers a layer's variables, so that the trace can read them; guards that each is alive."""
        for variable in layer.variables:
            held = variable.value
            if id(held.handle) not in self._places:
                self._kept.append(held)
                self._places[id(held.handle)] = len(self._reads)
                self._reads.append(Read(-1, OBJECT, weakref.ref(held), ("same", weakref.ref(held))))

    def _holds(self, handle: Tensor, expected: Spec) -> bool:
        """Returns whether a variable's value has the expected spec; remembers its handle if so."""
        if spec_of(handle).handle != ((expected.enum, expected.shape),):
            return False
        if len(self._handles) >= tuning.max_read_handles:
            self._handles.clear()
        self._handles[handle._id] = expected
        return True

    def finish(self) -> None:
        """Ends tracing: releases what only tracing needs."""
        self._kept, self._known, self._places, self._held, self._made = [], {}, {}, {}, {}

    def again(self, local: dict[str, Value]) -> list[Value] | None:
        """Checks all guards; returns the arguments, or None if a guard fails.

        Arguments that no read supplies are None.
        """
        if self.stale or (self._scopes is not None and environment([]) != self._scopes):
            return None
        try:
            if self._again is None:
                arguments: list[int | None] = [None] * len(self.stage.arguments)
                for number, position in zip(self.fetched, self.positions, strict=True):
                    arguments[position] = number
                self._again = written(self._reads, self.alone, arguments, self._handles, self._holds)
            return self._again(local)
        except (LookupError, AttributeError, ValueError, TypeError):
            return None


@contextlib.contextmanager
def staging(reads: Reads) -> Iterator[None]:
    """Ends tracing, whatever its outcome; rewinds the seeds that it drew, as the program will draw them."""
    drawn_from = generator()  # a function that draws a seed does so before it is refused
    state = drawn_from.getstate() if drawn_from is not None else None
    try:
        yield
    finally:
        reads.finish()
        if drawn_from is not None:
            drawn_from.setstate(state)


def computes_class(kind: type) -> bool:
    """Returns whether `isinstance` may run code of the program on objects of this class."""
    return any(type(vars(base).get(name)) in _COMPUTED for base in kind.__mro__ for name in _ASKED)


_COMPUTED = (FunctionType, property)
_ASKED = ("__getattribute__", "__class__")


def has_own_builtins(runs: FunctionType | FrameType) -> bool:
    """Returns whether a function, or the code of a frame, looks up builtins in another dict than Python's."""
    if isinstance(runs, FrameType):
        return runs.f_builtins is not vars(builtins)
    return runs.__builtins__ is not vars(builtins)  # type: ignore[attr-defined, unused-ignore]  # mypy's cache forgets it


class _Known:
    """A function's globals, or a cell, compared by identity."""

    __slots__ = ("thing",)

    def __init__(self, thing: dict[str, Value] | CellType) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
