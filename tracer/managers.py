"""Managers: the context managers that a frame is inside of, and whether their cleanup could affect an error.

A deferred operation fails later than eagerly, so its error escapes the `with` and `try` statements around it. That
makes no difference if they let every error pass, do not inspect it, raise none of their own, and issue no operations.
This is decided from the actual manager in the frame, not its name, and from the bytecode of the cleanup code and the
values that it finds.

Relies on: the instructions that `dis` reports; `contextlib._GeneratorContextManager.gen`,
`contextlib.ExitStack._exit_callbacks`.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dis
import inspect
import io
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

MAX_KNOWN = 1000  # code objects
MAX_CALLS = 3  # depth of calls from cleanup code that is analysed


# `__exit__` methods, which are on the frame's stack as long as it is inside the statement.


def lets_pass(leave: Any, stored: frozenset[str], is_user: Callable[[CodeType], bool], passes: Any) -> bool:
    """Returns whether this `__exit__` lets every error pass and acts the same with and without one.

    `stored` has the attributes that the statement's body writes. `passes(frame)` decides the same for a suspended
    generator's frame.
    """
    manager = getattr(leave, "__self__", None)
    if type(leave) is BuiltinMethodType:
        return type(manager) in _SILENT
    if type(leave) is not MethodType or type(leave.__func__) is not FunctionType:
        return False
    function: Any = leave.__func__
    if function is _LEAVE_GENERATOR:
        frame = manager.gen.gi_frame if type(manager) is contextlib._GeneratorContextManager else None  # type: ignore
        return frame is not None and bool(passes(frame))
    if function in _PASSING:
        return True
    if function is _LEAVE_STACK:  # the managers entered so far, each with its own `__exit__`
        entered: Any = manager._exit_callbacks if type(manager) is contextlib.ExitStack else [(False, None)]  # type: ignore
        return all(lets_pass(leave, stored, is_user, passes) for _, leave in entered)
    cleanup = cleanup_of(function.__code__)
    if cleanup is None or not cleanup.returns_false:
        return False
    if not is_user(function.__code__):
        return True
    return not cleanup.reads_arguments and stored.isdisjoint(cleanup.attributes) and _calls_fit(function, manager, 0)


_SILENT: set[type] = {io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.FileIO, io.StringIO, io.BytesIO,
           type(threading.Lock()), type(threading.RLock())}  # fmt: skip
_LEAVE_GENERATOR = contextlib._GeneratorContextManager.__exit__
_LEAVE_STACK = contextlib.ExitStack.__exit__
_PASSING = {contextlib.nullcontext.__exit__, contextlib.redirect_stdout.__exit__, warnings.catch_warnings.__exit__}


def add_passing(*functions: Any) -> None:
    """Declares that these `__exit__` functions let every error pass, if their code does not show it."""
    _PASSING.update(functions)


class Load(NamedTuple):
    """A variable that code loads, and the attributes that it follows from there."""

    kind: str
    name: str
    path: list[str]


@dataclass(slots=True)
class Cleanup:
    """What cleanup code does: of a `finally` clause, or of an `__exit__` method."""

    returns_false: bool = True  # always returns False or None
    harmless: bool = True  # apart from what `chains` and `stores` resolve to
    reads_arguments: bool = False  # other than the first
    chains: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)  # loads: kind, name, attributes
    stores: list[tuple[str, str, str]] = field(default_factory=list)  # writes: object's kind and name, attribute
    attributes: set[str] = field(default_factory=set)  # names of the variables and attributes it loads, and `ITEMS`
    others: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)  # exception classes caught before it
    # What makes it raise an error of its own, in the place of the operation's:
    items: list[tuple[Load, Any, bool]] = field(default_factory=list)  # containers, keys or loads, whether written
    divisors: list[Load] = field(default_factory=list)
    converted: list[Load] = field(default_factory=list)  # to numbers

    def note(self, kind: str, name: str, path: tuple[str, ...]) -> None:
        """Adds a load."""
        self.chains.append((kind, name, path))
        self.attributes.update((name, *path))


_known: dict[int, tuple[CodeType, Cleanup | None]] = {}  # by the id of the code, which is kept alive


def cleanup_of(code: CodeType) -> Cleanup | None:
    """Returns what a cleanup function does, memoized; None for a generator or coroutine."""
    found = _known.get(id(code))
    if found is None:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        found = _known[id(code)] = code, _cleanup_of_function(code)
    return found[1]


def _cleanup_of_function(code: CodeType) -> Cleanup | None:
    if code.co_flags & _LATER:
        return None
    instructions = list(dis.get_instructions(code))
    cleanup = Cleanup()
    for n, instruction in enumerate(instructions):
        if instruction.opname == "RETURN_CONST":
            cleanup.returns_false &= instruction.argval is None or instruction.argval is False
        elif instruction.opname == "RETURN_VALUE":
            value = instructions[n - 1]
            constant = value.opname == "LOAD_CONST" and (value.argval is None or value.argval is False)
            cleanup.returns_false &= constant and not instruction.is_jump_target
    arguments = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    scan(cleanup, instructions, code.co_varnames[1:arguments])
    cleanup.harmless &= not code.co_exceptiontable
    return cleanup


_PLAIN_STEPS = frozenset({
    "BINARY_OP", "BUILD_LIST", "BUILD_MAP", "BUILD_STRING", "BUILD_TUPLE", "CACHE", "CALL", "CALL_KW", "COMPARE_OP",
    "CONVERT_VALUE", "COPY", "COPY_FREE_VARS", "FORMAT_SIMPLE", "FORMAT_VALUE", "FORMAT_WITH_SPEC", "IS_OP",
    "JUMP_FORWARD", "KW_NAMES", "LOAD_CONST", "NOP", "POP_TOP", "PRECALL", "PUSH_NULL", "RESUME", "RETURN_CONST",
    "RETURN_VALUE", "SWAP", "TO_BOOL", "UNARY_NEGATIVE", "UNARY_NOT",
})  # fmt: skip
_HANDLING = frozenset({
    "CHECK_EXC_MATCH", "DELETE_FAST", "JUMP_IF_NOT_EXC_MATCH", "POP_EXCEPT", "PUSH_EXC_INFO", "RAISE_VARARGS",
    "RERAISE",
})  # fmt: skip
_ROOTS = {"LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_FAST": "local", "LOAD_FAST_CHECK": "local",
          "LOAD_DEREF": "cell", "LOAD_CLASSDEREF": "cell"}  # fmt: skip
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _single(instructions: Iterable[dis.Instruction]) -> Iterator[tuple[str, Any]]:
    """Yields the name and argument of each instruction, splitting 3.13's combined ones in two."""
    for instruction in instructions:
        parts = instruction.opname.split("_FAST")
        if len(parts) == 3 and isinstance(instruction.argval, tuple):
            for part, value in zip(parts, instruction.argval, strict=False):
                yield part.strip("_") + "_FAST", value
        else:
            yield instruction.opname, instruction.argval


