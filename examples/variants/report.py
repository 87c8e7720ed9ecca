"""The table of variants, the worst first."""

import statistics
from collections import defaultdict

from examples.variants.rows import WORSE, Row


def render(rows: list[Row], everything: bool = False) -> str:
    """What falls out, or all that was measured, and how often each rewrite does."""
    measured = [row for row in rows if not row.error]
    shown = sorted(rows if everything else [r for r in rows if r.falls_out], key=lambda r: -r.badness)
    lines = [f"{'program':9} {'CPU':>5} {'wall':>5} {'eager':>5} {'launches':>9} {'regions':>9}  rewritten"]
    for row in shown:
        if row.error and not row.wrong:
            continue
        if row.error:
            lines.append(f"{row.base:9} {row.name}: {row.error}")
            continue
        launches = f"{row.launches:.1f} ({row.more_launches:+.1f})"
        regions = f"{row.regions:.1f} ({-row.fewer_regions:+.1f})"
        lines.append(
            f"{row.base:9} {row.cpu:5.2f} {row.wall:5.2f} {row.eager:5.2f} {launches:>9} {regions:>9}  {row.name}"
        )
        if row.cause:
            lines.append(f"{'':48} {row.cause}")
    lines += ["", *by_rewrite(measured), "", summary(rows)]
    return "\n".join(lines)


def by_rewrite(rows: list[Row]) -> list[str]:
    """For each rewrite by itself in how many programs it falls out, and by how much in the median."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if len(row.rewrites) == 1:
            found[row.name].append(row)
    table = sorted(found.items(), key=lambda item: -sum(max(r.badness, 1.0) for r in item[1]) / len(item[1]))
    return [
        f"{sum(r.falls_out for r in each):3} of {len(each):2} fall out, "
        f"{statistics.median(r.ratio for r in each):5.2f}  {name}"
        for name, each in table
        if any(r.falls_out for r in each)
    ]


def summary(rows: list[Row]) -> str:
    """All in one line."""
    measured = [row for row in rows if not row.error]
    if not measured:
        return "nothing was measured"
    out, wrong = sum(r.falls_out for r in measured), sum(r.wrong for r in rows)
    most = max(measured, key=lambda r: r.ratio)
    mean = statistics.geometric_mean(r.ratio for r in measured)
    return (
        f"{len(measured)} variants: {wrong} wrong, "
        f"{out} fall out (more than {WORSE} times the time, or more launches); "
        f"{mean:.2f} in the geometric mean, at most {most.ratio:.2f} ({most.base}: {most.name})"
    )
