"""Rewritten programs: they are what they were, and following them gives what eager gives."""

import ast
import collections
import sys

import pytest

from examples.variants import __main__, report, rewrites, source
from examples.variants.measure import Bench, Plan
from examples.variants.rows import Row, read_rows, save

rewrites.load()

FEW = Plan(compared=6, warm_up=2, rounds=1, calls=2)
FAST = ("import inside", "a method, all else attributes", "loss and update in helpers", "an exit stack")
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="names decide before Python 3.11")


def test_each_rewrite_changes_a_program():
    sources = {base: __main__.source_of(base) for base in __main__.BASES}
    for name in rewrites.REWRITES:
        for base, program in sources.items():
            try:
                compile(rewrites.rewritten(program.copy(), [name]).text(), base, "exec")
                break
            except source.NotApplicable:
                pass
        else:
            pytest.fail(f"nothing to rewrite for {name!r}")


def test_pairs_are_the_same_for_a_seed():
    flags = __main__.flags.FLAGS
    flags(["variants", "--pairs=30"])
    drawn = __main__.chosen("mlp")
    assert drawn == __main__.chosen("mlp")
    assert drawn != __main__.chosen("raw")
    assert collections.Counter(map(len, drawn)) == {1: len(rewrites.REWRITES), 2: 30}


def test_a_helper_gets_what_it_reads_and_returns_what_is_read():
    program = rewrites.rewritten(__main__.source_of("dqn"), ["the loss in a helper"])
    helper = next(n for n in ast.walk(program.tree) if getattr(n, "name", None) == "compute_loss")
    assert ast.unparse(helper).startswith("def compute_loss(states, actions, wanted):")
    assert ast.unparse(helper).endswith("return loss")


def test_what_changes_a_program_is_noticed():
    bench = Bench(__main__.source_of("raw"), FEW)
    rewrites.REWRITES["half the rate"] = lambda program: source.rename(program.step.body, "rate", "0.5 * rate")
    try:
        row = bench.measure(("half the rate",))
    finally:
        del rewrites.REWRITES["half the rate"]
    assert row.wrong
    assert "changes the program" in row.error


def test_what_costs_launches_falls_out(tmp_path):
    bench = Bench(__main__.source_of("raw"), Plan(compared=6, warm_up=20, rounds=2, calls=4))
    rewrites.REWRITES["a read"] = lambda program: program.tape()[2].body.extend(source.parsed("float(loss)"))
    try:
        row = bench.measure(("a read",))
    finally:
        del rewrites.REWRITES["a read"]
    assert not row.wrong
    assert row.more_launches > 0
    assert row.falls_out
    assert row.cause
    save([row, Row("raw", ("b",), error="not applicable")], tmp_path / "rows")
    rows = read_rows(tmp_path / "rows")
    assert rows[0] == row
    text = report.render(rows)
    assert "a read" in text
    assert "1 variants: 0 wrong, 1 fall out" in text


@pytest.mark.parametrize("name", FAST)
def test_a_rewritten_program_is_followed_as_eager(name):
    bench = Bench(__main__.source_of("raw"), FEW)
    row = bench.measure((name,))
    assert row.error is None
    assert row.followed == 1.0
    assert row.launches == 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))  # so that workers share them
@pytest.mark.parametrize("base", ["raw", "mlp"])
def test_all_rewritten_programs_are_followed_as_eager(base, part):
    bench = Bench(__main__.source_of(base), FEW)
    rows = [bench.measure((name,)) for name in list(rewrites.REWRITES)[part::4]]
    assert not [(row.name, row.error) for row in rows if row.wrong]
    assert sum(row.followed == 1.0 for row in rows) > len(rows) / 2
