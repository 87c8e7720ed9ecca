"""Intercept: the one file that hooks TensorFlow.

Every eager operation goes through a few functions of `pywrap_tfe`, which TensorFlow's generated code looks up as
module attributes on each call; constants made from Python values go through `constant_op.convert_to_eager_tensor`.
The hooks pass everything on untouched, unless

* the running thread has a handler (it records or follows a call): then the handler answers;
* a lazy tensor is among the inputs: TensorFlow's C++ side would refuse it, so it is replaced by its value.

They are installed while a call is recorded or followed, and while a lazy tensor is alive anywhere.
Relies on: `pywrap_tfe.TFE_Py_FastPathExecute(ctx, op, name, *inputs, *attrs)`, `TFE_Py_Execute(handle, device, op,
inputs, attrs, outputs)`, `TFE_Py_ExecuteCancelable`, `TFE_Py_TensorShapeSlice`, `TFE_ToDlpackCapsule`,
`TFE_DlpackDevice`, `TFE_Py_PackEagerTensors`, `TFE_Py_ForwardAccumulatorNew`, `TFE_Py_RecordGradient`, and the
functions of the set of tapes (`TFE_Py_TapeSet...`), which are called with the tape, or return it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import Any

import tensorflow as tf

from tracer import seeds
from tracer.handler import Handler
from tracer.inputs import Unsupported, python_spec
from tracer.lazy import LazyTensor, has_lazy, unwrap
from tracer.op import FINALIZERS, Signature, complete_attrs, signature_of
from tracer.private import EagerTensor, constant_op, context, ops, pywrap_tfe, record
from tracer.spec import RESOURCE

fast_execute = pywrap_tfe.TFE_Py_FastPathExecute
execute = pywrap_tfe.TFE_Py_Execute
_execute_cancelable = pywrap_tfe.TFE_Py_ExecuteCancelable
_convert_to_eager_tensor = constant_op.convert_to_eager_tensor
_tensor_shape_slice = pywrap_tfe.TFE_Py_TensorShapeSlice
_put = context._EagerTensorCache.put
record_gradient = pywrap_tfe.TFE_Py_RecordGradient
tape_is_empty = pywrap_tfe.TFE_Py_TapeSetIsEmpty
variable_accessed = pywrap_tfe.TFE_Py_TapeVariableAccessed


class _ThreadState(threading.local):
    handler: Handler | None = None


_thread = _ThreadState()


def current_handler() -> Handler | None:
    """Returns the running thread's handler."""
    return _thread.handler


class handling:
    """Lets `handler` answer this thread's operations; None lets them run untouched."""

    # A class, since a generator costs a microsecond, twice a call.
    __slots__ = ("before", "handler")

    def __init__(self, handler: Handler | None) -> None:
        self.handler = handler

    def __enter__(self) -> None:
        self.before = _thread.handler
        _thread.handler = self.handler

    def __exit__(self, *_: object) -> None:
        _thread.handler = self.before


# Runs: calls that hold operations back. Whoever uses a variable that one of them uses must see what it would have done.

_running: list[Any] = []


def enter_run(run: Any) -> None:
    """Makes other threads ask `run.settle_for(handles)` before they use a resource, and `run.settle_tape(tape)`."""
    _running.append(run)


def leave_run(run: Any) -> None:
    """Ends what `enter_run` began."""
    _running.remove(run)


def has_others(run: Any) -> bool:
    """Returns whether runs hold operations back beside this one."""
    return any(other is not run for other in _running)


def settle_for(handles: list[Any], but: Any = None) -> None:
    """Makes every run, `but` one, carry out what it holds back of operations on these resources."""
    for run in list(_running):
        if run is not but:
            run.settle_for(handles)


def _settle_tape(tape: Any) -> None:
    """Makes every run put on a tape of its own what it holds back: another thread asks it."""
    for run in list(_running):
        run.settle_tape(tape)


def _settle_runs(inputs: Any) -> None:
    handles = [v for v in inputs if type(v) is EagerTensor and v._datatype_enum() == RESOURCE]
    if handles:
        settle_for(handles)


