"""C functions: what C functions called by watched code do to state that existed before the call.

A trace function cannot see into them. So each kind is listed here by what it reads and changes of its arguments;
others are refused.
"""

from __future__ import annotations

import _hashlib
import _operator
import _thread
import _weakref
import abc
import builtins
import collections
import functools
import hashlib
import inspect
import itertools
import math
import re
import sys
import types
import weakref
from typing import Any

import numpy as np

# The C implementation of `abc`.
_ABC: Any = vars(abc)
_checks_instance, _checks_subclass = _ABC["_abc_instancecheck"], _ABC["_abc_subclasscheck"]

# Functions that read their arguments, and containers among these, and return something new.
COMPUTING: frozenset[Any] = frozenset(
    {
        len, isinstance, issubclass, callable, min, max, sum, sorted, any, all, abs, round, divmod, pow, iter, chr,
        ord, format, repr, ascii, bin, hex, oct, hash, functools.reduce, _operator.index, sys.intern,
        sys.getrecursionlimit, sys.exc_info, _checks_instance, _checks_subclass, sys.is_finalizing,
        _thread.get_ident, _weakref.getweakrefcount, id, locals,
        *(f for f in vars(math).values() if isinstance(f, types.BuiltinFunctionType)),
        *(f for f in vars(_operator).values() if isinstance(f, types.BuiltinFunctionType)
          and not f.__name__.startswith("i") and f.__name__ not in ("setitem", "delitem", "attrgetter", "call")),
        *(f for name, f in vars(_hashlib).items() if name.startswith("openssl_")),
    }
)  # fmt: skip

# Classes whose instances are new, and hold their arguments.
MAKING: frozenset[type] = frozenset({
    object, type, super, list, tuple, dict, set, frozenset, int, float, complex, bool, str, bytes, bytearray, slice,
    range, enumerate, zip, map, filter, reversed, property, staticmethod, classmethod, functools.partial,
    types.MappingProxyType, weakref.ref,
    collections.deque, collections.OrderedDict, collections.defaultdict, types.MethodType, types.SimpleNamespace,
    itertools.chain, itertools.repeat, itertools.islice, itertools.starmap, itertools.product,
    itertools.zip_longest, itertools.accumulate, itertools.combinations, itertools.permutations, itertools.takewhile,
    itertools.dropwhile, itertools.compress, itertools.count, itertools.cycle, itertools.groupby,
    _operator.attrgetter, _operator.itemgetter, _operator.methodcaller,
    np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32,
    np.uint64, np.bool_, np.complex64, np.complex128, np.dtype,
})  # fmt: skip

# Those that return an array of their own, whatever they are given.
MAKING_ARRAYS: frozenset[Any] = frozenset({np.zeros, np.empty, np.arange, np.concatenate})

# NumPy functions that compute a new array, of which some are Python's.
_NUMPY = frozenset("""
    array asarray zeros empty arange dot concatenate where result_type can_cast promote_types min_scalar_type
    inner vdot bincount ones full eye identity tri indices isscalar
""".split())  # noqa: SIM905

# Functions that are dispatched by the classes of their arguments, and write to them or to files, call Python, or depend
# on how NumPy is set to print, on where arrays are, or on the time zone.
_OTHERWISE = frozenset("""
    apply_along_axis apply_over_axes array2string array_repr array_str busday_count busday_offset copyto
    datetime_as_string fill_diagonal is_busday load loadtxt may_share_memory nan_to_num piecewise place put
    put_along_axis putmask save savetxt savez savez_compressed shares_memory
""".split())  # noqa: SIM905

# Methods of arrays that compute new ones.
_ARRAY_METHODS = frozenset("""
    all any argmax argmin argpartition argsort astype choose clip compress conj conjugate copy cumprod cumsum diagonal
    dot flatten item max mean min nonzero prod ptp ravel repeat reshape round searchsorted squeeze std sum swapaxes take
    tobytes tolist trace transpose var
""".split())  # noqa: SIM905

