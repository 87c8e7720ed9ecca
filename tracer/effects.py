"""Effects: what a library call did to Python beside its operations and its result, and who writes to its objects later.

A library call may be followed as one unit, its Python not run, if it runs no user code, leaves no trace in Python, and
finds its objects as they were. The first two are observed while it runs, by looking at everything that can be
reached from its objects before and after; the last is told by the `__setattr__` of the objects' classes.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import os
import random
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tracer.inputs import shape_like
from tracer.location import is_user
from tracer.private import EagerTensor, ops
from tracer.seeds import generator

MAX_OBJECTS = 100_000  # that are looked at for one call; a call with more is not known by its effects

# Calls into these are no user code, though their frames are part of a location: TensorFlow and Keras call them.
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})


def _files_of(name: str) -> list[str]:
    """Returns where a package's files are: Python may have been told to find it outside of its own folders."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    return [os.path.join(folder, "") for folder in spec.submodule_search_locations or ()] or [str(spec.origin)]


_HELPERS = tuple(
    path for name in ("absl", "ml_dtypes", "optree", "typing_extensions", "wrapt") for path in _files_of(name)
)

# What is done by these cannot be seen afterwards.
_OUTSIDE = frozenset({"_io", "_socket"})  # methods of classes from there
_ACTING = frozenset({"print", "input", "open", "putenv", "sleep", "warn", "warn_explicit"})

_LEAVES = (
    type, types.FunctionType, types.ModuleType, types.CodeType, np.ndarray, np.generic,
    EagerTensor, tf.DType, tf.TensorShape, weakref.ReferenceType, str, bytes, int, float, complex, type(None),
)  # fmt: skip

# What Keras' training loop notes on a model around the steps, in each `fit`: no layer asks for it.
_NOTES = frozenset({
    "history", "stop_training", "stop_evaluating", "stop_predicting", "train_function", "test_function",
    "predict_function", "_eval_epoch_iterator", "_self_setattr_tracking",
})  # fmt: skip


# Code that libraries make of strings (named tuples, data classes) belongs to the module it was made for.
_GENERATED = ("<string>", "<__array_function__")
_MODULES = (
    "namedtuple_",
    "tracer",
    "coexec",
    "keras",
    "tensorflow",
    "numpy",
    "optree",
    "absl",
    "collections",
    "inspect",
    "dataclasses",
)


# Names of modules whose code, and that of modules inside of them, is taken for a library's because the program says so.
registered: set[str] = set()


def runs_user_code(frame: types.FrameType) -> bool:
    """Returns whether this is code of the program itself, or of a library that is not known to be harmless."""
    return is_programs(frame.f_code, frame.f_globals)


def is_programs(code: types.CodeType, namespace: dict[str, Any]) -> bool:
    """Returns the same of code with these globals."""
    if not is_user(code) or (registered and _is_inside(str(namespace.get("__name__")))):
        return False
    name = code.co_filename
    if name.startswith(_GENERATED):
        return not str(namespace.get("__name__")).startswith(_MODULES)
    if name.startswith(_HELPERS):
        return False
    return name.startswith(_INSTALLED) or not name.startswith(_STANDARD)


def is_of_the_standard_library(frame: types.FrameType) -> bool:
    """Returns whether this is code that comes with Python."""
    name = frame.f_code.co_filename
    return name.startswith("<frozen") or (name.startswith(_STANDARD) and not name.startswith(_INSTALLED))


def _is_registered(frame: types.FrameType) -> bool:
    return _is_inside(str(frame.f_globals.get("__name__")))


def _is_inside(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:count]) in registered for count in range(1, len(parts) + 1))


