"""Control flow on the device: loops, branches and calls of graph functions, decided without a wait in Python.

In comes the truth of a tensor that running code asks for; out come operations of the segment, and the place where
Python resumes. `trace` turns statements into blocks of operations, `grad` makes their VJPs, `run` launches them and
moves Python's frame, and `recursion` adds functions that call themselves.
"""

from coexec.control_flow import recursion  # noqa: F401 (optional: without this line and its folder Python recurses)
from coexec.control_flow.run.on_device import OnDevice

__all__ = ["OnDevice"]
