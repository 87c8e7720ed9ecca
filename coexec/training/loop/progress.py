"""Progress: one line about a running loop, on a terminal or below a notebook's cell; by default nothing elsewhere."""

from __future__ import annotations

import importlib
import io
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from coexec.api import functions
from coexec.base.tuning import tuning
from tracer.inputs import array_of


class ProgressBar:
    """A progress bar with the step rate, the latest shown values, and the share of operations that was followed.

    Values may be tensors: they are read, and waited for, only when the line is redrawn.
    """

    def __init__(self, total: int | None, done: int, shown: bool | None = None) -> None:
        self._bar: Progress | None = None
        self._cell: Any = None  # the handle of the line in a notebook, once it is there
        self._notebook = _is_notebook()
        self.values: dict[str, Any] = {}
        if shown is None:
            shown = self._notebook or sys.stderr.isatty()
        if shown:
            text = "{task.description} {task.fields[rate]} {task.fields[values]}"
            columns = [BarColumn(20), MofNCompleteColumn(), TextColumn(text), TimeRemainingColumn()]
            # What the program prints to a terminal is shown above the bar; output to a file or pipe is left alone.
            above = sys.stdout is not None and sys.stdout.isatty()
            # Rich's way into notebooks needs widgets, and leaves an empty output behind: there it only sets the line.
            aside = Console(file=io.StringIO(), force_jupyter=False, color_system=None, width=tuning.progress_width)
            console = aside if self._notebook else Console(stderr=True)
            self._bar = Progress(*columns, console=console, auto_refresh=False, redirect_stdout=above)
            self._task = self._bar.add_task("", total=total, completed=done, rate="", values="")
        self._done = self._drawn_at = done
        self._drawn = time.monotonic()
        self._ops = _operations()

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            if self._notebook:
                self._show(self._bar)
            else:
                self._bar.start()
        return self

    def advance(self, epoch: str) -> None:
        """Counts one more step; redraws if it is time."""
        self._done += 1
        if self._bar is not None and time.monotonic() - self._drawn >= tuning.progress_interval:
            self._draw(epoch)

    def _draw(self, epoch: str) -> None:
        bar = self._bar
        assert bar is not None
        now = time.monotonic()
        rate = (self._done - self._drawn_at) / max(now - self._drawn, 1e-9)
        self._drawn, self._drawn_at = now, self._done
        values = [f"{name} {_readable(value)}" for name, value in self.values.items()]
        followed, seen = (now - before for now, before in zip(_operations(), self._ops, strict=True))
        if seen:
            values.append(f"followed {followed / seen:.0%}")
        bar.update(
            self._task, completed=self._done, description=epoch, rate=f"{rate:.3g} steps/s", values="  ".join(values)
        )
        if self._notebook:
            self._show(bar)
        else:
            bar.refresh()

    def _show(self, bar: Progress) -> None:
        """Shows the line below the cell, or replaces it there; what the cell prints is left alone."""
        display = importlib.import_module("IPython.display").display  # there, as this runs in its kernel
        with bar.console.capture() as line:
            bar.console.print(bar.get_renderable())
        data = {"text/plain": line.get().strip()}
        if self._cell is None:
            self._cell = display(data, raw=True, display_id=True)
        else:
            self._cell.update(data, raw=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            if self._done != self._drawn_at:
                self._draw("")
            if not self._notebook:
                self._bar.stop()


def _is_notebook() -> bool:
    """Returns whether this runs in a kernel, whose outputs are shown on a page."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _operations() -> tuple[int, int]:
    """Returns the number of followed operations, and of all operations, in all functions so far."""
    stats = [f.stats() for f in functions()]
    followed = sum(s.ops_followed for s in stats)
    return followed, followed + sum(s.ops_recorded for s in stats)


def _readable(value: Any) -> str:
    number = array_of(value)
    return f"{number.mean():.4g}" if number.dtype.kind in "fiub" and number.size else str(value)