def scan(
    cleanup: Cleanup, instructions: Iterable[dis.Instruction], arguments: tuple[str, ...] = (), handling: bool = False
) -> None:
    """Adds the effects of these instructions to `cleanup`; `handling`: whether they are part of a handler."""
    raising = _Raising(cleanup)
    path: list[str] | None = None  # attributes of the load in progress
    root = "", ""
    copied: list[tuple[str, str]] = []  # objects with an attribute that is read and then written
    made: set[str] = set()  # local variables that hold a result computed here
    for name, value in _single(instructions):
        if name in _ATTRIBUTES and path is not None:
            path.append(str(value))
            continue
        raising.scan(name, value)
        if name == "COPY" and path == []:
            copied.append(root)
            continue
        if name == "STORE_ATTR":
            if path is None and copied:
                root, path = copied.pop(), []
            if path == []:
                cleanup.stores.append((*root, str(value)))
            cleanup.harmless &= path == []
            path = None
            continue
        if path is not None:
            cleanup.note(*root, tuple(path))
            path = None
        if name in _ROOTS:
            if value in arguments:
                cleanup.reads_arguments = True
                raising.load(None)
            elif value in made:
                raising.load(None)
            else:
                root, path = (_ROOTS[name], str(value)), []
                raising.load(Load(*root, path))
        elif name in ("STORE_FAST", "DELETE_FAST"):
            made.add(str(value))
        elif name in ("BINARY_SUBSCR", "STORE_SUBSCR"):
            cleanup.attributes.add(ITEMS)
        elif name == "KW_NAMES" or (name == "LOAD_CONST" and isinstance(value, tuple)):
            cleanup.harmless &= "exc_info" not in str(value)
        elif name not in _PLAIN_STEPS and not name.startswith("POP_JUMP") and not (handling and name in _HANDLING):
            cleanup.harmless = False
    if path is not None:
        cleanup.harmless = False


