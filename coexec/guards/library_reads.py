"""Library reads: the state that a library call's Python may have read, with a check that it is unchanged.

A memoized call is valid while the objects that its Python has read are unchanged. Writes through `__setattr__` of
Keras' classes invalidate it at once (`tracer.effects`); all others are detected here: attributes written otherwise,
containers and arrays changed in place, functions and other globals replaced in a library's modules, class attributes.
What was read is inferred from the code that ran: it can reach an attribute or a global only by a name that it contains.
Computed names are missed.

The check is one or two reads of memory before each call (`tracer.memory`): 0.4 to 1 us in a tight loop for 10 to 120
objects. Only if a word differs, its object's contents are compared: most writes change nothing relevant. Modules that
libraries are built on are excluded, with what their code reads of others, and so are functions themselves: there are
hundreds of either in each call.
"""

from __future__ import annotations

import functools
import sys
import threading
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
from tracer.effects import Contents, is_programs, is_registered
from tracer.keras_packages import LOSSES, classes
from tracer.op import same
from tracer.private import EagerTensor, keras_tracking
from tracer.warning_filters import Silence

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_NEVER = object()  # stands for what cannot be compared later: equal to nothing

# Types whose instances refer to nothing that could refer back to them.
_ENDS = (
    *_SCALARS, type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, np.generic, EagerTensor, tf.DType,
    tf.TensorShape,
)  # fmt: skip

_HOLD_NOTHING = (*_ENDS, np.ndarray)

# Types that are not traversed, as are Keras' trackers of attributes and the tensors of a functional model's graph.
_ALONE = (*_ENDS, types.FunctionType)
_VARIABLES = (tf.Variable, keras.Variable)
# What is traversed of a variable: what it wraps, and what optimizers and layers call. Only operations read its value.
_OF_VARIABLES = ("_constraint", "_regularizer", "_value", "_variable")

# Modules whose globals are not checked, as each costs as much as an object: foundations of the libraries, and ours.
_UNREAD = frozenset({*sys.stdlib_module_names, "coexec", "ml_dtypes", "numpy", "optree", "tracer"})
_INSIDE = ("tensorflow.python.", "tensorflow.core.", "tensorflow.compiler.")

# Modules whose Python compares sizes of data, with bounds or with each other: what is cropped, padded or solved, and by
# which formula. Others only compute with sizes, and ask whether one is 1, or as many as another.
_CHOOSING = (
    *(f"{package}.src.{module}" for package in ("keras", "tf_keras") for module in (
        "backend.tensorflow.image", "backend.tensorflow.linalg", "backend.tensorflow.math", "layers.preprocessing",
        "layers.reshaping.cropping", "ops.image", "ops.linalg", "ops.math",
    )),
    *(f"tensorflow.python.ops.{module}" for module in ("image_ops", "linalg", "signal")),
)  # fmt: skip

_memory = memory.MEMORY
_names: dict[int, tuple[types.CodeType, frozenset[str]]] = {}  # by code's id
# Entries of modules, shared by many calls, with the versions of the globals at which they last agreed.
_spaces: dict[tuple[int, tuple[str, ...]], tuple[_Entry, int]] = {}


def _may_choose(module: str) -> bool:
    return module.startswith(_CHOOSING) or is_registered(module)  # of what programs register, nothing is known


def names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names by which code may reach attributes and globals, including its string constants."""
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
    """One object: the addresses of its words, and its contents."""

    __slots__ = ("bodies", "heads", "held", "kind", "names", "reference")

    def __init__(self, kind: str, holder: Any, names: Any, reference: Callable[[], Any]) -> None:
        self.kind, self.names, self.reference = kind, names, reference
        self.heads, self.bodies = _PLACES[kind](holder)
        self.held: list[Any] | None = None

    def note(self, holder: Any, kept: Any) -> None:
        """Stores the object's contents; `kept`: ids of containers that live as long as this."""
        values = _VALUES[self.kind](holder, self.names)
        self.held = None if values is None else [_form(value, kept) for value in values]

    def agrees(self, holder: Any) -> bool:
        """Returns whether the contents that were read are unchanged; if so, updates the words' addresses."""
        held, values = self.held, _VALUES[self.kind](holder, self.names)
        if held is None or values is None or len(held) != len(values) or not all(map(_is, held, values)):
            return False
        self.heads, self.bodies = _PLACES[self.kind](holder)
        return True


