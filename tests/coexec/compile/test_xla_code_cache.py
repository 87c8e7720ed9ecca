"""What is kept on disk: a second process compiles nothing and measures nothing again, and gets the same values."""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tensorflow as tf

from coexec.compile import xla_code_cache
from coexec.compile.disk_store import Store
from coexec.compile.platform_key import circumstances
from tracer.private import context

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, sys, time
import numpy as np
import tensorflow as tf
import coexec
from coexec import testing
from coexec.compile import xla_code_cache
from coexec.compile.compile_thread import background
from coexec.compile.executable import Executable
from coexec.launch import backend_race
from coexec.base.tuning import tuning

tuning.xla_price = 0.0
launch, slow = Executable.launch, {"auto": "graph", "plain": "xla"}
launched = []

def slowed(self, *given):
    launched.append(self.backend)
    if self.backend == slow.get(which):
        time.sleep(0.02)
    return launch(self, *given)

Executable.launch = slowed

def training(count):
    weights = [tf.Variable(tf.random.stateless_normal([8, 8], [n, 1]) * 0.3) for n in range(count)]

    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for w in weights:
                y = tf.tanh(y @ w)
            y = tf.stop_gradient(tf.sort(y, axis=1)) + tf.cumsum(tf.nn.softmax(y), axis=0)
            loss = tf.reduce_mean(y * y)
        for w, g in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * g)
        return loss

    return step

X = tf.reshape(tf.linspace(-1.0, 1.0, 64), [8, 8])
told = {"active": xla_code_cache.active, "inherited": os.environ.get("TF_XLA_FLAGS")}
with testing.always_follow():
    for which, count, options in [("forced", 3, {"jit_compile": True}), ("auto", 4, {}), ("plain", 5, {})]:
        fn = coexec.function(training(count), **options)
        losses, launched[:] = [], []
        for n in range(30):
            losses.append(float(fn(X)))
            if n % 5 == 4:
                assert background.wait(120)
        stats = fn.stats()
        told[which] = {
            "losses": losses, "eager": [float(v) for step in [training(count)] for v in (step(X) for _ in range(30))],
            "compiles": stats.compiles, "loaded": stats.loaded, "launched": launched[:],
            "backend": [c.executable.backend for c in fn._controller.segments._all if c.executable],
            "explained": [line for line in fn.explain().splitlines() if "ms a launch" in line],
        }

@tf.function(jit_compile=True)
def mine(x):
    return tf.tanh(x)

