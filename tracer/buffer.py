"""Buffer: lets `memoryview` read a lazy tensor before Python 3.12.

Since 3.12 a class says so with `__buffer__`. Before, only C types have a buffer protocol; the slot of a Python class
is there, empty, and is filled in here. Relies on the layout of `PyTypeObject` (`tp_as_buffer` is the 20th pointer,
unchanged since Python 3.5), which matters on Python 3.10 and 3.11 only.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_TP_AS_BUFFER = 20 * ctypes.sizeof(ctypes.c_void_p)
_GetBuffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_callbacks: list[Any] = []  # a class's slot does not keep its own alive


def export_buffer_of(cls: type, attribute: str) -> None:
    """Makes instances of `cls` export the buffer of what their method `attribute` returns."""
    if sys.version_info >= (3, 12):
        return

    def get_buffer(self: Any, view: int, flags: int) -> int:
        # The view refers to the exporter behind: nothing has to be released here. What is raised here reaches nobody:
        # the runtime raises it again, and NumPy asks `__array__`, which does, too.
        try:
            exporter = getattr(self, attribute)()
            given = ctypes.py_object(exporter), ctypes.c_void_p(view), ctypes.c_int(flags)
            return int(ctypes.pythonapi.PyObject_GetBuffer(*given))
        except BaseException:
            return -1

    callback = _GetBuffer(get_buffer)
    _callbacks.append(callback)
    slot = ctypes.c_void_p.from_address(id(cls) + _TP_AS_BUFFER).value
    assert slot is not None
    ctypes.c_void_p.from_address(slot).value = ctypes.cast(callback, ctypes.c_void_p).value
