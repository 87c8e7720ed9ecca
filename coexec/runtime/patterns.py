"""Patterns: what a library call was given, in a form that the next call's arguments are compared with one by one.

A key says which region belongs to any arguments; making one, hashing it and finding the region takes 10 us. Most calls
are given what the call before was given at the same place, tensors by where they come from, so that the region that was
jumped over last is asked first whether the arguments are its own, in 2.
"""

from __future__ import annotations

from typing import Any

from coexec.runtime.premises import is_object
from coexec.runtime.regions import OBJECT, OTHER, SCALAR, TENSOR, Region, kind_of, marks_of
from tracer import library
from tracer.cursor import Cursor
from tracer.lazy import LazyTensor
from tracer.op import Const, freeze
from tracer.private import EagerTensor

PENDING, CONSTANT, FEED, NEW, EQUAL, IDENTICAL, SEQUENCE = range(7)


_NOTHING: list[Any] = []


class Given:
    """The tensors among the arguments of one call, by their numbers, as `Arguments` of the same call has them."""

    __slots__ = ("_cursor", "given", "tensors")

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.tensors: list[Any] = []
        self.given: list[Any] = []

    def const(self, number: int) -> Const | None:
        """Returns the value of a tensor that operations may take for a constant."""
        given = self.given[number]
        if type(given) is LazyTensor:
            if given._out.const is not None or given._value is None:
                return given._out.const
            given = given._value
        return self._cursor.constant_of(given)

    def takes(self, number: int, tensor: Any, given: Any) -> bool:
        """Adds a tensor if it is one that is to have this number: the next one, or that which has it."""
        tensors = self.tensors
        if number < len(tensors):
            return tensors[number] is tensor
        for known in tensors:
            if known is tensor:
                return False
        tensors.append(tensor)
        self.given.append(given)
        return True


class Pattern:
    """The arguments that one region belongs to."""

    __slots__ = ("_names", "_wants", "around", "function", "marked", "region", "taped")

    def __init__(self, region: Region, wants: list[Any], names: tuple[str, ...], taped: bool, around: Any) -> None:
        self.region = region
        self.function = region.function
        self.taped = taped
        self.around = around  # the environment; None where the call depends on none
        self.marked = region.function not in library.plain  # whether it looks for what Keras notes on tensors
        self._wants = wants
        self._names = names

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any], cursor: Cursor) -> Given | None:
        """Returns the tensors of arguments that are this region's; None if they may be another's."""
        values = (*args, *kwargs.values()) if kwargs else args
        if len(values) != len(self._wants) or ((kwargs or self._names) and tuple(kwargs) != self._names):
            return None
        found = Given(cursor)
        return found if self._fit(self._wants, values, found, cursor) else None

    def is_given(self, args: tuple[Any, ...], kwargs: dict[str, Any], cursor: Cursor) -> list[Any] | None:
        """Returns what a region that gives nothing takes from outside, if these are its arguments.

        It says what `given` says, of no more than tensors one by one, numbers and words: an assertion's, most often,
        of which a step may have many. None where that takes more.
        """
        values = (*args, *kwargs.values()) if kwargs else args
        if len(values) != len(self._wants) or ((kwargs or self._names) and tuple(kwargs) != self._names):
            return None
        region, base, new = self.region, cursor.base, -1
        constants: list[Any] = []
        for (what, known, number), value in zip(self._wants, values, strict=True):
            if what == EQUAL:
                if value is not known and (type(value) is not type(known) or freeze(value) != number):
                    return None
            elif what == PENDING:
                if type(value) is not LazyTensor or value._key - base != known or value._value is not None:
                    return None
                if value._out.const is not None:
                    return None
            elif what == CONSTANT:
                if type(value) is not LazyTensor or value._value is not None:
                    return None
                out = value._out
                if out.const is None or out.spec is not known or any(value is other for other in constants):
                    return None
                if number in region.wanted and out.const != region.wanted[number]:
                    return None
                constants.append(value)
            elif what == FEED and type(value) is EagerTensor and number not in region.wanted:
                if known >= len(cursor.externals) or cursor.externals[known] is not value:
                    return None
            elif what == NEW and new < 0 and type(value) is EagerTensor and number not in region.wanted:
                if (value._datatype_enum(), value._shape_tuple()) != known:
                    return None
                new, tensor = number, value
            else:
                return None
        if new < 0:
            return None if region.feeds else _NOTHING
        for external in cursor.externals:
            if external is tensor:
                return None
        return [tensor] if region.feeds == [("argument", new)] else None

    def _fit(self, wants: list[Any], values: Any, found: Given, cursor: Cursor) -> bool:
        for want, value in zip(wants, values, strict=True):
            what, known, number = want
            kind = type(value)
            if what == EQUAL:
                if value is not known and (kind is not type(known) or freeze(value) != number):
                    return False
            elif what == IDENTICAL:
                if id(value) != known:
                    return False
            elif what == SEQUENCE:
                if kind is not known or len(value) != len(number) or not self._fit(number, value, found, cursor):
                    return False
            elif (kind is not LazyTensor and kind is not EagerTensor) or (
                self.marked and value.__dict__ and marks_of(value)
            ):
                return False
            elif what == PENDING:
                if kind is not LazyTensor or value._key - cursor.base != known or value._value is not None:
                    return False
                if value._out.const is not None or not found.takes(number, value, value):
                    return False
            elif what == CONSTANT:
                if kind is not LazyTensor or value._value is not None or value._out.const is None:
                    return False
                if value._out.spec is not known or not found.takes(number, value, value):
                    return False
            else:
                real = value
                if kind is LazyTensor:
                    real = value._value
                    if real is None or value._out.const is not None:
                        return False
                externals = cursor.externals
                if what == FEED:
                    if known >= len(externals) or externals[known] is not real:
                        return False
                else:
                    if (real._datatype_enum(), real._shape_tuple()) != known:
                        return False
                    for external in externals:
                        if external is real:
                            return False
                if not found.takes(number, real, value):
                    return False
        return True


