"""Budget: limits the time that one call may invest, on its own thread, in observing and compiling for later calls.

A call should take no more than five times its time without this package, plus two seconds. The cost of compiling is
estimated beforehand from the number of operations; the cost of observing is measured. The bound does not hold for a
segment that no call can afford (some 5,000 operations): it is compiled after `tuning.hopeless_visits` visits.
"""

from __future__ import annotations

from coexec.base.tuning import tuning


class Budget:
    """The seconds that one call has left to spend."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = tuning.call_seconds

    def earn(self, seconds: float) -> None:
        """Adds the allowance for `seconds` of running operations one by one."""
        self.left += tuning.call_times * seconds

    def spend(self, seconds: float) -> None:
        """Subtracts time spent."""
        self.left -= seconds

    def has(self, operations: int, seconds: float) -> bool:
        """Returns whether this call may compile `operations` operations, which take `seconds` when run one by one."""
        return tuning.graph_operation * operations <= self.left + tuning.call_times * seconds


def is_hopeless(operations: int, seconds: float) -> bool:
    """Returns whether no call could ever afford to compile so many operations."""
    return not Budget().has(operations, seconds)
