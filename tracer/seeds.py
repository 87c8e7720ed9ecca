"""Seeds: the two numbers that a random operation starts from, drawn by TensorFlow for this one or given by the program.

Under `tf.random.set_seed`, TensorFlow draws the second one anew for each operation, so the operation's kernel is a new
one too, and what it draws follows from its seeds alone. They differ from call to call and are fed. Without any seed
both are zero, and the kernel draws what nobody can foretell. A seed that the program gives comes again, and with it
the kernel, which goes on where it was: such an operation has a state of its own. It runs at once where its inputs are
known, which mostly are shapes, and what it draws is fed.

A kernel is taken to be new if its seeds were just drawn. Two draws of one seed among 2**31, or an operation that the
program gives the result of `tf.compat.v1.get_seed` a second time, continue each other eagerly, and begin anew here.

Relies on `Context._rng`, on `context.internal_operation_seed`, which `random_seed.get_seed` looks up on each use, and
on how it makes two seeds of its answer.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.private import context, is_op_determinism_enabled

# Their numbers follow from their seeds and attributes in a way that can be written down without them.
SEEDED = frozenset({"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal"})

# They change nothing but their kernel's state, so they may run ahead of operations that wait.
DRAWING = SEEDED | {
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle",
    "LearnedUnigramCandidateSampler", "LogUniformCandidateSampler", "UniformCandidateSampler",
}  # fmt: skip

Pair = tuple[Any, Any]

NONE: Pair = (0, 0)  # no seed at all
_LARGEST = 2**31 - 1  # seeds are taken modulo this

_WHOLE = (int, np.integer)

MAX_PENDING = 16  # seeds that were drawn and not used yet


class _Drawn(threading.local):
    """What was drawn by a thread: seeds that no operation has used yet, and all those since a library call began."""

    def __init__(self) -> None:
        self.pending: deque[Pair] = deque(maxlen=MAX_PENDING)
        self.all: list[Pair] | None = None


_drawn = _Drawn()


internal_operation_seed = context.internal_operation_seed


def noting_operation_seed() -> int:
    """Draws a seed for an operation as TensorFlow does, whose function this one replaces, and takes note of it."""
    seed: int = internal_operation_seed()
    given = context.global_seed()
    if not isinstance(given, _WHOLE):  # a tensor, say: its remainder would be an operation
        return seed
    pair = given % _LARGEST, seed % _LARGEST
    pair = (0, _LARGEST) if pair == NONE else pair
    _drawn.pending.append(pair)
    if _drawn.all is not None:
        _drawn.all.append(pair)
    return seed


class listing:
    """Lists all seeds that the thread draws."""

    def __enter__(self) -> list[Pair]:
        self.before, _drawn.all = _drawn.all, []
        return _drawn.all

    def __exit__(self, *_: object) -> None:
        _drawn.all = self.before


def places(used: list[Pair], drawn: list[Pair]) -> tuple[int, list[int]] | None:
    """Returns how many seeds were drawn, and which of them were used; None if others were."""
    if not drawn and all(pair == NONE for pair in used):
        return len(used), [*range(len(used))]
    return (len(drawn), [drawn.index(pair) for pair in used]) if all(pair in drawn for pair in used) else None


def draw(count: int, used: list[int]) -> list[Pair]:
    """Draws so many seeds, as TensorFlow does where the program gives none; returns those that are used."""
    drawn = [tf.compat.v1.get_seed(None) for _ in range(count)]
    taken = [NONE if drawn[place] == (None, None) else drawn[place] for place in used]
    for pair in taken:
        take(pair)
    return taken


def generator() -> Any:
    """Returns what TensorFlow draws operations' seeds from: another one whenever a seed is set; None before that."""
    return getattr(context.context(), "_rng", None)


def settled(pairs: list[Pair]) -> list[Pair]:
    """Returns the seeds with others where there are none: 126 bits of the system's entropy, so no two are alike.

    A running number would come again in a fork of the process.
    """
    return [(secrets.randbits(63), secrets.randbits(63)) if pair == NONE else pair for pair in pairs]


def take(pair: Pair | None) -> None:
    """Takes note that an operation has used these seeds, if any."""
    if pair is not None and pair in _drawn.pending:
        _drawn.pending.remove(pair)


def split(op: str, attrs: tuple[Any, ...]) -> tuple[Pair | None, tuple[Any, ...]]:
    """Returns the seeds of an operation whose kernel is new, and its attributes without them; None for any other."""
    if op not in SEEDED:
        return None, attrs
    given = dict(zip(attrs[::2], attrs[1::2], strict=True))
    one, other = (0 if s is None else s for s in (given.pop("seed", None), given.pop("seed2", None)))
    if not isinstance(one, _WHOLE) or not isinstance(other, _WHOLE):
        return None, attrs
    pair = one, other
    if is_op_determinism_enabled() if pair == NONE else pair not in _drawn.pending:
        return None, attrs
    return pair, tuple([item for pair in given.items() for item in pair])


def are_fed(op: str, attrs: tuple[Any, ...]) -> bool:
    """Returns whether these are the attributes that `split` leaves of an operation."""
    return op in SEEDED and "seed" not in attrs[::2]


def join(attrs: tuple[Any, ...], pair: Pair) -> tuple[Any, ...]:
    """Returns the attributes with these seeds."""
    return "seed", pair[0], "seed2", pair[1], *attrs
