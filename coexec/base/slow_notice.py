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
        self._began = time.monotonic()
        text = f"{self._what}: takes more than {self._slow:.0f} s, {self._how}"
        _watch.begin(self, self._began + self._slow, text)

    def __exit__(self, *_: object) -> None:
        _watch.end(self)
        took = time.monotonic() - self._began
        if took > self._slow:
            _log.warning("%s: done after %.1f s", self._what, took)


class _Watch:
    """The thread that writes the first lines. It ends when nothing has been begun for as long as a line takes.

    One for all: to start a thread for each took as long as an eager step where the processors were busy.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[SlowNotice, tuple[float, str]] = {}  # when each is late, and what is said then
        self._thread: threading.Thread | None = None

    def begin(self, notice: SlowNotice, late: float, text: str) -> None:
        with self._changed:
            self._due[notice] = late, text
            if self._thread is not None and self._thread.is_alive():
                if late <= min(due for due, _ in self._due.values()):
                    self._changed.notify()
                return
            self._thread = threading.Thread(target=self._run, name="coexec slow notices", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads available: the second line tells it
                self._thread = None

    def end(self, notice: SlowNotice) -> None:
        with self._changed:
            self._due.pop(notice, None)

    def _run(self) -> None:
        idle = time.monotonic()
        while True:
            with self._changed:
                now = time.monotonic()
                late = [notice for notice, (due, _) in self._due.items() if due <= now]
                texts = [self._due.pop(notice)[1] for notice in late]
                if self._due or texts:
                    idle = now
                elif now - idle >= tuning.slow_seconds:
                    self._thread = None
                    return
                if not texts:
                    wake = min([due for due, _ in self._due.values()], default=idle + tuning.slow_seconds)
                    self._changed.wait(wake - now)
            for text in texts:
                _log.warning(text)


_watch = _Watch()
