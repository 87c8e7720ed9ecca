"""Segments: what a call has launched, piece by piece, as they are when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coexec.compile.executable import Executable
from coexec.launch.backend_race import Compiled
from coexec.lowering.plan import Plan, make_plan
from coexec.lowering.show_plan import lines_of
from coexec.reporting.compiler_ir import IR, check_stage, ir_of, text_of
from coexec.reporting.cost import Cost, cost_of, summed
from tracer.graph import Step, TraceGraph
from tracer.spec import Spec


class Segment:
    """Operations that were launched together: where, how many, by what, what goes in and comes out."""

    def __init__(self, last: Step, name: str, number: int, count: int) -> None:
        self._last = last
        self.name = name  # of the function
        self.number, self.count = number, count  # which of those of the call it is, from 1, and how many there are
        compiled = last.executables if last.executables is not None else Compiled()
        executable = compiled.executable
        # Of a dynamic path: at the sizes of the last launch.
        shown = compiled.sizes.latest() if compiled.sizes is not None else None
        self._shown: Step = last if shown is None else shown
        self.steps = tuple(step for step in self._shown.chain() if step.variant is not None)
        self.operations = last.live
        self.visits = last.visits  # how many calls have come here
        # "xla", "graph", or "operations": one by one.
        self.backend: str = "operations" if executable is None or compiled.refused else executable.backend
        self.races = compiled.rival is not None  # whether XLA's executable and the graph take turns for now
        self.launches = 0 if executable is None else executable.launches
        self.seconds = None if executable is None or not executable.took else executable.took  # of the last launch
        self.feeds: tuple[Spec, ...] = tuple(spec for step in self.steps for spec in step.specs)
        wanted = compiled.wanted or last.given()
        self.outputs: tuple[int, ...] = tuple(sorted(wanted)) if executable is None else executable.outputs

    @property
    def begins(self) -> str:
        """The source line of the first operation."""
        return self.steps[0].place if self.steps else ""

    @property
    def ends(self) -> str:
        """The source line of the last operation, behind which the call was cut."""
        return self._last.place

    @property
    def nodes(self) -> tuple[int, ...]:
        """The numbers of the operations' nodes in the trace graph."""
        return tuple(step.node.number for step in self.steps if step.node is not None)

    @property
    def plan(self) -> Plan:
        """What a backend is given to compile; `print()` shows its operations, and what cannot be compiled."""
        return make_plan(self._shown, self.outputs)

    @property
    def executable(self) -> Executable | None:
        """What is launched; `print()` shows TensorFlow's function of it. None if operations run one by one."""
        compiled = self._last.executables
        return None if compiled is None or compiled.refused else compiled.executable

    def ir(self, stage: str = "stablehlo") -> IR:
        """Returns what XLA is given for the segment, or makes of it: see `Function.ir`."""
        return text_of(ir_of(self.plan, check_stage(stage)), stage)

    def cost(self) -> Cost:
        """Returns what the segment's operations take, estimated from shapes."""
        return cost_of(f"segment {self.number} of {self.name}", self.steps, self.feeds, self.outputs)

    def as_dict(self) -> dict[str, Any]:
        """Returns what is known of it as a dict that `json` can write."""
        return {
            "number": self.number, "operations": self.operations, "backend": self.backend, "races": self.races,
            "visits": self.visits, "launches": self.launches, "seconds": self.seconds, "begins": self.begins,
            "ends": self.ends, "nodes": list(self.nodes), "feeds": list(map(repr, self.feeds)),
            "outputs": len(self.outputs), "cost": self.cost().as_dict(),
        }  # fmt: skip

    def head(self) -> str:
        """Returns one line about it."""
        how = {"xla": "by XLA", "graph": "as a graph", "operations": "one by one"}[self.backend]
        racing = ", racing XLA" if self.races else ""
        took = f", {1e3 * self.seconds:.3g} ms the last time" if self.seconds else ""
        operations = f"{self.operations} operation" + "s" * (self.operations != 1)
        times = f"launched {self.launches} times" if self.backend != "operations" else f"run {self.visits} times"
        return (
            f"segment {self.number} of {self.count}: {operations}, {how}{racing}, {times}{took}; ends after {self.ends}"
        )

    def __repr__(self) -> str:
        return f"<{self.head()}>"

    def __str__(self) -> str:
        return "\n".join([self.head(), *lines_of(self.steps, self.feeds, self.outputs)])


class Segments(tuple[Segment, ...]):
    """The segments of the last followed call, in order; `print()` shows one line for each."""

    name: str

    def ir(self, stage: str = "stablehlo") -> IR:
        """Returns the IR of all that XLA can compile, one after the other."""
        check_stage(stage)
        if not self:
            raise ValueError(f"{self.name} has no segments: no call has been followed yet; call it twice")
        texts, refusals = [], []
        for segment in self:
            head = f"// {segment.head()}"
            try:
                texts.append(f"{head}\n{segment.ir(stage)}")
            except NotImplementedError as refusal:
                refusals.append(f"{refusal} (segment {segment.number}, which ends after {segment.ends})")
                texts.append(f"{head}\n// {refusal}")
        if len(refusals) == len(self):
            raise NotImplementedError(f"there is no IR of {self.name}: {'; '.join(refusals)}")
        return text_of("\n\n".join(texts), stage)

    def cost(self) -> Cost:
        """Returns the cost of all of them."""
        return summed(self.name, [segment.cost() for segment in self])

    def __str__(self) -> str:
        if not self:
            return f"{self.name}: no segments, as no call has been followed yet"
        return "\n".join([f"{self.name}, its last followed call:", *(f"  {segment.head()}" for segment in self)])

    __repr__ = __str__


def segments_of(name: str, lasts: Sequence[Step]) -> Segments:
    """Returns the segments that end with these steps."""
    found = [last for last in lasts if last.node is not None and last.parent is not None]
    segments = Segments(Segment(last, name, n, len(found)) for n, last in enumerate(found, 1))
    segments.name = name
    return segments


def ends_in(graph: TraceGraph) -> list[Step]:
    """Returns the last steps of all segments that have run, those of paths no longer taken included."""
    found = []
    ahead = [child for root in graph.roots() for child in root.next]
    while ahead:
        step = ahead.pop()
        ahead += step.next
        if step.executables is not None:
            found.append(step)
    return found
