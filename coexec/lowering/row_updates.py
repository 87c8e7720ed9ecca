"""Row updates: operations that change some rows of a variable, in place, behind all that may fail.

A segment tracks variables as values, which it writes at its end: that copies them. A step that changes 256 of the
200,000 rows of an embedding took 11 times as long as eagerly. So a graph runs such operations on the variable itself
where nothing that may fail comes after them, and a launch still does all of its writes or none: what they depend on is
computed before, and their indices are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from coexec.lowering.op_failures import can_fail, is_unproven
from tracer.block import STRUCTURES
from tracer.graph import CONST, Step
from tracer.spec import RESOURCE, Spec
from tracer.variable_ops import READS


class Inputs(NamedTuple):
    """Where an operation's inputs are: how many variables come first, then by position."""

    variables: int
    updates: int
    indices: int


# What they are by value: those of rows, and those of elements at any depth.
SCATTERS = {
    "ResourceScatterAdd": "TensorScatterAdd",
    "ResourceScatterSub": "TensorScatterSub",
    "ResourceScatterUpdate": "TensorScatterUpdate",
    "ResourceScatterMin": "TensorScatterMin",
    "ResourceScatterMax": "TensorScatterMax",
}
ND_SCATTERS = {op.replace("Scatter", "ScatterNd"): by_value for op, by_value in SCATTERS.items()}
SLICE = "ResourceStridedSliceAssign"

# Operations of optimizers on rows. They handle rows that recur one after the other, so they have no formula.
OPTIMIZERS = {
    "ResourceSparseApplyAdadelta": Inputs(3, 6, 7), "ResourceSparseApplyAdagrad": Inputs(2, 3, 4),
    "ResourceSparseApplyAdagradV2": Inputs(2, 4, 5), "ResourceSparseApplyCenteredRMSProp": Inputs(4, 8, 9),
    "ResourceSparseApplyFtrl": Inputs(3, 3, 4), "ResourceSparseApplyFtrlV2": Inputs(3, 3, 4),
    "ResourceSparseApplyKerasMomentum": Inputs(2, 3, 4), "ResourceSparseApplyMomentum": Inputs(2, 3, 4),
    "ResourceSparseApplyRMSProp": Inputs(3, 7, 8),
}  # fmt: skip

WRITES = {**dict.fromkeys([*SCATTERS, *ND_SCATTERS], Inputs(1, 2, 1)), SLICE: Inputs(1, 4, 1), **OPTIMIZERS}

GATHER = "ResourceGather"

# What may be computed of updated rows where their number is not known: it never fails if the numbers of rows agree.
_ELEMENTWISE = frozenset(
    {"Abs", "AddV2", "DivNoNan", "Identity", "Maximum", "Minimum", "Mul", "Neg", "RealDiv", "Rsqrt", "Sqrt", "Square",
     "StopGradient", "Sub"}
)  # fmt: skip


@dataclass(frozen=True)
class RowUpdates:
    """The operations of a segment that a graph runs on its variables themselves."""

    late: frozenset[int] = frozenset()  # places of steps that run behind all others: updates, and what reads them
    tables: frozenset[int] = frozenset()  # feeds with the variables that they update
    sized: frozenset[int] = frozenset()  # late places at which tensors must have as many rows as there are indices
    refusal: str | None = None  # why the segment cannot be emitted

    def size(self, feeds: tuple[Spec, ...]) -> int:
        """Returns the size of the tables in bytes."""
        return sum(feeds[k].size for k in self.tables)


def row_updates(steps: tuple[Step, ...], feeds: tuple[Spec, ...], dynamic: bool) -> RowUpdates:
    """Returns which of these steps a graph runs in place.

    A variable is updated in place if nothing but updates and reads of rows follow the first update, and what depends on
    such a read cannot fail. That is late, too, and so is what uses another variable that it is written to. `dynamic`:
    sizes differ between launches.
    """
    if not any(step.op in WRITES for step in steps):
        return RowUpdates()
    return _Search(steps, feeds, dynamic).found()


