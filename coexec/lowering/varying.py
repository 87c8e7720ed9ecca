"""Varying: constants of a segment that are others at other sizes, given to a graph as arguments.

They look like the plain values that they are at one size, for whatever asks their type, and say which argument they
are. Equal ones count as one only if they are one argument.
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
    """Returns whether a constant may be an argument: numbers, of which sizes and what follows from them are made."""
    kind = type(value)
    if kind is int or kind is float:
        return True
    if kind is list or kind is tuple:
        return all(type(item) is int for item in value)
    return kind is np.ndarray and value.dtype.kind in "if"


def varying(value: Any, number: int) -> Any:
    """Returns a value as the argument of this number."""
    made: Any = value.view(_Array) if type(value) is np.ndarray else _KINDS[type(value)](value)
    made.varying = number
    return made


def number_of(value: Any) -> int | None:
    """Returns which argument a value is; None for one that is a constant."""
    return getattr(value, "varying", None)
