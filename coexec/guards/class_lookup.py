"""Class lookup: by which classes an object is found, and how: what a guard of its attributes can rely on."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from tracer.keras_packages import MODULES
from tracer.memory import class_version

HEAP = 1 << 9  # the flag of classes created by a `class` statement

_C_METHODS = (types.WrapperDescriptorType, types.MethodDescriptorType)
_NOT_ASKED = (object, type)  # have such methods themselves, which do what Python does without
# Methods by which NumPy has an instance give an array, and all that it, TensorFlow and Python look for in classes.
OF_INSTANCES = ("__array__", "__array_interface__", "__array_struct__")
_OPERATORS = (
    "add", "and", "divmod", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv",
    "xor",
)  # fmt: skip
_SPECIAL = frozenset({
    *OF_INSTANCES, "__array_function__", "__array_priority__", "__array_ufunc__", "__array_wrap__",
    "__tf_dispatch__", "__tf_tensor__", "__tf_tracing_type__",
    "__abs__", "__bool__", "__bytes__", "__call__", "__ceil__", "__complex__", "__contains__", "__enter__", "__eq__",
    "__exit__", "__float__", "__floor__", "__format__", "__fspath__", "__ge__", "__getattr__", "__getattribute__",
    "__getitem__", "__gt__", "__hash__", "__index__", "__init__", "__instancecheck__", "__int__", "__invert__",
    "__iter__", "__le__", "__len__", "__length_hint__", "__lt__", "__missing__", "__ne__", "__neg__", "__new__",
    "__next__", "__pos__", "__repr__", "__reversed__", "__round__", "__str__", "__subclasscheck__", "__trunc__",
    *(f"__{prefix}{name}__" for prefix in ("", "r", "i") for name in _OPERATORS),
})  # fmt: skip


def is_object(value: Any) -> bool:
    """Returns whether a value is a function, or an object of a plain class whose state is its attributes."""
    kind = type(value)
    if kind is types.FunctionType:
        return True
    return bool(kind.__flags__ & HEAP) and kind.__base__ is not None and is_plain(kind)


def is_watched_object(value: Any) -> bool:
    """Returns whether a value is compared by identity in a watched call, where reads of it are guarded."""
    kind = type(value)
    if kind is types.FunctionType or kind is types.ModuleType or isinstance(value, type):
        return True
    return bool(kind.__flags__ & HEAP) and not issubclass(kind, (list, tuple, dict, set, frozenset, np.ndarray))


def is_plain(kind: type) -> bool:
    """Returns whether a class's instances consist of attributes only, found by Python's default lookup."""
    return is_looked_up(kind) and not any(map(_is_written_in_c, kind.__mro__[:-1]))


def _is_written_in_c(kind: type) -> bool:
    """Returns whether a class has methods in C: its instances may hold more than attributes (`array`, `partial`)."""
    return any(type(v) in _C_METHODS and v.__objclass__ is kind for v in list(vars(kind).values()))


def is_looked_up(kind: type, base: type = object) -> bool:
    """Returns whether a class uses the attribute lookup of `base`, without `__getattr__`."""
    lookup: Any = kind.__getattribute__
    return lookup is base.__getattribute__ and not any("__getattr__" in vars(each) for each in kind.__mro__)


def is_told_by_type(kind: type) -> bool:
    """Returns whether `isinstance` with this class of a library runs no code of the program."""
    meta: Any = type(kind)
    ours = kind.__module__.startswith((*MODULES, "tensorflow.", "numpy", "builtins", "collections"))
    return ours and (meta.__instancecheck__ is type.__instancecheck__ or meta.__module__.startswith("tensorflow."))


def lacks_methods(kind: type) -> tuple[Callable[[type], bool], Any, int]:
    """Returns how to tell whether a class still lacks each special method that it lacks now.

    That is a check, and the cell and value of the class's version, at which it need not be made (value 0: always).
    """
    classes = [base for base in kind.__mro__ if base not in _NOT_ASKED]
    lacked = frozenset([name for name in _SPECIAL if not any(name in vars(base) for base in classes)])
    return functools.partial(_lacks_all, lacked), *(class_version(kind) or (None, 0))


def _lacks_all(names: frozenset[str], kind: type) -> bool:
    return not any(names & vars(base).keys() for base in kind.__mro__ if base not in _NOT_ASKED)
