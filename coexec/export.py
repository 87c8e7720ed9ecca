"""Export: the `tf.function` of a step whose Python does nothing but issue operations, or what it does besides.

`tf.function` runs Python while it traces and never again. So while it traces, Python is watched: calls of compiled
functions that are not known to compute are stopped before they act; whatever the step could change in place is looked
at line by line, and put back as it was. Reads of a tensor's value cannot be traced at all.
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

from coexec.reach import Reach
from tracer.effects import is_of_the_standard_library, runs_user_code
from tracer.graph import TraceGraph
from tracer.private import EagerTensor


class ExportError(TypeError):
    """A step does more than to issue operations, so that no `tf.function` could do what it does.

        log = []

        @coexec.function
        def step(x):
            y = tf.square(x)
            log.append(y)       # changes log: return y instead, and let the caller keep it
            return y

    The message names the effect and its line. Return values instead of keeping them, take numbers as arguments, and do
    what prints, draws or measures outside of the step.
    """


# Methods that change what they are called on; of others that are compiled, those of these types only tell.
_TELLING = (
    str, bytes, int, float, complex, bool, tuple, frozenset, range, slice, type(None), np.generic, np.dtype,
    EagerTensor, tf.DType, tf.TensorShape, types.FunctionType, types.MappingProxyType,
)  # fmt: skip
_CONTAINERS = (list, dict, set, np.ndarray)  # changes of those from outside are seen afterwards
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
    """Returns whether a compiled function or method does no more than to compute from what it is given."""
    holder = getattr(function, "__self__", None)
    if holder is None or isinstance(holder, types.ModuleType):
        module = str(getattr(function, "__module__", None) or getattr(holder, "__name__", ""))
        return function.__name__ in _BUILTINS if module == "builtins" else _is_in(module)
    if isinstance(holder, type):  # a method of the class, or one of its bases or of its metaclass: `datetime.now`
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


class Watch:
    """Watches the Python of one trace, on this thread; raises `ExportError` for what would not be done again."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: Any) -> None:
        self._name = name
        self._reach = Reach([function, arguments])
        self._place = ""  # of the user's line that runs
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
            raise self._found  # also where the program has swallowed it

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line(frame, "line", None) if runs_user_code(frame) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        """Looks at what the line before has done."""
        self._look()
        at = frame.f_back if event == "return" else frame
        if at is not None and runs_user_code(at):
            self._place = _place_of(at)
        return self._line

    def _look(self) -> None:
        changed = self._reach.changed()
        if changed is not None:
            self._note(f"changes {changed}", self._place)

    def _note(self, what: str, place: str) -> ExportError:
        if self._found is None:
            self._found = ExportError(f"{self._name} {what}, which its tf.function would not do again\n  at {place}")
        return self._found

    def _profile(self, frame: Any, event: str, function: Any) -> None:
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
    """Says of an error in tracing that it is about tracing, and where the program was."""
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
    """Raises `ExportError` if earlier calls have shown that each hands in numbers of its own."""
    for node in graph.nodes:
        if node.fed:
            raise ExportError(
                f"{name} hands in a number of Python's that is another one from call to call, which its tf.function "
                f"would not notice: give it as a tensor\n  at {node.location}"
            )


def to_tf_function(function: Callable[..., Any], name: str, signature: Any, jit_compile: bool | None) -> Any:
    """Returns a `tf.function` that runs `function` when it traces, watched."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with _explained(name), Watch(name, function, (args, kwargs)):
            return function(*args, **kwargs)

    return tf.function(traced, input_signature=signature, autograph=False, jit_compile=jit_compile)
