"""Segments: what has been compiled for a cut, and how a segment is carried out."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import defaultdict
from typing import Any

import tensorflow as tf

from coexec import process
from coexec.compile.background import background
from coexec.compile.executable import Executable
from coexec.compile.families import Families
from coexec.events import Kind, Ledger
from coexec.lowering.fold import left_by_loops
from coexec.lowering.outline import LEAST
from coexec.lowering.plan import Plan, make_plan
from coexec.options import Divergence, Options
from coexec.runtime.decisions import Decisions
from coexec.runtime.flight import Flight, take_off
from coexec.runtime.pending import Pending
from coexec.runtime.replay import replay
from coexec.runtime.structures import Functions
from coexec.runtime.thresholds import Thresholds
from coexec.runtime.tiers import Compiled
from coexec.runtime.twins import Twins
from coexec.runtime.validation import CHECKED, Declined, reason_of, validate
from tracer.graph import Step
from tracer.intercept import handling
from tracer.private import context, is_op_determinism_enabled

thresholds = Thresholds()

# Whatever is compiled is compared with its operations when it is first launched: that takes a tenth of the time that
# compiling took. (`coexec.testing` has tests see what is compiled.)
validates_new: bool = True

# An operation takes 0.2 ms to emit and compile and saves 10 us a launch. Programs whose paths keep changing would do
# little else. So, beyond an allowance, compiling takes no more than this share of the time since the first call, but
# for segments that have come by often.
ALLOWANCE = 5.0  # seconds
SHARE = 0.2
OFTEN = 32  # visits

# The tensors read behind a cut may differ from call to call; after this many widenings all are given out.
MAX_WIDENINGS = 4

# Executables of one function, and their operations, of which one takes some 7 KB; beyond, those launched longest ago
# go, and are compiled anew if they come again.
MAX_EXECUTABLES = 1000
MAX_OPERATIONS = 100_000

# What XLA has compiled TensorFlow never frees (0.5 to 2 MiB for some tens of operations). So segments that end at one
# place, with ever other shapes, get this many executables of XLA's; the others are graphs.
MAX_XLA = 16

# Bytes that a segment takes in: XLA compiles it beside the program by a launch on as many of its own, and to compare
# two ways of carrying it out takes as many for its variables.
MAX_SIZE = 1 << 30

# Visits after which XLA is asked where it would be asked before the first one, without this package.
SOON = 4

# So often may the checks of an XLA executable fail where no operation fails eagerly (a cast that wraps around, say).
MAX_ALARMS = 4


class Segments:
    """Carries out segments for one function: launches what is compiled, compiles what comes again."""

    def __init__(self, options: Options, ledger: Ledger) -> None:
        self.options = options
        self.ledger = ledger
        self.decisions = Decisions(ledger, options.control_flow)
        self.functions = Functions(ledger, options.control_flow)
        self.told: set[Any] = set()  # what the ledger has been told of library calls
        self.twins = Twins()
        self._families = Families()
        self._on_cpu = not tf.config.list_physical_devices("GPU")
        self._clock = itertools.count()
        self._generation = 0  # of all that is compiled
        self._began = time.monotonic()
        self._spent = 0.0  # seconds, for compiling
        self._asked: defaultdict[Any, set[int]] = defaultdict(set)  # for which segments, by place; also after `clear`
        self._lock = threading.RLock()
        self._all: list[Compiled] = []
        self._executables: weakref.WeakValueDictionary[Any, Executable] = weakref.WeakValueDictionary()

    def take_off(self, pending: Pending, options: Options) -> Flight | None:
        """Launches a segment beside Python, if that is as good as launching it here; `run` lands it.

        Its executable must be settled, and give out what is alive.
        """
        compiled: Compiled | None = pending.last.executables
        if compiled is None or compiled.refused or compiled.rival is not None or options.validating or process.forked:
            return None
        executable = compiled.executable
        if executable is None or executable.launches < 2 or not executable.given.issuperset(pending.alive):
            return None
        flight = take_off(executable, pending.feeds, pending.seeds)
        self.ledger.count(beside=flight is not None)
        return flight

    def run(self, pending: Pending, options: Options) -> bool:
        """Computes the tensors that are alive, and does every write, of a segment.

        Returns whether that was one launch.
        """
        last = pending.last
        last.visits += 1
        compiled = last.executables
        if compiled is None:
            compiled = last.executables = Compiled()
            self._all.append(compiled)
        compiled.used = next(self._clock)
        executable, failure = None, None
        if pending.flight is not None:  # whatever became of the segment meanwhile: what it writes is written
            executable = pending.flight.executable
            failure = self._launch(executable, pending, compiled)
            if failure is None:
                return True
        elif not compiled.refused and not process.forked:
            executable = compiled.next()
            if executable is None or not executable.given.issuperset(pending.alive):
                executable = self._compile(compiled, last, pending.alive)
            if executable is not None and (options.validating or self._is_new(executable, options)):
                return self._validate(executable, pending, compiled, options)
            if executable is not None:
                failure = self._launch(executable, pending, compiled)
                if failure is None:
                    return True
        began = time.perf_counter()
        replay(pending, pending.seeds)
        if executable is not None and failure is not None:  # else an operation has failed, which raised just now
            self._demote(compiled, executable, last, failure)
        else:
            compiled.seconds += time.perf_counter() - began
            self._consider_xla(compiled, last)
        return False

    def _launch(self, executable: Executable, pending: Pending, compiled: Compiled) -> str | None:
        """Launches; returns None, or why that came to nothing, and then nothing was written."""
        flight = pending.flight
        began = time.perf_counter()
        pending.executable = executable
        try:
            if flight is None:
                results = executable.launch(pending.feeds, pending.seeds, pending.results)
            else:
                results = flight.land()
        except Exception as error:  # the replay tells whether it was an operation or the executable that failed
            pending.results.extend(flight.into if flight is not None else ())
            if pending.results:  # neither: it is done, and what failed is Python, behind it
                raise
            return reason_of(error)
        took = time.perf_counter() - began
        self.ledger.count("launches")
        if executable.launches == 1:  # when TensorFlow prepares it
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
        self._consider_xla(compiled, pending.last)
        return None

    def _validate(self, executable: Executable, pending: Pending, compiled: Compiled, options: Options) -> bool:
        """Carries the segment out twice; where the executable does something else, it is not launched again.

        Returns whether it could be launched.
        """
        self.ledger.count("validated", "launches")
        try:
            difference = validate(executable, pending)
        except Declined as declined:
            self._demote(compiled, executable, pending.last, str(declined))
            return False
        finally:
            if executable.launches == 1:
                self.ledger.count(loaded=executable.loaded)
        executable.trusted = True
        if difference is not None:
            with self._lock:
                self._families.give_up(executable)
                for key in [key for key, known in self._executables.items() if known is executable]:
                    del self._executables[key]
                for user in [compiled, *(c for c in self._all if c is not compiled)]:
                    user.discard(executable)
            self.found(f"{executable.backend}: {difference}", pending.last.place, options)
        return True

    def _is_new(self, executable: Executable, options: Options) -> bool:
        """Whether an executable was never compared with its operations, and is to be."""
        return validates_new and not (executable.trusted or options.trusting) and executable.size <= MAX_SIZE

    def found(self, text: str, place: str, options: Options) -> None:
        """Notes that something compiled or followed as one was not what the program does; strict functions raise."""
        hint = "if it is more than the rounding of sums that cancel, report it; it is not used any more"
        self.ledger.cause(Kind.VALIDATION, text, place, hint)
        if options.strict:
            raise Divergence(f"{text}, at {place}")

    def _demote(self, compiled: Compiled, executable: Executable, last: Step, reason: str) -> None:
        """Takes a backend away from a segment that failed there and not eagerly."""
        compiled.alarms += 1
        if reason == CHECKED and compiled.alarms < MAX_ALARMS:
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

    def _compile(self, compiled: Compiled, last: Step, alive: list[int]) -> Executable | None:
        """Returns an executable that gives out what is alive, if the segment is worth one by now."""
        jit = self.options.jit_compile
        with self._lock, handling(None):
            compiled.wanted.update(alive)
            if compiled.executable is not None:
                compiled.widen()
                compiled.widenings += 1
                if compiled.widenings > MAX_WIDENINGS:
                    compiled.wanted = last.given()
            if not self._is_worth_it(last):
                return self._known(compiled, last)
            before = time.monotonic()
            if (jit is True or (thresholds.at_once and jit == "auto")) and not compiled.asked:
                compiled.asked = True
                compiled.executable = self._emit(compiled, last, "xla")
            if compiled.executable is None and last.live >= thresholds.small and not compiled.refused:
                compiled.adopt(self._emit(compiled, last, "graph"))
                compiled.refused = compiled.executable is None
                if jit == "auto" and not is_op_determinism_enabled() and (known := compiled.recall()) is not None:
                    self.ledger.cause(Kind.BACKEND, known, last.place)
            self._spent += time.monotonic() - before
            return compiled.executable

    def _known(self, compiled: Compiled, last: Step) -> Executable | None:
        """Returns a graph for a segment that is not worth one of its own yet: one that other sizes have."""
        xla_first = self.options.jit_compile is True or thresholds.at_once
        if xla_first or compiled.executable is not None or last.live < thresholds.small or not self._families.shares:
            return None
        plan = make_plan(last, tuple(sorted(compiled.wanted)))
        compiled.adopt(self._families.graph(plan) if plan.live and not plan.refusal else None)
        return compiled.executable

    def _is_worth_it(self, last: Step) -> bool:
        if last.visits < thresholds.visits:
            return False
        return last.visits >= OFTEN or self._spent < ALLOWANCE + SHARE * (time.monotonic() - self._began)

    def _emit(self, compiled: Compiled, last: Step, backend: str) -> Executable | None:
        plan = self._plan(compiled, last, backend)
        if plan is None:
            return None
        if backend == "graph" and self._on_cpu:
            return self._families.graph(plan, lambda given: self._made(plan, backend, last.place, given))
        return self._made(plan, backend, last.place)

    def _made(self, plan: Plan, backend: str, place: str, given: dict[Any, int] | None = None) -> Executable | None:
        """Returns an executable for a plan, or a graph that takes these of its constants as arguments."""
        executable = self._executables.get((backend, plan.content)) if given is None else None
        if executable is None and (executable := self._new(plan, backend, place, given)) is not None:
            self._register(plan, executable, "" if given is None else "shared ")
        return executable

    def _plan(self, compiled: Compiled, last: Step, backend: str) -> Plan | None:
        """Returns what the backend is to compile; None, with the reason kept, if it cannot or need not."""
        place = last.place
        plan = make_plan(last, tuple(sorted(compiled.wanted)))
        if plan.live == 0 or plan.refusal:
            compiled.refused = True
            if plan.refusal:
                self.ledger.cause(Kind.IMPERATIVE, plan.refusal, place)
            return None
        if backend == "xla" and (refusal := plan.refusal_by_xla(LEAST)):
            self.ledger.cause(Kind.XLA, refusal, place)
            return None
        return plan

    def _new(self, plan: Plan, backend: str, place: str, given: dict[Any, int] | None = None) -> Executable | None:
        try:
            executable = Executable(plan, backend, given)
        except Exception as error:  # whatever cannot be emitted runs otherwise, with the reason kept
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
        """Lets segments of equal content share an executable; beyond a bound, others go. Under the lock."""
        self._executables[kind + executable.backend, plan.content] = executable
        if len(self._executables) > MAX_EXECUTABLES or self._operations() > MAX_OPERATIONS:
            held = [c for c in self._all if c.executable is not None or c.rival is not None]
            for compiled in sorted(held, key=lambda c: c.used)[: len(held) // 4 + 1]:
                compiled.widen()

    def _operations(self) -> int:
        return sum(executable.ops for executable in list(self._executables.values()))

    def _consider_xla(self, compiled: Compiled, last: Step) -> None:
        """Asks XLA for a segment that has taken enough time to pay for it, in the background."""
        if compiled.asked or compiled.refused or process.forked:
            return
        soon = self.options.xla_soon and last.visits >= SOON
        if not soon and not compiled.is_worth_xla(thresholds.price, last.live):
            return
        if last.visits < thresholds.visits:
            return
        compiled.asked = True
        if self.options.jit_compile != "auto" or is_op_determinism_enabled():
            return  # where runs are to be equal to the bit, time decides nothing
        with self._lock, handling(None):
            plan = self._plan(compiled, last, "xla")
            if plan is None:
                return
            if plan.size > MAX_SIZE:
                text = "it is too large to be compiled beside the program; jit_compile=True has it compiled at once"
                self.ledger.cause(Kind.XLA, text, last.place)
                return
            shared = self._executables.get(("xla", plan.content))
            if shared is not None:
                compiled.compete(shared, self._on_cpu)
                return
            asked = self._asked[last.op, last.frames]
            if len(asked) >= MAX_XLA and hash(plan.content) not in asked:
                text = f"XLA has compiled {MAX_XLA} segments that end here, for other shapes, and never frees its code"
                self.ledger.cause(Kind.XLA, text, last.place)
                return
            asked.add(hash(plan.content))
        place, device, generation = last.place, context.context().device_name, self._generation

        def compile_by_xla() -> None:
            if generation != self._generation:  # all was cleared meanwhile
                return
            if not soon and compiled.is_uncounted(plan.live):
                compiled.ops = min(plan.live, left_by_loops(plan))
                if not compiled.is_worth_xla(thresholds.price, plan.live):
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
                    if compiled.asked and compiled.wanted == executable.given:  # else it has changed meanwhile
                        compiled.compete(executable, self._on_cpu)

        if not background.submit(f"compiling {plan.live} operations before {place} by XLA", compile_by_xla):
            compiled.asked, compiled.seconds = False, 0.0  # later, perhaps

    def clear(self) -> None:
        """Lets go of every executable; one that a running call launches is released after it."""
        with self._lock:
            self._generation += 1
            self.decisions.clear()
            self.twins, self._families = Twins(), Families()
            for compiled in self._all:
                compiled.widen()
            self._all.clear()