def _namespaces() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the registered modules, their classes and functions, with what they hold now."""
    if not registered:
        return []
    modules = [module for name, module in list(sys.modules.items()) if _is_inside(name)]
    members = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, (type, types.FunctionType)) and value.__module__ == module.__name__
    ]
    return [(holder, {**vars(holder), **_defaults(holder)}) for holder in (*modules, *members)]


def _defaults(holder: Any) -> dict[str, Any]:
    """Returns the default arguments of a function, which may be changed in place; its door has none of its own."""
    function = inspect.unwrap(holder) if isinstance(holder, types.FunctionType) else None
    if function is None:
        return {}
    return {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}


# What was called before, and does nothing that matters whoever calls it: code and functions by their ids.
_harmless: dict[int, Any] = {}
MAX_HARMLESS = 20_000


def _note_harmless(called: Any) -> None:
    if len(_harmless) >= MAX_HARMLESS:
        _harmless.clear()
    _harmless[id(called)] = called


class Effects:
    """Watches one call: `reason` says afterwards what it did that its operations and result do not show.

    `given_up` is called as soon as there is one. `proof` is asked whether code of the program's, and what that calls,
    does nothing but compute.
    """

    def __init__(self, roots: list[Any], given_up: Callable[[], None] = lambda: None, proof: Any = None) -> None:
        self._roots, self._given_up, self._proof = roots, given_up, proof
        self.reason: str | None = None
        self.runs_user_code = self._collecting = False
        self.objects: list[Any] = []  # whose attributes the call may have read
        self.read: set[int] = set()  # the ids of tensors from before whose values Python has read
        self.held: set[int] = set()  # the ids of tensors that the objects hold

    def __enter__(self) -> Effects:
        self._namespaces = _namespaces()
        self._before = _contents([*self._roots, *(held for _, held in self._namespaces)])
        if self._before is None:
            self.reason = f"it can reach more than {MAX_OBJECTS} objects"
        else:
            self._random, self._generator = _random_states(), generator()
            self._newest = ops.uid()
            self._collecting = gc.isenabled()
            gc.disable()  # its callbacks are somebody's Python, and no part of the call
            sys.setprofile(self._profile)
        return self

    def averted(self) -> _Averted:
        """Looks away while the answer is entered: from what is known to have no effects."""
        return _Averted(self)  # not kept, which would be a cycle, and whoever watches holds the call's tensors

    def _profile(self, frame: Any, event: str, function: Any) -> None:
        # Called a hundred thousand times for a training step: most of it asks what has been asked before.
        if event == "call":
            code = frame.f_code
            if id(code) in _harmless:
                return
            if runs_user_code(frame):
                if self._proof is not None and self._proof.admits(frame):
                    return
                self.runs_user_code = True
                module = frame.f_globals.get("__name__")
                reason = f"it runs {code.co_name} of {module} ({code.co_filename}:{code.co_firstlineno})"
                self._refuse(reason if self._proof is None else f"{reason}, and {self._proof.reason}")
            elif registered and code.co_freevars and _is_registered(frame):
                self._refuse(f"{code.co_name} is a closure, whose variables nobody watches")
            elif code.co_name == "convert_to_numpy":  # of Keras
                if isinstance(frame.f_locals.get("x"), EagerTensor):
                    self._reads(frame.f_locals["x"])
            elif not registered and not code.co_filename.startswith(_GENERATED):
                _note_harmless(code)
        elif event == "c_call":
            if self._proof is not None and not self._proof.admits_call(frame, function):
                self._refuse(self._proof.reason)
            elif id(function) in _harmless:
                return
            holder = getattr(function, "__self__", None)
            if type(holder) is EagerTensor:
                if function.__name__ == "_numpy_internal" and frame.f_code is not shape_like.__code__:
                    self._reads(holder)
            elif function.__name__ in _ACTING or type(holder).__module__ in _OUTSIDE:
                self._refuse(f"it calls {function.__qualname__}")
            elif type(holder) is types.ModuleType:
                _note_harmless(function)

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        self._end()
        self._given_up()

    def _end(self) -> None:
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
        if _random_states() != self._random:
            self.reason = "it draws from the random numbers of Python or NumPy"
            return
        for (holder, held), (_, held_now) in zip(self._namespaces, _namespaces(), strict=False):
            if held.keys() != held_now.keys() or any(held[name] is not held_now[name] for name in held):
                self.reason = f"it changes {_describe(holder, held, held.values(), held_now, held_now.values())}"
                return
        after = _contents([holder for holder, _, _ in before.values()], before.keys()) or {}
        for key, (holder, names, values) in before.items():
            _, names_now, values_now = after[key]
            if len(values) != len(values_now) or any(map(_differs, values, values_now)) or names != names_now:
                self.reason = f"it changes {_describe(holder, names, values, names_now, values_now)}"
                return
        self.objects = [holder for holder, names, _ in before.values() if names is not None]
        tensors = [v for _, _, values in before.values() for v in values if isinstance(v, EagerTensor)]
        self.held = {id(each) for v in tensors for each in (v, getattr(v, "_value", v))}


class _Averted:
    __slots__ = ("_effects",)

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    def __enter__(self) -> None:
        if self._effects.reason is None:
            sys.setprofile(None)

    def __exit__(self, *_: object) -> None:
        if self._effects.reason is None:
            sys.setprofile(self._effects._profile)


def _differs(one: Any, other: Any) -> bool:
    return one is not other


def _describe(holder: Any, names: Any, values: Any, names_now: Any, values_now: Any) -> str:
    kind = type(holder).__name__
    if names is None or names_now is None:
        return f"a {kind}"
    before, after = dict(zip(names, values, strict=True)), dict(zip(names_now, values_now, strict=True))
    changed = [n for n in {**before, **after} if n not in before or n not in after or before[n] is not after[n]]
    return f"{', '.join(map(str, changed))} of a {kind}"


def _random_states() -> Any:
    numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in numpy.items()}


def _contents(roots: list[Any], only: Any = None) -> dict[int, tuple[Any, Any, tuple[Any, ...]]] | None:
    """Returns by id each object that can be reached, with its attributes' names (None: a container) and what it holds.

    `only`: the ids of those to look at, and no further.
    """
    found: dict[int, tuple[Any, Any, tuple[Any, ...]]] = {}
    ahead = deque(roots)
    while ahead:
        holder = ahead.popleft()
        if isinstance(holder, _LEAVES) or id(holder) in found or (only is not None and id(holder) not in only):
            continue
        names: Any = None
        if isinstance(holder, dict):
            values = (*holder.keys(), *holder.values())
        elif isinstance(holder, (list, tuple, set, frozenset, deque)):
            values = tuple(holder)
        elif isinstance(holder, (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)):
            values = (holder.__self__,)
        elif isinstance(holder, functools.partial):
            values = (holder.func, holder.args, holder.keywords)
        else:
            attributes = getattr(holder, "__dict__", None)
            if type(attributes) is not dict:
                continue
            if isinstance(holder, keras.Model):
                attributes = {name: value for name, value in attributes.items() if name not in _NOTES}
            names, values = tuple(attributes), tuple(attributes.values())
        found[id(holder)] = (holder, names, values)
        if len(found) > MAX_OBJECTS:
            return None
        if only is None:
            ahead.extend(values)
    return found


# Writes.

_MISSING = object()
_PLAIN = (int, float, str, bool)
_CHANGING = (np.ndarray, list, dict, set, bytearray)  # `self.scale *= 2` writes the same array back
_watched: dict[int, tuple[Any, weakref.WeakSet[Any]]] = {}  # by the object's id: a reference to it, who watches
_hooked: weakref.WeakSet[type] = weakref.WeakSet()


class Watcher:
    """Somebody who relies on objects' attributes; `changed` is called when one of them is written."""

    __slots__ = ("__weakref__",)

    def changed(self, what: str) -> None:
        """Takes note that `what` is no longer what it was."""
        raise NotImplementedError


def watch(objects: list[Any], watcher: Watcher) -> None:
    """Makes writes to attributes of these objects, as far as they are Keras' or derived from Keras' classes, known."""
    for holder in objects:
        kind = type(holder)
        if not any(base.__module__.startswith("keras.") for base in kind.__mro__):
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


def written(holder: Any, what: str) -> None:
    """Tells those who watch an object that `what` of it is no longer what it was."""
    entry = _watched.get(id(holder))
    if entry is not None:
        for watcher in list(entry[1]):
            watcher.changed(f"{what} of {type(holder).__name__}")


def _forget(key: int, _: Any) -> None:
    _watched.pop(key, None)


def _hook(kind: type) -> None:
    if kind in _hooked:
        return
    original: Any = kind.__setattr__

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if id(self) not in _watched or (name in _NOTES and isinstance(self, keras.Model)):
            original(self, name, value)
            return
        before = self.__dict__.get(name, _MISSING)
        original(self, name, value)
        after = self.__dict__.get(name, _MISSING)
        if isinstance(after, _CHANGING):
            same = False
        else:
            same = after is before or (type(after) is type(before) and type(after) in _PLAIN and after == before)
        if not same or name == "__class__":
            written(self, name)

    kind.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]
    _hooked.add(kind)
