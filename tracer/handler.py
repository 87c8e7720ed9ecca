"""Handler: the protocol through which a thread's operations are recorded, followed or staged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Handler(Protocol):
    """Answers the operations of a thread. `Recorder`, `Stage` and the follower of the package above implement it.

    `device` is the name of the device in scope when the call began if there are several devices, else None.
    """

    device: str | None
    tapes: Any  # receives tape events, or None

    @property
    def open(self) -> bool:
        """Whether it handles library calls."""

    @property
    def records(self) -> bool:
        """Whether it is handed library calls only to record them."""

    @property
    def watches(self) -> Any:
        """What pays for learning calls of the program's functions; None if these are not learnt now."""

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any: ...

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any: ...

    def expected(self, op: str, args: tuple[Any, ...]) -> Any: ...

    def constant(self, value: Any, dtype: Any) -> Any: ...

    def index(self, index: tuple[tuple[int, ...], ...]) -> list[Any] | None: ...

    def library(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def aside(self, inputs: Any, run: Callable[[], Any]) -> Any: ...

    def fault(self, error: BaseException) -> bool:
        """Handles an error raised by another method; returns whether to ignore it.

        True means that the error is the runtime's own and nothing requested has happened yet: the caller proceeds
        without the handler.
        """
