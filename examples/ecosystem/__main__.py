"""Other people's programs, eager and co-executed: right or wrong, the first calls, the steady state, and why no faster.

    python -m examples.ecosystem                            all whose libraries are installed
    python -m examples.ecosystem --program=sonnet_mlp       one; may be repeated
    python -m examples.ecosystem --write                    also BENCHMARKS.md, between its marks
    python -m examples.ecosystem --clock=cpu                on a busy machine: the processor's time, not the clock's
    python -m examples.ecosystem --half=after               those that were chosen after the runtime was tuned
    python -m examples.ecosystem --list

Each runs in a process of its own, in which the eager and the co-executed run take turns. Exits with 1 if one is wrong.
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

from examples.ecosystem.rows import HALVES, Plan, Row, as_markdown, half_of, read

ROOT = Path(__file__).parents[2]
LEGACY = "TF_USE_LEGACY_KERAS"


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes."""
    known = examples()
    parser = argparse.ArgumentParser("examples.ecosystem", description=__doc__.partition("\n")[0])
    parser.add_argument("--program", action="append", choices=list(known), metavar="NAME", help="may be repeated")
    parser.add_argument("--half", choices=list(HALVES), help="only those chosen before, or after")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--calls", type=int, default=Plan.calls, help="of each run")
    parser.add_argument("--seconds", type=float, default=Plan.seconds, help="processor time for both runs together")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one example")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="which times are compared")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured, after each example")
    parser.add_argument("--render", metavar="FILE", help="take what --json wrote, and measure nothing")
    parser.add_argument("--write", action="store_true", help="write the table to BENCHMARKS.md")
    options = parser.parse_args(arguments)
    known = {name: found for name, found in known.items() if options.half in (None, half_of(found[0]))}
    if options.list:
        print("\n".join(f"{name:36}{about}" for name, (_, about) in known.items()))
        return 0
    plan = Plan(calls=options.calls, seconds=options.seconds)
    rows = []
    if options.render:
        rows = [read(values) for values in json.loads(Path(options.render).read_text())]
    for name in [] if options.render else options.program or list(known):
        rows.append(attempt(name, known[name][0], plan, options.timeout))
        if options.json:  # after each: whoever stops this keeps what there is
            Path(options.json).write_text(json.dumps([asdict(row) for row in rows]))
    table = as_markdown(rows, options.clock)
    print(table)
    if options.write:
        from examples.bench.table import write_section  # imports TensorFlow

        given = sys.argv[1:] if arguments is None else arguments
        write_section(ROOT / "BENCHMARKS.md", "ecosystem", table, " ".join(["python -m examples.ecosystem", *given]))
    return 1 if any(row.wrong or row.error for row in rows) else 0


def examples() -> dict[str, tuple[str, str]]:
    """The module of each example and what it says of itself, read without importing any library."""
    found = {}
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(d, ast.Call) and getattr(d.func, "id", "") == "example" for d in node.decorator_list
            ):
                module = ".".join(path.relative_to(folder).with_suffix("").parts)
                found[node.name] = module, " ".join((ast.get_docstring(node) or "").split())
    return found


def attempt(name: str, module: str, plan: Plan, timeout: float) -> Row:
    """Runs the process of an example: its row as far as it came."""
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "row.json", Path(folder) / "output.txt"
        command = [sys.executable, "-m", "examples.ecosystem.measure", name, module, str(file)]
        command.append(json.dumps(asdict(plan)))
        trouble, began = "", time.monotonic()
        # TensorFlow decides which Keras it has when it is imported, before the example is.
        legacy = (
            {LEGACY: "1"} if LEGACY in (Path(__file__).parent / f"{module.replace('.', '/')}.py").read_text() else {}
        )
        with output.open("wb") as writer:
            try:
                status = subprocess.run(
                    command, cwd=ROOT, env=os.environ | legacy, stdout=writer, stderr=subprocess.STDOUT, timeout=timeout
                ).returncode
            except subprocess.TimeoutExpired:
                status, trouble = 1, f"hangs: not done after {timeout:.0f} s"
        row = read(json.loads(file.read_text())) if file.exists() else Row(name, module)
        said = output.read_text(errors="replace").strip().splitlines()
        if status and not row.finished:
            row.error = trouble or f"exit status {status}: {said[-1].strip():.160}" if said else f"exit status {status}"
        print(f"{name}: {row.error or row.skipped or 'done'} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return row


if __name__ == "__main__":
    sys.exit(main())
