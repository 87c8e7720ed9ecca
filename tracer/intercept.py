"""Intercept: the hooks on the functions through which TensorFlow runs eager operations.

Every eager operation goes through a few functions of `pywrap_tfe`, which TensorFlow's generated code looks up as module
attributes on each call; conversions of Python values go through `constant_op.convert_to_eager_tensor`. The hooks call
the original unless

* the running thread has a handler, which records, follows or stages: then they call the handler;
* an input is a lazy tensor, which TensorFlow's C++ code rejects: then it is replaced by its value.

They are installed while a call is recorded or followed, and while any lazy tensor is alive.

Relies on: `pywrap_tfe.TFE_Py_FastPathExecute(ctx, op, name, *inputs, *attrs)`, `TFE_Py_Execute(handle, device, op,
inputs, attrs, outputs)`, `TFE_Py_ExecuteCancelable`, `TFE_Py_TensorShapeSlice`, `TFE_ToDlpackCapsule`,
`TFE_DlpackDevice`, `TFE_Py_PackEagerTensors`, `TFE_Py_ForwardAccumulatorNew`, `TFE_Py_RecordGradient`, the tape set's
functions (`TFE_Py_TapeSet...`), which take or return the tape, and `FuncRegistry.__call__(self, token, device, args)`,
which kernels call to run a `py_function`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tracer import hooks, seeds
from tracer.faults import absorbs, meant, passes
from tracer.handler import Handler
from tracer.inputs import Unsupported, aligned_copy, handles_in, is_large, python_spec, settle
from tracer.lazy import LazyTensor, has_lazy, unwrap
from tracer.op import FINALIZERS, Const, Signature, array_in, complete_attrs, signature_of
from tracer.private import EagerTensor, FuncRegistry, constant_op, context, core, ops, pywrap_tfe, record
from tracer.single_kernels import execute, fast_execute, fast_execute_alone
from tracer.slow_path import is_issued_by_name, named
from tracer.spec import Spec, first_handle
from tracer.versions import present

_execute_cancelable = pywrap_tfe.TFE_Py_ExecuteCancelable
_convert_to_eager_tensor = constant_op.convert_to_eager_tensor
_tensor_shape_slice = pywrap_tfe.TFE_Py_TensorShapeSlice
_put = context._EagerTensorCache.put
_call_py_function = FuncRegistry.__call__
record_gradient = pywrap_tfe.TFE_Py_RecordGradient
tape_is_empty = pywrap_tfe.TFE_Py_TapeSetIsEmpty
variable_accessed = pywrap_tfe.TFE_Py_TapeVariableAccessed

meant(core._FallbackException)  # TensorFlow catches it and retries through `execute`


class _ThreadState(threading.local):
    handler: Handler | None = None


_thread = _ThreadState()


def current_handler() -> Handler | None:
    """Returns the running thread's handler, or None."""
    return _thread.handler


class handling:
    """Makes `handler` answer this thread's operations inside the `with`; None runs them without a handler."""

    # A class, since a generator costs a microsecond, twice per call.
    __slots__ = ("before", "handler")

    def __init__(self, handler: Handler | None) -> None:
        self.handler = handler

    def __enter__(self) -> None:
        self.before = _thread.handler
        _thread.handler = self.handler

    def __exit__(self, *_: object) -> None:
        _thread.handler = self.before


# Runs: calls with pending operations. Another thread that uses a variable or tape of one must see their effects.

_running: list[Any] = []


def enter_run(run: Any) -> None:
    """Registers a run: other threads call its `settle_for(handles)` before they use resources, and `settle_tape`."""
    _running.append(run)


def leave_run(run: Any) -> None:
    """Unregisters a run."""
    _running.remove(run)


def runs() -> list[Any]:
    """Returns the runs with pending operations."""
    return list(_running)


def has_others(run: Any) -> bool:
    """Returns whether there are runs other than this one."""
    return any(other is not run for other in _running)


