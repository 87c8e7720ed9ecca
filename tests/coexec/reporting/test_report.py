"""The report: a page, its data and a trace of what happened; bounded, whole, and written however the process ends."""

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import weakref

import keras
import pytest
import tensorflow as tf

import coexec
from coexec.base import timeline
from coexec.compile.compile_thread import background
from coexec.reporting.report import page_of
from tests.coexec import run_both
from tests.faults import ROOT

X = tf.constant([[1.0, 2.0, 3.0]])


@pytest.fixture(autouse=True)
def compiled():
    """Segments are launched as graphs from their second visit on, however small."""
    with coexec.base.tuning.tuned(launch_visits=2, launch_operations=1):
        yield
    assert timeline.current is None


def training(decorated):
    """A step with a memoized call, one that is not, a read, and a way to go that is new."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(2, name="narrow")

    class Printing(keras.layers.Layer):
        def call(self, x):
            seen.append(1)
            print("called")
            return x * 2.0

    seen = []
    printing = Printing()

    @decorated
    def step(x, other):
        y = printing(layer(x))
        if float(tf.reduce_sum(y)) < 1e9 and other:
            y = tf.square(y)
        return tf.exp(-y)

    return step


def written(directory, calls):
    with coexec.report(directory):
        step = run_both(training, calls, jit_compile=False, name=str(directory))
    data = json.loads((directory / "report.json").read_text())
    (shown,) = [each for each in data["functions"] if each["name"] == str(directory)]
    return step, data, shown


def test_the_data_say_what_happened(tmp_path):
    step, data, shown = written(tmp_path / "new" / "report", [(X, False)] * 7 + [(X, True)])
    stats = step.stats()
    assert shown["stats"]["calls"] == stats.calls == 8
    assert shown["stats"]["diverged"] == 1
    assert shown["explain"] == str(step.explain())
    memoized = {(call["name"], call["state"]): call for call in shown["memoized"]}
    assert memoized["Dense 'narrow'.__call__", "memoized"]["skipped"] == stats.regions > 2
    (refused,) = [call for call in shown["memoized"] if call["name"].startswith("Printing ")]
    assert refused["state"] == "not memoized"
    assert "may do more than compute" in refused["reason"]
    assert refused["place"].startswith(__file__)
    reads = {line["source"]: line["reads"] for line in shown["lines"] if line["reads"]}
    assert reads == {"if float(tf.reduce_sum(y)) < 1e9 and other:": 7}
    launches = {line["source"]: line["launches"] for line in shown["lines"] if line["launches"]}
    assert launches == {"if float(tf.reduce_sum(y)) < 1e9 and other:": 7, "return tf.exp(-y)": 6}
    assert [cause["line"] > 0 for cause in shown["causes"] if cause["id"] == "CX-DIVERGE"] == [True]
    assert sum(shown["rate"]["calls"]) == 8
    assert len(shown["segments"]) == 1  # the last call diverged behind its first
    assert shown["graph"]["nodes"] == len(step.trace_graph.nodes) - 1
    assert data["about"]["tensorflow"] == tf.__version__


def test_the_trace_is_one_that_perfetto_reads(tmp_path):
    """Complete events with times in microseconds, inside of each other or apart; names of threads."""
    _, data, _ = written(tmp_path, [(X, False)] * 7 + [(X, True)])
    trace = json.loads((tmp_path / "trace.json").read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    moments = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert len(complete) + len(moments) == len(data["timeline"]["events"])
    assert len(moments) == 1
    assert {event["tid"] for event in complete} <= names.keys()
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in complete)
    for one in complete:
        for other in complete:
            ends = one["ts"] + one["dur"], other["ts"] + other["dur"]
            assert one["ts"] >= ends[1] - 0.01 or other["ts"] >= ends[0] - 0.01 or (
                (one["ts"] <= other["ts"] + 0.01) == (ends[0] >= ends[1] - 0.01) or one["ts"] == other["ts"]
            )  # fmt: skip


def test_the_page_is_one_file(tmp_path):
    written(tmp_path, [(X, False)] * 3)
    page = (tmp_path / "index.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "report.json", "trace.json"]
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\bsrc=|@import|url\(|<link (?!rel=\"icon\" href=\"data:,\")", page)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data) == json.loads((tmp_path / "report.json").read_text())


def test_nothing_in_the_data_ends_the_script():
    hostile = {"name": "</script><script>alert(1)</script><!--", "other": "/*script*/ \\1 \u2028"}
    page = page_of(hostile)
    assert page.count("</script>") == 2
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data) == hostile


def test_without_a_call_there_is_a_report(tmp_path):
    with coexec.report(tmp_path) as report:
        pass
    assert json.loads((tmp_path / "report.json").read_text())["timeline"]["events"] == []
    assert report.page == tmp_path / "index.html"
    assert "written" in repr(report)


def test_what_was_called_before_is_written_at_once(tmp_path):
    """Without events, which nobody has recorded; then it is kept up to date on request, and at its end."""
    step = training(coexec.function(name=str(tmp_path)))
    for _ in range(4):
        step(X, False)

    def calls():
        data = json.loads((tmp_path / "report.json").read_text())
        (mine,) = [each["stats"]["calls"] for each in data["functions"] if each["name"] == str(tmp_path)]
        return mine, len(data["timeline"]["events"])

    report = coexec.report(str(tmp_path))
    assert calls() == (4, 0)
    step(X, False)
    assert calls() == (4, 0)
    report.write()
    assert calls()[0] == 5
    step(X, False)
    report.close()
    six, events = calls()
    assert six == 6
    assert events > 4
    step(X, False)
    report.close()
    assert calls() == (six, events)


def test_functions_called_meanwhile_come_first(tmp_path):
    """One that was only called before, however long that took, is none that a page begins with."""
    before = training(coexec.function(name=f"{tmp_path} before"))
    for _ in range(30):
        before(X, False)
    meanwhile = training(coexec.function(name=f"{tmp_path} meanwhile"))
    with coexec.report(str(tmp_path)):
        meanwhile(X, False)
    names = [each["name"] for each in json.loads((tmp_path / "report.json").read_text())["functions"]]
    assert names[0] == f"{tmp_path} meanwhile"
    assert f"{tmp_path} before" in names


def test_functions_that_are_gone_are_shown_and_released_then(tmp_path):
    """A report at the end of a script has those of its `main`, and the compile thread, idle again, holds none."""
    with coexec.report(tmp_path):
        step = training(coexec.function(name=str(tmp_path)))
        step(X, False)
        assert background.submit("a job", lambda: None)
        assert background.wait(60.0)
        controller = weakref.ref(step._controller)
        del step
        gc.collect()
        assert controller() is not None
    data = json.loads((tmp_path / "report.json").read_text())
    assert [each["stats"]["calls"] for each in data["functions"] if each["name"] == str(tmp_path)] == [1]
    gc.collect()
    assert controller() is None


def test_calls_are_steps_of_tensorflows_profile(tmp_path):
    """While a report is kept, a profile has a marker with the number of the step for each call, by name."""
    step = training(coexec.function(name="marked"))
    step(X, False)
    found = []
    for kept in (True, False):
        folder = tmp_path / str(kept)
        with coexec.report(tmp_path / "report") if kept else contextlib.nullcontext():
            with tf.profiler.experimental.Profile(str(folder)):
                step(X, False)
        (profile,) = folder.rglob("*.xplane.pb")
        found.append([name in profile.read_bytes() for name in (b"marked", b"step_num")])
    assert found == [[True, True], [False, False]]


@pytest.mark.parametrize("directory", [None, 3])
def test_a_directory_is_a_path(directory):
    with pytest.raises(TypeError):
        coexec.report(directory)


def test_a_directory_that_cannot_be_made(tmp_path):
    """Is told at once, not when the program is through."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(OSError, match="file"):
            coexec.report(path)


PROGRAM = """
import os, sys
import tensorflow as tf
import coexec

report = coexec.report(sys.argv[1])
step = coexec.function(lambda x: tf.exp(x) * 2.0, name="step")
for _ in range(5):
    step(tf.ones([2]))
if sys.argv[2] == "fork":
    if os.fork() == 0:
        sys.exit(0)  # its handlers run, and write nothing
    os.wait()
    assert not os.path.exists(report.page)
if sys.argv[2] == "raise":
    raise KeyError("planned")
"""


@pytest.mark.parametrize("how", ["end", "raise", "fork"])
def test_it_is_written_when_the_process_ends(how, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    arguments = [sys.executable, str(program), str(tmp_path / "report"), how]
    done = subprocess.run(arguments, env=given, capture_output=True, text=True, check=False)
    assert (done.returncode, "planned" in done.stderr) == ((1, True) if how == "raise" else (0, False)), done.stderr
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [(each["name"], each["stats"]["calls"]) for each in data["functions"]] == [("step", 5)]
    assert len(data["timeline"]["events"]) >= 5
