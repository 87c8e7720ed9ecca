"""The programs of docs/: the `python` blocks of a page, in their order, are one program, which runs and is followed.

What is no whole program is a `py` block: it is only compiled. Each program asserts what its page says of it.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
WHOLE = [page for page in PAGES if "```python\n" in page.read_text()]

# All calls are followed, whatever the clock says of a busy machine.
BEFORE = """\
import coexec.testing
following = coexec.testing.always_follow()  # held: what is dropped, ends
following.__enter__()
"""
# A segment of few operations is not worth a launch.
AFTER = """
from coexec.api import functions
called = {f.__qualname__: f.stats() for f in functions() if f.stats().calls > 2}
assert called and all(stats.followed for stats in called.values()), called
long = {name: stats for name, stats in called.items() if stats.ops_followed > 10 * stats.followed}
assert long and all(stats.launches for stats in long.values()), long
"""


def blocks(page, language):
    """The code blocks of a page in a language, each with its line, as text that keeps the line numbers of the page."""
    text = page.read_text()
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: found.start(1)].count("\n"), found[1]


def test_there_are_programs():
    assert {page.stem for page in WHOLE} >= {"index", "recipes"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_is_code(page):
    for language in ("python", "py"):
        for line, code in blocks(page, language):
            compile("\n" * line + textwrap.dedent(code), str(page), "exec")


@pytest.mark.slow
@pytest.mark.parametrize("page", WHOLE, ids=lambda page: page.stem)
def test_programs_run_and_are_followed(page, tmp_path):
    """In a process of their own, from a file, as most programs are."""
    program = tmp_path / f"{page.stem.replace('-', '_')}.py"
    program.write_text("\n\n".join([BEFORE, *(code for _, code in blocks(page, "python")), AFTER]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
