"""API: the decorator `function`, the callable that it returns, and what configures library calls."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, overload

import tensorflow as tf

from coexec.base.explanation import Explanation, together
from coexec.base.options import Options
from coexec.base.stats import Stats
from coexec.compile.disk_store import store
from coexec.dispatch.controller import Controller
from coexec.dispatch.input_signature import with_signature
from coexec.dispatch.padding import Dynamic
from coexec.export.export import refuse, to_tf_function
from coexec.memoize.redirect import with_redirected_calls
from coexec.reporting.compiler_ir import IR
from coexec.reporting.cost import Cost
from coexec.reporting.html_summary import html_of
from coexec.reporting.report import Report
from coexec.reporting.segments import Segments, segments_of
from tracer import library
from tracer.errors import Refused
from tracer.faults import hide_frames
from tracer.forms import forms_of, has_source
from tracer.graph import TraceGraph

_functions: weakref.WeakSet[Function] = weakref.WeakSet()


def functions() -> list[Function]:
    """Returns all decorated functions that are alive."""
    return list(_functions)


def clear(disk: bool = False) -> None:
    """Resets every decorated function: drops its trace graph, memoized calls and executables.

    With `disk`, also deletes what is cached on disk for later processes, of all versions and programs.
    """
    for function in functions():
        function.clear()
    kept = store() if disk else None
    if kept is not None:
        kept.clear()


def explain(function: Any = None, *, as_dict: bool = False) -> Any:
    """Returns `function.explain()`; without a function, the reports of all decorated ones that have been called.

    Those of one process come as one report, first the functions whose calls have taken most time. A model that was
    given to `coexec.accelerate` is asked by its `train_function`.

    Args:
      function: a decorated function, or anything else that has `explain()`.
      as_dict: return the dict of `as_dict()` instead, under "functions" where it is of the whole process.
    """
    if function is None:
        found = together([each.explain() for each in functions() if each.stats().calls])
    elif hasattr(function, "explain"):
        found = function.explain()
    else:
        raise TypeError(f"explain takes a function that coexec has decorated, or nothing, not {function!r}")
    return found.as_dict() if as_dict else found


def report(directory: str | os.PathLike[str]) -> Report:
    """Keeps a report of all decorated functions in a directory: a page to look at, its data as JSON, and a trace.

    It is written now, as far as functions have been called, and again at the end of the `with` block, by `write()`, or
    when the process ends. The timeline begins now: before, and without a report, no events are recorded. Its first and
    last events are kept, 50,000 in all; functions that are called meanwhile, up to 64, are held until then.

        with coexec.report("report"):
            train()

    * `index.html`: one file that needs no network: verdicts and causes, the timeline of calls, launches, waits and
      compilations, the step rate, launches and reads by source line, memoized calls, divergences, and the trace graph.
    * `report.json`: what the page shows.
    * `trace.json`: the timeline, for Perfetto (ui.perfetto.dev).

    Args:
      directory: is made if it does not exist; files of these names are replaced.

    Raises:
      OSError: if the directory cannot be made or written to.
    """
    made = Report(directory, lambda: [function._controller for function in functions()])
    if any(function.stats().calls for function in functions()):
        made.write()
    return made


def register_library(module: str | types.ModuleType) -> None:
    """Memoizes calls into a module, as calls into Keras are, so that their Python is skipped.

    Calls of its functions, and of Keras objects whose code it contains, are observed twice. If they had no Python
    effects, their Python is skipped while the arguments and the attributes of the objects stay the same: the same
    operations run on the new values. Anything else that such code reads (globals of the module, time, files) must not
    change what it does. Names that other modules imported from it earlier are not affected.

    Args:
      module: a module, or its name; a package includes its submodules.
    """
    if isinstance(module, str):
        module = importlib.import_module(module)
    if not isinstance(module, types.ModuleType):
        raise TypeError(f"register_library takes a module or its name, not {module!r}")
    library.install()
    library.register(module)


def pure(function: Callable[..., Any]) -> Any:
    """Memoizes calls of a helper that only computes: once a call is known, its Python is skipped.

    Purity is verified, not assumed: the source of the function, and of all your code that it calls, may bind only local
    names, and call only pure functions of TensorFlow and Python, Keras layers, and other such helpers. The numbers,
    objects, globals and attributes that it reads are guarded before each use; if a guard fails, its Python runs. If it
    reads something that cannot be guarded (large arrays, slots, objects with computed attributes), it stays an ordinary
    function, and `explain()` says so. Outside co-executed functions it is always an ordinary function.

        @coexec.pure
        def attention(query, key, value):
            scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(query.shape[-1])
            return tf.matmul(tf.nn.softmax(scores), value)

    Args:
      function: a function or method. Without source there is a warning, and it stays an ordinary function.

    Raises:
      ValueError: if its source may do more than compute; the message says what, and on which line.
      TypeError: if it is not a function.
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
    return library.wrap_pure(function)


