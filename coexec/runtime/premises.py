"""Premises: what code of the program's that only computes looks at around it, and whether that is still the same.

Given the same, such code does the same. So everything is looked up again before its Python is passed over: numbers
count by value, objects, variables and functions by identity, lists and dicts by what they hold, classes by what they
say of the names that are asked for. Nothing of it is kept alive. The look-ups are written down as one Python function,
which takes 20 to 50 ns for each, and 1.4 us for a cell that looks at 25 things.
"""

from __future__ import annotations

import builtins
import types
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coexec.staging.lookups import is_number
from coexec.staging.values import plain_attribute
from tracer.effects import is_programs
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.library import behind
from tracer.op import freeze
from tracer.private import EagerTensor

LOOKED_AT = "what the program's code in it looks at"
MAX_LOOKUPS = 3000

# Where those lists and dicts come from that Keras and TensorFlow make of an object's: they hold the same.
_TRACKING = ("keras.src.utils.tracking", "tensorflow.python.trackable.data_structures")
_MISSING = object()

# Classes that may be named: to make values of Python's own, to ask what something is, to raise.
_CLASSES = frozenset({
    int, float, bool, complex, str, bytes, list, tuple, dict, range, enumerate, zip, reversed, slice, map, filter,
    super, object, tf.Tensor, tf.Variable, keras.Variable, tf.TensorShape, tf.DType, tf.IndexedSlices, type(None),
})  # fmt: skip


