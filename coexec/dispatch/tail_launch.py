"""Tail launch: the last launch of a call, which runs asynchronously beside what the program does after the call.

For callers that leave results unread for a while, as Keras' training loop does. It is waited for before the next launch
of the same function, before other code uses a variable that it reads or writes, when a result is read, and on request.
A function has at most one at a time.
"""

from __future__ import annotations

from typing import Any

from coexec.follow.flush import launch_beside
from coexec.follow.follower import Follower
from tracer import intercept
from tracer.faults import reraise


class TailLaunch:
    """A launch that outlives its call; the call is closed when the launch lands."""

    def __init__(self, run: Follower) -> None:
        self._run = run
        self._landed = False
        self._error: Exception | None = None
        self._flight = run.hand_over(self)
        intercept.hold()
        intercept.enter_run(self)

    def outlive(self) -> None:
        """Ends the call: from here on, reading one of its tensors waits for the launch."""
        self._run.take_back(self._flight)

    def land(self) -> None:
        """Waits for the launch; raises its error, once."""
        run = self._run
        with run.lock:
            error, self._error = self._error, None
            if error is not None:
                reraise(error)
            if self._landed:
                return
            self._landed = True
            try:
                run.flush()
            except BaseException:
                run.flush()  # carries out what the interrupt deferred
                raise
            finally:
                intercept.leave_run(self)
                for lazy in run.close():
                    intercept.keep_while_alive(lazy)
                intercept.release()

    def settle_for(self, handles: list[Any]) -> None:
        """Waits for the launch if it uses one of these variables; keeps its error for `land` to raise."""
        with self._run.lock:
            if not self._landed and any(id(h) in self._run.cursor.handles for h in handles):
                try:
                    self.land()
                except Exception as error:
                    self._error = error

    def settle_tape(self, tape: Any) -> None:
        """Does nothing: the call's tapes are already complete."""


def launch_tail(run: Follower) -> None:
    """Launches the operations still pending at the end of a call, asynchronously where possible."""
    run.tapes.end()
    with run.lock:
        if run.recorder is None and run.error is None and run.cursor.step.parent is not None:
            launch_beside(run)
            if run.flight is not None:
                TailLaunch(run)
