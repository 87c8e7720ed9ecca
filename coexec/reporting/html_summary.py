"""HTML summary: a function at a glance, as notebooks show it."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from coexec.base.explanation import Explanation
from coexec.base.tuning import tuning


def html_of(name: str, explanation: Explanation, segments: str) -> str:
    """Returns the verdict on a function, its most expensive causes and its segments."""
    content = explanation.as_dict()
    stats = content["stats"]
    if not stats["calls"]:
        return f"<b>coexec.function {escape(name)}</b>: not called yet"
    verdict, *rest = (_cells(line) for line in str(explanation).splitlines()[:4])
    rows = [
        f"<tr><td><code>{cause['id']}</code></td><td style='text-align:left'>{escape(cause['text'])}<br/>"
        f"<small>{escape(_place(cause))} <code>{escape(cause['source'])}</code></small></td><td>{cause['count']}</td>"
        f"<td style='text-align:left'>{escape(cause['what_to_do'])}</td></tr>"
        for cause in content["causes"][: tuning.summary_causes]
    ]
    more = len(content["causes"]) - len(rows)
    head = "<tr><th>cause</th><th></th><th>count</th><th style='text-align:left'>what to do</th></tr>"
    table = f"<table>{head}{''.join(rows)}</table>" if rows else ""
    lines = "".join(f"<div>{escape(line)}</div>" for line in rest)
    left = f"<div><small>and {more} more: <code>explain()</code></small></div>" if more > 0 else ""
    launched = f"<details><summary>segments</summary><pre>{escape(_cells(segments))}</pre></details>"
    return f"<div><b>{escape(verdict)}</b></div>{lines}{table}{left}{launched}"


def _place(cause: dict[str, Any]) -> str:
    return f"{_cells(cause['file'])}:{cause['line']}" if cause["file"] else str(cause["function"])


def _cells(text: str) -> str:
    """Returns a text in which the files that stand for cells are named as the notebook numbers them: `In[3]`."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    known = getattr(getattr(shell, "compile", None), "_filename_map", None) or {}
    for file, number in known.items():
        text = text.replace(file, f"In[{number}]")
    return text
