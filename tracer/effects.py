"""Effects: what a library call does to Python besides its operations and result, and later writes to its objects.

A library call may be memoized, and its Python skipped, if it runs no user code, changes nothing in Python, and its
objects are unchanged. The first two are observed: a profile function sees the calls, and everything reachable from its
objects is compared before and after. Later changes are reported by hooks on the `__setattr__` of their classes.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import os
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from datetime import datetime_CAPI
from typing import Any

import numpy as np
import tensorflow as tf

from tracer import hooks, keras_packages, random_states, warning_filters
from tracer.faults import absorbs, passes
from tracer.keras_packages import LOSSES, classes
from tracer.location import files_of, is_user
from tracer.op import array_in, same
from tracer.private import EagerTensor, ops
from tracer.seeds import generator

# By id, objects with the names of their attributes (None for a container) and the values that they hold.
Contents = dict[int, tuple[Any, Any, tuple[Any, ...]]]

MAX_OBJECTS = 100_000  # objects compared per call; a call that reaches more is not memoized

# Code in these is not user code, although its frames are part of locations, since TensorFlow and Keras call it.
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})


_HELPERS = tuple(
    path for name in ("absl", "ml_dtypes", "optree", "typing_extensions", "wrapt") for path in files_of(name)
)

# C functions whose effects cannot be observed afterwards.
_OUTSIDE = frozenset({"_io", "_socket"})  # methods of classes in these modules
_ACTING = frozenset({"print", "input", "open", "putenv", "sleep"})

_LEAVES = (
    type, types.FunctionType, types.ModuleType, types.CodeType, np.ndarray, np.generic,
    EagerTensor, tf.DType, tf.TensorShape, weakref.ReferenceType, str, bytes, int, float, complex, type(None),
)  # fmt: skip

# Attributes that Keras' training loop sets on a model around its steps; no layer reads them.
_NOTES = frozenset({
    "history", "stop_training", "stop_evaluating", "stop_predicting", "train_function", "test_function",
    "predict_function", "_eval_epoch_iterator",
})  # fmt: skip
# Attributes that say nothing of later calls: whether TensorFlow tracks what is written now, which is set and restored,
# and the last result of a metric of Keras 2.
_PASSING = frozenset({"_self_setattr_tracking", "_call_result"})


# Code that libraries generate from strings (named tuples, data classes) counts as that of the module it was made for.
_GENERATED = ("<string>", "<__array_function__")
_MODULES = (
    "namedtuple_",
    "tracer",
    "coexec",
    *keras_packages.NAMES,
    "tensorflow",
    "numpy",
    "optree",
    "absl",
    "collections",
    "inspect",
    "dataclasses",
)


# Modules that the program has declared libraries, by name; submodules are included.
registered: set[str] = set()


def runs_user_code(frame: types.FrameType) -> bool:
    """Returns whether a frame runs code of the program, or of a library not known to be harmless."""
    return is_programs(frame.f_code, frame.f_globals)


def is_programs(code: types.CodeType, namespace: dict[str, Any]) -> bool:
    """Returns the same as `runs_user_code`, for code with these globals."""
    if not is_user(code, namespace) or (registered and is_registered(str(namespace.get("__name__")))):
        return False
    name = code.co_filename
    if name.startswith(_GENERATED):
        return not str(namespace.get("__name__")).startswith(_MODULES)
    if name.startswith(_HELPERS):
        return False
    return name.startswith(_INSTALLED) or not name.startswith(_STANDARD)


def is_of_the_standard_library(frame: types.FrameType) -> bool:
    """Returns whether a frame runs code of the standard library."""
    name = frame.f_code.co_filename
    return name.startswith("<frozen") or (name.startswith(_STANDARD) and not name.startswith(_INSTALLED))


def _is_registered(frame: types.FrameType) -> bool:
    return is_registered(str(frame.f_globals.get("__name__")))


def is_registered(module: str) -> bool:
    """Returns whether the program has declared a module, or one around it, a library."""
    parts = module.split(".")
    return any(".".join(parts[:count]) in registered for count in range(1, len(parts) + 1))


def _namespaces() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the registered modules, their classes and functions, each with its current attributes."""
    if not registered:
        return []
    modules = [module for name, module in list(sys.modules.items()) if is_registered(name)]
    members = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, (type, types.FunctionType)) and value.__module__ == module.__name__
    ]
    return [(holder, {**vars(holder), **_defaults(holder)}) for holder in (*modules, *members)]


