"""Compares and times the variants of one program, in a process of its own, which `examples.bench.programs` starts.

First each variant builds the program anew and makes some steps, one variant after the other and from the same seeds,
and is compared with eager. Then those that are right go on in turns: after steps that are not timed, each makes one
step in each round. Steps of one number are compared, since many a program has other data, and another way to go, in
every step. That is also why all make as many steps before the first that is timed, though only co-execution needs them.
"""

import functools
import gc
import importlib
import json
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import coexec
from examples.bench.compare import Course, leaves, reason, unreadable, verdict
from examples.bench.rows import OURS, VARIANTS, Plan, Row, Variant, save, without_root
from examples.programs import PROGRAMS, Program

DECORATORS: dict[str, Callable] = {
    "eager": lambda function: function,
    "coexec": coexec.function,
    "control flow": coexec.function(control_flow=True),
    "regions off": coexec.function(regions=False),
    "tf.function": tf.function,
    "jit": tf.function(jit_compile=True),
}


OTHER_SEED = 1234567
OTHER_DRAWS = "draws other random numbers than eager; what depends on them is not compared"


class Runner:
    """A variant while it runs."""

    def __init__(self, program: Program, variant: Variant, plan: Plan) -> None:
        self.program, self.variant, self.plan = program, variant, plan
        self.made: list[Any] = []  # the functions that the program had decorated
        self.course: Course | None = None
        self.start = time.monotonic()
        self.before: Counter[str] = Counter()

    def decorate(self, function: Callable) -> Callable:
        """Decorates a function of the program as this variant does."""
        self.made.append(DECORATORS[self.variant.name](function))
        return self.made[-1]

    def patient(self) -> bool:
        """Whether this variant may go on; eager may always."""
        return self.variant.name == "eager" or time.monotonic() - self.start < self.plan.patience

    def compare(self, eager: Course | None, redrawn: Callable[[], Course]) -> None:
        """Makes the first steps, and notes the first in which they were not eager's.

        `tf.function` derives the seeds of random operations in a way of its own, which is no fault: where it differs,
        it is compared again, leaving out what differs between eager runs with one random seed and another.
        """
        gc.collect()
        before = forget_peak()
        self.course = course(self.program, self.decorate, self.plan, self.patient)
        after = peak_mib()
        if before is not None and after is not None:
            self.variant.memory = max(0.0, after - before)
        self.course.last = self.course.state()
        self.variant.first_call = self.course.seconds[0] if self.course.seconds else None
        if eager is None:
            self.variant.error = f"fails: {self.course.error}" if self.course.error else unreadable(self.course)
            return
        tolerance = self.program.rtol, self.program.atol
        self.variant.error = verdict(eager, self.course, *tolerance)
        if (self.variant.error or "").startswith("wrong") and self.variant.name not in OURS:
            self.variant.error = verdict(eager, self.course, *tolerance, redrawn())
            self.variant.note = OTHER_DRAWS if self.variant.error is None else None
        self.look_at_the_clock()

    def look_at_the_clock(self) -> None:
        """Notes a variant that took too long."""
        if self.variant.error is None and not self.patient():
            took, steps = time.monotonic() - self.start, len(self.course.seconds)
            self.variant.error = f"too slow: {steps} steps and their compilation took {took:.0f} s"

    def goes_on(self) -> bool:
        """Whether to time this variant: if it is right, or wrong and ours, for whose speed nobody will be fooled."""
        ours_and_wrong = self.variant.name in OURS and (self.variant.error or "").startswith("wrong")
        return self.variant.error is None or ours_and_wrong

    def warm_up(self) -> None:
        """Makes the steps that are not timed."""
        self.start = time.monotonic() - sum(self.course.seconds)  # others ran in between
        for _ in range(self.plan.warm_up):
            if not self.patient():
                break
            self.course.seconds.append(self.timed_step())
        self.look_at_the_clock()
        self.before = self.counts()

    def timed_step(self) -> float:
        """Makes a step and returns how long it took until its results could be read."""
        start = time.perf_counter()
        leaves(self.course.training.step(), "losses")
        if accelerators():
            tf.test.experimental.sync_devices()
        return time.perf_counter() - start

    def time(self) -> None:
        """Makes a step that counts."""
        self.variant.seconds.append(self.timed_step())

    def counts(self) -> Counter[str]:
        """What co-execution counted so far, in all functions of the program together."""
        total: Counter[str] = Counter()
        for stats in (function.stats() for function in self.made if isinstance(function, coexec.Function)):
            numbers = {f.name: getattr(stats, f.name) for f in fields(stats)}
            total.update({name: number for name, number in numbers.items() if isinstance(number, int)})
        return total

    def finish(self) -> None:
        """Notes what was counted."""
        after = self.counts()
        self.variant.counts = dict(after)
        self.variant.timed_counts = {name: after[name] - self.before[name] for name in after}
        explanations = (f.explain() for f in self.made if isinstance(f, coexec.Function))
        self.variant.explanation = without_root("\n".join(explanations))[:4000]


