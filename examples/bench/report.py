"""Turns rows into what people read: the tables on the terminal, BENCHMARKS.md, and the JSON that they come from."""

import datetime
import importlib.metadata
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from examples.bench import plot, rows
from examples.bench.rows import Plan, Row, Variant
from examples.bench.table import MARKERS, Notes, circumstances, markdown, milliseconds, number, section

HEADS = {
    "eager": "eager",
    "tf.function": "tf.function",
    "jit": "jit_compile=True",
    "regions off": "coexec, regions off",
    "control flow": "coexec, loops on device",
    "coexec": "coexec",
}
FIRST_CALLS = ("eager", "tf.function", "jit", "coexec")
FILES = ("BENCHMARKS.md", "benchmarks.json", "benchmarks.svg")

ECOSYSTEM = """\
Steps on libraries from PyPI, and plain TensorFlow, as their documentation writes them (`examples/ecosystem`); nothing
in them is written for co-execution. A cell is the time of calls as a multiple of eager's: of the first twenty
together, of calls 10 to 30 together, of the median call in the end. *Regions*, *launches* and *plain* (calls that ran
imperatively) are per call in the end. Below: how often what costs most came in a call there."""

LEGEND = """\
Each program builds its model, optimizer and data anew for each variant, in one process of its own, from the same seeds.
First every variant makes {compared} steps, one variant after the other; the losses of each, and the state after it
(variables, slots, and what Python holds: counters, lists, schedules), are compared with eager's within the program's
tolerance. (`tf.function` may draw random numbers that are not eager's, co-execution may not.) Then the variants go on
in turns, one step each: {warm_up} steps that are not timed, and {rounds} that are. Times are medians of those, ratios
the median over steps of one number, since steps have other data and may go another way. A variant of `tf.function` that
fails or goes wrong is not timed.

*Ops followed*, *launches* and *regions* (calls into Keras that were followed as one, their Python not run) are of the
timed steps, the latter two for each; *diverged* (calls) and *compiles* are of all steps, and what was compiled in timed
steps is in their times. *First* is the first step, in milliseconds. *Peak* is by how much the process grew
at most during the compared steps."""


STEPS = """\
Medians of one run in which all variants took turns, ratios to eager of the same round; of the cases with a column for
Python's decisions, the exits and gates have `control_flow=True`. Eager's results are compared with the others' first
ones."""
PEERS = """\
The same small steps, written in each library as its users do, from weights of its own; times in turns, ratios to eager
TensorFlow. `torch.compile` compiles the forward and backward pass, `jax.jit` the whole step."""


@dataclass
class Run:
    """Rows, and when, where and how they were measured."""

    date: str
    circumstances: str
    versions: dict[str, str]
    command: str
    plan: Plan
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def now(cls, command: str, plan: Plan) -> "Run":
        """A run that begins, without rows."""
        versions = {name: importlib.metadata.version(name) for name in ("coexec", "tensorflow", "keras", "numpy")}
        return cls(datetime.date.today().isoformat(), circumstances(), versions, command, plan)


def read(path: Path) -> Run:
    """The run that `write_json` wrote."""
    data = json.loads(path.read_text())
    data.pop("summary", None)  # follows from the rows
    return Run(**{**data, "plan": Plan(**data["plan"]), "rows": [rows.read(row) for row in data["rows"]]})


def write_json(run: Run, path: Path) -> None:
    """Writes all that was measured, in seconds and MiB, for a program to read."""
    path.write_text(json.dumps({**asdict(run), "summary": summary(run.rows)}, indent=1) + "\n")


def write(run: Run, directory: Path) -> None:
    """Writes the three files that go with the source."""
    document, data, picture = (directory / name for name in FILES)
    write_json(run, data)
    others = {name: _kept(document, name) for name in ("bench", "peers", "ecosystem")}
    document.write_text(as_document(run, picture.name, **others))
    picture.write_text(plot.bars(run.rows))


def _kept(document: Path, name: str) -> str:
    """The section of a document that another command measures."""
    try:
        return section(document.read_text(), name)
    except (OSError, ValueError):
        return "\n".join(marker.format(name) for marker in MARKERS)


def summary(measured: list[Row]) -> dict:
    """The run in a few numbers."""
    ratios = {row.program: row.ratio("coexec") for row in measured if row.right("coexec")}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    worst = max(known, key=lambda name: known[name], default=None)

    def verdicts(name: str) -> dict[str, int]:
        errors = [row.variants[name].error for row in measured if name in row.variants]
        kinds = ["right" if error is None else _kind(error) for error in errors]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(["right", *kinds])}

    return {
        "programs": len(measured),
        "geometric_mean": statistics.geometric_mean(known.values()) if known else None,
        "worst": None if worst is None else {"program": worst, "ratio": known[worst]},
        "verdicts": {name: verdicts(name) for name in HEADS},
    }


