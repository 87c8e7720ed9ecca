"""Draws the ratios as bars, in an SVG that follows the reader's choice of light or dark."""

from html import escape

from examples.bench.rows import Row

NAMES, PLOT, NUMBERS = 170, 480, 70  # widths, in pixels
LINE, HEAD, FOOT = 20, 64, 28  # heights

# Colours are given twice and not as CSS variables, which not every program that shows an SVG knows.
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.page { fill: #ffffff; } text.faint { fill: #6e7781; } .grid { stroke: #d0d7de; } .bar { fill: #2f6feb; }
.dot { fill: #bc4c00; } .ring { fill: none; stroke: #bc4c00; stroke-width: 1.5; }
.tick { stroke: #1f2328; stroke-width: 2; } .eager { stroke: #1f2328; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .page { fill: #0d1117; } text.faint { fill: #8b949e; } .grid { stroke: #30363d; }
  .bar { fill: #4184e4; } .dot { fill: #f0883e; } .ring { stroke: #f0883e; }
  .tick { stroke: #e6edf3; } .eager { stroke: #e6edf3; }
}
"""


def bars(rows: list[Row]) -> str:
    """The picture: a bar for each program, as long as a co-executed step takes in multiples of an eager one.

    A tick shows co-execution without regions; a dot and a ring show `tf.function` and its `jit_compile=True`, where
    they do what eager does.
    """
    rows = sorted(rows, key=lambda row: row.ratio("coexec") or 9.0)
    shown = [row.ratio(name) for row in rows for name in row.variants]
    most = max([1.0, *(ratio for ratio in shown if ratio is not None)])
    end = 1.25 if most <= 1.25 else min(2.0, -(-most // 0.25) * 0.25)  # beyond twice eager's time only numbers tell
    width, height = NAMES + PLOT + NUMBERS, HEAD + LINE * len(rows) + FOOT
    bottom = HEAD + LINE * len(rows)

    def x(ratio: float) -> float:
        return round(NAMES + PLOT * min(ratio, end) / end, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<title>Time of a step as a multiple of eager's</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text x="{NAMES}" y="18">Time of a training step as a multiple of eager\'s (shorter is faster)</text>',
        *legend(NAMES, 40),
    ]
    for quarter in range(int(end * 4) + 1):
        at = x(quarter / 4)
        lines.append(vertical("grid", at, HEAD - 8, bottom + 4))
        lines.append(f'<text class="faint middle" x="{at}" y="{bottom + 20}">{quarter / 4:g}</text>')
    for number, row in enumerate(rows):
        top = HEAD + LINE * number
        lines.append(f'<text class="end" x="{NAMES - 8}" y="{top + 13}">{escape(row.program)}</text>')
        lines += marks(row, top, x, end)
    lines.append(vertical("eager", x(1), HEAD - 8, bottom + 4))
    return "\n".join([*lines, "</svg>"]) + "\n"


def legend(left: float, y: float) -> list[str]:
    """What the marks stand for."""
    marks = [
        (0, 28, "coexec", f'<rect class="bar" x="{left}" y="{y - 9}" width="22" height="10"/>'),
        (84, 8, "regions off", vertical("tick", left + 84, y - 11, y + 3)),
        (178, 9, "tf.function", f'<circle class="dot" cx="{left + 178}" cy="{y - 4}" r="4"/>'),
        (268, 9, "jit_compile=True", f'<circle class="ring" cx="{left + 268}" cy="{y - 4}" r="4"/>'),
        (392, 7, "eager", vertical("eager", left + 392, y - 11, y + 3)),
    ]
    return [f'{mark}<text x="{left + x + beside}" y="{y}">{text}</text>' for x, beside, text, mark in marks]


def vertical(kind: str, x: float, top: float, bottom: float) -> str:
    """A line from top to bottom."""
    return f'<line class="{kind}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'


def marks(row: Row, top: float, x, end: float) -> list[str]:
    """A program's bar, its number, and the marks of the other variants."""
    ours, middle = row.ratio("coexec"), top + LINE / 2 - 1
    if ours is None:
        return [f'<text class="faint" x="{x(0) + 4}" y="{top + 13}">not measured</text>']
    length = x(ours) - x(0)
    found = [
        f'<rect class="bar" x="{x(0)}" y="{top + 3}" width="{length:.1f}" height="{LINE - 8}"/>',
        f'<text class="end" x="{NAMES + PLOT + NUMBERS - 8}" y="{top + 13}">{ours:.2f}</text>',
    ]
    off = row.ratio("regions off")
    if off is not None and off <= end:
        found.append(vertical("tick", x(off), top + 2, top + LINE - 4))
    for name, kind in (("tf.function", "dot"), ("jit", "ring")):
        ratio = row.ratio(name)
        if row.right(name) and ratio is not None and ratio <= end:
            found.append(f'<circle class="{kind}" cx="{x(ratio)}" cy="{middle}" r="4"/>')
    return found
