"""Control flow on the device is optional: the base works without the package, and the package without recursion."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] == ["coexec", "control_flow"]:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""

PROGRAMS = """
import keras
import numpy as np
import tensorflow as tf

import coexec
from coexec import testing
from tests.snapshots import assert_same, snapshot


def keras_step(decorate):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    optimizer, objective = keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)
    losses = []

    @decorate
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = objective(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        losses.append(float(loss))
        return loss

    return step, lambda n: (tf.reshape(tf.range(8.0) * 0.1 * n, [2, 4]), tf.constant([n % 3, 1])), (losses, model)


def tape_step(decorate):
    w, log = tf.Variable([[0.1, -0.2], [0.05, 0.2]]), []

    @decorate
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.sigmoid(x @ w) * x)
        g = tape.gradient(y, w)
        w.assign_sub(0.1 * g)
        log.append(y.numpy())
        return y, g

    return step, lambda n: (tf.reshape(tf.range(4.0) + n, [2, 2]),), (w, log)


def decisions(decorate):
    seen = []

    @decorate
    def step(x):
        while tf.reduce_sum(x) < 10.0:
            x = x + 1.5
        y = x * 2.0 if x[0] > 3.0 else x - 1.0
        if tf.reduce_max(y) > 8.0:
            seen.append(int(y[0]))
            return y
        assert x[0] < 100.0
        tf.debugging.assert_less(x, 100.0)
        return square(y)

    square = tf.function(lambda v: v * v)
    return step, lambda n: (tf.constant([float(n), 1.0]),), (seen,)


def state(value):
    return [v.numpy() for v in value.variables] if isinstance(value, keras.Model) else value


for make in (keras_step, tape_step, decisions):
    expected, arguments, theirs = make(lambda f: f)
    found, _, ours = make(coexec.function)
    with testing.compile_everything(), testing.trust_compiled(), testing.always_follow():
        for n in range(12):
            one, other = snapshot(expected(*arguments(n % 5))), snapshot(found(*arguments(n % 5)))
            assert_same(one, other, rtol=1e-5, atol=1e-6)
            assert_same(snapshot([*map(state, theirs)]), snapshot([*map(state, ours)]), rtol=1e-5, atol=1e-6)
    stats = found.stats()
    assert stats.followed >= 4 and stats.launches >= 4, stats
    assert stats.decisions_on_device == 0
"""

ALONE = """
import sys
assert not [name for name in sys.modules if name.startswith("coexec.control_flow")]
try:
    coexec.function(lambda x: x, control_flow=True)
except ImportError as error:
    assert "blocked" in str(error)
else:
    raise AssertionError
print("as eager")
"""

RECURSION = """
import tensorflow as tf

import coexec
from coexec import testing
from coexec.control_flow.run import decisions

decisions.patience = 1


def fib(n):
    if n < 2.0:
        return n
    return fib(n - 1.0) + fib(n - 2.0)


@coexec.function(control_flow=True)
def recursive(x):
    y = fib(x)
    return y * 2.0


@coexec.function(control_flow=True)
def branching(x):
    if x > 2.0:
        x = x * 3.0
    while x < 20.0:
        x = x + 1.0
    return x


with testing.compile_everything(), testing.trust_compiled(), testing.always_follow():
    for _ in range(3):
        for n, number in enumerate((0, 1, 1, 2, 3, 5, 8)):
            assert float(recursive(tf.constant(float(n)))) == 2.0 * number
            assert float(branching(tf.constant(float(n)))) == (20.0 if n < 7 else 21.0)
assert branching.stats().decisions_on_device > 20
print("on the device" if recursive.stats().decisions_on_device else "Python's")
"""


def run(program, folder, root=ROOT):
    """What a program prints in a process of its own, whose packages are those of `root`."""
    file = folder / "program.py"  # decisions on the device need source
    file.write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)])}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_the_base_works_where_control_flow_cannot_be_imported(tmp_path):
    """A Keras step, a tape, reads and decisions of Python's, as eagerly; only the option needs the package."""
    assert run(WITHOUT + PROGRAMS + ALONE, tmp_path) == "as eager"


@pytest.fixture
def without_recursion(tmp_path):
    """A copy of the packages without the folder, and without the line that imports it."""
    for package in ("coexec", "tracer"):
        shutil.copytree(ROOT / package, tmp_path / "root" / package, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "root" / "coexec" / "control_flow"
    shutil.rmtree(folder / "recursion")
    lines = (folder / "__init__.py").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "import recursion" not in line]
    assert len(kept) == len(lines) - 1
    (folder / "__init__.py").write_text("".join(kept))
    return tmp_path / "root"


def test_recursion_is_one_folder_and_one_line(without_recursion, tmp_path):
    """Without it Python calls such functions as ever; everything else is the device's still."""
    assert run(RECURSION, tmp_path) == "on the device"
    assert run(RECURSION, tmp_path, without_recursion) == "Python's"
