"""Writer: writes a checkpoint in the background."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable


class WriteError(RuntimeError):
    """Something could not be written in the background; the message says what, and the cause why.

    It is raised where the program next writes or waits, after the failure. Free some space, or name a writable
    directory, and start again: the earlier checkpoints are still there.
    """


class CheckpointWriter:
    """Writes one thing at a time on a thread; the next write, and the end, wait for it and raise its failure.

    As a context it waits on exit: if an exception is already propagating, a failure is only a warning. The process
    waits for the thread, too, before it ends.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # as Python considers a thread ended once Ctrl-C interrupts its `join`
        self._failure: WriteError | None = None

    def write(self, what: str, task: Callable[[], object]) -> None:
        """Runs `task` in the background once the previous write is done; raises `WriteError` if that failed."""
        self.wait()

        def run() -> None:
            try:
                task()
            except BaseException as error:  # raised by the next `wait`
                reason = (str(error).splitlines() or [""])[0]
                self._failure = WriteError(f"{what} could not be written: {type(error).__name__}: {reason}")
                self._failure.__cause__ = error
            finally:
                self._done.set()

        self._done.clear()
        thread = threading.Thread(target=run, name="coexec-checkpoint")
        try:
            thread.start()
        except RuntimeError:  # no thread is available: write synchronously
            run()
        else:
            self._thread = thread

    def wait(self) -> None:
        """Waits until everything is written; raises `WriteError` if that failed."""
        if self._thread is not None:
            while self._thread.is_alive() and not self._done.wait(1.0):  # in a forked process it is not alive
                pass
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        try:
            self.wait()
        except WriteError as failure:
            if raised is None:
                raise
            warnings.warn(str(failure), stacklevel=2)
