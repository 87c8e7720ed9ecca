"""Flat guards: the earlier state that a watched call has read, with a check that it is unchanged.

Each guard consists of a holder, a key and the value read; the path by which the code reached the holder does not
matter, as each step of it has its own guard. One generated function checks all, 20 to 50 ns each. Holders and values
live as long as the memoized call, except tensors and variables, which may be large.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.guards.codegen import CheckWriter
from coexec.guards.pure_calls import is_number
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.memory import class_version
from tracer.op import same
from tracer.private import EagerTensor

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()

_TENSORS = (EagerTensor, LazyTensor, tf.Variable)


class FlatGuards:
    """Guards by holder; `hold()` checks them."""

    def __init__(self) -> None:
        self._attributes: dict[int, tuple[Any, dict[str, Any]]] = {}  # by holder: entries of its `__dict__`
        self._items: dict[int, tuple[Any, dict[Any, Any]]] = {}  # by dictionary: entries by key
        self._contents: dict[int, tuple[Any, tuple[Any, ...]]] = {}  # by container: all items
        self._cells: dict[int, tuple[Any, Any]] = {}
        self._contexts: dict[int, tuple[Any, Any]] = {}  # context variables
        self._functions: dict[int, Any] = {}
        self._computed: dict[tuple[int, str], tuple[Any, str, Any]] = {}  # attributes not stored in a `__dict__`
        self._arrays: dict[int, tuple[Any, Any]] = {}
        self._classes: dict[int, type] = {}
        self._holds: Callable[[], bool] | None = None
        self._writer = CheckWriter(failure="False", M=MISSING, same=same, alike=_alike, is_=operator.is_)
        self.count = 0
        self.tensors: set[int] = set()  # ids of tensors among the values, while the call is watched

    def hold(self) -> bool:
        """Returns whether all guards hold."""
        try:
            return self._holds is not None and self._holds()
        except Exception:  # objects' own code may raise anything
            return False

    def read_attribute(self, holder: Any, name: str, value: Any) -> None:
        """Guards an entry of an object's `__dict__`; the value may be `MISSING`."""
        self._note(self._attributes, holder, name, value)

    def read_item(self, holder: dict[Any, Any], key: Any, value: Any) -> None:
        """Guards an entry of a dictionary with an immutable key; the value may be `MISSING`."""
        self._note(self._items, holder, key, value)

    def _note(self, known: dict[int, Any], holder: Any, key: Any, value: Any) -> None:
        held = known.get(id(holder))
        if held is None:
            held = known[id(holder)] = (holder, {})
        if key not in held[1]:
            held[1][key] = value
            self._add(value)

    def read_content(self, holder: Any, items: tuple[Any, ...]) -> None:
        """Guards all items of a container."""
        if id(holder) not in self._contents:
            self._contents[id(holder)] = holder, items
            for item in items:
                self._add(item)

    def read_cell(self, cell: Any, value: Any) -> None:
        """Guards the content of a cell."""
        if id(cell) not in self._cells:
            self._cells[id(cell)] = cell, value
            self._add(value)

    def read_context(self, variable: Any, value: Any) -> None:
        """Guards the value of a context variable; `MISSING` if it has none, also by default."""
        if id(variable) not in self._contexts:
            self._contexts[id(variable)] = variable, value
            self._add(value)

    def read_computed(self, holder: Any, name: str, value: Any) -> None:
        """Guards the result of `getattr`, for attributes that run no Python code."""
        if (id(holder), name) not in self._computed:
            self._computed[id(holder), name] = holder, name, value
            self._add(value)

    def read_array(self, array: Any) -> None:
        """Guards the contents of an array."""
        if id(array) not in self._arrays:
            self._arrays[id(array)] = array, array.copy()
            self._add(None)

    def ran(self, function: Any) -> None:
        """Guards the code and defaults of a function."""
        if id(function) not in self._functions:
            self._functions[id(function)] = function
            self._add(None)

    def looked_up(self, kind: type) -> None:
        """Guards a class in which, or in whose bases, a name was looked up."""
        self._classes.setdefault(id(kind), kind)

    def _add(self, value: Any) -> None:
        self.count += 1
        if self.count > tuning.max_guards:
            raise Refused(f"it reads more than {tuning.max_guards} things from before it")
        if isinstance(value, _TENSORS):
            self.tensors.add(id(value))

    def finish(self) -> None:
        """Generates the function that checks the guards.

        Raises:
          Refused: if a class has no version.
        """
        constant, require = self._writer.constant, self._writer.require
        kinds: dict[int, type] = dict(self._classes)
        for holder, entries in self._attributes.values():
            name = constant(holder)
            kinds[id(type(holder))] = type(holder)
            require(f"type({name}) is {constant(type(holder))}")
            require(f"(d := {name}.__dict__) is not None")
            self._require_entries(entries)
        for holder, entries in self._items.values():
            require(f"(d := {constant(holder)}) is not None")
            self._require_entries(entries)
        for cell, value in self._cells.values():
            if value is MISSING:
                continue  # reading it raises, as it did
            require(self._is(f"{constant(cell)}.cell_contents", value))
        for variable, value in self._contexts.values():
            require(self._is(f"{constant(variable)}.get(M)", value))
        for function in self._functions.values():
            name = constant(function)
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                require(f"{name}.{part} is {constant(getattr(function, part))}")
        for holder, attribute, value in self._computed.values():
            name = constant(holder)
            require(f"type({name}) is {constant(type(holder))}")
            require(self._is(f"getattr({name}, {attribute!r}, M)", value))
        for holder, items in self._contents.values():
            name = constant(holder)
            for part, held in parts_of(holder, items):
                require(f"len({name}) == {len(held)}")
                if held:
                    saved = constant(held)
                    among = f"{name}{part}"
                    require(f"(all(map(is_, {among}, {saved})) or all(map(alike, {among}, {saved})))")
        for array, content in self._arrays.values():
            require(f"same({constant(array)}, {constant(content)})")
        for kind in kinds.values():
            version = class_version(kind)
            if version is None:
                continue  # immutable
            cell, value = version
            if not value:
                raise Refused(f"the class {kind.__qualname__} keeps changing")
            require(f"{constant(cell)}.value == {value}")
            constant(kind)  # keeps the memory of its version alive
        self._holds = self._writer.written()

    def _require_entries(self, entries: dict[Any, Any]) -> None:
        for key, value in entries.items():
            name = repr(key) if type(key) in (str, int) else self._writer.constant(key)
            missing = value is MISSING
            self._writer.require(f"{name} not in d" if missing else self._is(f"d.get({name}, M)", value))

    def _is(self, place: str, value: Any) -> str:
        if value is None or value is True or value is False:
            return f"{place} is {value}"
        if isinstance(value, _TENSORS):
            return f"(v := {place}) is not None and v is {self._writer.constant(weakref.ref(value))}()"
        name = self._writer.constant(value)
        if is_number(value) or type(value) is tuple:
            return f"((v := {place}) is {name} or alike(v, {name}))"
        return f"{place} is {name}"


def parts_of(holder: Any, items: tuple[Any, ...]) -> list[tuple[str, tuple[Any, ...]]]:
    """Returns suffixes by which to iterate over a container, with the items: a dictionary has keys and values."""
    if isinstance(holder, dict):
        half = len(items) // 2
        return [("", items[:half]), (".values()", items[half:])]
    return [("", items)]


def items_of(holder: Any) -> tuple[Any, ...]:
    """Returns the items of a container; of a dictionary, keys and values."""
    if isinstance(holder, dict):
        return (*dict.keys(holder), *dict.values(holder))
    return tuple(holder)


def _alike(one: Any, other: Any) -> bool:
    """Returns whether two values are interchangeable: identical, or equal and immutable."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_alike, one, other))
    return is_number(one) and bool(same(one, other))


def is_small(array: np.ndarray[Any, Any]) -> bool:
    """Returns whether an array is small enough to compare on every call."""
    return type(array) is np.ndarray and array.size <= tuning.watched_array and array.dtype.kind in "biufcSU"