class Premises:
    """What was looked at; `hold()` tells whether it is all the same now."""

    def __init__(self, allowed: Callable[[Any], bool]) -> None:
        self.functions: dict[int, dict[int, Any]] = {}  # the program's, by the ids of their codes, and their own
        self._allowed = allowed  # whether a function that is not the program's may be called
        self._lines: list[str] = []
        self._values: dict[str, Any] = {"M": _MISSING, "same": _same_number}
        self._names: dict[int, str] = {}  # of objects and containers, by id
        self._kept: list[Any] = []  # while it is written
        self._objects: list[tuple[str, Any, set[str]]] = []  # those of the program's, with which names were looked up
        self._looked: set[int] = set()  # the ids of these
        self._classes: dict[int, tuple[str, Any, set[str]]] = {}
        self._asked: set[str] = set()
        self._holds: Callable[[], bool] | None = None
        self.tensors: set[int] = set()  # the ids of those among what was looked at, as it is written

    def hold(self) -> bool:
        """Returns whether everything is what it was."""
        try:
            return self._holds is not None and self._holds()
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
            return False

    # What is written down.

    def add_object(self, value: Any) -> None:
        """Notes an object that the code is given."""
        if id(value) not in self._names:
            self._check(self._by_reference(value), value)

    def add_function(self, function: Any) -> None:
        """Notes a function of the program's that ran: its code, its defaults, and what it shares with others."""
        name = self._by_reference(function)
        self._line(f"{name}.__code__ is {self._constant(function.__code__)}")
        for part in ("__defaults__", "__kwdefaults__"):
            place = self._let(f"{name}.{part}")
            self._check(place, getattr(function, part))
        for number, cell in enumerate(function.__closure__ or ()):
            value = _content(cell)
            if value is _MISSING:  # a name that no path has needed so far; it raises where one does
                continue
            place = self._let(f"{name}.__closure__[{number}].cell_contents")
            if type(value) is types.ModuleType:  # what is asked of it is looked up, too
                self._line(f"{place} is {self._constant(value)}")
            else:
                self._check(place, value)

    def add_chain(self, function: Any, chain: tuple[str, ...]) -> None:
        """Notes a name that is not the function's own, and attributes asked of it in a row."""
        name, *attributes = chain
        free = function.__code__.co_freevars
        if name in free:
            value = _content(function.__closure__[free.index(name)])
            place = self._let(f"{self._by_reference(function)}.__closure__[{free.index(name)}].cell_contents")
        else:
            space = self._by_reference(function) + ".__globals__"
            value = function.__globals__.get(name, _MISSING)
            place = self._let(f"{space}.get({name!r}, M)")
            if value is _MISSING:
                self._line(f"{place} is M")
                value = vars(builtins).get(name, _MISSING)
                place = self._let(f"{self._constant(vars(builtins))}.get({name!r}, M)")
        for attribute in attributes:
            if not issubclass(type(value), types.ModuleType):
                break
            self._line(f"{place} is {self._constant(value)}")
            value = plain_attribute(value, attribute)
            place = self._let(f"{place}.{attribute}")
        if value is _MISSING:
            return  # raises where a path comes to it
        if issubclass(type(value), types.ModuleType):
            raise Refused(f"it keeps the module {value.__name__}")
        self._check(place, value)

    def ask(self, names: Any) -> None:
        """Notes the names of attributes that the code asks for."""
        self._asked |= set(names)

    def look_further(self) -> None:
        """Looks up all attributes that may have been asked for."""
        while any(self._asked - seen for _, _, seen in self._objects):
            for place, value, seen in list(self._objects):
                names = sorted(self._asked - seen)
                seen |= self._asked
                for name in names:
                    self._attribute(place, value, name)

    def finish(self) -> tuple[list[Any], list[Any]]:
        """Writes the look-ups down; returns the variables among what was looked at, and Keras' objects."""
        self.tensors = {id(v) for v in self._kept if type(v) is EagerTensor}
        variables = [v for v in self._kept if issubclass(type(v), _VARIABLES)]
        objects = [v for v in self._kept if issubclass(type(v), _KERAS)]
        body = "\n".join([*(f"    {line}" for line in self._lines), "    return True"])
        exec(compile(f"def holds():\n{body}", __file__, "exec"), self._values)
        self._holds = self._values["holds"]
        self._kept, self._names, self._objects, self._classes, self.functions = [], {}, [], {}, {}
        return variables, objects

    # How.

    def _line(self, condition: str) -> None:
        if len(self._lines) >= MAX_LOOKUPS:
            raise Refused("it looks at too much")
        self._lines.append(f"if not ({condition}): return False")

    def _let(self, expression: str) -> str:
        name = f"v{len(self._lines)}"
        self._lines.append(f"{name} = {expression}")
        return name

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._values)}"
        self._values[name] = value
        return name

    def _by_reference(self, value: Any) -> str:
        """Returns the name of an object that is looked up from nowhere else."""
        name = self._names.get(id(value))
        if name is None:
            self._kept.append(value)
            name = self._names[id(value)] = self._let(f"{self._constant(weakref.ref(value))}()")
            self._line(f"{name} is not None")
        return name

    def _is(self, place: str, value: Any) -> bool:
        """Notes that a place holds an object; returns whether the object was known before."""
        known = self._names.get(id(value))
        if known is not None:
            if known != place:
                self._line(f"{place} is {known}")
            return id(value) in self._looked
        self._kept.append(value)
        self._names[id(value)] = place
        try:
            self._line(f"{place} is {self._constant(weakref.ref(value))}()")
        except TypeError:
            raise Refused(f"it looks at a {type(value).__qualname__}") from None
        return False

    def _check(self, place: str, value: Any) -> None:
        """Notes what a place holds, and looks into it: by its type, as objects may run code where they are asked."""
        kind = type(value)
        if kind.__flags__ & _HEAP and not issubclass(kind, (*_KNOWN, *_KERAS)) and not _is_looked_up(kind):
            raise Refused(f"attributes of a {kind.__qualname__} are computed")
        if value is None or value is True or value is False or value is NotImplemented or value is Ellipsis:
            self._line(f"{place} is {value}")
        elif is_number(value):
            constant = self._constant(value)
            self._line(f"{place} is {constant} or same({place}, {constant})")
        elif kind is range:
            self._line(f"type({place}) is range and {place} == {self._constant(value)}")
        elif issubclass(kind, (list, tuple, dict)):
            self._container(place, value)
        elif issubclass(kind, LazyTensor):
            raise Refused("it looks at a tensor that calls leave somewhere")
        elif kind is EagerTensor or issubclass(kind, _VARIABLES):
            self._is(place, value)
        elif issubclass(kind, type):
            self._class(place, value)
        elif kind is types.FunctionType:
            self._function(place, value)
        elif kind is types.MethodType:
            self._check(self._let(f"{place}.__func__"), value.__func__)
            self._check(self._let(f"{place}.__self__"), value.__self__)
        elif kind is types.BuiltinFunctionType:
            if not self._allowed(value) or not isinstance(value.__self__, (types.ModuleType, type(None))):
                raise Refused(f"it may call {value.__qualname__}")
            self._line(f"{place} is {self._constant(value)}")
        elif issubclass(kind, _KERAS) and kind.__module__.startswith("keras."):
            self._is(place, value)  # writes to it are heard of
        else:
            self._object(place, value)

    def _function(self, place: str, function: Any) -> None:
        own = behind(function)
        if is_programs(own.__code__, own.__globals__):
            self.functions.setdefault(id(own.__code__), {})[id(own)] = own
        elif not self._allowed(function):
            raise Refused(f"it may call {function.__module__}.{function.__qualname__}")
        self._is(place, function)

    def _class(self, place: str, kind: type) -> None:
        if kind in _CLASSES or issubclass(kind, (BaseException, np.generic)):
            self._line(f"{place} is {self._constant(kind)}")
            return
        if kind.__module__.startswith(("keras.", "tensorflow.", "numpy")) or not kind.__flags__ & _HEAP:
            raise Refused(f"it may make a {kind.__qualname__}")
        self._is(place, kind)

    def _container(self, place: str, value: Any) -> None:
        kind = type(value)
        if kind in (list, tuple, dict) or kind.__module__ in _TRACKING:
            ours = True
        else:  # a named tuple; others may mean something else by their items
            ours = isinstance(value, tuple) and kind.__base__ is tuple and "__iter__" not in vars(kind)
        if not ours:
            raise Refused(f"it looks at a {kind.__qualname__}")
        known = self._names.get(id(value))
        if known is not None:
            self._line(f"{place} is {known}")
            return
        self._kept.append(value)
        self._names[id(value)] = place
        self._line(f"type({place}) is {self._constant(kind)} and len({place}) == {len(value)}")
        if isinstance(value, dict):
            keys = list(value)
            if not all(map(is_number, keys)):
                raise Refused("it looks at a dict with keys that are objects")
            self._line(f"list({place}) == {self._constant(keys)}")
            self._line(f"[*map(type, {place})] == {self._constant([*map(type, keys)])}")
            for key in keys:
                self._check(self._let(f"{place}[{self._constant(key)}]"), value[key])
            return
        for number, item in enumerate(value):
            self._check(self._let(f"{place}[{number}]"), item)

    def _object(self, place: str, value: Any) -> None:
        kind = type(value)
        if not kind.__flags__ & _HEAP:
            raise Refused(f"it looks at a {kind.__qualname__}")
        if not _is_plain(kind):
            raise Refused(f"attributes of a {kind.__qualname__} are computed")
        if kind.__module__.startswith(("tensorflow.", "keras.")) and not issubclass(kind, tf.random.Generator):
            raise Refused(f"it looks at a {kind.__qualname__}")
        if self._is(place, value):
            return
        self._names[id(value)] = place
        if id(kind) in self._classes:
            self._line(f"type({place}) is {self._classes[id(kind)][0]}")
        else:
            name = self._let(f"type({place})")
            self._line(f"{name} is {self._constant(weakref.ref(kind))}()")
            self._classes[id(kind)] = name, kind, set()
        self._objects.append((place, value, set()))
        self._looked.add(id(value))

    def _attribute(self, place: str, value: Any, name: str) -> None:
        """Notes what an object of the program's has by a name, if anything."""
        kind = type(value)
        found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _MISSING)
        if found is not _MISSING:
            self._class_attribute(kind, name)
            if hasattr(type(found), "__set__"):
                return  # goes before what the object holds
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            if name in held:
                self._check(self._let(f"{place}.__dict__.get({name!r}, M)"), held[name])
            elif found is not _MISSING:
                self._line(f"{name!r} not in {place}.__dict__")

    def _class_attribute(self, kind: type, name: str) -> None:
        """Notes what classes say of a name, as far as they are not a library's: `super()` asks all of them."""
        place, _, seen = self._classes[id(kind)]
        if name in seen:
            return
        seen.add(name)
        for number, base in enumerate(kind.__mro__):
            if base is object or base.__module__.startswith(("keras.", "tensorflow.")):
                continue
            if name not in vars(base):
                self._line(f"{name!r} not in {place}.__mro__[{number}].__dict__")
                continue
            found = vars(base)[name]
            at = self._let(f"{place}.__mro__[{number}].__dict__.get({name!r}, M)")
            if isinstance(found, (staticmethod, classmethod)):
                self._line(f"type({at}) is {self._constant(type(found))}")
                self._check(self._let(f"{at}.__func__"), found.__func__)
            elif type(found) is property and type(found.fget) is types.FunctionType:
                self._line(f"type({at}) is property")
                self._check(self._let(f"{at}.fget"), found.fget)
            elif type(found) is not types.FunctionType and hasattr(type(found), "__get__"):
                raise Refused(f"{name!r} of a {kind.__qualname__} is computed")
            else:
                self._check(at, found)


