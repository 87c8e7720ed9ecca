"""Backend choice: persists which backend won the race for a segment, for later processes."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from coexec.base.tuning import tuning
from coexec.compile.disk_store import store


class Choice(NamedTuple):
    """The backend, and the reason shown to users."""

    backend: str
    reason: str


def recall(segment: str) -> Choice | None:
    """Returns an earlier process's choice for the segment whose graph has this name; None if absent or too old."""
    kept = store()
    payload = kept.read(f"{segment}.choice") if kept is not None else None
    if payload is None:
        return None
    try:
        found = json.loads(payload)
        backend, reason, at = found["backend"], found["reason"], found["at"]
        young = 0 <= time.time() - at <= tuning.choice_age
    except (ValueError, TypeError, KeyError):  # malformed, perhaps from another version
        return None
    return Choice(backend, reason) if young and backend in ("xla", "graph") and isinstance(reason, str) else None


def keep(segment: str, choice: Choice) -> None:
    """Stores a choice for later processes."""
    kept = store()
    if kept is not None:
        kept.write(f"{segment}.choice", json.dumps({**choice._asdict(), "at": time.time()}).encode())
