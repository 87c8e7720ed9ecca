"""Device control: what control flow on the device is to a call that is followed.

`coexec.control_flow` implements `DeviceControl`, and is imported when a function is made with `control_flow=True`.
Nothing else depends on it: without it Python takes every decision, and graph functions run on their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

from coexec.follow.tapes import Tapes
from coexec.launch.async_launch import AsyncLaunch
from tracer.cursor import Cursor
from tracer.graph import Step
from tracer.lazy import LazyTensor
from tracer.recorder import Recorder


class EarlyReturn(BaseException):
    """Ends the decorated function with a value that the device computes; caught where the function was called."""

    def __init__(self, value: Any) -> None:
        self.value = value


class TimedCall(NamedTuple):
    """A call that is timed: for which comparison, if any, and whether the device takes the decision in it."""

    comparison: Any
    on_device: bool


class FollowedCall(Protocol):
    """What control flow uses of the handler of a call that is followed."""

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
        """Says what the call is timed for."""

    def flush(self) -> None:
        """Carries out what is pending."""

    def answer(self, step: Step) -> list[LazyTensor]:
        """Returns lazy tensors of what a step gives, to which the cursor has just moved."""

    def assume(self, condition: LazyTensor, message: list[str]) -> bool:
        """Takes it that the condition of an `assert` statement holds; returns whether that can be done."""

    def run_alone(self, operation: Callable[[], Any]) -> Any:
        """Runs an operation that is no part of a segment."""


class DeviceControl(Protocol):
    """Control flow on the device, for the calls of one function."""

    def decide(self, run: FollowedCall, lazy: LazyTensor, frame: FrameType) -> bool:
        """Returns the truth of a tensor for which the code of `frame` asks.

        Or what leads Python to where the device has got to: then local variables of the frame have been set. Raises
        `EarlyReturn` where the device has computed what the decorated function returns.
        """

    def call_function(self, run: FollowedCall, op: Any, inputs: Sequence[Any]) -> list[LazyTensor] | None:
        """Follows a call of a graph function as the operations it is made of; None if it must run on its own."""

    def took(self, trial: TimedCall, seconds: float | None) -> None:
        """Notes how long a timed call took, None if that says nothing."""

    def clear(self) -> None:
        """Forgets all that was learnt."""
