"""Watched calls: what calls of C code, or of trusted code, read and change.

A trace function sees neither. C functions are handled by the tables of `c_functions`; TensorFlow's and Keras' own code
is trusted if its arguments are plain values.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import operator
import sys
import types
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import wrapt

from coexec.base.tuning import tuning
from coexec.guards import c_functions as c
from coexec.guards.class_lookup import HEAP
from coexec.guards.flat_guards import items_of
from coexec.guards.watched_state import WatchedState, is_key, is_observed, of_class
from tracer.effects import is_of_the_standard_library
from tracer.errors import Refused
from tracer.keras_packages import MODULES
from tracer.lazy import LazyTensor
from tracer.location import is_user
from tracer.private import EagerTensor, pywrap_tfe
from tracer.value_stack import NULL, local

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ITERABLE_COROUTINE

_PLAIN: tuple[Any, ...] = (
    *c.UNCHANGING, EagerTensor, LazyTensor, tf.DType, tf.TensorShape, tf.Variable, keras.Variable, tf.TensorSpec, type,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.EllipsisType, types.MethodWrapperType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType, types.CellType,
    types.TracebackType, BaseException, functools.partial, np.ufunc,
)  # fmt: skip
_C_FUNCTIONS = (
    types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_CALLABLE = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_DISPATCHER = type(np.concatenate)
_RECORD = "pybind11_detail_function_record"
_CAPSULE = type(pywrap_tfe.TFE_Py_FastPathExecute.__self__)
_OF_OBJECT = frozenset({
    "__init__", "__new__", "__init_subclass__", "__eq__", "__ne__", "__hash__", "__str__", "__repr__", "__format__",
    "__sizeof__", "__get__", "__subclasshook__",
})  # fmt: skip


class WatchedCalls:
    """The calls inside one watched call."""

    def __init__(self, state: WatchedState) -> None:
        self.state = state
        self.makes: types.FrameType | None = None  # the frame whose next result on the stack is a new object

    # Trusted code.

    def is_plain_call(self, frame: types.FrameType) -> bool:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        if code.co_flags & _GENERATORS and frame.f_lasti > 0:
            return True  # a generator that resumes
        return all(self._is_plain(local(frame, number), 0) for number in range(count))

    def _are_plain(self, values: Any, depth: int) -> bool:
        # No short-circuit: all containers among them must be guarded.
        return [self._is_plain(value, depth) for value in values].count(False) == 0

    def _is_plain(self, value: Any, depth: int) -> bool:
        """Returns whether trusted code may be passed a value; guards the containers in it."""
        value = self.state.inner(value)
        kind = type(value)
        if isinstance(value, _PLAIN):
            if isinstance(value, tuple):
                return depth < tuning.watched_depth and self._are_plain(value, depth + 1)
            if kind in _C_FUNCTIONS:
                self._hands([value])
            if kind is functools.partial:
                return self._is_plain((value.func, value.args, value.keywords), depth + 1)
            return True
        if value is NULL:  # an unbound local or cell
            return True
        if isinstance(value, c.CONTAINERS):
            self.state.content(value)
            return depth < tuning.watched_depth and self._are_plain(items_of(value), depth + 1)
        if kind is types.MethodType:
            return self._is_plain(value.__self__, depth + 1)
        if isinstance(value, np.ndarray):
            self.state.array(value)
            return True
        if is_observed(value):
            self.state.keras[id(value)] = value
            return kind.__module__.startswith(MODULES)
        if kind.__module__.startswith(("tensorflow.", *MODULES, "numpy")):
            return isinstance(value, tf.IndexedSlices) or self.state.is_new(value)
        return False

    # C code.

    def calls(self, function: Any, args: list[Any], frame: types.FrameType, depth: int = 0) -> None:
        """Guards what a function about to be called reads, and notes what it changes; raises `Refused` if unknown."""
        kind = type(function)
        if kind is types.FunctionType:
            return  # its frame is watched
        if function is sys._getframe and _asks_for_trusted(frame):
            return
        if kind is types.MethodType:
            self.calls(function.__func__, [function.__self__, *args], frame, depth)
            return
        if kind is functools.partial and depth < tuning.watched_depth:
            self.calls(function.func, [*function.args, *args], frame, depth + 1)
            return
        if isinstance(function, type):
            self._makes_instance(function, args, frame)
            return
        name = getattr(function, "__name__", "")
        if kind in (types.MethodDescriptorType, types.WrapperDescriptorType) and args:
            self._calls_method(args[0], name, args[1:], function)
            return
        if kind is types.MethodWrapperType or (
            kind is types.BuiltinFunctionType
            and function.__self__ is not None
            and type(function.__self__) is not types.ModuleType
        ):
            self._calls_method(function.__self__, name, args, function)
            return
        if kind is types.BuiltinFunctionType or isinstance(function, np.ufunc) or kind.__module__.startswith("numpy"):
            self._calls_c(function, args)
            if kind is types.BuiltinFunctionType or kind is _DISPATCHER:
                if function is locals or function in c.MAKING_ARRAYS or (function is np.array and _is_written(args)):
                    self.makes = frame
            return
        if kind is types.ClassMethodDescriptorType:
            return
        if kind.__flags__ & HEAP:
            self.state.guards.looked_up(kind)
            if type(of_class(kind, "__call__")) is types.FunctionType:
                return
        if isinstance(function, wrapt.FunctionWrapper):
            self.state.computed(function, "__wrapped__")
            self.state.computed(function, "_self_wrapper")
            self.state.takes(args)
            return
        if isinstance(function, weakref.ref) and function() is not None:
            return  # guarded where it was read, and so is its referent
        raise Refused(f"it calls a {kind.__module__}.{kind.__qualname__}")

    def _makes_instance(self, kind: type, args: list[Any], frame: types.FrameType) -> None:
        self._hands(args)
        for value in args:
            self.state.takes(value)
        if kind in c.MAKING or issubclass(kind, (BaseException, np.generic)):
            if kind in (dict, set, list, frozenset):
                self.makes = frame
            return
        if not kind.__flags__ & HEAP:
            if kind.__module__.startswith(("tensorflow", "optree")):
                return
            raise Refused(f"it makes a {kind.__module__}.{kind.__qualname__}")
        self.state.guards.looked_up(kind)
        self.state.guards.looked_up(type(kind))

    def _calls_method(self, holder: Any, name: str, args: list[Any], function: Any) -> None:
        """The same for a method implemented in C."""
        self._hands(args)
        holder = self.state.inner(holder)
        if isinstance(holder, np.ufunc) and name != "at":
            self._calls_c(holder, args)
            return
        if isinstance(holder, c.UNCHANGING) and name not in ("__setattr__", "__delattr__"):
            for value in args:
                self.state.takes(value)
            return
        if isinstance(holder, c.CONTAINERS) and not name.endswith("attr__") and name != "__getattribute__":
            for value in args:
                self.state.takes(value)
            if name in c.CHANGING:
                if name == "setdefault" or name.startswith("pop") or name == "move_to_end":
                    self.state.content(holder)
                self.state.changes(holder)
            elif name in ("get", "__getitem__", "__contains__") and type(holder) is dict and args and is_key(args[0]):
                self.state.item(holder, args[0])
            elif name not in ("__init_subclass__", "__class_getitem__"):
                self.state.takes(holder)
            return
        if name in ("__setattr__", "__delattr__") and args:
            self.state.writes(holder, args[0])
        elif name == "__getattribute__" and args:
            self.state.attribute(holder, args[0])
        elif (isinstance(holder, c.LOCKS) and name in c.LOCKING) or (isinstance(holder, c.HASH) and name in c.HASHING):
            pass
        elif isinstance(holder, contextvars.ContextVar):
            self._calls_context_variable(holder, name, args)
        elif isinstance(holder, np.ndarray):
            self.state.takes(holder)
            if name in ("sort", "fill", "put", "resize", "setflags", "partition", "__setitem__", "itemset", "setfield"):
                raise Refused("it changes an array")
        elif isinstance(holder, (EagerTensor, LazyTensor)):
            pass  # reads of its value are observed elsewhere
        elif isinstance(holder, type):
            for value in args:
                self.state.takes(value)
            if name in ("__setattr__", "__delattr__") or name == "register":
                raise Refused(f"it changes a class: {name}")
        elif type(holder) is _CAPSULE or type(holder).__name__.startswith(_RECORD):  # a pybind11 function
            self._calls_c(function, args)
        elif name in _OF_OBJECT or self.state.is_new(holder):
            for value in args:
                self.state.takes(value)
        else:
            raise Refused(f"it calls {name} of a {type(holder).__name__}")

    def _calls_context_variable(self, variable: contextvars.ContextVar[Any], name: str, args: list[Any]) -> None:
        if name == "get":
            for value in args:
                self.state.takes(value)
            self.state.read_context(variable)
        else:
            self.state.write_context(variable)

    def _calls_c(self, function: Any, args: list[Any]) -> None:
        if function in c.READING_ATTRIBUTES:
            if type(args[1]) is str:
                self.state.attribute(args[0], args[1])
            return
        if function in c.WRITING_ATTRIBUTES:
            self.state.writes(args[0], args[1])
            return
        if function in c.STEPPING:
            if not self.state.is_new(args[0]) and not type(args[0]).__flags__ & HEAP:
                raise Refused(f"it steps through a {type(args[0]).__name__} that was there before")
            return
        if function in c.LISTING_ATTRIBUTES and args:
            self.state.guards.looked_up(type(args[0]))
            return
        if function in c.COMPUTING or c.is_of_numpy(function):
            self._hands(args)
            for value in args:
                self.state.takes(value)
            return
        if c.is_of_tensorflow(function):
            if c.reads_structure(function):
                for value in args:
                    self.state.takes(value)
                return
            if c.counts(function) or self._are_plain(args, 0):
                return
            raise Refused(f"it gives objects of the program's to {function.__name__}")
        raise Refused(f"it calls {getattr(function, '__module__', None)}.{getattr(function, '__qualname__', function)}")

    def _hands(self, values: list[Any]) -> None:
        """Checks values passed to C code, which may call them without the trace function seeing the arguments."""
        for value in values:
            kind = type(value)
            if kind is functools.partial:
                self._hands([value.func])
            elif kind in _C_FUNCTIONS:
                holder = getattr(value, "__self__", getattr(value, "__objclass__", None))
                unchanging = isinstance(holder, c.UNCHANGING) and holder is not None
                known = value in c.COMPUTING or c.is_of_tensorflow(value)
                if isinstance(holder, c.CONTAINERS) and value.__name__ not in c.CHANGING:
                    self.state.takes(holder)
                elif not unchanging and holder not in c.UNCHANGING and not known:
                    raise Refused(f"it has C code call {value.__name__}")
            elif kind in _CALLABLE:
                raise Refused(f"it has C code call a {kind.__name__}")


def _is_written(args: list[Any]) -> bool:
    """Returns whether `np.array` makes a new array of these, as it does of numbers, lists and tuples of these."""
    return bool(args) and isinstance(args[0], (list, tuple, int, float, complex))


def _asks_for_trusted(frame: types.FrameType) -> bool:
    """Returns whether it is TensorFlow that asks for a frame, by way of the standard library: it wants a name."""
    asking: types.FrameType | None = frame
    while asking is not None and is_of_the_standard_library(asking):
        asking = asking.f_back
    return asking is not None and not is_user(asking.f_code)
