"""Buffers: the tensors of a batched call, many to a buffer, one row each.

A *key* is a buffer's number and a row in it, as one integer; a shared tensor has a buffer of its own, and a negative
key. Buffers are numbered in the order in which they are made, and hold nothing until they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.intercept import make_constant, run_fast
from tracer.lazy import LazyTensor
from tracer.spec import Spec

SHIFT = 32
MASK = (1 << SHIFT) - 1
CONST_KEY = -1  # of a constant, which is in no buffer


def shared_key(buffer: int) -> int:
    """Returns the key of the tensor in a shared buffer; the same function gives the buffer of such a key."""
    return -2 - buffer


class Buffers:
    """The buffers of one call."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []  # of one row
        self.depths: list[int] = []  # after how many operations it can be computed at the earliest
        self.values: list[Any] = []  # stacked; of a shared buffer the tensor itself
        self.shared: list[bool] = []
        self._rows: dict[int, list[Any]] = {}  # of buffers of tensors from outside, not stacked yet
        self._open: dict[Spec, int] = {}  # such a buffer by spec
        self._keys: dict[int, tuple[int, Any]] = {}  # keys by the id of a tensor, which is kept
        self.count = 0

    def new(self, spec: Spec, depth: int, shared: bool = False, value: Any = None) -> int:
        """Makes a buffer; returns its number."""
        self.specs.append(spec)
        self.depths.append(depth)
        self.values.append(value)
        self.shared.append(shared)
        self.count += 1
        return self.count - 1

    def known(self, value: Any) -> int | None:
        """Returns the key of a tensor from outside that has one."""
        found = self._keys.get(id(value))
        return None if found is None else found[0]

    def share(self, value: Any, spec: Spec) -> int:
        """Returns the key of a tensor from outside as a shared one."""
        key = shared_key(self.new(spec, 0, True, value))
        self._keys[id(value)] = key, value
        return key

    def feed(self, value: Any, spec: Spec) -> int:
        """Returns the key of a tensor, or an output that is a constant, from outside as a row."""
        buffer = self._open.get(spec)
        if buffer is None:
            buffer = self._open[spec] = self.new(spec, 0)
            self._rows[buffer] = []
        rows = self._rows[buffer]
        key = buffer << SHIFT | len(rows)
        rows.append(value)
        self._keys[id(value)] = key, value
        return key

    def close_feeds(self) -> None:
        """Stacks the tensors from outside; later ones go into other buffers."""
        for buffer, rows in self._rows.items():
            spec = self.specs[buffer]
            arrays: list[Any] = [None if isinstance(row, tf.Tensor) else row.const.value for row in rows]
            if all(array is not None for array in arrays):
                self.values[buffer] = make_constant(np.stack(arrays).astype(spec.dtype.as_numpy_dtype), spec.dtype)
            else:
                tensors = [
                    row if array is None else make_constant(array, spec.dtype)
                    for row, array in zip(rows, arrays, strict=True)
                ]
                self.values[buffer] = tf.stack([t.resolve() if type(t) is LazyTensor else t for t in tensors])
        self._rows, self._open = {}, {}
        self._keys = {i: known for i, known in self._keys.items() if known[0] < 0}

    def at(self, key: int) -> Any:
        """Returns the tensor of a key, whose buffer has been computed."""
        if key < 0:
            return self.values[shared_key(key)]
        return take(self.values[key >> SHIFT], key & MASK)

    def whole(self, keys: Sequence[int]) -> int | None:
        """Returns the buffer whose rows these are, one by one and in order; None if there is none."""
        first, count = keys[0], len(keys)
        if first & MASK or keys[-1] != first + count - 1:
            return None
        buffer = first >> SHIFT
        value = self.values[buffer]
        if value is not None and value.shape[0] != count:
            return None
        return buffer if count == 1 or list(keys) == list(range(first, first + count)) else None


class Rows:
    """Rows of several buffers, in an order: where they come from, and where their gradients go."""

    def __init__(self, keys: Sequence[int], whole: int | None) -> None:
        self.whole = whole  # the buffer, if it is all of one, in order
        if whole is None:
            array = np.asarray(keys, np.int64)
            numbers = array >> SHIFT
            self.sources, which = np.unique(numbers, return_inverse=True)
            self._which = which.reshape(-1)
            self._rows = array & MASK

    def buffers(self) -> list[int]:
        """Returns the buffers that they are in."""
        return [self.whole] if self.whole is not None else self.sources.tolist()

    def gather(self, buffers: Buffers) -> Any:
        """Returns them, stacked."""
        if self.whole is not None:
            return buffers.values[self.whole]
        values = [buffers.values[b] for b in self.sources.tolist()]
        if len(values) == 1:
            return take(values[0], self._rows)
        return take(joined(values), self._index(values))

    def _index(self, values: list[Any]) -> Any:
        starts = np.cumsum([0, *(int(v.shape[0]) for v in values[:-1])])
        return starts[self._which] + self._rows

    def scatter(self, gradient: Any, chosen: Any, buffers: Buffers) -> list[tuple[int, Any, Any]]:
        """Returns what buffers get of a gradient of these rows: (buffer, gradient, mask of rows).

        `chosen`: the numbers of the rows that the gradient is of; None for all.
        """
        if self.whole is not None:
            size = int(buffers.values[self.whole].shape[0])
            mask = np.ones(size, bool)
            if chosen is not None:
                mask[:] = False
                mask[chosen] = True
                gradient = _summed(gradient, chosen, size)
            return [(self.whole, gradient, mask)]
        values = [buffers.values[b] for b in self.sources.tolist()]
        sizes = [int(v.shape[0]) for v in values]
        index = self._index(values)
        if chosen is not None:
            index = index[chosen]
        mask = np.zeros(sum(sizes), bool)
        mask[index] = True
        total = _summed(gradient, index, sum(sizes))
        parts = [total]
        if len(sizes) > 1:
            parts = run_fast("SplitV", None, (total, make_constant(sizes, tf.int64), 0, "num_split", len(sizes)))
        found, start = [], 0
        for buffer, size, part in zip(self.sources.tolist(), sizes, parts, strict=True):
            found.append((buffer, part, mask[start : start + size]))
            start += size
        return found


# A third of the time of TensorFlow's own functions, which are called for every argument of a launch.


def take(value: Any, rows: Any) -> Any:
    """Returns rows of a stacked tensor, or one row."""
    return run_fast("GatherV2", None, (value, rows, 0, "batch_dims", 0))


def joined(values: list[Any]) -> Any:
    """Returns stacked tensors as one."""
    return run_fast("ConcatV2", None, (values, 0))


def _summed(gradient: Any, index: Any, size: int) -> Any:
    return run_fast("UnsortedSegmentSum", None, (gradient, index, size))
