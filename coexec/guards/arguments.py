"""Argument guards: a library call's arguments, in a form with which the next call's are compared one by one.

Building a cache key, hashing it and looking the region up takes 10 us. Most calls have the same arguments as the call
before at the same place, tensors being compared by source, so the region skipped last is tried first. Its comparison is
a generated function, which takes 1 us; interpreting a list of conditions took 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from coexec.guards.call_key import OBJECT, OTHER, SCALAR, TENSOR, is_fixed_class, is_short, kind_of, marks_of
from coexec.guards.class_lookup import is_object, is_watched_object
from coexec.guards.codegen import CheckWriter
from tracer import library
from tracer.cursor import Cursor
from tracer.lazy import LazyTensor
from tracer.op import Const, freeze
from tracer.private import EagerTensor

PENDING, FEED, NEW = range(3)


class GivenTensors:
    """The tensors among the arguments of one call, numbered as by `CallArguments`."""

    __slots__ = ("_cursor", "given", "tensors")

    def __init__(self, cursor: Cursor, tensors: list[Any], given: list[Any]) -> None:
        self._cursor = cursor
        self.tensors = tensors
        self.given = given

    def const(self, number: int) -> Const | None:
        """Returns the value of a tensor that operations may treat as a constant, else None."""
        given = self.given[number]
        if type(given) is LazyTensor:
            if given._out.const is not None or given._value is None:
                return given._out.const
            given = given._value
        return self._cursor.constant_of(given)


class Memoized(Protocol):
    """A memoized call, as far as argument guards use it."""

    function: Any
    helper: Any  # if it is a function of the program


M = TypeVar("M", bound=Memoized)


class ArgumentGuard(Generic[M]):
    """The arguments for which one region is valid."""

    __slots__ = ("_fits", "_length", "_names", "around", "before", "function", "region")

    def __init__(self, region: M, fits: Any, length: int, names: tuple[str, ...]) -> None:
        self.region = region
        self.function = region.function
        self.before: Any = None  # whether tapes record; for a gradient, its tape's history
        self.around: Any = None  # the environment; None if the call does not depend on it
        self._fits = fits
        self._length = length
        self._names = names

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any], cursor: Cursor) -> GivenTensors | None:
        """Returns the tensors among the arguments if the guard accepts them, else None."""
        if kwargs or self._names:
            if tuple(kwargs) != self._names:
                return None
            args = (*args, *kwargs.values())
        return self._fits(args, cursor) if len(args) == self._length else None


class _Unfit(Exception):
    """Raised for arguments that only a key can compare; never leaves this module."""


def argument_guard_of(
    region: M, args: tuple[Any, ...], kwargs: dict[str, Any], cursor: Cursor, before: Any, around: Any
) -> ArgumentGuard[M] | None:
    """Returns a guard for arguments whose key was just found, before the call is skipped; None if there is none."""
    values = (*args, *kwargs.values())
    writer = _ArgumentWriter(cursor, marked=region.function not in library.plain, watched=region.helper is not None)
    try:
        fits = writer.write(values)
    except _Unfit:
        return None
    pattern = ArgumentGuard(region, fits, len(values), tuple(kwargs))
    pattern.before = before
    if region.function not in library.plain or writer.objects:
        pattern.around = around
    return pattern


class _ArgumentWriter:
    """Generates the function that compares a call's arguments with those of an earlier one."""

    def __init__(self, cursor: Cursor, marked: bool, watched: bool) -> None:
        self.objects = False  # whether there are any, whose use may depend on the environment
        self._cursor = cursor
        self._watched = watched
        self._marked = marked  # whether the call reads Keras' marks on tensors
        self._writer = CheckWriter(
            "values, cursor",
            GivenTensors=GivenTensors, LazyTensor=LazyTensor, freeze=freeze, marks_of=marks_of, real=_real,
        )  # fmt: skip
        self._tensors: list[Any] = []  # by their numbers
        self._numbered: list[tuple[str, str]] = []  # the same: names of the values, and of the arguments
        self._names_of: dict[int, str] = {}  # the names by the tensors' ids
        self._alike: dict[tuple[int, ...], list[str]] = {}  # names that must be distinct objects

    def write(self, values: tuple[Any, ...]) -> Callable[[tuple[Any, ...], Cursor], GivenTensors | None]:
        """Returns the function, of the values and the cursor."""
        self._writer.do("base, externals, place = cursor.base, cursor.externals, cursor.place")
        self._unpack("values", values)
        for names in self._alike.values():
            if len(names) > 1:
                self._unless(f"len({{{', '.join(f'id({name})' for name in names)}}}) != {len(names)}")
        tensors, given = ("".join(f"{pair[k]}, " for pair in self._numbered) for k in (0, 1))
        return self._writer.written(f"GivenTensors(cursor, [{tensors}], [{given}])")

    def _unpack(self, name: str, values: Any) -> None:
        inner = [self._writer.local() for _ in values]
        if inner:
            self._writer.do(f"{''.join(f'{n}, ' for n in inner)} = {name}")
        for n, value in zip(inner, values, strict=True):
            self._value(n, value)

    def _unless(self, condition: str) -> None:
        self._writer.require(f"not ({condition})")

    def _value(self, name: str, value: Any) -> None:
        kind, what = type(value), kind_of(value)
        if what is SCALAR:
            known, frozen = self._writer.constant(value), self._writer.constant(freeze(value))
            self._unless(f"{name} is not {known} and (type({name}) is not type({known}) or freeze({name}) != {frozen})")
        elif what is OBJECT or (what is OTHER and (is_object(value) or (self._watched and is_watched_object(value)))):
            self.objects = True
            self._unless(f"id({name}) != {self._writer.constant(id(value))}")  # by id, to not keep it alive
        elif is_fixed_class(value):
            self._unless(f"{name} is not {self._writer.constant(value)}")
        elif is_short(value):  # it may have been changed in place
            frozen = self._writer.constant(freeze(value))
            self._unless(f"type({name}) is not {self._writer.constant(kind)} or freeze({name}) != {frozen}")
        elif kind is list or kind is tuple:
            self._unless(f"type({name}) is not {kind.__name__} or len({name}) != {len(value)}")
            self._unpack(name, value)
        elif what is TENSOR and not (value.__dict__ and marks_of(value)):
            self._tensor(name, value)
        else:  # tensors in marks have numbers of their own
            raise _Unfit

    def _tensor(self, name: str, value: Any) -> None:
        marks = f" or ({name}.__dict__ and marks_of({name}))" if self._marked else ""
        lazy = type(value) is LazyTensor
        if lazy and value._out.const is None and value._value is None:
            place = value._key - self._cursor.base
            there = f"{name}._key - base == {self._writer.constant(place)} and {name}._out.const is None"
            self._unless(f"type({name}) is not LazyTensor or {name}._value is not None{marks} or not ({there})")
            self._number(name, name, (PENDING, place), value)
            return
        if lazy and value._out.const is not None:
            spec = self._writer.constant(value._out.spec)
            constant = f"type({name}) is LazyTensor and {name}._out.const is not None and {name}._out.spec is {spec}"
            self._unless(f"not ({constant}){marks}")
            real = self._writer.let(f"{name} if {name}._value is None else {name}._value")
            self._eager(real, name, value if value._value is None else value._value)
            return
        real = self._writer.let(f"real({name})")
        self._unless(f"{real} is None{marks}")
        eager = value._value if lazy else value
        spec = self._writer.constant((eager._datatype_enum(), eager._shape_tuple()))
        if not self._eager(real, name, eager):
            self._unless(f"({real}._datatype_enum(), {real}._shape_tuple()) != {spec}")

    def _eager(self, real: str, given: str, value: Any) -> bool:
        """Requires that a tensor is the same feed, or no feed so far; returns whether it is a feed."""
        place = self._cursor.place(value)
        if place is not None:
            number = self._writer.constant(place)
            self._unless(f"{number} >= len(externals) or externals[{number}] is not {real}")
            self._number(real, given, (FEED, place), value)
            return True
        self._unless(f"place({real}) is not None")
        self._number(real, given, (NEW, 0), value)
        return False

    def _number(self, name: str, given: str, kind: tuple[int, int], tensor: Any) -> None:
        """Numbers a tensor; requires that it is the one already numbered, or distinct from those before."""
        known = self._names_of.get(id(tensor))
        if known is not None:
            self._unless(f"{name} is not {known}")
            return
        self._names_of[id(tensor)] = name
        self._tensors.append(tensor)
        self._numbered.append((name, given))
        # Tensors of different kinds are distinct anyway, and so are pending tensors with different numbers.
        self._alike.setdefault(kind if kind[0] == PENDING else kind[:1], []).append(name)


def _real(value: Any) -> Any:
    """Returns the eager tensor of an argument; None if it has none, or may be a constant."""
    kind = type(value)
    if kind is EagerTensor:
        return value
    return value._value if kind is LazyTensor and value._out.const is None else None
