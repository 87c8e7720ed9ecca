"""`operations`: how TensorFlow's operations are followed."""

from __future__ import annotations

import argparse
from typing import Any

from coexec.reporting.op_table import as_markdown, how_followed


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser("operations", help="how TensorFlow's operations are followed, and why")
    parser.add_argument("name", nargs="*", help="such as MatMul; all of them in Markdown if none is given")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints a line for each name, or the lists of all; the exit status is 1 if there is no such operation."""
    if not options.name:
        print(as_markdown())
        return 0
    known = {name: how_followed(name) for name in options.name}
    for name, followed in known.items():
        print(f"{name}: " + (f"{followed.how}; {followed.why}" if followed else "no operation of this TensorFlow"))
    return 0 if all(known.values()) else 1
