"""Lists: what a loop on the device has appended to lists of the program's, handed over to them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from coexec.staging.lists import Grown

Parts = list[tuple[Any, list[Any]]]  # lists, and what they get


def parts_of(run: Any, lists: list[Grown], tensors: list[Any], variables: dict[str, Any]) -> Parts:
    """Returns the lists that the variables hold, and the rows of them that have been filled.

    `tensors` are the buffer of each list, and how many of its rows are filled.
    """
    found: Parts = []
    for grown, buffer, count in zip(lists, tensors[::2], tensors[1::2], strict=True):
        found.append((variables[grown.name], unstacked(run, buffer, int(count.resolve()))))
    return found


def unstacked(run: Any, buffer: Any, count: int) -> list[Any]:
    """Returns so many rows of a buffer, each as a tensor."""
    rows = buffer.resolve()
    return list(run._run(lambda: tf.unstack(rows[:count]), [])) if count else []


def hand_over(parts: Parts) -> int:
    """Appends to the lists what they get; returns how many at most."""
    for held, tensors in parts:
        held.extend(tensors)
    return max((len(tensors) for _, tensors in parts), default=0)