def course(
    program: Program,
    decorate: Callable,
    plan: Plan,
    go_on: Callable[[], bool] = lambda: True,
    seed: int | None = None,
) -> Course:
    """The first steps of a program, whose own seed of TensorFlow's random operations another may replace."""
    keras.utils.set_random_seed(0)  # programs seed themselves; what one forgot is at least the same for all
    made = Course(program.build(decorate, published=plan.published))
    if seed is not None:
        tf.random.set_seed(seed)
    made.run(plan.compared, go_on)
    return made


def measure(
    program: Program,
    plan: Plan,
    skip: dict[str, str] | None = None,
    say: Callable[[Row], None] = lambda row: None,
) -> Row:
    """Compares and times all variants but those in `skip`, whose errors are given; says what it is at."""
    row = Row(program.name, program.origin, devices=accelerators())
    skip = skip or {}

    @functools.cache
    def redrawn() -> Course:
        other = course(program, DECORATORS["eager"], plan, seed=OTHER_SEED)
        other.last = other.state()
        return other

    def now(runner: Runner | None, doing: str) -> None:
        row.running, row.doing = runner and runner.variant.name, doing
        row.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        say(row)

    try:
        # A step that counts for nobody: kernels and libraries load on first use.
        program.build(DECORATORS["eager"], published=plan.published).step()
        runners: dict[str, Runner] = {}
        for name in VARIANTS:
            row.variants[name] = Variant(name, skip.get(name))
            if name in skip:
                continue
            runner = Runner(program, row.variants[name], plan)
            now(runner, f"comparing {name}")
            runner.compare(runners["eager"].course if runners else None, redrawn)
            if name == "eager" and runner.variant.error:
                row.error = f"eager {runner.variant.error}"
                return row
            if runner.goes_on():
                runners[name] = runner
            elif runner.variant.name in OURS:
                runner.finish()
        redrawn.cache_clear()  # it was to be compared with, and would take memory
        for runner in list(runners.values()):
            now(runner, f"warming up {runner.variant.name}")
            attempt(runner, runner.warm_up)
            if not runner.goes_on():
                del runners[runner.variant.name]
        take_turns(list(runners.values()), plan.rounds, now)
        for runner in runners.values():
            runner.finish()
    except Exception as error:  # of a program's factory, or of eager beyond the steps that are compared
        row.error = reason(error)
    finally:
        row.finished = True
        now(None, "")
    return row


def take_turns(runners: list[Runner], rounds: int, now: Callable[[Runner, str], None]) -> None:
    """Times one step of each variant in each round; another variant begins each time."""
    for number in range(rounds):
        turn = number % len(runners)
        for runner in runners[turn:] + runners[:turn]:
            patient = runner.variant.name == "eager" or sum(runner.variant.seconds) < runner.plan.patience
            if patient and runner.goes_on():
                now(runner, f"timing {runner.variant.name}, round {number + 1} of {rounds}")
                attempt(runner, runner.time)


def attempt(runner: Runner, what: Callable[[], None]) -> None:
    """Does something; if it fails, so does the variant from there on. Without eager, there is nothing to measure."""
    try:
        what()
    except Exception as error:
        if runner.variant.name == "eager":
            raise
        runner.variant.error, runner.variant.seconds = f"fails in a later step: {reason(error)}", []


def accelerators() -> list[str]:
    """The devices beside the processor."""
    return [device.name for device in tf.config.list_physical_devices() if device.device_type != "CPU"]


def forget_peak() -> float | None:
    """Makes the system forget the greatest size of this process; returns its size in MiB, None where that cannot be."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return peak_mib()


def peak_mib() -> float | None:
    """The greatest size of this process since `forget_peak`, in MiB."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) / 1024 if found else None


def main(arguments: list[str]) -> None:
    """Measures the program of a name and writes its row, all the while, to a file."""
    name, file, plan, skip = arguments
    importlib.import_module(f"examples.programs.{name}")
    measure(PROGRAMS[name], Plan(**json.loads(plan)), json.loads(skip), lambda row: save(row, Path(file)))


if __name__ == "__main__":
    main(sys.argv[1:])
