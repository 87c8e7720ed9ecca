"""Dynamic graphs: a graph for any size, whose constants that depend on sizes are arguments.

They are computed from the sizes of each launch's feeds (`tracer.sizes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.compile.executable import BoundGraph, Executable
from coexec.lowering.lifted_constants import may_vary
from coexec.lowering.plan import Plan
from tracer.intercept import make_constant
from tracer.sizes import SizedConst

Make = Callable[[dict[Any, int] | None], Executable | None]


class DynamicGraph(BoundGraph):
    """A graph that is launched with the constants at its feeds' sizes."""

    def __init__(self, shared: Executable, plan: Plan, consts: list[SizedConst]) -> None:
        """`consts`: the constants by argument number."""
        super().__init__(shared, plan, shared.name)
        self.ops = shared.ops
        self._consts = [(consts[number], tf.dtypes.as_dtype(enum).as_numpy_dtype) for number, enum in shared.varying]

    def arguments(self, feeds: list[Any]) -> list[Any]:
        """Returns the constants at the sizes of these feeds."""
        return [make_constant(np.asarray(const.at(feeds).value, dtype), None) for const, dtype in self._consts]


def dynamic_graph(plan: Plan, make: Make) -> Executable | None:
    """Returns a graph for a segment of a dynamic path; `make` is called with the constants to lift to arguments."""
    numbers: dict[SizedConst, int] = {}
    given: dict[Any, int] = {}
    for step in plan.steps:
        if step.variant is None or step.variant.folded:
            continue
        consts = [((i,), const) for i, const in step.consts.items()]
        consts += [((i, j), const) for i, (_, its) in step.lists.items() for j, const in its.items()]  # type: ignore[misc]
        for path, const in consts:
            if isinstance(const, SizedConst):
                if not may_vary(const.value):
                    return None
                given[step, path] = numbers.setdefault(const, len(numbers))
    shared = make(given)
    return None if shared is None else DynamicGraph(shared, plan, list(numbers))