class _Unfit(Exception):
    """Arguments that only a key can be compared by; never leaves this module."""


def pattern_of(
    region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], cursor: Cursor, taped: bool, around: Any
) -> Pattern | None:
    """Returns the pattern of arguments whose key was just found to be a region's, before the jump; None without one."""
    found = Given(cursor)
    objects: list[Any] = []
    try:
        wants = [_want(value, found, cursor, objects) for value in (*args, *kwargs.values())]
    except _Unfit:
        return None
    if region.function in library.plain and not objects:
        around = None
    return Pattern(region, wants, tuple(kwargs), taped, around)


def _want(value: Any, found: Given, cursor: Cursor, objects: list[Any]) -> tuple[int, Any, Any]:
    kind = type(value)
    what = kind_of(value)
    if what is SCALAR:
        return EQUAL, value, freeze(value)
    if what is OBJECT or (what is OTHER and is_object(value)):
        objects.append(value)
        return IDENTICAL, id(value), None
    if kind is list or kind is tuple:
        return SEQUENCE, kind, [_want(v, found, cursor, objects) for v in value]
    if what is TENSOR and value.__dict__ and marks_of(value):  # tensors, some of them, that have numbers of their own
        raise _Unfit
    if kind is LazyTensor and value._value is None:
        number = _number(value, value, found)
        if value._out.const is not None:
            return CONSTANT, value._out.spec, number
        return PENDING, value._key - cursor.base, number
    if (kind is LazyTensor and value._out.const is None) or kind is EagerTensor:
        real = value._value if kind is LazyTensor else value
        number = _number(real, value, found)
        for k, known in enumerate(cursor.externals):
            if known is real:
                return FEED, k, number
        return NEW, (real._datatype_enum(), real._shape_tuple()), number
    raise _Unfit


def _number(tensor: Any, given: Any, found: Given) -> int:
    for number, known in enumerate(found.tensors):
        if known is tensor:
            return number
    found.takes(len(found.tensors), tensor, given)
    return len(found.tensors) - 1
