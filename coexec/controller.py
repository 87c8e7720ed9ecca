"""Controller: decides how each call of a function runs, and sees it through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from coexec import modes, process
from coexec.account import Account
from coexec.events import Kind, Ledger
from coexec.options import Divergence, Options
from coexec.runtime.ahead import Ahead, launch_ahead
from coexec.runtime.branches import Returned
from coexec.runtime.following import Following
from coexec.runtime.pauses import Pauses, is_timed, note
from coexec.runtime.results import hand_out
from coexec.runtime.segments import Segments
from coexec.runtime.watch import Watch
from coexec.sizes import Sizes, Verdict
from tracer import intercept, library
from tracer.graph import Step, TraceGraph
from tracer.location import mark_entry
from tracer.merge import merge
from tracer.private import context
from tracer.recorder import Recorder
from tracer.trace import Trace

# With fewer operations a launch, following may well cost more than it saves.
LARGE = 16

# Nodes and steps of one function; a function that never stops growing starts anew.
MAX_SIZE = 50_000

# With more, no path is added for other sizes of the arguments: those that are known stay fast.
ROOM = 40_000


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
        self.sizes = Sizes()
        self._followed = 0
        self._pauses: list[Step] = []  # of the last call that was timed
        self._options: dict[tuple[bool, bool, bool], Options] = {}  # under modes
        self._unvalidated = 0  # calls since the first under a mode that validates
        self.last_events = 0
        self.ahead = False  # whether the last launch of a call may go on behind it
        self._under_way: Ahead | None = None
        self.whole = 0, 0  # regions and operations of the last call, if it was nothing else

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function once, in one of three ways; nothing but the speed depends on which."""
        ctx = context.context()
        if intercept.current_handler() is not None or not ctx.executing_eagerly() or ctx.op_callbacks:
            # Part of a call that is followed already, or of a graph being traced. (Not by `run`, where locations end.)
            return self.function(*args, **kwargs)
        self.ledger.count("calls")
        self.whole = 0, 0
        mode = modes.current()
        if self._under_way is not None and (mode is not modes.NONE or not self.ahead):
            self.land()
        if mode.debug_nans:
            return self._run_watched(args, kwargs, mode.nans_directory)
        if process.forked:
            process.warn_once()
        if mode.imperative or process.forked or tf.config.functions_run_eagerly():
            self.ledger.count("imperative")
            return self.function(*args, **kwargs)
        options, settled, invests = self.options, False, False
        if mode is not modes.NONE:
            options, settled = self._options_under(mode), mode.settled
        if not (mode.strict or mode.validate_every):
            if not self.account.follows():
                return self._run_plainly(args, kwargs)
            verdict = self.sizes.judge(args, kwargs, self.account.affords, self.graph.size() < ROOM)
            if not verdict:
                text = "its arguments come in ever other sizes: calls run plainly until one has come often"
                self.ledger.cause(Kind.BACKOFF, text, self.name, "coexec.dynamic pads arguments to few sizes")
                return self._run_plainly(args, kwargs)
            invests = verdict is Verdict.INVEST
        intercept.hold()
        try:
            if len(self.graph.nodes) > 1 or self.graph.exits:
                return self._follow(args, kwargs, options, settled, invests)
            if settled:
                raise Divergence(f"nothing is known of {self.name}: its first call would be recorded")
            return self._record(args, kwargs)
        finally:
            intercept.release()

    def _options_under(self, mode: modes.Mode) -> Options:
        validating = False
        if mode.validate_every:
            validating = self._unvalidated % mode.validate_every == 0
            self._unvalidated += 1
        key = strict, _, trusting = self.options.strict or mode.strict, validating, mode.validate_every == 0
        options = self._options.get(key)
        if options is None:
            options = replace(self.options, strict=strict, validating=validating, trusting=trusting)
            self._options[key] = options
        return options

    def _run_watched(self, args: tuple[Any, ...], kwargs: dict[str, Any], directory: str | None) -> Any:
        self.ledger.count("imperative")
        intercept.hold()
        try:
            with intercept.handling(Watch(directory)):
                return run(self.function, args, kwargs)
        finally:
            intercept.release()

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.land()
        self.ledger.count("imperative")
        began = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.account.ran_plainly(time.perf_counter() - began)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.land()
        trace = Trace()
        try:
            with intercept.handling(Recorder(trace)):
                result = run(self.function, args, kwargs)
            trace.finished = True
            return result
        finally:
            self.ledger.count("recorded")
            self._learn(trace)

    def _follow(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, settled: bool, invests: bool
    ) -> Any:
        following = Following(self.graph, self.segments, self.ledger, options)
        following.before, self._under_way = self._under_way, None
        finished = False
        compiles, validated = self.ledger.counts["compiles"], self.ledger.counts["validated"]
        self._followed += 1
        pauses = Pauses(following) if is_timed(self._followed) else None
        began = time.perf_counter()
        try:
            with intercept.handling(following), following:
                results = [run(self.function, args, kwargs)]
                if self.ahead and pauses is None:
                    launch_ahead(following)
            finished = True
            if pauses is not None:
                self._note_pauses(pauses)
            if following.ahead is None:
                hand_out(results, following.tapes.alive())
            if settled and (following.cursor.adopted or self.ledger.counts["compiles"] > compiles):
                raise Divergence(f"a call of {self.name} was not wholly known: it took new wiring or compiling")
            return results.pop()
        finally:
            try:
                self._leave(following, finished)
            finally:
                self._settle(following, finished)
                seconds = time.perf_counter() - began
                if following.trial is not None:
                    known = finished and pauses is None and not following.cursor.adopted and following.recorder is None
                    known &= (compiles, validated) == (self.ledger.counts["compiles"], self.ledger.counts["validated"])
                    self.segments.decisions.contests.took(following.trial, seconds if known else None)
                if not invests and (following.trial is None or following.trial.on_device):
                    self._consider(following, seconds)

    def _leave(self, following: Following, finished: bool) -> None:
        """Leaves a call: lands what is under way, but for the call's own last launch, where that may go on."""
        ahead = following.ahead
        if ahead is not None:
            ahead.outlive()
            if finished:
                self._under_way = ahead
            else:
                ahead.land()
            return
        try:
            if following.before is not None:  # nothing was launched since
                following.before.land()
        finally:
            for lazy in following.close():
                intercept.keep_while_alive(lazy)

    def land(self) -> None:
        """Waits for what the last call has left under way, where calls may; raises what came of it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.land()

    def _note_pauses(self, pauses: Pauses) -> None:
        before, self._pauses = self._pauses, pauses.end()
        if note(before, self._pauses):
            text = "Python takes its time here: operations before it are launched beside it"
            self.ledger.cause(Kind.CUT, text, self.name)

    def _consider(self, following: Following, seconds: float) -> None:
        """Has the next calls run plainly if following them does not pay; strict functions are always followed."""
        if not self.options.strict and self.account.followed(seconds, _is_routine(following)):
            text = "following took longer than plain calls, so some run plainly"
            self.ledger.cause(Kind.BACKOFF, text, self.name, "see the divergences")

    def _settle(self, following: Following, finished: bool) -> None:
        """Counts a followed call, and learns what it recorded."""
        cursor, recorder = following.cursor, following.recorder
        followed = cursor.count()
        self.ledger.count(
            "diverged" if recorder is not None else "followed", ops_followed=followed, regions=following.regions
        )
        self.last_events = followed
        if recorder is None and followed == following.jumped:
            self.whole = following.regions, followed
        if recorder is not None:
            recorder.trace.finished = finished
            if following.graph is self.graph:  # and was not cleared meanwhile
                self._learn(recorder.trace)
        elif finished:
            self.graph.exits.add((cursor.last or self.graph.entry).number)
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
            self.account, self.sizes = Account(), Sizes()


def _is_routine(following: Following) -> bool:
    """Whether a call went as calls should: on known paths, and launched in large pieces."""
    if following.recorder is not None or following.cursor.adopted or following.replayed:
        return False
    return following.cursor.count() >= LARGE * following.launched


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the user's function; locations end at this frame."""
    try:
        return function(*args, **kwargs)
    except Returned as returned:
        return returned.value


mark_entry(run.__code__)
