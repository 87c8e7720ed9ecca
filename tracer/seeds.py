"""Seeds: the pair of seeds of a random operation, drawn by TensorFlow or passed by the program.

Under `tf.random.set_seed`, TensorFlow draws the second seed anew for each operation. The kernel is then new as well,
and its numbers follow from the seeds alone: they change with every call and are fed. Without any seed both are zero,
and the kernel's numbers are unpredictable. A seed that the program passes recurs, and with it the kernel, which
continues its stream: such an operation has state. It runs at once if its inputs, mostly shapes, are known, and its
result is fed.

A kernel counts as new if its seeds were just drawn. Two draws of one seed out of 2**31, or a second operation that the
program gives the same result of `tf.compat.v1.get_seed`, share a stream in eager mode and start a new one here.

Relies on `Context._rng`, on `context.internal_operation_seed`, which `random_seed.get_seed` looks up on each use, and
on how that combines it into a pair.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.faults import absorbs
from tracer.private import context, is_op_determinism_enabled

# Ops whose numbers are a known function of seeds and attributes.
SEEDED = frozenset({"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal"})

# Ops that change only their kernel's state, so they may run before pending operations.
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
    """Per thread: seeds drawn that no operation has used yet, and all seeds drawn since a library call began."""

    def __init__(self) -> None:
        self.pending: deque[Pair] = deque(maxlen=MAX_PENDING)
        self.all: list[Pair] | None = None
        self.returned: deque[tuple[Any, int]] = deque()  # with the generator that drew them


_drawn = _Drawn()


internal_operation_seed = context.internal_operation_seed


def noting_operation_seed() -> int:
    """Replaces TensorFlow's function: draws a seed for an operation in the same way, and keeps it as pending."""
    if _drawn.returned:
        generator_then, seed = _drawn.returned.popleft()
        if generator_then is not generator():  # a seed was set meanwhile
            _drawn.returned.clear()
            seed = internal_operation_seed()
    else:
        seed = internal_operation_seed()
    try:
        _note(seed)
    except Exception as error:  # it has been drawn; its kernel will just not count as new
        if not absorbs(error):
            raise
    return seed


def _note(seed: int) -> None:
    given = context.global_seed()
    if not isinstance(given, _WHOLE):  # a tensor, for example: `%` would be an operation
        return
    pair = given % _LARGEST, seed % _LARGEST
    pair = (0, _LARGEST) if pair == NONE else pair
    _drawn.pending.append(pair)
    if _drawn.all is not None:
        _drawn.all.append(pair)


class listing:
    """Collects all seeds that the thread draws inside the `with`."""

    def __enter__(self) -> list[Pair]:
        self.before, _drawn.all = _drawn.all, []
        return _drawn.all

    def __exit__(self, *_: object) -> None:
        _drawn.all = self.before


def places(used: list[Pair], drawn: list[Pair]) -> tuple[int, list[int]] | None:
    """Returns how many seeds were drawn and the indexes of the used ones; None if a used one was not drawn."""
    if not drawn and all(pair == NONE for pair in used):
        return len(used), [*range(len(used))]
    return (len(drawn), [drawn.index(pair) for pair in used]) if all(pair in drawn for pair in used) else None


def draw(count: int, used: list[int]) -> list[Pair]:
    """Draws `count` seeds as TensorFlow does for operations without one; returns and takes those at `used`."""
    drawn: list[Any] = []
    try:
        for _ in range(count):
            drawn.append(tf.compat.v1.get_seed(None))
        taken = [NONE if drawn[place] == (None, None) else drawn[place] for place in used]
        for pair in taken:
            take(pair)
        return taken
    except Exception:
        give_back(drawn)
        raise


def give_back(drawn: list[Any]) -> None:
    """Returns seeds that were drawn in vain, to be drawn again in order when the program's Python draws its own."""
    _drawn.returned.extend((generator(), seed) for _, seed in drawn if seed is not None)


def generator() -> Any:
    """Returns TensorFlow's generator of operation seeds, a new one after each `set_seed`; None before the first."""
    return getattr(context.context(), "_rng", None)


def settled(pairs: list[Pair]) -> list[Pair]:
    """Returns the seeds with absent ones replaced by 126 bits of the system's entropy, so that no two are alike.

    A counter would repeat in a forked process.
    """
    return [(secrets.randbits(63), secrets.randbits(63)) if pair == NONE else pair for pair in pairs]


def take(pair: Pair | None) -> None:
    """Marks a pair of seeds as used by an operation."""
    if pair is not None and pair in _drawn.pending:
        _drawn.pending.remove(pair)


def split(op: str, attrs: tuple[Any, ...]) -> tuple[Pair | None, tuple[Any, ...]]:
    """Returns an operation's seeds, if its kernel is new, and the other attributes; else None and all attributes."""
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
    """Returns whether these attributes of an operation are what `split` returns without its seeds."""
    return op in SEEDED and "seed" not in attrs[::2]


def join(attrs: tuple[Any, ...], pair: Pair) -> tuple[Any, ...]:
    """Returns the attributes with these seeds, undoing `split`."""
    return "seed", pair[0], "seed2", pair[1], *attrs
