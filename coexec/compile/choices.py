"""Choices: which backend was measured to be the faster one for a segment, for processes to come."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from coexec.compile.store import store

# A choice may have been made on a bad day of the machine: it is made anew after this many seconds.
MAX_AGE = 30 * 86400.0


class Choice(NamedTuple):
    """The backend, and for people why it was chosen."""

    backend: str
    reason: str


def recall(segment: str) -> Choice | None:
    """Returns what an earlier process has chosen for the segment whose graph has this name."""
    kept = store()
    payload = kept.read(f"{segment}.choice") if kept is not None else None
    if payload is None:
        return None
    try:
        found = json.loads(payload)
        backend, reason, at = found["backend"], found["reason"], found["at"]
        young = 0 <= time.time() - at <= MAX_AGE
    except (ValueError, TypeError, KeyError):  # written by another version, say
        return None
    return Choice(backend, reason) if young and backend in ("xla", "graph") and isinstance(reason, str) else None


def keep(segment: str, choice: Choice) -> None:
    """Leaves a choice for later processes."""
    kept = store()
    if kept is not None:
        kept.write(f"{segment}.choice", json.dumps({**choice._asdict(), "at": time.time()}).encode())
