"""Controller: decides how each call of a function runs, and sees it through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coexec.account import Account
from coexec.events import Kind, Ledger
from coexec.options import Options
from coexec.runtime.following import Following
from coexec.runtime.results import hand_out
from coexec.runtime.segments import Segments
from tracer import intercept, library
from tracer.graph import TraceGraph
from tracer.location import mark_entry
from tracer.merge import merge
from tracer.private import context
from tracer.recorder import Recorder
from tracer.trace import Trace

# With fewer operations a launch, following may well cost more than it saves.
LARGE = 16

# Nodes and steps of one function; a function that never stops growing starts anew.
MAX_SIZE = 50_000


class Controller:
    """Runs the calls of one function: records the first, follows the others, backs off where that does not pay."""

    def __init__(self, function: Callable[..., Any], options: Options, name: str) -> None:
        self.function = function
        self.options = options
        self.name = name
        self.ledger = Ledger()
        self.graph = TraceGraph(name)
        self.segments = Segments(options, self.ledger)
        if options.regions:
            library.install()
        self._lock = threading.Lock()
        self.account = Account()
        self.last_events = 0

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function once, in one of three ways; nothing but the speed depends on which."""
        ctx = context.context()
        if intercept.current_handler() is not None or not ctx.executing_eagerly() or ctx.op_callbacks:
            # Part of a call that is followed already, or of a graph being traced. (Not by `run`, where locations end.)
            return self.function(*args, **kwargs)
        self.ledger.count("calls")
        if tf.config.functions_run_eagerly():
            self.ledger.count("imperative")
            return self.function(*args, **kwargs)
        if not self.account.follows():
            return self._run_plainly(args, kwargs)
        intercept.hold()
        try:
            if len(self.graph.nodes) == 1 and not self.graph.exits:
                return self._record(args, kwargs)
            return self._follow(args, kwargs)
        finally:
            intercept.release()

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.ledger.count("imperative")
        began = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.account.ran_plainly(time.perf_counter() - began)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace = Trace()
        try:
            with intercept.handling(Recorder(trace)):
                result = run(self.function, args, kwargs)
            trace.finished = True
            return result
        finally:
            self.ledger.count("recorded")
            self._learn(trace)

    def _follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        following = Following(self.graph, self.segments, self.ledger, self.options)
        finished = False
        began = time.perf_counter()
        try:
            with intercept.handling(following), following:
                results = [run(self.function, args, kwargs)]
            finished = True
            hand_out(results, following.tapes.alive())
            return results.pop()
        finally:
            self._settle(following, finished)
            self._consider(following, time.perf_counter() - began)

    def _consider(self, following: Following, seconds: float) -> None:
        """Has the next calls run plainly if following them does not pay; strict functions are always followed."""
        if not self.options.strict and self.account.followed(seconds, _is_routine(following)):
            text = "following took longer than plain calls, so some run plainly"
            self.ledger.cause(Kind.BACKOFF, text, self.name, "see the divergences")

    def _settle(self, following: Following, finished: bool) -> None:
        """Counts a followed call, learns what it recorded, and keeps the hooks for the tensors that outlive it."""
        cursor, recorder = following.cursor, following.recorder
        followed = cursor.count()
        self.ledger.count(
            "diverged" if recorder is not None else "followed", ops_followed=followed, regions=following.regions
        )
        self.last_events = followed
        if recorder is not None:
            recorder.trace.finished = finished
            if following.graph is self.graph:  # and was not cleared meanwhile
                self._learn(recorder.trace)
        elif finished:
            self.graph.exits.add((cursor.last or self.graph.entry).number)
        for lazy in following.close():
            intercept.keep_while_alive(lazy)
        if self.graph.size() > MAX_SIZE:
            self.clear()

    def _learn(self, trace: Trace) -> None:
        self.ledger.count(ops_recorded=len(trace.calls))
        with self._lock, intercept.handling(None):
            merge(self.graph, trace)

    def clear(self) -> None:
        """Forgets all paths and releases all executables."""
        with self._lock:
            self.segments.clear()
            self.graph = TraceGraph(self.name)
            self.account = Account()


def _is_routine(following: Following) -> bool:
    """Whether a call went as calls should: on known paths, and launched in large pieces."""
    if following.recorder is not None or following.cursor.adopted or following.replayed:
        return False
    return following.cursor.count() >= LARGE * following.launched


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the user's function; locations end at this frame."""
    return function(*args, **kwargs)


mark_entry(run.__code__)
