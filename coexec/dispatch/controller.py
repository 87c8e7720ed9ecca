"""Controller: decides how each call of a function runs, and runs it."""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from coexec.base import clock, fork, modes, timeline
from coexec.base.causes import Kind, Tally
from coexec.base.explanation import Explanation, explained
from coexec.base.options import Divergence, Options
from coexec.base.stats import EventLog
from coexec.base.tuning import tuning
from coexec.debug.nan_watch import NanWatch
from coexec.dispatch.decision_policy import DecisionPolicy
from coexec.dispatch.host_gaps import TimedFollower, is_timed, note
from coexec.dispatch.profitability import Profitability
from coexec.dispatch.return_values import hand_out
from coexec.dispatch.shape_policy import ShapePolicy, Verdict
from coexec.dispatch.tail_launch import launch_tail
from coexec.follow.call_state import LateLaunch
from coexec.follow.device_control import EarlyReturn
from coexec.follow.follower import Follower, LibraryCall
from coexec.launch.executor import SegmentExecutor
from coexec.launch.frequent_sizes import is_frequent
from coexec.memoize.array_arguments import call_recorded
from coexec.memoize.call_site import CallSites
from coexec.memoize.known_calls import KnownCalls
from coexec.memoize.watch_budget import Watching
from tracer import intercept, library, single_kernels, versions
from tracer.dynamic_paths import DynamicPaths
from tracer.faults import absorbs, is_fault, passes
from tracer.graph import Step, TraceGraph
from tracer.location import mark_entry
from tracer.merge import merge
from tracer.old_generation import hand_over
from tracer.private import context, ops
from tracer.recorder import Recorder
from tracer.trace import Trace

if TYPE_CHECKING:
    from coexec.batching.batch import Batch
    from coexec.batching.batched_calls import BatchedCalls


