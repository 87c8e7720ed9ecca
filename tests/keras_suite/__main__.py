"""`python -m tests.keras_suite`: runs Keras' own tests eagerly and followed, and prints what came of each part.

A worker process runs some modules; a test that crashes or hangs it costs that test alone. Results are kept in a file
as they come, so that a run that was interrupted goes on where it was: delete the file, or change the code, for a fresh
run. Ends with 1 if a test passes eagerly and fails followed.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PARTS = ("layers", "losses", "metrics", "optimizers", "random", "trainers", "models", "saving", "callbacks")
PATIENCE = 240  # seconds without a word from a worker until its test counts as hung
MODULES = 12  # a worker's; then it is a new one, as memory grows


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.keras_suite", description=__doc__)
    parser.add_argument("--package", default="keras.src", help="whose tests to run: that of another library, say")
    parser.add_argument("--parts", help="packages below it, separated by commas; all, but of Keras those of the table")
    parser.add_argument("--modules", default="", help="single modules instead, separated by commas")
    parser.add_argument("--every", type=int, default=1, help="run every N-th test of each module")
    parser.add_argument("--results", type=Path, default=ROOT / "build/keras_suite.jsonl", help="where results are kept")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds for one test until it counts as hung")
    parser.add_argument("--table", action="store_true", help="only print the table of the results that are there")
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def work(modules: list[str], every: int) -> None:
    """Runs the tests of some modules but those that standard input names; tells of each in a line of JSON."""
    from tests.keras_suite.bodies import run_test, tests_of

    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)

    def tell(**words: Any) -> None:
        out.write("\n" + json.dumps(words) + "\n")

    done = set(sys.stdin.read().split("\n"))
    for module in modules:
        try:
            tests = tests_of(module)
        except Exception as error:  # a package that its tests need is not installed
            tell(module=module, error=f"{type(error).__name__}: {error}")
            continue
        gc.freeze()  # no collection looks through TensorFlow and the test modules
        for name in [*tests][::every]:
            if name not in done:
                tell(begins=name, module=module)
                tell(ends=name, module=module, **run_test(*tests[name], tell))


class Suite:
    """The results so far, in memory and on disk."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results: dict[str, dict[str, Any]] = {}
        self.began = time.monotonic()
        self._version = _version()
        with contextlib.suppress(FileNotFoundError):
            lines = [json.loads(line) for line in options.results.read_text().splitlines()]
            self.results = {line["ends"]: line for line in lines if line["version"] == self._version}
        options.results.parent.mkdir(parents=True, exist_ok=True)

    def add(self, result: dict[str, Any]) -> None:
        """Keeps a test's result."""
        self.results[result["ends"]] = result
        with self.options.results.open("a") as file:
            file.write(json.dumps({**result, "version": self._version}) + "\n")
        if result["eagerly"] and result["failure"]:
            print(f"\n{result['ends']} passes eagerly and fails followed:\n{result['failure']}", flush=True)

    def run(self, modules: list[str]) -> None:
        """Runs the tests of some modules in a worker, and in another one what is left where that crashes or hangs."""
        while modules:
            left = self._run_worker(modules)
            modules = modules[modules.index(left) :] if left else []

    def _run_worker(self, modules: list[str]) -> str | None:
        """Returns the module in which the worker came to an end before its time, if it did."""
        command = [sys.executable, "-W", "ignore", "-m", "tests.keras_suite", f"--every={self.options.every}"]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1",
                       "KERAS_BACKEND": "tensorflow", "COEXEC_CACHE_DIR": "off"}  # fmt: skip
        process = subprocess.Popen(
            [*command, "--worker", *modules], env=environment, cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write("\n".join(self.results))
        test, module, way = "", modules[0], "eager"
        lines = iter(process.stdout)
        while True:
            killer = threading.Timer(self.options.patience, process.kill)
            killer.start()
            text = next(lines, None)
            killer.cancel()
            if text is None:
                break
            line = json.loads(text) if text.startswith("{") else {}
            way, module = line.get("way", way), line.get("module", module)
            if "begins" in line:
                test, way = line["begins"], "eager"
            elif "ends" in line:
                test = ""
                self.add(line)
                if sys.stderr.isatty() or len(self.results) % 100 == 0:
                    print(f"\r{self} {module[10:60]:50}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr)
            elif "error" in line:
                print(f"\n{module} cannot be imported: {line['error']}")
        if process.wait() == 0:
            return None
        if not test:
            raise SystemExit(f"the worker of {module} ended with {process.returncode} outside of its tests")
        died = f"its process ended with {process.returncode} (-9: it hung)"
        self.add({"ends": test, "module": module, "eagerly": way == "followed", "failure": died, "counts": {}})
        return module

    def failed(self) -> list[str]:
        """Returns what passes eagerly and fails followed."""
        return sorted(name for name, result in self.results.items() if result["eagerly"] and result["failure"])

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        return f"{len(self.results)} tests, {len(self.failed())} fail only followed; {seconds:.0f} s"

    def table(self) -> str:
        """Returns the counts of each part, in Markdown."""
        heads = "part", "tests", "passed eagerly 3 times", "passed followed", "calls", "followed", "diverged"
        rows: dict[str, list[int]] = {}
        for result in self.results.values():
            good = result["eagerly"]
            counts = result.get("counts", {}) if good else {}
            numbers = [1, good, good and not result["failure"], *(counts.get(n, 0) for n in heads[4:])]
            for part in (result["module"].split(".")[2], "all"):
                rows[part] = [a + int(b) for a, b in zip(rows.get(part, [0] * 6), numbers, strict=True)]
        rows["all"] = rows.pop("all", [0] * 6)  # the last line
        lines = [heads, ("---", *["---:"] * 6), *((part, *map(str, numbers)) for part, numbers in rows.items())]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _version() -> str:
    """Returns what tells the code that is tested from any other."""
    content = hashlib.sha256()
    for package in ("coexec", "tracer"):
        for file in sorted((ROOT / package).rglob("*.py")):
            content.update(file.read_bytes())
    return content.hexdigest()[:16]


def main() -> int:
    """Returns 1 if a test passes eagerly and fails followed, or if nothing was followed."""
    options = parsed()
    if options.worker is not None:
        work(options.worker, options.every)
        return 0
    suite = Suite(options)
    if not options.table:
        from tests.keras_suite.bodies import modules_of

        asked = options.parts or (",".join(PARTS) if options.package == "keras.src" else "")
        parts = [modules_of(options.package, part) for part in asked.split(",")]
        for modules in [options.modules.split(",")] if options.modules else parts:
            for first in range(0, len(modules), MODULES):
                suite.run(modules[first : first + MODULES])
    print(f"\n{suite}\n\n{suite.table()}")
    failed = suite.failed()
    print(*failed and ["\nfail only followed:", *failed], sep="\n  ")
    return 1 if failed or not any(r.get("counts", {}).get("followed") for r in suite.results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
