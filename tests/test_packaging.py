"""The wheel: both packages whole, with types and licence, under one version, and nothing of tests and examples."""

import ast
import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("coexec", "tracer")


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


@pytest.mark.slow
def test_the_wheel_has_what_it_should(tmp_path):
    """Built from a copy of the sources; where the build's own requirements cannot be had, there is nothing to test."""
    source = tmp_path / "source"
    source.mkdir()
    for name in (*FOLDERS, "tests", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--disable-pip-version-check", "-w", str(tmp_path)],
        cwd=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and "setuptools" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("the build's requirements cannot be downloaded")
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
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
