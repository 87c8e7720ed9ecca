"""Results: a call's return values, converted to real eager tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

from coexec.follow.liveness import is_held, is_known
from tracer.lazy import LazyTensor


def hand_out(results: list[Any], watched: bool) -> None:
    """Replaces the lazy tensors in `results`, and in lists, dicts and tuples within, by eager ones, in place.

    A lazy tensor with other references (a user's object, a weak reference, or a tape, if any is still active:
    `watched`) is left alone: its identity must be preserved. So is a tuple with others, and what is in it, as another
    one would take its place.
    """
    if type(results[0]) is LazyTensor:  # the most common case, at a tenth of the cost
        lazy = results[0]
        if not is_known(lazy, 1, watched):
            results[0] = _eager(lazy)
        return
    kept: set[int] = set()  # ids of tuples that are left alone
    while True:
        found: list[LazyTensor] = []
        tuples: list[tuple[Any, ...]] = []
        places: Counter[int] = Counter()
        _find(results, found, tuples, places, set(kept))
        before = len(kept)
        while tuples:
            value = tuples.pop()
            if is_held(value, places[id(value)]) or getattr(value, "__dict__", None):
                kept.add(id(value))
        if len(kept) == before:  # else what was found in these does not count
            break
    real: dict[int, Any] = {}
    while found:
        lazy = found.pop()
        if not is_known(lazy, places[id(lazy)], watched):
            real[id(lazy)] = _eager(lazy)
    if real:
        _replace(results, real, dict.fromkeys(kept))


def _eager(lazy: LazyTensor) -> Any:
    eager = lazy.resolve()
    for name, attribute in vars(lazy).items():
        setattr(eager, name, attribute)
    return eager


def _find(
    value: Any, found: list[LazyTensor], tuples: list[tuple[Any, ...]], places: Counter[int], seen: set[int]
) -> None:
    """Appends the lazy tensors and tuples in `value` to `found` and `tuples`, and counts how often each occurs.

    What is in `seen` already is not looked into.
    """
    kind = type(value)
    if kind is LazyTensor:
        if not places[id(value)]:
            found.append(value)
        places[id(value)] += 1
    elif kind is list or kind is dict or _rebuilt(kind):
        if kind is not list and kind is not dict:
            places[id(value)] += 1
        if id(value) not in seen:
            seen.add(id(value))
            for item in value.values() if kind is dict else value:
                _find(item, found, tuples, places, seen)
            if kind is not list and kind is not dict:
                tuples.append(value)


def _rebuilt(kind: type) -> bool:
    """Whether this is a type of tuples that can be rebuilt from other items."""
    return kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_make"))


def _replace(value: Any, real: dict[int, Any], made: dict[int, Any]) -> Any:
    """Replaces lazy tensors by those in `real`, in place in lists and dicts; returns the value, or a new tuple.

    `made`: what was returned for containers, by id; None for those to leave alone.
    """
    kind = type(value)
    if kind is LazyTensor:
        return real.get(id(value), value)
    if kind is list or kind is dict:
        if id(value) not in made:
            made[id(value)] = value
            for key in range(len(value)) if kind is list else list(value):
                new = _replace(value[key], real, made)
                if new is not value[key]:
                    value[key] = new
    elif _rebuilt(kind):
        if id(value) in made:
            return value if made[id(value)] is None else made[id(value)]
        made[id(value)] = value  # a cycle through it stays as it is
        items = [_replace(item, real, made) for item in value]
        if any(a is not b for a, b in zip(items, value, strict=True)):
            made[id(value)] = tuple(items) if kind is tuple else kind._make(items)
        return made[id(value)]
    return value