def settle_for(handles: list[Any], but: Any = None) -> None:
    """Makes every run except `but` execute its pending operations on these resources."""
    for run in list(_running):
        if run is not but:
            run.settle_for(handles)


def _settle_tape(tape: Any) -> None:
    """Makes every run record its pending operations on a tape of its own that this thread is about to use."""
    for run in list(_running):
        run.settle_tape(tape)


def _settle_runs(inputs: Any) -> None:
    handles = [first_handle(handle) for handle in handles_in(inputs)]
    if handles:
        settle_for(handles)


@passes
def without_handler(operation: Any) -> Any:
    """Runs an operation without a handler: operations issued by Python code inside it are not part of the call."""
    before, _thread.handler = _thread.handler, None
    try:
        return operation()
    finally:
        _thread.handler = before


def handle(handler: Handler | None) -> None:
    """Sets the thread's handler directly, after an error kept `handling` from restoring it."""
    _thread.handler = handler


def device_in_scope() -> str | None:
    """Returns the name of the device in scope; None if there is only one device, or none yet.

    TensorFlow discovers devices with its first operation; until then the call itself may configure which are visible.
    """
    ctx = context.context()
    return ctx.device_name if ctx._initialized and len(ctx._context_devices) > 1 else None


def _placed(handler: Handler) -> bool:
    """Whether the program has placed the operation on a device of its choice; it then runs outside the trace."""
    placed: bool = context.context().device_name != handler.device
    return placed


def answering_handler() -> Handler | None:
    """Returns the thread's handler if it answers operations issued now: eager ones, on the call's own device."""
    handler = _thread.handler
    if handler is None or (handler.device is not None and _placed(handler)):
        return None
    return handler if context.context()._thread_local_data.is_eager else None  # `executing_eagerly`, without its calls


# The hooks.


def _fast_path(ctx: Any, op: str, name: Any, *args: Any) -> Any:
    handler = _thread.handler
    if handler is not None:
        try:
            if handler.device is not None and _placed(handler):
                return handler.aside(args, lambda: run_fast(op, name, args))
            return handler.fast(op, name, args)
        except Exception as error:
            if not handler.fault(error):
                raise
        return without_handler(lambda: _surely(lambda: run_fast(op, name, args)))
    try:
        if _running and op not in FINALIZERS:  # no run uses what these free, and waiting could deadlock
            _settle_runs(args)
        if not has_lazy(args):
            return fast_execute(ctx, op, name, *args)
    except Exception as error:
        if not absorbs(error):
            raise
        _settle_runs(args)
    return _surely(lambda: run_fast(op, name, args))


def _surely(operation: Any) -> Any:
    """Runs an operation past the hooks; retries once after a fault of the runtime."""
    try:
        return operation()
    except Exception as error:
        if not absorbs(error):
            raise
    return operation()


def _execute_hook(handle: Any, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int) -> Any:
    handler = _thread.handler
    if handler is not None:
        try:
            if handler.device is not None and _placed(handler):
                return handler.aside(inputs, lambda: run_execute(device, op, inputs, attrs, outputs))
            return handler.execute(device, op, inputs, attrs, outputs, None)
        except Exception as error:
            if not handler.fault(error):
                raise
        return without_handler(lambda: _surely(lambda: run_execute(device, op, inputs, attrs, outputs)))
    return _surely(lambda: _settled_execute(device, op, inputs, attrs, outputs))


def _execute_cancelable_hook(
    handle: Any, device: Any, op: Any, inputs: Any, attrs: Any, cancel: Any, outputs: int
) -> Any:
    handler = _thread.handler
    if handler is not None:
        try:
            if handler.device is not None and _placed(handler):
                return handler.aside(inputs, lambda: run_execute(device, op, inputs, attrs, outputs, cancel))
            return handler.execute(device, op, inputs, attrs, outputs, cancel)
        except Exception as error:
            if not handler.fault(error):
                raise
        return without_handler(lambda: _surely(lambda: run_execute(device, op, inputs, attrs, outputs, cancel)))
    return _surely(lambda: _settled_execute(device, op, inputs, attrs, outputs, cancel))


