"""Finds Keras' tests, and runs one: its body three times eagerly, and three times in one decorated function."""

import contextlib
import gc
import importlib
import io
import os
import sys
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

import coexec
from coexec import testing
from coexec.base.tuning import tuned
from tests.coexec import unchanged

TIMES = 3


def _skip_if_backend(backend: str, reason: str) -> Any:
    return pytest.mark.skipif(backend == keras.backend.backend(), reason=reason)


# Some tests import what the file at the root of Keras' repository has, which is not installed.
sys.modules.setdefault("conftest", types.SimpleNamespace(skip_if_backend=_skip_if_backend))  # type: ignore[arg-type]


def modules_of(package: str, part: str) -> list[str]:
    """Returns the test modules in one part of a package, such as `layers` of `keras.src`; "": in all of them."""
    source = Path(importlib.import_module(package).__file__ or "").parent
    files = sorted((source / part.replace(".", "/")).rglob("*_test.py"))
    return [f"{package}." + ".".join(file.relative_to(source).with_suffix("").parts) for file in files]


def tests_of(module: str) -> dict[str, tuple[type, str]]:
    """Returns the tests of a module by name, as a class and a method, but those that Keras skips here."""
    cases: list[Any] = list(unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module)))
    found = {}
    while cases:
        case = cases.pop(0)
        if isinstance(case, unittest.TestSuite):
            cases[:0] = case
        elif not _is_skipped(case):
            found[case.id()] = type(case), case._testMethodName
    return found


def _is_skipped(case: unittest.TestCase) -> bool:
    """Whether marks of pytest or of unittest say that the test is not for this backend."""
    method = getattr(case, case._testMethodName)
    marks = [mark for of in (type(case), method) for mark in getattr(of, "pytestmark", ())]
    if any(mark.name == "skip" or (mark.name == "skipif" and mark.args[0]) for mark in marks):
        return True
    return any(getattr(of, "__unittest_skip__", False) for of in (type(case), method))


@contextlib.contextmanager
def _hostile() -> Iterator[None]:
    """Has even the smallest segment launched in the second call, and its results used unseen."""
    with tuned(launch_visits=1, launch_operations=1), testing.always_follow(), testing.trust_compiled():
        yield


def passes(kind: type, method: str, body: Callable[[Any], Any]) -> str | None:
    """Runs a test three times, its body by `body`; returns the traceback of its failure, None if there is none."""
    try:
        for number in range(TIMES):
            keras.utils.set_random_seed(1234 + number)
            case: Any = kind(method)
            case.setUpClass()
            try:
                case.setUp()
                try:
                    body(case)
                finally:
                    case.tearDown()
            finally:
                case.doCleanups()
                case.tearDownClass()
                case.doClassCleanups()
    except (Exception, pytest.skip.Exception):  # a skipped test counts as one that does not pass
        return traceback.format_exc()
    return None


def run_test(kind: type, method: str, tell: Callable[..., None] = lambda **_: None) -> dict[str, Any]:
    """Runs a test both ways: whether it passed `eagerly`, how it failed `followed`, and counts.

    A test that fails followed has to pass eagerly once more, or it is not one that passes eagerly.
    """

    def plain(case: Any) -> Any:
        return getattr(case, method)()

    with quiet():
        tell(way="eager")
        if passes(kind, method, unchanged(plain)) is not None:
            return {"eagerly": False}
        tell(way="followed")
        body = coexec.function(plain, jit_compile=False)
        with _hostile():
            failure = passes(kind, method, body)
        stats = body.stats()
        counts = {name: getattr(stats, name) for name in ("calls", "followed", "diverged", "recorded", "launches")}
        del body
        gc.collect()
        if failure is not None:
            tell(way="eager")
            if passes(kind, method, unchanged(plain)) is not None:
                return {"eagerly": False}
    return {"eagerly": True, "failure": failure, "counts": counts}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what the tests print to themselves, and what they leave in the working directory."""
    place = os.getcwd()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.chdir(place)
        sys.stdout.flush()
