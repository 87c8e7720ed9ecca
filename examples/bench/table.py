"""Turns measurements into the Markdown tables that the terminal, README.md and BENCHMARKS.md show, and into JSON."""

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path

from examples.bench.cases import IN_README
from examples.bench.measure import Memory, Result

MARKERS = "<!-- {}:begin -->", "<!-- {}:end -->"
COLUMNS = {"eager": "eager", "coexec": "coexec", "tf.function": "tf.function", "jit": "jit_compile=True",
           "host": "Python decides"}


def circumstances() -> str:
    """When, on what and with what the figures were taken, in one line."""
    return (
        f"{datetime.date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, TensorFlow {importlib.metadata.version('tensorflow')}"
    )


def processor() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.machine()


def render(results: list[Result], memory: list[Memory], *, goals: bool) -> str:
    """All tables and notes as Markdown; with `goals`, also first calls and whether the goals are met."""
    parts = []
    notes = Notes()
    if results:
        parts.append(steady_table(results, notes, goals=goals))
    if notes.lines:
        parts.append("\n".join(notes.lines))
    if results and goals:
        parts.append(early_table(results))
    parts.extend(memory_line(m) for m in memory)
    return "\n\n".join(parts)


def short_table(results: list[Result]) -> str:
    """The cases for the README: milliseconds per call and multiples of eager's, without the reasons of failures."""
    columns = ("eager", "coexec", "tf.function", "jit")
    rows = [[r.case.what, *(short_cell(r, name) for name in columns)] for r in results if r.case.name in IN_README]
    return markdown(["ms per call (of eager)", *(COLUMNS[name] for name in columns)], rows)


def short_cell(result: Result, name: str) -> str:
    """The time and ratio of one variant, or in a word why there is none."""
    variant, ratio = result.variants[name], result.ratio(name)
    if variant.per_call is None:
        return "fails"
    if variant.error:
        return "other result"
    return milliseconds(variant.per_call) + ("" if name == "eager" else f" ({ratio:.2f})")


class Notes:
    """Numbered footnotes, in a Markdown list; a text that comes again keeps its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """The mark to put where `text` applies."""
        return f"[{self.numbers.setdefault(text, len(self.numbers) + 1)}]"

    @property
    def lines(self) -> list[str]:
        """The notes themselves, one line each."""
        return [f"{number}. {text}" for text, number in self.numbers.items()]


def steady_table(results: list[Result], notes: Notes, *, goals: bool) -> str:
    """Milliseconds per call and, in brackets, multiples of eager's."""
    rows = []
    columns = columns_of(results)
    for result in results:
        row = [result.case.what]
        row += [cell(result, name, notes) for name in columns]
        row += [number(result.launches, ".1f"), number(result.share_followed, ".0%")]
        if goals:
            row.append(goal(result))
        rows.append(row)
    heads = ["ms per call (of eager)", *columns.values(), "launches", "ops followed"]
    return markdown(heads + ["goal"] * goals, rows)


def columns_of(results: list[Result]) -> dict[str, str]:
    """The variants that some case has, and what they are called."""
    return {name: COLUMNS.get(name, name) for result in results for name in result.variants}


def cell(result: Result, name: str, notes: Notes) -> str:
    """The time and ratio of one variant, or the mark of the note that says why there is none; empty in other cases."""
    if name not in result.variants:
        return ""
    variant, ratio = result.variants[name], result.ratio(name)
    mark = f" {notes.mark(f'{COLUMNS.get(name, name)}, {result.case.what}: {variant.error}')}" if variant.error else ""
    if variant.per_call is None:
        return f"cannot{mark}"
    shown = "" if name == "eager" else f" ({ratio:.2f})"
    return f"{milliseconds(variant.per_call)}{shown}{mark}"


def goal(result: Result) -> str:
    """Whether the co-executed ratios, to eager and to the faster graph, are within the case's goals."""
    case = result.case
    goals = (
        (case.at_most, result.ratio("coexec"), ""),
        (case.of_graphs, result.ratio_to_graphs(), " of graphs"),
        (case.of_function, result.ratio_to_function(), " of tf.function"),
        (case.of_host, result.ratio_to_host(), " of Python's decisions"),
    )
    return ", ".join(
        f"{at_most:.3g}{what} {'met' if ratio <= at_most else f'MISSED ({ratio:.2f})'}"
        for at_most, ratio, what in goals
        if at_most is not None and ratio is not None
    )


def early_table(results: list[Result]) -> str:
    """Milliseconds of the first call, and of the first twenty, in which each variant learns, traces and compiles."""
    rows, columns = [], columns_of(results)
    for what, early in (("first call", "first_call"), ("first 20 calls", "all_early")):
        for result in results:
            variants = [result.variants.get(name) for name in columns]
            seconds = [None if v is None else getattr(v, early) for v in variants]
            rows.append([f"{what}: {result.case.what}", *("" if s is None else milliseconds(s) for s in seconds)])
    return markdown(["ms", *columns.values()], rows)


def memory_line(memory: Memory) -> str:
    """Resident memory before and after, in one sentence."""
    share = "" if memory.share_followed is None else f", {memory.share_followed:.0%} of the ops followed"
    growth = memory.after - memory.before
    return (
        f"Memory, {memory.calls:,} calls, {memory.variant}: "
        f"{memory.before:.1f} -> {memory.after:.1f} MiB resident ({growth:+.1f}){share}."
    )


def milliseconds(seconds: float) -> str:
    """Three digits that count: 0.0123, 1.23, 123."""
    value = 1000 * seconds
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def number(value: float | None, form: str) -> str:
    """`value` formatted, or nothing."""
    return "" if value is None else format(value, form)


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table that also reads well as plain text: first column left, the others right."""
    first, *others = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
    lines = []
    for label, *cells in [heads, rule, *rows]:
        padded = [label.ljust(first), *(c.rjust(w) for c, w in zip(cells, others, strict=True))]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def as_json(results: list[Result], memory: list[Memory]) -> dict:
    """Everything measured, in seconds and MiB, for a program to read."""
    return {
        "circumstances": circumstances(),
        "cases": {
            r.case.name: {
                "launches_per_call": r.launches,
                "share_followed": r.share_followed,
                "variants": {
                    v.name: {
                        "first_call": v.first_call,
                        "first_20_calls": v.all_early,
                        "per_call": v.per_call,
                        "of_eager": r.ratio(v.name),
                        "error": v.error,
                    }
                    for v in r.variants.values()
                },
            }
            for r in results
        },
        "memory": [vars(m) for m in memory],
    }


def section(document: str, name: str) -> str:
    """What stands between the markers `name` of a document, markers included; raises ValueError without them."""
    begin, end = (marker.format(name) for marker in MARKERS)
    if begin not in document or end not in document:
        raise ValueError(f"there are no lines {begin} and {end}: add them where the table belongs")
    return begin + document.split(begin, 1)[1].split(end, 1)[0] + end


def write_section(path: Path, name: str, text: str, command: str) -> None:
    """Puts `text`, the command and its circumstances between the markers `name` of a file."""
    begin, end = (marker.format(name) for marker in MARKERS)
    old = path.read_text()
    new = f"{begin}\n{text}\n\nTaken by `{command}`: {circumstances()}.\n{end}"
    path.write_text(old.replace(section(old, name), new))
