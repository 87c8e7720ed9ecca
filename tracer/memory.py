"""Memory: the words of CPython objects that show whether a dict, list, set or class has changed.

CPython changes the version number of a dict, and of a class, on every write, by whatever means. Together with the
pointers in lists and sets, these numbers show that hundreds of objects are unchanged, in the time that Python takes to
inspect twenty of them: NumPy gathers the words from memory.

Relies on the layout of objects in CPython 3.10 to 3.13, which is tested at import; with any other layout, `KNOWN` is
false. The owners of all words must be alive.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.versions import byte_bounds

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]

_WORD = 8
_FIRST, _LAST = 8, 1 << 47  # the range of addresses that `MEMORY` covers
_HEAP = 1 << 9  # flag of classes whose attributes can be set

# Byte offsets in objects.
_TYPE = 8
_DICT_VERSION, _DICT_VALUES = 24, 40
_LENGTH, _ITEMS = 16, 24  # of a list
_SET_FILL, _SET_USED, _SET_MASK, _SET_TABLE = 16, 24, 32, 40
_PARTIAL = (16, 24, 32)  # function, arguments and keywords of a `functools.partial`
_ENTRY = 16  # of a set: an object and its hash
_SLOTS = (-24, -32)  # of an instance's dict pointer, if its class has no offset

MEMORY: Words = np.ctypeslib.as_array((ctypes.c_uint64 * ((_LAST - _FIRST) // _WORD)).from_address(_FIRST))


def word(address: int) -> int:
    """Returns the word at an address."""
    return ctypes.c_uint64.from_address(address).value


def places(addresses: Sequence[int]) -> Places:
    """Returns the indexes into `MEMORY` of these addresses, for `words`."""
    return (np.array(addresses, np.intp) - _FIRST) // _WORD


def words(where: Places) -> bytes:
    """Returns the words at these places, as bytes."""
    return MEMORY[where].tobytes()


def type_places(holder: Any) -> list[int]:
    """Returns the address of an object's pointer to its class, if another class can be assigned to it."""
    return [id(holder) + _TYPE] if type(holder).__flags__ & _HEAP else []


def dict_places(holder: dict[Any, Any]) -> list[int]:
    """Returns the address of a dict's version."""
    return [id(holder) + _DICT_VERSION]


def slot_of(holder: Any) -> int | None:
    """Returns the address of an instance's pointer to its dict, or None if unknown."""
    held = holder.__dict__
    for offset in (*_SLOTS, type(holder).__dictoffset__):
        if (offset > 0 or offset in _SLOTS) and word(id(holder) + offset) == id(held):
            if sys.version_info >= (3, 13) and word(id(held) + _DICT_VALUES):
                # Writes to inline values do not change the version. A key that is not a string disables those.
                held[0] = None
                del held[0]
            return id(holder) + offset
    return None


def list_places(holder: list[Any], most: int) -> tuple[list[int], list[int]]:
    """Returns the addresses of a list's head, and of its items, which are valid while the head is unchanged."""
    start = word(id(holder) + _ITEMS)
    items = [start + _WORD * number for number in range(min(list.__len__(holder), most))]
    return [id(holder) + _LENGTH, id(holder) + _ITEMS], items


def set_places(holder: Any, most: int) -> tuple[list[int], list[int]]:
    """Returns the same for a set."""
    start, slots = word(id(holder) + _SET_TABLE), (word(id(holder) + _SET_MASK) + 1) * bool(set.__len__(holder))
    heads = [id(holder) + offset for offset in (_SET_FILL, _SET_USED, _SET_MASK, _SET_TABLE)]
    return heads, [start + _ENTRY * number for number in range(min(slots, most))]


def array_places(holder: npt.NDArray[Any]) -> list[int]:
    """Returns the addresses of the words that hold an array's data."""
    start, end = byte_bounds(holder)
    return list(range(start // _WORD * _WORD, end, _WORD))


def partial_places(holder: functools.partial[Any]) -> list[int]:
    """Returns the addresses of a `functools.partial`'s function, arguments and keywords."""
    return [id(holder) + offset for offset in _PARTIAL]


def class_places(kind: type) -> list[int]:
    """Returns the address of a class's version, which `type.__setattr__` clears, and the next lookup sets anew.

    Attributes set on a base of the class clear it, too.
    """
    if CLASS_VERSION is None or not kind.__flags__ & _HEAP:
        return []
    _ = kind.__init__  # type: ignore[misc]  # a lookup, which assigns a version if there is none
    return [id(kind) + CLASS_VERSION]


def class_version(kind: type) -> tuple[ctypes.c_uint, int] | None:
    """Returns the cell of a class's version, and its value (0: no version); None if the class is immutable."""
    if not kind.__flags__ & _HEAP:
        return None
    if CLASS_VERSION is None:
        return ctypes.c_uint(), 0
    _ = kind.__init__  # type: ignore[misc]  # as above
    cell = ctypes.c_uint.from_address(id(kind) + CLASS_VERSION)
    return cell, cell.value


def _find_class_version() -> int | None:
    """Returns the offset of a class's version, by observing which word changes; None if that is ambiguous."""

    class Base:
        number = 0

    class Probe(Base):
        pass

    offsets = list(range(0, type.__dict__["__basicsize__"].__get__(type) - 7, _WORD))
    for changed in (Probe, Base, Probe, Base):
        _ = Probe.number
        before = [_half(Probe, at) for at in offsets]
        changed.number = 1
        between = [_half(Probe, at) for at in offsets]
        _ = Probe.number
        after = [_half(Probe, at) for at in offsets]
        found = zip(offsets, before, between, after, strict=True)
        offsets = [at for at, was, cleared, now in found if cleared == 0 and was and now and was != now]
    return offsets[0] if len(offsets) == 1 else None


def _half(kind: type, offset: int) -> int:
    return ctypes.c_uint.from_address(id(kind) + offset).value


def _sees_writes() -> bool:
    """Returns whether each kind of change shows in the expected words."""

    class Probe:
        number: object = 0

    probe, items, names = Probe(), [object(), object()], {"a", "b"}
    partial = functools.partial(len, items)
    if [*map(word, partial_places(partial))] != [id(partial.func), id(partial.args), id(partial.keywords)]:
        return False
    probe.number = 1
    own, slot = probe.__dict__, slot_of(probe)
    if slot is None or word(id(names) + _SET_USED) != 2 or len(items) != word(id(items) + _LENGTH):
        return False
    where = places([
        slot, *dict_places(own), *list_places(items, 9)[0], *list_places(items, 9)[1], *set_places(names, 9)[0],
        *set_places(names, 9)[1],
    ])  # fmt: skip
    seen = [words(where)]
    for number in range(40):  # often enough for specialised instructions
        probe.number = object()
        seen.append(words(where))
        own["number"] = number
        seen.append(words(where))
        object.__setattr__(probe, "number", object())
        seen.append(words(where))
        items[1] = object()
        seen.append(words(where))
    names.discard("b")
    names.add("c")
    seen.append(words(where))
    return seen[-1] == words(where) and all(one != other for one, other in itertools.pairwise(seen))


CLASS_VERSION = _find_class_version() if sys.implementation.name == "cpython" else None

# Whether the layout is known, so that words can be read.
KNOWN = CLASS_VERSION is not None and ctypes.sizeof(ctypes.c_void_p) == _WORD and _sees_writes()
