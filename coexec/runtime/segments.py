"""Segments: what has been compiled for a cut, and how a segment is carried out."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from coexec.compile.background import background
from coexec.compile.executable import Executable
from coexec.events import Kind, Ledger
from coexec.lowering.plan import Plan, make_plan
from coexec.options import Options
from coexec.runtime.replay import replay
from coexec.runtime.tiers import Compiled
from tracer.graph import Step
from tracer.intercept import handling
from tracer.private import context, is_op_determinism_enabled


@dataclass(frozen=True)
class Thresholds:
    """When a segment is worth an executable; before, its operations run one by one. Visits are calls that came by.

    Measured on two cores: an eager operation takes 6-10 us; a launch of a TensorFlow graph 80 us, most of it for waking
    TensorFlow's threads; one of an XLA executable 16 us, but its compilation 30 ms and up to 20 ms an operation.
    """

    visits: int = 2
    small: int = 8  # operations: fewer are never launched as a graph
    price: float = 2e-3  # seconds for each operation: what a segment must have taken before XLA is asked
    at_once: bool = False  # XLA is asked first, and waited for


thresholds = Thresholds()

# An operation takes 0.2 ms to emit and compile and saves 10 us a launch. Programs whose paths keep changing would do
# little else. So, beyond an allowance, compiling takes no more than this share of the time since the first call, but
# for segments that have come by often.
ALLOWANCE = 5.0  # seconds
SHARE = 0.2
OFTEN = 32  # visits

# The tensors read behind a cut may differ from call to call; after this many widenings all are given out.
MAX_WIDENINGS = 4

# Executables of one function; beyond, those launched longest ago go, and are compiled anew if they come again.
MAX_EXECUTABLES = 1000

# Bytes that a segment takes in: XLA compiles it beside the program by a launch on as many of its own.
MAX_SIZE = 1 << 30

# So often may the checks of an XLA executable fail where no operation fails eagerly (a cast that wraps around, say).
MAX_ALARMS = 4
_ALARM = "its checks keep failing, though no operation fails"


class Segments:
    """Carries out segments for one function: launches what is compiled, compiles what comes again."""

    def __init__(self, options: Options, ledger: Ledger) -> None:
        self.options = options
        self.ledger = ledger
        self.has_regions = False  # whether some library call has been jumped over
        self.told: set[Any] = set()  # what the ledger has been told of library calls
        self._on_cpu = not tf.config.list_physical_devices("GPU")
        self._clock = itertools.count()
        self._generation = 0  # of all that is compiled
        self._began = time.monotonic()
        self._spent = 0.0  # seconds, for compiling
        self._lock = threading.RLock()
        self._all: list[Compiled] = []
        self._executables: weakref.WeakValueDictionary[Any, Executable] = weakref.WeakValueDictionary()

    def run(self, last: Step, feeds: list[Any], values: list[Any], alive: list[int]) -> bool:
        """Computes the tensors numbered `alive`, and does every write, of the segment that ends behind `last`.

        Returns whether that was one launch.
        """
        last.visits += 1
        compiled = last.executables
        if compiled is None:
            compiled = last.executables = Compiled()
            self._all.append(compiled)
        compiled.used = next(self._clock)
        executable, failure = None, None
        if not compiled.refused:
            executable = compiled.next()
            if executable is None or not executable.given.issuperset(alive):
                executable = self._compile(compiled, last, alive)
            if executable is not None:
                failure = self._launch(executable, feeds, values, compiled, last)
                if failure is None:
                    return True
        began = time.perf_counter()
        replay(last.chain(), feeds, values)
        if executable is not None and failure is not None:  # else an operation has failed, which raised just now
            self._demote(compiled, executable, last, failure)
        else:
            compiled.seconds += time.perf_counter() - began
            self._consider_xla(compiled, last)
        return False

    def _launch(
        self, executable: Executable, feeds: list[Any], values: list[Any], compiled: Compiled, last: Step
    ) -> str | None:
        """Launches; returns None, or why that came to nothing, and then nothing was written."""
        began = time.perf_counter()
        try:
            results = executable.launch(feeds)
        except Exception as error:  # the replay tells whether it was an operation or the executable that failed
            return str(error).partition("\n")[0][:300] or type(error).__name__
        took = time.perf_counter() - began
        self.ledger.count("launches")
        if executable.launches == 1:  # when TensorFlow prepares it
            self._spent += took
        else:
            outcome = compiled.took(executable, took)
            if outcome is not None:
                self.ledger.cause(Kind.BACKEND, outcome, _place(last))
        if results is None:
            return _ALARM
        for number, tensor in zip(executable.outputs, results, strict=True):
            lazy = values[number]
            if lazy is not None:
                lazy._value = tensor
        self._consider_xla(compiled, last)
        return None

    def _demote(self, compiled: Compiled, executable: Executable, last: Step, reason: str) -> None:
        """Takes a backend away from a segment that failed there and not eagerly."""
        compiled.alarms += 1
        if reason == _ALARM and compiled.alarms < MAX_ALARMS:
            return
        if executable.backend == "xla":
            self.ledger.cause(Kind.XLA, reason, _place(last))
            compiled.asked = True
            if executable is compiled.rival:
                compiled.rival = None
                return
            with self._lock, handling(None):
                compiled.executable = self._emit(compiled, last, "graph")
        else:
            self.ledger.cause(Kind.IMPERATIVE, reason, _place(last))
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
                    compiled.wanted = {
                        s.first + n for s in last.chain() for n, o in enumerate(s.outputs) if o.const is None
                    }
            if not self._is_worth_it(last):
                return None
            before = time.monotonic()
            if (jit is True or (thresholds.at_once and jit == "auto")) and not compiled.asked:
                compiled.asked = True
                compiled.executable = self._emit(compiled, last, "xla")
            if compiled.executable is None and last.live >= thresholds.small and not compiled.refused:
                compiled.executable = self._emit(compiled, last, "graph")
                compiled.refused = compiled.executable is None
            self._spent += time.monotonic() - before
            return compiled.executable

    def _is_worth_it(self, last: Step) -> bool:
        if last.visits < thresholds.visits:
            return False
        return last.visits >= OFTEN or self._spent < ALLOWANCE + SHARE * (time.monotonic() - self._began)

    def _emit(self, compiled: Compiled, last: Step, backend: str) -> Executable | None:
        plan = self._plan(compiled, last, backend)
        if plan is None:
            return None
        executable = self._shared(plan, backend) or self._new(plan, backend, _place(last))
        if executable is not None:
            self._register(plan, executable)
        return executable

    def _plan(self, compiled: Compiled, last: Step, backend: str) -> Plan | None:
        """Returns what the backend is to compile; None, with the reason kept, if it cannot or need not."""
        place = _place(last)
        plan = make_plan(last, tuple(sorted(compiled.wanted)), self._on_cpu)
        if plan.live == 0 or plan.refusal:
            compiled.refused = True
            if plan.refusal:
                self.ledger.cause(Kind.IMPERATIVE, plan.refusal, place)
            return None
        if backend == "xla" and plan.xla_refusal:
            self.ledger.cause(Kind.XLA, plan.xla_refusal, place)
            return None
        return plan

    def _shared(self, plan: Plan, backend: str) -> Executable | None:
        return self._executables.get((backend, plan.content))

    def _new(self, plan: Plan, backend: str, place: str) -> Executable | None:
        try:
            executable = Executable(plan, backend)
        except Exception as error:  # whatever cannot be emitted runs otherwise, with the reason kept
            kind = Kind.XLA if backend == "xla" else Kind.IMPERATIVE
            self.ledger.cause(kind, f"{type(error).__name__}: {str(error)[:300]}", place)
            return None
        self.ledger.compiled(plan.live)
        return executable

    def _register(self, plan: Plan, executable: Executable) -> None:
        """Lets segments of equal content share an executable; beyond a bound, others go."""
        self._executables[executable.backend, plan.content] = executable
        if len(self._executables) > MAX_EXECUTABLES:
            with self._lock:
                held = [c for c in self._all if c.executable is not None or c.rival is not None]
                for compiled in sorted(held, key=lambda c: c.used)[: len(held) // 4 + 1]:
                    compiled.widen()

    def _consider_xla(self, compiled: Compiled, last: Step) -> None:
        """Asks XLA for a segment that has taken enough time to pay for it, in the background."""
        if compiled.asked or compiled.refused or compiled.seconds < thresholds.price * last.live:
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
                self.ledger.cause(Kind.XLA, text, _place(last))
                return
            shared = self._shared(plan, "xla")
        if shared is not None:
            compiled.compete(shared, self._on_cpu)
            return
        place, device, generation = _place(last), context.context().device_name, self._generation

        def compile_by_xla() -> None:
            if generation != self._generation:  # all was cleared meanwhile
                return
            executable = self._shared(plan, "xla") or self._new(plan, "xla", place)
            if executable is None:
                return
            if executable.launches == 0:
                try:
                    executable.prepare(device)
                except Exception as error:
                    self.ledger.cause(Kind.XLA, str(error).partition("\n")[0][:300] or type(error).__name__, place)
                    return
                executable.launches = 1
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
            for compiled in self._all:
                compiled.widen()
            self._all.clear()


def _place(last: Step) -> str:
    return str(last.node.location) if last.node is not None else ""
