"""`tf.distribute.MirroredStrategy` on two logical devices, in a process of its own: plain steps are the oracle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.coexec.distributed import COMPILED, PROGRAMS, STEPS, TRAINED

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reports():
    """What the programs have come to, by name; a program that hangs has none."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "tests.coexec.distributed"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=890)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {report["name"]: report for report in found}, run.stderr[-3000:]


def report_of(reports, name):
    found, messages = reports
    assert name in found, f"it did not end\n{messages}"
    assert "error" not in found[name], found[name]["error"]
    return found[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_user_steps(name, reports):
    """Values, state on each device and Python's effects are those of plain steps; co-executed ones were followed."""
    report = report_of(reports, name)
    for way in ("inside", "around", *(["compiled"] if name in COMPILED else [])):
        outcome, calls, followed, launches, explained = report[way]
        assert outcome == "same", f"{way}: {outcome}"
        assert calls >= STEPS // 2
        assert followed >= calls // 2, explained
        if way != "around":  # there, replicas work on threads of their own, which nobody follows
            assert launches >= calls // 2, explained


def test_one_device_with_the_whole_batch(reports):
    """Co-executed steps on two replicas learn what a plain one learns from all rows at once."""
    assert report_of(reports, "single")["several"] == ["same"]


@pytest.mark.parametrize("name", TRAINED)
def test_the_trainer(name, reports):
    """Histories, scores and weights of two replicas are those of one device with the whole batch."""
    outcome, calls, followed, launches, explained = report_of(reports, name)["several"]
    assert outcome == "same"
    assert followed > calls // 2, explained
    assert launches > calls // 2, explained