class _Search:
    """Finds the variables that may be updated in place: begins with all, and drops those that may not."""

    def __init__(self, steps: tuple[Step, ...], feeds: tuple[Spec, ...], dynamic: bool) -> None:
        self.steps = [(n, s) for n, s in enumerate(steps) if s.variant is None or not s.variant.folded]
        self.feeds = feeds
        self.dynamic = dynamic
        self.specs = {s.first + n: out.spec for s in steps for n, out in enumerate(s.outputs)}
        accesses: dict[int, list[Step]] = {}  # by feed with a variable
        for _, step in self.steps:
            for k in self._variables(step):
                accesses.setdefault(k, []).append(step)
        self.tables = {k for k, steps in accesses.items() if self._has_rows(k) and _is_table(k, steps)}
        self.late: set[int] = set()
        self.sized: set[int] = set()

    def found(self) -> RowUpdates:
        while wrong := self._updated_with_others() or self._followed_by_failures():
            self.tables -= wrong
        refusal = None
        for _, step in self.steps:
            if step.op in OPTIMIZERS and not self.tables.issuperset(_updated(step)):
                refusal = f"a variable is used again behind {step.op}, which updates some of its rows"
        return RowUpdates(frozenset(self.late), frozenset(self.tables), frozenset(self.sized), refusal)

    def _variables(self, step: Step) -> list[int]:
        """Returns the feeds with the variables that a step is given."""
        given = {-1 - slot for slot in _slots(step) if CONST < slot < 0}
        return [k for k in given if k < len(self.feeds) and self.feeds[k].enum == RESOURCE]

    def _has_rows(self, k: int) -> bool:
        handle = self.feeds[k].handle
        shape = None if handle is None else handle[0][1]
        return shape is not None and len(shape) > 0 and None not in shape and -1 not in shape

    def _updated_with_others(self) -> set[int]:
        """Returns the tables that are updated together with variables that are not, or with themselves."""
        wrong = set()
        for _, step in self.steps:
            together = _updated(step)
            if not self.tables.issuperset(together) or len(set(together)) < len(together):
                wrong.update(together)
        return wrong & self.tables

    def _followed_by_failures(self) -> set[int]:
        """Sets what is late; returns the tables whose updated rows go into what may fail."""
        self.late, self.sized = set(), set()
        updated: set[int] = set()
        sources: dict[int, frozenset[int]] = {}  # by tensor: the tables with updated rows that it depends on
        places: set[int] = set()  # slots of the indices of late steps
        assigned: dict[int, frozenset[int]] = {}  # by other variable that a late step writes: the same
        wrong: set[int] = set()
        for place, step in self.steps:
            variables = self._variables(step)
            known = frozenset().union(*(sources.get(slot, frozenset()) for slot in _slots(step)))
            known = known.union(*(assigned.get(k, frozenset()) for k in variables))
            written = self.tables.intersection(_updated(step))
            read = updated.intersection(variables) if step.op == GATHER else set()
            if not (written or read or known):
                continue
            self.late.add(place)
            concerned = known | written | read
            unsized = self.dynamic or step.open
            if written or read:
                indices = step.slots[WRITES[step.op or ""].indices if written else 1]
                places.add(indices)
                if indices in sources or (unsized and not self._counts_rows(step, indices)):
                    wrong |= concerned
                if step.op == SLICE and not self._is_in_range(step):
                    wrong |= concerned
            elif step.op in _ELEMENTWISE and not step.lists if unsized else not _may_fail(step):
                assigned.update((k, known) for k in variables if step.op not in READS)
            else:
                wrong |= concerned
            if unsized:
                self.sized.add(place)
                # Sizes are compared beforehand, with the number of these indices.
                if (known or read) and (self.dynamic or len(places) > 1):
                    wrong |= concerned
                if not all(self._is_open_in_rows(slot) for slot in _slots(step) if slot not in sources):
                    wrong |= concerned
            updated |= written
            sources.update((step.first + n, known | read) for n in range(len(step.outputs)))
        return wrong & self.tables

    def _counts_rows(self, step: Step, indices: int) -> bool:
        """Returns whether an operation takes as many rows as there are indices."""
        return step.op not in ND_SCATTERS and step.op != SLICE and len(self._shape(indices) or ()) == 1

    def _is_in_range(self, step: Step) -> bool:
        """Returns whether a slice is known to be there, or will be if its indices are, as of single elements."""
        if all(step.slots[n] == CONST for n in (1, 2, 3)):
            return True
        attrs = attributes_of(step)
        shape = self._shape(step.slots[1])
        if shape is None or len(shape) != 1 or shape[0] is None or step.slots[3] != CONST:
            return False
        masks = [attrs.get(name) or 0 for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")]
        picked = attrs.get("shrink_axis_mask") == (1 << shape[0]) - 1
        return picked and not any(masks) and bool(np.all(np.equal(step.consts[3].value, 1)))

    def _shape(self, slot: int) -> tuple[int | None, ...] | None:
        """Returns the shape of an input; None of a constant."""
        if slot >= 0:
            return self.specs[slot].shape
        return self.feeds[-1 - slot].shape if slot > CONST else None

    def _is_open_in_rows(self, slot: int) -> bool:
        """Returns whether the sizes of an input are known but for how many rows there are."""
        return None not in (self._shape(slot) or ())[1:]


def _slots(step: Step) -> list[int]:
    return [*step.slots, *(slot for many, _ in step.lists.values() for slot in many)]


def _updated(step: Step) -> list[int]:
    """Returns the feeds with the variables whose rows a step updates."""
    inputs = WRITES.get(step.op or "")
    return [] if inputs is None else [-1 - slot for slot in step.slots[: inputs.variables]]


def _is_table(k: int, steps: list[Step]) -> bool:
    """Returns whether a variable of these accesses, in order, is read as it was before, then by rows."""
    updated = False
    for step in steps:
        if k in _updated(step):
            updated = True
        elif updated:
            if step.op != GATHER or attributes_of(step).get("batch_dims"):
                return False
        elif step.op not in READS and (step.node is None or step.node.callee is None):
            return False
    return updated


def _may_fail(step: Step) -> bool:
    if step.op in STRUCTURES or step.node is None or step.node.callee is not None:
        return True
    return can_fail(step) or is_unproven(step)


def attributes_of(step: Step) -> dict[str, Any]:
    """Returns an operation's attributes by name."""
    return dict(zip(step.attrs[::2], step.attrs[1::2], strict=True))
