"""Every public function does followed what it does eagerly: values, dtypes, types and exceptions' classes.

Run with `-rP`, the tests print what was covered, and what was left out and why.
"""

import functools

import pytest
import tensorflow as tf

from tests.marks import as_documented
from tests.public import by_hand, calls
from tests.public.names import MODULES, by_name, functions
from tracer import library

pytestmark = pytest.mark.slow

PARTS = 4  # into which the functions of the large modules are divided, for tests on several processes
LARGE = ("tf", "tf.math", "tf.nn", "tf.experimental.numpy", "keras.ops")


@pytest.fixture(autouse=True)
def launched(monkeypatch, tmp_path, tune):
    """Even the smallest segment is launched from the second call on, and what is memoized is what names stand for."""
    library.install()
    tune(launch_visits=1, launch_operations=1)
    monkeypatch.chdir(tmp_path)
    yield
    monkeypatch.undo()


@functools.cache
def of(module: str) -> list[str]:
    """The names of the functions of a module, but not of modules inside of it."""
    return [name for name in functions() if name.rpartition(".")[0] == module]


@pytest.mark.parametrize(
    ("module", "part", "parts"),
    [(m, n, PARTS if m in LARGE else 1) for m in MODULES for n in range(PARTS if m in LARGE else 1)],
)
@pytest.mark.filterwarnings("ignore")
def test_functions(module, part, parts):
    """Each of eight calls gives what eager gives for the same of two kinds of inputs."""
    wrong, covered = [], 0
    for name in of(module)[part::parts]:
        function = by_name(name)
        reason = calls.why_not(name)
        if reason is not None:
            print(f"left out: {name}: {reason}")
            continue
        given = calls.kinds(name, function)
        found = calls.differs(name, function, given) if given else f"{name}: neither called nor left out"
        wrong += [found] if found else []
        covered += not found
    print(f"{module}: {covered} functions")
    assert not wrong, "\n".join(wrong)


def test_a_thousand_functions_are_called():
    """All that are not left out are called above."""
    left_out = [name for name in functions() if calls.why_not(name)]
    assert len(functions()) - len(left_out) >= 1200


@as_documented
def test_the_table_has_no_line_too_many():
    """Each line stands for a public function, and no reason for a function that is called."""
    assert set(by_hand.table()) <= set(functions())
    for start in by_hand.LEFT_OUT:
        assert any(name.startswith(start) for name in functions()), start


def test_a_difference_is_found():
    """The comparison tells followed calls from eager ones."""
    seen = []

    def wrong(x):
        seen.append(None)
        return x * 2.0 if len(seen) % 2 else x * 3.0

    given = [((tf.constant([1.0]),), {}), ((tf.constant([2.0, 3.0]),), {})]
    assert "call 0" in calls.differs("wrong", wrong, given)
