"""Repeats: runs of operations that repeat with the same wiring, as iterations of a loop that Python unrolled.

They are found by what the operations are, not by where they were issued: the operations of a gradient are not issued by
a line of the loop that they belong to. An operation's *colour* is a number, equal for operations of equal type,
attributes, dtypes and shapes. A tensor is a number too, with the place of the operation that produces it and its output
index (port).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from coexec.base.tuning import tuning

_GRAM = 3  # consecutive operations that must repeat for a period to be tried

_PORTS = 1 << 20  # more than any operation has outputs

_FROM_OUTSIDE = -1


class InputSource(NamedTuple):
    """Where an operation's input comes from: an operation of the loop body, `lag` iterations ago, or outside (-1)."""

    lag: int
    place: int
    port: int


_OUTSIDE = InputSource(_FROM_OUTSIDE, 0, 0)


@dataclass(frozen=True)
class Repeat:
    """`turns` iterations of `period` operations each, from place `start` on."""

    start: int
    period: int
    turns: int
    sources: tuple[tuple[InputSource, ...], ...]  # by operation of an iteration, by input

    @property
    def end(self) -> int:
        """The place after the last iteration."""
        return self.start + self.period * self.turns


class Sequence:
    """The operations of a function in order, encoded as numbers."""

    def __init__(self, colours: list[int], inputs: list[list[int]], makers: list[int], ports: list[int]) -> None:
        self.colours = np.asarray(colours, np.int64)
        self.inputs = inputs  # by operation: its input tensors
        self._makers = np.asarray(makers, np.int64)  # by tensor: the place of its producer, -1 if that is outside
        self._ports = np.asarray(ports, np.int64)

    def repeats(self, least: int, accepts: Callable[[Repeat], bool]) -> list[Repeat]:
        """Returns non-overlapping accepted repeats in order; each saves at least `least` operations."""
        colours, found = self.colours.copy(), list[Repeat]()
        while (best := self._best(colours, least, accepts)) is not None:
            found.append(best)
            taken = range(best.start, best.end)
            colours[best.start : best.end] = [-2 - place for place in taken]  # unlike any other colour
        return sorted(found, key=lambda repeat: repeat.start)

    def _best(self, colours: Any, least: int, accepts: Callable[[Repeat], bool]) -> Repeat | None:
        """Returns the accepted repeat that saves most, if that is at least `least` operations; None otherwise."""
        best, most = None, least - 1
        for start, end, period in sorted(_runs(colours), key=lambda s: s[0] - s[1] + s[2]):
            if end - start - period <= most:
                break
            repeat = self._verified(start, end, period)
            if repeat is not None and (saved := self._saved(repeat)) > most and accepts(repeat):
                best, most = repeat, saved
        return best

    def _saved(self, repeat: Repeat) -> int:
        """Returns how many operations a loop saves, less those that assemble its inputs from outside."""
        tensors = self._tensors(repeat.start, repeat.period, repeat.turns)
        made = self._makers[tensors]
        broken = (made[2:] - made[1:-1] != made[1:-1] - made[:-2]) & (made[2:] >= 0)
        outside = np.array([source.lag == _FROM_OUTSIDE for turn in repeat.sources for source in turn], bool)
        pieces = int(broken[:, outside].sum())
        return (repeat.turns - 1) * repeat.period - pieces

    def _tensors(self, start: int, period: int, turns: int) -> Any:
        """Returns the input tensors of each iteration, shape [turns, n]: equal colours have equally many inputs."""
        rows = [
            [t for place in range(start + n * period, start + (n + 1) * period) for t in self.inputs[place]]
            for n in range(turns)
        ]
        return np.asarray(rows, np.int64).reshape(turns, -1)

    def _verified(self, start: int, end: int, period: int) -> Repeat | None:
        """Returns the longest repeat with the same wiring in a run of repeating colours; None if it is too short."""
        start += self._seam(start, end, period)
        turns = (end - start) // period
        if turns < tuning.min_repeats:
            return None
        tensors = self._tensors(start, period, turns)
        makers, ports = self._makers[tensors], self._ports[tensors]
        number = np.arange(turns)[:, None]
        turn, place = (makers - start) // period, (makers - start) % period
        first, last = 0, 0
        # The first iterations may be wired differently: those stay outside.
        for begin in range(turns - tuning.min_repeats + 1):
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
        if last - first < tuning.min_repeats:
            return None
        flat = iter([
            _OUTSIDE if lag == _FROM_OUTSIDE else InputSource(int(lag), int(at), int(port))
            for lag, at, port in zip(*chosen, strict=True)
        ])
        first_turn = start + first * period
        sources = tuple(tuple(next(flat) for _ in self.inputs[first_turn + k]) for k in range(period))
        return Repeat(first_turn, period, last - first, sources)

    def _seam(self, start: int, end: int, period: int) -> int:
        """Returns the offset at which to start the period so that the fewest tensors cross between iterations."""
        most = min(period - 1, end - start - tuning.min_repeats * period)
        if most <= 0:
            return 0
        reach: dict[int, int] = {}  # by tensor, the distance from its producer to its last use
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


def _runs(colours: Any) -> Iterator[tuple[int, int, int]]:
    """Yields (start, end, period) of runs in which the colours repeat, at least `tuning.min_repeats` times."""
    n = len(colours)
    if n < tuning.min_repeats * _GRAM:
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
    common = [distance for distance, _ in distances.most_common(tuning.fold_periods)]
    for period in dict.fromkeys([*common, *(2 * distance for distance in common)]):
        same = np.flatnonzero(colours[:-period] != colours[period:])
        edges = np.concatenate([[-1], same, [n - period]])
        for k in np.flatnonzero(np.diff(edges) > (tuning.min_repeats - 1) * period):
            yield int(edges[k]) + 1, int(edges[k + 1]) + period, period
