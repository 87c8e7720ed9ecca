"""Shows what a few steps of a program do, eagerly and co-executed, one beside the other on a line of time.

The file is a Chrome trace: open it with chrome://tracing, or https://ui.perfetto.dev. Each call of a decorated function
says what it came to (followed, diverged, launches, compiles, ...); inside of it are the Python functions and the calls
of TensorFlow's C++, such as the launch of an executable (`TFE_Py_Execute`), as far as they took long enough to be seen.

Python's own profiling hook is what notes them. It makes Python several times slower, and compiled code not at all: the
picture shows what is called, and `examples.bench.programs` how long it takes.
"""

import contextlib
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import coexec
from examples.bench.rows import Plan, without_root
from examples.programs import PROGRAMS, Program

STEPS = 3
SHORTEST = 30e-6  # seconds: below, there are tens of thousands in a step
DECORATORS: dict[str, Callable] = {"eager": lambda function: function, "coexec": coexec.function}


class Timeline:
    """Spans of time of one thread, as events of the trace format, in microseconds."""

    def __init__(self, process: int, name: str, shortest: float = SHORTEST) -> None:
        self.process, self.shortest = process, shortest
        self.events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": process, "tid": 1, "args": {"name": name}}
        ]
        self.open: list[tuple[float, str, str]] = []
        self.running = False
        self.origin = time.perf_counter()

    def add(self, name: str, category: str, start: float, end: float, args: dict[str, Any] | None = None) -> None:
        """Adds a span between two readings of the clock."""
        self.events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": 1e6 * (start - self.origin),
                "dur": 1e6 * (end - start),
                "pid": self.process,
                "tid": 1,
                "args": args or {},
            }
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notes the calls of this thread; from now on, the clock stands at zero."""
        before, self.origin, self.running = sys.getprofile(), time.perf_counter(), True
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(before)
            self.open.clear()
            self.running = False

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        """What Python calls at each call and return of Python and C functions."""
        now = time.perf_counter()
        if event == "call":
            code = frame.f_code
            module = frame.f_globals.get("__name__", "?")
            self.open.append((now, f"{getattr(code, 'co_qualname', code.co_name)} ({module})", module.split(".")[0]))
        elif event == "c_call":
            self.open.append((now, arg.__name__, "C++"))
        elif self.open:  # the first return is that of what set the hook
            start, name, category = self.open.pop()
            if now - start >= self.shortest:
                self.add(name, category, start, now)

    def watched(self, decorated: Callable) -> Callable:
        """The function, each of whose calls says what co-execution counted in it."""

        @functools.wraps(decorated)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.running:
                return decorated(*args, **kwargs)
            before, start = counts(decorated), time.perf_counter()
            try:
                return decorated(*args, **kwargs)
            finally:
                after = counts(decorated)
                changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
                self.add(f"call of {decorated.__name__}", "call", start, time.perf_counter(), changed)

        return call


def counts(function: Any) -> dict[str, int]:
    """What a function counted so far; nothing if it is not co-executed."""
    if not isinstance(function, coexec.Function):
        return {}
    return {name: number for name, number in vars(function.stats()).items() if isinstance(number, int)}


def trace(program: Program, plan: Plan, steps: int = STEPS) -> dict[str, Any]:
    """The trace of some steps of a program, after it has settled, for each of the two ways to run it."""
    events, explanations = [], []
    for number, (name, decorator) in enumerate(DECORATORS.items(), start=1):
        timeline, made = Timeline(number, f"{program.name}, {name}"), []

        def decorate(function: Callable, timeline=timeline, made=made, decorator=decorator) -> Callable:
            made.append(decorator(function))
            return timeline.watched(made[-1])

        training = program.build(decorate, published=plan.published)
        for _ in range(plan.compared + plan.warm_up):
            training.step()
        with timeline.watching():
            for step in range(steps):
                start = time.perf_counter()
                training.step()
                timeline.add(f"step {plan.compared + plan.warm_up + step + 1}", "step", start, time.perf_counter())
        events += timeline.events
        explanations += [function.explain() for function in made if isinstance(function, coexec.Function)]
    said = without_root("\n".join(explanations))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"explain": said}}


def profile(name: str, path: Path, plan: Plan) -> None:
    """Writes the trace of a program."""
    importlib.import_module(f"examples.programs.{name}")
    path.write_text(json.dumps(trace(PROGRAMS[name], plan)))
    print(f"{path}: {STEPS} steps of {name}, eagerly and co-executed; open it with chrome://tracing or ui.perfetto.dev")
