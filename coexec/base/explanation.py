"""Explanation: what a function's calls cost, and why: a verdict, and the causes, most expensive first."""

from __future__ import annotations

import dataclasses
import html
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coexec.base.causes import Cause, Kind, Tally
from coexec.base.stats import Stats
from coexec.base.tuning import tuning

_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+) in (?P<function>.*?)(?: \(iteration \d+\))?")
_KINDS = list(Kind)


@dataclass(frozen=True)
class Pace:
    """The wall time of calls, in seconds; None if nothing was timed."""

    calls: int = 0  # how many of the last ones `now` is the mean of
    now: float | None = None
    steady: float | None = None  # the median in the steady state: followed, with nothing new
    eager: float | None = None  # the median of imperative calls
    made: int = 0  # how many calls were timed since the first, however they ran
    spent: float = 0.0  # what all of these took, learning included
    least: float | None = None  # what an imperative call takes at least, by the operations of the last followed one


@dataclass(frozen=True)
class Finding:
    """A cause with its place and its cost: one entry of a report."""

    id: str
    kind: str
    meaning: str
    text: str
    file: str
    line: int
    function: str
    source: str  # the source line itself; empty if unknown
    expected: str
    seen: str
    count: int
    per_call: float
    seconds_per_call: float
    what_to_do: str


class Explanation(str):
    """The report of one or more functions, as plain text; `as_dict()` returns the same for programs."""

    _content: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of the text, as dicts, lists, strings and numbers that `json` can write."""
        return self._content

    def show(self) -> None:
        """Prints the text, with colours on a terminal."""
        from rich.console import Console

        Console().print(self, soft_wrap=True)

    def _repr_html_(self) -> str:
        """Returns the text as it is, for notebooks, which would show a string's `repr`."""
        return f"<pre>{html.escape(self)}</pre>"

    def __rich__(self) -> Any:
        from rich.text import Text

        text = Text(str(self))
        text.highlight_regex(r"(?m)^CX-\w+", "bold red")
        text.highlight_regex(r"(?m)^\S.*? a call takes .*|(?m:^at best: .*)|(?m:^to change: .*)", "bold")
        text.highlight_regex(r"(?m)^ +what to do: .*", "green")
        text.highlight_regex(r"(?m)^ +\| .*", "cyan")
        return text


def explained(name: str, stats: Stats, causes: dict[Cause, Tally], pace: Pace) -> Explanation:
    """Returns the report of one function."""
    calls = max(stats.calls, 1)
    steady = pace.steady
    ranked = sorted(
        causes.items(), key=lambda item: _rank(item[0].kind, _seconds(item[0], item[1], steady), item[1].count)
    )
    findings = [finding_of(cause, tally, calls, steady) for cause, tally in ranked]
    dearest = _dearest(ranked, findings, calls)
    best = _best(ranked, pace, calls)
    verdict = [_now(name, pace), _at_best(pace, best), _to_change(dearest)]
    counts = (
        f"{stats.calls} calls, {stats.followed} followed, {stats.diverged} diverged, "
        f"{stats.recorded} recorded, {stats.imperative} imperative; {stats.launches} launches, "
        f"{stats.compiles} compiles, {100 * stats.share_followed:.1f} % of the operations followed"
    )
    text = Explanation("\n".join([*verdict, counts, *_listed(findings)]))
    text._content = {
        "name": name,
        "verdict": {
            "share": _share(pace.now, pace),
            "best_share": _share(best, pace),
            "seconds": pace.now,
            "eager_seconds": pace.eager,
            "best_seconds": best,
            "gained_seconds": None if pace.eager is None else pace.made * pace.eager - pace.spent,
            "to_change": None if dearest is None else dataclasses.asdict(dearest),
        },
        "stats": {**dataclasses.asdict(stats), "share_followed": stats.share_followed},
        "causes": [dataclasses.asdict(finding) for finding in findings],
    }
    return text


def together(parts: Sequence[Explanation]) -> Explanation:
    """Returns the reports of several functions as one, ordered by the total time of their calls, longest first."""

    def taken(part: Explanation) -> float:
        content = part.as_dict()
        return -(content["verdict"]["seconds"] or 0.0) * float(content["stats"]["calls"])

    ranked = sorted(parts, key=taken)
    text = Explanation("\n\n".join(ranked) or "no function of coexec's is alive")
    text._content = {"functions": [part.as_dict() for part in ranked]}
    return text


def finding_of(cause: Cause, tally: Tally, calls: int, steady: float | None) -> Finding:
    """Returns a cause with its place, the source line there, and its cost per call."""
    meaning = cause.kind.value
    place = _PLACE.fullmatch(cause.location)
    file, line = (place["file"], int(place["line"])) if place else ("", 0)
    return Finding(
        meaning.id, meaning.label, meaning.meaning, cause.text, file, line,
        place["function"] if place else cause.location, linecache.getline(file, line).strip() if place else "",
        cause.expected or meaning.expected, cause.seen or cause.text, tally.count, tally.count / calls,
        _seconds(cause, tally, steady) / calls, cause.hint or meaning.todo,
    )  # fmt: skip


