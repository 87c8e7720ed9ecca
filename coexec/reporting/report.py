"""Report: what a process' functions did, as a page, as JSON and as a trace, in a directory."""

from __future__ import annotations

import html
import json
import logging
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from coexec.base import timeline
from coexec.base.causes import Kind
from coexec.base.timeline import CALLS, Timeline
from coexec.base.tuning import tuning
from coexec.dispatch.controller import Controller
from coexec.follow.call_state import lock
from coexec.reporting.chrome_trace import chrome_trace
from coexec.reporting.graph_blocks import drawn, memoized_calls, name_of, source_of
from coexec.reporting.segments import ends_in, segments_of
from tracer import hooks

FORMAT = 1  # of the JSON
PAGE, DATA, TRACE = "index.html", "report.json", "trace.json"

_log = logging.getLogger("coexec")
_HERE = Path(__file__).resolve().parent
_open: list[Report] = []


class Report:
    """A report that is being kept: events are recorded until `close`, or the end of the `with` block.

    `write` writes what is known so far; `close` writes and ends it, and so does the end of the process.
    """

    def __init__(self, directory: str | os.PathLike[str], controllers: Callable[[], Iterable[Controller]]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)  # now, as at the end nobody could mend it
        with tempfile.TemporaryFile(dir=self.directory):
            pass
        self._controllers = controllers
        self._process = os.getpid()
        self._timeline: Timeline | None = timeline.start()
        _open.append(self)

    @property
    def page(self) -> Path:
        """The page to open in a browser."""
        return self.directory / PAGE

    def data(self) -> dict[str, Any]:
        """Returns what is known so far, as data that `json` can write."""
        events = self._timeline or Timeline()
        known = {id(each): each for each in (*self._controllers(), *list(events.held.values()))}
        return {
            "format": FORMAT,
            "about": _about(events),
            "functions": [_patiently(each, events) for each in _ranked(known.values(), events)],
            "timeline": _events(events),
        }

    def write(self) -> Path:
        """Writes the page, the JSON and the trace, each as a whole; returns the path of the page."""
        data = self.data()
        texts = {
            DATA: json.dumps(data),
            TRACE: json.dumps(chrome_trace(self._timeline or Timeline())),
            PAGE: page_of(data),
        }
        for name, text in texts.items():
            beside = self.directory / f".{name}.{os.getpid()}"
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.directory / name)
        return self.page

    def close(self) -> None:
        """Writes the report for the last time, and stops recording; a second time does nothing."""
        if self in _open:
            _open.remove(self)
            try:
                self.write()
            finally:
                events, self._timeline = self._timeline, None
                if events is not None:
                    timeline.stop(events)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<report of coexec, {'being kept' if self in _open else 'written'}, {self.page}>"

    def _repr_html_(self) -> str:
        page = html.escape(str(self.page))
        return f'<a href="{page}" target="_blank">{page}</a>'


def _close_all() -> None:
    """Writes the reports of this process that nobody has closed."""
    for report in list(_open):
        if report._process == os.getpid():
            try:
                report.close()
            except Exception:  # the process ends, and says why this is missing
                _log.exception("the report in %s was not written", report.directory)


hooks.AtExit(__name__, "reports that are still open are written", _close_all)


