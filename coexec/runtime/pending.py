"""Pending: what a followed call holds back, up to where it is cut."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from coexec.compile.executable import Executable
from coexec.events import Kind
from coexec.lowering.failures import can_fail, needs_check
from coexec.runtime.flight import Flight
from coexec.runtime.notes import take_note
from coexec.runtime.references import Reference, let_go, present, telling
from tracer import intercept
from tracer.graph import Step
from tracer.location import FREE, NAMED
from tracer.private import context
from tracer.seeds import Pair


@dataclass(slots=True)
class Pending:
    """The segment that ends behind `last`, with this call's values."""

    last: Step
    feeds: list[Any]  # the tensors from outside
    seeds: list[Pair]  # those that its random operations have drawn
    values: list[Any]  # the lazy tensors by their numbers; None: nobody wants it
    held: list[int]  # numbers of those that somebody still holds
    alive: list[int]  # of these, those whose values are not known from shapes alone
    flight: Flight | None = None  # the launch that is under way, if there is one
    begun: bool = False  # whether some operation may have run
    at: Step | None = None  # where they run one by one, the last one that did, or failed
    finished: bool = False  # whether all have run
    executable: Executable | None = None  # that it is launched with
    results: list[Any] = field(default_factory=list)  # nothing, or what the launch gave
    assertions: dict[Step, Any] = field(default_factory=dict)  # what some say in this call
    notes: dict[Step, Any] = field(default_factory=dict)  # and what Keras adds to errors of some

    def reaching(self) -> Iterator[Step]:
        """Returns the steps in order, and notes which one is next."""
        for step in self.last.chain():
            self.begun, self.at = True, step
            yield step

    def deliver(self, results: list[Any]) -> None:
        """Gives the tensors what the launch gave."""
        assert self.executable is not None
        for number, tensor in zip(self.executable.outputs, results, strict=True):
            lazy = self.values[number]
            if lazy is not None:
                lazy._value = tensor
        self.finished = True

    def is_done(self) -> bool:
        """Returns whether all was carried out before an interrupt came; a launch that was is delivered now."""
        if not self.finished and self.results:
            assert self.executable is not None
            results = self.executable.unpacked(self.results[0])
            if results is not None:
                self.deliver(results)
        return self.finished


# Where the cursor is during a flight: nothing follows this step, so that the launch lands before the next operation.
IN_FLIGHT = Step(None, None, None, None, (), {}, {}, ())


def is_urgent(run: Any, step: Step) -> bool:
    """Returns whether an operation is carried out at once, since its failure matters to somebody at this place."""
    inside = run.tapes.steps is not None
    if step.pause:
        return not inside
    assert step.node is not None
    guarded = step.node.guarded
    if step.risky is None:
        step.risky = guarded != FREE and can_fail(step)
        step.settle_plain()
    if not step.risky or guarded != NAMED or not (inside or needs_check(step)):
        return step.risky
    # Only Keras could catch it, to note the layer: in a library call that runs no user code not worth a cut at all.
    return not (take_note(run, step) or inside)


def held_back(run: Any, last: Step) -> Pending:
    """Returns what a followed call holds back up to `last`, with what tapes will need of it."""
    run.tapes.keep()
    cursor, values = run.cursor, run.values
    del values[last.end :]  # an interrupt may have come between two of these lists' growing
    numbers = present(values)
    run.telling += telling(values, numbers)
    held = let_go(values, numbers)
    alive = [i for i in held if values[i]._out.const is None]
    feeds, seeds = cursor.externals[: last.external], cursor.seeds[: last.draws]
    return Pending(last, feeds, seeds, values, held, alive, assertions=run.assertions, notes=run.notes)


def land_before(run: Any, last: Step) -> None:
    """Lands what the call before has left under way; where that fails, this call's operations never come about."""
    before, run.before = run.before, None
    if before is not None:
        try:
            before.land()
        except BaseException as error:
            values, run.values = run.values, []
            run.survivors += [Reference(value) for value in values if value is not None]
            _fail(run, error, Pending(last, [], [], [], [], []))
            raise


def launch_beside(run: Any) -> None:
    """Launches what a followed call holds back, beside Python where that can be, and else at once."""
    with run.lock:
        land_before(run, run.cursor.step)
        cursor, step, flight = run.cursor, run.cursor.step, None
        if run.device is None and run.forced < 0:  # launches on a GPU return before they are done
            pending, handles = held_back(run, step), cursor.handles
            cursor.handles = set()
            try:
                _settle_others(run, pending.feeds, handles)
            finally:
                cursor.handles = handles
            flight = run.segments.take_off(pending, run.options)
        if flight is None:
            run.flush()
        else:
            run.flight, cursor.step = (step, flight), IN_FLIGHT


def _settle_others(run: Any, feeds: list[Any], handles: set[int]) -> None:
    """Has other calls carry out what they hold back on variables that this one works on.

    Its own handles are hidden meanwhile: the others ask in turn.
    """
    if handles and intercept.has_others(run):
        intercept.settle_for([feed for feed in feeds if id(feed) in handles], but=run)


def carry_out(run: Any, last: Step) -> None:
    """Carries out the segment of a followed call that ends behind `last`, and cuts: once, whatever interrupts it."""
    land_before(run, last)
    pending, cursor = held_back(run, last), run.cursor
    until, handles = cursor.step, cursor.handles
    try:
        run.values, cursor.handles = [], set()
        if run.flight is None:
            _settle_others(run, pending.feeds, handles)
        else:
            pending.flight, run.flight = run.flight[1], None
        if run.device is None and context.executing_eagerly():
            launched = run.segments.run(pending, run.options)
        else:  # a graph that is being made wants a value: of what is done for it, nothing is to become part of it
            with tf.init_scope(), tf.device(run.device):
                launched = run.segments.run(pending, run.options)
        _end(run, pending)
        run.launched, run.replayed = run.launched + launched, run.replayed + (not launched)
    except Exception as error:
        _fail(run, error, pending)
        raise
    except BaseException as interrupt:  # of Python, at any instruction
        if pending.is_done():
            if cursor.step is until:
                cursor.step = last
                _end(run, pending)
        elif pending.begun or pending.flight is not None:
            _fail(run, interrupt, pending)
        else:  # it is still to come
            run.values, cursor.handles = pending.values, handles
        raise


def _fail(run: Any, error: BaseException, pending: Pending) -> None:
    """Has a call go on with a recorder behind a segment of which an operation has failed, or that was interrupted."""
    last, run.error = pending.last, error
    # Where it is raised, somebody may swallow it who has nothing to do with it (a `try` that began later, another
    # thread): then it is raised again, by the next operations and at the end of the call.
    expected = pending.at is last is run.awaited and last.risky and isinstance(error, Exception)
    if not expected or threading.get_ident() != run.owner:
        run.deferred = run.unseen = error
    run.ledger.cause(Kind.FAILURE, f"{type(error).__name__}: {str(error)[:200]}", last.place)
    if run.recorder is None:
        run.cursor.step = last
        run.cursor.cut()
        run.record_from_here()


def _end(run: Any, pending: Pending) -> None:
    run.survivors += [Reference(pending.values[i]) for i in pending.held]
    run.assertions, run.notes = {}, {}
    run.cursor.cut()
