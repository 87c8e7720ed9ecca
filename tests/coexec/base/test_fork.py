"""Forked processes: co-executed functions work there, plainly and with a warning, and nothing hangs."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

START = """
import os, sys, time, warnings
import numpy as np, tensorflow as tf, coexec

def in_child(work, seconds=60):
    pid = os.fork()
    if pid == 0:
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                work()
            print("warnings", sum("forked" in str(w.message) for w in found), flush=True)
        finally:
            os._exit(0)
    for _ in range(10 * seconds):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    print("hangs")
"""

PROGRAM = START + """
weights = tf.Variable(np.eye(4, dtype=np.float32))
forks = []

@coexec.function
def step(x):
    for _ in range(6):
        x = tf.tanh(tf.matmul(x, weights)) + 0.1
    if forks:
        work = forks.pop()
        in_child(lambda: work(x))
    weights.assign_add(0.1 * tf.reduce_sum(x) * tf.eye(4))
    return tf.reduce_sum(x)

x = tf.ones((2, 4))
"""


def output_of(program, start=PROGRAM):
    """What a process with this program prints, line by line."""
    run = [sys.executable, "-c", start + textwrap.dedent(program)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")[:-1]


@pytest.mark.slow
def test_a_forked_process_runs_plainly():
    """A child makes calls, with one warning; its values are those of the parent, who goes on as before."""
    lines = output_of(
        """
        for _ in range(6):
            step(x)
        before = step.stats()
        in_child(lambda: print("child", *(round(float(step(x)), 4) for _ in range(2)), flush=True))
        print("parent", *(round(float(step(x)), 4) for _ in range(2)))
        after = step.stats()
        print(after.launches - before.launches, after.followed - before.followed)
        """
    )
    child, warnings, parent, counts = lines
    assert child.removeprefix("child") == parent.removeprefix("parent")
    assert warnings == "warnings 1"
    assert counts == "2 2"


def test_a_fork_in_the_middle_of_a_call():
    """Tensors that had no value yet get one in the child too, and in the parent."""
    lines = output_of(
        """
        for _ in range(6):
            step(x)
        forks.append(lambda y: print("child", round(float(tf.reduce_sum(y)), 4), flush=True))
        result = step(x)
        print("parent", round(float(result), 4))
        """
    )
    assert lines[0].removeprefix("child") == lines[-1].removeprefix("parent")
    assert "hangs" not in lines


@pytest.mark.slow
def test_a_fork_while_a_launch_is_in_flight():
    """The child finds it landed: its values are there, and what it writes has been written once."""
    lines = output_of(
        """
        def paused(y):
            until = time.perf_counter() + 0.01
            while time.perf_counter() < until:
                pass
            if forks:
                work = forks.pop()
                in_child(lambda: work(y))

        @coexec.function
        def step(x):
            for _ in range(10):
                x = tf.tanh(tf.matmul(x, weights)) + 0.1
            weights.assign_add(0.01 * tf.eye(4))
            paused(x)
            return tf.reduce_sum(x)

        for _ in range(40):
            step(x)
        forks.append(lambda y: print("child", round(float(tf.reduce_sum(y)), 4), round(float(weights[0, 0]), 4)))
        print("parent", round(float(step(x)), 4), round(float(weights[0, 0]), 4))
        print("beside", step.stats().beside > 20)
        """
    )
    assert lines[0].removeprefix("child") == lines[-2].removeprefix("parent")
    assert lines[-1] == "beside True"
    assert "hangs" not in lines


@pytest.mark.slow
def test_a_fork_before_tensorflow_starts_is_none():
    """A child that starts TensorFlow itself has its calls followed and launched, without a warning."""
    lines = output_of(
        """
        def work():
            weights = tf.Variable(np.eye(4, dtype=np.float32))

            @coexec.function
            def step(x):
                for _ in range(6):
                    x = tf.tanh(tf.matmul(x, weights)) + 0.1
                return tf.reduce_sum(x)

            for _ in range(6):
                step(tf.ones((2, 4)))
            print("followed", step.stats().followed, "launches", step.stats().launches, flush=True)

        in_child(work)
        """,
        START,
    )
    assert lines == ["followed 5 launches 4", "warnings 0"]
