"""The decorator: a callable that runs a Python function with its TensorFlow operations compiled."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, overload

import tensorflow as tf

from coexec.arguments import with_signature
from coexec.compile.store import store
from coexec.controller import Controller
from coexec.dynamic import Dynamic
from coexec.events import Stats
from coexec.export import refuse, to_tf_function
from coexec.options import Options
from tracer import library
from tracer.errors import Refused
from tracer.forms import forms_of, has_source
from tracer.graph import TraceGraph

_functions: weakref.WeakSet[Function] = weakref.WeakSet()


def functions() -> list[Function]:
    """Returns all decorated functions that are alive."""
    return list(_functions)


def clear(disk: bool = False) -> None:
    """Has every decorated function forget what it learnt, and releases all that was compiled for them.

    With `disk`, also what is kept on disk for later processes, of all versions and programs.
    """
    for function in functions():
        function.clear()
    kept = store() if disk else None
    if kept is not None:
        kept.clear()


def register_library(module: str | types.ModuleType) -> None:
    """Has calls into a module followed as one unit, as those into Keras are, where they do what they did before.

    Its functions, and calls of Keras objects whose code is there, are run twice and watched. If they had no effect in
    Python, their Python is not run again while arguments and the attributes of the objects stay the same; operations
    are those of before, on today's values. What such code reads besides (globals of the module, time, files) must not
    change what it does. Names that other modules have imported from it before stay as they are.

    Args:
      module: a module, or its name; modules inside of a package count as the package.
    """
    if isinstance(module, str):
        module = importlib.import_module(module)
    if not isinstance(module, types.ModuleType):
        raise TypeError(f"register_library takes a module or its name, not {module!r}")
    library.install()
    library.register(module)


def pure(function: Callable[..., Any]) -> Any:
    """Has calls of a helper that only computes followed as one unit: once known, its Python is not run again.

    That is a promise of yours which is proven, not believed: its source, and that of all code of yours that it comes
    to, must bind nothing but local names, and call nothing but functions of TensorFlow's and Python's that only
    compute, layers of Keras', and other such helpers. Numbers, objects, globals and attributes that it looks at are
    compared before each use; where one is no longer what it was, its Python runs. What cannot be compared so (arrays,
    slots, objects that compute their attributes) leaves it an ordinary function; `explain()` says so. It is one anyway
    where no co-executed function calls it.

        @coexec.pure
        def attention(query, key, value):
            scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(query.shape[-1])
            return tf.matmul(tf.nn.softmax(scores), value)

    Args:
      function: a function or method, with source.

    Raises:
      ValueError: if its source shows that it may do more than compute; the message says what, and on which line. Where
        there is no source, that is a warning.
      TypeError: if it is no function.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"pure decorates a function or method, not {function!r}")
    try:
        if has_source(function.__code__, function.__globals__):
            forms_of(function.__code__, function.__globals__)
        else:
            warnings.warn(f"{function.__qualname__} runs plainly: its source is not known", stacklevel=2)
    except Refused as refused:
        place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        raise ValueError(f"{function.__qualname__} ({place}) may do more than compute: {refused}") from None
    return library.pure_door(function)


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

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what `tf.function` would trace of the function: one graph, to be saved or looked at.

        As there, Python runs once, with tensors that have no values, and its effects are no part of the graph; so are
        not the random numbers that eager would draw. Nothing of it is used in calls of this function.

        Args:
          *args: as for a call, tensors or `tf.TensorSpec`s. For a method, `Class.method.get_concrete_function(instance,
            ...)`.
          **kwargs: the same, by name.

        Raises:
          NotImplementedError: if the function cannot be written down as one graph, from the error that says why.
        """
        return self._as_graph(lambda function: function.get_concrete_function(*args, **kwargs))

    def experimental_get_compiler_ir(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what `tf.function(jit_compile=True)` would: a callable that gives XLA's program, by `stage`.

        It is that of the whole function as one graph, as `get_concrete_function` has it; segments are compiled apart.

        Raises:
          NotImplementedError: if the function cannot be written down as one graph, from the error that says why.
        """
        return self._as_graph(lambda function: function.experimental_get_compiler_ir(*args, **kwargs), jit_compile=True)

    def _as_graph(self, ask: Callable[[Any], Any], **options: Any) -> Any:
        signature = self._options.input_signature
        try:
            return ask(tf.function(self._function, input_signature=signature, **options))
        except Exception as error:
            raise NotImplementedError(
                f"{self._controller.name} cannot be written down as one graph, as tf.function would have it: "
                f"{type(error).__name__}: {error}\n"
                "  1. Calls of it do not need that: its Python runs, and the operations between are compiled.\n"
                "  2. To save it, give what has no effects in Python and reads no values a function of its own.\n"
                "  3. Of a method, ask Class.method.get_concrete_function(instance, ...)."
            ) from error

    def to_tf_function(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a `tf.function` that does what this one does, if its Python does nothing but issue operations.

        It can be saved with a `tf.Module`, called by other graph functions, and knows nothing of co-execution. Its
        Python runs only while it traces, and what it reads of Python's stays what it was then; random operations draw
        as in any `tf.function`. Each trace is watched.

        Args:
          *args: what to trace it for, now: tensors, `tf.TensorSpec`s, and other arguments. Without any it is traced for
            the `input_signature`, or else when it is first called.
          **kwargs: the same.

        Raises:
          ExportError: now, or when it is traced, if the function prints, changes objects, reads values, draws random
            numbers in Python, or hands in numbers that change from call to call; the message says what and where.
        """
        name, signature = self._controller.name, self._options.input_signature
        refuse(name, self._controller.graph)
        jit_compile = True if self._options.jit_compile is True else None
        graph_function = to_tf_function(self._function, name, signature, jit_compile)
        if args or kwargs or signature is not None:
            graph_function.get_concrete_function(*args, **kwargs)
        return graph_function

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
    control_flow: bool = False,
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
    control_flow: bool = False,
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
      control_flow: let loops that ask tensors whether to go on turn on the device, and branches be taken there, as
        far as they do nothing but compute, and follow calls of graph functions (`tf.function`) that do no more.
        Experimental: what a loop or branch does besides is found by reading its source, and some of it is known to
        be missed (see the README). By default every decision is Python's, and such calls run on their own.

    Returns:
      A `Function`, or a decorator if `func` is not given.
    """
    options = Options(jit_compile, input_signature, reduce_retracing, strict, name, regions, control_flow)
    if func is None:
        return lambda f: function_of(f, options)
    return function_of(func, options)


def function_of(func: Any, options: Options) -> Any:
    """Wraps `func`, keeping `staticmethod`, `classmethod` and padding outermost as they were given."""
    if isinstance(func, Dynamic):
        return func.around(lambda inner: function_of(inner, options))
    if isinstance(func, (staticmethod, classmethod)):
        return type(func)(Function(func.__func__, options))
    return Function(func, options)
