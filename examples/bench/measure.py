"""Times the variants of a case in turn, round by round, so that a busy machine slows all of them alike.

Each round has another order: whoever comes behind eager finds its memory still to be tidied up.

Times are medians over rounds, ratios to eager are medians of the ratios within a round. The first call is timed apart,
as are the first twenty; warm-up is not. The results of a variant's first calls are compared with eager's.
"""

import cProfile
import gc
import pstats
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tensorflow as tf

import coexec
from coexec.api import Function
from coexec.compile.compile_thread import background
from coexec.testing import is_settled
from examples.bench.case import Case, Program

WRAPPERS: dict[str, Callable] = {
    "eager": lambda step: step,
    "coexec": coexec.function,
    "tf.function": tf.function,
    "jit": lambda step: tf.function(step, jit_compile=True),
}
GRAPHS = ("tf.function", "jit")
COMPARED_CALLS = 5
EARLY_CALLS = 20  # that are timed from the first on, with whatever is learnt, traced and compiled in them
STEADY_CALLS = 10  # calls that are all followed, with nothing compiled, before the measurement starts
STEADY_SECONDS = 2.0  # that they take at least, for what is compiled only once it has taken some time,
UNSETTLED_SECONDS = 10.0  # and while XLA has not been asked yet
LONGEST_WARM_UP = 120.0  # seconds, for compilers that work in the background, beside the calls: XLA takes 40 for a GPT
LONGEST_CATCH_UP = 5.0  # seconds, for the calls of the others meanwhile
WARM_UP_CALLS = 100  # where nothing will ever be followed


@dataclass
class Variant:
    """One way to run a case, and what was measured of it."""

    name: str
    program: Program
    step: Callable
    error: str | None = None  # why it cannot run the case, or what it gets wrong
    early: list[float] = field(default_factory=list)  # seconds of each of the first calls
    block_seconds: list[float] = field(default_factory=list)
    results: list[np.ndarray] = field(default_factory=list)

    @property
    def per_call(self) -> float | None:
        """Seconds of one call, in the median round."""
        return statistics.median(self.block_seconds) if self.block_seconds else None

    @property
    def stats(self):
        """What the co-executed function counted so far; None for the other variants."""
        return self.step.stats() if self.name == "coexec" else None

    @property
    def first_call(self) -> float | None:
        """Seconds of the first call; None if the case cannot be run."""
        return self.early[0] if self.early and len(self.results) == COMPARED_CALLS else None

    @property
    def all_early(self) -> float | None:
        """Seconds of all of the first calls; None if there were fewer, as each takes so long."""
        return sum(self.early) if self.first_call is not None and len(self.early) == EARLY_CALLS else None

    def call(self):
        """Makes one call with the next arguments, and waits until its result can be read."""
        arguments = next(self.program.inputs)
        start = time.perf_counter()
        result = np.asarray(self.step(*arguments))
        if len(self.early) < EARLY_CALLS:
            self.early.append(time.perf_counter() - start)
        return result

    def block(self, calls: int) -> None:
        """Times `calls` calls behind one more, each up to the moment when its result can be read, as losses are.

        The first one pays for what another variant has left: its garbage, cold caches, threads that sleep.
        """
        arguments = [next(self.program.inputs) for _ in range(calls)]
        step = self.step
        np.asarray(step(*next(self.program.inputs)))
        start = time.perf_counter()
        for args in arguments:
            np.asarray(step(*args))
        self.block_seconds.append((time.perf_counter() - start) / calls)


@dataclass(frozen=True)
class Result:
    """A case, its variants, and what co-execution counted during the timed rounds."""

    case: Case
    variants: dict[str, Variant]
    launches: float | None  # per call
    share_followed: float | None  # of all operations

    def ratio(self, name: str) -> float | None:
        """The time of a call as a multiple of eager's in the same round; None if the variant cannot run."""
        return self._ratio(name, "eager")

    def ratio_to_graphs(self) -> float | None:
        """The time of a co-executed call as a multiple of the faster graph's that runs the case; None if none does."""
        ratios = [self._ratio("coexec", name) for name in GRAPHS if not self.variants[name].error]
        return max((ratio for ratio in ratios if ratio is not None), default=None)

    def ratio_to_function(self) -> float | None:
        """The time of a co-executed call as a multiple of `tf.function`'s."""
        return None if self.variants["tf.function"].error else self._ratio("coexec", "tf.function")

    def ratio_to_host(self) -> float | None:
        """The time of a co-executed call as a multiple of one whose decisions are all Python's."""
        return self._ratio("coexec", "host") if "host" in self.variants else None

    def _ratio(self, name: str, other: str) -> float | None:
        rounds = zip(self.variants[name].block_seconds, self.variants[other].block_seconds, strict=False)
        ratios = [mine / its for mine, its in rounds]
        return statistics.median(ratios) if ratios else None


