"""List buffers: what traced iterations append to the program's lists, as rows of buffers until the loop ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.control_flow.trace.reads import Reads
from coexec.control_flow.trace.values import CountedInt
from tracer.block import COUNT
from tracer.errors import Refused
from tracer.lazy import LazyTensor
from tracer.spec import RESOURCE, STRING, VARIANT, Spec, intern_spec
from tracer.stage import Stage

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Tensor, Value

Rows = tuple[LazyTensor, CountedInt]  # a buffer, and how many of its rows are filled


class GrowingList(NamedTuple):
    """A list that grows: the local variable that holds it, and its rows before the first iteration, as arguments."""

    name: str
    element: Spec
    before: Rows
    length: LazyTensor | None = None  # an argument: its length before the first iteration, if the loop uses that


class ListBuffers:
    """The lists that grow in a traced loop, each with a buffer of `rows` rows.

    `names` are local variables that are likely to hold such lists.
    """

    def __init__(self, reads: Reads, rows: int, names: set[str]) -> None:
        self.reads = reads
        self.rows = rows
        self.names = names
        self.grown: dict[int, GrowingList] = {}  # by the read that returned the list
        self.counts: dict[int, CountedInt] = {}  # filled rows before the first iteration, as arguments
        # Lengths before the first iteration, as arguments, where the loop uses them.
        self.lengths: dict[int, LazyTensor] = {}
        self.taken: list[tuple[int, Stage, LazyTensor]] = []  # everything appended, in order, with the path's stage
        self.parted: set[int] = set()  # lists to which only some paths append

    def before(self, place: int) -> Rows:
        """Returns a list's rows before the first iteration."""
        return self.grown[place].before

    def appended(self, place: int, rows: Rows | None, value: Value, stage: Stage) -> Rows:
        """Traces the append of a tensor; in a full buffer it overwrites the last row, which `lacks` detects."""
        if not isinstance(value, LazyTensor):
            raise Refused(f"a list takes a {'number' if isinstance(value, CountedInt) else type(value).__name__}")
        buffer, count = rows or self._started(place, value._out.spec).before
        if self.grown[place].element is not value._out.spec:
            raise Refused("a list takes tensors of several shapes or dtypes")
        self.taken.append((place, stage, value))
        index = tf.reshape(tf.minimum(count.tensor, self.rows - 1), [1, 1])
        buffer = tf.tensor_scatter_nd_update(buffer, index, tf.expand_dims(value, 0))
        return buffer, CountedInt(count.tensor + 1)

    def length(self, place: int, rows: Rows | None) -> CountedInt | None:
        """Returns the length of a list that is likely to grow; None for other lists."""
        if self.reads.variable(place) not in self.names:
            return None
        if place not in self.lengths:
            self.lengths[place] = self.reads.stage.argument(COUNT)
        return CountedInt(self.lengths[place] + (rows[1] if rows else self._count(place)).tensor)

    def _count(self, place: int) -> CountedInt:
        if place not in self.counts:
            self.counts[place] = CountedInt(self.reads.stage.argument(COUNT))
        return self.counts[place]

    def lacks(self, rows: Rows) -> Tensor:
        """Returns, as a tensor, whether the buffer has overflowed: such an iteration is left to Python."""
        return tf.greater(rows[1].tensor, self.rows)

    def _started(self, place: int, spec: Spec) -> GrowingList:
        known = self.grown.get(place)
        if known is not None:
            return known
        name = self.reads.variable(place)
        if name is None:
            raise Refused("a list grows that no local variable holds")
        if spec.enum in (RESOURCE, STRING, VARIANT):
            raise Refused("a list takes what cannot be compiled")
        if self.rows * spec.size > tuning.max_list_bytes:
            raise Refused("a list takes large tensors")
        stage = self.reads.stage
        buffer = stage.argument(intern_spec(spec.enum, (self.rows, *spec.shape)))
        self.grown[place] = GrowingList(name, spec, (buffer, self._count(place)))
        return self.grown[place]

    def taken_in(self, stage: Stage, growing: list[tuple[int, GrowingList]]) -> list[tuple[int, LazyTensor]] | None:
        """Returns the tensors that an iteration traced in `stage` appends, with list numbers; None if paths differ."""
        if self.parted.intersection(self.grown):
            return None
        numbers = {place: n for n, (place, _) in enumerate(growing)}
        return [(numbers[place], value) for place, within, value in self.taken if within is stage]

    def settled(self) -> list[tuple[int, GrowingList]]:
        """Returns all lists that grow, and guards that nothing aliases them.

        Raises `Refused` if the loop reads more of one than its length.
        """
        if any(self.reads.is_looked_into(place) for place in self.grown):
            raise Refused("a list is looked at in the loop in which it grows")
        if not self.lengths.keys() <= self.grown.keys():
            raise Refused("the length of a list is asked for that does not grow on the device")
        self.reads.alone.update(self.grown)
        return [(place, grown._replace(length=self.lengths.get(place))) for place, grown in self.grown.items()]
