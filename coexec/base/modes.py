"""Modes: settings that apply to all co-executed functions called within a scope.

Each is a context manager and a decorator, with or without parentheses, and applies to the thread (or task) that enters:

    with coexec.imperative(): step(batch)
    @coexec.validate(every=100) ...
    coexec.fail_on_divergence(step)(batch)
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracer import intercept
from tracer.faults import passes


@dataclass(frozen=True)
class Mode:
    """The settings in effect; a nested scope inherits whatever it does not change."""

    imperative: bool = False
    strict: bool = False  # a divergence raises
    settled: bool = False  # recording, wiring or compiling raises
    validate_every: int | None = None  # followed calls; 0: validate none; None: validate new executables
    debug_nans: bool = False  # check every result
    nans_directory: str | None = None  # where to write a script that reproduces the NaN


NONE = Mode()
_mode: contextvars.ContextVar[Mode] = contextvars.ContextVar("coexec_mode", default=NONE)
_around: contextvars.ContextVar[tuple[Mode, ...]] = contextvars.ContextVar("coexec_modes_around", default=())

current = _mode.get

_RUNNING_LATER = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction


class Scope(contextlib.ContextDecorator):
    """A scope in which a mode is in effect.

    Several threads and tasks may be inside at the same time: the object itself holds no state of theirs.
    """

    def __init__(self, **changes: Any) -> None:
        self._changes = changes
        self._last = NONE, dataclasses.replace(NONE, **changes)  # cached (`replace` takes 5 us): outer mode, inner mode

    def __enter__(self) -> Scope:
        mode = _mode.get()
        last = self._last
        if last[0] is not mode:
            last = self._last = mode, dataclasses.replace(mode, **self._changes)
        _around.set((*_around.get(), mode))
        _mode.set(last[1])
        return self

    def __exit__(self, *_: object) -> None:
        around = _around.get()
        _mode.set(around[-1] if around else NONE)  # a generator may be closed on another thread
        _around.set(around[:-1])


def _scope(function: Callable[..., Any] | None, **changes: Any) -> Any:
    if function is None:
        return Scope(**changes)
    if not callable(function):
        raise TypeError(f"a mode decorates a callable, not {function!r}")
    if any(is_one(function) for is_one in _RUNNING_LATER):
        raise TypeError(f"{function.__qualname__} runs after it has been called: enter the mode inside of it")
    return Scope(**changes)(function)


def imperative(function: Callable[..., Any] | None = None, /) -> Any:
    """Runs co-executed functions imperatively: no operation is recorded or followed."""
    return _scope(function, imperative=True)


def fail_on_divergence(function: Callable[..., Any] | None = None, /) -> Any:
    """Raises `coexec.Divergence` if a call leaves the trace graph, as `strict=True` does; first calls may record."""
    return _scope(function, strict=True)


def fail_on_retrace(function: Callable[..., Any] | None = None, /) -> Any:
    """Raises `coexec.Divergence` for a call that records, wires or compiles anything.

    A call that diverges raises at that point; wiring and compiling are detected, and raise, at the end of the call.
    """
    return _scope(function, strict=True, settled=True)


def validate(function: Callable[..., Any] | None = None, /, *, every: int = 1) -> Any:
    """Validates followed calls against imperative ones: the first of every `every` calls of a function.

    In such a call the Python of library calls runs, and each segment runs twice on the same values and state: compiled,
    and operation by operation. The program continues with the results of the operations. If the two differ by more
    than half of their digits, `explain()` says where, and the executable is not launched again; under `strict` and
    `fail_on_divergence` a `coexec.Divergence` is raised. Values that change as much when the last digits of the inputs
    change are rounding noise, and may differ: for example the gradient of a bias in front of a batch normalisation.

    Without this mode each new executable is validated once, at its first launch; `every=0` turns that off.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 0:
        raise ValueError(f"every is a number of calls, or 0 for none, not {every!r}")
    return _scope(function, validate_every=every)


def debug_nans(
    function: Callable[..., Any] | None = None, /, *, directory: str | os.PathLike[str] | None = None
) -> Any:
    """Raises `coexec.NonFiniteError` at the first operation that returns NaN, or infinity for finite inputs.

    The error names the operation, the operation whose gradient it is part of, and the program's line, and holds the
    inputs. Calls run operation by operation, and nothing is recorded or followed: so the program stops where the value
    appeared, with its variables as they were at that point, and a debugger shows that line. Operations inside
    `coexec.opaque` are not checked; a graph function counts as one operation, except under
    `tf.config.run_functions_eagerly`. Infinities in the inputs may propagate, as masks contain them.

    With a `directory`, the operation is saved in a new directory there, which the error names: its inputs
    (`inputs.npz`), its attributes (`operation.pbtxt`), and a script that runs it again with nothing but TensorFlow.
    """
    held = None if directory is None else os.path.abspath(os.fspath(directory))
    return _scope(function, debug_nans=True, nans_directory=held)


def opaque(function: Callable[..., Any]) -> Any:
    """Makes a function run as it would without `coexec`, even when a co-executed function calls it.

    Its operations run immediately, one by one, and are neither recorded nor followed; its results enter the caller as
    feeds. Use it for code that must not be followed, or that does something new on every call.
    """
    if not callable(function):
        raise TypeError(f"opaque decorates a callable, not {function!r}")

    @functools.wraps(function)
    @passes
    def run(*args: Any, **kwargs: Any) -> Any:
        handler = intercept.current_handler()
        if handler is None:
            return function(*args, **kwargs)
        return handler.aside((), functools.partial(function, *args, **kwargs))

    return run