def _of_function(name: str) -> property:
    """Makes an attribute of a decorated function that is the wrapped function's, to read and to set.

    `inspect` takes what has these for a function, and so knows one that makes a coroutine or a generator.
    """
    return property(
        lambda self: getattr(self._function, name), lambda self, value: setattr(self._function, name, value)
    )


class Function:
    """A decorated function: called like the function that it wraps, whose Python runs on every call."""

    __code__, __defaults__, __kwdefaults__ = map(_of_function, ("__code__", "__defaults__", "__kwdefaults__"))
    __globals__, __closure__ = map(_of_function, ("__globals__", "__closure__"))

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        if not callable(function):
            raise TypeError(f"coexec.function takes a callable, not {function!r}")
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        name = options.name or getattr(function, "__qualname__", None) or type(function).__name__
        plain = with_signature(function, options.input_signature)
        watched = options.regions == "all" and not options.control_flow
        self._controller = Controller(plain, options, name, self._redirected if watched else None)
        _functions.add(self)
        self._transparent = any(
            is_one(function)
            for is_one in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        )

    def _redirected(self) -> Callable[..., Any]:
        """Returns what to call once calls of helpers are memoized, too."""
        return with_signature(with_redirected_calls(self._function), self._options.input_signature)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._transparent:  # the body runs later, outside this call
            return self._function(*args, **kwargs)
        try:
            return self._controller.call(args, kwargs)
        except BaseException as error:
            hide_frames(error)
            raise  # adds no frame of its own, from CPython 3.11 on

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
        """The undecorated function."""
        return self._function

    @property
    def trace_graph(self) -> TraceGraph:
        """The merged traces of the calls so far; `str()` prints it."""
        return self._controller.graph

    def stats(self) -> Stats:
        """Returns counters of how calls and operations have run so far."""
        return self._controller.ledger.stats()

    def explain(self) -> Explanation:
        """Returns what a call takes of eager's time, what it could take, and why: most expensive causes first.

        That is a string; `as_dict()` has the same for programs, and `show()` prints it in colours. Times come from the
        clock that decides whether following pays: of the last calls, and of some that it lets run plainly.
        """
        return self._controller.explain()

    def segments(self) -> Segments:
        """Returns the segments that the last followed call launched, in order; `print()` shows a line for each.

        Each is printable, too, operation by operation, and has `backend`, `operations`, `launches`, `nodes` (of the
        trace graph), `ir()` and `cost()`. There are none before the second call.
        """
        return segments_of(self._controller.name, self._controller.ran)

    def ir(self, stage: Literal["stablehlo", "hlo", "optimized_hlo"] = "stablehlo") -> IR:
        """Returns what XLA is given for the segments of the last followed call, or makes of them, as text.

        Segments that run as TensorFlow graphs are shown as XLA would get them. Calls do not use what this compiles.

        Args:
          stage: "stablehlo" or "hlo", before XLA's passes, or "optimized_hlo", after them: that takes as long as XLA's
            compilation.

        Raises:
          ValueError: if there is no such stage, or no call has been followed yet.
          NotImplementedError: if XLA can compile none of the segments, or TensorFlow does not print the stage (2.18 has
            no "stablehlo"); the message says why.
        """
        return self.segments().ir(stage)

    def cost(self) -> Cost:
        """Returns what the operations of the last followed call take, estimated from shapes: arithmetic and memory.

        `operations`, `flops`, `bytes_accessed`, `bytes_transferred` and `memory` are numbers; `print()` shows them with
        the kinds of operations that take most. Times are measured, and in `explain()`.
        """
        return self.segments().cost()

    def clear(self) -> None:
        """Drops the trace graph, memoized calls and executables; the next call records again."""
        self._controller.clear()

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what `tf.function` would trace of the function: one graph, to be saved or inspected.

        As there, Python runs once, on symbolic tensors, and its effects are not part of the graph. Random operations
        do not draw the numbers that eager would. Calls of this function do not use the graph.

        Args:
          *args: as for a call, tensors or `tf.TensorSpec`s. For a method, `Class.method.get_concrete_function(instance,
            ...)`.
          **kwargs: the same, by name.

        Raises:
          NotImplementedError: if the function cannot be traced as one graph; its cause says why.
        """
        return self._as_graph(lambda function: function.get_concrete_function(*args, **kwargs))

    def experimental_get_compiler_ir(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what `tf.function(jit_compile=True)` would: a callable that gives XLA's program, by `stage`.

        The program is that of `get_concrete_function`, the whole function as one graph; segments are compiled apart.

        Raises:
          NotImplementedError: if the function cannot be traced as one graph; its cause says why.
        """
        return self._as_graph(lambda function: function.experimental_get_compiler_ir(*args, **kwargs), jit_compile=True)

    def _as_graph(self, ask: Callable[[Any], Any], **options: Any) -> Any:
        """Applies `ask` to a `tf.function` of this function; raises `NotImplementedError` from any error."""
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
        """Returns an equivalent `tf.function`, if this function's Python does nothing but issue operations.

        It is independent of coexec: it can be saved with a `tf.Module`, and called by other graph functions. Its Python
        runs only while it traces, and Python values that it reads are fixed at that time; random operations draw as in
        any `tf.function`. Each trace is checked for Python effects.

        Args:
          *args: tensors, `tf.TensorSpec`s and other arguments to trace it for now. Without any, it is traced for the
            `input_signature`, or else when it is first called.
          **kwargs: the same, by name.

        Raises:
          ExportError: now, or when it is traced later, if the function prints, mutates objects, reads values, draws
            random numbers in Python, or feeds Python numbers that differ between calls; the message says what and
            where.
        """
        name, signature = self._controller.name, self._options.input_signature
        refuse(name, self._controller.graph)
        jit_compile = True if self._options.jit_compile is True else None
        graph_function = to_tf_function(self._function, name, signature, jit_compile)
        if args or kwargs or signature is not None:
            graph_function.get_concrete_function(*args, **kwargs)
        return graph_function

    def experimental_get_tracing_count(self) -> int:
        """Returns how many calls were recorded, entirely or partly."""
        stats = self.stats()
        return stats.recorded + stats.diverged

    def __repr__(self) -> str:
        return f"<coexec.function {self._controller.name}>"

    def _repr_html_(self) -> str:
        """Returns what notebooks show of it: the verdict, the most expensive causes, and the segments."""
        return html_of(self._controller.name, self.explain(), str(self.segments()))


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
    regions: Literal["all"] | bool = True,
    control_flow: bool | None = None,
    batching: bool = False,
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
    regions: Literal["all"] | bool = True,
    control_flow: bool | None = None,
    batching: bool = False,
) -> Any:
    """Makes a function of eager TensorFlow operations fast, without changing what it does.

    Its Python runs on every call. Its operations are recorded on the first call, and followed from the second on:
    compiled, launched together, and represented by lazy tensors, which wait for values only where Python reads them.

    Args:
      func: any callable: a function, method, lambda, partial, or object with `__call__`. Source is not needed.
      jit_compile: "auto" uses XLA where it is correct and faster; True wherever it is correct; False never.
      input_signature: as for `tf.function`: a sequence of `tf.TensorSpec`, to which arguments are converted.
      reduce_retracing: where sizes of arguments keep changing, follow calls at any size after three of them, with exact
        shapes as ever; if False, a path is kept for each combination of sizes that comes often.
      strict: raise `coexec.Divergence` where a call diverges from the trace graph.
      name: the function's name in reports.
      autograph: accepted for compatibility with `tf.function`, and ignored: Python runs as it is.
      regions: memoize calls into Keras (layers, losses, metrics, optimizers, gradients): skip their Python where they
        are known to do the same again. False runs their Python on every call. "all" also memoizes calls of helpers,
        methods and other libraries, once the function has settled: their Python is watched instruction by instruction
        while they are learnt, in a share of the time that calls take, and no more where that does not pay.
        Experimental; on CPython 3.11, and without `control_flow`.
      control_flow: run loops and branches whose conditions are tensors on the device, as far as they only compute: what
        is not known to compute is refused, and what is read is guarded. None: `while` loops, once they have asked often
        in one call, and as long as arguments keep their sizes. True: whatever decides, from the beginning, and follow
        calls of graph functions (`tf.function`) that only compute; experimental, as a tensor that a branch hands on is
        a new object (coexec/README.md lists what is missed). False: Python takes every decision.
      batching: where calls keep taking new ways (trees, sequences of all lengths), so that following them does not pay,
        carry out operations that come from the same places of the source together, as a few large ones, and their
        gradients, too, if that takes less time. Experimental; sums are taken in another order than eagerly.

    Returns:
      A `Function`, or a decorator if `func` is not given.
    """
    options = Options(jit_compile, input_signature, reduce_retracing, strict, name, regions, control_flow, batching)
    if func is None:
        return lambda f: function_of(f, options)
    return function_of(func, options)


def function_of(func: Any, options: Options) -> Any:
    """Wraps `func`, keeping `staticmethod`, `classmethod` and padding as the outermost wrappers."""
    if isinstance(func, Dynamic):
        return func.around(lambda inner: function_of(inner, options))
    if isinstance(func, (staticmethod, classmethod)):
        return type(func)(Function(func.__func__, options))
    return Function(func, options)
