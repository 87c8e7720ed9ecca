"""Some of Keras' own tests, eager and followed; `make test-keras` runs them all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.keras_suite.__main__ import Suite, parsed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SAMPLE = "keras.src.layers.normalization.layer_normalization_test", "keras.src.losses.loss_test"


@pytest.mark.slow
def test_what_passes_eagerly_passes_followed(tmp_path):
    """In a process of its own, as Keras' tests leave things behind; most calls are followed."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.keras_suite", "--modules", ",".join(SAMPLE),
               "--results", str(tmp_path / "results.jsonl")]  # fmt: skip
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    good = [result for result in results if result["eagerly"]]
    assert len(good) >= 20
    calls, followed = (sum(result["counts"][name] for result in good) for name in ("calls", "followed"))
    assert followed >= 0.6 * calls


def test_a_test_that_fails_only_followed_is_counted(tmp_path, capsys):
    """So are crashes; those that fail eagerly, too, are left out."""
    suite = Suite(parsed(["--results", str(tmp_path / "results.jsonl")]))
    counts = {"calls": 3, "followed": 2, "diverged": 0}
    suite.add({"ends": "a", "module": "keras.src.layers.a_test", "eagerly": True, "failure": None, "counts": counts})
    suite.add({"ends": "b", "module": "keras.src.layers.a_test", "eagerly": True, "failure": "why", "counts": {}})
    suite.add({"ends": "c", "module": "keras.src.losses.b_test", "eagerly": False, "failure": "why", "counts": {}})
    assert suite.failed() == ["b"]
    assert capsys.readouterr().out.count("fails followed") == 1
    assert "| layers | 2 | 2 | 1 | 3 | 2 | 0 |" in suite.table()
    assert "| all | 3 | 2 | 1 | 3 | 2 | 0 |" in suite.table()
    again = Suite(parsed(["--results", str(tmp_path / "results.jsonl")]))
    assert again.results.keys() == {"a", "b", "c"}