def _defaults(holder: Any) -> dict[str, Any]:
    """Returns the defaults of a function, whose containers may be mutated in place; its wrapper has none of its own."""
    function = inspect.unwrap(holder) if isinstance(holder, types.FunctionType) else None
    if function is None:
        return {}
    return {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}


# Known code objects and C functions, by id, that are harmless for any caller.
_harmless: dict[int, Any] = {}
MAX_HARMLESS = 20_000


def _note_harmless(called: Any) -> None:
    if len(_harmless) >= MAX_HARMLESS:
        _harmless.clear()
    _harmless[id(called)] = called


class Effects:
    """Observes one call inside a `with`; `reason` then says what it did besides its operations and result.

    `given_up` is called as soon as there is a reason. `proof` decides whether user code, and what it calls, only
    computes. With `lightly`, what is reachable is compared, but the calls are not seen, which triple the time.
    """

    def __init__(
        self, roots: list[Any], given_up: Callable[[], None] = lambda: None, proof: Any = None, lightly: bool = False
    ) -> None:
        self.roots, self._given_up, self._proof = roots, given_up, proof
        self._lightly = lightly
        self._asks: Any = () if proof is None else proof.asks
        self.reason: str | None = None
        self.silence: warning_filters.Silence | None = None  # if it warns, and that is not shown
        self.runs_user_code = self._collecting = self._watching = False
        self.objects: list[Any] = []  # objects whose attributes the call may have read
        self.read: set[int] = set()  # ids of older tensors whose values Python has read
        self.held: set[int] = set()  # ids of tensors that the objects hold
        self.contents: Contents = {}  # of everything reachable from the roots
        self.ran: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}  # code that ran, with its globals, by id

    def __enter__(self) -> Effects:
        self._namespaces = _namespaces()
        self._before = _contents([*self.roots, *(held for _, held in self._namespaces)])
        if self._before is None:
            self.reason = f"it can reach more than {MAX_OBJECTS} objects"
        else:
            self._marked = _marked(self._before)
            self._random, self._generator = random_states.states(), generator()
            self._newest = ops.uid()
            self._collecting = gc.isenabled()
            gc.disable()  # finalizers and callbacks are not part of the call
            if self._lightly:
                return self
            self._watching = True
            sys.setprofile(self._profile)
            if self._proof is not None:
                self._proof.start(self._refuse)
        return self

    @property
    def runs_registered(self) -> bool:
        """Whether code may have run of a module that the program has declared a library: it may hide its state."""
        if not registered:
            return False
        return self._lightly or any(is_registered(str(names.get("__name__"))) for _, names in self.ran.values())

    def averted(self) -> _Averted:
        """Returns a context manager that suspends observation while a call known to have no effects is answered."""
        return _Averted(self)  # not kept: the cycle would keep the call's tensors alive

    def stop(self) -> None:
        """Stops observing after a fault of the runtime."""
        self.reason = self.reason or "the runtime failed"
        self._end()

    def _profile(self, frame: Any, event: str, function: Any) -> None:
        # Runs a hundred thousand times for a training step, mostly for known code.
        try:
            if event == "call":
                code = frame.f_code
                if id(code) not in self.ran:
                    self.ran[id(code)] = code, frame.f_globals
                if id(code) not in _harmless:
                    self._calls(frame, code)
            elif event == "c_call":
                # Most are called by libraries, and harmless.
                if id(function) not in _harmless or id(frame.f_code) in self._asks:
                    self._calls_c(frame, function)
        except Exception as error:  # it would surface in the code under observation
            if not absorbs(error):
                raise
            self._refuse(f"the runtime failed: {error}")

    def _calls(self, frame: Any, code: types.CodeType) -> None:
        """Checks Python code that is about to run."""
        if runs_user_code(frame):
            if self._proof is not None and self._proof.admits(frame):
                return
            self.runs_user_code = True
            module = frame.f_globals.get("__name__")
            reason = f"it runs {code.co_name} of {module} ({code.co_filename}:{code.co_firstlineno})"
            self._refuse(reason if self._proof is None else f"{reason}, and {self._proof.reason}")
        elif registered and code.co_freevars and _is_registered(frame):
            self._refuse(f"{code.co_name} is a closure, whose variables nobody watches")
        elif warning_filters.shows(code):
            self._refuse("it warns")
        elif code.co_name == "convert_to_numpy":  # Keras' function
            if isinstance(frame.f_locals.get("x"), EagerTensor):
                self._reads(frame.f_locals["x"])
        elif not registered and not code.co_filename.startswith(_GENERATED):
            _note_harmless(code)

    def _calls_c(self, frame: Any, function: Any) -> None:
        """Checks a call of a C function."""
        if self._proof is not None and not self._proof.admits_call(frame, function):
            self._refuse(self._proof.reason)
        elif id(function) in _harmless:
            return
        holder = getattr(function, "__self__", None)
        if type(holder) is EagerTensor:
            if function.__name__ == "_numpy_internal" and frame.f_code is not array_in.__code__:
                self._reads(holder)
        elif function in warning_filters.ISSUING and warning_filters.is_known():
            self.silence = self.silence or warning_filters.Silence()
            self.silence.add(frame)
        elif function in warning_filters.ISSUING or function.__name__ in _ACTING or type(holder).__module__ in _OUTSIDE:
            self._refuse(f"it calls {function.__qualname__}")
        elif type(holder) is types.ModuleType:
            _note_harmless(function)

    def refuse(self, reason: str) -> None:
        """Ends the observation: the call cannot be memoized."""
        if self.reason is None:
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        self._end()
        self._given_up()

    def _end(self) -> None:
        self._watching = False
        if self._proof is not None:
            self._proof.stop()
        if sys.getprofile() == self._profile:
            sys.setprofile(None)
        if self._collecting:
            self._collecting = False
            gc.enable()

    def _reads(self, tensor: Any) -> None:
        if tensor._id < self._newest:
            self.read.add(id(tensor))

    def __exit__(self, raised: Any, *_: Any) -> None:
        self._end()
        before, self._before = self._before, None
        if raised is not None:
            self.reason = "it raised an exception"
        if self.reason is not None or before is None:
            return
        if generator() is not self._generator:
            self.reason = "it sets TensorFlow's seed"
            return
        if self.silence is not None and not self.silence.holds():
            self.reason = "it changes which warnings are shown"
            return
        if random_states.states() != self._random:
            self.reason = "it draws from the random numbers of Python or NumPy"
            return
        for (holder, held), (_, held_now) in zip(self._namespaces, _namespaces(), strict=False):
            if held.keys() != held_now.keys() or any(held[name] is not held_now[name] for name in held):
                self.reason = f"it changes {_describe(holder, held, held.values(), held_now, held_now.values())}"
                return
        for holder, names, values in before.values():
            names_now, values_now = _held_by(holder) or (None, ())
            if not _same_contents(names, values, names_now, values_now):
                self.reason = f"it changes {_describe(holder, names, values, names_now, values_now)}"
                return
        if _marked(before) != self._marked:
            self.reason = "it changes what is noted on a tensor that an object holds"
            return
        found = (v for _, _, values in before.values() for v in values if _is_opaque(v))
        if (opaque := next(found, None)) is not None:
            self.reason = f"it can call {str(opaque)[:100]}, of which nothing is seen"
            return
        self.contents = before
        self.objects = [holder for holder, names, _ in before.values() if names is not None]
        tensors = [v for _, _, values in before.values() for v in values if isinstance(v, EagerTensor)]
        self.held = {id(each) for v in tensors for each in (v, getattr(v, "_value", v))}


