"""Buffer: the buffer protocol of lazy tensors before Python 3.12, for `memoryview`.

From 3.12 on, `__buffer__` suffices. Before, only C types could export a buffer; a Python class has the slot, empty, and
it is filled in here. Relies on the layout of `PyTypeObject` (`tp_as_buffer` is the 20th pointer, unchanged since Python
3.5), which matters on Python 3.10 and 3.11 only.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_TP_AS_BUFFER = 20 * ctypes.sizeof(ctypes.c_void_p)
_GetBuffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_callbacks: list[Any] = []  # the slot does not keep its callback alive


def export_buffer_of(cls: type, attribute: str) -> None:
    """Makes instances of `cls` export the buffer of the object that their method `attribute` returns."""
    if sys.version_info >= (3, 12):
        return

    def get_buffer(self: Any, view: int, flags: int) -> int:
        # The view refers to that object, so there is nothing to release here. An exception cannot be reported from this
        # callback: the runtime raises it again later, and NumPy falls back to `__array__`, which raises it too.
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
