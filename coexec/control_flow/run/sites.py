"""Sites: the statements of a program that test tensors, each with what was learnt about it."""

from __future__ import annotations

import ast
import time
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING

from coexec.base.tuning import tuning
from coexec.control_flow.run.frames import Exit
from tracer.syntax import Simple

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Value
    from coexec.control_flow.trace.conditionals import TracedBranch
    from coexec.control_flow.trace.range_loops import RangeIterations
    from coexec.control_flow.trace.while_loops import TracedLoop

    Staged = TracedBranch | TracedLoop | RangeIterations  # a traced statement
    Kinds = tuple[tuple[str, object], ...]  # local variables, and what is told apart of their values


@dataclass
class Site:
    """A statement that tests tensors, at one instruction or several, and what was learnt about it."""

    code: CodeType
    statement: ast.While | ast.For | ast.If | ast.Assert | Simple | None
    namespace: dict[str, Value] | None = None  # the globals of the function: with others, the same code is another site
    seen: int = 0
    staged: list[Staged] = field(default_factory=list)
    refused: dict[Kinds | None, str] = field(default_factory=dict)
    idle: int = 0
    rows: int = field(default_factory=lambda: tuning.list_rows)  # of the lists that grow in a loop, at a time
    streak: int = 0  # consecutive iterations that Python has run
    longest: int = 0  # most iterations seen in one run of the loop
    untold: int = 0  # times that it could not be recorded on tapes
    retried: set[Kinds] = field(default_factory=set)
    again: int = 0  # visits with variables of kinds that were refused
    before: float = 0.0  # when Python last continued the loop
    python: list[float] = field(default_factory=list)  # seconds per iteration in Python
    device: list[float] = field(default_factory=list)  # and on the device, since the last comparison
    deep: int = 0  # the id of the call in which recursion was too deep for the device
    contested: bool = False  # whether calls were timed with it on the device and in Python
    exits: list[Exit] = field(default_factory=list)  # ways to leave the function, if a path returns
    reason: str | None = None  # why it is left to Python
    taped: Site | None = None  # for a loop over a range: its site under tapes

    @property
    def left(self) -> str:
        """The text for `explain()` where Python decides."""
        if isinstance(self.statement, (ast.If, ast.Assert, Simple)):
            return f"{self.noun} is decided by Python"
        return f"a `{'for' if isinstance(self.statement, ast.For) else 'while'}` loop turns in Python"

    @property
    def taken(self) -> str:
        """The text for `explain()` where the device decides."""
        if isinstance(self.statement, (ast.While, ast.For)):
            return f"a `{'for' if isinstance(self.statement, ast.For) else 'while'}` loop turns on the device"
        return f"{self.noun} is decided on the device"

    def leave(self, reason: str) -> None:
        """Leaves the site to Python from now on."""
        self.reason = reason
        self.staged.clear()

    @property
    def noun(self) -> str:
        """What a statement other than a loop is called."""
        if isinstance(self.statement, ast.If):
            return "an `if`"
        return "an assertion" if isinstance(self.statement, ast.Assert) else "an expression"

    def went_on(self, goes_on: bool) -> None:
        """Notes that Python has decided, and when."""
        now = time.perf_counter()
        if self.before and len(self.python) < tuning.decision_samples:
            self.python.append(now - self.before)
        self.before = now if goes_on else 0.0
        self.streak = self.streak + 1 if goes_on and isinstance(self.statement, ast.While) else 0
        self.longest = max(self.longest, self.streak)

    def under_tapes(self) -> Site:
        """Returns a range loop's site under tapes, where it is traced differently."""
        if self.taped is None:
            self.taped = Site(self.code, self.statement, self.namespace, reason=self.reason)
        return self.taped
