"""`python -m tests.fuzz --programs=N --seed=S`: N programs in both backends, the first made up from seed S.

Each batch has a process of its own, so that memory stays bounded and a crash or a hang costs no more than a batch.
A program that fails is made small and printed with its seed, which alone makes it up again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

BATCH = 50  # programs
PATIENCE = 60  # seconds for a program, on average, until a batch counts as hung


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    parser.add_argument("--backends", default="graph,xla", help="graph, xla, or both")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes at a time")
    parser.add_argument("--no-reduce", dest="reduce", action="store_false", help="print programs as they were made up")
    parser.add_argument("--batch", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def batch(options: argparse.Namespace) -> None:
    """Runs programs here; tells of each in a line of JSON."""
    from tests.fuzz import differential
    from tests.fuzz.programs import Maker

    differential.quiet()
    for seed in range(options.seed, options.seed + options.programs):
        print(json.dumps({"begins": seed}), flush=True)
        counts = differential.Counts()
        program = Maker(seed).program()
        for backend in options.backends.split(","):
            error = differential.fails(program, backend, counts)
            if error is not None:
                print(json.dumps({"seed": seed, "error": error}), flush=True)
                if options.reduce:
                    error = differential.fails(differential.reduce(program, backend), backend)
                    print(json.dumps({"seed": seed, "reduced": error}), flush=True)
        print(json.dumps({"ends": seed, "counts": vars(counts)}), flush=True)


class Tally:
    """What all batches came to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counts: dict[str, int] = {}
        self.failed: set[int] = set()
        self.done = 0
        self.began = time.monotonic()

    def note(self, line: dict) -> None:
        """Takes in a line of a batch, and tells people."""
        for name, count in line.get("counts", {}).items():
            self.counts[name] = self.counts.get(name, 0) + count
        if "ends" in line:
            self.done += 1
        elif "seed" in line:
            self.failed.add(line["seed"])
            what = "made small" if "reduced" in line else "fails"
            print(f"\nseed {line['seed']} {what}: {line.get('reduced') or line.get('error')}", flush=True)
        if sys.stderr.isatty() or self.done % BATCH == 0:
            end = "" if sys.stderr.isatty() else "\n"
            print(f"\r{self}", end=end, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        return (
            f"{self.done} of {self.options.programs} programs from seed {self.options.seed}, {len(self.failed)} fail, "
            f"{self.counts.get('unsteady', 0)} runs differ eagerly, too; "
            f"{self.counts.get('followed', 0)} of {self.counts.get('calls', 0)} calls followed, "
            f"{self.counts.get('launches', 0)} launches; {seconds:.0f} s"
        )


def work(options: argparse.Namespace, tally: Tally, seed: int) -> None:
    """Runs one batch in a process of its own; goes on behind a program that crashes or hangs it."""
    last = min(seed + BATCH, options.seed + options.programs)
    while seed < last:
        command = [sys.executable, "-m", "tests.fuzz", "--batch", f"--seed={seed}", f"--programs={last - seed}",
                   f"--backends={options.backends}", *(() if options.reduce else ("--no-reduce",))]  # fmt: skip
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + PATIENCE * max(last - seed, 5)  # made small, one takes as long as many
        killer = ThreadPoolExecutor(1)
        waiting = killer.submit(lambda p=process, d=deadline: _kill_after(p, d))
        at = seed
        for text in process.stdout or ():
            line = json.loads(text) if text.startswith("{") else {}
            at = line.get("begins", at)
            tally.note(line)
        code = process.wait()
        waiting.result()
        killer.shutdown()
        if code == 0:
            return
        tally.note({"seed": at, "error": f"its process ended with {code} (-9: it hung)"})
        seed = at + 1


def _kill_after(process: subprocess.Popen, deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()


def main() -> int:
    """Returns 1 if a program failed."""
    options = parsed()
    if options.batch:
        batch(options)
        return 0
    tally = Tally(options)
    with ThreadPoolExecutor(options.workers) as pool:
        starts = range(options.seed, options.seed + options.programs, BATCH)
        list(pool.map(lambda seed: work(options, tally, seed), starts))
    print(f"\n{tally}")
    if tally.failed:
        print("seeds that fail:", *sorted(tally.failed))
    return 1 if tally.failed or not tally.counts.get("followed") else 0


if __name__ == "__main__":
    sys.exit(main())