class Controller:
    """Runs the calls of one function: records the first, follows the rest, backs off where following does not pay."""

    def __init__(
        self, function: Callable[..., Any], options: Options, name: str, redirected: Callable[[], Any] | None = None
    ) -> None:
        self._plain, self._redirected = function, redirected
        self.function = function
        self.options = options
        self.name = name
        self.ledger = EventLog(name)
        self.graph = TraceGraph(name)
        self.segments = SegmentExecutor(options, self.ledger, name)
        self.known_calls = KnownCalls()
        # A strict function's calls are to be known, and the device's decisions are another way.
        asked = bool(options.control_flow) if options.strict else options.control_flow
        self.decisions = DecisionPolicy(asked, self.ledger)
        if options.regions:
            library.install()
        self._lock = threading.Lock()
        self.account = Profitability()
        self._diverged = False  # whether the last followed call took a new path
        code = getattr(function, "__code__", None)
        self._is_method = isinstance(code, CodeType) and code.co_varnames[: code.co_argcount][:1] == ("self",)
        self.sizes = ShapePolicy(self._is_method, self._is_dynamic())
        self.dynamic = DynamicPaths(is_frequent)
        self.batching: BatchedCalls | None = None  # from the first backoff on
        self._followed = 0
        self._faults = 0  # calls in which the runtime itself failed
        self.given_up = bool(versions.UNTESTED)
        if self.given_up:
            self.ledger.cause(Kind.BACKOFF, f"{versions.UNTESTED} is untested", name, versions.advice())
        self._pauses: list[Step] = []  # found in the last timed call
        self._options: dict[tuple[bool, bool, bool], Options] = {}  # adjusted to the modes in effect
        self._unvalidated = 0  # calls since the first under a mode that validates
        self.last_events = 0
        self.ahead = False  # whether the last launch of a call may outlive it
        self._under_way: LateLaunch | None = None
        self.whole = 0, 0  # regions and operations of the last call, if it consisted of regions only
        self.ran: list[Step] = []  # where the segments of the last followed call end

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function once: recorded, followed or imperatively; only the speed differs."""
        attempt = Attempt(self.function)
        try:
            ctx = context.context()
            if intercept.current_handler() is not None or not ctx.executing_eagerly() or ctx.op_callbacks:
                # Inside a followed call, or a graph being traced. (Not through `run`, at whose frame locations end.)
                return attempt(*args, **kwargs)
            if self.given_up:
                self.ledger.count("calls", "imperative")
                return attempt(*args, **kwargs)
            if (events := timeline.current) is not None:
                return self._told(events, attempt, args, kwargs)
            return self._call(attempt, args, kwargs)
        except Exception as error:
            if self.options.strict or attempt.raised is error or not absorbs(error):
                raise
            return self._go_on(attempt, error, args, kwargs)
        finally:
            attempt.raised = None  # its traceback refers to this frame
            if attempt.holds:  # an interrupt came while the hooks were released
                attempt.holds = False
                intercept.release()

    def _told(self, events: timeline.Timeline, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call, and adds it to a timeline, and to TensorFlow's profile if one is taken."""
        events.hold(self)
        counts = self.ledger.counts
        before, began = timeline.counts_of(counts), time.perf_counter()
        try:
            with tf.profiler.experimental.Trace(self.name, step_num=counts["calls"], _r=1):
                return self._call(attempt, args, kwargs)
        finally:
            ran = zip(timeline.CALLS, before, timeline.counts_of(counts), strict=True)
            events.add(next((kind for kind, then, now in ran if now > then), "imperative"), self.name, began)

    def _go_on(self, attempt: Attempt, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Completes a call in which the runtime itself failed, before or after running the program's function.

        Raises what the program's own function raised, if anything; runs the function imperatively if it has not run.
        """
        following = attempt.following
        intercept.handle(None)
        try:
            if following is not None:
                following.give_way()
        finally:
            if attempt.holds:
                attempt.holds = False
                intercept.release()
        propagating = _propagating(error, attempt.outer)
        self._failed([error])
        if propagating is not None:
            raise propagating
        if attempt.raised is not None:
            raise attempt.raised
        if not attempt.results:
            return self.function(*args, **kwargs)
        return attempt.results[0]

    def _failed(self, errors: list[BaseException]) -> None:
        """Notes failures of the runtime itself and clears what was learnt; gives the function up if they recur."""
        for error in errors:
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            text = "".join(lines).rstrip()
            self.ledger.cause(Kind.FAULT, text, self.name, "report it; the call went on imperatively")
            error.__traceback__ = None  # its frames hold the call's tensors
        self.clear()
        self._faults += 1
        if self._faults >= tuning.max_faults:
            self.given_up = True
            text = f"the runtime has failed in {self._faults} calls: from now on they run plainly"
            self.ledger.cause(Kind.BACKOFF, text, self.name)

    def _call(self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decides how a call runs, and runs it; `attempt` keeps its progress."""
        self.ledger.count("calls")
        self.whole = 0, 0
        mode = modes.current()
        if self._under_way is not None and (mode is not modes.NONE or not self.ahead):
            self.land()
        if mode.debug_nans:
            return self._run_watched(attempt, args, kwargs, mode.nans_directory)
        if fork.forked:
            fork.warn_once()
        if mode.imperative or fork.forked or tf.config.functions_run_eagerly():
            return self._run_as_asked(attempt, args, kwargs)
        options, settled, invests = self.options, False, False
        if mode is not modes.NONE:
            options, settled = self._options_under(mode), mode.settled
        if not (mode.strict or mode.validate_every):
            if tuning.batches_all or not self.account.admit():
                return self._run_unfollowed(attempt, args, kwargs)
            verdict = Verdict.FOLLOW if self.dynamic.made else self._judge_sizes(args, kwargs)
            if not verdict and self.decisions.end():  # without, calls may be followed at any size
                self.sizes = ShapePolicy(self._is_method, self._is_dynamic())
                verdict = self._judge_sizes(args, kwargs)
            if not verdict:
                text = "its arguments come in ever other sizes: calls run plainly until one has come often"
                hint = "coexec.dynamic pads arguments to few sizes"
                tally = self.ledger.cause(Kind.SIZES, text, self.name, hint)
                return self._run_unfollowed(attempt, args, kwargs, tally)
            invests = verdict is Verdict.INVEST
        intercept.hold()
        attempt.holds = True
        try:
            if len(self.graph.nodes) > 1 or self.graph.exits:
                return self._follow(attempt, args, kwargs, options, settled, invests)
            if settled:
                raise Divergence(f"nothing is known of {self.name}: its first call would be recorded")
            return self._record(attempt, args, kwargs)
        finally:
            intercept.release()
            attempt.holds = False

    def _judge_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
        return self.sizes.judge(args, kwargs, self.account.affords, self.graph.size() < tuning.graph_room)

    def _options_under(self, mode: modes.Mode) -> Options:
        """Returns the options as the mode changes them; counts calls for `validate_every`."""
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

    def _run_watched(
        self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any], directory: str | None
    ) -> Any:
        """Runs a call imperatively under the NaN watch."""
        self.ledger.count("imperative")
        intercept.hold()
        try:
            with intercept.handling(NanWatch(directory)):
                return run(attempt, args, kwargs)
        finally:
            intercept.release()

    def _run_as_asked(self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call imperatively because a mode demands it; its time is kept for reports only."""
        self.ledger.count("imperative")
        began, first = time.perf_counter(), ops.uid()
        try:
            return attempt(*args, **kwargs)
        finally:
            self.account.ran_as_asked(time.perf_counter() - began, ops.uid() - first - 1)

    def _run_unfollowed(
        self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any], tally: Tally | None = None
    ) -> Any:
        """Runs a call that is not followed: batched if asked for and this pays, else plainly.

        `tally`: given if the reason is its sizes, as of trees in lists; else it is that following does not pay.
        """
        if not (self.options.batching or tuning.batches_all):
            return self._run_plainly(attempt, args, kwargs, tally)
        if self.batching is None:
            from coexec.batching import BatchedCalls  # imported only where calls are not followed

            self.batching = BatchedCalls(self.ledger)
        if not self.batching.admit(self.account.backs_off or tally is not None):
            began = time.perf_counter()
            try:
                return self._run_plainly(attempt, args, kwargs, tally)
            finally:
                self.batching.ran_plainly(time.perf_counter() - began)
        self.land()
        intercept.hold()
        attempt.holds = True
        batch = attempt.following = self.batching.begin(self.options.strict)
        began = time.perf_counter()
        try:
            self.batching.run(batch, lambda: run(attempt, args, kwargs), hand_out, attempt.results)
            return attempt.results[0]
        finally:
            intercept.release()
            attempt.holds = False
            seconds = time.perf_counter() - began
            self.account.ran_plainly(seconds)
            self.batching.took(seconds)
            if batch.faults:
                self._failed(batch.faults)

    def _run_plainly(
        self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any], tally: Tally | None = None
    ) -> Any:
        """Runs a call imperatively, and notes its time, also in `tally` if given."""
        self.land()
        self.ledger.count("imperative")
        timed = tally is None and not self.account.backs_off
        if timed:
            intercept.hold()
            attempt.holds = True
        elif tally is None:
            text = "following took longer than plain calls, so some run plainly"
            tally = self.ledger.cause(Kind.BACKOFF, text, self.name)
        first = ops.uid()
        began = clock.now()
        try:
            # One that is timed says what eager takes once it is warm: no graph function is made for each operation.
            with single_kernels.preferred(timed):
                return attempt(*args, **kwargs)
        finally:
            elapsed, seconds = clock.since(began)
            if timed:
                intercept.release()
                attempt.holds = False
            self.account.ran_plainly(seconds, elapsed, ops.uid() - first - 1)
            if tally is not None:
                tally.seconds += elapsed

    def _record(self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call with a recorder, and merges its trace into the graph."""
        self.land()
        recorder, first = Recorder(Trace()), ops.uid()
        recorder.strict, recorder.around = self.options.strict, call_recorded
        try:
            with intercept.handling(recorder):
                results = attempt.results = [run(attempt, args, kwargs)]
            self.account.recorded(len(recorder.trace.calls), ops.uid() - first - 1)
            recorder.trace.finished = True
            return results[0]
        finally:
            self.ledger.count("recorded")
            if recorder.failed is None:
                self._learn(recorder.trace)
            else:
                self._failed([recorder.failed])

    def _follow(
        self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, settled: bool,
        invests: bool,
    ) -> Any:  # fmt: skip
        """Follows a call; then learns from it, and charges its time. `invests`: whether it learns another size."""
        self._followed += 1
        kind = TimedFollower if is_timed(self._followed) else Follower
        following = attempt.following = kind(
            self.graph, self.segments, self.ledger, options, self._call_site, self.decisions.control, self._under_way,
            self.decisions.places,
        )
        self._under_way = None
        self.ran = following.ran
        finished = False
        compiles, validated = self.ledger.counts["compiles"], self.ledger.counts["validated"]
        watched = self.known_calls.watching.spent
        began = clock.now()
        try:
            with intercept.handling(following), following:
                results = attempt.results = [run(attempt, args, kwargs)]
                if self.ahead and kind is Follower:
                    launch_tail(following)
            finished = True
            if isinstance(following, TimedFollower):
                self._note_pauses(following)
            if following.ahead is None:
                hand_out(results, following.tapes.alive())
            if settled and (following.cursor.adopted or self.ledger.counts["compiles"] > compiles):
                raise Divergence(f"a call of {self.name} was not wholly known: it took new wiring or compiling")
            return results[0]
        finally:
            try:
                if following.is_under_way():  # an exception kept it from ending
                    following.finish()
                self._leave(following, finished)
            finally:
                if errors := following.errors():
                    self._failed(errors)
                self._settle(following, finished)
                seconds, counted = clock.since(began)
                if self.segments.audits.open:
                    self.segments.audits.called(seconds)
                counts = self.ledger.counts
                compiled = (compiles, validated) != (counts["compiles"], counts["validated"])
                known = not following.cursor.adopted and following.recorder is None and not compiled
                watched = self.known_calls.watching.spent - watched
                seconds, counted = seconds - watched, max(counted - watched, 0.0)
                self.account.timed(seconds, known and not watched, watched, self._size(following))
                self._consider_watching(following, seconds, known)
                if not known:
                    hand_over()
                if following.divergence is not None:
                    following.divergence.seconds += seconds
                elif following.cursor.adopted and counts["calls"] > tuning.first_calls:
                    text = "the same operations come in another way: on other tensors, or after others"
                    hint = "nothing, if such ways are few; choices in one call multiply, so make fewer of them in each"
                    self.ledger.cause(Kind.LEARNING, text, self.name, hint).seconds += seconds
                if following.trial is not None:
                    assert following.control is not None
                    meant = known and finished and kind is Follower
                    following.control.took(following.trial, seconds if meant else None)
                if invests:
                    self.account.invested(counted)
                elif following.trial is None or following.trial.on_device:
                    compiled = compiled and not following.cursor.adopted and following.recorder is None
                    self._consider(following, counted, self._most(following, known, compiled), compiled)
                self.decisions.called(bool(self.dynamic.made))

    def _consider_watching(self, following: Follower, seconds: float, known: bool) -> None:
        """Has calls of helpers learnt where that is due and pays."""
        if self._redirected is None:
            return
        watching = self.known_calls.watching
        before = watching.phase
        watching.called(seconds, known, self.last_events - following.ops_skipped)
        if watching.phase is not before:
            if watching.phase is Watching.LEARNING:
                self.function = self._redirected()
            elif watching.phase is Watching.IN_VAIN:
                self.function = self._plain

    def _call_site(self, following: Follower) -> LibraryCall:
        library.adopt_imports()
        return CallSites(following, self.known_calls).call

    def _leave(self, following: Follower, finished: bool) -> None:
        """Ends a call: waits for pending launches, except for a tail launch, which may outlive a finished call."""
        ahead = following.ahead
        if ahead is not None:
            ahead.outlive()
            if finished:
                self._under_way = ahead
            else:
                ahead.land()
            return
        try:
            if following.before is not None:  # nothing has been launched since
                following.before.land()
        finally:
            for lazy in following.close():
                intercept.keep_while_alive(lazy)

    def land(self) -> None:
        """Waits for the tail launch of the last call, if there is one; raises its error."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.land()

    def _note_pauses(self, following: TimedFollower) -> None:
        before, self._pauses = self._pauses, following.pauses()
        if note(before, self._pauses):
            text = "Python takes its time here: operations before it are launched beside it"
            self.ledger.cause(Kind.PAUSE, text, self.name)

    def _most(self, following: Follower, known: bool, compiled: bool) -> float:
        """Returns the largest loss to charge for a call, in times of an imperative call."""
        before, self._diverged = self._diverged, following.recorder is not None
        if self._diverged:
            return math.inf if before else tuning.following_new_path
        return tuning.following_patience if known and not compiled else tuning.following_compiled

    def _consider(self, following: Follower, seconds: float, most: float, compiled: bool) -> None:
        """Backs off if following does not pay; strict functions are always followed."""
        routine, recorder = _is_routine(following, seconds), following.recorder
        recurs = recorder is None and not following.cursor.adopted
        if not self.options.strict:
            self.account.followed(seconds, routine, most, compiled, self._size(following), recurs)

    def _size(self, following: Follower) -> int:
        """Returns how many operations the call had that has just ended."""
        recorder = following.recorder
        return self.last_events + (len(recorder.trace.calls) if recorder is not None else 0)

    def _is_dynamic(self) -> bool:
        return self.options.reduce_retracing and self.options.jit_compile is not True

    def _settle(self, following: Follower, finished: bool) -> None:
        """Counts a followed call, and merges what it recorded into the graph."""
        cursor, recorder = following.cursor, following.recorder
        followed = cursor.count()
        self.ledger.count(
            "diverged" if recorder is not None else "followed", ops_followed=followed, regions=following.regions
        )
        self.last_events = followed
        self.sizes.followed(recorder is not None or bool(cursor.adopted))
        if recorder is None and followed == following.ops_skipped:
            self.whole = following.regions, followed
        if recorder is not None:
            recorder.trace.finished = finished
            if following.graph is self.graph and recorder.failed is None:  # not cleared meanwhile
                self._learn(recorder.trace)
        elif finished and following.graph is self.graph:
            self.graph.exits.add((cursor.last or self.graph.entry).number)
            control = following.control
            if cursor.adopted_in and (control is None or control.is_idle) and self._is_dynamic():
                with self._lock, intercept.handling(None):
                    for last, numbers in cursor.adopted_in:
                        self.dynamic.note(self.graph, last, numbers)
        if self.graph.size() > tuning.max_graph:
            self.clear()

    def _learn(self, trace: Trace) -> None:
        self.ledger.count(ops_recorded=len(trace.calls))
        with self._lock, intercept.handling(None):
            self.known_calls.recorded.learn(trace, merge(self.graph, trace))
        hand_over()

    def explain(self) -> Explanation:
        """Returns what the calls cost, with the causes."""
        return explained(self.name, self.ledger.stats(), self.ledger.noted(), self.account.pace())

    def clear(self) -> None:
        """Forgets all paths and releases all executables."""
        with self._lock:
            self.segments.clear()
            self.known_calls.clear()
            if self.decisions.control is not None:
                self.decisions.control.clear()
            self.graph, self.ran = TraceGraph(self.name), []
            self.account, self.batching = Profitability(), None
            self.sizes = ShapePolicy(self._is_method, self._is_dynamic())
            self.dynamic = DynamicPaths(is_frequent)


class Attempt:
    """One call of the program's function and its progress, from which `Controller` recovers after a fault."""

    __slots__ = ("following", "function", "holds", "outer", "raised", "results")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.outer = sys.exc_info()[1]  # the exception being handled by the caller
        self.following: Follower | Batch | None = None
        self.holds = False  # whether it holds the hooks installed
        self.raised: BaseException | None = None  # raised by the function
        self.results: list[Any] = []  # empty, or the function's return value

    @passes
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function imperatively."""
        try:
            result = self.function(*args, **kwargs)
        except BaseException as error:
            self.raised = error
            raise
        self.results = [result]
        return result


def _propagating(error: BaseException | None, outer: BaseException | None) -> BaseException | None:
    """Returns the program's exception that a fault of the runtime came on top of, or None.

    None, too, where the program recurred without end and the runtime's code was what got too deep: what comes before
    in the chain is what the program was handling meanwhile.
    """
    while error is not None and error is not outer and not isinstance(error, RecursionError):
        if not is_fault(error):
            return error
        error = error.__context__
    return None


def _is_routine(following: Follower, seconds: float) -> bool:
    """Whether a call is a steady-state one: on known paths, and launched in large segments.

    Also any call that took less time than its operations would take at least, one by one.
    """
    if seconds < tuning.eager_operation * following.cursor.count():
        return True
    if following.recorder is not None or following.cursor.adopted or following.replayed:
        return False
    return following.cursor.count() >= tuning.worthwhile_launch * following.launched


@passes
def run(attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the user's function; locations end at this frame."""
    try:
        return attempt.function(*args, **kwargs)
    except EarlyReturn as early:
        return early.value
    except BaseException as error:
        attempt.raised = error
        raise


mark_entry(run.__code__)
