"""The version of TensorFlow: one that is tested is followed; with any other, functions run plainly, and say so once."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tensorflow as tf

from tracer import versions

ROOT = Path(__file__).resolve().parent.parent.parent

# Python effects, Keras, a tape and a fit, with every kind of decorator.
PROGRAM = textwrap.dedent("""
    import os, sys, warnings
    import keras, numpy as np, tensorflow as tf
    tf.__version__ = {version!r}
    {before}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        import coexec
        from tracer import hooks, library
    told = [each for each in found if "TensorFlow" in str(each.message)]
    layer = keras.layers.Dense(2, kernel_initializer="ones")
    v, seen = tf.Variable(1.0), []

    @coexec.pure
    def helper(x):
        return x * 2.0

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(helper(x))) * v
        seen.append(float(loss))
        v.assign_sub(0.1 * tape.gradient(loss, v))
        return loss

    made = [coexec.function(step), coexec.function(step, regions="all", strict=True),
            coexec.function(step, control_flow=True), coexec.function(step, batching=True)]
    for function in made:
        v.assign(1.0)
        losses = [float(function(tf.ones([2, 3]))) for _ in range(4)]
        assert np.allclose(losses, [24.0, -33.6, -91.2, -148.8]), losses
        assert seen == losses
        seen.clear()
    with coexec.validate(), coexec.fail_on_divergence():
        made[0](tf.ones([2, 3]))
    model = coexec.accelerate(keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")]))
    model.compile("sgd", "mse")
    model.fit(np.ones([8, 2], "float32"), np.ones([8, 1], "float32"), batch_size=2, epochs=2, verbose=0)
    made.append(model.train_function)
    stats = [function.stats() for function in made]
""")

PLAINLY = PROGRAM + textwrap.dedent("""
    assert all(s.calls == s.imperative > 0 for s in stats), stats
    assert sum(s.followed + s.recorded + s.diverged + s.launches + s.compiles for s in stats) == 0
    hooked = [entry for each in hooks.registry for entry in each.entries()]
    assert hooked == [], hooked
    assert os.environ.get("XLA_FLAGS", "") == ""
    assert "TensorFlow 2.99.0 is untested" in made[0].explain()
    (warning,) = told
    assert warning.filename == __file__, warning.filename
    print(warning.message)
""")

FOLLOWED = PROGRAM + textwrap.dedent("""
    assert not told
    assert stats[0].followed >= 3, stats[0]
    print("followed")
""")


def ran(path, program, **variables):
    """Runs a program in a process of its own."""
    path.write_text(program)
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "COEXEC_ANY_TENSORFLOW": "0", **variables}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])
    environ.pop("XLA_FLAGS", None)
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=250, env=environ)


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        *((f"{each}.0", True) for each in versions.TESTED), ("2.18.1", True), ("2.21.0-rc1", True), ("2.17.1", False),
        ("2.22.0", False), ("2.210.0", False), ("3.0.0", False), ("12.21.0", False), ("", False),
    ],
)  # fmt: skip
def test_minor_versions_are_tested(version, tested):
    assert versions.is_tested(version) == tested


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("3.8.0", True), ("3.15.1", True), ("3.99.0", True), ("3.7.0", False), ("3.0.5", False), ("4.0.0", False),
        ("2.15.0", False), ("30.8.0", False), ("3", False), ("", False),
    ],
)  # fmt: skip
def test_versions_of_keras(version, tested):
    assert versions.has_tested_keras(version) == tested


def test_an_untested_keras_runs_plainly_too(monkeypatch):
    monkeypatch.setattr(versions.keras, "__version__", "3.7.0")
    assert versions._untested() == "Keras 3.7.0"
    monkeypatch.setenv("COEXEC_ANY_TENSORFLOW", "1")
    assert versions._untested() == ""


def test_an_untested_version_runs_plainly(tmp_path):
    """Nothing is hooked, recorded or compiled, the program does the same, and one warning names what to do."""
    found = ran(tmp_path / "program.py", PLAINLY.format(version="2.99.0", before=""))
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout == (
        "co-executed functions run plainly: coexec is tested with TensorFlow 2.18 to 2.21 and Keras from 3.8 on, and "
        "this is TensorFlow 2.99.0. Install what is tested: pip install 'tensorflow==2.21.*' 'keras>=3.8,<4'; or set "
        "COEXEC_ANY_TENSORFLOW=1 to try this one, at your own risk\n"
    )


def test_an_untested_version_that_lacks_a_private_part(tmp_path):
    """It says which, and what to do, instead of a traceback about TensorFlow's inner modules alone."""
    gone = "from tensorflow.python.ops import script_ops; del script_ops.FuncRegistry"
    found = ran(tmp_path / "program.py", PLAINLY.format(version="2.99.0", before=gone))
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: coexec cannot be imported: cannot import name 'FuncRegistry' from ")
    assert "and this is TensorFlow 2.99.0. Install what is tested: pip install 'tensorflow==2.21.*' " in last


def test_any_version_is_followed_on_request(tmp_path):
    found = ran(tmp_path / "program.py", FOLLOWED.format(version="2.99.0", before=""), COEXEC_ANY_TENSORFLOW="1")
    assert (found.returncode, found.stdout) == (0, "followed\n"), found.stderr[-2000:]


def test_this_version_is_tested():
    assert versions.UNTESTED == ""
    assert tf.__version__.startswith(versions.TESTED)


def test_the_package_asks_for_the_tested_versions():
    """Those, and no others, are what pip may install."""
    major, last = versions.TESTED[-1].split(".")
    wanted = f'"tensorflow>={versions.TESTED[0]},<{major}.{int(last) + 1}"'
    project = (ROOT / "pyproject.toml").read_text()
    assert wanted in project
    assert f'"keras>={versions.KERAS[0]}.{versions.KERAS[1]},<{versions.KERAS[0] + 1}"' in project
    minors = [int(each.split(".")[1]) for each in versions.TESTED]
    assert minors == list(range(minors[0], minors[-1] + 1))
