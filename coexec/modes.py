"""Modes: what a program asks of every co-executed function that it calls in a stretch of its code.

Each is a context manager and a decorator, with or without parentheses, and holds for the thread (or task) that enters:

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


@dataclass(frozen=True)
class Mode:
    """What holds now; the modes around it hold, too, as far as it says nothing else."""

    imperative: bool = False
    strict: bool = False  # nothing may leave the known paths
    settled: bool = False  # nothing may be recorded, wired or compiled
    validate_every: int | None = None  # followed calls; 0: none is validated; None: what is compiled anew is
    debug_nans: bool = False  # every result is looked at
    nans_directory: str | None = None  # where what is found there is written down


NONE = Mode()
_mode: contextvars.ContextVar[Mode] = contextvars.ContextVar("coexec_mode", default=NONE)
_around: contextvars.ContextVar[tuple[Mode, ...]] = contextvars.ContextVar("coexec_modes_around", default=())

current = _mode.get

_RUNNING_LATER = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction


class Scope(contextlib.ContextDecorator):
    """A stretch of code in which a mode holds.

    Several threads and tasks may be inside at the same time: what it holds itself does not depend on that.
    """

    def __init__(self, **changes: Any) -> None:
        self._changes = changes
        self._last = NONE, dataclasses.replace(NONE, **changes)  # a mode, and that with the changes: made in 5 us

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
        _mode.set(around[-1] if around else NONE)  # a generator may be closed by another thread than entered
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
    """Runs co-executed functions plainly: no operation is recorded or followed."""
    return _scope(function, imperative=True)


def fail_on_divergence(function: Callable[..., Any] | None = None, /) -> Any:
    """Raises `coexec.Divergence` where a call leaves the known paths, as `strict=True` does; first calls may record."""
    return _scope(function, strict=True)


def fail_on_retrace(function: Callable[..., Any] | None = None, /) -> Any:
    """Raises `coexec.Divergence` for a call that is not wholly known: recorded, wired anew, or compiled.

    A call that leaves the known paths raises there; what was wired or compiled is only known, and raised, at its end.
    """
    return _scope(function, strict=True, settled=True)


def validate(function: Callable[..., Any] | None = None, /, *, every: int = 1) -> Any:
    """Checks followed calls against imperative ones: the first of every `every` calls of a function.

    In such a call the Python of library calls runs, and each segment is carried out twice on the same values and state,
    as it is compiled and operation by operation. The program goes on with what the operations give. If the two differ
    by more than half of their digits, `explain()` says where, and what is compiled is not launched again; `strict` and
    `fail_on_divergence` make it a `coexec.Divergence`. Values that change as much with the last digits of the inputs
    are nothing but rounding, and may differ: the gradient of a bias in front of a batch normalisation, say.

    Without this mode the same is done whenever something was compiled anew, once, at its first launch; `every=0` has
    it launched unseen.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 0:
        raise ValueError(f"every is a number of calls, or 0 for none, not {every!r}")
    return _scope(function, validate_every=every)


def debug_nans(
    function: Callable[..., Any] | None = None, /, *, directory: str | os.PathLike[str] | None = None
) -> Any:
    """Raises `coexec.NonFiniteError` at the first operation that gives NaN, or infinity for finite inputs.

    The error names the operation, in whose gradient it is, and the program's line, and has the inputs. Calls run
    operation by operation, and nothing is recorded or followed: so the program stops where the number came up, with its
    variables as they were there, and a debugger shows that line. What `coexec.opaque` hides is not looked at; a
    graph function counts as one operation, but under `tf.config.run_functions_eagerly`. Infinity that came in goes on:
    masks have some.

    With a `directory`, the operation is written down there, in a directory of its own that the error names: its inputs
    (`inputs.npz`), its attributes (`operation.pbtxt`), and a script that runs it again with nothing but TensorFlow.
    """
    held = None if directory is None else os.path.abspath(os.fspath(directory))
    return _scope(function, debug_nans=True, nans_directory=held)


def opaque(function: Callable[..., Any]) -> Any:
    """Makes a function run as it would without `coexec`, also where it is called by a co-executed function.

    Its operations run at once, one by one, and are neither recorded nor followed; what it returns is taken in as values
    from outside. For code that must not be followed, or that does something new on every call.
    """
    if not callable(function):
        raise TypeError(f"opaque decorates a callable, not {function!r}")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        handler = intercept.current_handler()
        if handler is None:
            return function(*args, **kwargs)
        return handler.aside((), lambda: function(*args, **kwargs))

    return run
