"""Prints what spelling costs.

    python -m examples.variants                              each base with each rewrite, and pairs: about an hour
    python -m examples.variants --base=mlp --rewrite=method  only those; a rewrite by a part of its name
    python -m examples.variants --pairs=50 --draw=3          other pairs
    python -m examples.variants --show --base=mlp ...        prints the rewritten programs instead

Exits with 1 if a variant is not eager's, takes more than 1.2 times the original's time, or has more launches.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("COEXEC_CACHE_DIR", "off")

from absl import app, flags

from examples.variants import rewrites
from examples.variants.report import render
from examples.variants.rows import read_rows, save
from examples.variants.source import NotApplicable, Source

HERE = Path(__file__).parent
BASES = {path.stem: path for path in sorted((HERE / "bases").glob("*.py")) if path.stem != "__init__"}
PROGRAMS = {name: HERE.parent / "programs" / f"{name}.py" for name in ("lenet", "dcgan", "nasrnn", "lstm_lm")}

BASE = flags.DEFINE_multi_enum("base", None, [*BASES, *PROGRAMS], "Only this program; may be repeated.")
REWRITE = flags.DEFINE_multi_string("rewrite", None, "Only rewrites with this in their names; may be repeated.")
PAIRS = flags.DEFINE_integer("pairs", 20, "Pairs of rewrites of each program.")
SINGLES = flags.DEFINE_bool("singles", True, "Each rewrite by itself.")
DRAW = flags.DEFINE_integer("draw", 0, "Which pairs.")
SHOW = flags.DEFINE_bool("show", False, "Print the programs instead.")
XLA = flags.DEFINE_bool("xla", False, "With XLA; without, only graphs run, whose times say more of Python's.")
WRITE = flags.DEFINE_string("write", None, "Write the rows to this file.")
INSIDE = flags.DEFINE_bool("inside", False, "Measure one program in this process.")
ALL = flags.DEFINE_bool("all", False, "Print variants that do not fall out, too.")


def main(_: list[str]) -> int:
    """Measures each program in a process of its own, and prints."""
    rewrites.load()
    names = BASE.value or [*BASES, *PROGRAMS]
    if SHOW.value:
        return show(names)
    if INSIDE.value:
        return inside(names[0])
    rows = []
    for name in names:
        file = Path(WRITE.value or f"/tmp/variants-{os.getpid()}").with_suffix(f".{name}.jsonl")
        passed = [a for a in sys.argv[1:] if not a.startswith(("--base", "--write"))]
        command = [sys.executable, "-m", "examples.variants", "--inside", f"--base={name}", f"--write={file}", *passed]
        subprocess.run(command, check=False)
        if file.exists():
            rows += read_rows(file)
            file.unlink()
    if WRITE.value:
        save(rows, Path(WRITE.value))
    print(render(rows, ALL.value))
    return int(any(row.falls_out for row in rows))


def chosen(name: str) -> list[tuple[str, ...]]:
    """The rewrites to be tried, by themselves and in pairs."""
    known = [r for r in rewrites.REWRITES if REWRITE.value is None or any(part in r for part in REWRITE.value)]
    draw = random.Random(f"{DRAW.value} {name}")
    pairs = [tuple(draw.sample([*rewrites.REWRITES], 2)) for _ in range(PAIRS.value)] if REWRITE.value is None else []
    return [*((r,) for r in known if SINGLES.value), *pairs]


def source_of(name: str) -> Source:
    """The program of a name."""
    return Source({**BASES, **PROGRAMS}[name])


def inside(name: str) -> int:
    """Measures one program here."""
    from examples.variants.measure import Bench, Plan

    bench = Bench(source_of(name), Plan(xla=XLA.value))
    rows = []
    for combination in chosen(name):
        rows.append(bench.measure(combination))
        row = rows[-1]
        figures = f"{row.cpu:.2f} {row.wall:.2f} {row.more_launches:+.1f} {-row.fewer_regions:+.1f} {row.cause}"
        print(f"{name}: {row.name}: {row.error or figures}", file=sys.stderr, flush=True)
        save(rows, Path(WRITE.value))
    return 0


def show(names: list[str]) -> int:
    """Prints the rewritten programs."""
    for name in names:
        for combination in chosen(name):
            try:
                source = rewrites.rewritten(source_of(name), combination)
                print(f"# {name}: {' + '.join(combination)}\n{source.text()}")
            except NotApplicable as reason:
                print(f"# {name}: {' + '.join(combination)}: not applicable: {reason}\n")
    return 0


if __name__ == "__main__":
    app.run(main)
