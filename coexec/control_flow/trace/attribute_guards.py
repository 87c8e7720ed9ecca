"""Attribute guards: where an attribute was found, checked before a guard reads it again, so that no code runs then.

Reading an attribute may run code of the program: a property, `__getattr__`, `__getattribute__`, or a module's
`__getattr__`. `plain_attribute` refuses those while a statement is traced; a class may get one later. What is checked
before each read: the owner's class, and for it and its bases (except libraries') whether they have the name, and if
so, that it is of a class that computes nothing.
"""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from coexec.control_flow.program_types import Value

_LIBRARIES = ("keras.", "tensorflow.")
_LAZY = ("tensorflow", "keras")  # modules that load parts of themselves when these are asked for


class Lookup(NamedTuple):
    """How an attribute was found: the owner's class, and what its bases and the owner itself hold by that name."""

    kind: weakref.ReferenceType[type]
    bases: tuple[tuple[int, weakref.ReferenceType[type] | None], ...]  # by place in the resolution order: of what class
    bases_in_all: int
    held: bool  # whether the owner itself has it
    is_class: bool  # whether the owner is a class: then the bases are its own


def lookup_of(owner: Value, name: str) -> Lookup | None:
    """Returns how an attribute is found; None where reading it again cannot run code of the program."""
    if isinstance(owner, types.FunctionType) and name not in vars(owner):
        return None  # what C code keeps of a function
    if isinstance(owner, types.ModuleType):
        if owner.__name__.startswith(_LAZY):
            return None
        return Lookup(weakref.ref(type(owner)), (), 0, True, False)
    is_class = isinstance(owner, type)
    order = owner.__mro__ if is_class else type(owner).__mro__
    bases = []
    for number, base in enumerate(order):
        found = vars(base).get(name, _MISSING)
        if base is object or (found is _MISSING and base.__module__.startswith(_LIBRARIES)):
            continue
        bases.append((number, None if found is _MISSING else weakref.ref(type(found))))
        if found is not _MISSING and is_class:
            break
    held = not is_class and name in getattr(owner, "__dict__", {})
    return Lookup(weakref.ref(type(owner)), tuple(bases), len(order), held, is_class)


def checks(n: int, owner: str, name: str, lookup: Lookup, names: dict[str, object]) -> list[str]:
    """Returns the lines that bail out of guard `n` if an attribute of `owner` might be found elsewhere.

    Adds what they refer to to `names`.
    """
    names["attribute_of"] = object.__getattribute__
    names[f"t{n}"] = lookup.kind
    lines = [f"t = type({owner})", f"if t is not t{n}(): return None"]
    if lookup.is_class:
        lines += [f"order = {owner}.__mro__"]
    elif lookup.bases_in_all:
        lines += ["if t.__getattribute__ is not attribute_of: return None", "order = t.__mro__"]
    if lookup.bases_in_all:
        lines.append(f"if len(order) != {lookup.bases_in_all}: return None")
    for number, kind in lookup.bases:
        if kind is None:
            lines.append(f"if {name!r} in order[{number}].__dict__: return None")
        else:
            names[f"t{n}_{number}"] = kind
            lines.append(f"if type(order[{number}].__dict__[{name!r}]) is not t{n}_{number}(): return None")
    if lookup.held:
        lines.append(f"if {name!r} not in {owner}.__dict__: return None")
    elif not lookup.is_class:
        lines.append(f"if {name!r} in getattr({owner}, '__dict__', ()): return None")
    return lines


_MISSING = object()
