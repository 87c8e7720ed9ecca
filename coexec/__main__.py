"""The command line: `python -m coexec COMMAND`, with the commands of `coexec/cli`.

python -m coexec doctor                            is everything there that coexec needs? exit status 1 if not
python -m coexec run train.py --epochs=3           runs a script with Keras' fit and the functions that its hot loops
                                                   call followed, and says what that gained; --report=DIR before the
                                                   script writes a page about it
python -m coexec cache list                        what is kept on disk for later processes; or clear
python -m coexec operations MatMul Unique          how an operation is followed, and why; without a name, all of them
python -m coexec bench lenet --rounds=20           compares and times the variants of a program of the papers
"""

from __future__ import annotations

import argparse
import sys

from coexec.cli import bench, cache, doctor, operations, run


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser("python -m coexec", description="Co-execution of imperative TensorFlow programs.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (doctor, run, cache, operations, bench):
        command.add(commands)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
