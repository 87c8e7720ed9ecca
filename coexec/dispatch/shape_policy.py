"""Sizes: which calls of a function are worth following when argument sizes keep changing."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from tracer.keras_packages import classes
from tracer.lazy import LazyTensor
from tracer.private import EagerTensor


class Verdict(enum.IntEnum):
    """How to run a call; truthy if by following it."""

    PLAIN = 0
    FOLLOW = 1
    INVEST = 2  # followed, but its cost does not count against following


class ShapePolicy:
    """The sizes of one function's arguments, and how often each combination was seen."""

    def __init__(self, is_method: bool = False, is_dynamic: bool = False) -> None:
        """`is_method`: whether the first argument is an object that the function is a method of, not data.

        `is_dynamic`: whether the function may be followed at any size, once it has been at a few.
        """
        self._at_once = tuning.sizes_before_any if is_dynamic else 0
        self._first = int(is_method)
        self._seen: dict[Any, int] = {}
        self._soon = 0  # how many are followed though not seen often
        self._is_new = False  # whether the call under way has a combination that has not been seen
        self._alike = 0  # calls with such combinations in a row that were followed, and in which nothing was new

    def judge(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], affords: Callable[[], bool], room: bool = True
    ) -> Verdict:
        """Notes a call's sizes; returns whether to follow it.

        `affords`: whether following has saved enough to learn another size; `room`: whether the graph has room for it.
        """
        if self._first:
            args = args[1:]
        seen, key = self._seen, _shapes((args, kwargs) if kwargs else args, tuning.size_depth)
        times = seen.get(key)
        self._is_new = times is None
        if times is None:
            times = 0
            # The very first is like any call of a new function.
            if len(seen) < max(tuning.sizes_at_once, self._at_once) and room:
                times = tuning.size_often if seen else tuning.size_often + tuning.size_invested
                self._soon += 1
            if len(seen) >= tuning.max_sizes:
                for old in list(seen)[: tuning.max_sizes // 2]:
                    seen.pop(old, None)
        elif tuning.size_soon <= times < tuning.size_often and room:
            if affords():
                times = tuning.size_often + tuning.size_invested
            elif self._soon < tuning.sizes_followed:
                times = tuning.size_often
                self._soon += 1
        if self._alike >= tuning.sizes_of_no_matter:
            times = tuning.size_often + tuning.size_invested
        if times == tuning.size_often and not room:
            return Verdict.PLAIN
        if times <= tuning.size_often + tuning.size_invested:
            seen[key] = times + 1
        if times < tuning.size_often:
            return Verdict.PLAIN
        return Verdict.INVEST if times < tuning.size_often + tuning.size_invested else Verdict.FOLLOW

    def followed(self, learnt: bool) -> None:
        """Notes whether there was something to learn in a followed call."""
        if self._is_new:
            self._is_new = False
            self._alike = 0 if learnt else self._alike + 1


def _shapes(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is EagerTensor or kind is LazyTensor:
        return value._shape_tuple()
    if kind is np.ndarray:
        return value.shape
    if depth and (kind is tuple or kind is list or kind is dict) and len(value) <= tuning.size_items:
        shapes = [_shapes(item, depth - 1) for item in (value.values() if kind is dict else value)]
        return tuple(shapes) if any(shape is not None for shape in shapes) else None
    is_record = _records.get(kind)
    if is_record or (is_record is None and _is_record(kind)):
        return _shapes_in_record(value)
    return None


def _shapes_in_record(value: Any) -> Any:
    """Returns the shapes of what is a tensor or an array itself: lists that an object keeps may grow on each call."""
    if isinstance(value, tuple):
        return tuple([_shapes(item, 0) for item in tuple.__iter__(value)])
    attributes = object.__getattribute__(value, "__dict__")
    if len(attributes) > tuning.size_items:
        return None
    return tuple([_shapes(item, 0) for item in list(attributes.values()) if type(item) in _ARRAYS])


_OTHERS = (dict, list, type, ModuleType, FunctionType)
_ARRAYS = frozenset({EagerTensor, LazyTensor, np.ndarray})
_records: dict[type, bool] = {}


def _is_record(kind: type) -> bool:
    """Returns whether objects of this class may be the data of a call: named tuples, data classes, ragged tensors."""
    lookup: Any = kind.__getattribute__
    known = issubclass(kind, tuple)
    if not known and lookup is object.__getattribute__ and kind.__dictoffset__ != 0:
        known = not issubclass(kind, (*classes.stateful, tf.Module, *_OTHERS))
    if len(_records) >= tuning.max_known_types:
        _records.clear()
    _records[kind] = known
    return known
