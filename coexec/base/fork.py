"""Fork: detects a process forked after TensorFlow started.

In such a child a launch deadlocks on threads that only the parent has; eager operations on the calling thread still
work.

Relies on `Context._context_handle`, which is None until TensorFlow starts.
"""

from __future__ import annotations

import warnings

from tracer import hooks
from tracer.private import context

forked = False
_warned = False


def _in_child() -> None:
    global forked
    forked = forked or context.context()._context_handle is not None


def warn_once() -> None:
    """Warns, once per process, that co-executed functions run imperatively in a forked process."""
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


hooks.at_fork(__name__, "functions run plainly in a child that has none of TensorFlow's threads", in_child=_in_child)
