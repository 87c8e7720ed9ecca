"""Writer: what writes a checkpoint while the program goes on."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable


class WriteError(RuntimeError):
    """Something could not be written beside the program; the message says what, and the cause why.

    It is raised where the program next writes or waits, which is after what failed. Make room, or name a directory
    that can be written to, and start again: the checkpoints before are still there.
    """


class Writer:
    """Writes one thing at a time on a thread of its own; the next one, and the end, wait for it and hear of failure.

    As a context it waits on leaving: where an exception ends the context already, a failure is only a warning. The
    process waits for the thread, too, before it ends.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # as Python takes a thread for ended when Ctrl-C ends a `join`
        self._failure: WriteError | None = None

    def write(self, what: str, task: Callable[[], object]) -> None:
        """Has `task` run, once what was to be written before is; raises `WriteError` if that has failed."""
        self.wait()

        def run() -> None:
            try:
                task()
            except BaseException as error:  # is raised in the thread that asks next
                reason = (str(error).splitlines() or [""])[0]
                self._failure = WriteError(f"{what} could not be written: {type(error).__name__}: {reason}")
                self._failure.__cause__ = error
            finally:
                self._done.set()

        self._done.clear()
        thread = threading.Thread(target=run, name="coexec-checkpoint")
        try:
            thread.start()
        except RuntimeError:  # no more threads are to be had: the program waits, then
            run()
        else:
            self._thread = thread

    def wait(self) -> None:
        """Waits until all is written; raises `WriteError` if it could not be."""
        if self._thread is not None:
            while self._thread.is_alive() and not self._done.wait(1.0):  # in a forked process it is not alive
                pass
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        try:
            self.wait()
        except WriteError as failure:
            if raised is None:
                raise
            warnings.warn(str(failure), stacklevel=2)
