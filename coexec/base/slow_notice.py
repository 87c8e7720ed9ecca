"""SlowNotice: says on the log what takes long, as soon as it does, and how long it took when it is done."""

from __future__ import annotations

import logging
import threading
import time

from coexec.base.tuning import tuning

_log = logging.getLogger("coexec")


class SlowNotice:
    """Around what may take long: two lines if that takes more than `tuning.slow_seconds`, else none."""

    def __init__(self, what: str, how: str) -> None:
        self._what, self._how = what, how

    def __enter__(self) -> None:
        self._slow = tuning.slow_seconds
        text = f"{self._what}: takes more than {self._slow:.0f} s, {self._how}"
        self._timer = threading.Timer(self._slow, _log.warning, (text,))
        self._timer.daemon = True
        self._began = time.monotonic()
        try:
            self._timer.start()
        except RuntimeError:  # no more threads available: the second line tells it
            pass

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        took = time.monotonic() - self._began
        if took > self._slow:
            _log.warning("%s: done after %.1f s", self._what, took)
