"""Controller: decides how each call of a function runs, and sees it through."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from coexec.events import Kind, Ledger
from coexec.options import Options
from coexec.runtime.following import Following
from coexec.runtime.segments import Segments
from tracer import intercept
from tracer.graph import TraceGraph
from tracer.lazy import LazyTensor
from tracer.location import mark_entry
from tracer.merge import merge
from tracer.private import context
from tracer.recorder import Recorder
from tracer.trace import Trace

# After this many calls in a row that met something new, following pauses for twice as long each time.
PATIENCE = 3
MAX_PAUSE = 256

# A call in which more than one operation in this many came in a new way cost more than it gained.
SLOW_SHARE = 4


class Controller:
    """Runs the calls of one function: records the first, follows the others, backs off where that does not pay."""

    def __init__(self, function: Callable[..., Any], options: Options, name: str) -> None:
        self.function = function
        self.options = options
        self.name = name
        self.ledger = Ledger()
        self.graph = TraceGraph(name)
        self.segments = Segments(options, self.ledger)
        self._lock = threading.Lock()
        self._misses = 0
        self._pause = 0
        self._paused = 0
        self.last_events = 0

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function once, in one of three ways; nothing but the speed depends on which."""
        ctx = context.context()
        if intercept.current_handler() is not None or not ctx.executing_eagerly() or ctx.op_callbacks:
            # Part of a call that is followed already, or of a graph being traced.
            return run(self.function, args, kwargs)
        self.ledger.counts["calls"] += 1
        if self._paused > 0:
            self._paused -= 1
            self.ledger.counts["imperative"] += 1
            return run(self.function, args, kwargs)
        intercept.hold()
        try:
            if len(self.graph.nodes) == 1 and not self.graph.exits:
                return self._record(args, kwargs)
            return self._follow(args, kwargs)
        finally:
            intercept.release()

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace = Trace()
        try:
            with intercept.handling(Recorder(trace)):
                result = run(self.function, args, kwargs)
            trace.finished = True
            return result
        finally:
            self.ledger.counts["recorded"] += 1
            self._learn(trace)

    def _follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        following = Following(self.graph, self.segments, self.ledger, self.options)
        finished = False
        try:
            with intercept.handling(following):
                try:
                    result = run(self.function, args, kwargs)
                finally:
                    following.flush()
            finished = True
            return hand_out(result, following.watched())
        finally:
            self._settle(following, finished)

    def _settle(self, following: Following, finished: bool) -> None:
        """Counts a followed call, learns what it recorded, and keeps the hooks for the tensors that outlive it."""
        counts = self.ledger.counts
        counts["ops_followed"] += len(following.cursor.nodes)
        self.last_events = following.events
        recorder = following.recorder
        if recorder is not None:
            counts["diverged"] += 1
            recorder.trace.finished = finished
            if following.graph is self.graph:  # and was not cleared meanwhile
                self._learn(recorder.trace)
            self._missed()
        else:
            counts["followed"] += 1
            if following.cursor.adopted * SLOW_SHARE > len(following.cursor.nodes):
                self._missed()
            else:
                self._misses = 0
                self._pause = 0
            if finished:
                self.graph.exits.add((following.cursor.nodes or [self.graph.entry])[-1].number)
        for lazy in following.outliving():
            intercept.keep_while_alive(lazy)

    def _learn(self, trace: Trace) -> None:
        self.ledger.counts["ops_recorded"] += len(trace.calls)
        with self._lock, intercept.handling(None):
            merge(self.graph, trace)

    def _missed(self) -> None:
        self._misses += 1
        if self._misses >= PATIENCE:
            self._pause = min(max(1, 2 * self._pause), MAX_PAUSE)
            self._paused = self._pause
            self.ledger.cause(
                Kind.BACKOFF, "every call met something new, so some run plainly", self.name, "see the divergences"
            )

    def clear(self) -> None:
        """Forgets all paths and releases all executables."""
        with self._lock:
            self.segments.clear()
            self.graph = TraceGraph(self.name)
            self._misses = self._pause = self._paused = 0


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the user's function; locations end at this frame."""
    return function(*args, **kwargs)


mark_entry(run.__code__)


def hand_out(value: Any, watched: bool, holders: int = 3) -> Any:
    """Returns `value` with its lazy tensors made eager; lists and dicts are changed in place.

    A lazy tensor that somebody else knows too (a user's object, or a tape, where some are still `watched`) stays what
    it is: it must be the same one there and here. `holders` is how many references to `value` the way to this
    function accounts for.
    """
    kind = type(value)
    if kind is LazyTensor:
        if sys.getrefcount(value) > holders or (watched and value.has_id()):
            return value
        real = value.resolve()
        for name, attribute in vars(value).items():
            setattr(real, name, attribute)
        return real
    if kind is list or kind is dict:
        for key in range(len(value)) if kind is list else list(value):
            item = value[key]
            new = hand_out(item, watched, 4)
            if new is not item:
                value[key] = new
            del item, new
        return value
    if isinstance(value, tuple):
        items = []
        for item in value:
            items.append(hand_out(item, watched, 4))
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return value
