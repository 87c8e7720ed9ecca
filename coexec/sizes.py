"""Sizes: which calls of a function that is given ever other sizes are worth following."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np

from tracer.lazy import LazyTensor
from tracer.private import EagerTensor

# All calls are followed until the arguments have come in so many combinations of sizes. A new one costs five to ten
# plain calls, most of them in its first call: Keras' Python is watched, shapes are inferred, operations wired anew.
few: float = 8

# From then on, one is followed once plain calls have cost what following might have saved.
OFTEN = 4

# Or once it has come again, where following others has saved as much as this one costs.
SOON = 1

# Calls of one combination that are an investment, and count neither for following nor against it.
INVESTED = 2

MAX_KNOWN = 4096  # combinations
MAX_DEPTH, MAX_ITEMS = 3, 64  # of nested arguments that are looked at


class Verdict(enum.IntEnum):
    """What a call is to do; those that are followed are true."""

    PLAIN = 0
    FOLLOW = 1
    INVEST = 2  # followed, and what that takes is not held against following


class Sizes:
    """The sizes of one function's arguments, and how often each combination has come."""

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}

    def judge(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], affords: Callable[[], bool], room: bool = True
    ) -> Verdict:
        """Notes a call; says whether it is to be followed.

        `affords`: whether following has saved enough for another size; `room`: whether there is any for its path.
        """
        seen, key = self._seen, _shapes((args, kwargs) if kwargs else args, MAX_DEPTH)
        times = seen.get(key)
        if times is None:
            times = 0
            if len(seen) < few and room:  # the very first is like any call of a function that is new
                times = OFTEN if seen else OFTEN + INVESTED
            if len(seen) >= MAX_KNOWN:
                for old in list(seen)[: MAX_KNOWN // 2]:
                    seen.pop(old, None)
        if SOON <= times < OFTEN and room and affords():
            times = OFTEN + INVESTED
        if times == OFTEN and not room:
            return Verdict.PLAIN
        if times <= OFTEN + INVESTED:
            seen[key] = times + 1
        if times < OFTEN:
            return Verdict.PLAIN
        return Verdict.INVEST if times < OFTEN + INVESTED else Verdict.FOLLOW


def _shapes(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is EagerTensor or kind is LazyTensor:
        return value._shape_tuple()
    if kind is np.ndarray:
        return value.shape
    if depth and (kind is tuple or kind is list or kind is dict) and len(value) <= MAX_ITEMS:
        return tuple([_shapes(item, depth - 1) for item in (value.values() if kind is dict else value)])
    return None
