"""The suite of other people's programs: what it calls right and wrong, what it skips, and the table that it writes."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import tensorflow as tf

from coexec.base.causes import Cause, Kind, Tally
from coexec.base.explanation import Pace, explained
from coexec.base.stats import Stats
from examples.ecosystem import EXAMPLES, Example, __main__, example
from examples.ecosystem.measure import measure, told
from examples.ecosystem.rows import Plan, Row, as_markdown, half_of, read

PLAN = Plan(calls=16, compared=8, steady=12)


@pytest.fixture
def registered():
    before = dict(EXAMPLES)
    yield
    EXAMPLES.clear()
    EXAMPLES.update(before)


def descend(effect=lambda: 0.0):
    """A step that descends, draws random numbers, and adds what Python computes beside."""
    weights = tf.Variable([1.0, 2.0])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(weights * x - tf.random.uniform([2])))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss + effect()

    return Example(step, lambda: weights, [(tf.constant([0.5, 0.25]),), (tf.constant([0.25, 0.5]),)])


def test_two_runs_draw_the_same_numbers(registered):
    @example()
    def right():
        return descend(lambda: float(np.random.normal()))

    row = measure("right", "rows", PLAN)
    assert row.finished
    assert row.wrong is None
    assert len(row.followed["wall"]) == len(row.eager["cpu"]) == 16
    assert row.counts["launches"] >= 1  # it was followed
    assert row.counts["followed"] == 1
    assert row.steady_from == 12


def test_what_eager_does_not_do_is_wrong(registered):
    built = []

    @example()
    def different():
        built.append(len(built))  # another number for each run
        return descend(lambda number=built[-1]: 0.01 * number)

    row = measure("different", "rows", PLAN)
    assert "call 1" in row.wrong
    assert "wrong" in as_markdown([row], "wall")


def test_a_state_that_differs_is_wrong(registered):
    built = []

    @example()
    def different():
        built.append(len(built))
        made, number = descend(), built[-1]
        return Example(made.step, lambda: number, made.arguments)

    assert "after 8 calls" in measure("different", "rows", PLAN).wrong


def test_a_library_that_is_not_installed_is_skipped():
    row = measure("anything", "no_such_module", PLAN)
    assert "no_such_module" in row.skipped
    assert "skipped, ModuleNotFoundError" in as_markdown([row], "wall")


def test_causes_are_counted_by_kind():
    causes = {
        Cause(Kind.READ, "a value was read in /x/lib/site-packages/a.py", "a.py:1 in f"): Tally(12),
        Cause(Kind.READ, "a value was read in a.py", "a.py:9 in f"): Tally(3),
        Cause(Kind.BACKOFF, "after 16 calls", "step"): Tally(1),
    }

    class Function:
        def explain(self):
            return explained("step", Stats(calls=3), causes, Pace())

    assert told(Function()) == {("segment cut", "a value was read in a.py"): 15, ("backed off", "after N calls"): 1}


def test_the_table_has_ratios_and_means():
    times = {clock: [2.0] * 30 for clock in ("wall", "cpu")}
    rows = [
        Row(name, "m", eager=times, followed={c: [factor * t for t in v] for c, v in times.items()}, steady_from=20,
            counts={"regions": 1, "launches": 2, "imperative": 0}, causes=[(1.5, "segment cut", "a read")],
            finished=True)
        for name, factor in (("a", 0.5), ("b", 0.125))
    ]  # fmt: skip
    text = as_markdown(rows, "cpu")
    assert "| geometric mean | " in text
    assert text.splitlines()[6].count("0.25") == 3
    assert "* a: 1.5 x segment cut: a read" in text


def test_halves_have_means_of_their_own():
    times = {clock: [2.0] * 30 for clock in ("wall", "cpu")}
    rows = [
        Row(name, module, eager=times, followed={c: [factor * t for t in v] for c, v in times.items()}, steady_from=20,
            counts=dict.fromkeys(["regions", "launches", "imperative"], 0.0), finished=True)
        for name, module, factor in (("a", "m", 0.5), ("b", "chosen_after.m", 0.125), ("c", "chosen_after.n", 0.5))
    ]  # fmt: skip
    before, after = as_markdown(rows, "cpu").split("Chosen after")
    assert [before.count("0.50"), before.count("0.25"), before.count("0.12")] == [6, 0, 0]
    assert [after.count("0.50"), after.count("0.25"), after.count("0.12")] == [3, 3, 3]


def test_rows_survive_the_way_through_a_file(tmp_path):
    row = Row("a", "m", causes=[(1.0, "kind", "text")], wrong="call 1", steady_from=3)
    row.save(tmp_path / "row.json")
    assert read(json.loads((tmp_path / "row.json").read_text())) == row


def test_what_was_measured_is_rendered_and_written(tmp_path, monkeypatch, capsys):
    file = tmp_path / "BENCHMARKS.md"
    file.write_text("# Benchmarks\n\n<!-- ecosystem:begin -->\nold\n<!-- ecosystem:end -->\nmore\n")
    times = {clock: [0.5] * 30 for clock in ("wall", "cpu")}
    row = Row("a", "m", eager=times, followed=times, counts=dict.fromkeys(["regions", "launches", "imperative"], 0.0),
              finished=True)  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps([asdict(row)]))
    monkeypatch.setattr(__main__, "ROOT", tmp_path)
    assert __main__.main([f"--render={tmp_path / 'rows.json'}", "--write"]) == 0
    assert "| geometric mean" in capsys.readouterr().out
    text = file.read_text()
    assert "old" not in text
    assert text.endswith("more\n")
    assert "500.0" in text


def test_examples_are_found_without_importing_them():
    found = __main__.examples()
    assert len(found) >= 40
    assert all(about for _, about in found.values())
    assert found["kmeans"][0] == "sets_and_graphs"
    after = [module for module, _ in found.values() if half_of(module) == "after"]
    assert len(after) >= 20
    assert "chosen_after.decoding" in after