# Mutating methods of containers.
CHANGING = frozenset("""
    append extend insert remove pop clear sort reverse update setdefault popitem add discard appendleft extendleft
    popleft rotate difference_update intersection_update symmetric_difference_update move_to_end
    __setitem__ __delitem__ __iadd__ __imul__ __ior__ __iand__ __isub__ __ixor__ __init__
""".split())  # noqa: SIM905

CONTAINERS = (list, dict, set, collections.deque)
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))

# Types whose methods change nothing.
UNCHANGING = (
    str, bytes, int, float, complex, bool, type(None), tuple, frozenset, range, slice, re.Pattern, re.Match,
    np.generic, np.dtype, types.CodeType,
)  # fmt: skip

# Acquired and released; a memoized call never waits for them.
LOCKS = (type(_thread.allocate_lock()), type(_thread.RLock()))
LOCKING = frozenset({"acquire", "release", "__enter__", "__exit__", "locked", "_is_owned"})

# Hashes of text, and what reads one.
HASHING = frozenset({"digest", "hexdigest", "copy"})
HASH = type(hashlib.sha256())

# `Dispatch` looks for handlers by the types of the arguments, and calls Python.
_STRUCTURES = ("Is", "is_", "Flatten", "AssertSame", "SameNamedtuples", "Dispatch")

READING_ATTRIBUTES: frozenset[Any] = frozenset({getattr, hasattr})
WRITING_ATTRIBUTES: frozenset[Any] = frozenset({setattr, delattr})
STEPPING: frozenset[Any] = frozenset({next})
LISTING_ATTRIBUTES: frozenset[Any] = frozenset({builtins.vars})


def is_of_numpy(function: Any) -> bool:
    """Returns whether this is a function of NumPy that computes something new from its arguments; most are of C.

    Goes by `type`: `isinstance` and attributes may run an object's code.
    """
    kind = type(function)
    if kind is np.ufunc:
        return getattr(np, function.__name__, None) is function
    if is_dispatcher(function):
        module = getattr(function, "__module__", None)
        return module in ("numpy", "numpy.linalg", "numpy.fft") and getattr(function, "__name__", "") not in _OTHERWISE
    if kind is not types.BuiltinFunctionType and kind is not types.FunctionType:
        return False
    return function.__name__ in _NUMPY and getattr(np, function.__name__, None) is function


def is_dispatcher(function: Any) -> bool:
    """Returns whether this is one of NumPy's functions that is dispatched by the classes of its arguments."""
    return type(function).__name__ == "_ArrayFunctionDispatcher"


def is_method_of_array(function: Any) -> bool:
    """Returns whether this is a method of an array or scalar of NumPy that computes a new one."""
    holder = getattr(function, "__self__", None)
    return isinstance(holder, (np.ndarray, np.generic)) and function.__name__ in _ARRAY_METHODS


def takes_before_output(function: Any) -> int | None:
    """Returns how many positional arguments a function of NumPy takes before an array to write to; None if any."""
    if type(function) is np.ufunc:
        return int(function.nin)
    if function is np.dot or function is np.concatenate:
        return 2
    if not is_dispatcher(function):
        return None
    names = list(inspect.signature(function).parameters)
    return names.index("out") if "out" in names else None


def reads_structure(function: Any) -> bool:
    """Returns whether this is a C function of TensorFlow's that looks at structures, but at nothing in their leaves."""
    return is_of_tensorflow(function) and str(getattr(function, "__name__", "")).startswith(_STRUCTURES)


def counts(function: Any) -> bool:
    """Returns whether this is one of TensorFlow's functions that count its own use, for its developers."""
    return is_of_tensorflow(function) and str(getattr(function, "__name__", "")).startswith("TFE_Monitoring")


def is_of_tensorflow(function: Any) -> bool:
    """Returns whether this is a C function of TensorFlow's internals."""
    module = getattr(function, "__module__", None) or ""
    return module.startswith(("tensorflow.", "optree", "_pywrap"))
