"""The tapes of a batched call: records wait, and a gradient is taken through whole launches where that is the same."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from coexec.batching.buffers import SHIFT
from coexec.batching.launches import Gradients, propagate, seed, tracked
from coexec.follow.tape_entry import Constant, FastEntry, TapeEntry
from coexec.follow.tapes import Tapes
from tracer.intercept import flat_outputs, handling, record_fast
from tracer.lazy import LazyTensor
from tracer.private import EagerTensor, context, pywrap_tfe
from tracer.spec import RESOURCE


class BatchedEntry(TapeEntry):
    """The entry of one pending operation, put on its tapes only if they are used directly."""

    __slots__ = ("args", "op", "result", "tapes")

    def __init__(self, op: str, args: tuple[Any, ...], result: Any, tapes: tuple[int, ...]) -> None:
        self.op = op
        self.args = args
        self.result = result
        self.tapes = tapes

    def record(self, constant: Constant) -> None:
        """Puts the operation on the active tapes."""
        record_fast(self.op, self.args, flat_outputs(self.result))


class BatchTapes(Tapes):
    """The tapes of one batched call."""

    def __init__(self, constant: Constant, batch: Any) -> None:
        super().__init__(constant)
        self.waiting = not self.foreign
        self._batch = batch
        self._apart: list[Any] = []  # entries of operations that ran on their own

    def record_alone(self, entry: Any) -> None:
        """Defers the record of an operation that has run on its own."""
        self._apart.append(entry)
        super().record_alone(entry)

    def opened(self, tape: Any) -> None:
        """Notes a new tape that records."""
        super().opened(tape)
        self._batch.resting = False

    def _cannot_wait(self) -> None:
        """Ends deferring, as every operation must be recorded at once from now on."""
        super()._cannot_wait()
        self._batch.stop()

    def gradient(self, tape: Any, target: Any, sources: Any, cotangents: Any, raw: Any, unconnected: Any) -> Any:
        """Returns what TensorFlow would for the gradient of a tape; None if it has to find out itself."""
        number = self.number(tape)
        if number < 0 or not self.waiting or number in self._direct or number in self._finished or self.active:
            return None
        if not context.executing_eagerly():
            return None
        if unconnected != "none" or any(n == number for n, _, _ in self._watches):
            return None
        if any(number in entry.tapes and _is_differentiable(entry) for entry in self._apart):
            return None
        batch = self._batch
        if not all(type(v) is EagerTensor and v._datatype_enum() == RESOURCE for v in sources):
            return None
        if not all(type(v) is LazyTensor and v._run is batch and v._out.const is None and v._key >= 0 for v in target):
            return None
        if not all(v is None or type(v) in (EagerTensor, LazyTensor) for v in cotangents or ()):
            return None
        watched = {id(variable.handle) for variable in pywrap_tfe.TFE_Py_TapeWatchedVariables(tape)}
        with handling(None):
            return self._gradient(number, target, sources, cotangents, watched)

    def _gradient(self, number: int, target: Any, sources: Any, cotangents: Any, watched: set[int]) -> Any:
        batch = self._batch
        batch.flush()
        if not batch.whole:
            return None
        buffers, launches = batch.buffers, batch.launches
        reads = {
            id(handle): [b for b, (read, tapes) in batch.handles.items() if read is handle and number in tapes]
            for handle in sources
            if id(handle) in watched
        }
        wanted = tracked(launches, {b for found in reads.values() for b in found}, number)
        gradients = Gradients(buffers)
        given = cotangents or [None] * len(target)
        for tensor, cotangent in zip(target, given, strict=True):
            if tensor._key >> SHIFT in wanted:
                if cotangent is None:
                    cotangent = tf.ones(tensor.shape, tensor.dtype)
                elif type(cotangent) is LazyTensor:
                    cotangent = cotangent.resolve()
                seed(tensor._key, cotangent, gradients, buffers)
        propagate(launches, gradients, wanted, buffers)
        batch.resting = True
        batch.gradients += 1
        return [_sum([p for b in reads.get(id(handle), ()) for p in gradients.parts(b)]) for handle in sources]


def _sum(parts: list[Any]) -> Any:
    """Returns the sum of gradients, of rows only if all are; None of none."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, tf.IndexedSlices) for part in parts):
        parts = parts[::-1]  # as the program looked them up: that is eager's order, too, where it is told by the values
        values, indices = tf.concat([p.values for p in parts], 0), tf.concat([p.indices for p in parts], 0)
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])


def _is_differentiable(entry: Any) -> bool:
    """Whether a gradient may pass through an operation that ran on its own."""
    if not isinstance(entry, FastEntry):
        return any(not v.dtype.is_integer and not v.dtype.is_bool and not _is_constant(v) for v in entry._inputs)
    # Only what variables go into: a tensor from outside is watched by nobody, and what other such operations have made
    # does not matter, as these are asked first.
    return any(v.dtype.is_floating or v.dtype.is_complex for v in entry.outputs) and any(
        v.dtype == tf.resource
        or (type(v) is LazyTensor and (v.dtype.is_floating or v.dtype.is_complex) and not _is_constant(v))
        for v in entry._inputs
    )


def _is_constant(value: Any) -> bool:
    return type(value) is LazyTensor and value._out.const is not None
