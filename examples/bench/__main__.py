"""Prints the benchmark table.

    python -m examples.bench                        every case, about two minutes
    python -m examples.bench --quick                few rounds: that it runs, not how fast
    python -m examples.bench --case=raw-ops --profile
    python -m examples.bench --write-readme         also puts it into README.md, in short, and BENCHMARKS.md
    python -m examples.bench --peers                steps that PyTorch and JAX make too, instead
    python -m examples.bench --peers --write-peers  also puts that table into BENCHMARKS.md

Exits with 1 if a case that must be followed was not: its times would say nothing about co-execution.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("COEXEC_CACHE_DIR", "off")  # first calls are those of a program that is new

from absl import app, flags

from examples.bench import table
from examples.bench.cases import CASES, MEMORY
from examples.bench.measure import Result, measure, measure_memory, profile

NAMES = [case.name for case in (*CASES, MEMORY)]
QUICK = flags.DEFINE_bool("quick", False, "Three rounds and 1,000 calls for memory.")
ONLY = flags.DEFINE_multi_enum("case", None, NAMES, "Run only this case; may be repeated.")
JSON = flags.DEFINE_string("json", None, "Write everything measured to this file.")
PROFILE = flags.DEFINE_bool("profile", False, "Profile the co-executed variant instead of timing the cases.")
PEERS = flags.DEFINE_bool("peers", False, "Measure beside PyTorch and JAX; needs the extra `peers`.")
WRITE_PEERS = flags.DEFINE_bool("write-peers", False, "Put that table between BENCHMARKS.md's peers markers.")
WRITE_README = flags.DEFINE_bool("write-readme", False, "Put the table into README.md, in short, and BENCHMARKS.md.")

flags.register_multi_flags_validator(
    ["quick", "case", "write-readme", "peers", "write-peers"],
    lambda chosen: (
        not (chosen["write-readme"] and (chosen["quick"] or chosen["case"] or chosen["peers"]))
        and not (chosen["write-peers"] and (chosen["quick"] or not chosen["peers"]))
    ),
    "what readers see is a full run: --write-readme goes with neither --quick, --case nor --peers, "
    "--write-peers with --peers and not with --quick",
)

ROOT = Path(__file__).parents[2]


def main(_: list[str]) -> int:
    """Measures, prints, writes."""
    if PEERS.value:
        return main_of_peers()
    wanted = ONLY.value or NAMES
    cases = [c for c in CASES if c.name in wanted]
    if PROFILE.value:
        for case in cases:
            profile(case)
        return 0

    results, memory = [], []
    for case in cases:
        say(case.name)
        results.append(measure(case, rounds=3 if QUICK.value else 30))
    if MEMORY.name in wanted:
        say(MEMORY.name)
        memory = measure_memory(MEMORY, calls=1_000 if QUICK.value else MEMORY.calls)
    say("")

    print(f"{table.circumstances()}\n")
    print(table.render(results, memory, goals=True))
    if JSON.value:
        Path(JSON.value).write_text(json.dumps(table.as_json(results, memory), indent=2) + "\n")
    if WRITE_README.value:
        table.write_section(ROOT / "README.md", "bench", table.short_table(results), "make bench")
        table.write_section(
            ROOT / "BENCHMARKS.md", "bench", table.render(results, memory, goals=True), "make bench"
        )

    idle = [MEMORY.name for m in memory if m.variant == "coexec" and not m.share_followed]
    return verdict(results, idle)


def main_of_peers() -> int:
    """The same for the steps that other libraries make too."""
    from examples.bench import peers

    try:
        others = {case.name: peers.variants(case.name) for case in peers.CASES}
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    results = []
    for case in peers.CASES:
        say(case.name)
        results.append(measure(case, 3 if QUICK.value else 30, others[case.name]))
    say("")
    print(f"{table.circumstances()}, {peers.versions()}\n")
    print(table.render(results, [], goals=True))
    if WRITE_PEERS.value:
        text = f"{table.render(results, [], goals=False)}\n\nWith {peers.versions()}."
        table.write_section(ROOT / "BENCHMARKS.md", "peers", text, "make bench ARGS=--peers")
    return verdict(results, [])


def verdict(results: list[Result], idle: list[str]) -> int:
    """The exit status, after what is wrong has been said."""
    idle = [r.case.name for r in results if r.case.follows and not r.share_followed] + idle
    wrong = [r.case.name for r in results if r.variants["coexec"].error]
    if idle:
        print(f"FAILED: nothing was followed in {', '.join(idle)}", file=sys.stderr)
    if wrong:
        print(f"FAILED: co-execution returned other results than eager in {', '.join(wrong)}", file=sys.stderr)
    return 1 if idle or wrong else 0


def say(name: str) -> None:
    """Shows on a terminal which case is being measured."""
    if sys.stderr.isatty():
        print(f"\r\033[K{name}", end="" if name == "" else " ...", flush=True, file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
