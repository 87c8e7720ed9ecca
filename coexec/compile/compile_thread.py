"""Compile thread: one background thread that compiles executables while calls continue."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from coexec.base import timeline
from coexec.base.slow_notice import SlowNotice
from coexec.base.timer_signals import SIGNALS
from coexec.base.tuning import tuning
from tracer import hooks

_log = logging.getLogger("coexec")


class Background:
    """A bounded queue of jobs, and the daemon thread that runs them one by one and ends when idle."""

    def __init__(self) -> None:
        self._begin()
        hooks.at_fork(__name__, "the child has no thread that compiles, and begins anew", in_child=self._begin)
        hooks.AtExit(__name__, "XLA crashes a process that ends while it compiles", self._end)

    def _begin(self) -> None:
        """Sets the initial state, also in a forked child."""
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[str, Callable[[], None]]] = collections.deque()
        self._working = False
        self._thread: threading.Thread | None = None
        self._ended = False

    def submit(self, what: str, job: Callable[[], None]) -> bool:
        """Queues `job`; returns False if there is no room or no thread for it. `what` describes it in log messages."""
        with self._changed:
            if self._ended or len(self._waiting) >= tuning.compile_queue:
                return False
            if self._thread is None or not self._thread.is_alive():  # a job may have killed it
                thread = threading.Thread(target=self._work, name="coexec-compiler", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads available
                    return False
                self._thread = thread
            self._waiting.append((what, job))
            self._changed.notify_all()
            return True

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the queue is empty and no job runs; returns False if that takes over `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._working, timeout)

    def _work(self) -> None:
        """Runs jobs until none has come for `tuning.compile_idle` seconds."""
        _be_nice()
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._waiting), tuning.compile_idle):
                    self._thread = None
                    return
                what, job = self._waiting.popleft()
                self._working = True
            at = time.perf_counter()
            try:
                with SlowNotice(what, "in the background"):
                    job()
            except Exception:  # whatever the compiler raises, the next job must run
                _log.exception("%s failed; the program goes on without it", what)
            finally:
                _tell(what, at)
                del job
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _end(self) -> None:
        """Drops queued jobs, and waits for the running one.

        XLA cannot be interrupted, and crashes when process exit destroys its state (measured: 2 of 24 exits, even with
        most destructors skipped). Another Ctrl-C ends the wait.
        """
        with self._changed:
            self._ended = True
            self._waiting.clear()
        if not self.wait(tuning.slow_seconds):
            _log.warning("waiting for XLA, which cannot be interrupted, before the process ends")
            self.wait()


def _tell(what: str, began: float) -> None:
    """Adds a job to the timeline. (A variable of the thread's loop would hold the timeline until the next job.)"""
    if (events := timeline.current) is not None:
        events.add("xla", "", began, what)


def _be_nice() -> None:
    """Lowers this thread's priority, where the system has per-thread priorities (Linux), and blocks timer signals.

    Threads that XLA starts inherit the signal mask; a timer signal delivered to one of them may crash it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


background = Background()