class _Averted:
    __slots__ = ("_effects",)

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    def __enter__(self) -> None:
        if self._effects._watching:
            sys.setprofile(None)
            if self._effects._proof is not None:
                self._effects._proof.suspend()

    def __exit__(self, *_: object) -> None:
        # May also run for lookups and finalizers after observation has ended.
        if self._effects._watching:
            if self._effects._proof is not None:
                self._effects._proof.resume()
            sys.setprofile(self._effects._profile)  # last: what comes after it is seen


def _same_contents(names: Any, values: Any, names_now: Any, values_now: Any) -> bool:
    """Returns whether an object holds what it held; attributes may have been deleted and set again."""
    if len(values) != len(values_now):
        return False
    if names == names_now:
        return all(map(operator.is_, values, values_now))
    if names is None or names_now is None or frozenset(names) != frozenset(names_now):
        return False
    now = dict(zip(names_now, values_now, strict=True))
    return all(now[name] is value for name, value in zip(names, values, strict=True))


def _describe(holder: Any, names: Any, values: Any, names_now: Any, values_now: Any) -> str:
    kind = type(holder).__name__
    if names is None or names_now is None:
        return f"a {kind}"
    before, after = dict(zip(names, values, strict=True)), dict(zip(names_now, values_now, strict=True))
    changed = [n for n in {**before, **after} if n not in before or n not in after or before[n] is not after[n]]
    return f"{', '.join(map(str, changed))} of a {kind}"