def page_of(data: dict[str, Any]) -> str:
    """Returns the page for a report's data: one file, which loads nothing."""
    template, style, script = ((_HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # nothing in it ends the script
    parts = {"style": style, "script": script, "data": text}
    return re.sub(r"/\*(style|script|data)\*/", lambda found: parts[found[1]], template)


def _about(events: Timeline) -> dict[str, Any]:
    return {
        "command": " ".join(sys.argv),
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(events.began_at)),
        "seconds": time.perf_counter() - events.began,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "devices": [device.name.removeprefix("/physical_device:") for device in tf.config.list_physical_devices()],
        "cores": os.cpu_count(),
    }


def _ranked(controllers: Iterable[Controller], events: Timeline) -> list[Controller]:
    """Returns those that have been called, longest total time first; last those that were only called before."""
    called = {id(each) for each in list(events.held.values())}

    def rank(controller: Controller) -> tuple[bool, float]:
        now = controller.account.pace().now
        return id(controller) not in called, -(now or 0.0) * controller.ledger.counts["calls"]

    return sorted((each for each in controllers if each.ledger.counts["calls"]), key=rank)


def _patiently(controller: Controller, events: Timeline) -> dict[str, Any]:
    """Returns what is known of a function; once more, if a call on another thread has changed it meanwhile."""
    for _ in range(9):
        try:
            return _function(controller, events)
        except RuntimeError:  # a dict has changed its size
            time.sleep(0.01)
    return _function(controller, events)


def _function(controller: Controller, events: Timeline) -> dict[str, Any]:
    explanation = controller.explain()
    content = explanation.as_dict()
    with lock:  # calls on other threads wait with their next operation
        graph, ran = controller.graph, list(controller.ran)
        segments = segments_of(controller.name, ran)
        shown = {
            "name": controller.name,
            "explain": str(explanation),
            "verdict": content["verdict"],
            "stats": content["stats"],
            "causes": [_shortened(cause) for cause in content["causes"]],
            "segments": [segment.as_dict() for segment in segments],
            "cost": segments.cost().as_dict(),
            "lines": _lines(controller, content["causes"]),
            "memoized": _memoized(controller, content["causes"]),
            "graph": drawn(graph, ran),
        }
    rate = events.rates.get(controller.name)
    shown["rate"] = None if rate is None else {
        "interval": rate.interval, "calls": list(rate.calls), "seconds": list(rate.seconds)
    }  # fmt: skip
    return shown


def _shortened(cause: dict[str, Any]) -> dict[str, Any]:
    most = tuning.report_text
    return {
        key: value[:most] + "..." if isinstance(value, str) and len(value) > most else value
        for key, value in cause.items()
    }


def _lines(controller: Controller, causes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns launches and reads by the source line at which they happen, most time first."""
    lines: dict[str, dict[str, Any]] = {}

    def line(place: str) -> dict[str, Any]:
        return lines.setdefault(
            place,
            {"place": place, "source": source_of(place), "launches": 0, "operations": 0, "seconds": 0.0, "reads": 0},
        )

    for last in ends_in(controller.graph):
        found = line(str(last.frames[0]) if last.frames else "")
        found["launches"] += last.visits
        found["operations"] += last.visits * last.live
        found["seconds"] += last.executables.seconds
    for cause in causes:
        if cause["id"] == Kind.READ.value.id and cause["file"]:
            line(f"{cause['file']}:{cause['line']} in {cause['function']}")["reads"] += cause["count"]
    return sorted(lines.values(), key=lambda found: (-found["seconds"], -found["launches"], -found["reads"]))


def _memoized(controller: Controller, causes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the library calls that are skipped or not, by name and place: those that are not first."""
    told = {cause["text"]: f"{cause['file']}:{cause['line']} in {cause['function']}" for cause in causes}
    calls: dict[tuple[str, str, str], dict[str, Any]] = {}
    for region in memoized_calls(controller.graph):
        state = "memoized" if region.confirmed > 1 else "not memoized" if region.reason else "being learnt"
        first = region.first
        place = told.get(f"{getattr(region.function, '__qualname__', '')}: {region.reason}", "")
        if first is not None and first.frames:
            place = str(first.frames[0])
        reason = (region.reason or "")[: tuning.report_text] if state == "not memoized" else ""
        entry = calls.setdefault(
            (name_of(region), place, state),
            {"name": name_of(region), "place": place, "state": state, "skipped": 0, "ran": 0, "variants": 0,
             "reason": reason},
        )  # fmt: skip
        entry["skipped"] += region.uses
        entry["ran"] += region.visits
        entry["variants"] += 1
    return sorted(calls.values(), key=lambda entry: (entry["state"] == "memoized", -entry["skipped"], -entry["ran"]))


def _events(events: Timeline) -> dict[str, Any]:
    """Returns the events with their texts and names written once: each is five numbers and the number of its text."""
    kept, left_out = events.snapshot()
    kinds: dict[str, int] = {kind: n for n, kind in enumerate(CALLS)}
    names: dict[str, int] = {}
    texts: dict[str, int] = {}
    threads = {thread: n for n, thread in enumerate(events.threads)}
    rows = [
        [
            kinds.setdefault(event.kind, len(kinds)),
            names.setdefault(event.name, len(names)),
            threads[event.thread],
            round(1e6 * (event.began - events.began)),
            round(1e6 * (event.ended - event.began), 1),
            texts.setdefault(event.text[: tuning.report_text], len(texts)),
        ]
        for event in kept
    ]
    return {
        "kinds": list(kinds), "names": list(names), "threads": list(events.threads.values()), "texts": list(texts),
        "events": rows, "left_out": left_out, "seconds": time.perf_counter() - events.began,
    }  # fmt: skip
