"""Library reads: what a library call's Python may have read, and whether that is still the same.

A memoized call is valid while the objects that its Python has read are as they were. Writes through `__setattr__` of
Keras' classes are heard of at once (`tracer.effects`); all others are found here: attributes written past that,
containers and arrays changed in place, functions and other globals replaced in a library's modules, attributes of
classes. What has been read follows from the code that has run: it can reach an attribute or a global only by a name
that stands in it. Names that are computed go unseen.

All that is one or two looks at memory before each call (`tracer.memory`): 0.4 to 1 us in a tight loop for 10 to 120
objects. Only where a word differs, what it belongs to is compared by what it holds: most writes change nothing, or
nothing that counts. Modules that libraries are built on are left out, and so are the functions themselves: there are
hundreds of either behind each call.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import wrapt

from coexec.base.tuning import tuning
from tracer import intercept, memory
from tracer.effects import Contents, is_programs
from tracer.op import same
from tracer.private import EagerTensor, KerasNode, keras_tracking

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_NEVER = object()  # stands for what cannot be told from something else later: equal to nothing

# What refers to nothing that could hold it in turn.
_ENDS = (
    *_SCALARS, type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, np.generic, EagerTensor, tf.DType,
    tf.TensorShape,
)  # fmt: skip

_HOLD_NOTHING = (*_ENDS, np.ndarray)

# What is not looked into: functions; variables, whose values are operations'; what Keras knows of an object's
# attributes beside them, and of the graph of a functional model, which stays as it was made.
_ALONE = (
    *_ENDS, types.FunctionType, tf.Variable, keras.Variable, keras.KerasTensor, KerasNode, keras_tracking.Tracker,
)  # fmt: skip

# Modules whose globals are not looked at, as each costs as much as an object: what libraries are built on, and ours.
_UNREAD = frozenset({*sys.stdlib_module_names, "coexec", "ml_dtypes", "numpy", "optree", "tracer"})
_INSIDE = ("tensorflow.python.", "tensorflow.core.", "tensorflow.compiler.")

_memory = memory.MEMORY
_names: dict[int, tuple[types.CodeType, frozenset[str]]] = {}  # by code's id
_modules: dict[int, tuple[dict[str, Any], int, dict[str, dict[str, Any]]]] = {}  # by id of globals, and their version
# Entries of modules, which many calls share, and the versions of the globals at which they were seen to agree.
_spaces: dict[tuple[int, tuple[str, ...]], tuple[_Entry, int]] = {}


def names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names by which code may reach attributes and globals: its own, and those among its constants."""
    known = _names.get(id(code))
    if known is None:
        if len(_names) > tuning.max_known_codes:
            _names.clear()
        known = _names[id(code)] = code, frozenset((*code.co_names, *_strings(code.co_consts)))
    return known[1]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for item in value:
            yield from _strings(item)


class _Entry:
    """One object: where its words are, and what it held."""

    __slots__ = ("bodies", "heads", "held", "kind", "names", "reference")

    def __init__(self, kind: str, holder: Any, names: Any, reference: Callable[[], Any]) -> None:
        self.kind, self.names, self.reference = kind, names, reference
        self.heads, self.bodies = _PLACES[kind](holder)
        self.held: list[Any] | None = None

    def note(self, holder: Any, kept: Any) -> None:
        """Notes what the object holds; `kept`: the ids of containers that stay alive as long as this."""
        values = _VALUES[self.kind](holder, self.names)
        self.held = None if values is None else [_form(value, kept) for value in values]

    def agrees(self, holder: Any) -> bool:
        """Returns whether the object holds what it held, as far as that was read; its words are looked up anew."""
        held, values = self.held, _VALUES[self.kind](holder, self.names)
        if held is None or values is None or len(held) != len(values) or not all(map(_is, held, values)):
            return False
        self.heads, self.bodies = _PLACES[self.kind](holder)
        return True


