"""Measures one example in a process of its own, which `python -m examples.ecosystem` starts.

First two runs of it, one as it is and one with its step decorated, take turns, and are timed. Then two more are made
one after the other from the same seeds, as random kernels that take turns would share their states, and what their
calls return is compared, and the state that they leave.
"""

import importlib
import json
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import keras

import coexec
from examples.bench.compare import difference, leaves, reason
from examples.bench.rows import without_root
from examples.ecosystem import EXAMPLES, Registered
from examples.ecosystem.rows import Plan, Row

COUNTED = ("launches", "regions", "imperative", "diverged", "followed")
# How much of a call is lost by one cause, roughly, so that the most expensive come first.
WEIGHTS = {
    "backed off": 50.0,
    "found by validation": 50.0,
    "failure of the runtime itself": 100.0,
    "divergence": 20.0,
    "library call not followed as one": 3.0,
    "not compiled": 1.0,
    "segment cut": 1.0,
    "failed operation": 1.0,
    "decision on a tensor": 0.2,
    "not compiled by XLA": 0.2,
    "backend chosen by measurement": 0.0,
    "compiled as loops": 0.0,
}
GRADIENT = 5.0  # times as much, as a gradient is half of a step


class Run:
    """One run of an example."""

    def __init__(self, registered: Registered, decorate: Any = None) -> None:
        keras.utils.set_random_seed(0)  # TensorFlow's, NumPy's and Python's
        self.example = registered.build()
        self.step = decorate(self.example.step) if decorate else self.example.step
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def call(self, number: int) -> dict[str, Any]:
        """Makes a call and returns what it returned, in parts; its time ends when the values can be read."""
        arguments = self.example.arguments[number % len(self.example.arguments)]
        wall, cpu = time.perf_counter(), time.process_time()
        found = leaves(self.step(*arguments), "value", 64)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        return found


def measure(name: str, module: str, plan: Plan, save: Any = lambda row: None) -> Row:
    """Measures an example; `save` is given the row in between."""
    row = Row(name, module)
    try:
        importlib.import_module(f"examples.ecosystem.{module}")
    except ImportError as error:
        row.skipped = f"{type(error).__name__}: {error}"
        return row
    registered = EXAMPLES[name]
    warm = Run(registered)
    for number in range(2):  # kernels are loaded, and what libraries make once per process
        warm.call(number)
    del warm
    clock(registered, plan, row)
    save(row)
    try:
        row.wrong = difference_from_eager(registered, plan.compared)
    except Exception as error:
        row.wrong = f"raises {reason(error)}"
    row.finished = True
    return row


def clock(registered: Registered, plan: Plan, row: Row) -> None:
    """Has an eager run and a co-executed one take turns."""
    warm, eager, followed = Run(registered), Run(registered), Run(registered, coexec.function)
    warm.call(0)  # seeding empties TensorFlow's cache of kernels, which whoever comes first would fill for the other
    del warm
    start, before, causes = time.process_time(), None, {}
    for number in range(plan.calls):
        took = time.process_time() - start
        if before is None and (number == plan.steady or (took > plan.seconds / 2 and number > plan.compared)):
            before, causes = counts(followed.step), told(followed.step)
            row.steady_from = number
        for run in (eager, followed) if number % 2 else (followed, eager):
            run.call(number)
        if took > plan.seconds and before is not None:
            break
    before = before or dict.fromkeys(COUNTED, 0)
    row.eager, row.followed = {"wall": eager.wall, "cpu": eager.cpu}, {"wall": followed.wall, "cpu": followed.cpu}
    after, calls = counts(followed.step), len(followed.wall) - row.steady_from
    row.counts = {name: (after[name] - before[name]) / calls for name in COUNTED}
    row.explanation = without_root(followed.step.explain())
    row.causes = expensive(causes, told(followed.step), calls)


def difference_from_eager(registered: Registered, calls: int) -> str | None:
    """What a co-executed run first does otherwise than an eager one; None if there is nothing."""
    tolerance = registered.rtol, registered.atol
    eager = Run(registered)
    values = [eager.call(number) for number in range(calls)]
    state = leaves(eager.example.state(), "state")
    followed = Run(registered, coexec.function)
    for number in range(calls):
        off = difference(values[number], followed.call(number), *tolerance)
        if off is not None:
            return f"call {number + 1}: {off}"
    off = difference(state, leaves(followed.example.state(), "state"), *tolerance)
    return off and f"after {calls} calls: {off}"


def counts(function: Any) -> dict[str, int]:
    """What co-execution has counted so far."""
    return {name: getattr(function.stats(), name) for name in COUNTED}


def told(function: Any) -> dict[tuple[str, str], int]:
    """How often each cause came, by its kind and text, from `explain()`."""
    found: dict[tuple[str, str], int] = {}
    for cause in function.explain().as_dict()["causes"]:
        line = without_root(re.sub(r"/\S*/site-packages/", "", cause["text"])).partition("\n")[0]
        key = cause["kind"], re.sub(r"0x\w+|\b\d+\b", "N", line)[:160]
        found[key] = found.get(key, 0) + cause["count"]
    return found


def expensive(before: dict[Any, int], after: dict[Any, int], calls: int) -> list[tuple[float, str, str]]:
    """How often each cause came in a call, those first that cost most; what never came any more is left out."""
    found = []
    for (kind, text), times in after.items():
        often = (times - before.get((kind, text), 0)) / calls
        weight = WEIGHTS.get(kind, 1.0) * (GRADIENT if "gradient" in text.lower() else 1.0)
        if often * weight > 0:
            found.append((often * weight, round(often, 2), kind, text))
    return [cause[1:] for cause in sorted(found, reverse=True)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    file = Path(sys.argv[3])
    result = measure(sys.argv[1], sys.argv[2], Plan(**json.loads(sys.argv[4])), lambda row: row.save(file))
    result.save(file)
