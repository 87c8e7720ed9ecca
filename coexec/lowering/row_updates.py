"""Row updates: operations that change some rows of a variable, in place, behind all that may fail.

A segment tracks variables as values, which it writes at its end: that copies them. A step that changes 256 of the
200,000 rows of an embedding took 11 times as long as eagerly. So a graph runs such operations on the variable itself
where nothing that may fail comes after them, and a launch still does all of its writes or none: what they depend on is
computed before, and their indices are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tracer.graph import CONST, Step
from tracer.spec import RESOURCE, Spec
from tracer.variable_ops import READS


class Inputs(NamedTuple):
    """Where an operation's inputs are: how many variables come first, then by position."""

    variables: int
    updates: int
    indices: int


SCATTERS = {
    "ResourceScatterAdd": "TensorScatterAdd",
    "ResourceScatterSub": "TensorScatterSub",
    "ResourceScatterUpdate": "TensorScatterUpdate",
    "ResourceScatterMin": "TensorScatterMin",
    "ResourceScatterMax": "TensorScatterMax",
}

# Operations of optimizers on rows. They handle rows that recur one after the other, so they have no formula.
OPTIMIZERS = {
    "ResourceSparseApplyAdadelta": Inputs(3, 6, 7), "ResourceSparseApplyAdagrad": Inputs(2, 3, 4),
    "ResourceSparseApplyAdagradV2": Inputs(2, 4, 5), "ResourceSparseApplyCenteredRMSProp": Inputs(4, 8, 9),
    "ResourceSparseApplyFtrl": Inputs(3, 3, 4), "ResourceSparseApplyFtrlV2": Inputs(3, 3, 4),
    "ResourceSparseApplyKerasMomentum": Inputs(2, 3, 4), "ResourceSparseApplyMomentum": Inputs(2, 3, 4),
    "ResourceSparseApplyRMSProp": Inputs(3, 7, 8),
}  # fmt: skip

WRITES = {**dict.fromkeys(SCATTERS, Inputs(1, 2, 1)), **OPTIMIZERS}

GATHER = "ResourceGather"

# What may be computed between updates, of rows that one of them has changed: it never fails on numbers.
_ELEMENTWISE = frozenset(
    {"Abs", "AddV2", "DivNoNan", "Identity", "Maximum", "Minimum", "Mul", "Neg", "RealDiv", "Rsqrt", "Sqrt", "Square",
     "StopGradient", "Sub"}
)  # fmt: skip


@dataclass(frozen=True)
class RowUpdates:
    """The operations of a segment that a graph runs on its variables themselves."""

    late: frozenset[int] = frozenset()  # places of steps that run behind all others: updates, and what reads them
    tables: frozenset[int] = frozenset()  # feeds with the variables that they update
    gathered: frozenset[int] = frozenset()  # feeds with variables of which other steps read nothing but rows
    sized: frozenset[int] = frozenset()  # late places at which tensors must have as many rows as there are indices
    refusal: str | None = None  # why the segment cannot be emitted

    def size(self, feeds: tuple[Spec, ...]) -> int:
        """Returns the size of the tables in bytes."""
        return sum(feeds[k].size for k in self.tables)


def row_updates(steps: tuple[Step, ...], feeds: tuple[Spec, ...], dynamic: bool) -> RowUpdates:
    """Returns which of these steps a graph runs in place.

    A variable is updated in place if nothing but updates and reads of rows follow the first update, and what depends on
    such a read cannot fail. `dynamic`: sizes differ between launches.
    """
    if not any(step.op in WRITES or step.op == GATHER for step in steps):
        return RowUpdates()
    return _Search(steps, feeds, dynamic).found()


class _Search:
    """Finds the variables that may be updated in place: begins with all, and drops those that may not."""

    def __init__(self, steps: tuple[Step, ...], feeds: tuple[Spec, ...], dynamic: bool) -> None:
        self.steps = [(n, s) for n, s in enumerate(steps) if s.variant is None or not s.variant.folded]
        self.feeds = feeds
        self.dynamic = dynamic
        self.specs = {s.first + n: out.spec for s in steps for n, out in enumerate(s.outputs)}
        self.accesses: dict[int, list[Step]] = {}  # by feed with a variable
        for _, step in self.steps:
            for k in self._variables(step):
                self.accesses.setdefault(k, []).append(step)
        self.tables = {k for k, steps in self.accesses.items() if self._has_rows(k) and _is_table(k, steps)}
        self.late: set[int] = set()
        self.sized: set[int] = set()

    def found(self) -> RowUpdates:
        while wrong := self._updated_with_others() or self._followed_by_failures():
            self.tables -= wrong
        refusal = None
        for _, step in self.steps:
            if step.op in OPTIMIZERS and not self.tables.issuperset(_updated(step)):
                refusal = f"a variable is used again behind {step.op}, which updates some of its rows"
        gathered = frozenset(k for k in self.accesses if self._is_gathered(k))
        return RowUpdates(frozenset(self.late), frozenset(self.tables), gathered, frozenset(self.sized), refusal)

    def _variables(self, step: Step) -> list[int]:
        """Returns the feeds with the variables that a step is given."""
        given = {-1 - slot for slot in _slots(step) if CONST < slot < 0}
        return [k for k in given if k < len(self.feeds) and self.feeds[k].enum == RESOURCE]

    def _has_rows(self, k: int) -> bool:
        handle = self.feeds[k].handle
        shape = None if handle is None else handle[0][1]
        return shape is not None and len(shape) > 0 and None not in shape and -1 not in shape

    def _is_gathered(self, k: int) -> bool:
        if any(step.op != GATHER for step in self.accesses[k] if k not in _updated(step)):
            return False
        return k in self.tables or not any(k in _updated(step) for step in self.accesses[k])

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
        wrong: set[int] = set()
        for place, step in self.steps:
            known = frozenset().union(*(sources.get(slot, frozenset()) for slot in _slots(step)))
            written = self.tables.intersection(_updated(step))
            read = updated.intersection(self._variables(step)) if step.op == GATHER else set()
            if not (written or read or known):
                continue
            self.late.add(place)
            concerned = known | written | read
            unsized = self.dynamic or step.open
            if written or read:
                indices = step.slots[WRITES[step.op or ""].indices if written else 1]
                places.add(indices)
                if indices in sources or (unsized and len(self._shape(indices) or ()) != 1):
                    wrong |= concerned
            elif step.op not in _ELEMENTWISE or step.lists:
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
            if step.op != GATHER or dict(zip(step.attrs[::2], step.attrs[1::2], strict=True)).get("batch_dims"):
                return False
        elif step.op not in READS and (step.node is None or step.node.callee is None):
            return False
    return updated
