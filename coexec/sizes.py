"""Sizes: which calls of a function that is given ever other sizes are worth following."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracer.lazy import LazyTensor
from tracer.private import EagerTensor

# All calls are followed until the arguments have come in so many combinations of sizes. A new one may cost several
# plain calls: shapes are inferred, and operations wired and compiled anew.
few: float = 8

# From then on, one is followed once it has come so often, when plain calls have cost what following might have saved.
OFTEN = 8

MAX_KNOWN = 4096  # combinations
MAX_DEPTH, MAX_ITEMS = 3, 64  # of nested arguments that are looked at


class Sizes:
    """The sizes of one function's arguments, and how often each combination has come."""

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}

    def follows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Notes a call; returns whether it is to be followed."""
        seen, key = self._seen, _shapes((args, kwargs) if kwargs else args, MAX_DEPTH)
        times = seen.get(key)
        if times is None:
            times = OFTEN if len(seen) < few else 0
            if len(seen) >= MAX_KNOWN:
                for old in list(seen)[: MAX_KNOWN // 2]:
                    seen.pop(old, None)
        if times <= OFTEN:
            seen[key] = times + 1
        return times >= OFTEN


def _shapes(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is EagerTensor or kind is LazyTensor:
        return value._shape_tuple()
    if kind is np.ndarray:
        return value.shape
    if depth and (kind is tuple or kind is list or kind is dict) and len(value) <= MAX_ITEMS:
        return tuple([_shapes(item, depth - 1) for item in (value.values() if kind is dict else value)])
    return None
