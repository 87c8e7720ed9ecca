"""Results: a call's return values, converted to real eager tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

from coexec.follow.liveness import is_known
from tracer.lazy import LazyTensor


def hand_out(results: list[Any], watched: bool) -> None:
    """Replaces the lazy tensors in `results`, and in lists, dicts and tuples within, by eager ones, in place.

    A lazy tensor with other references (a user's object, a weak reference, or a tape, if any is still active:
    `watched`) is left alone: its identity must be preserved.
    """
    if type(results[0]) is LazyTensor:  # the most common case, at a tenth of the cost
        lazy = results[0]
        if not is_known(lazy, 1, watched):
            results[0] = _eager(lazy)
        return
    found: list[LazyTensor] = []
    places: Counter[int] = Counter()
    _find(results, found, places, set())
    real: dict[int, Any] = {}
    while found:
        lazy = found.pop()
        if not is_known(lazy, places[id(lazy)], watched):
            real[id(lazy)] = _eager(lazy)
    if real:
        _replace(results, real, set())


def _eager(lazy: LazyTensor) -> Any:
    eager = lazy.resolve()
    for name, attribute in vars(lazy).items():
        setattr(eager, name, attribute)
    return eager


def _find(value: Any, found: list[LazyTensor], places: Counter[int], seen: set[int]) -> None:
    """Appends the lazy tensors in `value` to `found`, and counts in `places` how often each occurs."""
    kind = type(value)
    if kind is LazyTensor:
        if not places[id(value)]:
            found.append(value)
        places[id(value)] += 1
    elif (kind is list or kind is dict or _rebuilt(kind)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if kind is dict else value:
            _find(item, found, places, seen)


def _rebuilt(kind: type) -> bool:
    """Whether this is a type of tuples that can be rebuilt from other items."""
    return kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_make"))


def _replace(value: Any, real: dict[int, Any], seen: set[int]) -> Any:
    """Replaces lazy tensors by those in `real`, in place in lists and dicts; returns the value, or a new tuple."""
    kind = type(value)
    if kind is LazyTensor:
        return real.get(id(value), value)
    if kind is list or kind is dict:
        if id(value) not in seen:
            seen.add(id(value))
            for key in range(len(value)) if kind is list else list(value):
                new = _replace(value[key], real, seen)
                if new is not value[key]:
                    value[key] = new
    elif _rebuilt(kind) and id(value) not in seen:
        seen.add(id(value))
        items = [_replace(item, real, seen) for item in value]
        if any(a is not b for a, b in zip(items, value, strict=True)):
            return tuple(items) if kind is tuple else kind._make(items)
    return value
