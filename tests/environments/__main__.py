"""Runs programs in environments, one after the other, in this process; prints `done` if they did what eager does."""

import contextlib
import functools
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


settings = contextlib.ExitStack()  # until the process ends: some train in an `atexit` handler


def main(environments, names):
    from coexec import testing
    from tests.environments import inside, programs

    check = functools.partial(programs.check, names)
    # The clock decides nothing in a process that others slow down, and what is compiled is launched at once.
    settings.enter_context(testing.always_follow())
    settings.enter_context(testing.compile_everything())
    for name in environments:
        inside.ENVIRONMENTS[name](check)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), tuple(sys.argv[2].split(",")))
