"""Tensor names: a call's tensors by their places in segments, whatever came before these.

What a gradient has to do is keyed by these names. Numbers within the call would differ where calls choose among ways of
several lengths before a cut: a decoder that takes the true word or its own ran the Python of its gradient in each call.
Segments that begin alike are counted from the last one backwards: what a loop that ends by a value (a fixed point, a
line search) has computed last has the same names after any number of iterations, and in each of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import Any

from tracer.cursor import Cursor
from tracer.graph import Step


class TensorNames:
    """The names of one call's tensors. Each has one until the next segment ends, and no two have the same."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._next = cursor.base - sum(last.end for last in cursor.ended)  # the key of the next segment's first tensor
        self._bases: list[int] = []  # such keys of the segments that have ended,
        self._begun: list[tuple[Step, int]] = []  # and where each began, for the how manieth time in this call
        self._times: Counter[Step] = Counter()

    @property
    def base(self) -> int:
        """The key from which on tensors are of the current segment, and named by their numbers there."""
        return self._cursor.base

    def of(self, key: int) -> Any:
        """Returns the name of a tensor of this call."""
        cursor = self._cursor
        if key >= cursor.base:
            return key - cursor.base
        for last in cursor.ended[len(self._begun) :]:
            root = last.root()
            self._times[root] += 1
            self._bases.append(self._next)
            self._begun.append((root, self._times[root]))
            self._next += last.end
        at = bisect_right(self._bases, key) - 1
        root, time = self._begun[at]
        return root, self._times[root] - time, key - self._bases[at]
