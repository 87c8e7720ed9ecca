"""Fed tensors: which feeds of the running segment are tensors of a gradient tape's records.

A path tells which feed an operation takes. It does not tell what an operation was fed that is not on the tape: with
`shown = tf.exp((a, b)[choice])` after a cut, the gradient's operations find `a` among the feeds, or `b`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

from coexec.follow.tape_entry import identities
from tracer.cursor import Cursor


class FedTensors:
    """Feeds by what they are on a tape: the number of a record, and the place of a tensor in it."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._known: dict[int, tuple[int, Any]] = {}

    @functools.cached_property
    def _numbers(self) -> dict[int, int]:
        return {id(tensor): number for number, tensor in enumerate(self._cursor.externals)}

    @functools.cached_property
    def may_be_constants(self) -> bool:
        """Whether a feed may be a constant of the tape, which the path does not name either."""
        cursor = self._cursor
        return any(id(v) in cursor.numbers or cursor.constant_of(v) is not None for v in cursor.externals)

    def add(self, at: int, places: Iterable[tuple[Any, Any]]) -> None:
        """Notes the feeds among the tensors of a record, given with their places."""
        for tensor, place in places:
            if (number := self._numbers.get(id(tensor))) is not None:
                self._known.setdefault(number, (at, place))

    def add_constants(self, at: int, entry: Any) -> None:
        """Notes the feeds among the constants of a record; one without a value is none, and gets none by this."""
        self.add(at, [(v, ("constant", n)) for n, tensor in enumerate(entry.constants()) for v in identities(tensor)])

    def all(self) -> tuple[Any, ...]:
        """Returns what has been found, by the feeds' numbers."""
        return tuple(sorted(self._known.items(), key=operator.itemgetter(0)))
