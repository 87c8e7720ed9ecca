"""Memory: the words of CPython's objects that tell whether a dict, list, set or class has been changed.

CPython gives a dict, and a class, another version number with each write, whoever writes and by whatever means. With
the pointers inside of lists and sets, these numbers tell of hundreds of objects that they are as they were, in the time
that Python takes to look at twenty of them: NumPy picks the words out of memory.

Relies on the layout of objects in CPython 3.10 to 3.13, which is tried out on import; where it is another one, there
are no words. The owners of all words have to be alive.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]

_WORD = 8
_FIRST, _LAST = 8, 1 << 47  # addresses that NumPy is given
_HEAP = 1 << 9  # flag of classes whose attributes can be set

# Where things are in an object.
_DICT_VERSION, _DICT_VALUES = 24, 40
_LENGTH, _ITEMS = 16, 24  # of a list
_SET_FILL, _SET_USED, _SET_MASK, _SET_TABLE = 16, 24, 32, 40
_ENTRY = 16  # of a set: an object and its hash
_SLOTS = (-24, -32)  # where an instance has its dict, if its class does not say it

MEMORY: Words = np.ctypeslib.as_array((ctypes.c_uint64 * ((_LAST - _FIRST) // _WORD)).from_address(_FIRST))


def word(address: int) -> int:
    """Returns what is in memory at an address."""
    return ctypes.c_uint64.from_address(address).value


def places(addresses: Sequence[int]) -> Places:
    """Returns what `words` takes for these addresses."""
    return (np.array(addresses, np.intp) - _FIRST) // _WORD


def words(where: Places) -> bytes:
    """Returns what is in memory at some places."""
    return MEMORY[where].tobytes()


def dict_places(holder: dict[Any, Any]) -> list[int]:
    """Returns the address of a dict's version."""
    return [id(holder) + _DICT_VERSION]


def slot_of(holder: Any) -> int | None:
    """Returns the address at which an instance refers to its dict, if that is known."""
    held = holder.__dict__
    for offset in (*_SLOTS, type(holder).__dictoffset__):
        if (offset > 0 or offset in _SLOTS) and word(id(holder) + offset) == id(held):
            if sys.version_info >= (3, 13) and word(id(held) + _DICT_VALUES):
                # Values inside of the instance are written without another version. A key that is no string ends that.
                held[0] = None
                del held[0]
            return id(holder) + offset
    return None


def list_places(holder: list[Any], most: int) -> tuple[list[int], list[int]]:
    """Returns the addresses of a list's length and items, the latter good while the former are the same."""
    start = word(id(holder) + _ITEMS)
    items = [start + _WORD * number for number in range(min(list.__len__(holder), most))]
    return [id(holder) + _LENGTH, id(holder) + _ITEMS], items


def set_places(holder: Any, most: int) -> tuple[list[int], list[int]]:
    """Returns the same of a set."""
    start, slots = word(id(holder) + _SET_TABLE), (word(id(holder) + _SET_MASK) + 1) * bool(set.__len__(holder))
    heads = [id(holder) + offset for offset in (_SET_FILL, _SET_USED, _SET_MASK, _SET_TABLE)]
    return heads, [start + _ENTRY * number for number in range(min(slots, most))]


def array_places(holder: npt.NDArray[Any]) -> list[int]:
    """Returns the addresses of the words that an array's data lie in."""
    start, end = np.lib.array_utils.byte_bounds(holder)
    return list(range(start // _WORD * _WORD, end, _WORD))


def class_places(kind: type) -> list[int]:
    """Returns the address of a class's version: `type.__setattr__` clears it, the next lookup sets it anew.

    That is the same for what is set on a base of the class.
    """
    if CLASS_VERSION is None or not kind.__flags__ & _HEAP:
        return []
    _ = kind.__init__  # type: ignore[misc]  # a lookup along its bases, which gives the class a version if it has none
    return [id(kind) + CLASS_VERSION]


def class_version(kind: type) -> tuple[ctypes.c_uint, int] | None:
    """Returns where a class has its version, and what it is, 0 if it has none; None if the class never changes."""
    if not kind.__flags__ & _HEAP:
        return None
    if CLASS_VERSION is None:
        return ctypes.c_uint(), 0
    _ = kind.__init__  # type: ignore[misc]  # as above
    cell = ctypes.c_uint.from_address(id(kind) + CLASS_VERSION)
    return cell, cell.value


def _find_class_version() -> int | None:
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
    """Returns whether each kind of change is seen where it is expected to be."""

    class Probe:
        number: object = 0

    probe, items, names = Probe(), [object(), object()], {"a", "b"}
    probe.number = 1
    own, slot = probe.__dict__, slot_of(probe)
    if slot is None or word(id(names) + _SET_USED) != 2 or len(items) != word(id(items) + _LENGTH):
        return False
    where = places([
        slot, *dict_places(own), *list_places(items, 9)[0], *list_places(items, 9)[1], *set_places(names, 9)[0],
        *set_places(names, 9)[1],
    ])  # fmt: skip
    seen = [words(where)]
    for number in range(40):  # what runs often is run by other instructions
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

# Whether there are words to look at.
KNOWN = CLASS_VERSION is not None and ctypes.sizeof(ctypes.c_void_p) == _WORD and _sees_writes()
