"""Sites: the statements of a program that ask tensors, each with what is known of it."""

from __future__ import annotations

import ast
import time
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from coexec.staging.lists import ROWS
from tracer.syntax import Simple

SAMPLES = 16  # turns that are timed


@dataclass
class Site:
    """A statement that asks tensors, at one place or several: what is known of it."""

    code: CodeType
    statement: Any
    seen: int = 0
    staged: list[Any] = field(default_factory=list)
    refused: dict[Any, str] = field(default_factory=dict)
    idle: int = 0
    rows: int = field(default_factory=lambda: ROWS)  # of the lists that grow in a loop, at a time
    streak: int = 0  # turns that Python has taken one behind the other
    longest: int = 0  # turns that a loop has come to, as far as is known
    untold: int = 0  # times that tapes could not be told of it
    retried: set[Any] = field(default_factory=set)
    again: int = 0  # times that it came as it had been refused before
    before: float = 0.0  # when Python was last told to go on
    python: list[float] = field(default_factory=list)  # seconds of turns in Python
    device: list[float] = field(default_factory=list)  # and on the device, since they were last compared
    for_caller: bool | None = None  # whether what has called the function is taken on the device, if anything
    deep: int = 0  # the id of the call in which calls went too deep for the device
    contested: bool = False  # whether calls were timed with it on the device and in Python
    reason: str | None = None  # why it stays with Python
    taped: Site | None = None  # of a loop over a range: the same under tapes

    @property
    def left(self) -> str:
        """What is said of it where it is not the device's."""
        if isinstance(self.statement, (ast.If, ast.Assert, Simple)):
            return f"{self.noun} is decided by Python"
        return f"a `{'for' if isinstance(self.statement, ast.For) else 'while'}` loop turns in Python"

    @property
    def taken(self) -> str:
        """What is said of it where it is the device's."""
        if isinstance(self.statement, (ast.While, ast.For)):
            return f"a `{'for' if isinstance(self.statement, ast.For) else 'while'}` loop turns on the device"
        return f"{self.noun} is decided on the device"

    def leave(self, reason: str) -> None:
        """Leaves it to Python from now on."""
        self.reason = reason
        self.staged.clear()

    @property
    def noun(self) -> str:
        """What it is called where it is no loop."""
        if isinstance(self.statement, ast.If):
            return "an `if`"
        return "an assertion" if isinstance(self.statement, ast.Assert) else "an expression"

    def went_on(self, goes_on: bool) -> None:
        """Takes note that Python has decided, and when."""
        now = time.perf_counter()
        if self.before and len(self.python) < SAMPLES:
            self.python.append(now - self.before)
        self.before = now if goes_on else 0.0
        self.streak = self.streak + 1 if goes_on and isinstance(self.statement, ast.While) else 0
        self.longest = max(self.longest, self.streak)

    def under_tapes(self) -> Site:
        """Returns what is known of a loop over a range under tapes, which are told of it otherwise."""
        if self.taped is None:
            self.taped = Site(self.code, self.statement, reason=self.reason)
        return self.taped