def device_in_scope() -> str | None:
    """Returns the name of the device in scope; None where there is one device only, or none yet.

    TensorFlow looks for devices with its first operation, before which the call itself may say which are to be seen.
    """
    ctx = context.context()
    return ctx.device_name if ctx._initialized and len(ctx._context_devices) > 1 else None


def _placed(handler: Handler) -> bool:
    """Whether the program has put the operation on a device of its own choice: it runs there, aside from the others."""
    return context.context().device_name != handler.device


def answering_handler() -> Handler | None:
    """Returns the thread's handler if operations issued now are its to answer: eager ones, where the call computes."""
    handler = _thread.handler
    if handler is None or (handler.device is not None and _placed(handler)):
        return None
    return handler if context.context()._thread_local_data.is_eager else None  # `executing_eagerly`, in one call


# The hooks.


def _fast_path(ctx: Any, op: str, name: Any, *args: Any) -> Any:
    handler = _thread.handler
    if handler is not None:
        if handler.device is not None and _placed(handler):
            return handler.aside(args, lambda: run_fast(op, name, args))
        return handler.fast(op, name, args)
    if _running and op not in FINALIZERS:  # nobody holds what they end; the thread may be one that a run waits for
        _settle_runs(args)
    if has_lazy(args):
        return run_fast(op, name, args)
    return fast_execute(ctx, op, name, *args)


def _execute_hook(handle: Any, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int) -> Any:
    handler = _thread.handler
    if handler is not None:
        if handler.device is not None and _placed(handler):
            return handler.aside(inputs, lambda: run_execute(device, op, inputs, attrs, outputs))
        return handler.execute(device, op, inputs, attrs, outputs, None)
    if _running:
        _settle_runs(inputs)
    return execute(handle, device, op, unwrap(list(inputs)), attrs, outputs)


def _execute_cancelable_hook(
    handle: Any, device: Any, op: Any, inputs: Any, attrs: Any, cancel: Any, outputs: int
) -> Any:
    handler = _thread.handler
    if handler is not None:
        if handler.device is not None and _placed(handler):
            return handler.aside(inputs, lambda: run_execute(device, op, inputs, attrs, outputs, cancel))
        return handler.execute(device, op, inputs, attrs, outputs, cancel)
    if _running:
        _settle_runs(inputs)
    return _execute_cancelable(handle, device, op, unwrap(list(inputs)), attrs, cancel, outputs)


def run_execute(device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any = None) -> Any:
    """Runs an operation or function now, past the hooks."""
    handle = context.context()._handle
    tensors = unwrap(list(inputs))
    if cancel is None:
        return execute(handle, device, op, tensors, attrs, outputs)
    return _execute_cancelable(handle, device, op, tensors, attrs, cancel, outputs)


def run_fast(op: str, name: Any, args: tuple[Any, ...]) -> Any:
    """Runs an operation now, past the hooks, and puts it on the tapes with the lazy tensors it was given.

    TensorFlow would record the eager tensors behind them, which no tape knows.
    """
    ctx = context.context()
    if not has_lazy(args):
        return fast_execute(ctx, op, name, *args)
    real = unwrap(args)
    if tape_is_empty():
        return fast_execute(ctx, op, name, *real)
    # A Python function asks for itself whether somebody records, and must hear the truth.
    with contextlib.nullcontext() if op == "EagerPyFunc" else record.stop_recording():
        result = fast_execute(ctx, op, name, *real)
    signature = signature_of(op)
    assert signature is not None
    count = len(signature.inputs)
    tensors: list[Any] = []
    for i, (value, is_list) in enumerate(zip(args[:count], signature.lists, strict=True)):
        items = [_tensor(v, signature, i, args) for v in (value if is_list else (value,))]
        tensors.append(items if is_list else items[0])
    record_on_tapes(op, args[count:], tensors, flat_outputs(result))
    return result


