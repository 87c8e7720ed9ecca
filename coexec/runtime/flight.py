"""Flight: a launch that runs beside the program's Python, on a thread of the runtime's own.

TensorFlow's launches on CPU return when they are done, and let other Python threads run meanwhile. Where Python is
known to take its time (`runtime/pauses`), the operations so far are launched there; the program waits for them at the
next operation, read, error or end of the call. There is one launch in flight at a time in a call.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from typing import Any

from coexec.compile.executable import Executable
from tracer.seeds import Pair

THREADS = 2  # for calls on several threads of the program; more would only wait for processors

# Seconds that Python should go on for: to the thread and back takes 0.3 ms (two cores).
WORTH = 5e-4


class _Runners:
    """The threads, made when they are first needed, and anew in a forked process."""

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        os.register_at_fork(before=self._wait, after_in_child=self._forget)

    def _wait(self) -> None:
        concurrent.futures.wait(list(self._under_way))  # in a child, nobody would land them

    def _forget(self) -> None:
        self._pool = None

    def submit(
        self, executable: Executable, feeds: list[Any], seeds: list[Pair], into: list[Any]
    ) -> concurrent.futures.Future[Any] | None:
        """Has it launched; None if no thread is to be had, as when the interpreter is about to end."""
        try:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="coexec-runner")
            future = self._pool.submit(executable.launch, feeds, seeds, into)
        except RuntimeError:
            return None
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future


_runners = _Runners()


class Flight:
    """One launch under way."""

    def __init__(self, executable: Executable, future: concurrent.futures.Future[Any], into: list[Any]) -> None:
        self.executable = executable
        self.into = into  # nothing, or what the launch gave
        self._began = time.perf_counter()
        self._future = future
        self._interrupt: BaseException | None = None

    def is_worth_it(self) -> bool:
        """Whether Python has gone on for long enough since it began."""
        return time.perf_counter() - self._began > WORTH

    def land(self) -> list[Any] | None:
        """Waits for the launch; returns or raises what `Executable.launch` does.

        An interrupt waits, too: what it writes must not come after whoever catches that. `resume` raises it.
        """
        while not self._future.done():
            try:
                concurrent.futures.wait([self._future])
            except BaseException as interrupt:
                self._interrupt = interrupt
        return self._future.result()

    def resume(self) -> None:
        """Raises the interrupt that came while the program waited, if one did."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt


def take_off(executable: Executable, feeds: list[Any], seeds: list[Pair]) -> Flight | None:
    """Launches on a thread of the runtime's; None if that cannot be."""
    into: list[Any] = []
    future = _runners.submit(executable, feeds, seeds, into)
    return None if future is None else Flight(executable, future, into)