def _seconds(cause: Cause, tally: Tally, steady: float | None) -> float:
    """Returns a cause's cost in seconds: the time measured (for whole calls, beyond steady ones), and that of cuts."""
    if cause.kind.value.calls:
        return 0.0 if steady is None else max(tally.seconds - tally.count * steady, 0.0)
    return tally.seconds + (tally.count * tuning.cut_seconds if cause.kind.value.cuts else 0.0)


def _rank(kind: Kind, seconds: float, count: int) -> tuple[Any, ...]:
    return not kind.value.urgent, kind.value.told, -seconds, _KINDS.index(kind), -count


def _dearest(ranked: list[tuple[Cause, Tally]], findings: list[Finding], calls: int) -> Finding | None:
    """Returns the most urgent or expensive cause; None if none is known to cost anything.

    Of a function that has backed off from most of its calls that is the one, with what else is dearest: nothing that is
    to change in followed calls would help the others.
    """
    dearest, backoff = None, None
    for (cause, tally), finding in zip(ranked, findings, strict=True):
        if cause.kind is Kind.BACKOFF and 2 * tally.count >= calls:
            backoff = finding
        elif dearest is None and (cause.kind.value.urgent or finding.seconds_per_call > 0.0):
            dearest = finding
            if cause.kind.value.urgent:
                return dearest
    if backoff is None or dearest is None:
        return backoff or dearest
    why = f"{backoff.what_to_do}: {dearest.id} at {_place_of(dearest)}"
    return dataclasses.replace(backoff, what_to_do=why)


def _best(ranked: list[tuple[Cause, Tally]], pace: Pace, calls: int) -> float | None:
    """Returns the time that a call would take without the causes inside steady calls; None if unknown."""
    if pace.steady is None or pace.now is None:
        return None
    inside = [(cause, tally) for cause, tally in ranked if not cause.kind.value.calls]
    saved = sum(_seconds(cause, tally, pace.steady) for cause, tally in inside) / calls
    return min(pace.now, max(pace.steady - saved, min(pace.steady, tuning.cut_seconds)))


def _share(seconds: float | None, pace: Pace) -> float | None:
    return seconds / pace.eager if seconds is not None and pace.eager else None


def _now(name: str, pace: Pace) -> str:
    if pace.now is None:
        return f"{name}: a call takes a time that is not known yet: none has been followed"
    last, share = f"mean of the last {pace.calls}", _share(pace.now, pace)
    if share is None or pace.eager is None:
        known = "eager's time was not measured"
        if pace.least is not None and pace.least > pace.now:
            share = pace.now / pace.least
            known = f"by its operations at most {share:.2f} of eager's time, which was not measured"
        return (
            f"{name}: a call takes {_time(pace.now)} ({last}); {known}: "
            "`with coexec.imperative()` around a few calls does that"
        )
    return f"{name}: a call takes {share:.2f} of eager's time, {_time(pace.now)} of {_time(pace.eager)} ({last})"


def _at_best(pace: Pace, best: float | None) -> str:
    if best is None or pace.now is None:
        return "at best: not known yet"
    share = _share(best, pace)
    told = f"{_time(best)}" if share is None else f"{share:.2f} of eager's time, {_time(best)}"
    return f"at best: {told}" + (", as now" if best > 0.95 * pace.now else ", as steady calls without the causes below")


def _to_change(dearest: Finding | None) -> str:
    if dearest is None:
        return "to change: nothing that is known to cost time"
    place = _place_of(dearest)
    cost = f", {_time(dearest.seconds_per_call)} a call" if dearest.seconds_per_call else ""
    return f"to change: {dearest.id} at {place}{cost}: {dearest.what_to_do}"


def _place_of(finding: Finding) -> str:
    return f"{finding.file}:{finding.line}" if finding.file else finding.function


def _listed(findings: list[Finding]) -> list[str]:
    """Returns the lines of all causes; consecutive ones of one kind share a heading."""
    lines: list[str] = []
    before = ""
    for found in findings:
        if found.id != before:
            lines.append(f"{found.id}, {found.kind}: {found.meaning}")
            before = found.id
        lines.append(f"  {found.count} x {found.text}")
        function = f" in {found.function}"
        lines.append(f"    at {found.file}:{found.line}{function}" if found.file else f"    at {found.function}")
        if found.source:
            lines.append(f"    | {found.source}")
        cost = f", {_time(found.seconds_per_call)}" if found.seconds_per_call else ""
        lines.append(f"    a call: {found.per_call:.3g} x{cost}")
        if found.seen not in found.text or found.expected not in found.text:
            lines.append(f"    expected: {found.expected}")
            if found.seen not in found.text:
                lines.append(f"    seen: {found.seen}")
        lines.append(f"    what to do: {found.what_to_do}")
    return lines


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"