_METHODS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
MAX_KINDS = 10_000
_leaf_kinds: set[type] = set()  # types of which an instance was found to hold nothing relevant


# What a method of C may belong to: it does the same each time. (Of pybind11's functions that is a capsule.)
_UNCHANGING = types.ModuleType, type, str, bytes, int, float, tuple, frozenset, type(None), type(datetime_CAPI)
# Callables of C that call nothing else, or Python's functions, which are seen.
_SEEN = (
    type, types.FunctionType, types.MethodType, types.GenericAlias, staticmethod, classmethod, np.ufunc,
    operator.attrgetter, operator.itemgetter, type(functools.lru_cache(len)), weakref.ReferenceType,
)  # fmt: skip


@functools.lru_cache(MAX_KINDS)
def _is_of_c(kind: Any) -> bool:
    """Returns whether calling an object of this class runs C code that nobody sees."""
    found = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
    return type(found) is types.WrapperDescriptorType and not issubclass(kind, _SEEN)


def _is_opaque(value: Any) -> bool:
    """Returns whether this calls C code on data that nobody compares: an iterator's `__next__`, a dict's `get`.

    A profile function does not even see all such calls.
    """
    kind: Any = type(value)
    if kind is functools.partial:
        kind = type(value.func)
        return _is_of_c(kind)
    return _is_of_c(kind) and not isinstance(getattr(value, "__self__", value), _UNCHANGING)


