"""Naming: makes one class pass for another by name, also in error messages from C.

Those print `tp_name`: the plain name for a Python class, the dotted name for a C class. Relies on the layout of
`PyTypeObject`, where `tp_name` follows the header of a variable-size object.
"""

from __future__ import annotations

import ctypes

_TP_NAME = 3 * ctypes.sizeof(ctypes.c_void_p)


def pass_for(cls: type, other: type) -> None:
    """Gives `cls` the name of `other`, in Python and in C; `other` must never be freed."""
    cls.__name__, cls.__qualname__, cls.__module__ = other.__name__, other.__qualname__, other.__module__
    name = ctypes.c_char_p.from_address(id(other) + _TP_NAME).value
    assert name is not None
    assert name.decode().endswith(other.__name__)
    ctypes.c_void_p.from_address(id(cls) + _TP_NAME).value = ctypes.c_void_p.from_address(id(other) + _TP_NAME).value
