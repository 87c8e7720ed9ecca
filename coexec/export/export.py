"""Export: turns a step whose Python has no effects into a `tf.function`; raises an error that names an effect.

`tf.function` runs Python only while it traces. So the Python of the trace is watched: calls of C functions that are not
known to be pure raise before they run; everything that the step could mutate is compared after each line, and restored.
Reads of a tensor's value cannot be traced at all.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.export.mutation_snapshot import MutationSnapshot
from tracer import hooks
from tracer.effects import is_of_the_standard_library, runs_user_code
from tracer.graph import TraceGraph
from tracer.private import EagerTensor


class ExportError(TypeError):
    """Raised if a step does more than issue operations, so that a `tf.function` would not do the same.

        log = []

        @coexec.function
        def step(x):
            y = tf.square(x)
            log.append(y)       # changes log: return y instead, and let the caller keep it
            return y

    The message names the effect and its line. Return values instead of storing them, pass numbers as arguments, and
    move printing, random numbers and timing out of the step.
    """


# C methods of these types do not mutate anything.
_TELLING = (
    str, bytes, int, float, complex, bool, tuple, frozenset, range, slice, type(None), np.generic, np.dtype,
    EagerTensor, tf.DType, tf.TensorShape, types.FunctionType, types.MappingProxyType,
)  # fmt: skip
_CONTAINERS = (list, dict, set, np.ndarray)  # mutations of reachable ones are detected afterwards
_MODULES = (
    "_abc", "_bisect", "_collections", "_functools", "_heapq", "_operator", "_struct", "_weakref", "cmath", "itertools",
    "keras", "math", "ml_dtypes", "numpy", "optree", "tensorflow",
)  # fmt: skip
_BUILTINS = frozenset(
    {"abs", "all", "any", "ascii", "bin", "callable", "chr", "delattr", "dir", "divmod", "format", "getattr", "hasattr",
     "hash", "hex", "id", "isinstance", "issubclass", "iter", "len", "locals", "max", "min", "next", "oct", "ord",
     "pow", "repr", "round", "setattr", "sorted", "sum", "vars", "__build_class__"}
)  # fmt: skip


def only_computes(function: Any) -> bool:
    """Returns whether a C function or method has no effects, other than mutations that are detected afterwards."""
    holder = getattr(function, "__self__", None)
    if holder is None or isinstance(holder, types.ModuleType):
        module = str(getattr(function, "__module__", None) or getattr(holder, "__name__", ""))
        return function.__name__ in _BUILTINS if module == "builtins" else _is_in(module)
    if isinstance(holder, type):  # a method of the class, its bases or its metaclass: `datetime.now`
        metaclass: type = type(holder)
        bases = (*holder.__mro__, *metaclass.__mro__)
        owner = next((base for base in bases if function.__name__ in vars(base)), holder).__module__
        return owner == "builtins" or _is_in(owner)
    kind = type(holder)
    if isinstance(holder, (*_TELLING, *_CONTAINERS)):
        return True
    return kind.__module__ in ("builtins", "_collections", "collections") or (
        _is_in(kind.__module__) and not kind.__module__.startswith("numpy.random")
    )


def _is_in(module: str) -> bool:
    return module.split(".")[0] in _MODULES and not module.startswith("numpy.random")


hooks.Hooks(
    __name__,
    "`sys.setprofile`, `sys.settrace` on the calling thread",
    "effects of the step's Python are found, which the exported function would not have",
    "`export` traces",
)


class EffectWatch:
    """Watches the Python of one trace, on this thread; raises `ExportError` for effects that would happen only once."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: Any) -> None:
        self._name = name
        self._reach = MutationSnapshot([function, arguments])
        self._place = ""  # the user's line that is running
        self._found: ExportError | None = None

    def __enter__(self) -> None:
        if self._reach.incomplete:
            raise ExportError(f"{self._name} {self._reach.incomplete}")
        self._before = sys.gettrace(), sys.getprofile()
        self._reach.__enter__()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        trace, profile = self._before
        sys.settrace(trace)
        sys.setprofile(profile)
        self._look()
        self._reach.__exit__()
        if self._found is not None:
            raise self._found  # even if the program has caught it

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line(frame, "line", None) if runs_user_code(frame) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        """Checks for effects of the previous line."""
        self._look()
        at = frame.f_back if event == "return" else frame
        if at is not None and runs_user_code(at):
            self._place = _place_of(at)
        return self._line

    def _look(self) -> None:
        """Records an error if anything was mutated since the last check, and restores it."""
        changed = self._reach.changed()
        if changed is not None:
            self._note(f"changes {changed}", self._place)

    def _note(self, what: str, place: str) -> ExportError:
        """Records and returns the first error; later ones are dropped."""
        if self._found is None:
            self._found = ExportError(f"{self._name} {what}, which its tf.function would not do again\n  at {place}")
        return self._found

    def _profile(self, frame: Any, event: str, function: Any) -> None:
        """Raises before a C function with possible effects runs, if user code called it."""
        if event != "c_call" or only_computes(function):
            return
        caller = frame
        while caller is not None and is_of_the_standard_library(caller):
            caller = caller.f_back
        if caller is not None and runs_user_code(caller):
            raise self._note(f"calls {_title(function)}", _place_of(caller))


def _title(function: Any) -> str:
    module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
    return function.__qualname__ if module == "builtins" else f"{module}.{function.__qualname__}"


def _place_of(frame: Any, line: int | None = None) -> str:
    return f"{frame.f_code.co_filename}:{line or frame.f_lineno} in {frame.f_code.co_name}"


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Converts an error during tracing to an `ExportError` that names the user's line."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        place, trace = "", error.__traceback__
        while trace is not None:
            if runs_user_code(trace.tb_frame):
                place = _place_of(trace.tb_frame, trace.tb_lineno)
            trace = trace.tb_next
        reason = (str(error).splitlines() or [""])[0]
        text = f"{name} cannot be traced as a tf.function: {type(error).__name__}: {reason}"
        raise ExportError(f"{text}\n  at {place}" if place else text) from error


def refuse(name: str, graph: TraceGraph) -> None:
    """Raises `ExportError` if, in earlier calls, a Python number was found to differ between calls."""
    for node in graph.nodes:
        if node.fed and node.varies:
            raise ExportError(
                f"{name} hands in a number of Python's that is another one from call to call, which its tf.function "
                f"would not notice: give it as a tensor\n  at {node.location}"
            )


def to_tf_function(function: Callable[..., Any], name: str, signature: Any, jit_compile: bool | None) -> Any:
    """Returns a `tf.function` that traces `function` under an `EffectWatch`."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with _explained(name), EffectWatch(name, function, (args, kwargs)):
            return function(*args, **kwargs)

    return tf.function(traced, input_signature=signature, autograph=False, jit_compile=jit_compile)
