"""Inline calls: graph functions run on the launching thread, and eviction of what TensorFlow caches for them.

A function launched by name runs on a thread of TensorFlow's pool while the caller waits. An operation runs on the
calling thread, even one that calls a function: TensorFlow wraps it in a function of its own, inlines the callee, and
may run that synchronously. 100 small operations took 35 us this way, and 66 by name (two cores); the steps of
`make bench` 85 and 117 (MLP), 131 and 169 (DQN). Preparing such a call takes half as long again as preparing the
function, 8.3 and 5.5 ms of CPU time for the 171 nodes of `module_with_own_adam` (examples/ecosystem, ten copies under
new names each). So a function is launched by name for a while (`tuning.launches_by_name`).

But TensorFlow caches such a call under the wrapper's name, which depends only on the numbers of inputs and outputs, and
keeps it when the function is removed. Removing the wrapper evicts all calls under it. The process crashes if another
thread is about to launch one, so wrappers are removed only while no launch is in progress.

Relies on: the wrapper's name, `__wrapped__StatefulPartitionedCall_Tin_{}_Tout_{}_device_{}`; `Context.remove_function`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from coexec.base.tuning import tuning
from tracer import hooks, single_kernels

OP = "StatefulPartitionedCall"
_NAME = f"__wrapped__{OP}_Tin_{{}}_Tout_{{}}_device_{{}}"

_under_way: set[int] = set()  # threads that are launching
_closed = False
_lock = threading.Lock()
hooks.held_by_fork(__name__, _lock)


class _Held:
    """How many operations TensorFlow caches under one wrapper: of live functions, and of removed ones."""

    def __init__(self) -> None:
        self.there = 0
        self.gone = 0


_held: dict[tuple[int, int], _Held] = {}  # by numbers of inputs and outputs


def enter() -> int | None:
    """Marks this thread as launching, after waiting while wrappers are removed; returns the token for `leave`."""
    thread = threading.get_ident()
    if thread in _under_way:  # reentrant: a finalizer launches during another launch
        return None
    _under_way.add(thread)
    while _closed:
        _under_way.discard(thread)
        with _lock:
            pass
        _under_way.add(thread)
    single_kernels.begin(thread)
    return thread


def leave(thread: int | None) -> None:
    """Marks the launch as over."""
    if thread is not None:
        single_kernels.end(thread)
        _under_way.discard(thread)


def hold(inputs: int, outputs: int, ops: int) -> None:
    """Counts a function of `ops` operations that will be called inline."""
    _held.setdefault((inputs, outputs), _Held()).there += ops


def drop(ctx: Any, inputs: int, outputs: int, ops: int) -> None:
    """Counts a function as removed. Finalizers may call this at any moment, so it does not wait."""
    held = _held.get((inputs, outputs))
    if held is not None:
        held.there -= ops
        held.gone += ops
        tidy_up(ctx, patience=0.0)


class InlineCall:
    """Calls of one graph function of `ops` operations: by name at first, then inline."""

    def __init__(self, signature: Any, config: bytes, ops: int) -> None:
        inputs, outputs = (tuple([arg.type for arg in args]) for args in (signature.input_arg, signature.output_arg))
        self.attrs: tuple[Any, ...] = "Tin", inputs, "Tout", outputs, "f", signature.name, "config_proto", config
        self._counted = len(inputs), len(outputs), ops
        self._by_name = tuning.launches_by_name  # launches that are still to be by name
        self._held = False

    def takes_next(self) -> bool:
        """Counts a launch; returns whether it is to be inline."""
        if self._by_name:
            self._by_name -= 1
            return False
        if not self._held:
            self._held = True
            hold(*self._counted)
        return True

    def begin(self) -> None:
        """Has the next launch be inline."""
        self._by_name = 0

    def drop(self, ctx: Any) -> None:
        """Counts the function as removed."""
        if self._held:
            drop(ctx, *self._counted)


def tidy_up(ctx: Any, patience: float | None = None) -> None:
    """Removes wrappers with more removed than live operations; live calls are cached again at their next launch.

    Waits up to `patience` seconds (default `tuning.wrapper_patience`) for launches in progress, else does nothing.
    """
    global _closed
    if not any(held.gone > held.there for held in list(_held.values())) or not _lock.acquire(blocking=False):
        return
    try:
        _closed = True
        until = time.monotonic() + (tuning.wrapper_patience if patience is None else patience)
        while _under_way and time.monotonic() < until:
            time.sleep(0.0002)
        if _under_way:
            return
        for (inputs, outputs), held in list(_held.items()):
            if held.gone > held.there:
                for device in ctx.devices():
                    name = _NAME.format(inputs, outputs, device)
                    if ctx.has_function(name):
                        ctx.remove_function(name)
                held.gone = 0
    finally:
        _closed = False
        _lock.release()
