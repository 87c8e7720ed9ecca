"""Known calls: what is known of a function's memoized calls besides the regions in its trace graph."""

from __future__ import annotations

from typing import Any

from coexec.base.causes import Tally
from coexec.memoize.shape_variants import ShapeVariants


class KnownCalls:
    """The confirmed calls of one function, by call and place, and the reasons reported to `explain`."""

    def __init__(self) -> None:
        self.variants = ShapeVariants()
        self.calls = 0  # followed calls of the function
        self.reported: dict[tuple[Any, str], Tally] = {}  # by code and reason: finding the place takes time
        self.reasons: dict[Any, Tally] = {}  # by code: the last one reported, charged with its Python's time

    def clear(self) -> None:
        """Clears the calls; what was reported is not reported again."""
        self.variants = ShapeVariants()
