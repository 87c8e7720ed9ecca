"""State guards: the surrounding state that pure code of the program reads, with a check that it is unchanged.

With the same state, such code does the same. So before its Python is skipped everything is looked up again: numbers are
compared by value, objects, variables and functions by identity, lists and dicts by contents, classes by their entries
for the names read. Nothing is kept alive. The check is one generated function, which takes 20 to 50 ns a guard, and
1.4 us for a cell that reads 25 things.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable, Container
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import wrapt

from coexec.base.tuning import tuning
from coexec.guards import arrays
from coexec.guards.c_functions import is_of_numpy, takes_before_output
from coexec.guards.class_lookup import HEAP, OF_INSTANCES, is_looked_up, is_plain, is_told_by_type, lacks_methods
from coexec.guards.codegen import CheckWriter
from coexec.guards.pure_calls import is_number, plain_attribute
from tracer.effects import is_programs, is_registered
from tracer.errors import Refused
from tracer.keras_packages import MODULES, classes
from tracer.lazy import LazyTensor
from tracer.library import behind
from tracer.op import same
from tracer.private import EagerTensor

LOOKED_AT = "what the program's code in it looks at"

# Modules of the lists and dicts by which Keras and TensorFlow replace an object's own, with the same contents.
_TRACKING = ("keras.src.utils.tracking", "tensorflow.python.trackable.data_structures")
_MISSING = object()

# Classes that code may name: to make Python values, for `isinstance`, to raise.
_CLASSES = frozenset({
    int, float, bool, complex, str, bytes, list, tuple, dict, range, enumerate, zip, reversed, slice, map, filter,
    super, object, tf.Tensor, tf.Variable, keras.Variable, tf.TensorShape, tf.DType, tf.IndexedSlices, type(None),
    tf.name_scope,
})  # fmt: skip


class StateGuards:
    """Guards of what was read; `hold()` checks them. Adding one raises `Refused` if something cannot be guarded."""

    def __init__(self, allowed: Callable[[Any], bool]) -> None:
        self.functions: dict[int, dict[int, Any]] = {}  # the program's, by id of their code and their own id
        self._allowed = allowed  # whether other functions may be called
        self._unwanted: dict[int, str] = {}  # other functions, by id of their code: they must not have been called
        self._writer = CheckWriter(failure="False", M=_MISSING, is_array=arrays.is_same, same=same)
        self._numbers = False  # whether NumPy computes, or may
        self._prints = False
        self._views = False  # whether it reads an array whose memory is another's
        self._names: dict[int, str] = {}  # of objects and containers, by id
        self._kept: list[Any] = []  # keeps objects alive until `finish`
        # The program's objects, with the names looked up, and the optional names looked up.
        self._objects: list[tuple[str, Any, set[str], set[str]]] = []
        self._looked: set[int] = set()  # their ids
        self._classes: dict[int, tuple[str, Any, set[str]]] = {}
        self._asked: set[str] = set()
        self._optional: set[str] = set()
        self._holds: Callable[[], bool] | None = None
        self.tensors: set[int] = set()  # ids of the tensors among what was read

    def hold(self) -> bool:
        """Returns whether all guards hold."""
        try:
            return self._holds is not None and self._holds()
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
            return False

    # Adding guards.

    def add_object(self, value: Any) -> None:
        """Guards an object passed to the code."""
        if id(value) not in self._names:
            self._check(self._by_reference(value), value)

    def add_function(self, function: Any) -> None:
        """Guards a function of the program that ran: code, defaults and closure."""
        name = self._by_reference(function)
        self._line(f"{name}.__code__ is {self._writer.constant(function.__code__)}")
        for part in ("__defaults__", "__kwdefaults__"):
            place = self._writer.let(f"{name}.{part}")
            self._check(place, getattr(function, part))
        for number, cell in enumerate(function.__closure__ or ()):
            value = _content(cell)
            if value is _MISSING:  # unbound so far; reading it raises
                continue
            place = self._writer.let(f"{name}.__closure__[{number}].cell_contents")
            if type(value) is types.ModuleType:  # attributes read of it have their own guards
                self._line(f"{place} is {self._writer.constant(value)}")
            else:
                self._check(place, value)

    def add_chain(
        self, function: Any, chain: tuple[str, ...], called: bool = False, kind: bool = False, positional: int = 0
    ) -> None:
        """Guards a nonlocal name of a function, and a chain of attributes of it.

        Args:
          function: the function of the program that reads it.
          chain: the name, and the attributes; for an imported module, the name begins with `import `.
          called: whether it is only called: then each call is observed.
          kind: whether it is only used for `isinstance`.
          positional: the most positional arguments with which it is called.

        Raises:
          Refused: if it cannot be guarded.
        """
        name, *attributes = chain
        free = function.__code__.co_freevars
        value: Any
        if name.startswith("import "):
            usual = self._writer.constant(builtins.__import__)
            self._line(f"{self._writer.constant(vars(builtins))}.get('__import__') is {usual}")
            value = sys.modules.get(name.partition(" ")[2], _MISSING)
            place = self._writer.let(f"{self._writer.constant(sys.modules)}.get({name.partition(' ')[2]!r}, M)")
            if value is _MISSING:
                raise Refused(f"an {name}, which is not there yet")
        elif name in free:
            value = _content(function.__closure__[free.index(name)])
            place = self._writer.let(f"{self._by_reference(function)}.__closure__[{free.index(name)}].cell_contents")
        else:
            space = self._by_reference(function) + ".__globals__"
            value = function.__globals__.get(name, _MISSING)
            place = self._writer.let(f"{space}.get({name!r}, M)")
            if value is _MISSING:
                self._line(f"{place} is M")
                value = vars(builtins).get(name, _MISSING)
                place = self._writer.let(f"{self._writer.constant(vars(builtins))}.get({name!r}, M)")
        for attribute in attributes:
            if not issubclass(type(value), types.ModuleType):
                break
            self._line(f"{place} is {self._writer.constant(value)}")
            if _lacks(value, attribute):
                self._line(f"not {self._writer.constant({attribute, '__getattr__'})} & {place}.__dict__.keys()")
                return  # reading it raises
            value = plain_attribute(value, attribute)
            place = self._writer.let(f"{place}.{attribute}")
        if value is _MISSING:
            return  # reading it raises
        if issubclass(type(value), types.ModuleType):
            raise Refused(f"it keeps the module {chain[-1]}")
        if positional > (takes_before_output(value) or positional):
            raise Refused(f"{chain[-1]} is given an array to write to")
        if is_of_numpy(value):
            if not called:  # `map(np.add, ...)` may give it an array to write to
                raise Refused(f"it hands on {chain[-1]} of NumPy")
            self._numbers = True
            self._line(f"{place} is {self._writer.constant(value)}")
            return
        builtin = type(value) is types.BuiltinFunctionType and type(value.__self__) is types.ModuleType
        asks = (value is getattr or value is hasattr) and chain in _ASKING  # for literal names
        if asks or (called and builtin) or (kind and isinstance(value, type) and is_told_by_type(value)):
            self._line(f"{place} is {self._writer.constant(value)}")
        elif called and type(value) is types.FunctionType and not self._is_known(value):
            self._line(f"{place} is {self._writer.constant(value)}")
            for code in {value.__code__, inspect.unwrap(value).__code__}:
                self._unwanted[id(code)] = f"{value.__module__}.{value.__qualname__}"
        else:
            self._check(place, value)

    def _is_known(self, function: Any) -> bool:
        """Returns whether this is a function of the program's, whose calls are proven, or one that may be called."""
        own = behind(function)
        if own is not function or own.__code__ is _MANAGER:
            return True
        return is_programs(own.__code__, own.__globals__) or self._allowed(function)

    def refuse_calls(self, ran: Container[int]) -> None:
        """Raises `Refused` if a function was called of which is not known what it does: a logger's, for example.

        A function of the program's may call it on another path, which what is guarded says that it does not take.
        `ran`: ids of code.
        """
        for code, name in self._unwanted.items():
            if code in ran:
                raise Refused(f"it calls {name}")

    def ask(self, names: Any, optional: Any = ()) -> None:
        """Adds names of attributes that the code reads, and of those that may be missing."""
        self._asked |= set(names)
        self._optional |= set(optional)

    def print_numbers(self) -> None:
        """Guards how NumPy prints, if there is anything of NumPy's."""
        self._prints = True

    def look_further(self) -> None:
        """Guards all attributes of known objects that may have been read, until there are no new ones."""
        if self._numbers:
            self.ask((), OF_INSTANCES)  # NumPy does
        while any(self._asked - seen or self._optional - sought for _, _, seen, sought in self._objects):
            for place, value, seen, sought in list(self._objects):
                names, missing = sorted(self._asked - seen), sorted(self._optional - sought)
                seen |= self._asked
                sought |= self._optional
                for name in names:
                    self._attribute(place, value, name)
                for name in missing:
                    self._absence(place, value, name)

    def refuse_code_of_libraries(self, ran: Container[int]) -> None:
        """Raises `Refused` if a library's code ran on an object that was looked at: an operator of a `UserDict`.

        What it has read there is not known, as only names in the program's code are looked up. `ran`: ids of code.
        """
        for _, value, _, _ in self._objects:
            kind = type(value)
            # Reads of Keras' objects are known otherwise, and what members of an enumeration hold is guarded.
            if _is_keras(kind) or issubclass(kind, (type, enum.Enum, logging.Logger, *_DESCRIBED, *_VARIABLES)):
                continue
            for base in kind.__mro__[:-1]:
                if base.__module__.startswith(("tensorflow.", *MODULES)) or is_registered(base.__module__):
                    continue
                for found in list(vars(base).values()):
                    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
                    if type(found) is types.FunctionType and id(found.__code__) in ran:
                        if not is_programs(found.__code__, found.__globals__):
                            raise Refused(f"it runs code of {base.__module__} on a {kind.__qualname__}")

    def finish(self) -> tuple[list[Any], list[Any]]:
        """Generates the check; returns the variables and Keras objects among what was read."""
        self.tensors = {id(v) for v in self._kept if type(v) is EagerTensor}
        variables = [v for v in self._kept if issubclass(type(v), _VARIABLES)]
        objects = [v for v in self._kept if _is_keras(type(v))]
        if self._views and not arrays.BEHIND.isdisjoint(self._asked):
            raise Refused("it looks behind an array")
        if self._numbers:
            self._line(f"{self._writer.constant(arrays.settings)}() == {self._writer.constant(arrays.settings())}")
        if self._numbers and self._prints:
            self._line(f"{self._writer.constant(arrays.printing)}() == {self._writer.constant(arrays.printing())}")
        self._holds = self._writer.written()
        self._kept, self._names, self._objects, self._classes, self.functions = [], {}, [], {}, {}
        return variables, objects

    # Generating.

    def _line(self, condition: str) -> None:
        if len(self._writer) >= tuning.max_lookups:
            raise Refused("it looks at too much")
        self._writer.require(condition)

    def _by_reference(self, value: Any) -> str:
        """Returns the name of an object that is reached by a weak reference only."""
        name = self._names.get(id(value))
        if name is None:
            self._kept.append(value)
            name = self._names[id(value)] = self._writer.let(f"{self._writer.constant(weakref.ref(value))}()")
            self._line(f"{name} is not None")
        return name

    def _is(self, place: str, value: Any) -> bool:
        """Guards the identity of the object at a place; returns whether its attributes are guarded already."""
        known = self._names.get(id(value))
        if known is not None:
            if known != place:
                self._line(f"{place} is {known}")
            return id(value) in self._looked
        self._kept.append(value)
        self._names[id(value)] = place
        try:
            self._line(f"{place} is {self._writer.constant(weakref.ref(value))}()")
        except TypeError:
            raise Refused(f"it reads a {type(value).__qualname__}") from None
        return False

    def _check(self, place: str, value: Any) -> None:
        """Guards what a place holds, and its contents; goes by `type`, as `isinstance` may run the object's code."""
        kind = type(value)
        if kind in _PARTS:
            self._is(place, value)
            for name in _PARTS[kind]:
                self._check(self._writer.let(f"{place}.{name}"), getattr(value, name))
            return
        if kind.__module__ in _TRACKING and issubclass(kind, wrapt.ObjectProxy):  # of a dict or tuple
            self._is(place, value)
            self._check(self._writer.let(f"{place}.__wrapped__"), value.__wrapped__)
            return
        if kind.__flags__ & HEAP and not (issubclass(kind, _KNOWN) or _is_keras(kind)) and not is_looked_up(kind):
            raise Refused(f"attributes of a {kind.__qualname__} are computed")
        if value is None or value is True or value is False or value is NotImplemented or value is Ellipsis:
            self._line(f"{place} is {value}")
        elif is_number(value):
            self._numbers = self._numbers or issubclass(kind, np.generic)
            constant = self._writer.constant(value)
            self._line(f"{place} is {constant} or same({place}, {constant})")
        elif arrays.is_compared(value):
            self._numbers, self._views = True, self._views or value.base is not None
            self._line(f"is_array({place}, *{self._writer.constant(arrays.frozen(value))})")
        elif kind is range:
            bounds = self._writer.constant((value.start, value.stop, value.step))  # equal ranges may differ in these
            self._line(f"type({place}) is range and ({place}.start, {place}.stop, {place}.step) == {bounds}")
        elif issubclass(kind, (list, tuple, dict)):
            self._container(place, value)
        elif issubclass(kind, LazyTensor):
            raise Refused("it reads a tensor that calls leave somewhere")
        elif kind is EagerTensor or issubclass(kind, _VARIABLES):
            self._attributes_of(place, value)
        elif issubclass(kind, type):
            self._class(place, value)
        elif kind is types.FunctionType and value.__code__ is not _MANAGER:
            self._function(place, value)
        elif kind is types.MethodType:
            self._check(self._writer.let(f"{place}.__func__"), value.__func__)
            self._check(self._writer.let(f"{place}.__self__"), value.__self__)
        elif kind is types.FunctionType and value.__code__ is _MANAGER:
            self._is(place, value)
            free = value.__code__.co_freevars.index("func")
            self._check(self._writer.let(f"{place}.__closure__[{free}].cell_contents"), value.__wrapped__)
        elif kind is types.BuiltinFunctionType:
            if not self._allowed(value) or not isinstance(value.__self__, (types.ModuleType, type(None))):
                raise Refused(f"it may call {value.__qualname__}")
            self._line(f"{place} is {self._writer.constant(value)}")
        elif _is_keras(kind) and kind.__module__.startswith(MODULES):
            self._is(place, value)  # writes to it are observed
        else:
            self._object(place, value)

    def _function(self, place: str, function: Any) -> None:
        own = behind(function)
        if is_programs(own.__code__, own.__globals__):
            self.functions.setdefault(id(own.__code__), {})[id(own)] = own
        elif not self._allowed(function):
            raise Refused(f"it may call {function.__module__}.{function.__qualname__}")
        self._attributes_of(place, function)

    def _attributes_of(self, place: str, value: Any) -> None:
        """Guards the identity of a function, variable or tensor, and has what it has of attributes looked at."""
        if not self._is(place, value):
            self._looked.add(id(value))
            self._objects.append((place, value, set(), set()))

    def _class(self, place: str, kind: type) -> None:
        if kind in _CLASSES or (kind.__module__ == "builtins" and issubclass(kind, BaseException)):
            self._line(f"{place} is {self._writer.constant(kind)}")
            return
        if issubclass(kind, np.datetime64):
            raise Refused("it may ask for the time")
        if issubclass(kind, (tf.errors.OpError, np.generic)) and kind.__module__.startswith(("tensorflow.", "numpy")):
            self._line(f"{place} is {self._writer.constant(kind)}")
            return
        if kind.__module__.startswith((*MODULES, "tensorflow.", "numpy")) or not kind.__flags__ & HEAP:
            raise Refused(f"it may make a {kind.__qualname__}")
        self._class_itself(place, kind)

    def _class_itself(self, place: str, kind: type) -> None:
        """Guards a class of the program, of which the same attributes may be read as of instances."""
        if not isinstance(kind, enum.EnumMeta) and not is_looked_up(type(kind), type):
            raise Refused(f"attributes of {kind.__qualname__} are computed")
        if self._is(place, kind):
            return
        if id(kind) not in self._classes:
            self._add_class(place, kind)
        self._objects.append((place, kind, set(), set()))
        self._looked.add(id(kind))
        meta: Any = type(kind)
        if meta.__flags__ & HEAP and meta.__module__ not in _METACLASSES and id(meta) not in self._classes:
            name = self._writer.let(f"type({place})")
            self._line(f"{name} is {self._writer.constant(weakref.ref(meta))}()")
            self._add_class(name, meta)

    def _add_class(self, place: str, kind: type) -> None:
        """Adds a class of the program's, and guards that it has no method that Python, NumPy or TensorFlow look for."""
        self._classes[id(kind)] = place, kind, set()
        lacks, cell, version = lacks_methods(kind)
        unchanged = f"{self._writer.constant(cell)}.value == {version} or " if version else ""
        self._line(f"({unchanged}{self._writer.constant(lacks)}({place}))")

    def _container(self, place: str, value: Any) -> None:
        """Guards a list, tuple or dict: its type, length, keys and items."""
        kind = type(value)
        if kind in (list, tuple, dict) or kind.__module__ in _TRACKING:
            ours = True
        else:  # a named tuple; others may define their own iteration
            ours = isinstance(value, tuple) and kind.__base__ is tuple and "__iter__" not in vars(kind)
        if not ours or (isinstance(value, tuple) and hasattr(value, "__dict__")):
            raise Refused(f"it reads a {kind.__qualname__}")
        known = self._names.get(id(value))
        if known is not None:
            self._line(f"{place} is {known}")
            return
        self._kept.append(value)
        self._names[id(value)] = place
        self._line(f"type({place}) is {self._writer.constant(kind)} and len({place}) == {len(value)}")
        if isinstance(value, dict):
            keys = list(value)
            if not all(map(is_number, keys)):
                raise Refused("it reads a dict with keys that are objects")
            if all(type(key) in _NAMES for key in keys):
                self._line(f"list({place}) == {self._writer.constant(keys)}")
                self._line(f"[*map(type, {place})] == {self._writer.constant([*map(type, keys)])}")
            else:
                self._line(f"all(map(same, {place}, {self._writer.constant(keys)}))")
            for key in keys:
                self._check(self._writer.let(f"{place}[{self._writer.constant(key)}]"), value[key])
            return
        for number, item in enumerate(value):
            self._check(self._writer.let(f"{place}[{number}]"), item)

    def _object(self, place: str, value: Any) -> None:
        """Guards an object of the program by identity and class; `look_further` guards its attributes."""
        kind = type(value)
        if not kind.__flags__ & HEAP:
            raise Refused(f"it reads a {kind.__qualname__}")
        if not is_plain(kind):
            raise Refused(f"attributes of a {kind.__qualname__} are computed")
        if kind.__module__.startswith(("tensorflow.", *MODULES)) and not issubclass(kind, tf.random.Generator):
            raise Refused(f"it reads a {kind.__qualname__}")
        if self._is(place, value):
            return
        self._names[id(value)] = place
        if id(kind) in self._classes:
            self._line(f"type({place}) is {self._classes[id(kind)][0]}")
        else:
            name = self._writer.let(f"type({place})")
            self._line(f"{name} is {self._writer.constant(weakref.ref(kind))}()")
            self._add_class(name, kind)
        self._objects.append((place, value, set(), set()))
        self._looked.add(id(value))

    def _attribute(self, place: str, value: Any, name: str) -> None:
        """Guards an attribute of an object of the program, or its absence."""
        if isinstance(value, type):
            self._class_attribute(value, name)
            if id(type(value)) in self._classes:  # a metaclass of the program's
                self._class_attribute(type(value), name)
            return
        if type(value) is logging.Logger:
            self._silence(place, value, name)
            return
        kind = type(value)
        if kind in _DESCRIBED or issubclass(kind, _VARIABLES):
            self._described(place, value, name)
            return
        if isinstance(value, enum.Enum) and name in ("name", "value"):
            name = f"_{name}_"
        found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _MISSING)
        if found is not _MISSING:
            self._class_attribute(kind, name)
            if hasattr(type(found), "__set__"):
                return  # a data descriptor takes precedence
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            if name in held:
                self._check(self._writer.let(f"{place}.__dict__.get({name!r}, M)"), held[name])
            elif found is not _MISSING:
                self._line(f"{name!r} not in {place}.__dict__")

    def _described(self, place: str, value: Any, name: str) -> None:
        """Guards an attribute that the program has set on a function, variable or tensor, or one that describes it."""
        if name in vars(value):
            self._check(self._writer.let(f"{place}.__dict__.get({name!r}, M)"), vars(value)[name])
        elif name in _DESCRIBING and hasattr(value, name):
            self._check(self._writer.let(f"{place}.{name}"), getattr(value, name))
        elif not hasattr(type(value), name):
            self._line(f"{name!r} not in {place}.__dict__")

    def _silence(self, place: str, logger: logging.Logger, name: str) -> None:
        """Guards that this method of a logger does nothing at its level, or a plain attribute of it."""
        if name not in _LEVELS:
            if name in vars(logger) and is_number(vars(logger)[name]):
                self._check(self._writer.let(f"{place}.__dict__.get({name!r}, M)"), vars(logger)[name])
            elif hasattr(logger, name):
                raise Refused(f"it may ask the logger {logger.name} for {name}")
            return
        if logger.isEnabledFor(_LEVELS[name]):
            raise Refused(f"it may log by {logger.name}")
        method = vars(logging.Logger)[name]
        self._line(f"{self._writer.constant(logging.Logger)}.{name} is {self._writer.constant(method)}")
        self._line(f"{name!r} not in {place}.__dict__ and not {place}.isEnabledFor({_LEVELS[name]})")

    def _absence(self, place: str, value: Any, name: str) -> None:
        """Guards that neither an object nor its class have an attribute, if so."""
        kind = type(value)
        if kind in _DESCRIBED or issubclass(kind, _VARIABLES):
            self._described(place, value, name)
            return
        if isinstance(value, (type, logging.Logger)):
            return
        if name in getattr(value, "__dict__", {}):
            if name in OF_INSTANCES:
                raise Refused(f"it has NumPy take a {kind.__qualname__} for an array")
            return
        self._class_attribute(type(value), name)
        if not any(name in vars(base) for base in type(value).__mro__) and type(vars(value)) is dict:
            self._line(f"{name!r} not in {place}.__dict__")

    def _class_attribute(self, kind: type, name: str) -> None:
        """Guards a name in a class and its bases, except libraries': in all of them, as `super()` may read any."""
        place, _, seen = self._classes[id(kind)]
        if isinstance(kind, enum.EnumMeta) and (name in kind.__members__ or name in ("name", "value")):
            if name in kind.__members__ and name not in seen and is_plain(kind):  # its own attributes may change
                seen.add(name)
                self._check(self._writer.let(f"{place}._member_map_[{name!r}]"), kind.__members__[name])
            return
        if name in seen:
            return
        seen.add(name)
        for number, base in enumerate(kind.__mro__):
            if base is object or base is type or base.__module__.startswith((*MODULES, "tensorflow.")):
                continue
            if name not in vars(base):
                self._line(f"{name!r} not in {place}.__mro__[{number}].__dict__")
                continue
            found = vars(base)[name]
            at = self._writer.let(f"{place}.__mro__[{number}].__dict__.get({name!r}, M)")
            if isinstance(found, (staticmethod, classmethod)):
                self._line(f"type({at}) is {self._writer.constant(type(found))}")
                self._check(self._writer.let(f"{at}.__func__"), found.__func__)
            elif type(found) is property and type(found.fget) is types.FunctionType:
                self._line(f"type({at}) is property")
                self._check(self._writer.let(f"{at}.fget"), found.fget)
            elif type(found) is not types.FunctionType and hasattr(type(found), "__get__"):
                raise Refused(f"{name!r} of a {kind.__qualname__} is computed")
            else:
                self._check(at, found)


