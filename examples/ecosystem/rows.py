"""Rows: what was measured of each example, and the table that they make."""

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """How much of what is done."""

    calls: int = 300
    compared: int = 40  # with eager's; more would amplify differences of the last place
    steady: int = 200  # the first call of the steady state, if there is time for so many
    seconds: float = 20.0  # of processor time for both runs; slower examples make fewer calls


# When the programs were chosen, by the folder that they are in.
HALVES = {
    "before": "Chosen before the runtime was changed for them:",
    "after": "Chosen after, all of them before one was measured:",
}


def half_of(module: str) -> str:
    """Which half of the suite a module belongs to."""
    return "after" if module.startswith("chosen_after.") else "before"


@dataclass
class Row:
    """An example and what was found. Times are in seconds, of each call."""

    name: str
    module: str
    skipped: str = ""  # why, if a library is missing
    error: str = ""  # how the process ended, if it did not measure
    wrong: str | None = None  # the first difference from eager
    eager: dict[str, list[float]] = field(default_factory=dict)
    followed: dict[str, list[float]] = field(default_factory=dict)
    steady_from: int = 0  # the first call of the steady state
    counts: dict[str, float] = field(default_factory=dict)  # per call, in the steady state
    causes: list[tuple[float, str, str]] = field(default_factory=list)  # times per call there, kind, text
    explanation: str = ""
    finished: bool = False

    def save(self, file: Path) -> None:
        """Writes this where the other process reads it."""
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(file)

    def total(self, first: int, last: int, clock: str) -> float:
        """The time of these calls together as a multiple of eager's, whose outliers are clipped.

        They are not its own: executables are compiled beside its calls, too.
        """
        eager, followed = self.eager[clock][first:last], self.followed[clock][first:last]
        usual = 2 * statistics.median(eager)
        return sum(followed) / sum(min(time, usual) for time in eager)

    def steady(self, clock: str) -> float:
        """The time of the median call in the end as a multiple of eager's."""
        return statistics.median(self.followed[clock][self.steady_from :]) / self.eager_call(clock)

    def eager_call(self, clock: str) -> float:
        """Seconds of eager's median call in the end."""
        return statistics.median(self.eager[clock][self.steady_from :])


def read(values: dict[str, Any]) -> Row:
    """A row that was saved."""
    values["causes"] = [tuple(cause) for cause in values.get("causes", [])]
    return Row(**values)


def mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan


HEAD = ["", "right", "eager, ms", "calls 1-20", "calls 10-30", "steady", "regions", "launches", "plain"]


def as_markdown(rows: list[Row], clock: str, shown: int = 3) -> str:
    """The tables of both halves, each with its means and, under it, the most expensive causes of each example."""
    halves = {half: [row for row in rows if half_of(row.module) == half] for half in HALVES}
    return "\n\n".join(f"{HALVES[half]}\n\n{table(chosen, clock, shown)}" for half, chosen in halves.items() if chosen)


def table(rows: list[Row], clock: str, shown: int) -> str:
    """The table of one half."""
    done = [row for row in rows if row.finished]
    lines = [HEAD]
    for row in done:
        ratios = [row.total(0, 20, clock), row.total(9, 30, clock), row.steady(clock)]
        counts = [f"{row.counts[name]:.1f}" for name in ("regions", "launches", "imperative")]
        right, eager = "wrong" if row.wrong else "yes", f"{1e3 * row.eager_call(clock):.1f}"
        lines.append([row.name, right, eager, *(f"{r:.2f}" for r in ratios), *counts])
    means = [mean([row.total(0, 20, clock) for row in done]), mean([row.total(9, 30, clock) for row in done]),
             mean([row.steady(clock) for row in done])]  # fmt: skip
    lines.append(["geometric mean", "", "", *(f"{m:.2f}" for m in means), "", "", ""])
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEAD))]
    text = ["| " + " | ".join(cell.ljust(w) if n < 2 else cell.rjust(w)
                              for n, (cell, w) in enumerate(zip(line, widths, strict=True))) + " |"
            for line in lines]  # fmt: skip
    text.insert(1, "| " + " | ".join("-" * w if n < 2 else "-" * (w - 1) + ":" for n, w in enumerate(widths)) + " |")
    text.append("")
    for row in rows:
        if row.skipped or row.error:
            text.append(f"* {row.name}: {'skipped' if row.skipped else 'not measured'}, {row.skipped or row.error}")
            continue
        found = [f"{often:g} x {kind}: {cause}" for often, kind, cause in row.causes[:shown]]
        if row.wrong:
            found.insert(0, f"WRONG, {row.wrong}")
        text.append(f"* {row.name}: {'; '.join(found) or 'nothing'}")
    return "\n".join(text)
