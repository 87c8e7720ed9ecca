"""`python -m tests.environments.versions`: runs the tests that tell versions of TensorFlow apart on each tested one.

Each version is installed, with the Keras that pip picks for it, in a virtual environment of its own in build/versions,
which is kept, and made anew when pyproject.toml changes. `2.18+numpy1.26` is a version with another NumPy. Prints a
table, and ends with 1 if anything failed. To try a new version, add it to `tracer/versions.py:TESTED` and to
pyproject.toml.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tracer.versions import TESTED

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "versions"
# What is relied on, the whole system in small, every program of the corpus, and the Keras 2 of each version.
TESTS = [
    "tests/tracer/test_private.py", "tests/test_tiny.py", "tests/test_same_as_eager.py",
    "tests/coexec/memoize/test_legacy_keras.py",
]  # fmt: skip
TITLES = ("tensorflow", "keras", "numpy", "passed", "skipped", "failed", "seconds")
VERSIONS = (f"{TESTED[0]}+numpy1.26", *TESTED)  # all that the oldest allows
# Prints the versions that an environment has.
ASK = "from importlib.metadata import version as v; print(v('tensorflow'), v('keras'), v('numpy'))"


class Row(NamedTuple):
    """What came of one version: its own and those of Keras and NumPy, counts of tests, and how long they took."""

    tensorflow: str
    keras: str = "-"
    numpy: str = "-"
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    seconds: int = 0
    why: str = ""  # it could not be run at all

    def is_right(self) -> bool:
        """Whether tests were run, and none failed."""
        return self.passed > 0 and not self.failed and not self.why


def required(version: str) -> list[str]:
    """Returns what pip is asked for besides coexec: TensorFlow, and NumPy where the version names one."""
    tensorflow, _, numpy = version.partition("+numpy")
    return [f"tensorflow=={tensorflow}.*", *([f"numpy=={numpy}.*"] if numpy else [])]


def installed(version: str) -> Path:
    """Returns the Python of the version's environment, which is made if it is not there or out of date."""
    folder = PLACE / version
    python, stamp = folder / "bin" / "python", folder / ".installed"
    project = ROOT / "pyproject.toml"
    if not stamp.exists() or stamp.stat().st_mtime < project.stat().st_mtime:
        print(f"installing TensorFlow {version} in {folder.relative_to(ROOT)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        wanted = ["-e", f"{ROOT}[dev,examples]", *required(version)]
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True)
        stamp.touch()
    return python


def counts_of(path: Path) -> tuple[int, int, int]:
    """Returns how many tests passed, were skipped and failed, from the file that pytest wrote."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    tests, skipped, errors, failures = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped", "errors", "failures")
    )
    return tests - skipped - errors - failures, skipped, errors + failures


def run(version: str, more: list[str]) -> Row:
    """Runs the tests on one version."""
    try:
        python = installed(version)
    except subprocess.CalledProcessError:
        name = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
        return Row(version, why=f"cannot be installed on {name}")
    named = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout.split()
    results = PLACE / f"{version}.xml"
    results.unlink(missing_ok=True)
    began = time.monotonic()
    command = [python, "-m", "pytest", "-n", "2", "-m", "not slow", f"--junitxml={results}", *(more or TESTS)]
    subprocess.run(command, cwd=ROOT, check=False)
    took = round(time.monotonic() - began)
    if not results.exists():
        return Row(*named, seconds=took, why="the tests did not end")
    return Row(*named, *counts_of(results), took)


def table(rows: list[Row]) -> str:
    """Returns a line for each version, below titles, in columns."""
    cells = [TITLES, *(tuple(str(cell) for cell in row[: len(TITLES)]) for row in rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(TITLES))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    whys = ["", *(row.why for row in rows)]
    return "\n".join(f"{line}  {why}".rstrip() for line, why in zip(lines, whys, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Runs what is asked for, one version after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.environments.versions", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"some of {', '.join(VERSIONS)}")
    parser.add_argument("--tests", action="append", default=[], help="run this instead, for example tests/coexec")
    options = parser.parse_args(arguments)
    rows = []
    for version in options.versions or VERSIONS:
        print(f"TensorFlow {version}", flush=True)
        rows.append(run(version, options.tests))
    print(table(rows))
    return int(not all(row.is_right() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
