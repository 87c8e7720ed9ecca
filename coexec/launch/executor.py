"""Segment executor: compiles segments, and runs each by an executable or operation by operation."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from coexec.base import fork, timeline, timer_signals
from coexec.base.budget import Budget, is_hopeless
from coexec.base.options import Divergence, Options
from coexec.base.slow_notice import SlowNotice
from coexec.base.stats import EventLog, Kind
from coexec.base.tuning import tuning
from coexec.compile.compile_thread import background
from coexec.compile.dynamic_graph import dynamic_graph
from coexec.compile.executable import Executable
from coexec.compile.shape_polymorphic import PolymorphicGraphs
from coexec.launch.async_launch import AsyncLaunch, launch_async
from coexec.launch.audits import Audits
from coexec.launch.backend_race import Compiled
from coexec.launch.frequent_sizes import FrequentSizes
from coexec.launch.interpreter import replay
from coexec.launch.segment import PendingSegment
from coexec.launch.validate import CHECKED, Declined, reason_of, validate
from coexec.lowering.plan import Plan, make_plan
from coexec.lowering.reroll.reroll import left_by_loops
from tracer.graph import Step, Variant
from tracer.intercept import handling
from tracer.private import context, is_op_determinism_enabled

_NOTHING = contextlib.nullcontext()
_FIRST = {"xla": "XLA has to compile them first", "graph": "TensorFlow has to prepare them first"}


class SegmentExecutor:
    """Runs the segments of one function: launches compiled ones, compiles recurring ones."""

    def __init__(self, options: Options, ledger: EventLog, name: str) -> None:
        self.options = options
        self.name = name
        self.ledger = ledger
        self.audits = Audits()
        self._families = PolymorphicGraphs()
        self._on_cpu = not tf.config.list_physical_devices("GPU")
        self._clock = itertools.count()
        self._generation = 0  # counts calls of `clear`
        self._began = time.monotonic()
        self._spent = 0.0  # seconds spent compiling
        self._asked: defaultdict[Any, set[int]] = defaultdict(set)  # segments given to XLA, by place; kept by `clear`
        self._lock = threading.RLock()
        self._all: list[Compiled] = []
        self._compared: set[Variant] = set()  # of operations in graphs that were validated; emptied by `clear`
        self._recombined = 0  # graphs of nothing else
        self._executables: weakref.WeakValueDictionary[Any, Executable] = weakref.WeakValueDictionary()

    def launch_async(self, pending: PendingSegment, options: Options) -> AsyncLaunch | None:
        """Launches a segment asynchronously, if that is as good as a synchronous launch; `run` waits for it.

        Its executable must be settled, and return all tensors that are alive. Returns None otherwise.
        """
        compiled: Compiled | None = self._unit(pending).executables
        if compiled is None or compiled.refused or compiled.rival is not None or options.validating or fork.forked:
            return None
        executable = compiled.executable
        if executable is None or executable.launches < 2 or not executable.given.issuperset(pending.alive):
            return None
        if (executable.backend == "xla" and timer_signals.is_running()) or self._is_audited(executable, options):
            return None
        flight = launch_async(executable, pending.feeds, pending.seeds)
        self.ledger.count(beside=flight is not None)
        return flight

    def run(self, pending: PendingSegment, options: Options) -> bool:
        """Computes a segment's live tensors and performs all its writes.

        Returns whether one launch did it. Raises what a failing operation raises eagerly.
        """
        last = self._unit(pending)
        last.visits += 1
        if last is not pending.last:
            pending.last.visits += 1
        compiled = self._compiled(last)
        compiled.used = next(self._clock)
        executable, failure = None, None
        if pending.flight is not None:  # whatever happened to the segment meanwhile, its writes are done
            executable = pending.flight.executable
            failure = self._launch(executable, pending, compiled)
            if failure is None:
                return True
        elif not compiled.refused and not fork.forked:
            executable = compiled.next()
            if executable is None or not executable.given.issuperset(pending.alive):
                executable = self._compile(compiled, last, pending.alive, pending.budget)
            if executable is not None and executable.backend == "xla" and timer_signals.is_running():
                executable = self._without_xla(compiled, last, pending.alive)
            if executable is not None and (options.validating or self._must_compare(executable, last, options)):
                return self._validate(executable, pending, compiled, options)
            if executable is not None and self._is_audited(executable, options):
                return self._audit(executable, pending, compiled, options)
            if executable is not None:
                failure = self._launch(executable, pending, compiled)
                if failure is None:
                    return True
        began = time.perf_counter()
        try:
            replay(pending, pending.seeds)
        finally:
            if (events := timeline.current) is not None:
                events.add("one by one", self.name, began, f"{last.live} operations, to {last.place}")
        if executable is not None and failure is not None:  # had an operation failed, `replay` would have raised
            self._demote(compiled, executable, last, failure)
        else:
            took = time.perf_counter() - began
            compiled.seconds += took
            pending.budget.earn(took)
            self._consider_xla(compiled, last)
        return False

    def _unit(self, pending: PendingSegment) -> Step:
        """Returns the step that has the segment's executables: its last one, or that of its copy at frequent sizes."""
        last = pending.last
        if pending.unit is None:
            pending.unit = last
            if last.dynamic:
                general = self._compiled(last)
                if general.sizes is None:
                    general.sizes = FrequentSizes(last, self._compiled)
                pending.unit = general.sizes.at(pending.feeds, general) or last
        return pending.unit

    def _compiled(self, last: Step) -> Compiled:
        """Returns what is known of the segment that ends at a step."""
        compiled: Compiled | None = last.executables
        if compiled is None:
            compiled = last.executables = Compiled()
            self._all.append(compiled)
        return compiled

    def replay(self, pending: PendingSegment) -> None:
        """Runs the rest of a segment operation by operation."""
        replay(pending, pending.seeds)

    def _launch(self, executable: Executable, pending: PendingSegment, compiled: Compiled) -> str | None:
        """Launches; returns None, or why that failed, in which case nothing was written."""
        flight = pending.flight
        began = time.perf_counter()
        pending.executable = executable
        try:
            if flight is not None:
                results = flight.land()
            elif executable.launches:
                results = executable.launch(pending.feeds, pending.seeds, pending.results)
            else:
                with self._first(executable, pending.last):
                    results = executable.launch(pending.feeds, pending.seeds, pending.results)
        except Exception as error:  # replaying shows whether an operation or the executable is at fault
            pending.results.extend(flight.into if flight is not None else ())
            if pending.results:  # neither: the launch is done, and Python failed after it
                raise
            return reason_of(error)
        took = time.perf_counter() - began
        if (events := timeline.current) is not None:
            text = f"{executable.backend}, {executable.ops} operations, to {pending.last.place}"
            events.add("launch" if flight is None else "wait", self.name, began, text)
        if flight is None:
            executable.took = took
        self.ledger.count("launches")
        if executable.launches == 1:  # includes TensorFlow's preparation
            self._spent += took
            self.ledger.count(loaded=executable.loaded)
        elif flight is None:
            outcome = compiled.took(executable, took)
            if outcome is not None:
                self.ledger.cause(Kind.BACKEND, outcome, pending.last.place)
        if results is None:
            pending.results.clear()
            return CHECKED
        pending.deliver(results)
        if not compiled.succeeded:
            compiled.succeeded = True
            for step in pending.last.chain():
                if step.variant is not None:
                    step.variant.ran = True
        self._consider_xla(compiled, self._unit(pending))
        return None

    def _validate(
        self, executable: Executable, pending: PendingSegment, compiled: Compiled, options: Options, audit: bool = False
    ) -> bool:
        """Runs the segment both ways; an executable whose results differ is not launched again.

        Returns whether it could be launched; strict functions raise `Divergence` if it differs.
        """
        self.ledger.count("validated", "launches")
        began = time.perf_counter()
        try:
            with self._first(executable, pending.last) if executable.launches == 0 else _NOTHING:
                difference = validate(executable, pending)
        except Declined as declined:
            self._demote(compiled, executable, self._unit(pending), str(declined))
            return False
        finally:
            if executable.launches == 1:
                self.ledger.count(loaded=executable.loaded)
            if (events := timeline.current) is not None:
                text = f"{executable.backend}, {executable.ops} operations, to {pending.last.place}"
                events.add("validate", self.name, began, text)
        executable.trusted = True
        if difference is None and executable.backend == "graph":
            self._compared.update(_variants(pending.last))
        if difference is not None:
            with self._lock:
                self._families.give_up(executable)
                for key in [key for key, known in self._executables.items() if known is executable]:
                    del self._executables[key]
                for user in [compiled, *(c for c in self._all if c is not compiled)]:
                    user.discard(executable)
            if audit:
                self.audits.warn(self.name, f"{executable.backend}: {difference}", pending.last.place)
            self.found(f"{executable.backend}: {difference}", pending.last.place, options)
        return True

    def _audit(self, executable: Executable, pending: PendingSegment, compiled: Compiled, options: Options) -> bool:
        """Validates an executable again that was right before; warns if it is wrong now."""
        began = time.perf_counter()
        try:
            return self._validate(executable, pending, compiled, options, audit=True)
        finally:
            self.audits.took(executable, time.perf_counter() - began)

    def _is_audited(self, executable: Executable, options: Options) -> bool:
        """Whether to audit a launch; never under a mode."""
        if not self.audits.open or options is not self.options or not tuning.validates_new:
            return False
        return _is_small(executable) and self.audits.wants(executable)

    def _is_new(self, executable: Executable, options: Options) -> bool:
        """Whether an executable has still to be validated."""
        if not tuning.validates_new or executable.trusted or options.trusting:
            return False
        return _is_small(executable)

    def _must_compare(self, executable: Executable, last: Step, options: Options) -> bool:
        """Returns whether to validate a launch, as the executable is new; trusts some graphs without.

        Those have only operations that have been compared in others. Each new path of a function whose calls choose
        among ways of a few parts would be compared, which takes as long as the call. `audits` come to them, too.
        """
        if not self._is_new(executable, options):
            return False
        if executable.backend == "graph" and self._compared.issuperset(_variants(last)):
            self._recombined += 1
            executable.trusted = self._recombined % tuning.validates_recombined > 0
        return not executable.trusted

    def found(self, text: str, place: str, options: Options) -> None:
        """Notes that something compiled or memoized differed from the program; raises `Divergence` if strict."""
        hint = "if it is more than the rounding of sums that cancel, report it; it is not used any more"
        self.ledger.cause(Kind.VALIDATION, text, place, hint)
        if options.strict:
            raise Divergence(f"{text}, at {place}")

    def _demote(self, compiled: Compiled, executable: Executable, last: Step, reason: str) -> None:
        """Takes a backend away from a segment that fails there but not eagerly."""
        compiled.alarms += 1
        if reason == CHECKED and compiled.alarms < tuning.max_alarms:
            return
        if executable.backend == "xla":
            self.ledger.cause(Kind.XLA, reason, last.place)
            compiled.asked = True
            if executable is compiled.rival:
                compiled.rival = None
                return
            with self._lock, handling(None):
                compiled.executable = self._emit(compiled, last, "graph")
        else:
            self.ledger.cause(Kind.IMPERATIVE, reason, last.place)
            compiled.executable = compiled.rival = None
            compiled.refused = True

    # Compiling.

    def _compile(self, compiled: Compiled, last: Step, alive: list[int], budget: Budget) -> Executable | None:
        """Returns an executable that returns what is alive, if the segment is worth one and the budget allows it."""
        jit = self.options.jit_compile
        with self._lock, handling(None):
            compiled.wanted.update(alive)
            if compiled.executable is not None:
                compiled.widen()
                compiled.widenings += 1
                if compiled.widenings > tuning.max_widenings:
                    compiled.wanted = last.given()
            if not self._is_worth_it(last):
                return self._known(compiled, last)
            before = time.monotonic()
            if (jit is True or (tuning.xla_at_once and jit == "auto")) and not compiled.asked:
                compiled.asked = True
                compiled.executable = self._emit(compiled, last, "xla")
            if compiled.executable is None and not self._affords(compiled, last, budget):
                return self._known(compiled, last)
            if compiled.executable is None and last.live >= tuning.launch_operations and not compiled.refused:
                compiled.adopt(self._emit(compiled, last, "graph"))
                compiled.refused = compiled.executable is None
                if jit == "auto" and not is_op_determinism_enabled() and (known := compiled.recall()) is not None:
                    self.ledger.cause(Kind.BACKEND, known, last.place)
            took = time.monotonic() - before
            self._spent += took
            budget.spend(took)
            return compiled.executable

    def _affords(self, compiled: Compiled, last: Step, budget: Budget) -> bool:
        """Returns whether the budget allows compiling; a segment too large for any waits for more visits instead."""
        seconds = compiled.seconds / max(last.visits - 1, 1)
        if budget.has(last.live, seconds):
            return True
        if not is_hopeless(last.live, seconds):
            return False
        text = f"to compile its {last.live} operations holds up a call"
        self.ledger.cause(Kind.LARGE, text, last.place, "read a value in between: shorter segments take less")
        return last.visits >= tuning.hopeless_visits

    def _without_xla(self, compiled: Compiled, last: Step, alive: list[int]) -> Executable | None:
        """Returns a graph to launch while a timer sends signals, which may crash code compiled by XLA."""
        if compiled.executable is not None and compiled.executable.backend == "graph":
            return compiled.executable  # XLA's is only racing it
        if compiled.stand_in is None or not compiled.stand_in.given.issuperset(alive):
            with self._lock, handling(None):
                compiled.stand_in = self._emit(compiled, last, "graph")
            text = "an interval timer runs, and code compiled by XLA may crash where a signal interrupts it"
            self.ledger.cause(Kind.XLA, text, last.place, "use a profiler that samples from another process")
        return compiled.stand_in

    def _known(self, compiled: Compiled, last: Step) -> Executable | None:
        """Returns a shape-polymorphic graph compiled for other sizes, for a segment not worth its own yet; or None."""
        xla_first = self.options.jit_compile is True or tuning.xla_at_once
        if xla_first or last.dynamic or compiled.executable is not None or last.live < tuning.launch_operations:
            return None
        if not self._families.may_know(last):
            return None
        plan = make_plan(last, tuple(sorted(compiled.wanted)))
        compiled.adopt(self._families.graph(plan) if plan.live and not plan.refusal else None)
        return compiled.executable

    def _is_worth_it(self, last: Step) -> bool:
        if last.visits < tuning.launch_visits:
            return False
        budget = tuning.compile_allowance + tuning.compile_share * (time.monotonic() - self._began)
        return last.visits >= tuning.compile_often or self._spent < budget

    def _emit(self, compiled: Compiled, last: Step, backend: str) -> Executable | None:
        """Returns an executable for the segment by this backend, or None, with the reason noted."""
        plan = self._plan(compiled, last, backend)
        if plan is None:
            return None
        if last.dynamic:
            return dynamic_graph(plan, lambda given: self._new(plan, backend, last.place, given))
        if backend == "graph" and self._on_cpu:
            return self._families.graph(plan, lambda given: self._made(plan, backend, last.place, given))
        return self._made(plan, backend, last.place)

    def _made(self, plan: Plan, backend: str, place: str, given: dict[Any, int] | None = None) -> Executable | None:
        """Returns an executable for a plan; `given`: constants lifted to arguments, of a shared graph."""
        executable = self._executables.get((backend, plan.content)) if given is None else None
        if executable is None and (executable := self._new(plan, backend, place, given)) is not None:
            self._register(plan, executable, "" if given is None else "shared ")
        return executable

    def _plan(self, compiled: Compiled, last: Step, backend: str) -> Plan | None:
        """Returns the plan for the backend to compile; None if it cannot or need not, with the reason noted."""
        place = last.place
        plan = make_plan(last, tuple(sorted(compiled.wanted)))
        if plan.live == 0 or plan.refusal:
            compiled.refused = True
            if plan.refusal:
                self.ledger.cause(Kind.IMPERATIVE, plan.refusal, place)
            return None
        if backend == "xla" and (refusal := plan.refusal_by_xla(tuning.min_outlined)):
            self.ledger.cause(Kind.XLA, refusal, place)
            return None
        return plan

    def _first(self, executable: Executable, last: Step) -> SlowNotice:
        """Returns what tells of a first launch that takes long: XLA compiles meanwhile, or TensorFlow prepares."""
        what = f"the first launch of {executable.ops} operations before {last.place}"
        return SlowNotice(f"{self.name}: {what}", f"as {_FIRST[executable.backend]}")

    def _new(self, plan: Plan, backend: str, place: str, given: dict[Any, int] | None = None) -> Executable | None:
        """Compiles a plan; returns None, with the reason noted, if that fails."""
        began = time.perf_counter()
        try:
            what = f"{self.name}: writing {plan.live} operations before {place} as a graph"
            with SlowNotice(what, "in the call") if backend == "graph" else _NOTHING:
                executable = Executable(plan, backend, given)
            if backend == "graph" and (events := timeline.current) is not None:
                events.add("compile", self.name, began, f"{plan.live} operations, to {place}")
        except Exception as error:  # what cannot be emitted runs by other means, with the reason noted
            kind = Kind.XLA if backend == "xla" else Kind.IMPERATIVE
            self.ledger.cause(kind, f"{type(error).__name__}: {str(error)[:300]}", place)
            return None
        self.ledger.compiled(plan.live)
        if executable.folded:
            there = executable.ops + executable.folded
            text = f"of {there} operations {executable.ops} are left: what comes again and again are turns of loops"
            self.ledger.cause(Kind.FOLDED, text, place)
        if executable.parts:
            text = f"{next(iter(plan.outside.values()))}: it runs between {len(executable.parts)} compiled parts"
            self.ledger.cause(Kind.XLA, text, place)
        return executable

    def _register(self, plan: Plan, executable: Executable, kind: str = "") -> None:
        """Shares an executable among segments of equal content; evicts others beyond a bound. Needs the lock."""
        self._executables[kind + executable.backend, plan.content] = executable
        if len(self._executables) > tuning.max_executables or self._operations() > tuning.max_compiled_operations:
            held = [c for c in self._all if c.executable is not None or c.rival is not None]
            for compiled in sorted(held, key=lambda c: c.used)[: len(held) // 4 + 1]:
                compiled.widen()

    def _operations(self) -> int:
        return sum(executable.ops for executable in list(self._executables.values()))

    def _consider_xla(self, compiled: Compiled, last: Step) -> None:
        """Has XLA compile, in the background, a segment that has run long enough to amortize that."""
        if compiled.asked or compiled.refused or fork.forked:
            return
        soon = self.options.xla_soon and last.visits >= tuning.xla_soon_visits
        if not soon and not compiled.is_worth_xla(tuning.xla_price, last.live):
            return
        if last.visits < tuning.launch_visits or timer_signals.is_running():
            return
        compiled.asked = True
        if self.options.jit_compile != "auto" or is_op_determinism_enabled():
            return  # timing must not decide about bits
        with self._lock, handling(None):
            plan = self._plan(compiled, last, "xla")
            if plan is None:
                return
            if plan.size > tuning.max_validated_bytes:
                text = "it is too large to be compiled beside the program; jit_compile=True has it compiled at once"
                self.ledger.cause(Kind.XLA, text, last.place)
                return
            shared = self._executables.get(("xla", plan.content))
            if shared is not None:
                compiled.compete(shared, self._on_cpu)
                return
            asked = self._asked[last.op, last.frames]
            if len(asked) >= tuning.max_xla_shapes and hash(plan.content) not in asked:
                most = tuning.max_xla_shapes
                text = f"XLA has compiled {most} segments that end here, for other shapes, and never frees its code"
                self.ledger.cause(Kind.XLA, text, last.place)
                return
            asked.add(hash(plan.content))
        place, device, generation = last.place, context.context().device_name, self._generation

        def compile_by_xla() -> None:
            if generation != self._generation:  # cleared meanwhile
                return
            if timer_signals.is_running():
                compiled.asked = False  # later
                return
            if not soon and compiled.is_uncounted(plan.live):
                compiled.ops = min(plan.live, left_by_loops(plan))
                if not compiled.is_worth_xla(tuning.xla_price, plan.live):
                    compiled.asked = False  # later
                    return
            executable = self._executables.get(("xla", plan.content)) or self._new(plan, "xla", place)
            if executable is None:
                return
            if executable.launches == 0:
                try:
                    executable.prepare(device)
                except Exception as error:
                    reason = reason_of(error)
                    self.ledger.cause(Kind.XLA, reason, place)
                    compiled.declined(f"XLA cannot compile it: {reason}")
                    return
                executable.launches = 1
                self.ledger.count(loaded=executable.loaded)
            with self._lock:
                if generation == self._generation:
                    self._register(plan, executable)
                    if compiled.asked and compiled.wanted == executable.given:  # has not changed meanwhile
                        compiled.compete(executable, self._on_cpu)

        if not background.submit(f"compiling {plan.live} operations before {place} by XLA", compile_by_xla):
            compiled.asked, compiled.seconds = False, 0.0  # later, perhaps

    def clear(self) -> None:
        """Releases every executable; one in use by a running call is released after it."""
        with self._lock:
            self._generation += 1
            self._families = PolymorphicGraphs()
            for compiled in self._all:
                compiled.widen()
            self._all.clear()
            self._compared.clear()


def _variants(last: Step) -> Iterator[Variant]:
    """Yields the variants of the operations in the segment up to `last`."""
    step: Step | None = last
    while step is not None:
        if step.variant is not None:
            yield step.variant
        step = step.parent


def _is_small(executable: Executable) -> bool:
    """Returns whether the variables of an executable are small enough to be copied, as validation does."""
    return executable.size <= tuning.max_validated_bytes and executable.tables <= tuning.max_copied_tables
