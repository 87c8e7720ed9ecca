"""`python -m coexec run`: its fit and named functions are followed, and its output and errors are its own."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.faults import ROOT

FIT = """
import sys
import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)
x = np.linspace(-1, 1, 128, dtype="float32").reshape(32, 4)
losses = model.fit(x, x[:, :1], epochs=4, batch_size=4, verbose=0, shuffle=False).history["loss"]
print(__name__, sys.argv[1:], *(f"{loss:.5f}" for loss in losses))
"""
STEP = """
import tensorflow as tf

def step(x):
    return tf.reduce_sum(tf.tanh(x) * 2.0)
"""
TRAIN = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)

def loss_of(x, y):
    return tf.reduce_mean(tf.square(model(x, training=True) - y))

def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(x, y)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return float(loss)

def main():
    x = np.linspace(-1, 1, 128, dtype="float32").reshape(32, 4)
    for epoch in range(3):
        losses = [train_step(x, x[:, :1]) for _ in range(100)]
        print(epoch, *(f"{loss:.4f}" for loss in losses[::20]))

main()
"""
LOOP = """
import tensorflow as tf
import steps

print(*(round(float(steps.step(tf.ones([4]) * n)), 4) for n in range(10)))
"""


@pytest.fixture
def script(tmp_path):
    """Writes scripts, and runs the last with `python` and arguments before it."""

    def run(*before, after=(), **files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        given = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        arguments = [sys.executable, *before, str(tmp_path / f"{name}.py"), *after]
        return subprocess.run(arguments, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)

    return run


RUN = ("-m", "coexec", "run")
# A machine may be so busy that so short a script loses.
GAIN = r"coexec: (gained: [0-9.e-]+ s; the script took [0-9.]+ s instead of [0-9.]+|lost: [0-9.e-]+ s of the .*)"


def test_fit_of_an_unmodified_script_is_followed(script):
    """Its output is what Python makes of it, arguments included; what was gained comes after it, on stderr."""
    plain, followed = (script(*how, after=("--epochs", "3"), fit=FIT) for how in ((), RUN))
    assert plain.returncode == followed.returncode == 0, followed.stderr
    assert plain.stdout == followed.stdout
    assert plain.stdout.startswith("__main__ ['--epochs', '3'] 1.07")
    said = [line for line in followed.stderr.splitlines() if line.startswith("coexec: ")]
    assert said[0].startswith("coexec: Sequential.train_step: a call takes ")
    assert [line.split(":")[1].strip() for line in said[1:3]] == ["at best", "to change"]
    assert re.fullmatch(GAIN, said[3])
    assert len(said) == 4


def test_the_step_of_a_hot_loop_is_found_and_followed(script):
    """Its name is given by nobody; eager's time is that of a few of its calls, so the gain is measured."""
    plain, followed = (script(*how, train=TRAIN) for how in ((), RUN))
    assert plain.returncode == followed.returncode == 0, followed.stderr
    assert plain.stdout == followed.stdout
    said = [line.removeprefix("coexec: ") for line in followed.stderr.splitlines() if line.startswith("coexec: ")]
    line = 1 + TRAIN.splitlines().index("def train_step(x, y):")
    found = rf"[0-9]+% of the eager time that was looked at is in train_step \(\S*train.py:{line}\)"
    assert re.fullmatch(f"{found}, which was followed from then on", said[0])
    assert re.match(r"train_step: a call takes [0-9.]+ of eager's time, ", said[1])
    assert re.fullmatch(GAIN, "coexec: " + said[4])
    assert len(said) == 5


@pytest.mark.slow
def test_nothing_is_searched_where_that_is_not_wanted(script):
    for options in (("--no-search",), ("--mode=imperative",)):
        followed = script(*RUN, *options, train=TRAIN)
        assert followed.returncode == 0
        assert "coexec: nothing was followed" in followed.stderr
        assert "train_step" not in followed.stderr


@pytest.mark.slow
def test_a_named_function_is_followed(script):
    plain = script(steps=STEP, loop=LOOP)
    followed = script(*RUN, "--function", "steps:step", steps=STEP, loop=LOOP)
    assert plain.stdout == followed.stdout != ""
    assert "coexec: step: a call takes " in followed.stderr


OWN = """
import pickle, sys
import tensorflow as tf

class Agent:
    @staticmethod
    def learn(x):
        return tf.reduce_sum(tf.tanh(x) * 2.0)

def step(x):
    return Agent.learn(x) + 1.0

if __name__ == "__main__":
    print(*(round(float(step(tf.ones([4]) * n)), 4) for n in range(10)))
    print(pickle.loads(pickle.dumps(Agent())).__class__ is Agent, __file__ == sys.argv[0], step.__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["__main__:step", "own:step", "own:Agent.learn"])
def test_a_named_function_of_the_script_itself_is_followed(script, name):
    """It runs once, as `__main__`, with the function decorated where it is defined."""
    plain = script(own=OWN)
    followed = script(*RUN, f"--function={name}", own=OWN)
    assert plain.stdout == followed.stdout
    assert plain.stdout.endswith("True True step\n")
    assert f"coexec: {name.partition(':')[2]}: a call takes " in followed.stderr
    missing = script(*RUN, "--function=own:nothing", own=OWN)
    assert missing.returncode == 2
    assert "own.py has no nothing" in missing.stderr
    assert missing.stdout == ""


@pytest.mark.slow
def test_errors_are_clear(script):
    """Those of the command line have a hint; those of the script are its own, with its exit status."""
    unknown = script(*RUN, "--function=steps:other", steps=STEP, loop=LOOP)
    assert unknown.returncode == 2
    assert "--function=steps:other: steps has no other" in unknown.stderr
    assert unknown.stdout == ""
    stopped = script(*RUN, stop="raise SystemExit(7)")
    assert stopped.returncode == 7
    assert "nothing was followed: the script has compiled no Keras model" in stopped.stderr
    failed = script(*RUN, fail="1 / 0")
    assert failed.returncode == 1
    assert "ZeroDivisionError" in failed.stderr


def test_a_report_is_written(script, tmp_path):
    """Also of functions of the script itself, which end with it; a directory that cannot be is told at once."""
    step = (
        STEP.replace("def step", "import coexec\n\n@coexec.function\ndef step")
        + "[step(tf.ones([4]) * n) for n in range(5)]"
    )
    done = script(*RUN, "--report", str(tmp_path / "report"), step=step)
    assert done.returncode == 0, done.stderr
    assert f"coexec: the report is in {tmp_path / 'report' / 'index.html'}" in done.stderr
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [(shown["name"], shown["stats"]["calls"]) for shown in data["functions"]] == [("step", 5)]
    refused = script(*RUN, "--report", str(tmp_path / "step.py" / "in"), step=step)
    assert refused.returncode == 2
    assert "Not a directory" in refused.stderr
