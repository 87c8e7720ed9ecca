"""Lifted constants: constants of a segment that differ between sizes, and become arguments of the graph.

A lifted constant is an instance of a subclass of its plain type that carries its argument number, so `isinstance` still
works. Equal values are one constant only if they have the same number.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class _Integer(int):
    varying: int


class _Float(float):
    varying: int


class _List(list[Any]):
    varying: int


class _Tuple(tuple[Any, ...]):
    varying: int


class _Array(np.ndarray[Any, Any]):
    varying: int


_KINDS: dict[type, Any] = {int: _Integer, float: _Float, list: _List, tuple: _Tuple}


def may_vary(value: Any) -> bool:
    """Returns whether a constant may be lifted: a number, a list or tuple of integers, or a numeric array."""
    kind = type(value)
    if kind is int or kind is float:
        return True
    if kind is list or kind is tuple:
        return all(type(item) is int for item in value)
    return kind is np.ndarray and value.dtype.kind in "if"


def varying(value: Any, number: int) -> Any:
    """Returns the value as the lifted constant of this argument number."""
    made: Any = value.view(_Array) if type(value) is np.ndarray else _KINDS[type(value)](value)
    made.varying = number
    return made


def number_of(value: Any) -> int | None:
    """Returns the argument number of a lifted constant; None for any other value."""
    return getattr(value, "varying", None)