_VARIABLES = (keras.Variable, tf.Variable)
_KNOWN = (list, tuple, dict, type, EagerTensor, LazyTensor, tf.DType, tf.TensorShape, np.generic, *_VARIABLES)
_KERAS = (
    keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer,
    keras.initializers.Initializer, keras.regularizers.Regularizer, keras.constraints.Constraint,
    keras.optimizers.schedules.LearningRateSchedule, keras.random.SeedGenerator,
)  # fmt: skip


_HEAP = 1 << 9  # classes that were made by a `class` statement


def is_object(value: Any) -> bool:
    """Returns whether a value is one of the program's own, whose attributes tell all that it is."""
    kind = type(value)
    if kind is types.FunctionType:
        return True
    return bool(kind.__flags__ & _HEAP) and kind.__base__ is not None and _is_plain(kind)


def _is_plain(kind: type) -> bool:
    """Returns whether instances of a class hold nothing but attributes, which are looked up as Python does it."""
    return _is_looked_up(kind) and not issubclass(kind, (list, tuple, dict, set, frozenset, np.ndarray))


def _is_looked_up(kind: type) -> bool:
    """Returns whether attributes of a class's instances are found as Python finds them, by nobody's code."""
    lookup: Any = kind.__getattribute__
    return lookup is object.__getattribute__ and not any("__getattr__" in vars(base) for base in kind.__mro__)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _same_number(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(freeze(one) == freeze(other))
