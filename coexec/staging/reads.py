"""Reads: the Python values that a staged statement relies on, each with the way to look it up again."""

from __future__ import annotations

import builtins
import contextlib
import weakref
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import keras
import tensorflow as tf

from coexec.staging.lookups import (
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
    is_made,
    is_number,
    written,
)
from tracer.effects import Watcher, watch
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.library import environment
from tracer.op import freeze
from tracer.private import EagerTensor
from tracer.seeds import generator
from tracer.spec import Spec, intern_spec, spec_of
from tracer.stage import Stage

CONTAINERS = (list, tuple, dict)

MAX_HANDLES = 1024
_MISSING = object()


class Reads(Watcher):
    """What has been read while a statement was staged; `again` looks whether all of it is still the same.

    Objects are known by their identity and not kept alive, numbers by value, lists and dicts by what was read of them.
    Tensors, and what variables hold, may be others each time: they are arguments of the staged statement.
    """

    def __init__(self) -> None:
        self.stage = Stage(captured=self._captured)
        self.alone: set[int] = set()  # reads of lists that are not to be found in two ways
        self.called: set[CodeType] = set()  # of functions of the user's
        self.stale = False  # an object of Keras' was written to
        self._scopes: Any = None  # of Keras, where a layer was called in them
        self._around: list[Any] = []
        self.fetched: list[int] = []  # which reads the arguments are, as far as they come from here
        self.positions: list[int] = []  # and which arguments they are
        self._reads: list[Read] = []
        self._again: Any = None
        self._known: dict[Any, tuple[int, Any]] = {}
        self._places: dict[int, int] = {}  # by id: reads of objects and containers
        self._made: dict[int, tuple[int, int]] = {}  # by the id of a cell: the function made in the call that has it
        self._held: dict[int, LazyTensor] = {}  # by the id of a variable's handle: what it holds
        self._handles: dict[int, Spec] = {}  # what variables hold, by the ids of their handles: none is used again
        self._kept: list[Any] = []  # while staging

    def place(self, value: Any) -> int | None:
        """Returns the read that an object or container has come from; None if it is the statement's own."""
        return self._places.get(id(value))

    def variable(self, place: int) -> str | None:
        """Returns the local variable of the frame that a read was of; None if it was of something else."""
        read = self._reads[place]
        return read.key if read.kind == LOCAL else None

    def is_looked_into(self, place: int) -> bool:
        """Returns whether something was read of what a read has given."""
        return any(read.parent == place for read in self._reads)

    def local(self, name: str, value: Any) -> Any:
        """Notes a local variable of the frame; returns what stands for it."""
        return self._read(-1, LOCAL, name, value)

    def name(self, namespace: dict[str, Any], name: str) -> Any:
        """Reads a global or built-in name."""
        value = namespace.get(name, _MISSING)
        if value is _MISSING:
            value = vars(builtins).get(name, _MISSING)
        if value is _MISSING:
            raise Refused(f"name {name!r} is not defined")
        self._kept.append(namespace)
        return self._read(-1, GLOBAL, (_Known(namespace), name), value)

    def cell(self, cell: CellType, name: str) -> Any:
        """Reads a variable of an enclosing function."""
        try:
            if id(cell) in self._made:
                place, number = self._made[id(cell)]
                return self._read(place, SHARED, number, cell.cell_contents)
            return self._read(-1, CELL, _Known(cell), cell.cell_contents)
        except ValueError:
            raise Refused(f"{name!r} has no value yet") from None

    def attribute(self, owner: Any, name: str, value: Any) -> Any:
        """Notes an attribute of an object that was read before."""
        return self._read(self._places[id(owner)], ATTRIBUTE, name, value)

    def item(self, owner: Any, key: Any) -> Any:
        """Reads an item of a container that was read before."""
        try:
            return self._read(self._places[id(owner)], ITEM, key, owner[key])
        except (LookupError, TypeError) as error:
            raise Refused(f"{type(error).__name__} on {key!r}") from None

    def length(self, owner: Any) -> int:
        """Reads how many items a container has that was read before."""
        return self._read(self._places[id(owner)], LENGTH, None, len(owner))

    def _read(self, parent: int, kind: int, key: Any, value: Any) -> Any:
        known = self._known.get((parent, kind, key))
        if known is not None:
            return known[1]
        number = len(self._reads)
        if kind in (LOCAL, SHARED) and type(value) is FunctionType and is_made(value):
            expected, shown = self._function(value, number)
        else:
            expected, shown = self._classified(value, number)
        self._reads.append(Read(parent, kind, key, expected))
        self._known[parent, kind, key] = number, shown
        return shown

    def _classified(self, value: Any, number: int) -> tuple[Any, Any]:
        if isinstance(value, EagerTensor):
            spec = spec_of(value)
            return spec, self._argument(spec, number)
        self._kept.append(value)
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

    def _function(self, function: FunctionType, number: int) -> tuple[Any, Any]:
        """Notes a function that the program makes anew in each call: its code counts, and what it shares is read."""
        self._kept.append(function)
        first = self._places.setdefault(id(function), number)
        if first != number:
            return ("alias", first), function
        for n, cell in enumerate(function.__closure__ or ()):
            self._kept.append(cell)
            self._made.setdefault(id(cell), (number, n))
        return ("made", function.__code__), function

    def _argument(self, spec: Spec, number: int) -> LazyTensor:
        self.fetched.append(number)
        self.positions.append(len(self.stage.arguments))
        return self.stage.argument(spec)

    def _captured(self, value: Any) -> LazyTensor | None:
        """Returns what stands for the value of a variable, which is given by its handle."""
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
        """Takes note that a layer is no longer what it was."""
        self.stale = True

    def ran(self, layer: Any, objects: list[Any]) -> None:
        """Notes that a layer was called, which relies on the attributes of these objects."""
        watch(objects, self)
        if self._scopes is None:
            self._scopes = environment(self._around)

    def owned(self, layer: Any) -> None:
        """Makes the variables of a layer ones that may be read."""
        for variable in layer.variables:
            held = variable.value
            if id(held.handle) not in self._places:
                self._kept.append(held)
                self._places[id(held.handle)] = len(self._reads)
                self._reads.append(Read(-1, OBJECT, weakref.ref(held), ("same", weakref.ref(held))))

    def _holds(self, handle: Any, expected: Spec) -> bool:
        """Returns whether a variable holds what is expected, and notes that if so."""
        if spec_of(handle).handle != ((expected.enum, expected.shape),):
            return False
        if len(self._handles) >= MAX_HANDLES:
            self._handles.clear()
        self._handles[handle._id] = expected
        return True

    def finish(self) -> None:
        """Ends the staging."""
        self._kept, self._known, self._places, self._held, self._made = [], {}, {}, {}, {}

    def again(self, local: dict[str, Any]) -> list[Any] | None:
        """Looks everything up again; returns the arguments, or None if something is no longer the same.

        Those that do not come from here are None.
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
    """Ends the staging of a statement, whatever comes of it; seeds that it has drawn are drawn again by the program."""
    drawn_from = generator()  # functions that draw seeds do so before they are refused
    state = drawn_from.getstate() if drawn_from is not None else None
    try:
        yield
    finally:
        reads.finish()
        if drawn_from is not None:
            drawn_from.setstate(state)


class _Known:
    """A function's globals, or a variable that functions share, by identity."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