def measure(case: Case, rounds: int, peers: Mapping[str, Callable[[], Program]] | None = None) -> Result:
    """Runs every variant of `case` for `rounds` rounds, after each has settled.

    `peers` builds the same step in other libraries, by name; what they return is not compared.
    """
    warm_tensorflow(case)
    variants = {}
    for name, wrap in (case.wrappers or WRAPPERS).items():
        if case.no_graphs and name in GRAPHS:
            variants[name] = Variant(name, case.build(), wrap, case.no_graphs)
        else:
            variants[name] = prepare(case.build, name, wrap)
    for variant in variants.values():
        if variant.results:
            compare(variant, variants["eager"])
    for name, build in (peers or {}).items():
        variants[name] = prepare(build, name, lambda step: step)
    runnable = [v for v in variants.values() if v.first_call is not None]
    calls = warm_up(variants["coexec"], case)
    for variant in runnable:
        if variant.name != "coexec":
            catch_up(variant, calls)
    before = variants["coexec"].stats
    order = random.Random(0)
    for _ in range(rounds):
        for variant in order.sample(runnable, len(runnable)):
            variant.block(case.calls)
    return Result(case, variants, *counted(before, variants["coexec"].stats))


def warm_tensorflow(case: Case) -> None:
    """Makes one eager call that counts for nobody: kernels and libraries load on first use."""
    program = case.build()
    program.step(*next(program.inputs))


def prepare(build: Callable[[], Program], name: str, wrap: Callable[[Callable], Callable]) -> Variant:
    """Builds one variant and makes its first calls; keeps the error if a compiler raises one."""
    program = build()
    variant = Variant(name, program, wrap(program.step))
    try:
        for _ in range(COMPARED_CALLS):
            variant.results.append(variant.call())
    except Exception as error:
        if name in ("eager", "coexec"):
            raise
        variant.error = f"fails: {one_line(error)}"
    return variant


def warm_up(variant: Variant, case: Case) -> int:
    """Calls until the function is followed steadily, or gives up; returns how many calls it took."""
    calls = steady = 0
    changed = began = time.monotonic()
    while time.monotonic() < began + LONGEST_WARM_UP and (case.follows or calls < WARM_UP_CALLS):
        before = variant.stats
        variant.call()
        after = variant.stats
        calls += 1
        steady = steady + 1 if after.followed > before.followed else 0
        if after.compiles > before.compiles or not background.wait(0):
            steady, changed = 0, time.monotonic()
        unsettled = isinstance(variant.step, Function) and not is_settled(variant.step)
        least = UNSETTLED_SECONDS if unsettled else STEADY_SECONDS
        if steady >= STEADY_CALLS and time.monotonic() > changed + least:
            break
    return calls


def catch_up(variant: Variant, calls: int) -> None:
    """Makes as many calls as co-execution has, as far as time allows: a trained model may do less in a step."""
    until = time.monotonic() + LONGEST_CATCH_UP
    for _ in range(calls):
        variant.call()
        if time.monotonic() > until:
            break


def compare(variant: Variant, eager: Variant) -> None:
    """Notes on `variant` the first call that returned something else than the same call of `eager`."""
    for number, (mine, right) in enumerate(zip(variant.results, eager.results, strict=False), start=1):
        if not np.allclose(mine, right, rtol=1e-3, atol=1e-5):
            variant.error = f"the result of call {number} is more than 0.1 % away"
            return


def counted(before, after) -> tuple[float | None, float | None]:
    """Launches per call and the share of operations followed, between two readings of the counters."""
    calls = after.calls - before.calls
    followed = after.ops_followed - before.ops_followed
    ops = followed + after.ops_recorded - before.ops_recorded
    return (after.launches - before.launches) / max(calls, 1), followed / ops if ops else None


def profile(case: Case, calls: int = 200) -> None:
    """Prints where the Python time of the co-executed variant goes, once it has settled."""
    variant = prepare(case.build, "coexec", (case.wrappers or WRAPPERS)["coexec"])
    warm_up(variant, case)
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(calls):
            variant.call()
    print(f"\n{case.name}: {calls} calls of the co-executed function")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


@dataclass(frozen=True)
class Memory:
    """The resident memory of this process around many calls of one variant, in MiB."""

    variant: str
    calls: int
    before: float
    after: float
    share_followed: float | None


def measure_memory(case: Case, calls: int) -> list[Memory]:
    """Calls both programs `calls` times each; returns nothing where there is no /proc to read."""
    if not Path("/proc/self/statm").exists():
        return []
    measured = []
    for name in ("eager", "coexec"):
        variant = prepare(case.build, name, WRAPPERS[name])
        if name == "coexec":
            warm_up(variant, case)
        for _ in range(calls // 10):  # arenas and caches grow to their size first
            variant.call()
        stats, before = variant.stats, resident_mib()
        for _ in range(calls):
            variant.call()
        share = counted(stats, variant.stats)[1] if stats else None
        measured.append(Memory(name, calls, before, resident_mib(), share))
    return measured


def resident_mib() -> float:
    """Resident memory of this process, garbage collected first."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def one_line(error: Exception) -> str:
    """The line of a TensorFlow error that says what went wrong: the last one of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return last if type(error).__name__ in last else f"{type(error).__name__}: {last}"
