"""Pending: the operations that a followed call has not run yet, up to a cut."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from coexec.base import timeline
from coexec.base.options import Divergence
from coexec.base.stats import Kind
from coexec.follow.call_state import CallState, Event, Phase, after
from coexec.follow.liveness import Reference, let_go, present, telling
from coexec.launch.keras_error_context import take_note
from coexec.launch.segment import PendingSegment
from coexec.lowering.op_failures import can_fail, is_unproven, needs_check
from tracer import intercept
from tracer.cursor import FORCED, Mismatch
from tracer.faults import absorbs, is_fault
from tracer.graph import Step
from tracer.location import FREE, NAMED, PASSED, fate
from tracer.op import FINALIZERS
from tracer.private import context
from tracer.shape_sources import fail_early

# The cursor's step during an async launch: it has no successors, so the launch is waited for before the next operation.
IN_FLIGHT = Step(None, None, None, None, (), {}, {}, ())


def settle_risk(run: CallState, step: Step) -> bool:
    """Determines who could catch a failure of an operation here; returns whether it must therefore be launched now.

    If only Keras could, to annotate the error, the annotation is noted for later instead.
    """
    inside = run.phase is Phase.OBSERVING
    if step.pause:
        return not inside
    assert step.node is not None
    guarded, unproven = step.node.guarded, False
    if step.risky is None:
        risky = guarded != FREE and can_fail(step)
        unproven = guarded != FREE and not risky and is_unproven(step)
        if not unproven:  # until it has run
            step.risky = risky
            step.settle_plain()
    if not (step.risky or unproven):
        return False
    if guarded == PASSED:
        guarded = fate()
    if guarded != NAMED or not (inside or unproven or needs_check(step) or step.node.callee is not None):
        return guarded != FREE
    # Only Keras could catch it, to name the layer: never worth a cut in a library call that runs no user code.
    return not (take_note(run.notes, step, run.cursor) or inside)


def may_fail(last: Step | None) -> bool:
    """Returns whether an operation of a segment up to `last` may fail. Each step is asked once."""
    unknown = []
    while last is not None and last.fallible is None:
        unknown.append(last)
        last = last.parent
    found = last is not None and bool(last.fallible)
    for step in reversed(unknown):
        found = step.fallible = found or (
            step.op is not None and not step.host and (can_fail(step) or is_unproven(step))
        )
    return found


def settle_failures(run: CallState, raise_deferred: Callable[[], None]) -> None:
    """Raises what has failed, or what fails where an operation that is issued now would be launched at once."""
    with run.lock:
        if run.phase is Phase.FAILED:
            raise_deferred()
        elif run.recorder is None and fate() != FREE and may_fail(run.cursor.step):
            flush(run)


def held_back(run: CallState, last: Step) -> PendingSegment:
    """Returns the pending segment of a followed call up to `last`, with the tensors that tapes will need of it.

    Sets unreferenced entries of `run.values` to None.
    """
    run.tapes.keep()
    cursor, values = run.cursor, run.values
    del values[last.end :]  # an interrupt may have come between appends to two of these lists
    numbers = present(values)
    run.telling += telling(values, numbers)
    held = let_go(values, numbers)
    alive = [i for i in held if values[i]._out.const is None]
    feeds, seeds = cursor.externals[: last.external], cursor.seeds[: last.draws]
    return PendingSegment(
        last, feeds, seeds, values, held, alive, assertions=run.assertions, notes=run.notes, budget=run.budget
    )


def land_before(run: CallState, last: Step) -> None:
    """Waits for the previous call's tail launch; if that fails, this call's pending operations never run."""
    before, run.before = run.before, None
    if before is not None:
        try:
            before.land()
        except BaseException as error:
            values, run.values = run.values, []
            run.survivors += [Reference(value) for value in values if value is not None]
            _fail(run, error, PendingSegment(last, [], [], [], [], []))
            raise


def launch_beside(run: CallState) -> None:
    """Launches the pending operations of a followed call, asynchronously if possible, else synchronously."""
    with run.lock:
        land_before(run, run.cursor.step)
        cursor, step, flight = run.cursor, run.cursor.step, None
        if run.device is None and run.forced < 0:  # launches on a GPU are asynchronous anyway
            pending, handles = held_back(run, step), cursor.handles
            cursor.handles = set()
            try:
                _settle_others(run, pending.feeds, handles)
            finally:
                cursor.handles = handles
            phase = after(run.phase, Event.LAUNCH)
            flight = run.segments.launch_async(pending, run.options)
        if flight is None:
            flush(run)
        else:
            run.flight, cursor.step, run.phase = (step, flight), IN_FLIGHT, phase


def _settle_others(run: CallState, feeds: list[Any], handles: set[int]) -> None:
    """Has other calls run their pending operations on variables that this one uses.

    The caller hides this call's own handles meanwhile, as the others do the same in turn.
    """
    if handles and intercept.has_others(run):
        intercept.settle_for([feed for feed in feeds if id(feed) in handles], but=run)


def flush(run: CallState, awaited: Step | None = None) -> None:
    """Runs all pending operations of a followed call.

    `awaited`: the operation being issued, if this runs because it may fail.
    """
    with run.lock:
        cursor = run.cursor
        cursor.step, flight = run.flight or (cursor.step, None)
        if flight is not None:
            cursor.step.pause = flight.is_worth_it()
        while cursor.step.parent is not None and cursor.step.end > len(run.values):
            cursor.step = cursor.step.parent  # matched but not answered: an interrupt came in between
        if run.recorder is None and cursor.step.parent is not None:
            carry_out(run, cursor.step, awaited)
            if flight is not None:
                flight.resume()


def cut_at_join(run: CallState, onward: Step | None) -> None:
    """Ends the segment of a followed call where ways meet; they go on from `onward`, if that is given."""
    with run.lock:
        flush(run)
        if onward is not None and run.recorder is None and run.cursor.step.parent is None:
            run.cursor.step = onward


def flush_for(run: CallState, inputs: Iterable[Any]) -> None:
    """Runs all pending operations of a followed call if they take one of these tensors."""
    if any(run.cursor.place(v) is not None for v in inputs):
        flush(run)


def admit(run: CallState, op: str, inputs: Iterable[Any]) -> bool:
    """Waits for the async launch, if any; returns whether an operation may become the next one of a followed call.

    A finalizer may not, nor may any if a test forces a divergence here.
    """
    if op in FINALIZERS:
        flush_for(run, inputs)
        return False
    if run.flight is not None:
        flush(run)
    return not is_forced(run)


def is_forced(run: CallState) -> bool:
    """Diverges if a test forces it here; returns whether it does."""
    if not 0 <= run.forced <= run.cursor.count():
        return False
    diverge(run, FORCED)
    return True


def diverge(run: CallState, mismatch: Mismatch | None) -> None:
    """Runs what is pending and lets a recorder take over; raises `Divergence` if strict."""
    flush(run)
    assert mismatch is not None
    run.divergence = run.ledger.cause(
        Kind.DIVERGENCE, str(mismatch), mismatch.location, mismatch.hint, expected=mismatch.expected, seen=mismatch.seen
    )
    if (events := timeline.current) is not None:
        now = time.perf_counter()
        events.add("divergence", run.ledger.name, now, f"{mismatch}, at {mismatch.location}", now)
    run.record(Event.DIVERGE)
    if run.options.strict:
        raise Divergence(f"{mismatch}, at {mismatch.location}")


def launch_behind(run: CallState, step: Step) -> None:
    """Launches up to an operation that may fail where user code could catch it, or after which Python pauses."""
    if step.pause and run.cursor.step is step:  # else accumulators have issued operations after it
        launch_beside(run)
    else:
        flush(run, step)
        if step.risky and not step.pause:
            fail_early(step, memoized)


def memoized(last: Step) -> set[Step]:
    """Returns the steps up to `last`, in its segment, of library calls that are memoized, or may be soon.

    They are skipped only if their operations are followed in one go, which saves more than a cut costs.
    """
    path: list[Step] = [last]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    place = {step: n for n, step in enumerate(path)}  # latest first
    begins: dict[int, int] = {}  # by the place of the last step of a call: that of the step before it
    for n, step in enumerate(path):
        for region in (step.regions or {}).values():
            learnt = region.confirmed or (region.reason is None and region.end is not step)
            if learnt and region.end in place:
                begins[place[region.end]] = max(n, begins.get(place[region.end], 0))
    inside: set[Step] = set()
    until = 0
    for n, step in enumerate(path):
        until = max(until, begins.get(n, 0))
        if n < until:
            inside.add(step)
    return inside


def carry_out(run: CallState, last: Step, awaited: Step | None = None) -> None:
    """Runs the segment of a followed call that ends with `last`, and cuts: exactly once, whatever interrupts it."""
    land_before(run, last)
    pending, cursor = held_back(run, last), run.cursor
    until, handles = cursor.step, cursor.handles
    try:
        run.values, cursor.handles = [], set()
        if run.flight is None:
            _settle_others(run, pending.feeds, handles)
        else:
            phase = after(run.phase, Event.LAND)
            pending.flight, run.flight, run.phase = run.flight[1], None, phase
        if run.device is None and context.executing_eagerly():
            launched = run.segments.run(pending, run.options)
        else:  # a graph being built needs a value: none of this may become part of that graph
            with tf.init_scope(), tf.device(run.device):
                launched = run.segments.run(pending, run.options)
        _end(run, pending)
        run.ran.append(last)
        run.launched, run.replayed = run.launched + launched, run.replayed + (not launched)
    except Exception as error:
        if run.options.strict or not absorbs(error):
            try:
                _fail(run, error, pending, awaited)
            except Exception as fault:
                if run.options.strict or not absorbs(fault):
                    raise
                _go_on_plainly(run, fault, pending)
            raise
        try:
            _rescue(run, pending)
        except Exception as failure:
            if not is_fault(failure):
                failure.__suppress_context__ = True
            _fail(run, failure, pending, awaited)
            raise
        run.faults.append(error)
    except BaseException as interrupt:  # at any Python instruction
        if pending.is_done():
            if cursor.step is until:
                cursor.step = last
                _end(run, pending)
        elif pending.begun or pending.flight is not None:
            _fail(run, interrupt, pending, awaited)
        else:  # nothing has run
            run.values, cursor.handles = pending.values, handles
        raise


def _rescue(run: CallState, pending: PendingSegment) -> None:
    """Completes a segment that a fault of the runtime interrupted; no operation runs twice."""
    flight = pending.flight
    if flight is not None:
        with contextlib.suppress(Exception):  # nothing was written then
            flight.land()
        pending.executable, pending.flight = flight.executable, None
        pending.results.extend(flight.into[len(pending.results) :])
    if not pending.is_done():
        if pending.results:  # a check failed: nothing was written
            pending.results.clear()
        with tf.init_scope(), tf.device(run.device):
            run.segments.replay(pending)
    pending.last.executables = None
    if not pending.ended:
        _end(run, pending)
    run.replayed += 1


def _go_on_plainly(run: CallState, fault: Exception, pending: PendingSegment) -> None:
    """Continues a call after a failed operation, unrecorded, as the runtime itself failed, too."""
    run.faults.append(fault)
    if run.recorder is None:
        if run.cursor.step.parent is not None:
            run.cursor.step = pending.last
            run.cursor.cut()
        run.record_plainly(fault)


def _fail(run: CallState, error: BaseException, pending: PendingSegment, awaited: Step | None = None) -> None:
    """Continues a call with a recorder after a segment that failed or was interrupted."""
    last, run.error = pending.last, error
    # Unrelated code may swallow it where it is raised (a `try` entered later, another thread): then the next operations
    # and the end of the call raise it again.
    risky = last.risky or (last.risky is None and not last.pause)  # None: unproven
    expected = pending.at is last is awaited and risky and isinstance(error, Exception)
    event = Event.FAIL_IN_PLACE
    if not expected or threading.get_ident() != run.owner:
        run.deferred = run.unseen = error
        event = Event.FAIL_LATE
    run.ledger.cause(Kind.FAILURE, f"{type(error).__name__}: {str(error)[:200]}", last.place)
    if run.recorder is None:
        run.cursor.step = last
        run.cursor.cut()
        run.record(event)
    else:
        run.move(event)


def _end(run: CallState, pending: PendingSegment) -> None:
    if pending.last.opened:
        for number in pending.held:
            pending.values[number].measured()
    survivors = [Reference(pending.values[i]) for i in pending.held]
    run.cursor.cut()
    run.survivors += survivors
    run.assertions, run.notes = {}, {}
    pending.ended = True
