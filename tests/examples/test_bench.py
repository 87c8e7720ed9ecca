"""The benchmark of programs: what it calls right and wrong, what it survives, what it writes, and how it is called."""

import ast
import dataclasses
import json
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from coexec import __main__
from coexec.cli import bench
from examples.bench import chrome, peers, plot, programs, report, table
from examples.bench import measure as timings
from examples.bench.case import Case, forever
from examples.bench.case import Program as BenchProgram
from examples.bench.compare import Course, Unreadable, difference, leaves, verdict
from examples.bench.rows import OURS, VARIANTS, Plan, Row, Variant, read
from examples.bench.trainings import OTHER_DRAWS, measure
from examples.programs import Program, Training

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan(compared=3, warm_up=3, rounds=2)
GRAPHS = ("tf.function", "jit")


def tiny(build) -> Program:
    return Program(build.__name__, "here", "generated", "", build, rtol=1e-4, atol=1e-5)


def descend(function, effect=lambda loss, log: None):
    """A step that descends, and does something in Python beside; `log` is part of the state."""
    weights, log = tf.Variable([1.0, 2.0]), []

    @function
    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(weights * x - 1.0))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        effect(loss, log)
        return loss

    return Training(step=lambda: train(tf.constant([0.5, 0.25])), state=lambda: (weights, log))


@tiny
def plain(function, published=False):
    return descend(function)


@tiny
def counting(function, published=False):
    return descend(function, lambda loss, log: log.append(len(log)))


@tiny
def hoarding(function, published=False):
    return descend(function, lambda loss, log: log.append(loss))


@tiny
def reading(function, published=False):
    return descend(function, lambda loss, log: log.append(loss.numpy()))


@tiny
def drawing(function, published=False):
    tf.random.set_seed(1)
    weights = tf.Variable([1.0, 2.0])

    @function
    def train():
        weights.assign_add(tf.random.uniform((2,)))
        return tf.reduce_sum(weights)

    return Training(step=train, state=lambda: (weights, "unchanged"))


@tiny
def drawing_and_counting(function, published=False):
    training, steps = drawing.build(function), []

    @function
    def train():
        steps.append(1)
        return tf.random.uniform(())

    return Training(step=lambda: (training.step(), train()), state=lambda: (training.state(), len(steps)))


# What a program does.


