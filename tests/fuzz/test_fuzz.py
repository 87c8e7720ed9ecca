"""Some random programs, eager and co-executed, in both backends; `make fuzz` runs thousands."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.differential import Counts, Unsteady, check, fails
from tests.fuzz.programs import Maker, Program, Statement, smaller

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "first", "count"), [("graph", 0, 12), ("xla", 10_000, 6)])
def test_random_programs_do_what_they_do_eagerly(backend, first, count):
    """Results, logs, exceptions and all state are eager's after each call; most calls are followed and launched.

    In a process of its own: programs are let go of by collecting garbage, which takes seconds among what tests leave.
    """
    command = [sys.executable, "-m", "tests.fuzz", "--batch", "--no-reduce", f"--backends={backend}",
               f"--seed={first}", f"--programs={count}"]  # fmt: skip
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert not [line["error"] for line in lines if "error" in line]
    counts = [line["counts"] for line in lines if "counts" in line]
    calls, followed, launches = (sum(c[name] for c in counts) for name in ("calls", "followed", "launches"))
    assert len(counts) == count
    assert followed > 0.3 * calls
    assert launches > count


def test_a_seed_makes_the_same_program():
    """So that a number is all it takes to see a failure again."""
    assert Maker(5).program().source == Maker(5).program().source
    assert Maker(5).program().source != Maker(6).program().source


def test_the_grammar_is_filled():
    """No symbol of the grammar is left in a program, and every program is Python."""
    for seed in range(300):
        source = Maker(seed).program().source
        compile(source, "<test>", "exec")
        assert not {"F", "I", "N", "M", "B"} & set(source.replace("(", " ").replace(")", " ").split())


def test_a_program_that_is_wrong_is_found():
    """The comparison tells apart what differs: here the step sees whether it is followed."""
    text = "a = a + float('Function' in type(S.inner).__name__)"
    program = Program({"step": [Statement([(text, None)])]}, [0] * 4)
    with pytest.raises(AssertionError, match="call 0: result"):
        check(program, ("graph",))


def test_a_program_that_eager_does_not_repeat_is_none():
    """How deep Python's recursion goes depends on what is below: that is told apart from a failure, and counted."""
    text = "S.log.append(call)\na = helper(a, i, call)[0]"
    again = "S.count += 1\na = helper(a, i, call)[0]"
    caught = "S.log.append(type(error).__name__)"
    tried = Statement([("try:", [Statement([(text, None)])]), ("except RecursionError as error:", [
        Statement([(caught, None)])])])  # fmt: skip
    program = Program({"helper": [Statement([(again, None)])], "step": [tried]}, [0] * 3)
    gc.disable()  # finalizers of what other tests left would fail at the deepest frame
    try:
        with pytest.raises(Unsteady):
            check(program, ("graph",))
        counts = Counts()
        assert fails(program, "graph", counts) is None
    finally:
        gc.enable()
    assert counts.unsteady == 1


def test_blocks_get_smaller():
    """Each statement can go, and what is inside of one can take its place."""
    inner = [Statement([("x = 1", None)]), Statement([("y = 2", None)])]
    block = [Statement([("if z:", inner), ("else:", [Statement([("w = 3", None)])])]), Statement([("v = 4", None)])]

    def text(block):
        return [line for s in block for line in s.lines("")]

    found = [text(less) for less in smaller(block)]
    assert ["v = 4"] in found
    assert ["x = 1", "y = 2", "v = 4"] in found
    assert ["if z:", "    x = 1", "    y = 2", "v = 4"] in found
    assert ["if z:", "    y = 2", "else:", "    w = 3", "v = 4"] in found


def test_a_program_that_locks_twice_ends():
    """It hears of that, as it would wait for itself for ever; eagerly and co-executed."""
    inner = [Statement([("with S.lock:", [Statement([("a = a * 2.0", None)])])])]
    text = [Statement([("try:", [Statement([("with S.lock:", inner)])]), ("except Planned as error:", [
        Statement([("S.log.append(error)", None)])])]), Statement([("b = b + a", None)])]  # fmt: skip
    check(Program({"step": text}, [0] * 4), ("graph",))
