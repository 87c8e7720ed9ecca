"""Premises: what code of the program's that only computes looks at around it, and whether that is still the same.

Given the same, such code does the same. So everything is looked up again before its Python is passed over: numbers
count by value, objects, variables and functions by identity, lists and dicts by what they hold, classes by what they
say of the names that are asked for. Nothing of it is kept alive. The look-ups are written down as one Python function,
which takes 20 to 50 ns for each, and 1.4 us for a cell that looks at 25 things.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import logging
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.guards.pure_calls import is_number, plain_attribute
from tracer.effects import is_programs
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.library import behind
from tracer.op import same
from tracer.private import EagerTensor

LOOKED_AT = "what the program's code in it looks at"

# Where those lists and dicts come from that Keras and TensorFlow make of an object's: they hold the same.
_TRACKING = ("keras.src.utils.tracking", "tensorflow.python.trackable.data_structures")
_MISSING = object()

# Classes that may be named: to make values of Python's own, to ask what something is, to raise.
_CLASSES = frozenset({
    int, float, bool, complex, str, bytes, list, tuple, dict, range, enumerate, zip, reversed, slice, map, filter,
    super, object, tf.Tensor, tf.Variable, keras.Variable, tf.TensorShape, tf.DType, tf.IndexedSlices, type(None),
    tf.name_scope,
})  # fmt: skip


class StateGuards:
    """What was looked at; `hold()` tells whether it is all the same now."""

    def __init__(self, allowed: Callable[[Any], bool]) -> None:
        self.functions: dict[int, dict[int, Any]] = {}  # the program's, by the ids of their codes, and their own
        self._allowed = allowed  # whether a function that is not the program's may be called
        self._lines: list[str] = []
        self._values: dict[str, Any] = {"M": _MISSING, "same": same}
        self._names: dict[int, str] = {}  # of objects and containers, by id
        self._kept: list[Any] = []  # while it is written
        # Those of the program's, with the names that were looked up, and those that were looked for.
        self._objects: list[tuple[str, Any, set[str], set[str]]] = []
        self._looked: set[int] = set()  # the ids of these
        self._classes: dict[int, tuple[str, Any, set[str]]] = {}
        self._asked: set[str] = set()
        self._optional: set[str] = set()
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

    def add_chain(self, function: Any, chain: tuple[str, ...], called: bool = False, kind: bool = False) -> None:
        """Notes a name that is not the function's own, and attributes asked of it in a row.

        Args:
          function: the function of the program's that asks.
          chain: the name, and the attributes; a module that it imports has a name that begins with `import `.
          called: whether it does nothing but call what it finds: then each call of it is seen.
          kind: whether it asks nothing but what is an instance of that.
        """
        name, *attributes = chain
        free = function.__code__.co_freevars
        value: Any
        if name.startswith("import "):
            self._line(f"{self._constant(vars(builtins))}.get('__import__') is {self._constant(builtins.__import__)}")
            value = sys.modules.get(name.partition(" ")[2], _MISSING)
            place = self._let(f"{self._constant(sys.modules)}.get({name.partition(' ')[2]!r}, M)")
            if value is _MISSING:
                raise Refused(f"an {name}, which is not there yet")
        elif name in free:
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
            raise Refused(f"it keeps the module {chain[-1]}")
        builtin = type(value) is types.BuiltinFunctionType and type(value.__self__) is types.ModuleType
        asks = (value is getattr or value is hasattr) and chain in _ASKING  # for names that are written down
        if asks or (called and builtin) or (kind and isinstance(value, type) and _is_told_by_type(value)):
            self._line(f"{place} is {self._constant(value)}")
        else:
            self._check(place, value)

    def ask(self, names: Any, optional: Any = ()) -> None:
        """Notes the names of attributes that the code asks for, and those that may be missing."""
        self._asked |= set(names)
        self._optional |= set(optional)

    def look_further(self) -> None:
        """Looks up all attributes that may have been asked for."""
        while any(self._asked - seen or self._optional - sought for _, _, seen, sought in self._objects):
            for place, value, seen, sought in list(self._objects):
                names, missing = sorted(self._asked - seen), sorted(self._optional - sought)
                seen |= self._asked
                sought |= self._optional
                for name in names:
                    self._attribute(place, value, name)
                for name in missing:
                    self._absence(place, value, name)

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
        if len(self._lines) >= tuning.max_lookups:
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
        if kind.__flags__ & HEAP and not issubclass(kind, (*_KNOWN, *_KERAS)) and not _is_looked_up(kind):
            raise Refused(f"attributes of a {kind.__qualname__} are computed")
        if value is None or value is True or value is False or value is NotImplemented or value is Ellipsis:
            self._line(f"{place} is {value}")
        elif is_number(value):
            constant = self._constant(value)
            self._line(f"{place} is {constant} or same({place}, {constant})")
        elif kind is range:
            bounds = self._constant((value.start, value.stop, value.step))  # equal ranges may have others
            self._line(f"type({place}) is range and ({place}.start, {place}.stop, {place}.step) == {bounds}")
        elif issubclass(kind, (list, tuple, dict)):
            self._container(place, value)
        elif issubclass(kind, LazyTensor):
            raise Refused("it looks at a tensor that calls leave somewhere")
        elif kind is EagerTensor or issubclass(kind, _VARIABLES):
            self._is(place, value)
        elif issubclass(kind, type):
            self._class(place, value)
        elif kind is types.FunctionType and value.__code__ is not _MANAGER:
            self._function(place, value)
        elif kind is types.MethodType:
            self._check(self._let(f"{place}.__func__"), value.__func__)
            self._check(self._let(f"{place}.__self__"), value.__self__)
        elif kind is types.FunctionType and value.__code__ is _MANAGER:
            self._is(place, value)
            free = value.__code__.co_freevars.index("func")
            self._check(self._let(f"{place}.__closure__[{free}].cell_contents"), value.__wrapped__)
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
        if kind in _CLASSES or (kind.__module__ == "builtins" and issubclass(kind, BaseException)):
            self._line(f"{place} is {self._constant(kind)}")
            return
        if issubclass(kind, (tf.errors.OpError, np.generic)) and kind.__module__.startswith(("tensorflow.", "numpy")):
            self._line(f"{place} is {self._constant(kind)}")
            return
        if kind.__module__.startswith(("keras.", "tensorflow.", "numpy")) or not kind.__flags__ & HEAP:
            raise Refused(f"it may make a {kind.__qualname__}")
        self._class_itself(place, kind)

    def _class_itself(self, place: str, kind: type) -> None:
        """Notes a class of the program's, which may be asked for what instances are asked for, too."""
        if not isinstance(kind, enum.EnumMeta) and not _is_looked_up(type(kind), type):
            raise Refused(f"attributes of {kind.__qualname__} are computed")
        if self._is(place, kind):
            return
        self._classes.setdefault(id(kind), (place, kind, set()))
        self._objects.append((place, kind, set(), set()))
        self._looked.add(id(kind))

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
            if all(type(key) in _NAMES for key in keys):
                self._line(f"list({place}) == {self._constant(keys)}")
                self._line(f"[*map(type, {place})] == {self._constant([*map(type, keys)])}")
            else:
                self._line(f"all(map(same, {place}, {self._constant(keys)}))")
            for key in keys:
                self._check(self._let(f"{place}[{self._constant(key)}]"), value[key])
            return
        for number, item in enumerate(value):
            self._check(self._let(f"{place}[{number}]"), item)

    def _object(self, place: str, value: Any) -> None:
        kind = type(value)
        if not kind.__flags__ & HEAP:
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
        self._objects.append((place, value, set(), set()))
        self._looked.add(id(value))

    def _attribute(self, place: str, value: Any, name: str) -> None:
        """Notes what an object of the program's has by a name, if anything."""
        if isinstance(value, type):
            self._class_attribute(value, name)
            return
        if type(value) is logging.Logger:
            self._silence(place, value, name)
            return
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

    def _silence(self, place: str, logger: logging.Logger, name: str) -> None:
        """Notes that a logger, where it may be asked for this, does nothing with it."""
        if name not in _LEVELS:
            if name in vars(logger) and is_number(vars(logger)[name]):
                self._check(self._let(f"{place}.__dict__.get({name!r}, M)"), vars(logger)[name])
            elif hasattr(logger, name):
                raise Refused(f"it may ask the logger {logger.name} for {name}")
            return
        if logger.isEnabledFor(_LEVELS[name]):
            raise Refused(f"it may log by {logger.name}")
        method = vars(logging.Logger)[name]
        self._line(f"{self._constant(logging.Logger)}.{name} is {self._constant(method)}")
        self._line(f"{name!r} not in {place}.__dict__ and not {place}.isEnabledFor({_LEVELS[name]})")

    def _absence(self, place: str, value: Any, name: str) -> None:
        """Notes that neither an object nor its class have anything by a name, if so."""
        if isinstance(value, (type, logging.Logger)) or name in getattr(value, "__dict__", {}):
            return
        self._class_attribute(type(value), name)
        if not any(name in vars(base) for base in type(value).__mro__) and type(vars(value)) is dict:
            self._line(f"{name!r} not in {place}.__dict__")

    def _class_attribute(self, kind: type, name: str) -> None:
        """Notes what classes say of a name, as far as they are not a library's: `super()` asks all of them."""
        if isinstance(kind, enum.EnumMeta) and (name in kind.__members__ or name in ("name", "value")):
            return  # nobody can replace a member, nor what it is
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


