"""Chrome trace: a timeline in the format that Perfetto (ui.perfetto.dev) and Chrome's tracing page open."""

from __future__ import annotations

import os
from typing import Any

from coexec.base.timeline import CALLS, Timeline


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Returns the events as Chrome's trace events: times in microseconds since the timeline began."""
    process = os.getpid()
    kept, left_out = timeline.snapshot()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
        for thread, name in timeline.threads.items()
    ]
    for event in kept:
        shown = {
            "name": f"{event.name} ({event.kind})" if event.kind in CALLS else event.kind,
            "cat": "call" if event.kind in CALLS else "runtime",
            "pid": process,
            "tid": event.thread,
            "ts": round(1e6 * (event.began - timeline.began), 3),
            "args": {"function": event.name, "what": event.text},
        }
        if event.kind == "divergence":
            events.append({**shown, "ph": "i", "s": "t"})
        else:
            events.append({**shown, "ph": "X", "dur": round(1e6 * (event.ended - event.began), 3)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"events left out": left_out}}