def test_a_program_that_all_run_rightly_is_timed():
    said = []
    row = measure(plain, PLAN, say=lambda row: said.append(row.doing))
    assert row.error is None
    assert row.finished
    assert {name: variant.error for name, variant in row.variants.items()} == dict.fromkeys(VARIANTS)
    for name, variant in row.variants.items():
        assert len(variant.seconds) == PLAN.rounds, name
        assert variant.first_call > 0
        assert row.ratio(name) > 0
    ours = row.variants["coexec"]
    assert ours.counts["calls"] == PLAN.compared + PLAN.warm_up + PLAN.rounds
    assert ours.counts["followed"]
    assert ours.timed_counts["calls"] == PLAN.rounds
    assert ours.share_followed == 1.0
    assert ours.each_step("launches") == 1.0
    assert ours.explanation.startswith("descend.<locals>.train: a call takes ")
    assert "\n8 calls, " in ours.explanation
    assert str(ROOT) not in ours.explanation
    assert "comparing jit" in said
    assert "timing coexec, round 2 of 2" in said


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (counting, "wrong from step 2: len(state[1]): eager has 2, here is 1"),
        (hoarding, "wrong from step 1: state[1][0]: eager has 0.5"),
        (reading, "fails: AttributeError: 'SymbolicTensor' object has no attribute 'numpy'"),
        (drawing_and_counting, "wrong from step 2: state[1]: eager has 2, here is 1"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_graphs_get_wrong_is_said_and_not_timed(program, says):
    row = measure(program, PLAN)
    for name in GRAPHS:
        assert row.variants[name].error.startswith(says)
        assert not row.variants[name].seconds
    for name in OURS:
        assert row.right(name), row.variants[name].error
        assert len(row.variants[name].seconds) == PLAN.rounds


def test_what_graphs_leave_behind_is_called_symbolic():
    error = measure(hoarding, PLAN).variants["tf.function"].error
    assert error.endswith("here is a symbolic tensor of a trace")


def test_graphs_may_draw_other_numbers_and_co_execution_may_not():
    row = measure(drawing, PLAN)
    assert {name for name in VARIANTS if row.variants[name].note == OTHER_DRAWS} == set(GRAPHS)
    assert all(row.right(name) for name in VARIANTS)


def test_a_program_that_fails_eagerly_is_a_row_with_an_error():
    @tiny
    def broken(function, published=False):
        def step():
            raise ValueError("no data")

        return Training(step, state=list)

    row = measure(broken, PLAN)
    assert row.finished
    assert row.error == "ValueError: no data"


def test_a_variant_that_takes_too_long_is_left_out():
    row = measure(plain, Plan(compared=3, warm_up=1, rounds=1, patience=0.0))
    assert row.variants["jit"].error.startswith("too slow: 0 steps")
    assert row.right("eager")
    assert row.variants["eager"].seconds


# How values are compared.


@pytest.mark.parametrize(
    ("right", "mine"),
    [
        (1.0, tf.constant(1.0 + 1e-6)),
        ([1, "a", None], (np.int64(1), "a", None)),
        ({"a": {2, 3}}, {"a": {3, 2}}),
        (float("nan"), np.float32("nan")),
        (tf.constant([1.5], tf.bfloat16), tf.Variable([1.5])),
        (np.random.default_rng(1), np.random.default_rng(1)),
        (2**70, 2**70),
    ],
)
def test_alike(right, mine):
    assert difference(leaves(right, "it"), leaves(mine, "it"), 1e-5, 1e-6) is None


@pytest.mark.parametrize(
    ("right", "mine", "says"),
    [
        (1.0, 1.1, "it: eager has 1.0, here is 1.1"),
        (3, 4, "it: eager has 3, here is 4"),
        ([1], [1, 2], "len(it): eager has 1, here is 2"),
        ({"a": 1}, {"b": 1}, "it['a']: eager has 1, here is nothing"),
        (None, 1, "it: eager has None, here is 1"),
        (np.zeros(3), np.zeros(2), "it: eager has an array [3], here is an array [2]"),
        (np.zeros(3), np.array([0, 0.5, 0]), "it: an array [3] that is off by up to 0.5"),
        (np.random.default_rng(1), np.random.default_rng(2), "it['state']['state']: eager has "),
        (random.Random(1), random.Random(2), "it[1][1]: eager has "),
    ],
)
def test_different(right, mine, says):
    assert difference(leaves(right, "it"), leaves(mine, "it"), 1e-5, 1e-6).startswith(says)


def test_a_sample_of_an_array_is_spread_over_it():
    (sample,) = leaves(np.arange(10), "it", most=4).values()
    assert sample.shape == (10,)
    assert sample.values.tolist() == [0, 3, 6, 9]


def test_an_object_that_holds_itself_ends():
    class Knot:
        def __init__(self):
            self.number, self.self = 1, self

    assert list(leaves(Knot(), "it")) == ["it.number"]


def test_what_depends_on_random_numbers_must_still_be_readable():
    eager, redrawn = leaves([1.0, 2], "it"), leaves([1.5, 2], "it")
    assert difference(eager, leaves([9.0, 2], "it"), 1e-5, 1e-6, redrawn) is None
    assert difference(eager, leaves([9.0, 3], "it"), 1e-5, 1e-6, redrawn) == "it[1]: eager has 2, here is 3"
    unreadable = {**eager, "it[0]": Unreadable("gone")}
    assert difference(eager, unreadable, 1e-5, 1e-6, redrawn) == "it[0]: eager has 1.0, here is gone"


def test_the_first_step_that_differs_is_named_before_a_later_error():
    def course(losses, error=None):
        made = Course(None, error=error)
        made.losses = [leaves(loss, "losses") for loss in losses]
        made.states = [{} for _ in losses]
        return made

    eager = course([1.0, 2.0, 3.0])
    assert verdict(eager, course([1.0, 2.0, 3.0]), 1e-5, 1e-6) is None
    differs = "wrong from step 2: losses: eager has 2.0, here is 9.0"
    assert verdict(eager, course([1.0, 9.0], "stuck"), 1e-5, 1e-6) == differs
    assert verdict(eager, course([1.0, 2.0], "stuck"), 1e-5, 1e-6) == "fails in step 3: stuck"
    assert verdict(eager, course([], "stuck"), 1e-5, 1e-6) == "fails: stuck"


# The process of a program.

WORKER = """
import json, os, sys, time
name, file, plan, skip = sys.argv[1:]
variants = {"eager": {"name": "eager", "seconds": [2.0]}}
row = {"program": name, "running": "jit", "doing": "comparing jit", "variants": variants}
if "jit" in json.loads(skip):
    variants["jit"] = {"name": "jit", "error": json.loads(skip)["jit"]}
    row.update(running=None, finished=True)
open(file + ".new", "w").write(json.dumps(row))
os.replace(file + ".new", file)
if not row.get("finished"):
    print("the last words", flush=True)
    TROUBLE
"""


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("os.abort()", "crashes: signal 6, the last words"),
        ("sys.exit(3)", "crashes: exit status 3, the last words"),
        ("time.sleep(60)", "hangs: not done after 1 s"),
    ],
)
def test_a_variant_that_takes_its_process_along_costs_its_cell(monkeypatch, trouble, says):
    monkeypatch.setattr(programs, "worker", lambda: [sys.executable, "-c", WORKER.replace("TROUBLE", trouble)])
    row = programs.measure("made_up", PLAN, timeout=1.0)
    assert row.error is None
    assert row.variants["jit"].error == says
    assert row.variants["eager"].seconds == [2.0]


