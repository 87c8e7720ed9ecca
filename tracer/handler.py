"""Handler: who answers the operations of a thread that records, follows or writes down."""

from __future__ import annotations

from typing import Any, Protocol


class Handler(Protocol):
    """What a thread does with its operations while it records or follows.

    `device` is the name of the device in scope when it began, where there are several; else None.
    """

    device: str | None
    tapes: Any  # hears of what happens to tapes; None: nobody does

    @property
    def open(self) -> bool:
        """Whether it wants to hear of library calls."""

    def fast(self, op: str, name: Any, args: tuple[Any, ...]) -> Any: ...

    def execute(self, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any) -> Any: ...

    def expected(self, op: str, args: tuple[Any, ...]) -> Any: ...

    def constant(self, value: Any, dtype: Any) -> Any: ...

    def index(self, index: tuple[tuple[int, ...], ...]) -> list[Any] | None: ...

    def library(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def aside(self, inputs: Any, run: Any) -> Any: ...