def _settled_execute(device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any = None) -> Any:
    if _running:
        _settle_runs(inputs)
    return run_execute(device, op, inputs, attrs, outputs, cancel)


@passes
def run_execute(
    device: Any, op: Any, inputs: Any, attrs: Any, outputs: int, cancel: Any = None, run: Any = execute
) -> Any:
    """Runs an operation or function now, past the hooks, with lazy inputs replaced by their values."""
    handle, tensors = context.context()._handle, unwrap(list(inputs))
    if cancel is None:
        return run(handle, device, op, tensors, attrs, outputs)
    return _execute_cancelable(handle, device, op, tensors, attrs, cancel, outputs)


@passes
def run_fast(op: str, name: Any, args: tuple[Any, ...], run: Any = fast_execute) -> Any:
    """Runs an operation now, past the hooks, and records it on the tapes with the lazy tensors it was given.

    TensorFlow would record their eager tensors, which no tape watches.
    """
    ctx = context.context()
    if not has_lazy(args):
        return run(ctx, op, name, *args)
    if tape_is_empty():
        return run(ctx, op, name, *unwrap(args))
    signature = signature_of(op)
    assert signature is not None
    given, args = args, settle(signature, args)  # so that tapes see variable reads
    # An `EagerPyFunc` checks whether anything is recording, so recording must not be stopped.
    with contextlib.nullcontext() if op == "EagerPyFunc" else record.stop_recording():
        result = run_settled(op, name, args, given, lambda *_: run(ctx, op, name, *unwrap(args)))
    _record_after(op, args, result)
    return result


@passes
def run_fast_alone(op: str, name: Any, args: tuple[Any, ...]) -> Any:
    """Does what `run_fast` does, as a kernel alone where that makes no difference; see `single_kernels`."""
    return run_fast(op, name, args, fast_execute_alone)


@passes
def run_settled(op: str, name: Any, args: tuple[Any, ...], given: tuple[Any, ...], run: Any = run_fast) -> Any:
    """Runs an operation whose arguments were settled, by `run`; raises the error that eager raises for the `given`."""
    try:
        return run(op, name, args)
    except core._NotOkStatusException as error:
        signature = signature_of(op)
        if args is given or signature is None or not is_issued_by_name(signature, given):
            raise  # TensorFlow's generated code completes it
        # The slow path has errors of its own, as of dtypes; a stateful operation may have done a part of its work.
        raise (named(error, None) if signature.stateful else core._FallbackException(str(error))) from None


@passes
def run_unrecorded(op: str, name: Any, args: tuple[Any, ...]) -> Any:
    """Runs an operation now, past the hooks and hidden from the tapes; the caller records it later."""
    with record.stop_recording():
        return fast_execute(context.context(), op, name, *unwrap(args))


def _record_after(op: str, args: tuple[Any, ...], result: Any) -> None:
    try:
        record_fast(op, args, flat_outputs(result))
    except Exception as error:  # the operation has run: retry recording once before raising an error of ours
        if not absorbs(error):
            raise
        record_fast(op, args, flat_outputs(result))


def record_fast(op: str, args: tuple[Any, ...], outputs: list[Any]) -> None:
    """Records an operation, given in fast-path order, on the active tapes and accumulators."""
    inputs = as_tensors(op, args)
    record_on_tapes(op, args[len(inputs) :], inputs, outputs)


def as_tensors(op: str, args: tuple[Any, ...], kinds: type = object) -> list[Any]:
    """Returns the inputs of an operation, given in fast-path order, with tensors for values of these `kinds`."""
    signature = signature_of(op)
    assert signature is not None

    def converted(i: int, value: Any) -> Any:
        return _tensor(value, signature, i, args) if isinstance(value, kinds) else value

    inputs = enumerate(zip(args, signature.lists, strict=False))  # attributes follow
    return [[converted(i, v) for v in value] if is_list else converted(i, value) for i, (value, is_list) in inputs]


