"""Lists: what staged turns append to lists of the program's, kept as rows of buffers until the loop is left."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from coexec.staging.reads import Reads
from coexec.staging.values import Whole
from tracer.block import COUNT
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.spec import RESOURCE, STRING, VARIANT, Spec, intern_spec
from tracer.stage import Stage

ROWS = 32  # of a buffer, until a loop has been seen to need more
MAX_BYTES = 1 << 24  # of a buffer

Rows = tuple[Any, Whole]  # a buffer, and how many of its rows are filled


class Grown(NamedTuple):
    """A list that grows, by the local variable that holds it; what its rows are before the first turn, as arguments."""

    name: str
    element: Spec
    before: Rows
    length: Any = None  # an argument: how many it holds before the first turn, if somebody asks


class Lists:
    """The lists that grow in a loop which is written down, each with a buffer of so many rows.

    `names` are local variables that are likely to hold such lists.
    """

    def __init__(self, reads: Reads, rows: int, names: set[str]) -> None:
        self.reads = reads
        self.rows = rows
        self.names = names
        self.grown: dict[int, Grown] = {}  # by the read that the list has come from
        self.counts: dict[int, Whole] = {}  # what they have grown by before the first turn, as arguments
        self.lengths: dict[int, Any] = {}  # how many they hold before it, where somebody asks
        self.taken: list[tuple[int, Stage, LazyTensor]] = []  # all that they take, in order, and on which path
        self.parted: set[int] = set()  # those that take something on some paths only

    def before(self, place: int) -> Rows:
        """Returns a list's rows before the first turn."""
        return self.grown[place].before

    def appended(self, place: int, rows: Rows | None, value: Any, stage: Stage) -> Rows:
        """Writes down in a stage that a list takes one more tensor, into the last row where the buffer is full."""
        if not isinstance(value, LazyTensor):
            raise Refused(f"a list takes a {'number' if isinstance(value, Whole) else type(value).__name__}")
        buffer, count = rows or self._started(place, value._out.spec).before
        if self.grown[place].element is not value._out.spec:
            raise Refused("a list takes tensors of several shapes or dtypes")
        self.taken.append((place, stage, value))
        index = tf.reshape(tf.minimum(count.tensor, self.rows - 1), [1, 1])
        buffer = tf.tensor_scatter_nd_update(buffer, index, tf.expand_dims(value, 0))
        return buffer, Whole(count.tensor + 1)

    def length(self, place: int, rows: Rows | None) -> Whole | None:
        """Returns how many a list holds, if it is one that is likely to grow."""
        if self.reads.variable(place) not in self.names:
            return None
        if place not in self.lengths:
            self.lengths[place] = self.reads.stage.argument(COUNT)
        return Whole(self.lengths[place] + (rows[1] if rows else self._count(place)).tensor)

    def _count(self, place: int) -> Whole:
        if place not in self.counts:
            self.counts[place] = Whole(self.reads.stage.argument(COUNT))
        return self.counts[place]

    def lacks(self, rows: Rows) -> Any:
        """Returns, as a tensor, whether more was appended than there are rows: such a turn is Python's."""
        return tf.greater(rows[1].tensor, self.rows)

    def _started(self, place: int, spec: Spec) -> Grown:
        known = self.grown.get(place)
        if known is not None:
            return known
        name = self.reads.variable(place)
        if name is None:
            raise Refused("a list grows that no local variable holds")
        if spec.enum in (RESOURCE, STRING, VARIANT):
            raise Refused("a list takes what cannot be compiled")
        if self.rows * spec.size > MAX_BYTES:
            raise Refused("a list takes large tensors")
        stage = self.reads.stage
        buffer = stage.argument(intern_spec(spec.enum, (self.rows, *spec.shape)))
        self.grown[place] = Grown(name, spec, (buffer, self._count(place)))
        return self.grown[place]

    def taken_in(self, stage: Stage, growing: list[tuple[int, Grown]]) -> list[tuple[int, LazyTensor]] | None:
        """Returns what each turn, written down in a stage, appends to which of the lists; None if turns differ."""
        if self.parted.intersection(self.grown):
            return None
        numbers = {place: n for n, (place, _) in enumerate(growing)}
        return [(numbers[place], value) for place, within, value in self.taken if within is stage]

    def settled(self) -> list[tuple[int, Grown]]:
        """Returns all that grow; refuses where something else has been asked of one than to grow."""
        if any(self.reads.is_looked_into(place) for place in self.grown):
            raise Refused("a list is looked at in the loop in which it grows")
        if not self.lengths.keys() <= self.grown.keys():
            raise Refused("the length of a list is asked for that does not grow on the device")
        self.reads.alone.update(self.grown)
        return [(place, grown._replace(length=self.lengths.get(place))) for place, grown in self.grown.items()]
