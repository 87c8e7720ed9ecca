"""`bench`: measures the programs of the papers, which are in the source tree, against eager TensorFlow."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[2]
BENCH = "examples.bench.programs"


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser("bench", help="measure a program of examples/programs against eager TensorFlow")
    parser.add_argument("program", nargs="*", help="none: list them")
    parser.add_argument("--rounds", type=int, help="steps of each variant that are timed")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured")
    parser.add_argument("--profile", metavar="FILE", help="write a Chrome trace of a few steps instead")
    parser.set_defaults(run=lambda options: measure(options, parser))


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
    # At the front, as other packages may install a folder named examples, too.
    sys.path.insert(0, str(SOURCES))
    benchmark = importlib.import_module(BENCH)
    chosen = [f"--program={name}" for name in options.program] or ["--list"]
    given = {"--rounds": options.rounds, "--json": options.json, "--profile": options.profile}
    return int(benchmark.main(chosen + [f"{name}={value}" for name, value in given.items() if value is not None]))
