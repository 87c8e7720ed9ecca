"""Segment: pending operations of a call, with this call's values, to be run by one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from coexec.base.budget import Budget
from coexec.compile.executable import Executable
from coexec.launch.async_launch import AsyncLaunch
from tracer.graph import Step
from tracer.seeds import Pair


@dataclass(slots=True)
class PendingSegment:
    """The segment that ends after `last`, with this call's values."""

    last: Step
    feeds: list[Any]  # the tensors that come from outside
    seeds: list[Pair]  # those drawn for its random operations
    values: list[Any]  # the lazy tensors by number; None: not needed
    held: list[int]  # numbers of those still referenced
    alive: list[int]  # of these, those whose values do not follow from shapes alone
    flight: AsyncLaunch | None = None  # the launch in flight, if any
    begun: bool = False  # whether any operation may have run
    at: Step | None = None  # in a replay, the last one that ran or failed
    finished: bool = False  # whether all have run
    executable: Executable | None = None  # the one it is launched with
    ended: bool = False  # whether the call has moved past it
    results: list[Any] = field(default_factory=list)  # empty, or what the launch returned
    real: list[Any] = field(default_factory=list)  # in a replay, all tensors so far
    raw: list[Any] = field(default_factory=list)  # the results of `at`, until they are in `real`
    done: int = 0  # the depth of the last completed step
    assertions: dict[Step, Any] = field(default_factory=dict)  # those that differ in this call
    notes: dict[Step, Any] = field(default_factory=dict)  # Keras' additions to errors, likewise
    budget: Budget = field(default_factory=Budget)
    unit: Step | None = None  # the step that has its executables, once known

    def reaching(self) -> Iterator[Step]:
        """Yields the remaining steps in order, setting `at` to each."""
        for step in self.last.chain():
            if step.depth > self.done:
                self.begun, self.at = True, step
                yield step

    def deliver(self, results: list[Any]) -> None:
        """Sets the values of the lazy tensors to the launch's results."""
        assert self.executable is not None
        for number, tensor in zip(self.executable.outputs, results, strict=True):
            lazy = self.values[number]
            if lazy is not None:
                lazy._value = tensor
        self.finished = True

    def is_done(self) -> bool:
        """Returns whether all had run before an interrupt came; delivers the results of a completed launch."""
        if not self.finished and self.results:
            assert self.executable is not None
            results = self.executable.unpacked(self.results[0])
            if results is not None:
                self.deliver(results)
        return self.finished