_MANAGER = contextlib.contextmanager(lambda: None).__code__  # type: ignore[arg-type, return-value]
# The methods of loggers that do nothing below a level; `log` is told its level.
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "exception": 40, "critical": 50, "log": 50}
_ASKING = (("getattr",), ("hasattr",))
_VARIABLES = (keras.Variable, tf.Variable)
_NAMES = frozenset({str, bytes, int, bool, type(None)})  # keys that are the same if they are equal, and of one type
_KNOWN = (list, tuple, dict, type, EagerTensor, LazyTensor, tf.DType, tf.TensorShape, np.generic, *_VARIABLES)
_KERAS = (
    keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer,
    keras.initializers.Initializer, keras.regularizers.Regularizer, keras.constraints.Constraint,
    keras.optimizers.schedules.LearningRateSchedule, keras.random.SeedGenerator,
)  # fmt: skip


HEAP = 1 << 9  # classes that were made by a `class` statement


def is_object(value: Any) -> bool:
    """Returns whether a value is one of the program's own, whose attributes tell all that it is."""
    kind = type(value)
    if kind is types.FunctionType:
        return True
    return bool(kind.__flags__ & HEAP) and kind.__base__ is not None and _is_plain(kind)


def is_watched_object(value: Any) -> bool:
    """Returns whether a value counts by identity where what it holds is watched."""
    kind = type(value)
    if kind is types.FunctionType or kind is types.ModuleType or isinstance(value, type):
        return True
    return bool(kind.__flags__ & HEAP) and not issubclass(kind, (list, tuple, dict, set, frozenset, np.ndarray))


def _is_told_by_type(kind: type) -> bool:
    """Returns whether nobody's code decides what is an instance of a class of a library's."""
    meta: Any = type(kind)
    ours = kind.__module__.startswith(("keras.", "tensorflow.", "numpy", "builtins", "collections"))
    return ours and (meta.__instancecheck__ is type.__instancecheck__ or meta.__module__.startswith("tensorflow."))


def _is_plain(kind: type) -> bool:
    """Returns whether instances of a class hold nothing but attributes, which are looked up as Python does it."""
    return _is_looked_up(kind) and not issubclass(kind, (list, tuple, dict, set, frozenset, np.ndarray))


def _is_looked_up(kind: type, base: type = object) -> bool:
    """Returns whether attributes of a class's instances are found as those of `base`'s are, by nobody's code."""
    lookup: Any = kind.__getattribute__
    return lookup is base.__getattribute__ and not any("__getattr__" in vars(each) for each in kind.__mro__)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING
