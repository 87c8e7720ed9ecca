"""Process: whether this one was forked from one in which TensorFlow was running already.

There a launch waits for threads that only the parent has, for ever; eager operations on the calling thread still work.

Relies on `Context._context_handle`, which is None until TensorFlow starts.
"""

from __future__ import annotations

import os
import warnings

from tracer.private import context

forked = False
_warned = False


def _in_child() -> None:
    global forked
    forked = forked or context.context()._context_handle is not None


def warn_once() -> None:
    """Tells whoever calls a co-executed function in a forked process, once, that it runs plainly."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "this process was forked after TensorFlow had started, whose threads it does not have: co-executed "
            "functions run plainly here, and TensorFlow itself may hang. Start processes by the spawn method, or fork "
            "before the first TensorFlow operation",
            RuntimeWarning,
            stacklevel=4,
        )


os.register_at_fork(after_in_child=_in_child)
