"""Dynamic: arguments padded to a few sizes, where the program declares that safe, and results sliced back."""

from __future__ import annotations

import bisect
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tracer.faults import passes


def dynamic(axis: int, buckets: Sequence[int], names: Sequence[str] | None = None) -> Callable[[Any], Any]:
    """Pads arguments of varying sizes with zeros to a few sizes (buckets), so that few programs are compiled.

        @coexec.function
        @coexec.dynamic(axis=0, buckets=[32, 64, 128])
        def scores(tokens, mask): ...

    You guarantee that padding is harmless: reductions over the axis must ignore the padding, for instance by a mask or
    weights among the arguments, which are zero-padded like all others. Results that have the padded size along the axis
    are sliced back to the original size. Works above and below `coexec.function`.

    Args:
      axis: the axis whose size varies, counted from 0; arguments with fewer axes are left alone.
      buckets: the sizes to pad to. A size above the largest raises ValueError.
      names: the arguments to pad; by default all tensors and arrays, including those in lists, tuples and dicts.
    """
    sizes = sorted(set(buckets))
    if axis < 0 or not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"dynamic takes an axis counted from 0 and sizes above 0, not axis={axis}, buckets={buckets}")
    return lambda function: Dynamic(function, axis, sizes, names)


class Dynamic:
    """A function whose arguments are padded; other attributes are those of the function itself."""

    def __init__(self, function: Any, axis: int, sizes: list[int], names: Sequence[str] | None) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self._axis, self._sizes, self._names = function, axis, sizes, names
        if names is not None:
            self._parameters = inspect.signature(function)
            lost = [name for name in names if name not in self._parameters.parameters]
            if lost:
                raise ValueError(f"{self._title} has no arguments {lost}; it has {list(self._parameters.parameters)}")

    @property
    def _title(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def around(self, decorate: Callable[[Any], Any]) -> Dynamic:
        """Returns the same padding around the decorated function."""
        return Dynamic(decorate(self.function), self._axis, self._sizes, self._names)

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # not set yet
            raise AttributeError(name)
        return getattr(self.function, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @passes
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._names is None:
            size, (args, kwargs), padded = self._pad((args, kwargs))
        else:
            given = self._parameters.bind(*args, **kwargs)
            mine = {name: given.arguments[name] for name in self._names if name in given.arguments}
            size, mine, padded = self._pad(mine)
            given.arguments.update(mine)
            args, kwargs = given.args, given.kwargs
        result = self.function(*args, **kwargs)
        if size == padded:
            return result
        cut = (*[slice(None)] * self._axis, slice(size))
        return tf.nest.map_structure(lambda part: part[cut] if self._size_of(part) == padded else part, result)

    def _pad(self, given: Any) -> tuple[int, Any, int]:
        """Returns the size along the axis, the padded arguments, and their size; ValueError if no bucket fits."""
        sizes = {size for part in tf.nest.flatten(given) if (size := self._size_of(part)) is not None}
        if not sizes:
            return 0, given, 0
        if len(sizes) > 1:
            raise ValueError(
                f"the arguments of {self._title} differ along axis {self._axis}, where they have {sorted(sizes)}\n"
                "  1. Name those that vary together: coexec.dynamic(axis, buckets, names=[...])."
            )
        size = sizes.pop()
        at = bisect.bisect_left(self._sizes, size)
        if at == len(self._sizes):
            raise ValueError(
                f"{self._title} was given {size} along axis {self._axis}; the largest bucket is {self._sizes[-1]}\n"
                f"  1. Give coexec.dynamic a bucket of {size} or more."
            )
        more = self._sizes[at] - size
        return size, tf.nest.map_structure(lambda part: self._padded(part, more), given) if more else given, size + more

    def _size_of(self, part: Any) -> int | None:
        if isinstance(part, (tf.Tensor, np.ndarray)) and len(part.shape) > self._axis:
            return int(part.shape[self._axis])
        return None

    def _padded(self, part: Any, more: int) -> Any:
        if self._size_of(part) is None:
            return part
        shape = [*part.shape]
        shape[self._axis] = more
        if isinstance(part, np.ndarray):
            return np.concatenate([part, np.zeros(shape, part.dtype)], self._axis)
        return tf.concat([part, tf.zeros(shape, part.dtype)], self._axis)
