"""Audits: occasional comparisons of an executable with its operations, long after its first launch.

A wrong executable may show only later: for other values, for other sizes that share it, or once something that it
relies on has changed. So in the first calls of a function some launches are validated as the first one was
(`launch/validate`), within a budget that is a small share of the calls' time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings

import numpy as np
import tensorflow as tf

from coexec.base.tuning import tuning
from coexec.compile.executable import Executable
from tracer.private import is_op_determinism_enabled


class Audits:
    """Decides, within a time budget, which launches of one function are compared, and warns of differences."""

    def __init__(self) -> None:
        self.open = True  # whether more may be made
        self._lock = threading.Lock()
        self._calls = self._made = 0
        self._budget = 0.0  # seconds
        self._warned = False

    def called(self, seconds: float) -> None:
        """Notes the time of a followed call, a share of which goes to the budget."""
        with self._lock:
            self._budget += tuning.audit_share * seconds
            self._calls += 1
            if self._calls >= tuning.audit_calls and self._made:
                self.open = False

    def wants(self, executable: Executable) -> bool:
        """Returns whether to compare the next launch of an executable.

        An audited call continues with the values of the single operations, whose last digits may differ. So there are
        none under op determinism: timing must not decide about bits.
        """
        if not executable.trusted or executable.launches < max(tuning.audit_first, executable.audit_at):
            return False
        guess = tuning.audit_per_operation * executable.ops + tuning.audit_launches * executable.took
        expected = executable.audited_in or guess
        return expected <= self._budget and not is_op_determinism_enabled()

    def took(self, executable: Executable, seconds: float) -> None:
        """Charges an audit, and schedules the executable's next."""
        with self._lock:
            self._budget -= seconds
            self._made += 1
        executable.audited_in = seconds
        executable.audit_at = tuning.audit_growth * executable.launches

    def warn(self, function: str, difference: str, place: str) -> None:
        """Warns, once, with what to report; the program continues even where warnings are errors."""
        with self._lock:
            warned, self._warned = self._warned, True
        if warned:
            return
        versions = f"Python {sys.version.split()[0]}, TensorFlow {tf.__version__}, NumPy {np.__version__}"
        with contextlib.suppress(Warning):
            warnings.warn(
                f"coexec compiled code of {function} that was wrong. It is not used any more, and the values of this "
                f"call are those of its operations. Please report this with the code around the line:\n  {difference}\n"
                f"  in the segment that ends at {place}\n  {versions}",
                RuntimeWarning,
                stacklevel=2,
            )
