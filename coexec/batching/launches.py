"""Launches: blocks of a batched call that have been carried out, and the gradient through them.

The way back takes the launches in reverse. A gradient flows only through the rows that the target depends on: a program
runs backwards once for each set of its outputs that have gradients, with the rows that have just those. (Zeros in the
place of missing gradients would be wrong: zero times infinity is NaN.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from coexec.batching.buffers import MASK, SHIFT, Buffers, Rows, take
from coexec.batching.schedule import GroupBlock


class Launch:
    """A block that has been carried out, with the arguments it was given."""

    __slots__ = ("block", "given")

    def __init__(self, block: GroupBlock, given: list[Any]) -> None:
        self.block = block
        self.given = given


def launch(block: GroupBlock, buffers: Buffers) -> Launch:
    """Carries out a block: the buffers of its outputs have values afterwards."""
    given = []
    for rows, argument in zip(block.rows, block.arguments, strict=True):
        if argument.shared:
            given.append(buffers.values[rows])
            continue
        value = rows.gather(buffers)
        if argument.many:
            value = tf.reshape(value, [block.count, -1, *argument.spec.shape])
        given.append(value)
    assert block.program is not None
    made = iter(block.program.forward(given))
    for group in block.groups:
        for n in range(len(group.kind.outputs)):
            buffers.values[group.first + n] = next(made)
    return Launch(block, given)


class Gradients:
    """The gradients that reach buffers on the way back."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._parts: dict[int, list[Any]] = {}
        self._masks: dict[int, Any] = {}

    def add(self, buffer: int, gradient: Any, mask: Any = None) -> None:
        """Adds a gradient of a buffer's rows; `mask`: which of them it is of, None for a shared buffer."""
        self._parts.setdefault(buffer, []).append(gradient)
        if mask is not None:
            known = self._masks.get(buffer)
            self._masks[buffer] = mask if known is None else known | mask

    def mask(self, buffer: int) -> Any:
        """Returns which rows of a buffer have a gradient; None if none has."""
        return self._masks.get(buffer)

    def has(self, buffer: int) -> bool:
        """Returns whether a buffer has a gradient."""
        return buffer in self._parts

    def parts(self, buffer: int) -> list[Any]:
        """Returns the gradients that have reached a buffer."""
        return self._parts.get(buffer, [])

    def total(self, buffer: int) -> Any:
        """Returns their sum."""
        parts = [_dense(part) for part in self._parts[buffer]]
        if len(parts) > 1:
            self._parts[buffer] = parts = [tf.add_n(parts)]
        return parts[0]


def _dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def tracked(launches: list[Launch], sources: set[int], tape: int) -> set[int]:
    """Returns the buffers that depend on those in `sources` by operations that a tape has recorded."""
    found = set(sources)
    for done in launches:
        block = done.block
        if tape not in block.tapes:
            continue
        reached = [
            (rows in found) if argument.shared else not found.isdisjoint(rows.buffers())
            for rows, argument in zip(block.rows, block.arguments, strict=True)
        ]
        if not any(reached):
            continue
        inside: list[bool] = []
        for group, wires in zip(block.groups, block.wires, strict=True):
            reaches = any(reached[w.number] if w.group < 0 else inside[w.group] for w in wires)
            inside.append(reaches)
            if reaches:
                found.update(
                    group.first + n for n, out in enumerate(group.kind.outputs) if out.spec.dtype.is_floating
                )
    return found


def propagate(launches: list[Launch], gradients: Gradients, wanted: set[int], buffers: Buffers) -> None:
    """Takes the gradients of outputs back through the launches to the buffers in `wanted`."""
    for done in reversed(launches):
        block = done.block
        assert block.program is not None
        outputs = [group.first + n for group in block.groups for n in range(len(group.kind.outputs))]
        if block.groups[0].kind.alone:
            seeded = [n for n, b in enumerate(outputs) if b in wanted and gradients.has(b)]
            if seeded:
                _back(done, tuple(seeded), [gradients.total(outputs[n]) for n in seeded], None, gradients, wanted,
                      buffers)  # fmt: skip
            continue
        seeded = [n for n, b in enumerate(outputs) if b in wanted and gradients.mask(b) is not None]
        if not seeded:
            continue
        totals = [gradients.total(outputs[n]) for n in seeded]
        masks = np.stack([gradients.mask(outputs[n]) for n in seeded])
        if masks.all():
            _back(done, tuple(seeded), totals, None, gradients, wanted, buffers)
            continue
        patterns, which = np.unique(masks, axis=1, return_inverse=True)
        which = which.reshape(-1)
        for number, pattern in enumerate(patterns.T):
            if pattern.any():
                chosen = np.flatnonzero(which == number)
                here = [i for i, present in enumerate(pattern) if present]
                cotangents = [take(totals[i], chosen) for i in here]
                _back(done, tuple(seeded[i] for i in here), cotangents, chosen, gradients, wanted, buffers)


def _back(
    done: Launch, seeded: tuple[int, ...], cotangents: list[Any], chosen: Any, gradients: Gradients, wanted: set[int],
    buffers: Buffers,
) -> None:  # fmt: skip
    """Runs a launch backwards for the rows `chosen` (None: all), whose outputs `seeded` have gradients."""
    block = done.block
    assert block.program is not None
    sought = []
    for n, (rows, argument) in enumerate(zip(block.rows, block.arguments, strict=True)):
        if argument.spec.dtype.is_floating and (
            rows in wanted if argument.shared else not wanted.isdisjoint(rows.buffers())
        ):
            sought.append(n)
    if not sought:
        return
    if chosen is None:
        given = done.given
    else:
        given = [
            value if argument.shared else take(value, chosen)
            for value, argument in zip(done.given, block.arguments, strict=True)
        ]
    found = block.program.backward(given, tuple(sought), seeded, cotangents)
    for n, gradient in zip(sought, found, strict=True):
        if gradient is None:
            continue
        rows, argument = block.rows[n], block.arguments[n]
        if argument.shared:
            gradients.add(rows, gradient)
            continue
        gradient, taken = _dense(gradient), chosen
        if argument.many:
            if chosen is not None:
                items = len(block.keys[n][0])
                taken = (chosen[:, None] * items + np.arange(items)).ravel()
            gradient = tf.reshape(gradient, [-1, *argument.spec.shape])
        assert isinstance(rows, Rows)
        for buffer, part, mask in rows.scatter(gradient, taken, buffers):
            if buffer in wanted:
                gradients.add(buffer, part, mask)


def seed(key: int, cotangent: Any, gradients: Gradients, buffers: Buffers) -> None:
    """Adds the gradient of a target."""
    buffer, row = key >> SHIFT, key & MASK
    value = buffers.values[buffer]
    size = int(value.shape[0])
    mask = np.zeros(size, bool)
    mask[row] = True
    whole = tf.reshape(cotangent, value.shape) if size == 1 else tf.scatter_nd([[row]], [cotangent], value.shape)
    gradients.add(buffer, whole, mask)
