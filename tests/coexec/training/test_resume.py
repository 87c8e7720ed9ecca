"""Training that is killed and goes on: the uninterrupted run is the oracle, to the bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("dataset", "arrays", "pages", "stream", "epochs")
KILLS = int(os.environ.get("COEXEC_KILLS", "1"))  # of each run; `make test-kills` asks for more
EPOCHS = 2 + KILLS  # of five or six steps: so that there is something left to kill


def start(directory, kind, output):
    """Starts the program in a process of its own."""
    command = [sys.executable, "-m", "tests.coexec.training.resumed", directory, kind, output, EPOCHS]
    pipe = subprocess.PIPE
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def finish(process):
    """Waits for a process; its messages are part of a failure."""
    _, messages = process.communicate(timeout=240)
    assert process.returncode == 0, messages


def kill(process, steps, delay):
    """Kills a process so many steps after it started, at some moment of the next; returns whether that was in time."""
    for _ in range(steps):
        if not process.stdout.readline():
            break
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=240)
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_runs_go_on_as_if_nothing_had_happened(kind, tmp_path):
    """Losses, metrics, weights and optimizer of a run killed at random steps are the uninterrupted run's."""
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    finish(start(tmp_path / "whole", kind, whole))
    chosen = random.Random(kind)
    killed = 0
    for _ in range(KILLS):
        killed += kill(start(tmp_path / "parts", kind, parts), chosen.randrange(2, 9), chosen.random() * 0.02)
    assert killed > 0
    assert not parts.exists() or killed < KILLS
    finish(start(tmp_path / "parts", kind, parts))
    *expected, followed = whole.read_text().splitlines()
    *found, _ = parts.read_text().splitlines()  # the last process may have had nothing left to do
    assert found == expected
    assert followed == "followed"
