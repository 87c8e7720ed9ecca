"""Ahead: the last launch of a call, which runs beside what the program does behind that call.

For callers that leave results unread for a while, as Keras' training loop does. The launch lands before the next one
of the same function, before anybody else uses a variable that it works on, when a result is read, and when it is asked
to. There is one at a time of a function.
"""

from __future__ import annotations

from typing import Any

from coexec.follow.flush import launch_beside
from coexec.follow.follower import Follower
from tracer import intercept


class TailLaunch:
    """A launch that outlives its call, and the call, which ends when that lands."""

    def __init__(self, run: Follower) -> None:
        self._run = run
        self._landed = False
        self._error: Exception | None = None
        self._flight = run.hand_over(self)
        intercept.hold()
        intercept.enter_run(self)

    def outlive(self) -> None:
        """The call has ended: from here on its tensors wait for the launch where they are read."""
        self._run.take_back(self._flight)

    def land(self) -> None:
        """Waits for the launch; raises what came of it, once."""
        run = self._run
        with run.lock:
            error, self._error = self._error, None
            if error is not None:
                raise error
            if self._landed:
                return
            self._landed = True
            try:
                run.flush()
            except BaseException:
                run.flush()  # what an interrupt has put off
                raise
            finally:
                intercept.leave_run(self)
                for lazy in run.close():
                    intercept.keep_while_alive(lazy)
                intercept.release()

    def settle_for(self, handles: list[Any]) -> None:
        """Lands if that reads or writes one of these variables; who asked for the launch hears of its failure."""
        with self._run.lock:
            if not self._landed and any(id(h) in self._run.cursor.handles for h in handles):
                try:
                    self.land()
                except Exception as error:
                    self._error = error

    def settle_tape(self, tape: Any) -> None:
        """The call's tapes know all that they are to know."""


def launch_tail(run: Follower) -> None:
    """Launches what a call holds back at its end: beside what follows the call, where that can be."""
    run.tapes.end()
    with run.lock:
        if run.recorder is None and run.error is None and run.cursor.step.parent is not None:
            launch_beside(run)
            if run.flight is not None:
                TailLaunch(run)
