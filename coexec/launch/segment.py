"""Segment: operations that a call holds back, with this call's values, on their way through one launch."""

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
    """The segment that ends behind `last`, with this call's values."""

    last: Step
    feeds: list[Any]  # the tensors from outside
    seeds: list[Pair]  # those that its random operations have drawn
    values: list[Any]  # the lazy tensors by their numbers; None: nobody wants it
    held: list[int]  # numbers of those that somebody still holds
    alive: list[int]  # of these, those whose values are not known from shapes alone
    flight: AsyncLaunch | None = None  # the launch that is under way, if there is one
    begun: bool = False  # whether some operation may have run
    at: Step | None = None  # where they run one by one, the last one that did, or failed
    finished: bool = False  # whether all have run
    executable: Executable | None = None  # that it is launched with
    ended: bool = False  # whether the call has gone on behind it
    results: list[Any] = field(default_factory=list)  # nothing, or what the launch gave
    real: list[Any] = field(default_factory=list)  # where they run one by one, all tensors so far
    raw: list[Any] = field(default_factory=list)  # what the operation of `at` gave, until that is among those
    done: int = 0  # the depth of the last step that is through
    assertions: dict[Step, Any] = field(default_factory=dict)  # what some say in this call
    notes: dict[Step, Any] = field(default_factory=dict)  # and what Keras adds to errors of some
    budget: Budget = field(default_factory=Budget)

    def reaching(self) -> Iterator[Step]:
        """Returns the steps that are still to come, in order, and notes which one is next."""
        for step in self.last.chain():
            if step.depth > self.done:
                self.begun, self.at = True, step
                yield step

    def deliver(self, results: list[Any]) -> None:
        """Gives the tensors what the launch gave."""
        assert self.executable is not None
        for number, tensor in zip(self.executable.outputs, results, strict=True):
            lazy = self.values[number]
            if lazy is not None:
                lazy._value = tensor
        self.finished = True

    def is_done(self) -> bool:
        """Returns whether all was carried out before an interrupt came; a launch that was is delivered now."""
        if not self.finished and self.results:
            assert self.executable is not None
            results = self.executable.unpacked(self.results[0])
            if results is not None:
                self.deliver(results)
        return self.finished