def _tensor(value: Any, signature: Signature, i: int, args: tuple[Any, ...]) -> Any:
    if isinstance(value, EagerTensor):
        return value
    try:
        dtype = python_spec(signature, i, args, value).dtype
    except Unsupported:  # a list of mixed dtypes, for example: let conversion choose
        dtype = None
    return _convert_to_eager_tensor(unwrap(value), context.context(), dtype)


def record_on_tapes(op: str, attrs: tuple[Any, ...], inputs: list[Any], outputs: list[Any]) -> None:
    """Records an operation on the active tapes and accumulators, as TensorFlow does after running one."""
    kinds = tuple(
        tuple(v._datatype_enum() for v in value) if isinstance(value, list) else value._datatype_enum()
        for value in inputs
    )
    record_gradient(op, flat_outputs(inputs), complete_attrs(op, attrs, kinds), outputs, ops.get_name_scope())


def flat_outputs(result: Any) -> list[Any]:
    """Returns the tensors in a fast-path result, in order."""
    if result is None:
        return []
    if not isinstance(result, (list, tuple)):
        return [result]
    return [t for item in result for t in (item if isinstance(item, (list, tuple)) else (item,))]


def template_of(result: Any) -> Any:
    """Returns the structure of a result with tensors replaced by their numbers; -1 for a single tensor."""
    if result is None:
        return None
    if not isinstance(result, (list, tuple)):
        return -1
    numbers = itertools.count()
    return [[next(numbers) for _ in item] if isinstance(item, (list, tuple)) else next(numbers) for item in result]


def _constant_hook(value: Any, ctx: Any, dtype: Any = None) -> Any:
    handler = _thread.handler
    if handler is not None and not isinstance(value, EagerTensor) and not (handler.device and _placed(handler)):
        try:
            return handler.constant(value, dtype)
        except Exception as error:
            if not handler.fault(error):
                raise
        return make_constant(value, dtype)
    return _convert_to_eager_tensor(value, ctx, dtype)


@passes
def make_constant(value: Any, dtype: Any) -> Any:
    """Converts a Python value to an eager tensor, past the hooks."""
    if has_lazy((value,)):
        value = unwrap(value)
    ctx = context.context()
    if is_large(value) and (dtype is None or dtype == value.dtype):
        ctx.ensure_initialized()
        return EagerTensor(aligned_copy(value), ctx.device_name, None)  # TensorFlow's function makes two
    return _convert_to_eager_tensor(value, ctx, dtype)


def as_constant(value: Any, spec: Spec) -> Const:
    """Returns a Python value as the constant that TensorFlow converts it to; raises what TensorFlow raises."""
    tensor = make_constant(value, spec.dtype)
    if value.__class__ is float and value == 0.0 and spec.dtype.is_floating:
        # TensorFlow caches tensors of Python numbers, and its cache does not distinguish -0.0 from 0.0.
        return Const(float(tensor), value)
    if isinstance(value, (np.ndarray, np.generic)) and tf.dtypes.as_dtype(value.dtype) != spec.dtype:
        array = array_in(tensor)  # converted to the dtype of another input
        return Const(array if isinstance(value, np.ndarray) else array[()], value)
    return Const(value)


def _notifying_before(function: Any, event: str) -> Any:
    """Returns `function`, which acts on a tape or accumulator, wrapped to call the tapes' `event` first."""

    @passes
    def hook(*args: Any) -> Any:
        try:
            handler = _thread.handler
            if handler is not None and handler.tapes is not None:
                try:
                    getattr(handler.tapes, event)(*args)
                except Exception as error:
                    if not handler.fault(error):
                        raise
                    getattr(handler.tapes, event)(*args)
            elif event == "asked" and args and _running:
                _settle_tape(args[0])
        except BaseException:
            if event == "popped":  # an interrupted pop would leave the tape recording for ever
                function(*args)
                if handler is not None and handler.tapes is not None:
                    handler.tapes.popped(*args)
            raise
        return function(*args)

    return hook