def test_a_process_that_ends_before_it_began_is_a_row_with_an_error(monkeypatch):
    monkeypatch.setattr(programs, "worker", lambda: [sys.executable, "-c", "raise SystemExit('not today')"])
    assert programs.measure("made_up", PLAN, timeout=9.0).error == "crashes: exit status 1, not today"


# What is written.


def made_up_run() -> report.Run:
    counted = {"calls": 2, "launches": 4, "regions": 6, "ops_followed": 30, "ops_recorded": 10, "compiles": 3}
    good = Row("good", variants={
        "eager": Variant("eager", seconds=[0.2, 0.1], first_call=0.5, memory=10.0),
        "tf.function": Variant("tf.function", note="other draws", seconds=[0.02, 0.01], first_call=3.0),
        "jit": Variant("jit", error="wrong from step 2: losses: so & so"),
        "coexec": Variant("coexec", seconds=[0.1, 0.05], timed_counts=counted, counts=counted, memory=12.0),
    })  # fmt: skip
    slow = Row("slow", variants={
        "eager": Variant("eager", seconds=[0.1]),
        "tf.function": Variant("tf.function", error="fails: why"),
        "jit": Variant("jit", error="fails: why"),
        "coexec": Variant("coexec", seconds=[0.2], timed_counts={"calls": 1, "imperative": 1}),
    })  # fmt: skip
    return report.Run("2000-01-02", "2000-01-02, a machine", {"coexec": "1"}, "the command", PLAN, [
        good, slow, Row("gone", error="crashes: signal 9"),
    ])  # fmt: skip


def test_the_tables():
    text = report.as_text(made_up_run())
    times = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
             for line in text.split("\n\n")[1].splitlines()}  # fmt: skip
    assert times["good"] == ["150.0", "15.0 (0.10) [1]", "wrong from step 2 [2]", "", "", "75.0 (0.50)"]
    assert times["slow"] == ["100.0", "fails [3]", "fails [4]", "", "", "200.0 (2.00)"]
    assert times["gone"] == ["cannot [5]"] * 6
    assert "1. good, tf.function: other draws\n2. good, jit_compile=True: wrong from step 2: losses: so & so\n" in text
    assert "6. slow, coexec: 1 of 1 timed calls ran plainly, as following did not pay" in text
    detail = next(line for line in text.splitlines() if line.startswith("| good") and "75%" in line)
    assert [cell.strip() for cell in detail.split("|")[2:-1]] == [
        "75%", "", "2.0", "3.0", "3 (3 timed)", "500.0", "3000.0", "", "", "10", "12",
    ]  # fmt: skip


def test_the_summary():
    run = made_up_run()
    found = report.summary(run.rows)
    assert found["geometric_mean"] == pytest.approx(1.0)
    assert found["worst"] == {"program": "slow", "ratio": 2.0}
    assert found["verdicts"]["tf.function"] == {"right": 1, "fails": 1}
    assert found["verdicts"]["jit"] == {"right": 0, "wrong": 1, "fails": 1}
    assert "`tf.function` does what eager does in 1 of 3 programs (fails: 1)." in report.sentences(run.rows)


def test_the_files(tmp_path):
    run = made_up_run()
    report.write(run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(report.FILES)
    assert report.read(tmp_path / "benchmarks.json") == run
    document = (tmp_path / "BENCHMARKS.md").read_text()
    assert "the command" in document
    assert "3 steps that are not timed, and 2 that are" in document
    drawn = ElementTree.parse(tmp_path / "benchmarks.svg")
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"good", "0.50", "slow", "2.00", "gone", "not measured"} <= set(texts)


@pytest.mark.parametrize("name", ["bench", "peers", "ecosystem"])
def test_the_sections_of_other_commands_outlive_a_new_run(tmp_path, name):
    report.write(made_up_run(), tmp_path)
    document = tmp_path / "BENCHMARKS.md"
    table.write_section(document, name, "| what |", "the other command")
    report.write(made_up_run(), tmp_path)
    kept = table.section(document.read_text(), name)
    assert "| what |" in kept
    assert "the other command" in kept
    with pytest.raises(ValueError, match="no lines <!-- nobody:begin -->"):
        table.section(document.read_text(), "nobody")


