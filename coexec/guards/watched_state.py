"""Watched state: the state from before a call that it reads and changes.

Objects created during the call need no guard. They are in the youngest generation of CPython's collector, which does
not run meanwhile; anything else counts as old, which at worst costs speed: a guard on a private object always holds.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import gc
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import wrapt

from coexec.base.tuning import tuning
from coexec.guards import c_functions as c
from coexec.guards.class_lookup import HEAP
from coexec.guards.flat_guards import MISSING, FlatGuards, is_small, items_of
from coexec.guards.pure_calls import is_number
from tracer.errors import Refused
from tracer.keras_packages import classes
from tracer.lazy import LazyTensor
from tracer.op import same
from tracer.private import EagerTensor, pywrap_tfe

_SIMPLE = frozenset({int, float, bool, str, bytes, type(None), EagerTensor, LazyTensor, tf.DType, slice, complex})
_UNASKED = (EagerTensor, LazyTensor, tf.Variable, tf.DType, tf.TensorShape, *c.UNCHANGING)
_LOCALS = (threading.local, pywrap_tfe.EagerContextThreadLocalData)  # guards are checked on the thread of the call
_SIMPLE_ITEMS = (*c.UNCHANGING, *c.VIEWS, EagerTensor, LazyTensor, tf.TensorShape, tf.Variable)
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)


class Effect(NamedTuple):
    """An entry of earlier state that a call leaves with another value: how it is stored, and what it is then."""

    holder: Any
    how: str  # "attribute", "item", "cell" or "computed"
    key: Any
    value: Any
    is_old: bool  # whether the value was there before the call, or is immutable

    def repeat(self, value: Any) -> None:
        """Sets the entry to a value."""
        if self.how == "attribute":
            self.holder.__dict__[self.key] = value
        elif self.how == "item":
            self.holder[self.key] = value
        elif self.how == "cell":
            self.holder.cell_contents = value
        else:
            setattr(self.holder, self.key, value)


def is_observed(value: Any) -> bool:
    """Returns whether this is an object of Keras, whose attributes are observed by other means."""
    return isinstance(value, (*classes.stateful, keras.random.SeedGenerator))


class WatchedState:
    """The guards of what one call has read, and what it has changed.

    The methods raise `Refused` for what cannot be guarded. `original` returns the original of a twin.
    """

    def __init__(self, original: Callable[[Any], Any]) -> None:
        self.guards = FlatGuards()
        self.keras: dict[int, Any] = {}  # the Keras objects encountered, by id
        self.original = original
        self._new: set[int] = set()
        self._old: dict[int, Any] = {}
        self._written: dict[tuple[int, str, Any], tuple[Any, str, Any, Any]] = {}
        self._changed: dict[int, tuple[Any, tuple[Any, ...]]] = {}  # containers, with their items before
        self._names_seen: set[tuple[int, int]] = set()

    def effects(self) -> list[Effect]:
        """Returns the attributes, items and cells of earlier state that the call has left with other values.

        Raises:
          Refused: at the first change that cannot be repeated by setting one of these.
        """
        found = []
        for holder, how, key, before in self._written.values():
            now = _now(holder, how, key)
            if now is before or (is_number(before) and is_number(now) and same(before, now)):
                continue
            # Writes to Keras' objects invalidate memoized calls, and must pass their hooks.
            if how not in ("attribute", "item", "cell") and not isinstance(holder, _LOCALS):
                raise Refused(f"it sets {key!r} of a {type(holder).__name__}")
            if now is MISSING or is_observed(holder) or (how == "item" and not is_key(key)):
                raise Refused(f"it sets {key!r} of a {type(holder).__name__}")
            old = self._is_old(now)
            if not old and not isinstance(now, (tuple, EagerTensor, LazyTensor)) and not self.is_new(now):
                raise Refused(f"it sets {key!r} of a {type(holder).__name__} to a {type(now).__name__}")
            found.append(Effect(holder, how, key, now, old))
        for holder, items in self._changed.values():
            now = items_of(holder)
            if len(now) != len(items) or any(one is not other for one, other in zip(now, items, strict=True)):
                raise Refused(f"it changes a {type(holder).__name__} that was there before")
        return found

    # New objects.

    def made(self, value: Any) -> None:
        """Notes that a value was created during the call."""
        self._new.add(id(value))

    def is_new(self, value: Any) -> bool:
        key = id(value)
        if key in self._old:
            return False
        if key in self._new:
            return True
        if not gc.is_tracked(value):
            return False
        self._look_for_new()
        if key in self._new:
            return True
        self._old[key] = value
        return False

    def _look_for_new(self) -> None:
        """Adds the objects made since the last time, which come last; a few may be missed, and count as old.

        (Adding all of them each time was 80 % of the time of watching a call into TensorFlow Probability.)
        """
        new, known = self._new, 0
        for value in reversed(gc.get_objects(generation=0)):
            if id(value) not in new:
                new.add(id(value))
                known = 0
            elif (known := known + 1) > tuning.watched_known:
                break

    def _reached(self, value: Any) -> None:
        """Notes that a value is held by something old, which the call has not changed: so it is old itself."""
        if gc.is_tracked(value):
            self._old[id(value)] = value

    def _is_old(self, value: Any) -> bool:
        """Returns whether a value is immutable, or was there before for certain; the collector does not know arrays."""
        if isinstance(value, c.UNCHANGING) and not isinstance(value, (tuple, frozenset)):
            return True
        return gc.is_tracked(value) and not isinstance(value, (EagerTensor, LazyTensor)) and not self.is_new(value)

    # Reads.

    def inner(self, value: Any) -> Any:
        """Returns what a proxy stands for, and guards that it does; other objects unchanged."""
        while isinstance(value, wrapt.ObjectProxy):
            if not self.is_new(value):
                self.guards.read_computed(value, "__wrapped__", value.__wrapped__)
            value = value.__wrapped__
        if type(value) is types.MappingProxyType:  # it cannot be made to stand for another mapping
            return self.inner(gc.get_referents(value)[0])
        return value

    def takes(self, value: Any, depth: int = 0) -> None:
        """Guards an operand that is read as a whole, and containers in it."""
        value = self.inner(value)
        kind = type(value)
        if kind in _SIMPLE:
            return
        if isinstance(value, (*c.CONTAINERS, *c.VIEWS)):
            new = self.is_new(value)
            if not new:
                self.content(value)
            if depth >= tuning.watched_depth:
                raise Refused("containers are nested too deeply")
            try:
                items = items_of(value)
            except AttributeError:  # a container of TensorFlow's that is being made
                if not new:
                    raise
                items = ()
            for item in items:
                self.takes(item, depth + 1)
        elif isinstance(value, tuple):
            if depth < tuning.watched_depth:
                for item in value:
                    self.takes(item, depth + 1)
        elif isinstance(value, np.ndarray):
            self.array(value)
        elif kind.__flags__ & HEAP and not hasattr(kind, "__next__"):
            self.guards.looked_up(kind)
        elif hasattr(kind, "__next__") and not self.is_new(value):
            raise Refused(f"it steps through a {kind.__name__} that was there before")
        elif isinstance(value, (memoryview, bytearray)):
            if not self.is_new(value):
                raise Refused(f"it reads a {kind.__name__} that was there before")

    def content(self, holder: Any) -> None:
        if self.is_new(holder):
            return
        changed = self._changed.get(id(holder))
        items = items_of(holder) if changed is None else changed[1]
        self.guards.read_content(holder, items)
        for item in items:
            self._reached(item)

    def array(self, array: Any) -> None:
        if self.is_new(array):
            return
        if not is_small(array):
            raise Refused("it reads an array that was there before, or a large one")
        self.guards.read_array(array)

    def item(self, holder: dict[Any, Any], key: Any) -> None:
        if (id(holder), "item", key) in self._written or self.is_new(holder):
            return
        if id(holder) in self._changed:
            self.content(holder)
        else:
            value = holder.get(key, MISSING)
            self.guards.read_item(holder, key, value)
            self._reached(value)

    def subscript(self, holder: Any, key: Any) -> None:
        holder = self.inner(holder)
        kind = type(holder)
        if kind is dict and is_key(key):
            self.item(holder, key)
        elif isinstance(holder, (*c.CONTAINERS, np.ndarray)):
            self.takes(holder)
        elif kind.__flags__ & HEAP:
            self.guards.looked_up(kind)
        elif not isinstance(holder, (type, *_SIMPLE_ITEMS)) and not self.is_new(holder):
            raise Refused(f"it reads a {kind.__name__} that was there before")

    def attribute(self, holder: Any, name: str) -> Any:
        """Guards an attribute that is about to be read, by how its holder stores it."""
        kind = type(holder)
        if isinstance(holder, _UNASKED):
            return
        if issubclass(kind, types.ModuleType):
            if kind is types.ModuleType:
                self.item(vars(holder), name)
            else:
                self.computed(holder, name)
            return
        if isinstance(holder, type):
            self.guards.looked_up(holder)
            self.guards.looked_up(kind)
            return
        if kind is super:
            self.guards.looked_up(type(holder.__self__))
            if isinstance(holder.__self__, type):
                self.guards.looked_up(holder.__self__)
            return
        self.guards.looked_up(kind)
        if kind is types.FunctionType:
            if self.is_new(holder):
                if name == "__dict__":
                    self.made(holder.__dict__)
            elif type(vars(kind).get(name)) not in _METHODS:
                self.computed(self.original(holder), name)
            return
        if is_observed(holder):
            self.keras[id(holder)] = holder
        if isinstance(holder, np.ndarray):
            self.takes(holder)
            return
        if isinstance(holder, (types.MethodType, functools.partial)):
            return  # immutable; what they hold is guarded when it is read
        if self.is_new(holder):
            if name == "__dict__":
                self.made(holder.__dict__)  # which the collector does not know before it holds something
            return
        lookup: Any = kind.__getattribute__
        if not kind.__flags__ & HEAP and not isinstance(holder, _LOCALS):
            found = of_class(kind, name)
            if type(found) not in _METHODS:
                self.computed(holder, name)
            return
        if lookup is not object.__getattribute__ and not isinstance(holder, c.CONTAINERS):
            if type(lookup) is types.FunctionType:
                return  # it is watched itself
            if not isinstance(holder, (*_LOCALS, wrapt.ObjectProxy)):
                raise Refused(f"attributes of a {kind.__qualname__} are computed")
            self.computed(holder, name)
            return
        found = of_class(kind, name)
        if name in ("__dict__", "__class__"):
            if name == "__class__":
                self.guards.read_attribute(holder, "__class__", holder.__dict__.get(name, MISSING))
            return
        if found is not MISSING and hasattr(type(found), "__set__"):
            if isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                self.computed(holder, name)
            elif isinstance(found, property) and type(found.fget) not in (types.FunctionType, type(None)):
                if not kind.__module__.startswith("tensorflow."):  # whose getters return stored values
                    raise Refused(f"{name!r} of a {kind.__qualname__} is computed")
                self.computed(holder, name)
            return
        held = getattr(holder, "__dict__", None)
        if type(held) is dict:
            if (id(holder), "attribute", name) not in self._written:
                value = held.get(name, MISSING)
                self.guards.read_attribute(holder, name, value)
                self._reached(value)
        elif held is not None:
            raise Refused(f"attributes of a {kind.__qualname__} are computed")

    def computed(self, holder: Any, name: str) -> None:
        if (id(holder), "computed", name) in self._written:
            return
        value = getattr(holder, name, MISSING)
        if not _is_stable(holder, name, value):
            raise Refused(f"{name!r} of a {type(holder).__name__} is computed")
        self.guards.read_computed(holder, name, value)

    # Writes.

    def writes(self, holder: Any, name: str) -> None:
        """Notes that an attribute is about to be set or deleted, with its value before."""
        if self.is_new(holder):
            return
        kind = type(holder)
        if issubclass(kind, types.ModuleType):
            self.writes_item(vars(holder), name)
            return
        if isinstance(holder, (type, types.FunctionType)) or name in ("__class__", "__dict__"):
            raise Refused(f"it sets {name!r} of a {kind.__name__}")
        if isinstance(holder, (EagerTensor, LazyTensor)):
            raise Refused(f"it sets {name!r} of a tensor")
        self.guards.looked_up(kind)
        found = of_class(kind, name)
        how = "attribute"
        if isinstance(found, property) and type(found.fset) is types.FunctionType:
            return  # it is watched itself
        if isinstance(holder, _LOCALS) or isinstance(found, types.MemberDescriptorType):
            how = "computed"
        elif isinstance(found, types.GetSetDescriptorType) or type(getattr(holder, "__dict__", None)) is not dict:
            raise Refused(f"it sets {name!r} of a {kind.__name__}")
        self._written.setdefault((id(holder), how, name), (holder, how, name, _now(holder, how, name)))

    def writes_item(self, holder: dict[Any, Any], key: Any) -> None:
        self._written.setdefault((id(holder), "item", key), (holder, "item", key, _now(holder, "item", key)))

    def changes(self, holder: Any) -> None:
        """Notes that a container is about to be changed, with its items before."""
        holder = self.inner(holder)
        if self.is_new(holder):
            return
        if not isinstance(holder, c.CONTAINERS):
            if type(holder).__flags__ & HEAP and not isinstance(holder, np.ndarray):
                self.guards.looked_up(type(holder))
                return  # by watched code
            raise Refused(f"it changes a {type(holder).__name__}")
        # The collector may start tracking a dict at its first tensor, as if it were new.
        self._old[id(holder)] = holder
        self._changed.setdefault(id(holder), (holder, items_of(holder)))

    def read_name(self, frame: types.FrameType, name: str) -> None:
        """Guards a global or builtin that is about to be read."""
        seen = id(frame.f_code), frame.f_lasti
        if seen in self._names_seen:
            return
        self._names_seen.add(seen)
        space = frame.f_globals
        self.item(space, name)
        if name not in space:
            held = frame.f_builtins
            self.item(held if type(held) is dict else vars(builtins), name)

    def read_cell(self, cell: Any) -> None:
        """Guards a closure variable that is about to be read."""
        if type(cell) is types.CellType and not self.is_new(cell) and (id(cell), "cell", None) not in self._written:
            value = _now(cell, "cell", None)
            self.guards.read_cell(cell, value)
            self._reached(value)

    def write_cell(self, cell: Any) -> None:
        """Notes that a closure variable is about to be set, with its value before."""
        if type(cell) is types.CellType and not self.is_new(cell):
            self._written.setdefault((id(cell), "cell", None), (cell, "cell", None, _now(cell, "cell", None)))

    def read_context(self, variable: contextvars.ContextVar[Any]) -> None:
        """Guards a context variable that is about to be read."""
        if (id(variable), "context", None) not in self._written:
            self.guards.read_context(variable, _now(variable, "context", None))

    def write_context(self, variable: contextvars.ContextVar[Any]) -> None:
        """Notes that a context variable is about to be set or reset, with its value before."""
        self._written.setdefault(
            (id(variable), "context", None), (variable, "context", None, _now(variable, "context", None))
        )


def of_class(kind: type, name: str) -> Any:
    """Returns the entry of a name in a class or the first base that has one; else `MISSING`."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)


def is_key(key: Any) -> bool:
    """Returns whether looking up a key runs no Python code."""
    return type(key) in (str, int, bytes, bool, type(None)) or isinstance(key, type)


def _is_stable(holder: Any, name: str, value: Any) -> bool:
    """Returns whether `getattr` returns the same each time: the same object, or an immutable value."""
    if value is MISSING or is_number(value) or type(value) is tuple:
        return True
    return getattr(holder, name, MISSING) is value


def _now(holder: Any, how: str, key: Any) -> Any:
    if how == "attribute":
        return holder.__dict__.get(key, MISSING)
    if how == "item":
        return holder.get(key, MISSING)
    if how == "context":
        return holder.get(MISSING)
    if how == "cell":
        try:
            return holder.cell_contents
        except ValueError:
            return MISSING
    return getattr(holder, key, MISSING)
