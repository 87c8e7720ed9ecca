"""Programs run in processes of every kind as eager ones do, say nothing of their own, and end as they should.

A sample is run; COEXEC_ENVIRONMENTS=all runs all.
"""

import os
import re
import subprocess
import sys

import pytest

import coexec
from tests.environments.inside import ENVIRONMENTS, LAST
from tests.environments.programs import PROGRAMS, Differs, check

pytestmark = pytest.mark.slow

TIMEOUT = 280
# What TensorFlow's C++ says while it is imported, whatever its level of messages.
STARTS = re.compile(r"^WARNING: All log messages before absl::InitializeLog.*\n|^I0000 .*\n", re.MULTILINE)

# By name: environments that follow each other in one process, flags of the interpreter, variables of the environment.
PROCESSES = {
    "watched": (["traced", "profiled", "profiled_in_c", "traced_memory", "fault_handler"], [], {}),
    "hurried": (["switching_often", "collecting_often", "never_collecting", "warnings_are_errors"], [], {}),
    "shared": (["threads", "coroutines"], [], {}),
    "notebook": (["cells", "reloaded", "timed", "interrupts"], [], {}),
    "-O": (["plain"], ["-O"], {"PYTHONHASHSEED": "0"}),
    "-OO": (["plain"], ["-OO"], {"PYTHONHASHSEED": "1"}),
    "-X dev": (["plain"], ["-X", "dev"], {}),
    "-W error": (["plain"], ["-W", "error", "-bb"], {}),
    "-X no_debug_ranges": (["plain"], ["-X", "no_debug_ranges", "-X", "utf8"], {}),
    "-X tracemalloc": (["plain"], ["-X", "tracemalloc=2", "-X", "faulthandler"], {"PYTHONMALLOC": "debug"}),
}
PROCESSES |= {name: ([name], [], {}) for name in ENVIRONMENTS if not any(name in p[0] for p in PROCESSES.values())}

# What is run by default: all that share a process, and one of each kind of the others; not `signals`, under which
# TensorFlow's own kernels crash now and then, and not `daemon_threads_at_exit`, where eager TensorFlow aborts (4 of 16
# exits: CPython unwinds threads that ask for the lock of an interpreter that is gone, through C++ that may not be).
SAMPLE = ["watched", "hurried", "shared", "notebook", "-OO", "spawned", "forked_after_start", "atexit_trains",
          "threads_behind_main", "exits_in_a_step"]  # fmt: skip
CHOSEN = list(PROCESSES) if os.environ.get("COEXEC_ENVIRONMENTS") == "all" else SAMPLE


def run(arguments, flags=(), variables=None):
    """Runs a process to its end; returns what it said, without what TensorFlow says when it starts."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "COEXEC_CACHE_DIR": "off", **(variables or {})}
    environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, *flags, *arguments], capture_output=True, text=True, env=environ, timeout=TIMEOUT, check=False
    )
    return ran.returncode, ran.stdout, STARTS.sub("", ran.stderr)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 20)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_process(name):
    """Every program does what eager does, nothing is said on the way or at the end, and the exit code is 0."""
    environments, flags, variables = PROCESSES[name]
    assert not LAST & set(environments[:-1])
    code, said, complained = run(
        ["-m", "tests.environments", ",".join(environments), ",".join(PROGRAMS)], flags, variables
    )
    assert (code, said, complained) == (0, "done\n", "")


def test_what_differs_is_found(monkeypatch):
    """The processes fail where a program does something else, or is not followed."""

    def drifting(decorate):
        calls = []

        @decorate
        def step(x):
            calls.append(x)
            return x * (2.0 if decorate is coexec.function and len(calls) == 3 else 1.0)

        return step, lambda: len(calls)

    monkeypatch.setitem(PROGRAMS, "drifting", drifting)
    with pytest.raises(Differs, match="drifting, call 3"):
        check(["drifting"])
    with coexec.imperative(), pytest.raises(Differs, match="followed=0"):
        check(["raw_tape"])