def _kind(error: str) -> str:
    return "too slow" if error.startswith("too slow") else error.partition(" ")[0].rstrip(":")


def sentences(measured: list[Row]) -> list[str]:
    """The summary in words."""
    found, said = summary(measured), []
    count = found["programs"]
    of = f"{count} program{'s' * (count != 1)}"
    mean, worst = found["geometric_mean"], found["worst"]
    if mean is not None:
        said.append(
            f"A co-executed step takes {mean:.2f} of the time of an eager one, in the geometric mean "
            f"({1 / mean:.1f} times as fast); at worst {worst['ratio']:.2f}, in {worst['program']}."
        )
    for name in ("coexec", "tf.function", "jit"):
        verdicts = dict(found["verdicts"][name])
        others = [f"{kind}: {times}" for kind, times in verdicts.items() if kind != "right"]
        rest = f" ({', '.join(others)})" if others else ""
        said.append(f"`{HEADS[name]}` does what eager does in {verdicts['right']} of {of}{rest}.")
    return said


def as_text(run: Run) -> str:
    """All tables, for a terminal."""
    return "\n\n".join([run.circumstances, *tables(run.rows), "\n".join(sentences(run.rows))])


def as_document(run: Run, picture: str, bench: str, peers: str, ecosystem: str) -> str:
    """BENCHMARKS.md; `bench`, `peers` and `ecosystem` are its sections of those names."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    devices = sorted({device for row in run.rows for device in row.devices})
    paragraphs = [
        "# Benchmarks: the programs of the papers",
        f"Written by `{run.command}`: {run.circumstances}; {versions}; {', '.join(devices) or 'no accelerator'}.",
        "\n".join(f"* {sentence}" for sentence in sentences(run.rows)),
        f"![Time of a step as a multiple of eager's, by program]({picture})",
        *tables(run.rows),
        "## Small steps",
        STEPS,
        bench,
        "## Beside PyTorch and JAX",
        PEERS,
        peers,
        "## Other people's programs",
        ECOSYSTEM,
        ecosystem,
        "## How it is measured",
        LEGEND.format(**asdict(run.plan)),
    ]
    return "\n\n".join(paragraphs) + "\n"


def tables(measured: list[Row]) -> list[str]:
    """The times with their notes, and what co-execution did."""
    notes = Notes()
    times = [[row.program, *(time_cell(row, name, notes) for name in HEADS)] for row in measured]
    parts = [markdown(["ms per step (of eager)", *HEADS.values()], times)]
    details = [detail(row, notes) for row in measured]
    heads = ["coexec in detail", "ops followed", "diverged", "launches", "regions", "compiles"]
    heads += ["first: eager", "tf.function", "jit", "coexec", "peak MiB: eager", "coexec"]
    if notes.lines:
        parts.append("\n".join(notes.lines))
    return [*parts, markdown(heads, details)]


def time_cell(row: Row, name: str, notes: Notes) -> str:
    """The time and ratio of a variant, or what it does instead, with the mark of the note that says more."""
    if row.error:
        return f"cannot {notes.mark(f'{row.program}: {row.error}')}"
    variant, ratio = row.variants.get(name), row.ratio(name)
    if variant is None:
        return ""
    more = variant.error or variant.note
    mark = notes.mark(f"{row.program}, {HEADS[name]}: {more}") if more else ""
    short = (variant.error or "").partition(":")[0]
    if variant.per_step is None:
        return f"{short} {mark}".strip()
    shown = f" ({ratio:.2f})" if ratio is not None and name != "eager" else ""
    return " ".join(part for part in (f"{milliseconds(variant.per_step)}{shown}", short, mark) if part)


def detail(row: Row, notes: Notes) -> list[str]:
    """A row of the second table."""
    ours = row.variants.get("coexec", Variant("coexec"))
    followed = number(ours.share_followed, ".0%")
    plain = ours.timed_counts.get("imperative", 0)
    if plain:
        calls = ours.timed_counts["calls"]
        text = f"{row.program}, coexec: {plain} of {calls} timed calls ran plainly, as following did not pay"
        followed = f"{followed} {notes.mark(text)}".strip()
    timed = ours.timed_counts.get("compiles", 0)
    firsts = [row.variants[name].first_call if name in row.variants else None for name in FIRST_CALLS]
    peaks = [row.variants[name].memory if name in row.variants else None for name in ("eager", "coexec")]
    return [
        row.program,
        followed,
        str(ours.counts.get("diverged", "")),
        number(ours.each_step("launches"), ".1f"),
        number(ours.each_step("regions"), ".1f"),
        str(ours.counts.get("compiles", "")) + (f" ({timed} timed)" if timed else ""),
        *("" if seconds is None else milliseconds(seconds) for seconds in firsts),
        *(number(peak, ".0f") for peak in peaks),
    ]
