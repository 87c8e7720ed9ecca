"""Async launch: a launch that runs beside the program's Python, on a thread of the runtime's own.

TensorFlow's launches on the CPU return when they are done, and release the GIL meanwhile. Where Python is known to
pause (`dispatch/host_gaps`), the operations so far are launched there; the program waits for them at the next
operation, read, error or end of the call. A call has at most one launch in flight.
"""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

from coexec.base.tuning import tuning
from coexec.compile.executable import Executable
from tracer import hooks
from tracer.seeds import Pair


class _Runners:
    """The threads, made when they are first needed, and anew in a forked process."""

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        why = "launches under way have ended, as the child has none of their threads"
        hooks.at_fork(__name__, why, self._wait, in_child=self._forget)

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
                threads = tuning.launch_threads
                self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="coexec-runner")
            future = self._pool.submit(executable.launch, feeds, seeds, into)
        except RuntimeError:
            return None
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future


_runners = _Runners()


class AsyncLaunch:
    """One launch under way."""

    def __init__(self, executable: Executable, future: concurrent.futures.Future[Any], into: list[Any]) -> None:
        self.executable = executable
        self.into = into  # nothing, or what the launch gave
        self._began = time.perf_counter()
        self._future = future
        self._interrupt: BaseException | None = None

    def is_worth_it(self) -> bool:
        """Whether Python has gone on for long enough since it began."""
        return time.perf_counter() - self._began > tuning.flight_worth

    def land(self) -> list[Any] | None:
        """Waits for the launch; returns or raises what `Executable.launch` does.

        An interrupt waits, too: what it writes must not come after whoever catches that. `resume` raises it.
        """
        while not self._future.done():
            try:
                concurrent.futures.wait([self._future])
            except BaseException as interrupt:
                self._interrupt = interrupt
        results: list[Any] | None = self._future.result()
        return results

    def resume(self) -> None:
        """Raises the interrupt that came while the program waited, if one did."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt


def launch_async(executable: Executable, feeds: list[Any], seeds: list[Pair]) -> AsyncLaunch | None:
    """Launches on a thread of the runtime's; None if that cannot be."""
    into: list[Any] = []
    future = _runners.submit(executable, feeds, seeds, into)
    return None if future is None else AsyncLaunch(executable, future, into)
