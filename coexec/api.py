"""The decorator: a callable that runs a Python function with its TensorFlow operations compiled."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Literal, overload

import tensorflow as tf

from coexec.controller import Controller
from coexec.events import Stats
from coexec.options import Options
from tracer.graph import TraceGraph


class Function:
    """A decorated function: called like the function it wraps, whose Python runs on every call."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        if not callable(function):
            raise TypeError(f"coexec.function takes a callable, not {function!r}")
        self._function = function
        self._options = options
        name = options.name or getattr(function, "__qualname__", None) or type(function).__name__
        self._controller = Controller(_with_signature(function, options.input_signature), options, name)
        self._transparent = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)
        self._bound: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._transparent:  # the body runs later, outside of this call
            return self._function(*args, **kwargs)
        return self._controller.call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return BoundFunction(self, instance)

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


class BoundFunction:
    """A decorated method of one instance; all instances share what their class has learnt."""

    __slots__ = ("__self__", "__weakref__", "_bound")

    def __init__(self, bound: Function, instance: Any) -> None:
        self._bound = bound
        self.__self__ = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._bound(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)

    def __repr__(self) -> str:
        return f"<bound {self._bound!r} of {self.__self__!r}>"


def _with_signature(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Returns `function` with its positional arguments converted and checked as `tf.function` does."""
    if signature is None:
        return function
    specs = tuple(signature)

    def converted(*args: Any) -> Any:
        if len(args) != len(specs):
            raise TypeError(f"{function!r} takes {len(specs)} arguments by its input_signature, got {len(args)}")
        return function(*[tf.nest.map_structure(_convert, s, a) for s, a in zip(specs, args, strict=True)])

    return converted


def _convert(spec: Any, value: Any) -> Any:
    tensor = tf.convert_to_tensor(value, dtype=spec.dtype) if isinstance(spec, tf.TensorSpec) else value
    if not spec.is_compatible_with(tensor):
        raise TypeError(f"the argument {value!r} does not match {spec!r} of the input_signature")
    return tensor


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

    Returns:
      A `Function`, or a decorator if `func` is not given.
    """
    options = Options(jit_compile, input_signature, reduce_retracing, strict, name)
    if func is None:
        return lambda f: function_of(f, options)
    return function_of(func, options)


def function_of(func: Any, options: Options) -> Any:
    """Wraps `func`, keeping `staticmethod` and `classmethod` outermost as they were given."""
    if isinstance(func, (staticmethod, classmethod)):
        return type(func)(Function(func.__func__, options))
    return Function(func, options)
