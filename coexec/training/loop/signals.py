"""Signals: Ctrl-C and SIGTERM end a loop between two steps, or within a step that takes a second longer."""

from __future__ import annotations

import _thread
import signal
import threading
from typing import Any

from coexec.base.tuning import tuning
from tracer import hooks

hooks.Hooks(
    __name__, "`signal.signal` of SIGINT and SIGTERM", "a loop ends between two steps", "a `loop` or `Trainer` runs"
)


class Interrupts:
    """While entered, the first signal only sets `requested`; the next, or a second's delay, aborts the step.

    Works in the main thread, where Python handles signals; elsewhere it does nothing. The previous handlers are
    restored on exit, and before a step is aborted.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                before = signal.getsignal(number)
                if before is not None and before is not signal.SIG_IGN:  # else not set from Python, or ignored
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested is not None:
            self._restore()
            raise KeyboardInterrupt(f"{self.requested.name}: the step was ended before it was done")
        self.requested = signal.Signals(number)
        self._timer = threading.Timer(tuning.signal_grace, _thread.interrupt_main, [number])
        self._timer.daemon = True
        self._timer.start()

    def quiet(self) -> None:
        """Cancels the time limit, as the step is done; another signal still aborts at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _restore(self) -> None:
        self.quiet()
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:  # else a later one replaced it
                signal.signal(number, before)
        self._before.clear()

    def __exit__(self, *_: object) -> None:
        self._restore()
