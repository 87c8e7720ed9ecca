"""The wheel: both packages whole, with types and licence, under one version, and nothing of tests and examples."""

import ast
import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("coexec", "tracer")
STEP = """
import coexec, tensorflow as tf

@coexec.function
def step(x):
    return tf.tanh(x) * 2.0

for _ in range(5):
    step(tf.ones([4]))
"""
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def version():
    """What `coexec/__init__.py` says, read as the build does: without importing it."""
    for node in ast.parse((ROOT / "coexec" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise AssertionError("coexec has no __version__")


def test_the_version_is_in_one_place():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^dynamic = \["version"\]', project, re.MULTILINE)
    assert 'version = { attr = "coexec.__version__" }' in project
    assert not re.search(r'^version = "', project, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", version())


def run(*arguments, cwd, **environment):
    """Runs a program, and returns what it has printed."""
    done = subprocess.run(
        arguments, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    if done.returncode and "pip" in arguments and "No matching distribution" in done.stderr:
        if "connection broken" in done.stderr or "setuptools" in done.stderr:  # else a requirement is wrong
            pytest.skip("what is required cannot be downloaded: there is no package index")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources; where the build's own requirements cannot be had, there is nothing to test."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*FOLDERS, "tests", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, *PIP, "wheel", ".", "--no-deps", "-w", str(folder), cwd=source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_has_what_it_should(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = f"coexec-{version()}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{about}/METADATA"))
    expected = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".html", ".css", ".js") or path.name == "py.typed"
    }
    assert {f"{folder}/py.typed" for folder in FOLDERS} <= expected
    assert {name for name in names if not name.startswith(f"{about}/")} == expected
    assert f"{about}/licenses/LICENSE" in names
    assert metadata["Version"] == version()


@pytest.mark.slow
def test_the_wheel_installs_and_runs(wheel, tmp_path):
    """With what pip picks for it, in an empty environment far from the sources: the README's example, and commands."""
    run(sys.executable, "-m", "venv", "empty", cwd=tmp_path)
    python = str(tmp_path / "empty" / "bin" / "python")
    given = {"PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    run(python, *PIP, "install", f"{wheel}[examples]", cwd=tmp_path, **given)
    for name in ("digits.py", "quiet_start.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    where = run(python, "-c", "import coexec, tracer; print(coexec.__version__, coexec.__file__, tracer.__file__)",
                cwd=tmp_path, **given).split()  # fmt: skip
    assert where[0] == version()
    assert all(Path(file).is_relative_to(tmp_path / "empty") for file in where[1:])
    assert "loss curves differ by at most" in run(python, "digits.py", cwd=tmp_path, **given)
    findings = json.loads(run(python, "-m", "coexec", "doctor", "--json", cwd=tmp_path, **given))
    assert not [finding for finding in findings if finding["state"] == "broken"]
    (tmp_path / "step.py").write_text(STEP)
    report = tmp_path / "report"  # of files that come with the package
    run(python, "-m", "coexec", "run", f"--report={report}", "step.py", cwd=tmp_path, **given)
    assert (report / "index.html").stat().st_size > 10_000
