"""Segments: what has been compiled for a cut, and how a segment is carried out."""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from coexec.compile.executable import Executable
from coexec.events import Kind, Ledger
from coexec.lowering.plan import make_plan
from coexec.options import Options
from coexec.runtime.replay import replay
from tracer.graph import Step
from tracer.intercept import handling

# A segment is compiled when it comes for the second time; before, its operations run one by one.
COMPILE_ON_VISIT = 2

# One or two operations gain nothing from a launch, which costs as much as they do.
MIN_OPS = 1

# XLA takes tens of milliseconds for the smallest segment, which fewer operations than this hardly earn back.
MIN_XLA_OPS = 8

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
                executable = None
                if last.visits >= COMPILE_ON_VISIT:
                    executable = self._compile(compiled, last, alive, feeds)
                else:
                    compiled.wanted.update(alive)
            if executable is not None and self._launch(compiled, executable, last, feeds, values):
                return
        replay(last.chain(), feeds, values)

    def _launch(
        self, compiled: Compiled, executable: Executable, last: Step, feeds: list[Any], values: list[Any]
    ) -> bool:
        try:
            results = executable.launch(feeds)
        except Exception as error:  # nothing was written: the replay tells whether an operation failed, or the launch
            self._demote(compiled, executable, last, error)
            return False
        self.ledger.counts["launches"] += 1
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

    def _compile(self, compiled: Compiled, last: Step, alive: list[int], feeds: list[Any]) -> Executable | None:
        with self._lock, handling(None):
            compiled.wanted.update(alive)
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
        if plan.live < MIN_OPS and self.options.jit_compile is not True:
            compiled.refused = True
            return None
        if plan.refusal:
            compiled.refused = True
            self.ledger.cause(Kind.IMPERATIVE, plan.refusal, location)
            return None
        if backend is None:
            backend = self._choose(plan.xla_refusal, plan.live, location)
        for candidate in ("xla", "graph") if backend == "xla" else ("graph",):
            try:
                executable = Executable(plan, candidate)
            except Exception as error:  # whatever cannot be emitted runs operation by operation, with the reason kept
                kind = Kind.XLA if candidate == "xla" else Kind.IMPERATIVE
                self.ledger.cause(kind, f"{type(error).__name__}: {str(error)[:300]}", location)
                continue
            self.ledger.compiled(plan.live)
            return executable
        compiled.refused = True
        return None

    def _choose(self, xla_refusal: str | None, live: int, location: Any) -> str:
        if self.options.jit_compile is False:
            return "graph"
        if xla_refusal is not None:
            self.ledger.cause(Kind.XLA, xla_refusal, location)
            return "graph"
        return "xla" if live >= MIN_XLA_OPS or self.options.jit_compile is True else "graph"

    def clear(self) -> None:
        """Releases every executable."""
        with self._lock:
            for compiled in self._all:
                if compiled.executable is not None:
                    compiled.executable.release()
                    compiled.executable = None
            self._all.clear()
