"""Variables: reads of variables used as operands, answered before TensorFlow's Python runs.

Using a `tf.Variable` in an operation with a tensor (`x @ kernel + bias`) takes 15 us of Python to convert, colocate and
read it, 10 of them around the operation. If the thread's handler expects the read next, it takes 3.

Relies on what `value` and `_read_variable_op` do: notify tapes, set `_variable_read`, and issue `ReadVariableOp`; and
on the attributes of `_UnreadVariable`, which are those of one that TensorFlow has made, but for five.

Custom gradients find the variables that they depend on by a watcher, which is notified of each access, on tapes or not.
Whoever skips accesses notifies the watchers instead (`notify_watchers`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tracer import hooks
from tracer.faults import absorbs, passes
from tracer.handler import Handler
from tracer.intercept import answering_handler
from tracer.lazy import LazyTensor
from tracer.private import (
    EagerTensor,
    ResourceVariable,
    UnreadVariable,
    global_state,
    ops,
    pywrap_tfe,
    variable_accessed,
)

_OTHERS = (tf.variant, tf.resource)  # dtypes whose spec needs more than dtype and shape


def is_variable(value: Any) -> bool:
    """Returns whether this is a plain `tf.Variable`: not a strategy's, and without a caching device."""
    return (
        type(value) is ResourceVariable
        and value._cached_value is None
        and value._caching_device is None
        and value._dtype not in _OTHERS
    )


def plain_variable(value: Any) -> Any:
    """Returns the plain `tf.Variable` that this is, or that Keras reads where this variable is used; else None."""
    kind = type(value)
    if kind is keras.Variable:
        scopes = vars(global_state.GLOBAL_STATE_TRACKER)
        if scopes.get("autocast_scope") is not None or scopes.get("stateless_scope") is not None:
            return None
        value = value._value
    elif kind is not ResourceVariable:
        return None
    return value if is_variable(value) else None


def value_of(variable: Any, handler: Handler) -> Any:
    """Returns the value of a variable that satisfies `is_variable` if the handler expects its read next; else None."""
    _tell(variable, handler)
    variable._variable_read = True
    return handler.expected("ReadVariableOp", (variable._handle, "dtype", variable._dtype))


def with_values(values: Any, handler: Handler, others: Iterable[Any] = ()) -> tuple[Any, ...] | None:
    """Returns arguments with the values of plain variables among them, as far as the handler expects their reads.

    Returns None if it expects none. They are read in order; variables inside of lists and tuples are, too. Not where
    these or `others` are anything but tensors, numbers, lists of integers, and lists of one dtype, beside which
    TensorFlow may convert them otherwise; nor where another one of `values` has, or decides, another dtype.
    """
    if not (all(map(_is_simple, values)) and all(map(_is_simple, others))):
        return None
    return _read(values, handler) if len(values) < 2 or _have_one_dtype(values) else None


def _have_one_dtype(values: Any) -> bool:
    """Returns whether the first value is a tensor or variable, and no later one has another dtype than this."""
    dtypes = [getattr(value, "dtype", None) for value in values]
    return dtypes[0] is not None and all(dtype is None or dtype == dtypes[0] for dtype in dtypes)


_ITEMS = frozenset({LazyTensor, EagerTensor, ResourceVariable})
_SIMPLE = _ITEMS | {keras.Variable, int, float, bool, str, type(None), tf.DType}


def _is_simple(value: Any) -> bool:
    kind = type(value)
    if kind is not list and kind is not tuple:
        return kind in _SIMPLE
    kinds = {type(item) for item in value}
    return kinds == {int} or (kinds <= _ITEMS and len({item.dtype for item in value}) == 1)


def _read(values: Any, handler: Handler) -> tuple[Any, ...] | None:
    found: list[Any] | None = None
    for n, value in enumerate(values):
        kind = type(value)
        if kind is list or kind is tuple:
            inner = _read(value, handler)
            given = None if inner is None else list(inner)
        elif kind is ResourceVariable or kind is keras.Variable:
            variable = plain_variable(value)
            given = None if variable is None else value_of(variable, handler)
        else:
            continue
        if given is not None:
            found = list(values) if found is None else found
            found[n] = given
    return None if found is None else tuple(found)