def _tensor(value: Any, signature: Signature, i: int, args: tuple[Any, ...]) -> Any:
    if isinstance(value, EagerTensor):
        return value
    try:
        dtype = python_spec(signature, i, args, value).dtype
    except Unsupported:  # of a list of several dtypes, say: it has its own
        dtype = None
    return _convert_to_eager_tensor(unwrap(value), context.context(), dtype)


def record_on_tapes(op: str, attrs: tuple[Any, ...], inputs: list[Any], outputs: list[Any]) -> None:
    """Puts an operation on the active tapes and accumulators, as TensorFlow does for one that it ran."""
    kinds = tuple(
        tuple(v._datatype_enum() for v in value) if isinstance(value, list) else value._datatype_enum()
        for value in inputs
    )
    record_gradient(op, flat_outputs(inputs), complete_attrs(op, attrs, kinds), outputs, ops.get_name_scope())


def flat_outputs(result: Any) -> list[Any]:
    """Returns the tensors in what the fast path returned, in order."""
    if result is None:
        return []
    if not isinstance(result, (list, tuple)):
        return [result]
    return [t for item in result for t in (item if isinstance(item, (list, tuple)) else (item,))]


def template_of(result: Any) -> Any:
    """Returns the form of a result with the tensors replaced by their numbers; -1 for a tensor alone."""
    if result is None:
        return None
    if not isinstance(result, (list, tuple)):
        return -1
    numbers = itertools.count()
    return [[next(numbers) for _ in item] if isinstance(item, (list, tuple)) else next(numbers) for item in result]


def _constant_hook(value: Any, ctx: Any, dtype: Any = None) -> Any:
    handler = _thread.handler
    if handler is not None and not isinstance(value, EagerTensor) and not (handler.device and _placed(handler)):
        return handler.constant(value, dtype)
    return _convert_to_eager_tensor(value, ctx, dtype)


def make_constant(value: Any, dtype: Any) -> Any:
    """Makes an eager tensor of a Python value, past the hooks."""
    if has_lazy((value,)):
        value = unwrap(value)
    return _convert_to_eager_tensor(value, context.context(), dtype)


def _telling(function: Any, event: str) -> Any:
    """Returns `function`, which works on a tape or accumulator, made to tell the handler's tapes of it beforehand."""

    def hook(*args: Any) -> Any:
        try:
            handler = _thread.handler
            if handler is not None and handler.tapes is not None:
                getattr(handler.tapes, event)(*args)
            elif event == "asked" and args and _running:
                _settle_tape(args[0])
        except BaseException:
            if event == "popped":  # a tape that an interrupt left there would record for ever
                function(*args)
                if handler is not None and handler.tapes is not None:
                    handler.tapes.popped(*args)
            raise
        return function(*args)

    return hook


def _opening(function: Any, event: str) -> Any:
    """Returns `function`, which makes a tape or accumulator, made to tell the handler's tapes of what it made."""

    def hook(*args: Any) -> Any:
        tape = function(*args)
        handler = _thread.handler
        if handler is not None and handler.tapes is not None:
            try:
                getattr(handler.tapes, event)(tape)
            except BaseException:
                if event == "opened":  # nobody has the tape, which would record for ever
                    pywrap_tfe.TFE_Py_TapeSetRemove(tape)
                raise
        return tape

    return hook


def _unwrapping(function: Any) -> Any:
    def hook(*args: Any) -> Any:
        return function(*[unwrap(a) for a in args])

    return hook


def _shape_slice(tensors: Any, dimension: int) -> Any:
    """One dimension of each tensor's shape, as an integer tensor: gradients of concatenations ask for it."""
    handler = _thread.handler
    if handler is None or not has_lazy(tensors):
        return _tensor_shape_slice(unwrap(tensors), dimension)
    shapes = [t._shape_tuple() for t in tensors]
    if not all(0 <= dimension < len(shape) for shape in shapes):
        return _tensor_shape_slice(unwrap(tensors), dimension)
    return handler.constant([shape[dimension] for shape in shapes], tf.int32)


