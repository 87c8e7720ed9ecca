"""Lists: what a loop on the device has appended to lists of the program's, handed over to them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from coexec.staging.lists import Grown


def hand_over(run: Any, lists: list[Grown], tensors: list[Any], variables: dict[str, Any]) -> int:
    """Appends the rows that have been filled to the lists that the variables hold; returns how many at most.

    `tensors` are the buffer of each list, and how many of its rows are filled.
    """
    found = []
    for grown, buffer, count in zip(lists, tensors[::2], tensors[1::2], strict=True):
        rows, filled = buffer.resolve(), int(count.resolve())
        parts = run._run(lambda rows=rows, filled=filled: tf.unstack(rows[:filled])) if filled else []
        found.append((variables[grown.name], parts))
    for held, parts in found:  # all of them, or none
        held.extend(parts)
    return max((len(parts) for _, parts in found), default=0)
