"""The demo begins with its own output: TensorFlow's notices are left out, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PROGRAM = """
import os, sys
from quiet_start import quiet_start

print("before", file=sys.stderr)
with quiet_start():
    os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n")
    os.write(2, b"I0000 00:00:1795476235.727311   30997 port.cc:153] oneDNN custom operations are on.\\n")
    os.write(2, b"E0000 00:00:1795476235.727311   30997 other.cc:1] an error\\n")
    print("a warning of Python's", file=sys.stderr)
    os.write(1, b"out\\n")
    {last}
print("after", file=sys.stderr)
"""


def ran(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES, capture_output=True, text=True, check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip


@pytest.mark.parametrize("last", ["pass", "raise KeyError('planned')"])
def test_only_notices_are_left_out(last):
    done = ran("-c", PROGRAM.format(last=last))
    lines = done.stderr.splitlines()
    assert done.stdout == "out\n"
    assert lines[0] == "before"
    assert {"E0000 00:00:1795476235.727311   30997 other.cc:1] an error", "a warning of Python's"} <= set(lines)
    assert not [line for line in lines if line.startswith(("I0000", "WARNING: All"))]
    assert lines[-1] == ("after" if last == "pass" else "KeyError: 'planned'")


def test_without_stderr_nothing_is_held_back():
    closed = "import os\nos.close(2)\nfrom quiet_start import quiet_start\nwith quiet_start():\n    print('in')"
    assert ran("-c", closed).stdout == "in\n"


@pytest.mark.slow
def test_the_demo_begins_with_its_own_output():
    done = ran("digits.py", "--steps=30")
    assert done.stdout.startswith("eager    30 steps ")
    assert "I0000" not in done.stderr
    assert "absl::InitializeLog" not in done.stderr
