"""`cache`: lists or clears what is kept on disk for later processes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from coexec.compile.disk_store import StoredEntry, root_of_store, store


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser("cache", help="list or clear what is kept on disk for later processes")
    parser.add_argument("action", choices=("list", "clear"))
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the entries, or deletes them; the exit status is 1 if some could not be deleted."""
    kept = store()
    if kept is None:
        print("nothing is kept: COEXEC_CACHE_DIR is off, or there is no home directory")
        return 0
    entries = kept.entries()
    if options.action == "clear":
        kept.clear()
        left = len(kept.entries())
        print(f"{len(entries) - left} entries deleted from {kept.root}" + (f", {left} left" if left else ""))
        return 1 if left else 0
    if options.json:
        print(json.dumps({"root": root_of_store(), "entries": [entry._asdict() for entry in entries]}))
        return 0
    for entry in entries:
        here = "" if entry.environment == kept.environment else ", of other versions, flags or devices"
        print(f"{entry.name}: {_kind(entry)}, {entry.size} bytes{here}")
    print(f"{len(entries)} entries, {sum(entry.size for entry in entries)} bytes in {kept.root}")
    return 0


def _kind(entry: StoredEntry) -> str:
    return "XLA's code" if entry.name.endswith(".code") else "a choice of backend"