@passes
def _record_gradient_hook(op: str, inputs: Any, attrs: Any, outputs: Any, scope: Any) -> None:
    """TensorFlow's slow path records each operation itself; lets the handler's tapes take the record instead."""
    handler = _thread.handler
    if handler is not None and handler.tapes is not None:
        try:
            if handler.tapes.takes(op, inputs, attrs, outputs):
                return
        except Exception as error:
            if not handler.fault(error):
                raise
    record_gradient(op, inputs, attrs, outputs, scope)


def _offering(function: Any, event: str) -> Any:
    """Returns `function`, which puts an operation with a backward function on tapes, wrapped to offer it to the tapes.

    Their `event` returns whether they take it over, to put it on the tapes later.
    """

    @passes
    def hook(*args: Any) -> Any:
        handler = _thread.handler
        if handler is not None and handler.tapes is not None:
            try:
                if getattr(handler.tapes, event)(function, *args):
                    return None
            except Exception as error:
                if not handler.fault(error):
                    raise
        return function(*args)

    return hook


@passes
def _gradient_hook(*asked: Any) -> Any:
    """Lets the handler's tapes answer what a tape is asked for; else they bring it up to date."""
    handler = _thread.handler
    if handler is not None and handler.tapes is not None:
        try:
            found = handler.tapes.gradient(*asked)
            if found is not None:
                return found
        except Exception as error:
            if not handler.fault(error):
                raise
    return _gradient_of(*asked)


def _notifying_after(function: Any, event: str) -> Any:
    """Returns `function`, which makes a tape or accumulator, wrapped to pass it to the tapes' `event`."""

    @passes
    def hook(*args: Any) -> Any:
        tape = function(*args)
        handler = _thread.handler
        if handler is not None and handler.tapes is not None:
            try:
                try:
                    getattr(handler.tapes, event)(tape)
                except Exception as error:
                    if not handler.fault(error):
                        raise
                    getattr(handler.tapes, event)(tape)
            except BaseException:
                if event == "opened":  # no one else has the tape, which would record for ever
                    pywrap_tfe.TFE_Py_TapeSetRemove(tape)
                raise
        return tape

    return hook


def _unwrapping(function: Any) -> Any:
    @passes
    def hook(*args: Any) -> Any:
        return function(*[unwrap(a) for a in args])

    return hook


@passes
def _shape_slice(tensors: Any, dimension: int) -> Any:
    """Returns one dimension of each tensor's shape as an integer tensor, for gradients of concatenations."""
    handler = _thread.handler
    if handler is None or not has_lazy(tensors):
        return _tensor_shape_slice(unwrap(tensors), dimension)
    shapes = [t._shape_tuple() for t in tensors]
    if not all(0 <= dimension < len(shape) for shape in shapes):
        return _tensor_shape_slice(unwrap(tensors), dimension)
    return _constant_hook([shape[dimension] for shape in shapes], context.context(), tf.int32)