@pytest.mark.slow
def test_the_short_table():
    """README's table has the times, and a word where there is none."""
    case = Case("keras-mlp", "a tiny step", lambda: BenchProgram(lambda x: x * 2.0 + 1.0, forever(tf.ones(3))), calls=2)
    result = timings.measure(case, 2)
    result.variants["tf.function"].error = "the result of call 2 is more than 0.1 % away"
    result.variants["jit"] = timings.Variant("jit", result.variants["jit"].program, len, "fails: why")
    *_, row = table.short_table([result]).splitlines()
    what, eager, ours, graph, jit = (cell.strip() for cell in row.split("|")[1:-1])
    assert (what, graph, jit) == ("a tiny step", "other result", "fails")
    assert float(eager) > 0
    assert "(" in ours
    other = dataclasses.replace(result, case=dataclasses.replace(case, name="tiny"))
    assert table.short_table([other]).count("\n") == 1  # no row


@pytest.mark.slow
def test_structures_that_are_new_on_every_call():
    """All ways have the same losses, else the command fails; the times of one round say nothing."""
    command = [sys.executable, "-m", "examples.bench.structures", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("|")]) == 2 + 4


@pytest.mark.slow
def test_what_operations_take():
    """Each of the spellings chosen has a row, and is followed without a divergence."""
    command = [sys.executable, "-m", "examples.bench.operations", "--quick", "v.assign", "tf.reshape"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4
    assert all(any(spelling in line for line in lines) for spelling in ("v.assign(y)", "tf.reshape(v, [-1])"))


@pytest.mark.parametrize("module", peers.LIBRARIES.values())
def test_peers_have_all_cases(module):
    """Each library builds the cases that are asked of it; the libraries themselves need not be there."""
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    (builders,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "BUILDERS"
    )
    assert [key.value for key in builders.keys] == list(peers.NAMES)


@pytest.mark.slow
def test_a_peer_is_timed_beside_the_others_and_not_compared():
    case = Case("tiny", "a tiny step", lambda: BenchProgram(lambda x: x * 2.0 + 1.0, forever(tf.ones(3))), calls=2)
    result = timings.measure(case, 2, {"other": lambda: BenchProgram(lambda: 7.0, forever())})
    assert result.variants["other"].error is None
    assert result.ratio("other") is not None
    alone = dataclasses.replace(result, variants={n: v for n, v in result.variants.items() if n != "other"})
    text = table.render([alone, result], [], goals=True)
    heads, _, *rows = (line.split("|")[1:-1] for line in text.splitlines()[:4])
    assert [head.strip() for head in heads][1:6] == ["eager", "coexec", "tf.function", "jit_compile=True", "other"]
    assert [len(row) for row in rows] == [len(heads)] * 2
    assert [not row[5].strip() for row in rows] == [True, False]  # a case that has no such variant has no cell


def test_a_picture_of_nothing_can_be_drawn():
    ElementTree.fromstring(plot.bars([]))


def test_a_row_reads_back():
    row = made_up_run().rows[0]
    assert read(json.loads(json.dumps(row, default=vars))) == row


def test_a_trace_says_what_each_call_came_to():
    events = chrome.trace(plain, PLAN, steps=2)["traceEvents"]
    assert len([event for event in events if event.get("cat") == "step"]) == 4
    calls = [event for event in events if event.get("cat") == "call" and event["pid"] == 2]
    assert [call["args"]["followed"] for call in calls] == [1, 1]
    assert [call["args"]["launches"] for call in calls] == [1, 1]
    assert sys.getprofile() is None


# The command line.


def test_names_are_listed():
    done = subprocess.run(
        [sys.executable, "-m", "coexec", "bench"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == sorted(names)
    assert {"lenet", "tree_rnn", "yolov3"} <= set(names)
    assert "parts" not in names


def test_arguments_reach_the_benchmark(monkeypatch):
    given = []
    monkeypatch.setattr(programs, "main", lambda arguments: given.append(arguments) or 0)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert __main__.main(["bench", "lenet", "--rounds=3", "--profile", "trace.json"]) == 0
    assert given == [["--program=lenet", "--rounds=3", "--profile=trace.json"]]


def test_without_the_source_tree_it_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "SOURCES", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["bench"])
    assert stopped.value.code == 2
    assert f"this is an installed package, in {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--write", "--program=lenet"], ["--profile=x"], ["--rounds=0"], ["--program=parts"]], ids=str
)
def test_what_makes_no_sense_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        programs.main(arguments)
    assert "error" in capsys.readouterr().err
