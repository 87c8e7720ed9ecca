"""Async launch: a launch that overlaps with the program's Python, on a thread of the runtime.

On the CPU TensorFlow's launches are synchronous, and release the GIL. Where Python is known to pause
(`dispatch/host_gaps`), the operations so far are launched on such a thread; the program waits for them at the next
operation, read, error or end of the call. A call has at most one launch in flight.
"""

from __future__ import annotations

import concurrent.futures
import functools
import time
from typing import Any

from coexec.base import timeline
from coexec.base.tuning import tuning
from coexec.compile.executable import Executable
from tracer import hooks
from tracer.seeds import Pair


class _Runners:
    """The thread pool, created on first use, and again in a forked process."""

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        why = "launches under way have ended, as the child has none of their threads"
        hooks.at_fork(__name__, why, self._wait, in_child=self._forget)

    def _wait(self) -> None:
        concurrent.futures.wait(list(self._under_way))  # in a child, nothing would complete them

    def _forget(self) -> None:
        self._pool = None

    def submit(
        self, executable: Executable, feeds: list[Any], seeds: list[Pair], into: list[Any]
    ) -> concurrent.futures.Future[Any] | None:
        """Submits a launch; None if there is no thread for it, as when the interpreter is shutting down."""
        try:
            if self._pool is None:
                threads = tuning.launch_threads
                self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="coexec-runner")
            launch = executable.launch if timeline.current is None else functools.partial(_told, executable)
            future = self._pool.submit(launch, feeds, seeds, into)
        except RuntimeError:
            return None
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future


def _told(executable: Executable, feeds: list[Any], seeds: list[Pair], into: list[Any]) -> list[Any] | None:
    """Launches, and adds that to the timeline."""
    began = time.perf_counter()
    try:
        return executable.launch(feeds, seeds, into)
    finally:
        if (events := timeline.current) is not None:
            events.add("beside", "", began, f"{executable.backend}, {executable.ops} operations")


_runners = _Runners()


class AsyncLaunch:
    """One launch in flight."""

    def __init__(self, executable: Executable, future: concurrent.futures.Future[Any], into: list[Any]) -> None:
        self.executable = executable
        self.into = into  # empty, or what the launch returned
        self._began = time.perf_counter()
        self._future = future
        self._interrupt: BaseException | None = None

    def is_worth_it(self) -> bool:
        """Whether Python has run long enough since it began."""
        return time.perf_counter() - self._began > tuning.flight_worth

    def land(self) -> list[Any] | None:
        """Waits for the launch; returns or raises what `Executable.launch` does.

        An interrupt is deferred, for `resume` to raise: the launch's writes must precede the code that catches it.
        """
        while not self._future.done():
            try:
                concurrent.futures.wait([self._future])
            except BaseException as interrupt:
                self._interrupt = interrupt
        results: list[Any] | None = self._future.result()
        return results

    def resume(self) -> None:
        """Raises the interrupt that came during `land`, if any."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt


def launch_async(executable: Executable, feeds: list[Any], seeds: list[Pair]) -> AsyncLaunch | None:
    """Launches on a thread of the runtime; None if there is none."""
    into: list[Any] = []
    future = _runners.submit(executable, feeds, seeds, into)
    return None if future is None else AsyncLaunch(executable, future, into)
