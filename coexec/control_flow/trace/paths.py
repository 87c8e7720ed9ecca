"""Paths: control flow that forks on a tensor and joins again, as branches on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import tensorflow as tf

from coexec.control_flow.trace.list_buffers import ListBuffers, Rows
from coexec.control_flow.trace.reads import Reads
from coexec.control_flow.trace.values import Undefined, alike, counted_as, form_of, is_one_kind, spec, unwrap_counted
from tracer.block import BRANCH, Branch
from tracer.errors import Refused
from tracer.functions import joined
from tracer.lazy import LazyTensor
from tracer.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from coexec.control_flow.program_types import Tensor, Value
    from tracer.spec import Spec

    Row = tuple[Stage, list[Value]]  # a path and its values
    # A path, its values, and the tensor that leaves the iteration to Python: True for always, None for never.
    Path = tuple[Stage, Collection[Value], LazyTensor | bool | None]

Found = TypeVar("Found")


class Paths:
    """Traces paths that fork; `stage` is the stage being traced into.

    `leave` is a tensor (or None) that is true if Python must run the traced iteration, as something on the path taken
    was refused, or leaves the loop.
    """

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.stage: Stage = reads.stage
        self.leave: LazyTensor | None = None
        self.lists: ListBuffers | None = None  # the lists that may grow
        self.rows: dict[int, Rows] = {}  # what they have grown by on this path
        self._own: dict[int, tuple[list[Value], Stage]] = {}  # by id: lists made by the statement, and in which stage
        self._grown: dict[Stage, dict[int, Rows]] = {}  # the same for each path already traced

    def branched(self, truth: LazyTensor, then: Callable[..., Value], other: Callable[..., Value]) -> Value:
        """Evaluates both branches to a value; the tensor will select one."""
        ways = [self.apart(then), self.apart(other)]
        (value,) = self.joined(truth, [(stage, [found], leave) for stage, found, leave in ways])
        if isinstance(value, Undefined):
            raise Refused(value.reason)
        return value

    def leave_if(self, truth: Tensor) -> None:
        """Leaves the iteration to Python if a tensor is true."""
        self.leave = truth if self.leave is None else tf.logical_or(self.leave, truth)

    def apart(self, function: Callable[..., Found]) -> tuple[Stage, Found, LazyTensor | None]:
        """Traces `function` into a stage of its own; returns that stage, the function's result, and `leave`."""
        outer, before, rows = self.stage, self.leave, self.rows
        self.stage, self.leave, self.rows = Stage(outer), None, dict(rows)
        try:
            with self.stage:
                found = function()
                self._grown[self.stage] = self.rows
                return self.stage, found, self.leave
        finally:
            self.stage, self.leave, self.rows = outer, before, rows

    def _append(self, owner: list[Value], value: Value) -> None:
        """Appends to one of the program's lists, through its buffer, or to one made in this stage; refuses others."""
        place = self.reads.place(owner)
        if place is not None and self.lists is not None:
            rows = self.rows[place] = self.lists.appended(place, self.rows.get(place), value, self.stage)
            self.leave_if(self.lists.lacks(rows))
        elif place is None and self._own.get(id(owner), (None, None))[1] is self.stage:
            owner.append(value)
        else:
            raise Refused("a list is changed in place")

    def grown(self, stage: Stage) -> dict[int, Rows]:
        """Returns the rows of lists that have grown on a path."""
        found = self._grown[stage]
        return {place: rows for place, rows in found.items() if rows is not self.rows.get(place)}

    def joined(self, truth: LazyTensor, paths: list[Path]) -> list[Value]:
        """Merges the values of two paths; if either may be left to Python, so may the whole."""
        values = [list(path[1]) for path in paths]
        places = sorted({place for stage, _, _ in paths for place in self.grown(stage)})
        if places:
            assert self.lists is not None
            self.lists.parted.update(places)
            for (stage, _, _), row in zip(paths, values, strict=True):
                for place in places:
                    row += self._grown[stage].get(place) or self.lists.before(place)
        results = self._joined(truth, paths, values)
        for place in reversed(places):
            count, buffer = results.pop(), results.pop()
            self.rows[place] = buffer, count
        return results

    def _joined(self, truth: LazyTensor, paths: list[Path], values: list[list[Value]]) -> list[Value]:
        """Merges `values`, one row per path, and `leave` with them if either path may be left to Python."""
        if any(leave is not None for _, _, leave in paths):
            for (stage, _, leave), row in zip(paths, values, strict=True):
                with stage:
                    row.append(leave if isinstance(leave, LazyTensor) else tf.constant(leave is True))
            *results, leave = self.merged(truth, (paths[0][0], values[0]), (paths[1][0], values[1]))
            self.leave_if(leave)
            return results
        return self.merged(truth, (paths[0][0], values[0]), (paths[1][0], values[1]))

    def merged(self, truth: LazyTensor, then: Row, other: Row) -> list[Value]:
        """Merges the values of two paths: shared values stay, tensors of one kind become outputs of a branch."""
        forms = [form_of(a) if a is not b and form_of(a) == form_of(b) else None
                 for a, b in zip(then[1], other[1], strict=True)]  # fmt: skip
        ones, twos = (
            [leaf for form, v in zip(forms, path[1], strict=True) for leaf in (v if form else [v])]
            for path in (then, other)
        )
        leaves = iter(self._merged_leaves(truth, (then[0], ones), (other[0], twos)))
        results: list[Value] = []
        for form in forms:
            parts = [next(leaves) for _ in range(form[1] if form else 1)]
            lost = next((part for part in parts if isinstance(part, Undefined)), None)
            lost = Undefined("which of two lists it is depends on a tensor") if form and form[0] is list else lost
            results.append(lost or (form[0](parts) if form else parts[0]))
        return results

    def _merged_leaves(self, truth: LazyTensor, then: Row, other: Row) -> list[Value]:
        """Merges pairs of leaves: tensors of one kind by a `Branch`, all others by `alike`."""
        pairs = list(zip(then[1], other[1], strict=True))
        chosen = [n for n, (a, b) in enumerate(pairs) if a is not b and is_one_kind(a, b)]
        results = [alike(a, b) if n not in chosen else None for n, (a, b) in enumerate(pairs)]
        if chosen:
            blocks = [path[0].block([unwrap_counted(path[1][n]) for n in chosen]) for path in (then, other)]
            outer, places = joined([then[0], other[0]])
            structure = Branch(blocks[0], blocks[1], places[0], places[1])
            specs: list[Spec] = [spec(pairs[n][0]) for n in chosen]  # type: ignore[misc]  # each has one
            given = [truth, *outer]
            for n, tensor in zip(chosen, self.stage.structure(BRANCH, structure, given, specs), strict=True):
                results[n] = counted_as(tensor, *pairs[n])
        return results
