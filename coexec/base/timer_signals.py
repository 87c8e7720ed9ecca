"""Timer signals: whether an interval timer interrupts the process while compiled code runs."""

from __future__ import annotations

import signal

from coexec.base.tuning import tuning

# Interval timers, by the signal that each sends.
TIMERS = {
    signal.SIGALRM: signal.ITIMER_REAL, signal.SIGVTALRM: signal.ITIMER_VIRTUAL, signal.SIGPROF: signal.ITIMER_PROF,
}  # fmt: skip
SIGNALS = tuple(TIMERS)


def is_running() -> bool:
    """Returns whether timer signals arrive periodically, or one is due soon; takes 1 us.

    They interrupt any of TensorFlow's threads. XLA's code for the CPU does not survive that, not in
    `tf.function(jit_compile=True)` either: it corrupts the heap, or returns NaN. TensorFlow's own kernels mostly do: of
    runs of 300 steps of a small convnet under a timer of 1 ms, 5 of 12 crashed eagerly, and 2 of 12 in `tf.function`.
    """
    for timer in TIMERS.values():
        left, interval = signal.getitimer(timer)
        if interval > 0.0 or 0.0 < left < tuning.timer_near:
            return True
    return False
