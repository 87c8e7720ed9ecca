"""The decorator: a callable that runs a Python function with its TensorFlow operations compiled."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal, overload

from coexec.arguments import with_signature
from coexec.controller import Controller
from coexec.events import Stats
from coexec.options import Options
from tracer.graph import TraceGraph

_functions: weakref.WeakSet[Function] = weakref.WeakSet()


def clear() -> None:
    """Has every decorated function forget what it learnt, and releases all that was compiled for them."""
    for function in list(_functions):
        function.clear()


class Function:
    """A decorated function: called like the function it wraps, whose Python runs on every call."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        if not callable(function):
            raise TypeError(f"coexec.function takes a callable, not {function!r}")
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        name = options.name or getattr(function, "__qualname__", None) or type(function).__name__
        self._controller = Controller(with_signature(function, options.input_signature), options, name)
        _functions.add(self)
        self._transparent = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._transparent:  # the body runs later, outside of this call
            return self._function(*args, **kwargs)
        return self._controller.call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        found: Any = sys.modules.get(getattr(self._function, "__module__", ""))
        name = getattr(self._function, "__qualname__", "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (Function, (self._function, self._options))

    @property
    def python_function(self) -> Callable[..., Any]:
        """The function as it was before decoration."""
        return self._function

    @property
    def trace_graph(self) -> TraceGraph:
        """What the calls so far have done, merged; `str()` prints it."""
        return self._controller.graph

    def stats(self) -> Stats:
        """Returns how calls and operations have run so far."""
        return self._controller.ledger.stats()

    def explain(self) -> str:
        """Returns each distinct reason why something did not go the fast way, with its place and what to do."""
        return self._controller.ledger.explain(self._controller.name)

    def clear(self) -> None:
        """Forgets what was learnt and releases what was compiled; the next call records anew."""
        self._controller.clear()

    def experimental_get_tracing_count(self) -> int:
        """Returns how many calls were recorded, in whole or in part."""
        stats = self.stats()
        return stats.recorded + stats.diverged

    def __repr__(self) -> str:
        return f"<coexec.function {self._controller.name}>"


@overload
def function(func: Callable[..., Any], /) -> Function: ...
@overload
def function(
    func: None = None,
    *,
    jit_compile: Literal["auto"] | bool = "auto",
    input_signature: Any = None,
    reduce_retracing: bool = True,
    strict: bool = False,
    name: str | None = None,
    autograph: Any = None,
    regions: bool = True,
) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    func: Callable[..., Any] | None = None,
    *,
    jit_compile: Literal["auto"] | bool = "auto",
    input_signature: Any = None,
    reduce_retracing: bool = True,
    strict: bool = False,
    name: str | None = None,
    autograph: Any = None,
    regions: bool = True,
) -> Any:
    """Makes a function of eager TensorFlow operations fast, and changes nothing else.

    Its Python runs on every call. The operations are recorded on the first call and followed from the second:
    compiled, launched together, and answered with tensors that wait for their values only where Python reads them.

    Args:
      func: any callable: a function, method, lambda, partial, or object with `__call__`. Source is not needed.
      jit_compile: "auto" uses XLA for what it runs right and well; True for all it runs right; False never.
      input_signature: as for `tf.function`: a sequence of `tf.TensorSpec`, to which arguments are converted.
      reduce_retracing: accepted for `tf.function`'s sake; new shapes never give a wrong result.
      strict: raise `coexec.Divergence` where a call leaves the known paths.
      name: what reports call the function.
      autograph: accepted for `tf.function`'s sake, and ignored: Python runs as it is.
      regions: follow calls into Keras (layers, losses, metrics, optimizers, gradients) as one unit, their Python not
        run, where they are known to do what they did before. False runs their Python on every call, too.

    Returns:
      A `Function`, or a decorator if `func` is not given.
    """
    options = Options(jit_compile, input_signature, reduce_retracing, strict, name, regions)
    if func is None:
        return lambda f: function_of(f, options)
    return function_of(func, options)


def function_of(func: Any, options: Options) -> Any:
    """Wraps `func`, keeping `staticmethod` and `classmethod` outermost as they were given."""
    if isinstance(func, (staticmethod, classmethod)):
        return type(func)(Function(func.__func__, options))
    return Function(func, options)