_DIVIDING = {2: "//", 6: "%", 8: "**", 11: "/", 15: "//", 19: "%", 21: "**", 24: "/"}  # arguments of BINARY_OP
_KEEPING = frozenset({"CACHE", "COPY", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL"})  # leave what is loaded in place
_CONVERTING = ("int", "float", "round")


class _Raising:
    """Finds what may raise for some values: divisions, lookups of items, conversions to numbers."""

    def __init__(self, cleanup: Cleanup) -> None:
        self._cleanup = cleanup
        self._loaded: list[Any] = []  # one after the other, last: a `Load`, a constant, or None for what is not known
        self._formats = False  # whether the statement has a text to format, whose `%` is no remainder
        self._converts = False  # whether it calls one of `_CONVERTING`
        self._copied = False
        self._updates = 0  # items read that are written next

    def load(self, load: Load | None) -> None:
        """Adds a load, whose attributes may follow; None for an argument, or what the cleanup has computed."""
        self._loaded.append(load)
        self._copied = False
        if load is None:
            self._cleanup.harmless &= not self._converts
        elif load.name in _CONVERTING:
            self._converts = True
        elif self._converts:
            self._cleanup.converted.append(load)

    def scan(self, name: str, value: Any) -> None:
        """Adds an instruction other than loads of variables and attributes."""
        cleanup, loaded = self._cleanup, self._loaded
        if name == "LOAD_CONST":
            loaded.append((value,))
            self._copied = False
            self._formats = self._formats or (isinstance(value, str) and "%" in value)
            cleanup.harmless &= not (self._converts and isinstance(value, (str, bytes)))
            return
        if name in _ROOTS:
            return
        if name in _KEEPING:
            self._copied = self._copied or name == "COPY"
            return
        self._updates += name == "BINARY_SUBSCR" and self._copied
        self._copied = False
        last = loaded[-1] if loaded else None
        if name == "BINARY_SUBSCR" or (name == "STORE_SUBSCR" and not self._updates):
            known = len(loaded) > 1 and last is not None and isinstance(loaded[-2], Load)
            if known:
                cleanup.items.append((loaded[-2], last, name == "STORE_SUBSCR"))
            cleanup.harmless &= known
        elif name == "STORE_SUBSCR":
            self._updates -= 1
        elif name == "BINARY_OP" and value in _DIVIDING and not (_DIVIDING[value] == "%" and self._formats):
            if isinstance(last, Load):
                cleanup.divisors.append(last)
            else:
                cleanup.harmless &= last is not None and last[0] != 0
        elif name == "POP_TOP" or name.startswith("STORE_"):
            self._formats = self._converts = False
        loaded.clear()


# Everything loaded must be plain: unable to issue an operation or inspect an error.

_SCALARS = frozenset({int, float, str, bool, bytes, type(None)})
_GROWING = {list: ("append", "clear"), collections.deque: ("append", "appendleft", "clear"), set: ("add", "clear"),
            logging.Logger: ("debug", "info", "warning", "error", "critical", "log")}  # fmt: skip
# Of `time` and `math`, those that raise for no number.
_FUNCTIONS = {print, len, round, abs, repr, time.time, time.time_ns, time.perf_counter, time.perf_counter_ns,
              time.monotonic, time.monotonic_ns, time.process_time, time.process_time_ns, time.strftime,
              math.fabs, math.isclose, math.isfinite, math.isinf, math.isnan}  # fmt: skip
_CLASSES = {int, float, str, bool}
ITEMS = "[]"  # stands for the items of any container, among the names that code reads or writes
_LISTED = 100  # largest container that is searched
_FAILURES: list[type] = []
_UNFORESEEN: list[type] = []


def add_failures(failures: tuple[type, ...], unforeseen: tuple[type, ...]) -> None:
    """Declares the exception classes of operations, and those among them that any operation may raise."""
    _FAILURES.extend(failures)
    _UNFORESEEN.extend(unforeseen)


def is_of_others(caught: Any) -> bool:
    """Returns whether this is an exception class, or a tuple of such, that no operation raises.

    Those that any operation may raise (out of memory) are not foreseen anywhere, and do not count.
    """
    if type(caught) is tuple:
        return all(map(is_of_others, caught))
    if not issubclass(type(caught), type) or not issubclass(caught, BaseException):
        return False
    return caught in _UNFORESEEN or not any(issubclass(caught, f) or issubclass(f, caught) for f in _FAILURES)


def _calls_fit(function: FunctionType, manager: Any, depth: int) -> bool:
    """Returns whether everything a function loads is plain at present, following calls up to `MAX_CALLS` deep."""
    cleanup = cleanup_of(function.__code__)
    if cleanup is None or not cleanup.harmless or depth > MAX_CALLS:
        return False
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    first = function.__code__.co_varnames[:1]

    def look_up(kind: str, name: str) -> Any:
        if kind == "cell":
            return cells[name].cell_contents
        if kind == "local":
            if (name,) != first or manager is None:
                raise LookupError
            return manager
        return global_of(function.__globals__, name)

    return are_plain(cleanup, look_up, depth)


def global_of(namespace: dict[str, Any], name: str) -> Any:
    """Returns a global variable or builtin."""
    return namespace[name] if name in namespace else getattr(builtins, name)


def are_plain(cleanup: Cleanup, look_up: Callable[[str, str], Any], depth: int = 0) -> bool:
    """Returns whether everything loaded is plain; `look_up(kind, name)` resolves the root of a chain."""
    try:
        if not all(_only_writes(look_up(kind, name), attribute) for kind, name, attribute in cleanup.stores):
            return False
        for kind, name, path in cleanup.chains:
            try:
                if not _is_plain(look_up(kind, name), path, depth):
                    return False
            except KeyError:  # not set yet: the cleanup writes it before it reads it
                if len(path) != 1 or (kind, name, *path) not in cleanup.stores:
                    return False
        if not _raises_nothing(cleanup, look_up):
            return False
        for kind, name, path in cleanup.others:
            caught = look_up(kind, name)
            for attribute in path:
                caught = getattr(caught, attribute) if issubclass(type(caught), ModuleType) else None
            if not is_of_others(caught):
                return False
    except (LookupError, AttributeError, ValueError):
        return False
    return True


def _raises_nothing(cleanup: Cleanup, look_up: Callable[[str, str], Any]) -> bool:
    """Returns whether items are there, divisors are no zeros, and what is converted can be."""

    def value_of(loaded: Any) -> Any:
        if not isinstance(loaded, Load):
            return loaded[0]
        value = look_up(loaded.kind, loaded.name)
        for name in loaded.path:
            value, _ = _attribute(value, name)
        return value

    for holder, key, written in cleanup.items:
        container, place = value_of(holder), value_of(key)
        if isinstance(container, dict):
            if not (written or type(container) is collections.Counter or place in container):
                return False
        elif not isinstance(place, int) or not -len(container) <= place < len(container):
            return False
    if not all(isinstance(divisor := value_of(load), (int, float)) and divisor != 0 for load in cleanup.divisors):
        return False
    return all(map(_converts, map(value_of, cleanup.converted)))


def _converts(value: Any) -> bool:
    """Returns whether a value, or a function that computes one, is no text, and neither None nor infinite."""
    return not isinstance(value, (str, bytes, type(None))) and (type(value) is not float or math.isfinite(value))


def _only_writes(value: Any, attribute: str) -> bool:
    """Returns whether writing an attribute runs no code."""
    kind: Any = type(value)
    known = (vars(c)[attribute] for c in kind.__mro__ if attribute in vars(c))
    return kind.__setattr__ is object.__setattr__ and not any(hasattr(type(v), "__set__") for v in known)


def _is_plain(value: Any, path: tuple[str, ...], depth: int) -> bool:
    """Returns whether the attribute chain `path` of a value leads to something plain, running no code."""
    for n, name in enumerate(path):
        last = n == len(path) - 1
        kind: Any = type(value)
        if kind in _GROWING:
            pops = kind is list and name == "pop" and len(value) > 0 and _has_scalars(value)
            return last and (name in _GROWING[kind] or pops)
        if kind in _SCALARS:
            return last and kind is str
        found, is_method = _attribute(value, name)
        if is_method and last:
            return _calls_fit(found, value, depth + 1)
        value = found
    if type(value) is FunctionType:
        return _calls_fit(value, None, depth + 1)
    if issubclass(type(value), type):
        return value in _CLASSES or issubclass(value, BaseException)
    if type(value) is BuiltinFunctionType:
        return value in _FUNCTIONS
    return type(value) in _SCALARS or _has_scalars(value)


def _attribute(value: Any, name: str) -> tuple[Any, bool]:
    """Returns an attribute, and whether it is a function of the class; raises `LookupError` if code would run."""
    kind: Any = type(value)
    if issubclass(kind, ModuleType):
        return getattr(value, name), False
    if kind.__getattribute__ is not object.__getattribute__:
        raise LookupError
    found: Any = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)
    held = getattr(value, "__dict__", {})
    if hasattr(type(found), "__set__"):  # a property, or a slot
        if type(found).__name__ != "member_descriptor":
            raise LookupError
        return found.__get__(value, kind), False
    if name in held or found is None:
        return held[name], False
    return found, type(found) is FunctionType


def _has_scalars(value: Any) -> bool:
    """Returns whether this is a small builtin container of scalars."""
    if type(value) not in (list, tuple, dict, collections.Counter) or len(value) > _LISTED:
        return False
    if isinstance(value, dict):
        return all(type(k) in _SCALARS and type(v) in _SCALARS for k, v in value.items())
    return all(type(v) in _SCALARS for v in value)