def rows_of(variable: Any, indices: Any, handler: Handler) -> Any:
    """Returns the rows of such a variable at `indices` if the handler expects that gather next; else None."""
    _tell(variable, handler)
    attrs = "batch_dims", 0, "validate_indices", True, "dtype", variable._dtype
    return handler.expected("ResourceGather", (variable._handle, indices, *attrs))


def _tell(variable: Any, handler: Handler) -> None:
    """Notifies tapes and watchers that a variable is accessed, as `variable_accessed` does."""
    if not handler.open:
        variable_accessed(variable)  # on replicas, tapes are notified of the container: 3 us
    elif variable._trainable:
        pywrap_tfe.TFE_Py_TapeVariableAccessed(variable)
        pywrap_tfe.TFE_Py_VariableWatcherVariableAccessed(variable)


def unread(handle: Any, dtype: Any, shape: Any, in_graph_mode: bool, unique_id: str) -> Any:
    """Returns what a write to a variable returns: one that is read when it is used.

    TensorFlow takes 20 us to make it, most of it to check what it passes itself.
    """
    if not _attributes:
        made = UnreadVariable(handle, dtype, shape, in_graph_mode, None, unique_id)
        _attributes.update(vars(made), _handle=None)
    variable = UnreadVariable.__new__(UnreadVariable)
    vars(variable).update(
        _attributes,
        _in_graph_mode=in_graph_mode,
        _graph_key=ops.get_default_graph()._graph_key,
        _shape=shape,
        _dtype=dtype,
        _handle=handle,
        _unique_id=unique_id,
    )
    return variable


_attributes: dict[str, Any] = {}  # of all such objects, in order; those of one variable are replaced

# Ids of the watchers in force, on any thread: while there are none, which is most of the time, nobody is notified.
watchers: set[int] = set()


def notify_watchers(variables: Iterable[Any]) -> None:
    """Notifies this thread's watchers that trainable variables have been accessed."""
    if watchers:
        for variable in variables:
            pywrap_tfe.TFE_Py_VariableWatcherVariableAccessed(variable)


def product(handler: Handler, a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> Any:
    """Returns the product of two tensors, as matrices or batches of them, if the handler expects it next; else None."""
    attrs: tuple[Any, ...]
    if a._rank() == b._rank() == 2:
        attrs = "transpose_a", transpose_a, "transpose_b", transpose_b, "grad_a", False, "grad_b", False
        return handler.expected("MatMul", (a, b, *attrs))
    attrs = "adj_x", transpose_a, "adj_y", transpose_b, "grad_x", False, "grad_y", False
    return handler.expected("BatchMatMulV2", (a, b, *attrs))


def _answered(read: Any) -> Any:
    @passes
    @functools.wraps(read)
    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        handler = None
        try:
            if not args and not kwargs and is_variable(self):
                handler = answering_handler()
                if handler is not None:
                    value = value_of(self, handler)
                    if value is not None:
                        return value
        except Exception as error:
            if not (absorbs(error) if handler is None else handler.fault(error)):
                raise
        return read(self, *args, **kwargs)

    return reading


def _opening(new: Any) -> Any:
    @passes
    @functools.wraps(new)
    def opening() -> Any:
        watcher = new()
        watchers.add(id(watcher))
        return watcher

    return opening


def _closing(remove: Any) -> Any:
    @passes
    @functools.wraps(remove)
    def closing(watcher: Any) -> None:
        remove(watcher)
        watchers.discard(id(watcher))

    return closing


_hooks = hooks.HookSet(
    __name__,
    "`ResourceVariable.value`, `_read_variable_op`; `TFE_Py_VariableWatcherNew`, `TFE_Py_VariableWatcherRemove`",
    "a handler that knows the read answers it before TensorFlow prepares it; skipped reads count for custom gradients",
    hooks.PROCESS,
)
for _name in ("value", "_read_variable_op"):
    _hooks.add(ResourceVariable, _name, _answered(getattr(ResourceVariable, _name)))
_hooks.add(pywrap_tfe, "TFE_Py_VariableWatcherNew", _opening(pywrap_tfe.TFE_Py_VariableWatcherNew))
_hooks.add(pywrap_tfe, "TFE_Py_VariableWatcherRemove", _closing(pywrap_tfe.TFE_Py_VariableWatcherRemove))
_hooks.hold_for_good()