_MANAGER = contextlib.contextmanager(lambda: None).__code__  # type: ignore[arg-type, return-value]
# Logger methods that do nothing below a level; `log` takes its level as an argument.
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "exception": 40, "critical": 50, "log": 50}
_ASKING = (("getattr",), ("hasattr",))
_DESCRIBED = (types.FunctionType, EagerTensor)


# Of what consists of tensors: these, on which all else depends.
_PARTS = {
    tf.SparseTensor: ("indices", "values", "dense_shape"), tf.IndexedSlices: ("values", "indices", "dense_shape"),
}  # fmt: skip
# What can be changed of these past their `__dict__`: of functions, and of variables.
_DESCRIBING = frozenset({
    "__name__", "__qualname__", "__doc__", "__module__", "__annotations__",
    "trainable", "name", "regularizer", "constraint", "synchronization", "aggregation", "overwrite_with_gradient",
})  # fmt: skip
# Modules of metaclasses whose own attributes nobody changes.
_METACLASSES = ("abc", "enum", "typing")
_VARIABLES = (keras.Variable, tf.Variable)
_NAMES = frozenset({str, bytes, int, bool, type(None)})  # keys that are the same if equal and of one type
_KNOWN = (list, tuple, dict, type, EagerTensor, LazyTensor, tf.DType, tf.TensorShape, np.generic, *_VARIABLES)

def _is_keras(kind: type) -> bool:
    return issubclass(kind, (*classes.stateful, *classes.parts))


def _lacks(module: types.ModuleType, name: str) -> bool:
    """Returns whether a module has no such attribute, and no function that computes attributes."""
    return type(module) is types.ModuleType and not {name, "__getattr__"} & vars(module).keys()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING
