"""The programs of the papers: each compared with its eager run, and timed.

    python -m examples.bench.programs                      all of them, about an hour
    python -m examples.bench.programs --program=lenet      one; may be repeated
    python -m examples.bench.programs --write              also BENCHMARKS.md, benchmarks.json and benchmarks.svg
    python -m examples.bench.programs --program=lenet --profile=trace.json
    python -m examples.bench.programs --list

Each program runs in a process of its own: what it leaves in memory is its own, and one that crashes or hangs costs the
table a cell. Exits with 1 if co-execution did not do what eager did, or a program could not be measured.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("COEXEC_CACHE_DIR", "off")  # first calls are those of a program that is new

from examples.bench import rows
from examples.bench.rows import OURS, ROOT, Plan, Row

PROGRAMS = ROOT / "examples" / "programs"


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes."""
    options = parse(arguments)
    if options.list:
        print("\n".join(f"{name:24}{about}" for name, about in programs().items()))
        return 0
    plan = Plan(
        compared=options.compared,
        warm_up=options.warm_up,
        rounds=options.rounds,
        patience=options.patience,
        published=options.published,
    )
    names = options.program or list(programs())
    if options.profile:
        from examples.bench import chrome  # imports TensorFlow

        chrome.profile(names[0], Path(options.profile), plan)
        return 0
    from examples.bench import report  # likewise

    if options.render:
        run = report.read(Path(options.render))
    else:
        given = sys.argv[1:] if arguments is None else arguments
        run = report.Run.now(" ".join(["python -m examples.bench.programs", *given]), plan)
        for number, name in enumerate(names, start=1):
            run.rows.append(measure(name, plan, options.timeout, f"{name} ({number} of {len(names)})"))
            if options.json:  # after each: whoever stops this keeps what there is
                report.write_json(run, Path(options.json))
        say("")
    print(report.as_text(run))
    if options.write:
        report.write(run, Path(options.directory))
    bad = [f"{row.program}: {row.error}" for row in run.rows if row.error]
    bad += [f"{row.program}, {v.name}: {v.error}" for row in run.rows for v in row.variants.values()
            if v.name in OURS and v.error]  # fmt: skip
    for line in bad:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if bad else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options; from the caller where `python -m coexec bench` is that."""
    parser = argparse.ArgumentParser("examples.bench.programs", description=__doc__.partition("\n")[0])
    parser.add_argument("--program", action="append", choices=list(programs()), metavar="NAME", help="may be repeated")
    parser.add_argument("--list", action="store_true", help="say which programs there are")
    parser.add_argument("--compared", type=int, default=Plan.compared, help="steps that are compared with eager's")
    parser.add_argument("--warm-up", type=int, default=Plan.warm_up, help="steps before the first that is timed")
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="steps that are timed")
    parser.add_argument("--patience", type=float, default=Plan.patience, help="seconds for one variant")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a program, then one variant less")
    parser.add_argument("--published", action="store_true", help="the sizes of the publications, for a GPU")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured, after each program")
    parser.add_argument("--render", metavar="FILE", help="take what --json or --write wrote, and measure nothing")
    parser.add_argument("--write", action="store_true", help="write BENCHMARKS.md, benchmarks.json, benchmarks.svg")
    parser.add_argument("--directory", default=str(ROOT), help="where to --write")
    parser.add_argument("--profile", metavar="FILE", help="write what the steps of one program do as a Chrome trace")
    options = parser.parse_args(arguments)
    if options.write and options.program and options.directory == str(ROOT):
        parser.error("what readers see is a full run: --write with --program needs another --directory")
    if options.profile and len(options.program or []) != 1:
        parser.error("--profile is of one --program")
    if min(options.compared, options.rounds) < 1 or options.warm_up < 0:
        parser.error("there is nothing to measure in no steps")
    return options


def programs() -> dict[str, str]:
    """The names of all programs and what each says it is, read without importing it, and TensorFlow with it."""
    found = {}
    for path in sorted(PROGRAMS.glob("*.py")):
        if path.stem != "__init__":
            about = ast.get_docstring(ast.parse(path.read_text())) or ""
            found[path.stem] = " ".join(about.split("\n\n")[0].split())
    return found


def measure(name: str, plan: Plan, timeout: float, title: str = "") -> Row:
    """The row of a program. A variant that kills its process, or hangs, is left out of the next attempt."""
    skip: dict[str, str] = {}
    while True:
        row, trouble = attempt(name, plan, skip, timeout, title)
        if trouble is None:
            return row
        if row.running in (None, "eager") or row.running in skip:
            row.error = row.error or trouble
            return row
        skip[row.running] = trouble


def attempt(name: str, plan: Plan, skip: dict[str, str], timeout: float, title: str) -> tuple[Row, str | None]:
    """Runs the process of a program once: its row as far as it came, and what stopped it, if something did."""
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "row.json", Path(folder) / "output.txt"
        command = [*worker(), name, str(file), json.dumps(asdict(plan)), json.dumps(skip)]
        with output.open("wb") as writer:
            process = subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=subprocess.STDOUT)
        trouble, deadline = None, time.monotonic() + timeout
        try:
            while trouble is None and process.poll() is None:
                if time.monotonic() > deadline:
                    trouble = f"hangs: not done after {timeout:.0f} s"
                row = rows.read(json.loads(file.read_text())) if file.exists() else Row(name)
                say(f"{title}: {row.doing or 'starting'}")
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
        row = rows.read(json.loads(file.read_text())) if file.exists() else Row(name)
        if trouble is None and not row.finished:
            said = output.read_text(errors="replace").strip().splitlines()
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"
            trouble = f"crashes: {how}" + (f", {said[-1].strip():.160}" if said else "")
    return row, trouble


def worker() -> list[str]:
    """The command that measures a program, without its arguments."""
    return [sys.executable, "-m", "examples.bench.trainings"]


def say(what: str) -> None:
    """Shows on a terminal what is being measured."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end=" ..." if what else "", flush=True, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
