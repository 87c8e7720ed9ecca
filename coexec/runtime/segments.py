"""Segments: what has been compiled for a cut, and how a segment is carried out."""

from __future__ import annotations

import threading
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

# The tensors read behind a cut may differ from call to call; after this many widenings all are given out.
MAX_WIDENINGS = 4


class Compiled:
    """What a cut's step keeps: the executable, if any, and why not."""

    __slots__ = ("executable", "refused", "wanted", "widenings")

    def __init__(self) -> None:
        self.executable: Executable | None = None
        self.wanted: set[int] = set()
        self.widenings = 0
        self.refused = False


class Segments:
    """Carries out segments for one function: launches what is compiled, compiles what comes again."""

    def __init__(self, options: Options, ledger: Ledger) -> None:
        self.options = options
        self.ledger = ledger
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
        if not compiled.refused:
            executable = compiled.executable
            if executable is None or not compiled.wanted.issuperset(alive):
                compiled.wanted.update(alive)
                executable = self._compile(compiled, last) if last.visits >= self._visits_needed(last) else None
            if executable is not None and self._launch(compiled, executable, last, feeds, values):
                return
        replay(last.chain(), feeds, values)

    def _visits_needed(self, last: Step) -> int:
        if last.live >= thresholds.small or self.options.jit_compile is True:
            return thresholds.visits
        return thresholds.visits_of_small

    def _launch(
        self, compiled: Compiled, executable: Executable, last: Step, feeds: list[Any], values: list[Any]
    ) -> bool:
        try:
            results = executable.launch(feeds)
        except Exception as error:  # nothing was written: the replay tells whether an operation failed, or the launch
            self._demote(compiled, executable, last, error)
            return False
        self.ledger.count("launches")
        if results is None:
            return False
        for number, tensor in zip(executable.outputs, results, strict=False):
            values[number]._value = tensor
        return True

    def _demote(self, compiled: Compiled, executable: Executable, last: Step, error: Exception) -> None:
        if executable.launches:
            return  # it has worked before, so an operation failed on these values
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        location = last.node.location if last.node else ""
        if executable.backend == "xla" and self.options.jit_compile is not False:
            self.ledger.cause(Kind.XLA, f"XLA declined: {reason}", location)
            compiled.executable = self._emit(compiled, last, "graph")
        elif executable.backend == "graph":
            compiled.refused = True
            compiled.executable = None
            self.ledger.cause(Kind.IMPERATIVE, f"the graph failed: {reason}", location)

    def _compile(self, compiled: Compiled, last: Step) -> Executable | None:
        with self._lock, handling(None):
            if compiled.executable is not None:
                compiled.widenings += 1
                if compiled.widenings > MAX_WIDENINGS:
                    compiled.wanted = {
                        s.first + n for s in last.chain() for n, o in enumerate(s.outputs) if o.const is None
                    }
            compiled.executable = self._emit(compiled, last, None)
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
