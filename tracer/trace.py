"""Trace: what one call, or the rest of one, did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracer.op import OpCall

if TYPE_CHECKING:
    from tracer.graph import Node


@dataclass
class Trace:
    """The op calls of one call in order; `start` is the last node followed before recording began, if any."""

    start: Node | None = None
    calls: list[OpCall] = field(default_factory=list)
    finished: bool = False  # whether the call returned rather than raised
