"""Repeats: stretches of operations that come again and again, wired alike: the iterations of loops that Python ran.

Found by what the operations are, not by where they were issued: a gradient's operations are issued by no line of the
loop that they belong to. An operation's *colour* is a number that is equal where two are of one kind, attributes,
dtypes and shapes; a tensor is a number, too, with the place of the operation that makes it and which of its outputs
it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# Turns: fewer are not worth a loop.
FEWEST = 3

# So many periods are tried, those that most operations come again after.
_PERIODS = 24

_GRAM = 3  # operations that must come again for a period to be tried

_PORTS = 1 << 20  # more than an operation has outputs

_FROM_OUTSIDE = -1


class Source(NamedTuple):
    """Where an operation's input comes from: one of the turn's own operations, `lag` turns ago, or outside (-1)."""

    lag: int
    place: int
    port: int


_OUTSIDE = Source(_FROM_OUTSIDE, 0, 0)


@dataclass(frozen=True)
class Repeat:
    """Operations from place `start` on, that make `turns` times the same `period` operations."""

    start: int
    period: int
    turns: int
    sources: tuple[tuple[Source, ...], ...]  # by operation of a turn, by input

    @property
    def end(self) -> int:
        """The place behind the last turn."""
        return self.start + self.period * self.turns


class Sequence:
    """The operations of a function in order, as numbers."""

    def __init__(self, colours: list[int], inputs: list[list[int]], makers: list[int], ports: list[int]) -> None:
        self.colours = np.asarray(colours, np.int64)
        self.inputs = inputs  # by operation: the tensors it takes
        self._makers = np.asarray(makers, np.int64)  # by tensor: the place of what makes it, -1 where that is outside
        self._ports = np.asarray(ports, np.int64)

    def repeats(self, least: int, accepts: Callable[[Repeat], bool]) -> list[Repeat]:
        """Returns repeats that do not overlap, each of which saves at least so many operations, in order."""
        colours, found = self.colours.copy(), list[Repeat]()
        while (best := self._best(colours, least, accepts)) is not None:
            found.append(best)
            taken = range(best.start, best.end)
            colours[best.start : best.end] = [-2 - place for place in taken]  # equal to none
        return sorted(found, key=lambda repeat: repeat.start)

    def _best(self, colours: Any, least: int, accepts: Callable[[Repeat], bool]) -> Repeat | None:
        best, most = None, least - 1
        for start, end, period in sorted(_stretches(colours), key=lambda s: s[0] - s[1] + s[2]):
            if end - start - period <= most:
                break
            repeat = self._verified(start, end, period)
            if repeat is not None and (saved := self._saved(repeat)) > most and accepts(repeat):
                best, most = repeat, saved
        return best

    def _saved(self, repeat: Repeat) -> int:
        """How many operations are fewer, with those that put together what comes from outside."""
        tensors = self._tensors(repeat.start, repeat.period, repeat.turns)
        made = self._makers[tensors]
        broken = (made[2:] - made[1:-1] != made[1:-1] - made[:-2]) & (made[2:] >= 0)
        outside = np.array([source.lag == _FROM_OUTSIDE for turn in repeat.sources for source in turn], bool)
        pieces = int(broken[:, outside].sum())
        return (repeat.turns - 1) * repeat.period - pieces

    def _tensors(self, start: int, period: int, turns: int) -> Any:
        """Returns what each turn takes: a row for each, equally long as they are of equal colours."""
        rows = [
            [t for place in range(start + n * period, start + (n + 1) * period) for t in self.inputs[place]]
            for n in range(turns)
        ]
        return np.asarray(rows, np.int64).reshape(turns, -1)

    def _verified(self, start: int, end: int, period: int) -> Repeat | None:
        """Returns the longest repeat in a stretch of equal colours whose turns are wired alike, if there is one."""
        start += self._seam(start, end, period)
        turns = (end - start) // period
        if turns < FEWEST:
            return None
        tensors = self._tensors(start, period, turns)
        makers, ports = self._makers[tensors], self._ports[tensors]
        number = np.arange(turns)[:, None]
        turn, place = (makers - start) // period, (makers - start) % period
        first, last = 0, 0
        for begin in range(turns - FEWEST + 1):  # what the first turns take may be something else: they stay outside
            if turns - begin <= last - first:
                break
            code = np.where(turn >= begin, ((number - turn) * period + place) * _PORTS + ports, _FROM_OUTSIDE)
            lag = np.where(turn >= begin, number - turn, _FROM_OUTSIDE)
            model, lags = code[begin + 1], lag[begin + 1]
            fits = (code == model).all(1)
            fits[begin] = (np.where(lags == 1, _FROM_OUTSIDE, model) == code[begin]).all()
            broken = np.flatnonzero(~fits[begin:])
            until = begin + int(broken[0]) if broken.size else turns
            if until - begin > last - first:
                first, last, chosen = begin, until, (lags, place[begin + 1], ports[begin + 1])
        if last - first < FEWEST:
            return None
        flat = iter([
            _OUTSIDE if lag == _FROM_OUTSIDE else Source(int(lag), int(at), int(port))
            for lag, at, port in zip(*chosen, strict=True)
        ])
        first_turn = start + first * period
        sources = tuple(tuple(next(flat) for _ in self.inputs[first_turn + k]) for k in range(period))
        return Repeat(first_turn, period, last - first, sources)

    def _seam(self, start: int, end: int, period: int) -> int:
        """Returns where in the period a turn begins such that the fewest tensors go from one to the next."""
        most = min(period - 1, end - start - FEWEST * period)
        if most <= 0:
            return 0
        reach: dict[int, int] = {}  # by tensor, how far behind its operation it is last taken
        for place in range(start + period, start + 2 * period):
            for tensor in self.inputs[place]:
                maker = int(self._makers[tensor])
                if start <= maker and place - maker < 2 * period:
                    key = (maker - start) % period * _PORTS + int(self._ports[tensor])
                    reach[key] = max(reach.get(key, 0), place - maker)
        crossing = np.zeros(period, np.int64)
        for key, far in reach.items():
            for k in range(1, far + 1):
                crossing[(key // _PORTS + k) % period] += 1
        return int(np.argmin(crossing[: most + 1]))


def _stretches(colours: Any) -> Iterator[tuple[int, int, int]]:
    """Yields from where to where the same colours come again after some period, at least `FEWEST` times."""
    n = len(colours)
    if n < FEWEST * _GRAM:
        return
    last: dict[Any, int] = {}
    distances: Counter[int] = Counter()
    listed = colours.tolist()
    for place in range(n - _GRAM + 1):
        gram = tuple(listed[place : place + _GRAM])
        before = last.get(gram)
        if before is not None:
            distances[place - before] += 1
        last[gram] = place
    common = [distance for distance, _ in distances.most_common(_PERIODS)]
    for period in dict.fromkeys([*common, *(2 * distance for distance in common)]):
        same = np.flatnonzero(colours[:-period] != colours[period:])
        edges = np.concatenate([[-1], same, [n - period]])
        for k in np.flatnonzero(np.diff(edges) > (FEWEST - 1) * period):
            yield int(edges[k]) + 1, int(edges[k + 1]) + period, period
