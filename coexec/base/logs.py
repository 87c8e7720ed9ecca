"""Logs: prints events as they happen, one line each, on the topics that `COEXEC_LOGS` names.

    COEXEC_LOGS=diverge,compile python train.py

* `diverge`: a call diverged, failed, or has argument sizes that are not followed
* `compile`: a segment is compiled or refused, and the backend that it runs on
* `read`: Python reads a value, or branches on one
* `region`: a library call is not memoized
* `all`: all of them

Each distinct event is logged once, to absl's log, as a warning: it was asked for. A topic is limited to
`tuning.log_lines` in `tuning.log_seconds`; the next line says how many were left out.
"""

from __future__ import annotations

import os
import threading
import time

from absl import logging

from coexec.base.tuning import tuning
from tracer import hooks

TOPICS = ("diverge", "compile", "read", "region")
VARIABLE = "COEXEC_LOGS"

_lock = threading.Lock()
hooks.held_by_fork(__name__, _lock)


class Topic:
    """The rate limit of one topic: the lines since `began`, and those left out."""

    def __init__(self) -> None:
        self.began = float("-inf")
        self.lines = 0
        self.left_out = 0


def parse(text: str) -> dict[str, Topic]:
    """Returns the topics in a comma-separated list; warns about unknown names."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in (*TOPICS, "all")]
    if unknown:
        logging.warning(
            "coexec: %s names %s: no such topic; there are %s, and all",
            VARIABLE, " and ".join(map(repr, unknown)), ", ".join(TOPICS),
        )  # fmt: skip
    return {topic: Topic() for topic in TOPICS if topic in names or "all" in names}


def event(topic: str, text: str) -> None:
    """Logs an event, as one line, if its topic is wanted and below its rate limit."""
    with _lock:
        found = wanted.get(topic)
        if found is None:
            return
        now = time.monotonic()
        left_out = 0
        if now - found.began > tuning.log_seconds:
            left_out, found.left_out = found.left_out, 0
            found.began, found.lines = now, 0
        found.lines += 1
        if found.lines > tuning.log_lines:
            found.left_out += 1
            return
    if left_out:
        logging.warning("coexec %s: %d more were left out", topic, left_out)
    logging.warning("coexec %s: %s", topic, " ".join(text.split()))


wanted = parse(os.environ.get(VARIABLE, ""))
