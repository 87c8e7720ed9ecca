"""Mutation snapshot: everything that a function can mutate, saved to detect and undo mutations."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from coexec.base.tuning import tuning

_LIBRARIES = ("builtins", "coexec", "keras", "numpy", "optree", "tensorflow", "tracer", "wrapt")
_ITERATING = ("builtins", "numpy")  # modules whose iterators advance undetected; TensorFlow's are operations
_PLAIN = (bool, int, float, str, bytes)
_MISSING = object()


class Place(NamedTuple):
    """Something mutable: its name for messages, a function that reads its state, and one that restores it."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], None]


class Found(NamedTuple):
    """A reachable value, its name for messages, and whether the program owns it: libraries may mutate their own."""

    name: str
    value: Any
    ours: bool = True


class MutationSnapshot:
    """The Python state that a function can reach from its globals, closure, defaults and arguments.

    Of Keras' and TensorFlow's objects it covers only plain attributes. Arrays are read-only while this context is
    entered; everything else is compared by `changed`.
    """

    def __init__(self, roots: list[Any]) -> None:
        self.incomplete: str | None = None  # why a mutation could go unnoticed
        self._places: list[Place] = []
        self._arrays: list[np.ndarray] = []
        self._mentioned: set[str] = set()  # names of attributes in the program's code
        self._explore(roots)  # collects `_mentioned`, which the second pass needs
        self._explore(roots)
        self._states = [place.read() for place in self._places]

    def _explore(self, roots: list[Any]) -> None:
        """Collects what is reachable from the roots in `_places` and `_arrays`; may set `incomplete`."""
        self._places.clear()
        self._arrays.clear()
        self._seen: dict[int, Any] = {}  # keeps the values alive, so that ids stay unique
        self._random("NumPy's random numbers", np.random.get_state, np.random.set_state)
        ahead = deque(Found("", root) for root in roots)
        while ahead and self.incomplete is None:
            found = ahead.popleft()
            if id(found.value) not in self._seen:
                self._seen[id(found.value)] = found.value
                ahead.extend(self._look_into(*found))
            if len(self._places) > tuning.max_export_places:
                self.incomplete = f"can reach more than {tuning.max_export_places} objects"

    def __enter__(self) -> MutationSnapshot:
        self._writeable = [a for a in self._arrays if a.flags.writeable]
        for array in self._writeable:
            array.flags.writeable = False
        return self

    def __exit__(self, *_: object) -> None:
        for array in reversed(self._writeable):  # a view needs a writeable base: one pass in each order
            with contextlib.suppress(ValueError):
                array.flags.writeable = True
        for array in self._writeable:
            array.flags.writeable = True

    def changed(self) -> str | None:
        """Returns the name of what was mutated, and restores it; None if nothing was."""
        name = None
        for place, state in zip(self._places, self._states, strict=True):
            if _differs(state, place.read()):
                name = name or place.name
                place.restore(state)
        return name

    def _look_into(self, name: str, value: Any, ours: bool) -> Iterator[Found]:
        """Adds the places at which a value can be mutated, and yields what can be reached from it."""
        kind = type(value)
        if isinstance(value, types.FunctionType):
            yield from self._function(name, value)
        elif isinstance(value, (types.MethodType, functools.partial, staticmethod, classmethod, property)):
            parts = ("__self__", "__func__", "func", "args", "keywords", "fget", "fset")
            yield from (Found(name, getattr(value, part)) for part in parts if hasattr(value, part))
        elif isinstance(value, np.ndarray):
            self._arrays.append(value)
        elif isinstance(value, dict):
            if ours:
                self._places.append(Place(name, lambda: (*value, *value.values()), functools.partial(_refill, value)))
            yield from (Found(f"{name}[{key!r}]", item, ours) for key, item in list(value.items()))
            yield from self._additions(name, value)
        elif isinstance(value, (list, set, deque, bytearray)):
            if ours:
                self._places.append(Place(name, lambda: tuple(value), functools.partial(_refill, value)))
            yield from (Found(f"{name}[{i}]", item, ours) for i, item in enumerate(list(value)))
            yield from self._additions(name, value)
        elif isinstance(value, (tuple, frozenset)):
            yield from (Found(f"{name}[{i}]", item, ours) for i, item in enumerate(value))
        elif isinstance(value, np.random.Generator):
            numbers = value.bit_generator
            put = functools.partial(setattr, numbers, "state")
            self._random(name, functools.partial(getattr, numbers, "state"), put)
        elif isinstance(value, np.random.RandomState):
            self._random(name, value.get_state, value.set_state)
        elif _is_buffer(value):
            read = functools.partial(_bytes, value)
            self._places.append(Place(name, read, functools.partial(_overwrite, value)))
        elif ours and hasattr(kind, "__next__") and (kind.__module__ in _ITERATING or not _is_of_a_library(kind)):
            self.incomplete = f"can reach {name}, a {kind.__name__}, and nobody can tell whether it moves on"
        else:
            yield from self._object(name, value)

    def _random(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        """Adds the state of a random number generator."""
        self._places.append(Place(name, lambda: (pickle.dumps(get()),), lambda state: put(pickle.loads(state[0]))))

    def _function(self, name: str, function: types.FunctionType) -> Iterator[Found]:
        """Adds a function's globals, cells and attributes; yields the values they hold."""
        if hasattr(function, "__wrapped__"):
            yield Found(name, function.__wrapped__)
        if _is_of_a_library(function) or _is_standard(function):
            return
        names, namespace = _names(function.__code__), function.__globals__
        self._mentioned.update(names)
        for n in names:
            held = self._variable(f"the global {n}", namespace, n)
            if isinstance(held, types.ModuleType):
                if not _is_of_a_library(held):
                    for a in names:
                        if not _is_standard(held):
                            self._variable(f"{n}.{a}", vars(held), a)
                        if a in vars(held):
                            yield Found(f"{n}.{a}", vars(held)[a])
            elif held is not _MISSING:
                yield Found(n, held)
        for n, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            read = functools.partial(_content, cell)
            self._places.append(Place(f"the variable {n}", read, functools.partial(setattr, cell, "cell_contents")))
            yield Found(n, read())
        yield Found(f"{name} defaults", (function.__defaults__, function.__kwdefaults__))
        yield Found(f"attributes of {name or function.__name__}", function.__dict__)

    def _variable(self, title: str, namespace: dict[str, Any], name: str) -> Any:
        """Adds a module's variable, bound or not; returns its value, or `_MISSING`."""
        get, put = functools.partial(namespace.get, name, _MISSING), functools.partial(_put, namespace, name)
        self._places.append(Place(title, get, put))
        return get()

    def _additions(self, name: str, holder: Any) -> Iterator[Found]:
        """Adds the attributes of a container of the program's own class."""
        if not _is_of_a_library(type(holder)):
            yield from self._object(name, holder)

    def _object(self, name: str, value: Any) -> Iterator[Found]:
        """Adds an object's attributes, slots included; of a library's objects only those a program may set."""
        if isinstance(value, (types.ModuleType, type)) and (_is_of_a_library(value) or _is_standard(value)):
            return
        kind = value if isinstance(value, type) else type(value)
        if "__wrapped__" in getattr(value, "__dict__", ()):  # a function decorated by coexec, among others
            yield Found(name, value.__wrapped__)
            return
        slots = [n for base in kind.__mro__ for n in vars(base).get("__slots__", ()) if not isinstance(value, type)]
        if not hasattr(value, "__dict__") and (not slots or _is_of_a_library(kind)):
            return
        shared = any(_is_of_a_library(base) for base in kind.__mro__[:-1])  # has a base class of a library

        libraries = _mentioned_by(next(base for base in kind.__mro__ if _is_of_a_library(base)))
        built = getattr(value, "built", True)

        def attributes() -> dict[str, Any]:
            held = {n: getattr(value, n) for n in slots if hasattr(value, n) and n not in ("__dict__", "__weakref__")}
            return {**held, **getattr(value, "__dict__", {})}

        def offered(n: str) -> bool:
            # A private attribute is the program's if the program's code mentions it, and the library's class does not.
            return _is_offered(kind, n) or (n[0] == "_" and n in self._mentioned and n not in libraries)

        def watched() -> tuple[Any, ...]:
            mine = attributes()
            if shared:
                plain = _is_of_a_library(kind)
                if plain and not built:  # Keras sets attributes when it builds it
                    return ()
                mine = {n: v for n, v in mine.items() if offered(n) and (isinstance(v, _PLAIN) or not plain)}
            return (*mine, *mine.values())

        title = f"attributes of {name}" if name else "attributes"
        self._places.append(Place(title, watched, functools.partial(_reset, value, watched)))
        for n, v in attributes().items():
            ours = not (shared and n[0] == "_" and not offered(n)) and not _is_of_a_library(kind)
            yield Found(f"{name}.{n}" if name else n, v, ours)
        yield Found(kind.__name__, kind)


def _is_offered(kind: type, name: str) -> bool:
    """Returns whether a program may set an attribute of a library's class, directly or through a property."""
    if name[0] != "_":
        return name not in ("built", "locked")  # set by Keras itself
    offered = getattr(kind, name.strip("_"), None)
    return isinstance(offered, property) and offered.fset is not None


def _is_of_a_library(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    return str(name).split(".")[0] in _LIBRARIES


def _is_standard(thing: Any) -> bool:
    """Returns whether a function, class or module is of the standard library, whose state programs do not mutate."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    root = str(name).split(".")[0]
    return root != "__main__" and root in sys.stdlib_module_names


def _names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes in a code object and those nested in it."""
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in _names(c)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


@functools.cache
def _mentioned_by(kind: type) -> frozenset[str]:
    """Returns the names in the methods of a class and its bases."""
    methods = [f for base in kind.__mro__ for f in vars(base).values() if isinstance(f, types.FunctionType)]
    return frozenset(name for method in methods for name in _names(method.__code__))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return _MISSING


def _put(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def _is_buffer(value: Any) -> bool:
    """Returns whether this is a writeable buffer (`array`, `ctypes`), which can change without a call."""
    if isinstance(value, memoryview) or not _is_of_a_library(type(value)):
        with contextlib.suppress(TypeError, ValueError):
            return not memoryview(value).readonly
    return False


def _bytes(value: Any) -> tuple[bytes]:
    return (memoryview(value).tobytes(),)


def _overwrite(value: Any, state: tuple[bytes]) -> None:
    memoryview(value).cast("B")[:] = state[0]


def _refill(holder: Any, state: tuple[Any, ...]) -> None:
    """Restores the items of a container in place."""
    holder.clear()
    if isinstance(holder, dict):
        half = len(state) // 2
        holder.update(zip(state[:half], state[half:], strict=True))
    else:
        holder.update(state) if isinstance(holder, set) else holder.extend(state)


def _reset(value: Any, watched: Callable[[], tuple[Any, ...]], state: tuple[Any, ...]) -> None:
    """Restores attributes to a state returned by `watched`, and deletes those added since."""
    half, now = len(state) // 2, watched()
    before, after = dict(zip(state[:half], state[half:], strict=True)), now[: len(now) // 2]
    for n in after:
        if n not in before:
            delattr(value, n)
    for n, v in before.items():
        if getattr(value, n, _MISSING) is not v:
            setattr(value, n, v)


def _differs(one: Any, other: Any) -> bool:
    """Returns whether two states of a place differ: elements compare by identity, plain values by value."""
    if type(one) is tuple and type(other) is tuple:
        return len(one) != len(other) or any(a is not b and not _same(a, b) for a, b in zip(one, other, strict=True))
    return one is not other


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, _PLAIN) and one == other
