"""Redirect: routes the calls made by a function decorated with `regions="all"`, at any depth, so they can be memoized.

A function of the program, or of an unregistered library, is called through a wrapper while a call is followed, and as
its twin otherwise. TensorFlow's and Keras' functions have their own wrappers (`tracer.library`).
"""

from __future__ import annotations

import inspect
import time
import types
import weakref
from typing import Any

from coexec.base.tuning import tuning
from tracer.effects import is_programs
from tracer.faults import absorbs, passes
from tracer.intercept import current_handler
from tracer.library import is_wrapper
from tracer.twin import looks_at_frames, twin_of
from tracer.value_stack import available

_UNSUITABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE

Function = types.FunctionType


class Helper:
    """A function that is called through the redirect; refers to it weakly."""

    __slots__ = ("__weakref__", "_code", "_defaults", "_named", "_of", "_twin", "_wrapper", "active", "known", "misses")

    def __init__(self, function: Function, twin: Function | None) -> None:
        self._of = weakref.ref(function)
        self._code, self._defaults, self._named = function.__code__, function.__defaults__, function.__kwdefaults__
        self._twin = twin
        self._wrapper = None if twin is None else _wrapper(self, twin)
        self.active = 0  # running calls of it: nested ones run unmemoized
        self.known = False  # whether a call of it has been skipped
        self.misses = 0  # calls since one was skipped

    def run(self, function: Function) -> Function:
        """Returns its twin, or the function itself where it has none."""
        return self._twin or function

    def wrapper(self, function: Function) -> Any:
        """Returns a wrapper that makes its calls library calls; not cached without a twin, as it holds the function."""
        return self._wrapper or _wrapper(self, function)

    def runs(self, function: Function) -> bool:
        """Returns whether `function` is the one that the redirect runs."""
        return function is (self._twin or self._of())

    def is_of(self, function: Function) -> bool:
        """Returns whether this is the function, unchanged."""
        return (
            self._of() is function
            and function.__code__ is self._code
            and function.__defaults__ is self._defaults
            and function.__kwdefaults__ is self._named
        )

    def original(self) -> Any:
        """Returns the function itself."""
        return self._of()


_helpers: dict[int, Helper | None] = {}  # by function; None: not to be memoized
_kept: dict[int, Any] = {}  # by function: weak references that remove its entries
# By the id of the function that they run.
_by_run: weakref.WeakValueDictionary[int, Helper] = weakref.WeakValueDictionary()


def redirect(callee: Any) -> Any:
    """Returns what to call instead of `callee`."""
    kind = type(callee)
    if kind is types.BuiltinFunctionType or kind is type:
        return callee
    if kind is Function:
        return _way(callee)
    if kind is types.MethodType:
        function = callee.__func__
        if type(function) is not Function or (way := _way(function)) is function:
            return callee
        return types.MethodType(way, callee.__self__)
    if isinstance(callee, type):
        return callee
    function = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
    if type(function) is not Function or (way := _way(function)) is function:
        return callee
    return types.MethodType(way, callee)


def _way(function: Function) -> Any:
    """Returns the function itself, its twin, or a wrapper."""
    handler = current_handler()
    if handler is None or not handler.open:
        return function
    key = id(function)
    helper = _helpers.get(key)
    if helper is None or not helper.is_of(function):
        if handler.watches is None or (helper is None and key in _kept):
            return function
        # Twins take time to make: a library's file is parsed for the first.
        began = time.perf_counter()
        helper = _add(function)
        handler.watches.spend(time.perf_counter() - began)
        if helper is None:
            return function
    if helper.active or helper.misses > tuning.helper_misses or (handler.watches is None and not helper.known):
        return helper.run(function)
    return helper.wrapper(function)


def _add(function: Function) -> Helper | None:
    key = id(function)
    helper = _make(function)
    if len(_kept) >= tuning.max_helpers:
        _kept.clear()
        _helpers.clear()
    _helpers[key] = helper
    _kept[key] = weakref.ref(function, lambda _: _kept.pop(key, None) and _helpers.pop(key, None))
    return helper


def _make(function: Function) -> Helper | None:
    """Returns a new helper for a function, or None if calls of it cannot be memoized."""
    code = function.__code__
    if code.co_flags & _UNSUITABLE or is_wrapper(function) or helper_of(function) is not None:
        return None
    if not is_programs(code, function.__globals__) or looks_at_frames(code, function.__globals__):
        return None
    helper = Helper(function, twin_of(function, redirect))
    _by_run[id(helper.run(function))] = helper
    return helper


def helper_of(run: Any) -> Helper | None:
    """Returns the helper that runs this function, or None."""
    helper = _by_run.get(id(run))
    return helper if helper is not None and helper.runs(run) else None


def original_of(function: Any) -> Any:
    """Returns the original of a twin; other functions unchanged."""
    helper = helper_of(function)
    found = None if helper is None else helper.original()
    return function if found is None else found


def with_redirected_calls(function: Any) -> Any:
    """Returns a function's twin, whose calls are redirected, or the function itself if it has none."""
    if not available():
        return function
    if type(function) is types.MethodType and type(function.__func__) is Function:
        return types.MethodType(with_redirected_calls(function.__func__), function.__self__)
    if type(function) is not Function or not is_programs(function.__code__, function.__globals__):
        return function
    return twin_of(function, redirect) or function


def _wrapper(helper: Helper, run: Function) -> Any:
    @passes
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handler = None
        helper.active += 1
        try:
            handler = current_handler()
            if handler is None or not handler.open:
                return run(*args, **kwargs)
            return handler.library(run, args, kwargs)
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        finally:
            helper.active -= 1
        return run(*args, **kwargs)

    return wrapper