_HOOKS: list[tuple[Any, str, Any, Any]] = [
    (pywrap_tfe, "TFE_Py_FastPathExecute", pywrap_tfe.TFE_Py_FastPathExecute, _fast_path),
    (pywrap_tfe, "TFE_Py_Execute", pywrap_tfe.TFE_Py_Execute, _execute_hook),
    (pywrap_tfe, "TFE_Py_ExecuteCancelable", _execute_cancelable, _execute_cancelable_hook),
    (pywrap_tfe, "TFE_Py_RecordGradient", record_gradient, _record_gradient_hook),
    (pywrap_tfe, "TFE_Py_TensorShapeSlice", _tensor_shape_slice, _shape_slice),
    (constant_op, "convert_to_eager_tensor", _convert_to_eager_tensor, _constant_hook),
    (context, "internal_operation_seed", seeds.internal_operation_seed, seeds.noting_operation_seed),
]
_HOOKS += [
    (pywrap_tfe, name, getattr(pywrap_tfe, name), _unwrapping(getattr(pywrap_tfe, name)))
    for name in present(pywrap_tfe, "TFE_ToDlpackCapsule", "TFE_DlpackDevice", "TFE_Py_PackEagerTensors")
]
_HOOKS += [
    (pywrap_tfe, name, getattr(pywrap_tfe, name), tell(getattr(pywrap_tfe, name), event))
    for name, tell, event in (
        ("TFE_Py_TapeSetNew", _notifying_after, "opened"),
        ("TFE_Py_ForwardAccumulatorNew", _notifying_after, "accumulates"),
        ("TFE_Py_TapeSetAdd", _notifying_before, "pushed"),
        ("TFE_Py_TapeSetRemove", _notifying_before, "popped"),
        ("TFE_Py_TapeWatch", _notifying_before, "watched"),
        ("TFE_Py_TapeWatchVariable", _notifying_before, "watched"),
        ("TFE_Py_TapeVariableAccessed", _notifying_before, "accessed"),
        ("TFE_Py_TapeSetRecordOperation", _offering, "takes_function"),
        ("TFE_Py_TapeSetRecordOperationBackprop", _offering, "takes_function"),
        ("TFE_Py_TapeSetRecordOperationForwardprop", _notifying_before, "bypassed"),
        ("TFE_Py_TapeSetShouldRecordBackprop", _notifying_before, "asked"),
        ("TFE_Py_TapeSetPossibleGradientTypes", _notifying_before, "asked"),
    )
]

_gradient_of = _notifying_before(pywrap_tfe.TFE_Py_TapeGradient, "asked")
_HOOKS.append((pywrap_tfe, "TFE_Py_TapeGradient", pywrap_tfe.TFE_Py_TapeGradient, _gradient_hook))


@passes
def _put_hook(self: Any, key: Any, value: Any) -> None:
    """Keeps lazy tensors out of the cache of gradient functions, where they would keep the hooks installed forever."""
    if type(value) is not LazyTensor:
        _put(self, key, value)


@passes
def _py_function_hook(self: Any, token: Any, device: Any, args: Any) -> Any:
    """Returns the results of a Python function to the kernel that called it, on whichever thread that runs."""
    return unwrap(_call_py_function(self, token, device, args))


_hooks = hooks.HookSet(
    __name__,
    "entry points of the eager runtime in `pywrap_tfe`; `constant_op.convert_to_eager_tensor`, "
    "`context.internal_operation_seed`, `context._EagerTensorCache.put`, `script_ops.FuncRegistry.__call__`; "
    "TensorFlow's helpers for structures, modules and types (`structures`)",
    "the thread's handler answers operations, lazy tensors are replaced by their values, and helpers take less time",
    hooks.CALL,
)
for _module, _name, _, _hook in _HOOKS:
    _hooks.add(_module, _name, _hook)
_hooks.add(context._EagerTensorCache, "put", _put_hook)
_hooks.add(FuncRegistry, "__call__", _py_function_hook)

# The last release restores TensorFlow's own functions.
hold, release, targets = _hooks.hold, _hooks.release, _hooks.targets
add_hook = _hooks.add  # of another module, for the same time


def installed() -> bool:
    """Returns whether the hooks are installed."""
    return pywrap_tfe.TFE_Py_FastPathExecute is _fast_path


def holders() -> int:
    """Returns the number of calls and lazy tensors that keep the hooks installed."""
    return _hooks.users


def keep_while_alive(lazy: LazyTensor) -> None:
    """Keeps the hooks installed until `lazy` dies, since TensorFlow itself would reject it."""
    hold()
    weakref.finalize(lazy, release).atexit = False