np.testing.assert_allclose(mine(X), tf.tanh(X), rtol=1e-5)
print(json.dumps(told))
"""


def run(directory, before="import tensorflow as tf", **environment):
    """Runs the program in a process of its own; returns what it told, and what TensorFlow wrote on the terminal."""
    given = {**os.environ, "COEXEC_CACHE_DIR": str(directory), "TF_CPP_MIN_LOG_LEVEL": "0", **environment}
    command = [sys.executable, "-c", textwrap.dedent(before) + PROGRAM]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, env=given)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1]), found.stderr


def assert_right(told):
    for which in ("forced", "auto", "plain"):
        ours, eager = told[which]["losses"], told[which]["eager"]
        assert all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(ours, eager, strict=True)), (which, ours, eager)


def entries(directory, kind):
    return sorted(Path(directory).glob(f"*/*.{kind}"))


def assert_all_is_new(told):
    """That nothing came from disk: XLA compiled, and backends were measured."""
    assert_right(told)
    assert [told[which]["loaded"] for which in ("forced", "auto", "plain")] == [0, 0, 0]
    assert [told[which]["compiles"] for which in ("forced", "auto", "plain")] == [1, 2, 2]
    assert told["auto"]["launched"].count("graph") > 5
    assert told["plain"]["launched"].count("xla") > 5


def assert_all_is_known(told):
    """That XLA compiled nothing, and what it has won competes for some launches only; what it has lost, for none."""
    assert_right(told)
    assert [told[which]["loaded"] for which in ("forced", "auto", "plain")] == [1, 1, 0]
    assert [told[which]["compiles"] for which in ("forced", "auto", "plain")] == [1, 2, 1]
    assert told["forced"]["backend"] == told["auto"]["backend"] == ["xla"]
    auto = told["auto"]["launched"]
    assert set(auto[-5:]) == {"xla"}
    assert "graph" in auto[auto.index("xla") :]
    assert set(told["plain"]["launched"]) == {"graph"}
    assert [line.endswith("(found by an earlier process)") for line in told["plain"]["explained"]] == [True]


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    """Code and choices of the first process are used by the second; damaged ones are not, and made anew."""
    first, terminal = run(tmp_path)
    assert first["active"]
    assert first["inherited"] is None  # no flag of ours reaches the processes that a program starts
    assert_all_is_new(first)
    assert (len(entries(tmp_path, "code")), len(entries(tmp_path, "choice"))) == (3, 2)

    second, terminal = run(tmp_path)
    assert_all_is_known(second)
    assert second["forced"]["losses"] == first["forced"]["losses"]  # of the same code: to the bit
    assert "AOT" not in terminal  # TensorFlow's warning of features that no machine has

    cut, flipped, _ = entries(tmp_path, "code")
    cut.write_bytes(cut.read_bytes()[:-100])
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    for choice in entries(tmp_path, "choice"):
        choice.write_bytes(b"{")
    third, _ = run(tmp_path)
    assert_right(third)
    assert sum(third[which]["loaded"] for which in ("forced", "auto", "plain")) == 1
    fourth, _ = run(tmp_path)
    assert_all_is_known(fourth)


@pytest.mark.slow
def test_processes_at_the_same_time(tmp_path):
    """Processes that write the same entries at the same time leave whole ones."""
    with ThreadPoolExecutor(2) as pool:
        for told, _ in pool.map(run, [tmp_path] * 2):
            assert_right(told)
    told, _ = run(tmp_path)
    assert_all_is_known(told)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]


@pytest.mark.slow
def test_code_that_xla_does_not_take(tmp_path):
    """An entry that is right as a file, and wrong as code, costs a compilation and is not tried again."""
    run(tmp_path)
    program = f"""
    import tensorflow as tf
    import coexec
    from coexec.compile import xla_code_cache
    from coexec.compile.disk_store import store
    from pathlib import Path
    for path in Path({str(tmp_path)!r}).glob("*/*.code"):
        files = xla_code_cache._unpack(store().read(path.name))
        assert files
        assert store().write(path.name, xla_code_cache._pack({{n: c[: len(c) // 2] for n, c in files.items()}}))
    """
    for before in (program, ""):
        told, _ = run(tmp_path, before)
        assert_right(told)
        assert [told[which]["loaded"] for which in ("forced", "auto", "plain")] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("why", ["off", "not a directory", "open to others", "TensorFlow runs already"])
def test_without_a_cache(tmp_path, why):
    """Where nothing can be kept, all goes on as without it: no error, no file."""
    directory, before = tmp_path / "cache", "import tensorflow as tf"
    if why == "off":
        directory = "off"
    elif why == "not a directory":
        directory.write_text("")
    elif why == "open to others":
        directory.mkdir()
        directory.chmod(0o777)
    else:
        before += "\ntf.constant(1.0) + 1.0"
    told, _ = run(directory, before)
    assert_all_is_new(told)
    assert told["active"] == (why in ("not a directory", "open to others"))
    kept = ["choice"] * 2 if why == "TensorFlow runs already" else []
    assert [path.suffix[1:] for path in tmp_path.rglob("*.c*") if path.is_file()] == kept


def test_code_is_given_to_tensorflow_as_a_whole(tmp_path, monkeypatch):
    """No other thread that compiles sees a part of a file: it would fail, where without a cache it would not."""
    where = Store(str(tmp_path), "0" * 32)
    monkeypatch.setattr(xla_code_cache, "active", True)
    monkeypatch.setattr(xla_code_cache, "store", lambda: where)
    entry = f"some_function.{circumstances(context.context().device_name)}.code"
    assert where.write(entry, xla_code_cache._pack({"whole.pb": b"of some_function"}))
    write, seen = tf.io.gfile.GFile.write, []

    def half(file, content):
        write(file, content[: len(content) // 2])
        file.flush()
        seen.append("whole.pb" in xla_code_cache._names())
        write(file, content[len(content) // 2 :])

    monkeypatch.setattr(tf.io.gfile.GFile, "write", half)
    with xla_code_cache.kept("some_function") as code:
        with tf.io.gfile.GFile(f"{xla_code_cache._DIRECTORY}/whole.pb", "rb") as file:
            assert file.read() == b"of some_function"
        assert not [n for n in tf.io.gfile.listdir(xla_code_cache._DIRECTORY) if n.endswith(".tmp")]
    assert (seen, code.loaded) == ([False], True)
    tf.io.gfile.remove(f"{xla_code_cache._DIRECTORY}/whole.pb")


MEMORY = """
import tensorflow as tf
import coexec
from coexec.base.tuning import tuning
from coexec import testing
from coexec.compile import xla_code_cache

x = tf.ones([8])

@tf.function(jit_compile=True)
def mine(x, number):
    return tf.tanh(x) + number

with testing.always_follow(), testing.compile_everything():
    for number in range(5):
        mine(x, float(number))
    assert len(xla_code_cache._names()) == 5
    fn = coexec.function(lambda x: tf.tanh(x) * 2.0)
    for _ in range(3):
        fn(x)
    assert len(xla_code_cache._names()) == 6
    tuning.code_lingers = 0.0
    other = coexec.function(lambda x: tf.tanh(x) * 3.0)
    for _ in range(3):
        other(x)
    assert len(xla_code_cache._names()) == 1
    mine(x, 0.0), mine(x, 7.0), fn(x), other(x)
    coexec.clear(disk=True)
    assert fn(x)[0] == 2.0 * tf.tanh(1.0)
"""


@pytest.mark.slow
def test_files_in_memory_go(tmp_path):
    """What XLA has compiled for others does not pile up in memory; it is not kept on disk, and goes on working."""
    given = {**os.environ, "COEXEC_CACHE_DIR": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    found = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, env=given)
    assert found.returncode == 0, found.stderr[-3000:]
    assert list(tmp_path.iterdir()) == []  # emptied by `coexec.clear`
