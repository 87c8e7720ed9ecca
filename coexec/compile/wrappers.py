"""Wrappers: graph functions that run on the thread that launches them, and how TensorFlow lets go of those.

A function launched by its name runs on a thread of TensorFlow's pool, and the caller waits for it. An operation runs
where it is asked, also one that calls a function: TensorFlow wraps an operation into a function of its own, and allows
that one to run at once, with what it calls made part of it. 100 small operations took 35 us so, and 66 by name (two
cores); the steps of `make bench` 85 and 117 (MLP), 131 and 169 (DQN).

But what TensorFlow has made of such a call stays in a cache under the wrapper's name, which follows from nothing but
the numbers of inputs and outputs, also when the function is removed. Removing the wrapper lets go of all calls under
it. The process dies if another thread is about to make one: so it is removed while no launch is under way.

Relies on: the wrapper's name, `__wrapped__StatefulPartitionedCall_Tin_{}_Tout_{}_device_{}`; `Context.remove_function`.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

OP = "StatefulPartitionedCall"
_NAME = f"__wrapped__{OP}_Tin_{{}}_Tout_{{}}_device_{{}}"
PATIENCE = 0.05  # seconds to wait for launches of other threads

_under_way: set[int] = set()  # threads that launch
_closed = False
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class _Held:
    """What TensorFlow holds under one wrapper: operations of functions that are there, and of such as were removed."""

    def __init__(self) -> None:
        self.there = 0
        self.gone = 0


_held: dict[tuple[int, int], _Held] = {}  # by numbers of inputs and outputs


def attributes(signature: Any, config: bytes) -> tuple[Any, ...]:
    """Returns the attributes of a call of a function."""
    inputs, outputs = (tuple([arg.type for arg in args]) for args in (signature.input_arg, signature.output_arg))
    return "Tin", inputs, "Tout", outputs, "f", signature.name, "config_proto", config


def enter() -> int | None:
    """Says that this thread is about to launch; waits while wrappers are removed. Give what it returns to `leave`."""
    thread = threading.get_ident()
    if thread in _under_way:  # a finalizer's launch, in the midst of another
        return None
    _under_way.add(thread)
    while _closed:
        _under_way.discard(thread)
        with _lock:
            pass
        _under_way.add(thread)
    return thread


def leave(thread: int | None) -> None:
    """Says that the launch is over."""
    if thread is not None:
        _under_way.discard(thread)


def hold(inputs: int, outputs: int, ops: int) -> None:
    """Counts a function that will be called so."""
    _held.setdefault((inputs, outputs), _Held()).there += ops


def drop(ctx: Any, inputs: int, outputs: int, ops: int) -> None:
    """Counts a function that was removed. May be called by finalizers, at any moment."""
    held = _held.get((inputs, outputs))
    if held is not None:
        held.there -= ops
        held.gone += ops
        tidy_up(ctx, patience=0.0)


def tidy_up(ctx: Any, patience: float = PATIENCE) -> None:
    """Removes wrappers under which more is gone than there: what is still there is made again at its next launch."""
    global _closed
    if not any(held.gone > held.there for held in list(_held.values())) or not _lock.acquire(blocking=False):
        return
    try:
        _closed = True
        until = time.monotonic() + patience
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