class LibraryReads:
    """What one call's Python may have read; `hold()` checks that it is unchanged."""

    def __init__(self, roots: list[Any], ran: Iterable[tuple[types.CodeType, dict[str, Any]]],
                 contents: Contents, silence: Silence | None = None) -> None:  # fmt: skip
        """`ran`: the code that ran, with its globals; `contents`: the objects reachable from the roots.

        `silence`: of a call that warns, what has kept that from being shown.

        Does not keep the roots alive.
        """
        self.silence = silence
        ran = list(ran)
        # Whether its Python may do something else at other sizes.
        self.chooses_by_sizes = any(map(_may_choose, {str(space.get("__name__")) for _, space in ran}))
        self._entries: list[_Entry] = []
        self._dead: list[Any] = []  # references to objects that have been freed
        if memory.KNOWN:
            self._back = _leading_to(set(map(id, roots)), contents)
            self._names = frozenset().union(*(names_in(code) for code, _ in ran))
            # Excluded, as each call patches them: the entry points of TensorFlow's runtime.
            self._seen: dict[int, Any] = {id(target): target for target in intercept.targets()}
            self._kept: set[int] = set()
            self._behind: list[Any] = []  # what is reached through the graph of a functional model
            self._weakly = False
            self._reach(roots)
            self._weakly = True  # it may lead to the roots by ways that `contents` does not tell
            self._reach(self._behind)
            self._look_into_modules(ran)
            for entry in self._entries:
                if entry.kind != "space":
                    entry.note(entry.reference(), self._kept)
            del self._back, self._names, self._seen, self._kept, self._behind
        self._lay_out()

    def hold(self) -> bool:
        """Returns whether everything is unchanged."""
        if self._dead or (self.silence is not None and not self.silence.holds()):
            return False
        # The addresses of the second read are valid only if the first one agrees.
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
        """Compares the contents of objects whose words changed; if they agree, adopts the new words."""
        for _ in range(4):  # another thread may be writing
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

    # Collecting.

    def _add(self, kind: str, holder: Any, names: Any = None) -> None:
        try:
            reference: Any = weakref.ref(holder, self._dead.append)
        except TypeError:
            if self._weakly or id(holder) in self._back:
                return  # a strong reference would keep the roots alive
            self._kept.add(id(holder))
            reference = functools.partial(_itself, holder)
        self._entries.append(_Entry(kind, holder, names, reference))

    def _reach(self, roots: Iterable[Any]) -> None:
        """Collects what is reachable from objects by names in the code."""
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
            elif kind is EagerTensor:
                self._add("marks", holder)
            elif kind is types.MethodType:
                ahead.extend((holder.__func__, holder.__self__))
            elif issubclass(kind, functools.partial):
                self._add("partial", holder)
                ahead.extend((holder.func, holder.args, holder.keywords))
            elif issubclass(kind, wrapt.ObjectProxy):  # TensorFlow's of a dict
                ahead.append(holder.__wrapped__)
            elif issubclass(kind, classes.nodes):
                self._node(holder)
                continue
            elif issubclass(kind, _VARIABLES):
                self._own(holder)
                ahead.extend(value for name, value in vars(holder).items() if name in _OF_VARIABLES)
                continue
            elif issubclass(kind, threading.local) and vars(holder).keys() == {LOSSES}:
                self._add("losses", vars(holder))
                continue
            if not issubclass(kind, (*_ALONE, *classes.symbolic)) and kind.__module__ != keras_tracking.__name__:
                self._instance(holder, ahead)

    def _own(self, holder: Any) -> None:
        """Adds an object's class and attributes, without what these hold."""
        if type(getattr(holder, "__dict__", None)) is dict and memory.slot_of(holder) is not None:
            self._add("instance", holder, self._names)

    def _node(self, node: Any) -> None:
        """Collects a call in the graph of a functional model: its layer and arguments."""
        given = getattr(node, "arguments", node)  # Keras 2 has them in the node itself
        self._own(node)
        if given is not node:
            self._own(given)
        args, kwargs = _arguments_in(given)
        if kwargs:
            self._add("arguments", given)
        self._behind += [v for v in (*args, *kwargs.values()) if type(v) is np.ndarray]
        self._behind.append(vars(node).get("operation", vars(node).get("layer")))

    def _instance(self, holder: Any, ahead: deque[Any]) -> None:
        attributes = getattr(holder, "__dict__", None)
        if type(attributes) is not dict:
            return
        self._class(type(holder))
        self._own(holder)
        ahead.extend(value for name, value in attributes.items() if name in self._names)

    def _class(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        if memory.class_places(kind):
            self._add("class", kind)

    def _look_into_modules(self, ran: list[tuple[types.CodeType, dict[str, Any]]]) -> None:
        """Collects the globals that libraries' code reads, and what it reads of modules among them."""
        _modules.refresh()
        asked: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for code, space in ran:
            if not is_programs(code, space):
                for read, names in _modules.read_by(code, space):
                    asked.setdefault(id(read), (read, set()))[1].update(names)
        self._entries += [_space_entry(space, tuple(sorted(names))) for space, names in asked.values()]


class _Modules:
    """What code reads of the globals of modules, computed once per code, until modules come, go, or get other names."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, int], tuple[types.CodeType, tuple[tuple[dict[str, Any], frozenset[str]], ...]]] = {}
        # By the id of globals: these, their version, the globals of the modules among them, and all names.
        self._known: dict[int, tuple[dict[str, Any], int, dict[str, dict[str, Any]], frozenset[str]]] = {}

    def refresh(self) -> None:
        """Forgets what was computed if that may be different now, or is too much."""
        if max(len(self._read), len(self._known)) > tuning.max_known_codes:
            self._read, self._known = {}, {}
        for space, version, modules, names in list(self._known.values()):
            if _version_of(space) == version:
                continue
            self._known.pop(id(space), None)
            found = self._among(space)
            same_modules = found.keys() == modules.keys() and all(found[name] is modules[name] for name in found)
            if names != space.keys() or not same_modules:
                self._read = {}

    def read_by(self, code: types.CodeType, space: dict[str, Any]) -> Iterable[tuple[dict[str, Any], frozenset[str]]]:
        """Returns the globals that code may read, with the names: its own, and those of modules that it reaches.

        Nothing for code of modules that are not checked themselves.
        """
        known = self._read.get((id(code), id(space)))
        if known is None:
            reached = self._reach(names_in(code), space) if _is_checked(space) else ()
            known = self._read[id(code), id(space)] = code, tuple(reached)
        return known[1]

    def _reach(self, names: frozenset[str], space: dict[str, Any]) -> Iterator[tuple[dict[str, Any], frozenset[str]]]:
        seen = {id(space)}
        ahead = deque([space])
        while ahead:
            space = ahead.popleft()
            if read := names.intersection(space):
                yield space, read
            modules = self._among(space)
            for name in names.intersection(modules):
                module = modules[name]
                if id(module) not in seen and _is_checked(module):
                    seen.add(id(module))
                    ahead.append(module)

    def _among(self, space: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns the globals of the modules among some globals, by name."""
        known = self._known.get(id(space))
        if known is None:
            version = _version_of(space)  # read first, so that later writes are noticed
            # By type, as reading `__class__` would import a lazy module.
            found = {name: vars(v) for name, v in list(space.items()) if issubclass(type(v), types.ModuleType)}
            known = self._known[id(space)] = space, version, found, frozenset(space)
        return known[2]


def _version_of(space: dict[str, Any]) -> int:
    return memory.word(*memory.dict_places(space))


_modules = _Modules()


def _arguments_in(given: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of a call in the graph of a functional model, by what holds them."""
    held = vars(given)
    args, kwargs = (held.get(name) or held.get(f"call_{name}") for name in ("args", "kwargs"))
    return args or (), kwargs if type(kwargs) is dict else {}


def _is_checked(space: dict[str, Any]) -> bool:
    name = str(space.get("__name__"))
    return not name.startswith(_INSIDE) and name.partition(".")[0] not in _UNREAD


def _space_entry(space: dict[str, Any], names: tuple[str, ...]) -> _Entry:
    key = id(space), names
    version = _version_of(space)
    entry, seen = _spaces.get(key, (None, 0))
    if entry is None or (seen != version and not entry.agrees(space)):
        if len(_spaces) > tuning.max_known_codes:
            _spaces.clear()
        entry = _Entry("space", space, names, functools.partial(_itself, space))
        entry.note(space, _ALL)
    _spaces[key] = entry, version  # the version was read first, so a write in between is checked again
    return entry


def _itself(holder: Any) -> Any:
    return holder


def _leading_to(anchors: set[int], contents: Contents) -> set[int]:
    """Returns the ids of objects that hold an anchor, directly or indirectly, or something opaque."""
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


# By kind: the addresses of words, the addresses of words that are valid while the first ones are unchanged; contents.


def _instance_places(holder: Any) -> tuple[list[int], list[int]]:
    # If an instance's dict is replaced, the old one is freed, but its memory almost always stays readable.
    slot = memory.slot_of(holder) or id(holder)
    return [*memory.type_places(holder), slot, *memory.dict_places(holder.__dict__)], []


def _list_places(holder: Any) -> tuple[list[int], list[int]]:
    heads, items = memory.list_places(holder, tuning.max_watched_items)
    return [*memory.type_places(holder), *heads], items


def _losses_places(holder: Any) -> tuple[list[int], list[int]]:
    # Keras replaces the list by an empty one in each call that is not skipped.
    losses = holder.get(LOSSES)
    return memory.dict_places(holder), memory.list_places(losses, 0)[0][:1] if type(losses) is list else []


_PLACES: dict[str, Callable[[Any], tuple[list[int], list[int]]]] = {
    "instance": _instance_places,
    "dict": lambda holder: ([*memory.type_places(holder), *memory.dict_places(holder)], []),
    "space": lambda holder: (memory.dict_places(holder), []),
    "list": _list_places,
    "set": lambda holder: memory.set_places(holder, tuning.max_watched_items),
    "array": lambda holder: (memory.array_places(holder), []),
    "partial": lambda holder: (memory.partial_places(holder), []),
    "class": lambda holder: (memory.class_places(holder), []),
    "losses": _losses_places,
    "marks": lambda holder: (memory.dict_places(vars(holder)), []),
    "arguments": lambda holder: ([], memory.dict_places(_arguments_in(holder)[1])),
}


def _few(values: list[Any]) -> list[Any] | None:
    return values if len(values) <= 2 * tuning.max_watched_items else None


def _entries(held: dict[Any, Any], names: Any = None) -> list[Any]:
    return [part for item in dict.items(held) if names is None or item[0] in names for part in item]


# None: any write counts.
_VALUES: dict[str, Callable[[Any, Any], list[Any] | None]] = {
    "instance": lambda holder, names: [type(holder), *_entries(holder.__dict__, names)],
    "space": lambda holder, names: [holder.get(name, _NEVER) for name in names],
    "dict": lambda holder, _: _few([type(holder), *_entries(holder)]),
    "list": lambda holder, _: _few([type(holder), *list.__iter__(holder)]),
    "set": lambda holder, _: None,
    "partial": lambda holder, _: [holder.func, holder.args, holder.keywords],
    "array": lambda holder, _: None,
    "class": lambda holder, _: None,
    "losses": lambda holder, _: list(holder.get(LOSSES) or ()),
    "marks": lambda holder, _: [part for item in vars(holder).items() if item[1] is not None for part in item],
    "arguments": lambda holder, _: _entries(_arguments_in(holder)[1]),
}


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


_ALL = _Everything()


def _form(value: Any, kept: Any) -> tuple[str, Any]:
    """Returns a form by which `_is` recognizes a value later, without keeping the roots alive."""
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
    # It leads back to the roots, which a strong reference would keep alive.
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