class LibraryReads:
    """What one call's Python may have read; `hold()` tells whether it is all the same now."""

    def __init__(self, roots: list[Any], ran: Iterable[tuple[types.CodeType, dict[str, Any]]],
                 contents: Contents) -> None:  # fmt: skip
        """`ran`: the code that has run, with its globals; `contents`: what can be reached from the roots.

        The roots are not kept alive.
        """
        self._entries: list[_Entry] = []
        self._dead: list[Any] = []  # references to objects that have come to their ends
        if memory.KNOWN:
            self._back = _leading_to(set(map(id, roots)), contents)
            ran = list(ran)
            self._names = frozenset().union(*(names_in(code) for code, _ in ran))
            # Each call writes to these classes itself, as it replaces the entry points of TensorFlow's runtime.
            self._seen: dict[int, Any] = {id(target): target for target in intercept.targets()}
            self._kept: set[int] = set()
            self._reach(roots)
            self._look_into_modules(ran)
            for entry in self._entries:
                if entry.kind != "space":
                    entry.note(entry.reference(), self._kept)
            del self._back, self._names, self._seen, self._kept
        self._lay_out()

    def hold(self) -> bool:
        """Returns whether everything is what it was."""
        if self._dead:
            return False
        # The second look is into what the first one has found to be there.
        if _memory[self._heads].tobytes() == self._head_words and (
            self._bodies is None or _memory[self._bodies].tobytes() == self._body_words
        ):
            return True
        return self._agree()

    def _lay_out(self) -> None:
        entries = self._entries
        self._heads = memory.places([address for entry in entries for address in entry.heads])
        self._head_ends = np.cumsum([len(entry.heads) for entry in entries])
        self._head_words = memory.words(self._heads)
        bodies = [address for entry in entries for address in entry.bodies]
        self._bodies = memory.places(bodies) if bodies else None
        self._body_ends = np.cumsum([len(entry.bodies) for entry in entries])
        self._body_words = b"" if self._bodies is None else memory.words(self._bodies)

    def _agree(self) -> bool:
        """Compares what has other words than before by what it holds, and takes the words from then on."""
        for _ in range(4):  # another thread may go on writing
            heads, bodies = memory.words(self._heads), self._body_words
            touched = self._touched(self._head_words, heads, self._head_ends)
            if not touched and self._bodies is not None:
                bodies = memory.words(self._bodies)
                touched = self._touched(self._body_words, bodies, self._body_ends)
            if not touched:
                return True
            moved = False
            for entry in touched:
                before, holder = (entry.heads, entry.bodies), entry.reference()
                if holder is None or not entry.agrees(holder):
                    return False
                moved = moved or before != (entry.heads, entry.bodies)
            if moved:
                self._lay_out()
                if not all(entry.agrees(entry.reference()) for entry in touched):
                    return False
            else:
                self._head_words, self._body_words = heads, bodies
        return False

    def _touched(self, before: bytes, now: bytes, ends: Any) -> list[_Entry]:
        if before == now:
            return []
        changed = np.flatnonzero(np.frombuffer(before, np.uint64) != np.frombuffer(now, np.uint64))
        return [self._entries[number] for number in np.unique(np.searchsorted(ends, changed, "right"))]

    # What is looked at.

    def _add(self, kind: str, holder: Any, names: Any = None) -> None:
        try:
            reference: Any = weakref.ref(holder, self._dead.append)
        except TypeError:
            if id(holder) in self._back:
                return  # it would keep alive what the call belongs to
            self._kept.add(id(holder))
            reference = functools.partial(_itself, holder)
        self._entries.append(_Entry(kind, holder, names, reference))

    def _reach(self, roots: Iterable[Any]) -> None:
        """Notes what can be reached from objects by names that the code knows."""
        ahead = deque(roots)
        while ahead:
            holder = ahead.popleft()
            if id(holder) in self._seen:
                continue
            self._seen[id(holder)] = holder
            kind = type(holder)
            if issubclass(kind, dict):
                self._add("dict", holder)
                ahead.extend((*dict.keys(holder), *dict.values(holder)))
            elif issubclass(kind, list):
                self._add("list", holder)
                ahead.extend(list.__iter__(holder))
            elif issubclass(kind, set):
                self._add("set", holder)
                ahead.extend(set.__iter__(holder))
            elif issubclass(kind, (tuple, deque, frozenset)):
                ahead.extend(holder)
            elif kind is np.ndarray:
                if holder.nbytes <= tuning.max_watched_bytes and holder.dtype != object:
                    self._add("array", holder)
            elif kind is types.MethodType:
                ahead.extend((holder.__func__, holder.__self__))
            elif kind is functools.partial:
                ahead.extend((holder.func, holder.args, holder.keywords))
            elif issubclass(kind, wrapt.ObjectProxy):  # TensorFlow's of a dict
                ahead.append(holder.__wrapped__)
            if not issubclass(kind, _ALONE) and kind.__module__ != keras_tracking.__name__:
                self._instance(holder, ahead)

    def _instance(self, holder: Any, ahead: deque[Any]) -> None:
        attributes = getattr(holder, "__dict__", None)
        if type(attributes) is not dict:
            return
        self._class(type(holder))
        if memory.slot_of(holder) is not None:
            self._add("instance", holder, self._names)
        ahead.extend(value for name, value in attributes.items() if name in self._names)

    def _class(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        if memory.class_places(kind):
            self._add("class", kind)

    def _look_into_modules(self, ran: list[tuple[types.CodeType, dict[str, Any]]]) -> None:
        """Notes the globals that the libraries' code asks for, and what it asks of modules among them."""
        asked: dict[int, tuple[dict[str, Any], set[str], dict[str, dict[str, Any]], bool]] = {}
        ahead = deque((space, names_in(code)) for code, space in ran if not is_programs(code, space))
        while ahead:
            space, names = ahead.popleft()
            entry = asked.get(id(space))
            if entry is None:
                entry = asked[id(space)] = space, set(), _modules_in(space), _is_read(space)
            _, known, modules, read = entry
            for name in modules:
                if name in names and name not in known:
                    known.add(name)
                    ahead.append((modules[name], names))
            if read:
                known.update([name for name in names if name in space])
        for space, found, _, read in asked.values():
            if read:
                self._entries.append(_space_entry(space, tuple(sorted(found))))


def _is_read(space: dict[str, Any]) -> bool:
    name = str(space.get("__name__"))
    return not name.startswith(_INSIDE) and name.partition(".")[0] not in _UNREAD


def _modules_in(space: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the globals of the modules among some globals, by name; most globals are asked for again and again."""
    version = memory.word(*memory.dict_places(space))
    known = _modules.get(id(space))
    if known is None or known[1] != version:
        # Asked for its class, a lazy module would be imported.
        found = {name: vars(v) for name, v in list(space.items()) if issubclass(type(v), types.ModuleType)}
        if len(_modules) > tuning.max_known_codes:
            _modules.clear()
        known = _modules[id(space)] = space, version, found
    return known[2]


def _space_entry(space: dict[str, Any], names: tuple[str, ...]) -> _Entry:
    key = id(space), names
    version = memory.word(*memory.dict_places(space))
    entry, seen = _spaces.get(key, (None, 0))
    if entry is None or (seen != version and not entry.agrees(space)):
        if len(_spaces) > tuning.max_known_codes:
            _spaces.clear()
        entry = _Entry("space", space, names, functools.partial(_itself, space))
        entry.note(space, _ALL)
    _spaces[key] = entry, version  # read before the globals were: what is written meanwhile is looked at again
    return entry


def _itself(holder: Any) -> Any:
    return holder


def _leading_to(anchors: set[int], contents: Contents) -> set[int]:
    """Returns the ids of what holds an anchor, at any remove, or something of which nobody knows what it holds."""
    holders: dict[int, list[int]] = {}
    found = set(anchors)
    for key, (_, _, values) in contents.items():
        for value in values:
            if type(value) in _SCALARS:
                continue
            if id(value) in contents:
                holders.setdefault(id(value), []).append(key)
            elif not issubclass(type(value), _HOLD_NOTHING) and not _is_open(value):
                found.add(key)
    ahead = deque(found)
    while ahead:
        for holder in holders.get(ahead.popleft(), ()):
            if holder not in found:
                found.add(holder)
                ahead.append(holder)
    return found


def _is_open(value: Any) -> bool:
    return type(value) is types.FunctionType and value.__closure__ is None


# What is compared, by kind: the places of words, those of words that are good while the first are the same, contents.


def _instance_places(holder: Any) -> tuple[list[int], list[int]]:
    # A dict whose owner gets another one is gone, but not so its memory, but for the rarest of cases.
    return [memory.slot_of(holder) or id(holder), *memory.dict_places(holder.__dict__)], []


_PLACES: dict[str, Callable[[Any], tuple[list[int], list[int]]]] = {
    "instance": _instance_places,
    "dict": lambda holder: (memory.dict_places(holder), []),
    "space": lambda holder: (memory.dict_places(holder), []),
    "list": lambda holder: memory.list_places(holder, tuning.max_watched_items),
    "set": lambda holder: memory.set_places(holder, tuning.max_watched_items),
    "array": lambda holder: (memory.array_places(holder), []),
    "class": lambda holder: (memory.class_places(holder), []),
}


def _few(values: list[Any]) -> list[Any] | None:
    return values if len(values) <= 2 * tuning.max_watched_items else None


# None: whatever is written counts.
_VALUES: dict[str, Callable[[Any, Any], list[Any] | None]] = {
    "instance": lambda holder, names: [part for item in holder.__dict__.items() if item[0] in names for part in item],
    "space": lambda holder, names: [holder.get(name, _NEVER) for name in names],
    "dict": lambda holder, _: _few([part for item in dict.items(holder) for part in item]),
    "list": lambda holder, _: _few([*list.__iter__(holder)]),
    "set": lambda holder, _: None,
    "array": lambda holder, _: None,
    "class": lambda holder, _: None,
}


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


_ALL = _Everything()


def _form(value: Any, kept: Any) -> tuple[str, Any]:
    """Returns what tells later whether a value is another one, and does not keep it alive."""
    if issubclass(type(value), (*_SCALARS, np.generic)):
        return "value", value
    if type(value) is tuple:
        return "tuple", [_form(item, kept) for item in value]
    try:
        return "reference", weakref.ref(value)
    except TypeError:
        pass
    if kept is _ALL or issubclass(type(value), _ENDS):
        return "itself", value
    if id(value) in kept:
        return "id", id(value)
    # It leads back to what the call belongs to, which it would keep alive.
    return "place", (id(value), type(value), _ids_in(value))


def _ids_in(value: Any) -> list[int]:
    items = [*dict.keys(value), *dict.values(value)] if isinstance(value, dict) else value
    return [*map(id, items)] if isinstance(items, (list, tuple)) else []


def _is(form: tuple[str, Any], value: Any) -> bool:
    kind, known = form
    if kind == "value":
        return same(known, value)
    if kind == "reference":
        return known() is value
    if kind == "itself":
        return known is value
    if kind == "tuple":
        return type(value) is tuple and len(value) == len(known) and all(map(_is, known, value))
    if kind == "place":
        place: tuple[int, type, list[int]] = id(value), type(value), _ids_in(value)
        return bool(known == place)
    return bool(id(value) == known)
