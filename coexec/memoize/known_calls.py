"""Known calls: what a function knows of its memoized calls beside the regions on the steps of its trace graph."""

from __future__ import annotations

from typing import Any

from coexec.base.causes import Tally
from coexec.memoize.shape_variants import ShapeVariants


class KnownCalls:
    """The confirmed calls of one function, by call and place, and the reasons that `explain` has been given."""

    def __init__(self) -> None:
        self.variants = ShapeVariants()
        self.calls = 0  # of the function, that were followed
        self.reported: dict[tuple[Any, str], Tally] = {}  # by code and reason: finding the place takes time
        self.reasons: dict[Any, Tally] = {}  # by code: the one reported last, which its Python's time counts for

    def clear(self) -> None:
        """Forgets the calls; what was reported is not reported again."""
        self.variants = ShapeVariants()
