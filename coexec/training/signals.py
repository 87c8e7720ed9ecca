"""Signals: Ctrl-C and SIGTERM end a loop between two steps, and a step that takes longer than a second inside."""

from __future__ import annotations

import _thread
import signal
import threading
from typing import Any

GRACE = 1.0  # seconds that a running step has to come to its end


class Interrupts:
    """While entered, the first signal only sets `requested`; after a second, or at the next one, the step is ended.

    Works in the main thread, where Python serves signals; elsewhere nothing changes. The handlers that were there
    before are put back on leaving, and before a step is ended.
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
                if before is not None and before is not signal.SIG_IGN:  # else it is somebody else's, or unwanted
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested is not None:
            self._restore()
            raise KeyboardInterrupt(f"{self.requested.name}: the step was ended before it was done")
        self.requested = signal.Signals(number)
        self._timer = threading.Timer(GRACE, _thread.interrupt_main, [number])
        self._timer.daemon = True
        self._timer.start()

    def quiet(self) -> None:
        """The step has come to its end: no time limit from here on, but another signal stops at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _restore(self) -> None:
        self.quiet()
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:  # else somebody else's came later
                signal.signal(number, before)
        self._before.clear()

    def __exit__(self, *_: object) -> None:
        self._restore()
