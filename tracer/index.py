"""Index: positions of objects, by identity, in a list that grows at its end."""

from __future__ import annotations

from typing import Any


class Index:
    """Finds objects in a list in constant time; items appended since the last lookup are indexed first."""

    __slots__ = ("_count", "_places", "values")

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self._places: dict[int, int] = {}  # by id, which stays unique as the list keeps the objects alive
        self._count = 0

    def find(self, value: Any) -> int | None:
        """Returns the first position of an object in the list, or None."""
        values, places, count = self.values, self._places, len(self.values)
        if count < self._count:  # the list has shrunk
            places.clear()
            self._count = 0
        for at in range(self._count, count):
            places.setdefault(id(values[at]), at)
        self._count = count
        return places.get(id(value))