def _held_by(holder: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns an object's attribute names (None for a container) and the values it holds; None if it is a leaf."""
    if isinstance(holder, (*_LEAVES, *classes.symbolic)):
        # A proxy takes its `__class__` from its target, so its type tells nothing about other instances.
        if holder.__class__ is type(holder):
            if len(_leaf_kinds) >= MAX_KINDS:
                _leaf_kinds.clear()
            _leaf_kinds.add(type(holder))
        return None
    if issubclass(type(holder), dict):  # not by the methods of a subclass, which may load modules, say
        return None, (*dict.keys(holder), *dict.values(holder))
    if isinstance(holder, dict):  # a proxy
        return None, (*holder.keys(), *holder.values())
    if isinstance(holder, (list, tuple, set, frozenset, deque)):
        return None, tuple(holder)
    if isinstance(holder, _METHODS):
        return None, (holder.__self__,)
    if isinstance(holder, functools.partial):
        return None, (holder.func, holder.args, holder.keywords)
    attributes = getattr(holder, "__dict__", None)
    if type(attributes) is not dict:
        return None
    if isinstance(holder, classes.models):
        attributes = {name: value for name, value in attributes.items() if name not in _NOTES and name not in _PASSING}
    elif isinstance(holder, threading.local) and attributes.get(LOSSES) == []:
        attributes = {name: value for name, value in attributes.items() if name != LOSSES}  # often replaced by another
    return tuple(attributes), tuple(attributes.values())


def _contents(roots: list[Any]) -> Contents | None:
    """Returns the contents of every reachable object; None if there are more than `MAX_OBJECTS`."""
    found: Contents = {}
    leaves = _leaf_kinds
    ahead = deque(roots)
    while ahead:
        holder = ahead.popleft()
        if type(holder) in leaves or id(holder) in found:
            continue
        held = _held_by(holder)
        if held is None:
            continue
        found[id(holder)] = (holder, *held)
        if len(found) > MAX_OBJECTS:
            return None
        ahead.extend(held[1])
    return found


def _marked(contents: Contents) -> dict[int, list[tuple[str, int]]]:
    """Returns what Keras has noted on the tensors that objects hold, as names and ids, by the ids of the tensors."""
    held = (v for _, _, values in contents.values() for v in values if type(v) is EagerTensor and vars(v))
    marks = {id(v): [(name, id(mark)) for name, mark in vars(v).items() if mark is not None] for v in held}
    return {number: noted for number, noted in marks.items() if noted}


# Writes.

_MISSING = object()
_PLAIN = (int, float, str, bool)
_CHANGING = (np.ndarray, list, dict, set, bytearray)  # `self.scale *= 2` assigns the same array
_watched: dict[int, tuple[Any, weakref.WeakSet[Any]]] = {}  # by object id: a reference to it, its watchers
_hooks = hooks.ClassHooks(
    __name__,
    "`__setattr__` of Keras' classes and of the program's that derive from them",
    "a write to an object that a followed call has read invalidates what is known of that call",
    hooks.PROCESS,
    "__setattr__",
)
hooks.Hooks(
    __name__,
    "`sys.setprofile` on the calling thread, `gc.disable`",
    "what a library call does to Python is watched; not where another profile function is set",
    "a library call is learnt or confirmed",
)


class Watcher:
    """Relies on attributes of objects; `changed` is called when one of them is written."""

    __slots__ = ("__weakref__", "watched")

    def __init__(self) -> None:
        self.watched: set[int] = set()  # the ids of these objects

    def changed(self, what: str) -> None:
        """Invalidates what depended on `what`."""
        raise NotImplementedError


def watch(objects: list[Any], watcher: Watcher) -> None:
    """Registers `watcher` for writes to attributes of those objects whose class is, or derives from, one of Keras'."""
    for holder in objects:
        kind = type(holder)
        if not any(base.__module__.startswith(keras_packages.MODULES) for base in kind.__mro__):
            continue
        _hook(kind)
        key = id(holder)
        if key not in _watched:
            try:
                reference: Any = weakref.ref(holder, functools.partial(_forget, key))
            except TypeError:
                reference = holder
            _watched[key] = (reference, weakref.WeakSet())
        _watched[key][1].add(watcher)
        watcher.watched.add(key)


def watch_as(watcher: Watcher, known: Watcher) -> None:
    """Registers `watcher` for writes to the objects that `known` relies on, as far as they are alive."""
    for key in known.watched:
        if (entry := _watched.get(key)) is not None:
            entry[1].add(watcher)
            watcher.watched.add(key)


def written(holder: Any, what: str) -> None:
    """Notifies the watchers of an object that its `what` has changed."""
    entry = _watched.get(id(holder))
    if entry is not None:
        for watcher in list(entry[1]):
            watcher.changed(f"{what} of {type(holder).__name__}")


def _forget(key: int, _: Any) -> None:
    _watched.pop(key, None)


def _hook(kind: type) -> None:
    """Replaces `__setattr__` of a class by one that notifies watchers."""
    if kind in _hooks:
        return
    original: Any = kind.__setattr__

    @passes
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if id(self) not in _watched or name in _PASSING or (name in _NOTES and isinstance(self, classes.models)):
            original(self, name, value)
            return
        before = self.__dict__.get(name, _MISSING)
        original(self, name, value)
        after = self.__dict__.get(name, _MISSING)
        if isinstance(after, _CHANGING) or name == LOSSES:  # which is kept elsewhere
            kept = False
        else:
            kept = after is before or (type(after) in _PLAIN and same(after, before))
        if not kept or name == "__class__":
            written(self, name)

    _hooks.add(kind, __setattr__)
