"""Compares a variant with eager, call by call, and its speed with that of the program as it was, in turns."""

import gc
import importlib.util
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import keras

import coexec
from examples.bench.compare import Course, Leaves, difference, leaves, verdict
from examples.programs import Training
from examples.variants.rewrites import rewritten
from examples.variants.rows import Row
from examples.variants.source import NotApplicable, Source

RTOL, ATOL = 2e-3, 1e-4


@dataclass(frozen=True)
class Plan:
    """How much of each variant is run."""

    compared: int = 10  # calls, each of which is compared with eager's
    warm_up: int = 40  # calls after that, which are not
    rounds: int = 11
    calls: int = 10  # in a round
    xla: bool = False


class Running:
    """A variant, with a module of its own."""

    def __init__(self, source: Source, folder: Path, decorator: Callable) -> None:
        path = folder / f"{source.name}_{len(list(folder.iterdir()))}.py"
        path.write_text(source.text())
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.made: list[Any] = []

        def decorate(function: Callable) -> Callable:
            self.made.append(decorator(function))
            return self.made[-1]

        keras.utils.set_random_seed(0)
        self.training: Training = vars(module)[source.factory.name](decorate)
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def block(self, calls: int) -> None:
        """Times some calls behind one that pays for what others have left."""
        read(self.training.step())
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            read(self.training.step())
        self.cpu.append((time.process_time() - cpu) / calls)
        self.wall.append((time.perf_counter() - wall) / calls)

    def counts(self) -> Counter[str]:
        """What was counted so far."""
        total: Counter[str] = Counter()
        for stats in (f.stats() for f in self.made):
            total.update({f.name: n for f in fields(stats) if isinstance(n := getattr(stats, f.name), int)})
        return total


def read(result: Any) -> None:
    """Waits for a result."""
    leaves(result, "losses")


class Bench:
    """A base program, which runs all the while beside its variants."""

    def __init__(self, source: Source, plan: Plan) -> None:
        self.source, self.plan = source, plan
        self.folder = Path(tempfile.mkdtemp(prefix="variants-"))
        self.decorator = coexec.function if plan.xla else coexec.function(jit_compile=False)
        self.course, self.original = self._compared(Running(source, self.folder, lambda function: function))
        self.eager = statistics.median(self.course.seconds[2:])
        row, running = self.run(())
        if running is None:
            raise ValueError(f"{source.name}: {row.error}")
        self.original = running
        self._warm_up(self.original)
        before = self.original.counts()
        for _ in range(plan.rounds):
            self.original.block(plan.calls)
        self.per_call = per_call(self.original.counts() - before)

    def run(self, rewrites: tuple[str, ...]) -> tuple[Row, Running | None]:
        """Makes and compares a variant; returns nothing to be timed where it is wrong or cannot be made."""
        row = Row(self.source.name, rewrites)
        try:
            source = rewritten(self.source.copy(), rewrites)
            eager, _ = self._compared(Running(source, self.folder, lambda function: function))
        except NotApplicable as reason:
            row.error = f"not applicable: {reason}"
            return row, None
        except Exception as error:
            row.error = f"not applicable: eagerly {type(error).__name__}: {error}"
            return row, None
        if eager.error:
            row.error = f"not applicable: eagerly {eager.error}"
            return row, None
        if other := self._is_another(eager):
            row.error, row.wrong = f"the rewrite changes the program: {other}", True
            return row, None
        row.eager = statistics.median(eager.seconds[2:]) / self.eager
        try:
            followed, running = self._compared(Running(source, self.folder, self.decorator))
        except Exception as error:
            row.error, row.wrong = f"fails: {type(error).__name__}: {error}", True
            return row, None
        if found := verdict(eager, followed, RTOL, ATOL):
            row.error, row.wrong = found, True
            row.explanation = "\n".join(f.explain() for f in running.made)
            return row, None
        return row, running

    def measure(self, rewrites: tuple[str, ...]) -> Row:
        """Compares a variant with eager, and times it in turns with the original."""
        row, running = self.run(rewrites)
        if running is None:
            return row
        plan, original = self.plan, self.original
        try:
            self._warm_up(running)
            original.cpu, original.wall = [], []
            before = running.counts()
            for number in range(plan.rounds):
                for one in (original, running) if number % 2 else (running, original):
                    one.block(plan.calls)
        except Exception as error:
            row.error, row.wrong = f"fails later: {type(error).__name__}: {error}", True
            return row
        row.cpu, row.wall = ratio(running.cpu, original.cpu), ratio(running.wall, original.wall)
        counted = per_call(running.counts() - before)
        row.launches, row.regions, row.followed = (counted[n] for n in ("launches", "regions", "followed"))
        row.operations = counted["ops_followed"]
        row.more_launches = row.launches - self.per_call["launches"]
        row.fewer_regions = self.per_call["regions"] - row.regions
        row.explanation = "\n".join(f.explain() for f in running.made)
        known = set(causes("\n".join(f.explain() for f in original.made)))
        row.cause = next((c for c in causes(row.explanation) if c not in known), "") if row.falls_out else ""
        for function in running.made:
            function.clear()
        return row

    def _compared(self, running: Running) -> tuple[Course, Running]:
        gc.collect()
        course = Course(running.training)
        course.run(self.plan.compared)
        course.last = course.state()
        return course, running

    def _warm_up(self, running: Running) -> None:
        for _ in range(self.plan.warm_up):
            read(running.training.step())

    def _is_another(self, eager: Course) -> str | None:
        """How a rewritten program differs from the original where both are eager; state may be another's."""
        for mine, right in zip(eager.losses, self.course.losses, strict=False):
            if found := difference(first(right), first(mine), RTOL, ATOL):
                return found
        return None


def first(found: Leaves) -> Leaves:
    """The first number of a result, which may be in a container."""
    return {"loss": next(value for path, value in found.items() if not path.startswith("len("))}


def ratio(mine: list[float], its: list[float]) -> float:
    """The median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(mine, its, strict=True))


def per_call(counts: Counter[str]) -> dict[str, float]:
    """Counts for each call."""
    return {name: counts[name] / max(counts["calls"], 1) for name in
            ("launches", "regions", "followed", "ops_followed")}  # fmt: skip


def causes(explanation: str) -> Iterator[str]:
    """The causes in an explanation, without places and counts."""
    for line in explanation.splitlines():
        if found := re.match(r"  \d+ x (.*)", line):
            yield found.group(1)
