"""Frequent sizes: segments of a dynamic path that come again and again at the same sizes.

XLA compiles for exact sizes, and its code is often the faster. So a segment that has come at the same sizes a few times
has a copy at these, whose executables are its own: at first the graph for any size, which XLA's then races.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coexec.base.tuning import tuning
from coexec.launch.backend_race import Compiled
from tracer.graph import CONST, Step, Variant
from tracer.op import Const
from tracer.sizes import DynamicSpec, Shaped, const_at, dims_at, open_feeds, settled
from tracer.spec import Spec, intern_spec


class FrequentSizes:
    """The sizes at which one segment has come, with its copies at the frequent ones."""

    def __init__(self, last: Step, compiled: Callable[[Step], Compiled]) -> None:
        """`compiled`: returns what is known of the segment that ends at a step, at first nothing."""
        self._last, self._compiled = last, compiled
        self._open = open_feeds(last)
        self._seen: dict[Any, int] = {}
        self._latest: Any = None
        self._copies: dict[Any, Step] = {}

    def at(self, feeds: list[Any], general: Compiled) -> Step | None:
        """Returns the segment's copy at the sizes of these feeds; None if they are not frequent.

        `general` has the executables for any size.
        """
        sizes = self._latest = tuple([feeds[k]._shape_tuple() for k in self._open])
        known = self._copies.get(sizes)
        if known is not None:
            return known
        times = self._seen.get(sizes, 0) + 1
        if len(self._seen) >= tuning.max_sizes:
            self._seen.clear()
        self._seen[sizes] = times
        if times < tuning.frequent_visits or len(self._copies) >= tuning.frequent_sizes or general.executable is None:
            return None
        made = self._copies[sizes] = at_exact_sizes(self._last, feeds)
        made.visits = times
        self._compiled(made).adopt(general.executable)
        return made

    def latest(self) -> Step | None:
        """Returns a copy of the segment at the sizes of its last launch, to look at."""
        if self._latest is None:
            return None
        specs = [spec for step in self._last.chain() for spec in step.specs]
        feeds: list[Any] = [Shaped(()) for _ in specs]
        for k, shape in zip(self._open, self._latest, strict=True):
            feeds[k] = Shaped(shape)
        for k, spec in enumerate(specs):
            if isinstance(spec, DynamicSpec) and k not in self._open:
                feeds[k] = Shaped(dims_at(spec.dims, feeds))  # type: ignore[arg-type]
        return at_exact_sizes(self._last, feeds)


def at_exact_sizes(last: Step, feeds: Sequence[Any]) -> Step:
    """Returns a copy of a segment of a dynamic path at the sizes of these feeds, apart from the trace graph."""
    chain = last.chain()
    parent = last.root()
    tensors: list[Spec] = []
    specs: list[Spec] = []
    for step in chain:
        given = [_exact(spec, feeds[k]) for k, spec in enumerate(step.specs, len(specs))]
        specs += given
        if step.variant is None:
            copy = Step(parent, step.op, step.node, None, step.slots, step.consts, step.lists, tuple(given))
            copy.host = step.host
        else:
            consts = {i: const_at(const, feeds) for i, const in step.consts.items()}
            lists = {i: (slots, {j: const_at(const, feeds) for j, const in its.items()})
                     for i, (slots, its) in step.lists.items()}  # fmt: skip
            key = list(_parts(step.slots, consts, step.variant.key, tensors, specs))
            for i, (slots, its) in lists.items():
                key[i] = tuple(_parts(slots, its, step.variant.key[i], tensors, specs))
            outputs = tuple([settled(out, feeds) for out in step.outputs])
            variant = Variant(tuple(key), outputs, step.variant.template)
            copy = Step(parent, step.op, step.node, variant, step.slots, consts, lists, tuple(given))
            tensors += [out.spec for out in outputs]
        copy.live, copy.risky, copy.assertion, copy.notes = step.live, step.risky, step.assertion, step.notes
        parent = copy
    return parent


def _exact(spec: Spec, feed: Any) -> Spec:
    return intern_spec(spec.enum, feed._shape_tuple()) if isinstance(spec, DynamicSpec) else spec


def _parts(
    slots: tuple[int, ...], consts: dict[int, Const], key: Any, tensors: list[Spec], specs: list[Spec]
) -> Iterator[Any]:  # fmt: skip
    """Yields the parts of a variant key at exact sizes."""
    for i, slot in enumerate(slots):
        if slot >= 0:
            yield tensors[slot]
        elif slot > CONST:
            yield specs[-1 - slot]
        else:
            yield consts[i] if slot == CONST and isinstance(key[i], Const) else key[i]


def is_frequent(first: Step) -> bool:
    """Returns whether the path that begins with this step has been taken so often that it may be compiled for it."""
    step, visits = first, first.visits
    while step.next:
        step = step.hot or step.next[-1]
        visits = max(visits, step.visits)
    return visits >= tuning.frequent_visits
