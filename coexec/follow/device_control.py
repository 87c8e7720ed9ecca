"""Device control: the interface of control flow on the device to a followed call.

`coexec.control_flow` implements `DeviceControl`, and is imported for the first function whose decisions it takes (see
`dispatch/decision_policy`). Nothing else depends on it: without it Python decides every branch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

from coexec.follow.tapes import Tapes
from coexec.launch.async_launch import AsyncLaunch
from tracer.cursor import Cursor
from tracer.graph import Step
from tracer.lazy import LazyTensor
from tracer.recorder import Recorder


class EarlyReturn(BaseException):
    """Returns from the decorated function a value that the device computes; caught where the function was called."""

    def __init__(self, value: Any) -> None:
        self.value = value


class TimedCall(NamedTuple):
    """A timed call: for which comparison, if any, and whether the device makes the decision in it."""

    comparison: Any
    on_device: bool


class FollowedCall(Protocol):
    """What control flow uses of a followed call's handler."""

    @property
    def lock(self) -> threading.RLock: ...

    @property
    def cursor(self) -> Cursor: ...

    @property
    def tapes(self) -> Tapes: ...

    @property
    def recorder(self) -> Recorder | None: ...

    @property
    def forced(self) -> int: ...

    @property
    def flight(self) -> tuple[Step, AsyncLaunch] | None: ...

    @property
    def trial(self) -> TimedCall | None: ...

    def time_as(self, trial: TimedCall) -> None:
        """Sets what the call is timed for."""

    def flush(self) -> None:
        """Runs all pending operations."""

    def answer(self, step: Step) -> list[LazyTensor]:
        """Returns lazy tensors for the outputs of the step that the cursor has just moved to."""

    def assume(self, condition: LazyTensor, message: list[str]) -> bool:
        """Assumes that the condition of an `assert` statement holds; returns False if that is impossible."""

    def run_alone(self, operation: Callable[[], Any]) -> Any:
        """Runs an operation that is not part of a segment."""


# Where Python has decided, by code and instruction: how often, and the globals.
Places = dict[tuple[CodeType, int], tuple[int, dict[str, Any]]]


class DeviceControl(Protocol):
    """Control flow on the device, for the calls of one function."""

    @property
    def is_idle(self) -> bool:
        """Whether the device has taken no decision so far."""

    def decide(self, run: FollowedCall, lazy: LazyTensor, frame: FrameType) -> bool:
        """Returns the truth value of a tensor that the code of `frame` tests.

        Or the value that takes Python to where the device has got to, with the frame's local variables set to match.
        Raises `EarlyReturn` if the device has computed the decorated function's result.
        """

    def call_function(self, run: FollowedCall, op: Any, inputs: Sequence[Any]) -> list[LazyTensor] | None:
        """Follows a call of a graph function as its operations (inlined); None if it must run on its own."""

    def watched(self, value: Any) -> None:
        """Notes that a tape begins to watch a tensor or variable, on behalf of the code that is running."""

    def took(self, trial: TimedCall, seconds: float | None) -> None:
        """Notes how long a timed call took; None if the time is meaningless."""

    def called(self) -> None:
        """Notes that a call has ended."""

    def clear(self) -> None:
        """Clears everything learnt."""
