"""Segments: what has been compiled for a cut, and how a segment is carried out."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from coexec.compile.executable import Executable
from coexec.events import Kind, Ledger
from coexec.lowering.plan import make_plan
from coexec.options import Options
from coexec.runtime.replay import replay
from tracer.graph import Step
from tracer.intercept import handling


@dataclass(frozen=True)
class Thresholds:
    """When a segment is worth an executable; before, its operations run one by one. Visits are calls that came by.

    Measured on two cores: an eager operation takes 6-10 us; a launch of a TensorFlow graph 80 us, most of it for waking
    TensorFlow's threads; one of an XLA executable 16 us, but its compilation some 30 ms.
    """

    visits: int = 2
    small: int = 8  # operations: fewer are never launched as a graph, and compiled by XLA only after
    visits_of_small: int = 8  # this many visits


thresholds = Thresholds()

# An operation takes 1 ms to emit and compile and saves 10 us a launch. Programs whose paths keep changing would do
# little else: one with a gate per layer took 1.5 times as long as eagerly. So, beyond an allowance, compiling takes no
# more than this share of the time since the first call, but for segments that have come by often.
ALLOWANCE = 5.0  # seconds
SHARE = 0.2
OFTEN = 32  # visits

# The tensors read behind a cut may differ from call to call; after this many widenings all are given out.
MAX_WIDENINGS = 4

# So often may the checks of an XLA executable fail where no operation fails eagerly (a cast that wraps around, say).
MAX_ALARMS = 4
_ALARM = "its checks keep failing, though no operation fails"


class Compiled:
    """What a cut's step keeps: the executable, if any, and why not."""

    __slots__ = ("alarms", "executable", "refused", "wanted", "widenings")

    def __init__(self) -> None:
        self.executable: Executable | None = None
        self.alarms = 0
        self.wanted: set[int] = set()
        self.widenings = 0
        self.refused = False


class Segments:
    """Carries out segments for one function: launches what is compiled, compiles what comes again."""

    def __init__(self, options: Options, ledger: Ledger) -> None:
        self.options = options
        self.ledger = ledger
        self.has_regions = False  # whether some library call has been jumped over
        self.told: set[Any] = set()  # what the ledger has been told of library calls
        self._began = time.monotonic()
        self._spent = 0.0  # seconds, for compiling
        self._lock = threading.RLock()
        self._all: list[Compiled] = []
        self._executables: weakref.WeakValueDictionary[Any, Executable] = weakref.WeakValueDictionary()

    def run(self, last: Step, feeds: list[Any], values: list[Any], alive: list[int]) -> None:
        """Computes the tensors numbered `alive`, and does every write, of the segment that ends behind `last`."""
        last.visits += 1
        compiled = last.executables
        if compiled is None:
            compiled = last.executables = Compiled()
            self._all.append(compiled)
        executable, failure = None, None
        if not compiled.refused:
            executable = compiled.executable
            if executable is None or not compiled.wanted.issuperset(alive):
                compiled.wanted.update(alive)
                executable = self._compile(compiled, last) if self._is_worth_it(last) else None
            if executable is not None:
                failure = self._launch(executable, feeds, values)
                if failure is None:
                    return
        replay(last.chain(), feeds, values)
        if executable is not None and failure is not None:  # else an operation has failed, which raised just now
            self._demote(compiled, executable, last, failure)

    def _is_worth_it(self, last: Step) -> bool:
        small = last.live < thresholds.small and self.options.jit_compile is not True
        if last.visits < (thresholds.visits_of_small if small else thresholds.visits):
            return False
        return last.visits >= OFTEN or self._spent < ALLOWANCE + SHARE * (time.monotonic() - self._began)

    def _launch(self, executable: Executable, feeds: list[Any], values: list[Any]) -> str | None:
        """Launches; returns None, or why that came to nothing, and then nothing was written."""
        began = time.monotonic() if executable.launches == 0 else None  # when it is that XLA compiles
        try:
            results = executable.launch(feeds)
            if began is not None:
                self._spent += time.monotonic() - began
        except Exception as error:  # the replay tells whether it was an operation or the executable that failed
            return str(error).partition("\n")[0][:300] or type(error).__name__
        self.ledger.count("launches")
        if results is None:
            return _ALARM
        for number, tensor in zip(executable.outputs, results, strict=False):
            lazy = values[number]
            if lazy is not None:
                lazy._value = tensor
        return None

    def _demote(self, compiled: Compiled, executable: Executable, last: Step, reason: str) -> None:
        """Takes a backend away from a segment that failed there and not eagerly."""
        compiled.alarms += 1
        if reason == _ALARM and compiled.alarms < MAX_ALARMS:
            return
        location = last.node.location if last.node else ""
        if executable.backend == "xla":
            self.ledger.cause(Kind.XLA, reason, location)
            with self._lock, handling(None):
                compiled.executable = self._emit(compiled, last, "graph")
        else:
            self.ledger.cause(Kind.IMPERATIVE, reason, location)
            compiled.executable = None
            compiled.refused = True

    def _compile(self, compiled: Compiled, last: Step) -> Executable | None:
        with self._lock, handling(None):
            if compiled.executable is not None:
                compiled.widenings += 1
                if compiled.widenings > MAX_WIDENINGS:
                    compiled.wanted = {
                        s.first + n for s in last.chain() for n, o in enumerate(s.outputs) if o.const is None
                    }
            before = time.monotonic()
            compiled.executable = self._emit(compiled, last, None)
            self._spent += time.monotonic() - before
            return compiled.executable

    def _emit(self, compiled: Compiled, last: Step, backend: str | None) -> Executable | None:
        location = last.node.location if last.node else ""
        plan = make_plan(last, tuple(sorted(compiled.wanted)), not tf.config.list_physical_devices("GPU"))
        if plan.live == 0:
            compiled.refused = True
            return None
        if plan.refusal:
            compiled.refused = True
            self.ledger.cause(Kind.IMPERATIVE, plan.refusal, location)
            return None
        if backend is None:
            backend = self._choose(plan.xla_refusal, location)
        if backend == "graph" and plan.live < thresholds.small:
            compiled.refused = True  # one by one is faster
            return None
        content = plan.content
        for candidate in ("xla", "graph") if backend == "xla" else ("graph",):
            shared = self._executables.get((candidate, content))
            if shared is not None:
                return shared
            try:
                executable = Executable(plan, candidate)
            except Exception as error:  # whatever cannot be emitted runs operation by operation, with the reason kept
                kind = Kind.XLA if candidate == "xla" else Kind.IMPERATIVE
                self.ledger.cause(kind, f"{type(error).__name__}: {str(error)[:300]}", location)
                continue
            self._executables[candidate, content] = executable
            self.ledger.compiled(plan.live)
            return executable
        compiled.refused = True
        return None

    def _choose(self, xla_refusal: str | None, location: Any) -> str:
        if self.options.jit_compile is False:
            return "graph"
        if xla_refusal is not None:
            self.ledger.cause(Kind.XLA, xla_refusal, location)
            return "graph"
        return "xla"

    def clear(self) -> None:
        """Lets go of every executable; one that a running call launches is released after it."""
        with self._lock:
            for compiled in self._all:
                compiled.executable = None
            self._all.clear()
