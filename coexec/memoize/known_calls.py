"""Known calls: what is known of a function's memoized calls besides the regions in its trace graph."""

from __future__ import annotations

import weakref
from typing import Any

from coexec.base.causes import Tally
from coexec.base.tuning import tuning
from coexec.memoize.entry import Region
from coexec.memoize.shape_variants import ShapeVariants
from coexec.memoize.watch_budget import WatchBudget


class KnownCalls:
    """The confirmed calls of one function, by call and place, and the reasons reported to `explain`."""

    def __init__(self) -> None:
        self.watching = WatchBudget()
        self.variants = ShapeVariants()
        self._seen: dict[Any, weakref.ref[Region]] = {}  # by objects and specs: regions whose runs were seen in full
        self.calls = 0  # followed calls of the function
        self.reported: dict[tuple[Any, str], Tally] = {}  # by code and reason: finding the place takes time
        self.reasons: dict[Any, Tally] = {}  # by code: the last one reported, charged with its Python's time

    def see(self, key: Any, region: Region) -> None:
        """Notes that a run of a region was seen in full; `key` is equal for calls that run the same code."""
        if len(self._seen) >= tuning.max_twin_places:
            self._seen.clear()
        self._seen[key] = weakref.ref(region)

    def seen(self, key: Any) -> Region | None:
        """Returns a region whose run was seen in full, and which runs the code of calls with this key."""
        found = self._seen.get(key)
        return None if found is None else found()

    def clear(self) -> None:
        """Clears the calls; what was reported is not reported again."""
        self.variants, self._seen = ShapeVariants(), {}
