"""Background: one thread on which executables are prepared while calls go on."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("coexec")

# Whoever waits at a terminal is told of work that takes longer than this, in seconds.
LONG = 2.0


class Background:
    """A queue of jobs and the daemon thread that carries them out, one by one; it ends when there is nothing to do."""

    MAX_WAITING = 64
    IDLE = 5.0  # seconds after which the thread ends

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self._end)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[str, Callable[[], None]]] = collections.deque()
        self._working = False
        self._thread: threading.Thread | None = None
        self._ended = False

    def submit(self, what: str, job: Callable[[], None]) -> bool:
        """Has `job` done some time; returns whether there was room for it. `what` says in words what it does."""
        with self._changed:
            if self._ended or len(self._waiting) >= self.MAX_WAITING:
                return False
            if self._thread is None or not self._thread.is_alive():  # what a job raised has ended it, perhaps
                thread = threading.Thread(target=self._work, name="coexec-compiler", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads are to be had
                    return False
                self._thread = thread
            self._waiting.append((what, job))
            self._changed.notify_all()
            return True

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is left to do; returns False if that took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._working, timeout)

    def _work(self) -> None:
        _be_nice()
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._waiting), self.IDLE):
                    self._thread = None
                    return
                what, job = self._waiting.popleft()
                self._working = True
            began = time.monotonic()
            notice = threading.Timer(LONG, _log.warning, (f"{what}: takes more than {LONG:.0f} s, in the background",))
            notice.daemon = True
            try:
                notice.start()
                job()
            except Exception:  # whatever a compiler raises: the next job is waiting
                _log.exception("%s failed; the program goes on without it", what)
            finally:
                notice.cancel()
                if time.monotonic() - began > LONG:
                    _log.warning("%s: done after %.1f s", what, time.monotonic() - began)
                del job
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _end(self) -> None:
        """Drops what is waiting, and waits for what is being compiled.

        XLA cannot be interrupted, and crashes when the process takes down what it works with (measured: 2 of 24 exits,
        even with most destructors left out). Another Ctrl-C ends the waiting.
        """
        with self._changed:
            self._ended = True
            self._waiting.clear()
            if self._working:
                _log.warning("waiting for XLA, which cannot be interrupted, before the process ends")
        self.wait()


def _be_nice() -> None:
    """Lets the program's own threads go first, where the system can tell threads apart (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


background = Background()
