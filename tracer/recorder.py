"""Recorder: runs operations eagerly and appends each to a trace."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from tracer import intercept, seeds
from tracer.faults import absorbs, call, is_fault
from tracer.inputs import MAX_CONSTANT, Unsupported, foldable, part_of, python_spec, settle, shape_like, small
from tracer.lazy import LazyTensor
from tracer.library import without_iterators
from tracer.location import Location, call_stack
from tracer.old_generation import hand_over
from tracer.op import FINALIZERS, Const, OpCall, array_in, function_name, plain_name, signature_of
from tracer.private import EagerTensor, core
from tracer.single_kernels import execute_alone
from tracer.slow_path import name_in_errors
from tracer.spec import spec_of
from tracer.trace import LibraryRun, Trace, described, name_of
from tracer.variable_ops import is_variable_op

HANDED_OVER = 128  # operations, after which what they leave goes to the oldest generation: some 30 objects each


class Recorder:
    """The handler of a recorded call: runs each operation at once, as without hooks, and adds it to the trace."""

    open = False
    records = True
    watches = None
    tapes = None

    def __init__(self, trace: Trace, counts: Counter[Any] | None = None) -> None:
        self.trace = trace
        self.device = intercept.device_in_scope()
        self.counts: Counter[Any] = counts if counts is not None else Counter()
        self.known: dict[int, tuple[str, Const | None]] = {}  # by tensor id: its source, and its value if constant
        self.failed: BaseException | None = None  # the first fault of the runtime; recording stops there
        self.strict = False  # whether such an error is raised into the program
        self.around: Any = None  # makes a library call by a function that it is passed, maybe with other arguments

    def fault(self, error: BaseException) -> bool:
        """Stops recording after a fault of the runtime, unless `strict`; operations still run."""
        if self.strict or not absorbs(error):
            return False
        self.failed = self.failed or error
        return True

    def fast(self, op: str, name: Any, args: tuple[Any, ...], given: tuple[Any, ...] | None = None) -> Any:
        """Runs and records an operation issued by a generated wrapper through `TFE_Py_FastPathExecute`.

        `given`: the arguments before they were settled.
        """
        signature = signature_of(op)
        if signature is None or op in FINALIZERS or self.failed is not None:
            return intercept.run_fast(op, name, args)
        given = args if given is None else given
        args = settle(signature, args)
        count = len(signature.inputs)
        pair, attrs = seeds.split(op, args[count:])
        at = len(self.trace.calls)
        run = intercept.run_fast_alone
        try:
            if signature.stateful and not is_variable_op(op):
                result = intercept.without_handler(lambda: intercept.run_settled(op, name, args, given, run))
            else:
                result = intercept.run_settled(op, name, args, given, run)
        except core._FallbackException:
            raise  # TensorFlow retries through `execute`
        except BaseException as error:
            if not is_fault(error):
                self._guarded(self._note_failed, at, "fast", op, attrs)
            raise
        try:  # spelled out: an error on the way into `_guarded` would have the operation run a second time
            said = name_in_errors(signature, name, given)
            self._took(pair, at, "fast", op, said, args[:count], attrs, args, result)
        except Exception as error:
            if not self.fault(error):
                raise
        return result

    def _guarded(self, note: Any, *about: Any) -> None:
        """Records what may be done again if an error surfaces; passes errors in doing so to `fault`."""
        try:
            note(*about)
        except Exception as error:
            if not self.fault(error):
                raise

    def _took(self, pair: seeds.Pair | None, *about: Any) -> None:
        seeds.take(pair)
        self._note(*about)

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any:
        """Runs and records an operation or function issued by name through `TFE_Py_Execute`."""
        at = len(self.trace.calls)
        name = plain_name(op)
        pair, kept = seeds.split(name, tuple(attrs or ()))
        try:
            run = functools.partial(intercept.run_execute, device, op, inputs, attrs, outputs, cancel, execute_alone)
            result = intercept.without_handler(run)
        except BaseException as error:
            if not is_fault(error):
                self._guarded(self._note_failed, at, "execute", name, kept)
            raise
        try:  # see `fast`
            if name not in FINALIZERS and self.failed is None:
                self._took(pair, at, "execute", name, function_name(op), tuple(inputs), kept, (), result)
            else:
                seeds.take(pair)
        except Exception as error:
            if not self.fault(error):
                raise
        return result

    def constant(self, value: Any, dtype: Any) -> Any:
        """Makes a tensor of a Python value and records it as a constant."""
        tensor = intercept.make_constant(value, dtype)
        self._guarded(self._note_constant, tensor, value)
        return tensor

    def _note_constant(self, tensor: Any, value: Any) -> None:
        if small(value) and tensor._num_elements() * 8 <= MAX_CONSTANT and tensor.dtype.is_numpy_compatible:
            self.known[tensor._id] = ("constant", Const(array_in(tensor)))

    def index(self, index: tuple[tuple[int, ...], ...]) -> None:
        """Returns None: TensorFlow handles the index itself."""

    def expected(self, op: str, args: tuple[Any, ...]) -> Any:
        """Returns None: while recording, the next operation is not known."""
        return None

    def library(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a library call; its operations are recorded one by one."""
        args = without_iterators(function, args)
        try:
            if self.around is not None:
                return self.around(function, args, kwargs, self._run)
            return self._run(function, args, kwargs)
        except Exception as error:  # of the runtime: before the call
            if not self.fault(error):
                raise
        return call(function, args, kwargs)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a library call, and notes what it was given, which operations it issued, and its result."""
        begin, given = len(self.trace.calls), described((args, kwargs))
        result = call(function, args, kwargs)
        try:  # see `fast`
            self.trace.runs.append(LibraryRun(function, given, begin, len(self.trace.calls), described(result)))
        except Exception as error:
            if not self.fault(error):
                raise
        return result

    def aside(self, inputs: Any, run: Callable[[], Any]) -> Any:
        """Runs operations placed on a device of the program's choice, outside the trace."""
        result = intercept.without_handler(run)
        try:  # see `fast`
            self._note_aside(result)
        except Exception as error:
            if not self.fault(error):
                raise
        return result

    def _note_aside(self, result: Any) -> None:
        made = (t for t in intercept.flat_outputs(result) if isinstance(t, EagerTensor))
        self.known.update((t._id, ("aside", None)) for t in made)

    def _locate(self, op: str) -> tuple[Location, int]:
        frames, guarded = call_stack()
        place = (frames, op)
        seen = self.counts.get(place, 0)  # (`+=` on a `Counter` calls Python for what it does not have)
        self.counts[place] = seen + 1
        return Location(frames, seen), guarded

    def _note_failed(self, at: int, entry: str, op: str, attrs: tuple[Any, ...]) -> None:
        location, guarded = self._locate(op)
        reason = "it failed when it was first recorded"
        self.trace.calls.insert(at, OpCall(op, entry, None, attrs, (), (), (), (), None, location, guarded, {}, reason))

    def _note(self, at: int, entry: str, op: str, name: Any, inputs: Any, attrs: Any, args: Any, result: Any) -> None:
        """Inserts the op call into the trace at `at`, the position at which it began."""
        if not at % HANDED_OVER:
            hand_over()
        location, guarded = self._locate(op)
        sources: list[str] = []
        numbers: dict[Any, Const] = {}
        try:
            parts = tuple([self._part(op, i, v, args, sources, numbers) for i, v in enumerate(inputs)])
        except (Unsupported, TypeError, ValueError) as error:
            reason = f"its inputs cannot be described: {error}"
            call = OpCall(op, entry, name, attrs, (), (), (), (), None, location, guarded, {}, reason)
            self.trace.calls.insert(at, call)
            return
        flat = intercept.flat_outputs(result)
        specs = tuple([spec_of(t) for t in flat])
        signature = signature_of(op)
        folds = signature is not None and foldable(op, signature.stateful, parts, specs)
        values = tuple([Const(array_in(t)) if folds else None for t in flat])
        for i, (tensor, value) in enumerate(zip(flat, values, strict=True)):
            self.known[tensor._id] = (f"{op}:{i}", value)
        template = intercept.template_of(result)
        told = tuple(sources), specs, values, template, location, guarded, numbers, None
        taken = tuple([_names_of(value) for value in inputs])
        call = OpCall(op, entry, name, attrs, parts, *told, taken, tuple([tensor._id for tensor in flat]))
        # A forward accumulator issues operations while this one runs; they come after it in the trace.
        self.trace.in_turn = self.trace.in_turn and at == len(self.trace.calls)
        self.trace.calls.insert(at, call)

    def _part(
        self, op: str, path: Any, value: Any, args: Any, sources: list[str] | None, numbers: dict[Any, Const]
    ) -> Any:
        """Returns the variant key part of the input or item at `path`; adds its source to `sources`, if given.

        A constant whose value the key does not have is added to `numbers`.
        """
        kind, i = type(value), path[0] if isinstance(path, tuple) else path
        if kind is LazyTensor:
            source, const = (value._out.node.op if value._out.node else "constant"), value._out.const
            part = part_of(const, value.measured(), op)
        elif kind is EagerTensor:
            known = self.known.get(value._id)
            source, const = known if known is not None else ("feed", shape_like(value))
            part = part_of(const, spec_of(value), op)
        elif isinstance(value, (list, tuple)) and args and signature_of(op).lists[i]:  # type: ignore[union-attr]
            source = "list"
            const, part = None, tuple(self._part(op, (i, j), v, args, None, numbers) for j, v in enumerate(value))
        else:
            signature = signature_of(op)
            if signature is None or not args:
                raise Unsupported("a Python value is passed to a function")
            source = "constant"
            spec = python_spec(signature, i, args, value)
            const = intercept.as_constant(value, spec) if small(value) else None
            part = part_of(const, spec, op)
        if const is not None and part is not const:
            numbers[path] = const
        if sources is not None:
            sources.append(source)
        return part


def _names_of(value: Any) -> Any:
    """Returns the name of an input's tensor, or those of a list's; None for a Python value."""
    return tuple(map(name_of, value)) if isinstance(value, (list, tuple)) else name_of(value)