_HOOKS: list[tuple[Any, str, Any, Any]] = [
    (pywrap_tfe, "TFE_Py_FastPathExecute", fast_execute, _fast_path),
    (pywrap_tfe, "TFE_Py_Execute", execute, _execute_hook),
    (pywrap_tfe, "TFE_Py_ExecuteCancelable", _execute_cancelable, _execute_cancelable_hook),
    (pywrap_tfe, "TFE_Py_TensorShapeSlice", _tensor_shape_slice, _shape_slice),
    (constant_op, "convert_to_eager_tensor", _convert_to_eager_tensor, _constant_hook),
    (context, "internal_operation_seed", seeds.internal_operation_seed, seeds.noting_operation_seed),
]
_HOOKS += [
    (pywrap_tfe, name, getattr(pywrap_tfe, name), _unwrapping(getattr(pywrap_tfe, name)))
    for name in ("TFE_ToDlpackCapsule", "TFE_DlpackDevice", "TFE_Py_PackEagerTensors")
]
_HOOKS += [
    (pywrap_tfe, name, getattr(pywrap_tfe, name), tell(getattr(pywrap_tfe, name), event))
    for name, tell, event in (
        ("TFE_Py_TapeSetNew", _opening, "opened"),
        ("TFE_Py_ForwardAccumulatorNew", _opening, "accumulates"),
        ("TFE_Py_TapeSetAdd", _telling, "pushed"),
        ("TFE_Py_TapeSetRemove", _telling, "popped"),
        ("TFE_Py_TapeWatch", _telling, "watched"),
        ("TFE_Py_TapeWatchVariable", _telling, "watched"),
        ("TFE_Py_TapeVariableAccessed", _telling, "accessed"),
        ("TFE_Py_TapeGradient", _telling, "asked"),
        ("TFE_Py_RecordGradient", _telling, "noted"),
        ("TFE_Py_TapeSetRecordOperation", _telling, "bypassed"),
        ("TFE_Py_TapeSetRecordOperationBackprop", _telling, "bypassed"),
        ("TFE_Py_TapeSetRecordOperationForwardprop", _telling, "bypassed"),
        ("TFE_Py_TapeSetShouldRecordBackprop", _telling, "asked"),
        ("TFE_Py_TapeSetPossibleGradientTypes", _telling, "asked"),
    )
]


def _put_hook(self: Any, key: Any, value: Any) -> None:
    """Keeps lazy tensors out of what gradient functions keep for later: there they would hold the hooks for good."""
    if type(value) is not LazyTensor:
        _put(self, key, value)


# By module: what is there without hooks, and with them.
_ORIGINALS: list[tuple[dict[str, Any], dict[str, Any]]] = []
_HOOKED: list[tuple[dict[str, Any], dict[str, Any]]] = []
for _module in (constant_op, context, pywrap_tfe):
    _mine = [h for h in _HOOKS if h[0] is _module]
    _ORIGINALS.append((vars(_module), {name: original for _, name, original, _ in _mine}))
    _HOOKED.append((vars(_module), {name: hook for _, name, _, hook in _mine}))

_lock = threading.RLock()
_holders = 0


def installed() -> bool:
    """Returns whether the hooks are in place."""
    return pywrap_tfe.TFE_Py_FastPathExecute is _fast_path


def hold() -> None:
    """Installs the hooks, or keeps them for one more holder."""
    global _holders
    with _lock:
        if not installed():  # in this order, an interrupt in between leaves nothing that lasts
            context._EagerTensorCache.put = _put_hook
            for names, hooks in _HOOKED:
                names.update(hooks)
        _holders += 1


def release() -> None:
    """Lets go of the hooks; the last holder restores TensorFlow's own functions."""
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
            context._EagerTensorCache.put = _put
            for names, originals in _ORIGINALS:
                names.update(originals)


def keep_while_alive(lazy: LazyTensor) -> None:
    """Keeps the hooks until `lazy` dies: TensorFlow itself would refuse it."""
    hold()
    weakref.finalize(lazy, release).atexit = False
