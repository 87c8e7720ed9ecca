"""`python -m tests.public [NAME ...]`: what calls of memoized functions cost, in us of the thread's time.

For each, or those named: eagerly, followed operation by operation, and as a memoized call; the best of six calls of a
function that calls it ten times, the launch among them; and how many of the ten were skipped.
"""

import os
import sys
import time

os.environ.setdefault("COEXEC_CACHE_DIR", "off")

import coexec
from coexec import testing
from tests.public import calls
from tests.public.names import by_name, functions
from tracer import library

TIMES = 10


def cost(function, args, kwargs, followed=True):
    """Returns us a call, and how many calls of the last run were skipped."""

    def step():
        for _ in range(TIMES):
            result = function(*args, **kwargs)
        return result

    run = coexec.function(step, jit_compile=False) if followed else step
    with testing.always_follow():
        for _ in range(9):
            run()
        best, before = float("inf"), 0
        for _ in range(6):
            before = run.stats().regions if followed else 0
            began = time.thread_time()
            run()
            best = min(best, time.thread_time() - began)
        return 1e6 * best / TIMES, run.stats().regions - before if followed else 0


def main(wanted):
    """Prints a line for each function."""
    public = {name: function for name, function in functions().items() if function in library.functions}
    library.install()
    print(f"{'us a call':48}{'eager':>9}{'alone':>9}{'as one':>9} skipped")
    for name, original in public.items():
        if (not wanted or name in wanted) and calls.why_not(name) is None:
            args, kwargs = calls.kinds(name, original)[0]
            eager, _ = cost(original, args, kwargs, followed=False)
            alone, _ = cost(original, args, kwargs)
            memoized, skipped = cost(by_name(name), args, kwargs)
            print(f"{name:48}{eager:9.1f}{alone:9.1f}{memoized:9.1f}{skipped:8}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
