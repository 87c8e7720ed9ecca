"""The command line: `python -m coexec bench` measures the programs of the papers against eager TensorFlow.

    python -m coexec bench                             lists the programs
    python -m coexec bench lenet --rounds=20           compares and times the variants of one
    python -m coexec bench lenet --profile=trace.json  writes a Chrome trace of its steps

The programs are in the source tree, not in an installed package.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1]
BENCH = "examples.bench.programs"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser("python -m coexec", description="Co-execution of imperative TensorFlow programs.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure a program of examples/programs against eager TensorFlow")
    bench.add_argument("program", nargs="*", help="none: list them")
    bench.add_argument("--rounds", type=int, help="steps of each variant that are timed")
    bench.add_argument("--json", metavar="FILE", help="write all that was measured")
    bench.add_argument("--profile", metavar="FILE", help="write a Chrome trace of a few steps instead")
    return measure(parser.parse_args(arguments), bench)


def measure(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Runs the command with the benchmark in the source tree; exits with a hint if coexec is installed without it."""
    if not SOURCES.joinpath(*BENCH.split(".")).with_suffix(".py").is_file():
        parser.exit(
            2,
            "python -m coexec bench needs coexec's source tree: the programs are in its folder examples/, and this is "
            f"an installed package, in {SOURCES}.\n"
            "  1. Get the source, and go to its folder.\n"
            "  2. pip install -e '.[examples]'\n"
            "  3. python -m coexec bench\n",
        )
    # At the front, since other packages may also install a folder named examples.
    sys.path.insert(0, str(SOURCES))
    benchmark = importlib.import_module(BENCH)
    chosen = [f"--program={name}" for name in options.program] or ["--list"]
    given = {"--rounds": options.rounds, "--json": options.json, "--profile": options.profile}
    return int(benchmark.main(chosen + [f"{name}={value}" for name, value in given.items() if value is not None]))


if __name__ == "__main__":
    sys.exit(main())
