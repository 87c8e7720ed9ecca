"""Single kernels: runs an operation as a kernel alone, which TensorFlow's eager runtime wraps into a graph function.

That function is instantiated for each new combination of operation, attributes and device, with all passes over graphs:
0.6 to 0.9 ms on the CPU, where the kernel alone takes 15 us (measured on TensorFlow 2.21). It is most of the time of a
program's first step. What a call runs once, to record or compare it, is run without: by the same kernel, with the same
results. (Softmax, for one, is oneDNN's in a function and not alone, and differs in its last bit: it runs as ever.)

TensorFlow has one switch for the process, so it is off only while one operation runs, and nothing else is under way:
an operation on another thread, or issued by Python code inside of this one, switches it on again. Operations that draw
from the state of their kernel would else begin anew, as kernels of both kinds are cached apart. If an operation fails,
which must have changed nothing, it is run as always, for TensorFlow's own message.

Relies on `TFE_ContextSetRunEagerOpAsFunction(context, on, status)` of TensorFlow's library, on the kernel cache being
keyed by the switch, and on the switch being read before the kernel runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tracer import hooks
from tracer.faults import passes
from tracer.op import plain_name, signature_of
from tracer.private import context, core, kernels_of, op_as_function_switch, pywrap_tfe
from tracer.variable_ops import OPTIMIZER_OPS

_fast_execute = pywrap_tfe.TFE_Py_FastPathExecute
_execute = execute_function = pywrap_tfe.TFE_Py_Execute  # for functions, the switch makes no difference

_off: Any = None  # what has the switch off, and on, for the context with this handle
_on: Any = None
_context: Any = None

_is_off = False
_lock: threading.RLock  # held by the thread that has the switch off
_under_way: set[object] = set()  # a token for each operation under way that needs it on


def _begin() -> None:
    """Sets the initial state, also in a forked child, which has none of the other threads."""
    global _lock
    _lock = threading.RLock()
    _under_way.clear()
    if _is_off:
        _on()


_ANONYMOUS = "shared_name", context.anonymous_name()  # attributes of a variable's handle: a new one each time

# Operations for which oneDNN has kernels: some are replaced by those before the switch matters, and some, of which
# these only move values, in functions alone.
_REPLACED_BEFORE = frozenset(
    {"AvgPool", "AvgPool3D", "AvgPool3DGrad", "AvgPoolGrad", "BatchMatMul", "BatchMatMulV2", "Conv2D",
     "Conv2DBackpropFilter", "Conv2DBackpropInput", "Conv3D", "Conv3DBackpropFilterV2", "Conv3DBackpropInputV2",
     "DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNativeBackpropInput", "Einsum",
     "FusedBatchNorm", "FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3", "FusedBatchNormV2",
     "FusedBatchNormV3", "MatMul"}
)  # fmt: skip
_MOVING = frozenset({"Concat", "ConcatV2", "ConjugateTranspose", "Transpose"})

# Those that change nothing if they fail. (A scatter may have written some of its rows.)
_WHOLE = OPTIMIZER_OPS | {
    "AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "ReadVariableOp", "VarIsInitializedOp",
}  # fmt: skip


@functools.cache
def _is_alike(op: str) -> bool:
    """Returns whether an operation does the same either way: by one kernel, which has no state and runs no function."""
    signature = signature_of(op)
    if signature is None or any(attr.type in ("func", "list(func)") for attr in signature.definition.attr):
        return False
    if op not in _REPLACED_BEFORE | _MOVING and any(_has_kernels(prefix + op) for prefix in ("_Mkl", "_MklNative")):
        return False
    return op in _WHOLE or not signature.stateful


def _has_kernels(op: str) -> bool:
    """Returns whether there is such an operation, and kernels for it: asking for these takes 0.6 ms, for it 10 us."""
    return signature_of(op) is not None and bool(kernels_of(op))


def _take_switch() -> bool:
    """Takes the context's switch; returns whether there is one, for operations at once, on the only device, a CPU."""
    global _context, _off, _on
    ctx = context.context()
    if not ctx._initialized or len(ctx._context_devices) != 1 or ctx.is_async():
        return False
    if ctx._handle is _context:
        return _off is not None
    _off, _on = op_as_function_switch(ctx) or (None, None)
    _context = ctx._handle
    return _off is not None


def fast_execute_alone(ctx: Any, op: str, name: Any, *args: Any) -> Any:
    """Does what `TFE_Py_FastPathExecute` does, without a function where that makes no difference."""
    if (op == "VarHandleOp" and args[2:4] == _ANONYMOUS) or _is_alike(op):
        return _alone(_fast_execute, ctx, op, name, *args)
    return _beside(_fast_execute, ctx, op, name, *args)


def execute_alone(handle: Any, device: Any, op: Any, inputs: Any, attrs: Any, outputs: int) -> Any:
    """Does what `TFE_Py_Execute` does, without a function where that makes no difference."""
    run = _alone if _is_alike(plain_name(op)) else _beside
    return run(_execute, handle, device, op, inputs, attrs, outputs)


def fast_execute(*given: Any) -> Any:
    """Does what `TFE_Py_FastPathExecute` does, also while an operation of another thread runs alone."""
    return fast_execute_alone(*given) if _thread.prefers_alone else _beside(_fast_execute, *given)


def execute(*given: Any) -> Any:
    """Does what `TFE_Py_Execute` does, also while an operation of another thread runs alone."""
    return execute_alone(*given) if _thread.prefers_alone else _beside(_execute, *given)


class _Thread(threading.local):
    prefers_alone = False  # whether operations that nothing follows run as kernels alone, too


_thread = _Thread()


@contextlib.contextmanager
def preferred(alone: bool = True) -> Iterator[None]:
    """Has operations of this thread that nothing follows run as kernels alone inside the `with`, if `alone`.

    As long as hooks are installed. A single call is so spared the graph functions, which may take ten times as long.
    """
    before, _thread.prefers_alone = _thread.prefers_alone, alone
    try:
        yield
    finally:
        _thread.prefers_alone = before


# A signal handler may run behind each call here, and raise, or issue operations of its own. So what has to be undone is
# done inside of a `try`, by one call of C that can be repeated, and undone by one; a lock's `with` is safe by itself.


@passes
def _alone(run: Any, *given: Any) -> Any:
    global _is_off
    with _lock:
        if not _under_way and not _is_off and _take_switch():
            try:
                _is_off = True
                _off()
                return run(*given)
            except (core._NotOkStatusException, tf.errors.OpError):
                pass  # again, for TensorFlow's own message
            finally:
                _is_off = False
                _on()
    return _beside(run, *given)


@passes
def _beside(run: Any, *given: Any) -> Any:
    token = object()
    try:
        begin(token)
        return run(*given)
    finally:
        _under_way.discard(token)


def begin(token: object) -> None:
    """Has the switch on until `end`: from here on no thread begins to run an operation alone."""
    _under_way.add(token)
    with _lock:  # waits for another thread's to end: it only computes, so it does not wait for this thread
        if _is_off:  # of this thread: issued by Python code that the operation runs
            _on()


def end(token: object) -> None:
    """Ends what `begin` began."""
    _under_way.discard(token)


_begin()
hooks.at_fork(__name__, "no operation runs alone in the child", in_child=_begin)
