"""Positions: slices whose positions keep changing, as `nodes[best]`, become gathers of rows at positions that are data.

A kind of operation has its constants in it. Where they are positions that Python works out, there would be as many
kinds as positions, and a program of groups for each: nothing would ever come again.
"""

from __future__ import annotations

from typing import Any

from coexec.base.tuning import tuning
from tracer.lazy import LazyTensor

_PLAIN = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")


class Positions:
    """The positions that have been seen at places of the program."""

    def __init__(self) -> None:
        self._seen: dict[Any, set[int]] = {}

    def rows(self, place: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """Returns the rows that a slice at a place takes of the first axis, if it has come with several others.

        A number if it drops that axis, else a list; None if it is to be an operation of its own kind. `args`: those of
        `StridedSlice`.
        """
        value, begin, end, strides, *attrs = args
        if type(value) is not LazyTensor or value._key < 0 or value._out.const is not None:
            return None
        shape = value._out.spec.shape
        given = [bound._out.const if type(bound) is LazyTensor else None for bound in (begin, end, strides)]
        known = [[int(n) for n in const.value] for const in given if const is not None]
        if not shape or len(known) != 3:
            return None
        first, last, step = known
        masks = dict(zip(attrs[::2], attrs[1::2], strict=True))
        if len(first) != 1 or step != [1] or any(masks.get(name) for name in _PLAIN):
            return None
        start, count = first[0], last[0] - first[0]
        if masks.get("shrink_axis_mask"):
            start, count = (start % shape[0] if -shape[0] <= start < shape[0] else -1), 1
        if count < 1 or start < 0 or start + count > shape[0]:
            return None
        seen = self._seen.setdefault((place, shape, count), set())
        if len(seen) < tuning.batching_positions:
            seen.add(start)
            return None
        return start if masks.get("shrink_axis_mask") else list(range(start, start + count))
