"""Recorder: runs operations imperatively and notes what they did."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tracer import intercept, seeds
from tracer.graph import is_variable_op
from tracer.inputs import MAX_CONSTANT, Unsupported, foldable, part_of, python_spec, settle, shape_like, small
from tracer.lazy import LazyTensor
from tracer.location import Location, call_stack
from tracer.op import FINALIZERS, Const, OpCall, plain_name, signature_of
from tracer.private import EagerTensor, core
from tracer.spec import spec_of
from tracer.trace import Trace


class Recorder:
    """The handler of a recording: each operation runs at once, as without it, and is added to the trace."""

    open = False
    tapes = None

    def __init__(self, trace: Trace, counts: Counter[Any] | None = None) -> None:
        self.trace = trace
        self.device = intercept.device_in_scope()
        self.counts: Counter[Any] = counts if counts is not None else Counter()
        self.known: dict[int, tuple[str, Const | None]] = {}  # by tensor id: where it came from, its value

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any:
        """Runs an operation issued by a generated wrapper."""
        signature = signature_of(op)
        if signature is None or op in FINALIZERS:
            return intercept.run_fast(op, name, args)
        args = settle(signature, args)
        count = len(signature.inputs)
        pair, attrs = seeds.split(op, args[count:])
        at = len(self.trace.calls)
        try:
            if signature.stateful and not is_variable_op(op):
                with intercept.handling(None):  # Python that it runs inside is no part of the call's operations
                    result = intercept.run_fast(op, name, args)
            else:
                result = intercept.run_fast(op, name, args)
        except core._FallbackException:
            raise  # TensorFlow comes again, by name
        except BaseException:
            self._note_failed(at, "fast", op, attrs)
            raise
        seeds.take(pair)
        self._note(at, "fast", op, name, args[:count], attrs, args, result)
        return result

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any:
        """Runs an operation or a function issued by name."""
        at = len(self.trace.calls)
        name = plain_name(op)
        pair, kept = seeds.split(name, tuple(attrs or ()))
        try:
            with intercept.handling(None):
                result = intercept.run_execute(device, op, inputs, attrs, outputs, cancel)
        except BaseException:
            self._note_failed(at, "execute", name, kept)
            raise
        seeds.take(pair)
        if name not in FINALIZERS:
            self._note(at, "execute", name, None, tuple(inputs), kept, (), result)
        return result

    def constant(self, value: Any, dtype: Any) -> Any:
        """Makes a tensor of a Python value and remembers that it did."""
        tensor = intercept.make_constant(value, dtype)
        if small(value) and tensor._num_elements() * 8 <= MAX_CONSTANT and tensor.dtype.is_numpy_compatible:
            self.known[tensor._id] = ("constant", Const(np.asarray(tensor._numpy_internal())))
        return tensor

    def index(self, index: tuple[tuple[int, ...], ...]) -> None:
        """Leaves the index to TensorFlow."""

    def expected(self, op: str, args: tuple[Any, ...]) -> Any:
        """Answers an operation that is known to come next: none is, while it is recorded."""
        return None

    def library(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a library call, which nobody follows while it is recorded."""
        return function(*args, **kwargs)

    def aside(self, inputs: Any, run: Any) -> Any:
        """Runs operations that the program wants to run by themselves; they are no part of the trace."""
        with intercept.handling(None):
            result = run()
        made = (t for t in intercept.flat_outputs(result) if isinstance(t, EagerTensor))
        self.known.update((t._id, ("aside", None)) for t in made)
        return result

    def _locate(self, op: str) -> tuple[Location, int]:
        frames, guarded = call_stack()
        place = (frames, op)
        location = Location(frames, self.counts[place])
        self.counts[place] += 1
        return location, guarded

    def _note_failed(self, at: int, entry: str, op: str, attrs: tuple[Any, ...]) -> None:
        location, guarded = self._locate(op)
        reason = "it failed when it was first recorded"
        self.trace.calls.insert(at, OpCall(op, entry, None, attrs, (), (), (), (), None, location, guarded, reason))

    def _note(self, at: int, entry: str, op: str, name: Any, inputs: Any, attrs: Any, args: Any, result: Any) -> None:
        location, guarded = self._locate(op)
        sources: list[str] = []
        try:
            parts = tuple(self._part(op, i, v, args, sources) for i, v in enumerate(inputs))
        except (Unsupported, TypeError, ValueError) as error:
            reason = f"its inputs cannot be described: {error}"
            call = OpCall(op, entry, name, attrs, (), (), (), (), None, location, guarded, reason)
            self.trace.calls.insert(at, call)
            return
        flat = intercept.flat_outputs(result)
        specs = tuple(spec_of(t) for t in flat)
        signature = signature_of(op)
        folds = signature is not None and foldable(op, signature.stateful, parts, specs)
        values = tuple(Const(np.asarray(t._numpy_internal())) if folds else None for t in flat)
        for i, (tensor, value) in enumerate(zip(flat, values, strict=True)):
            self.known[tensor._id] = (f"{op}:{i}", value)
        template = intercept.template_of(result)
        call = OpCall(op, entry, name, attrs, parts, tuple(sources), specs, values, template, location, guarded)
        # Forward accumulators issue operations from within one: those come after it.
        self.trace.calls.insert(at, call)

    def _part(self, op: str, i: int, value: Any, args: Any, sources: list[str] | None) -> Any:
        kind = type(value)
        if kind is LazyTensor:
            source, const = (value._out.node.op if value._out.node else "constant"), value._out.const
            part = part_of(const, value._out.spec, op)
        elif kind is EagerTensor:
            known = self.known.get(value._id)
            source, const = known if known is not None else ("feed", shape_like(value))
            part = part_of(const, spec_of(value), op)
        elif isinstance(value, (list, tuple)) and args and signature_of(op).lists[i]:  # type: ignore[union-attr]
            source = "list"
            part = tuple(self._part(op, i, v, args, None) for v in value)
        else:
            signature = signature_of(op)
            if signature is None or not args:
                raise Unsupported("a Python value is passed to a function")
            source = "constant"
            part = part_of(Const(value) if small(value) else None, python_spec(signature, i, args, value), op)
        if sources is not None:
            sources.append(source)
        return part
