"""Control flow on the device: loops, branches and calls of graph functions, decided by the device instead of Python.

Takes a tensor that running code tests; adds operations to the segment, and returns the answer with which Python
resumes. `trace` turns statements into blocks of operations, `grad` makes their VJPs, `run` launches them and
moves Python's frame, and `recursion` adds functions that call themselves.
"""

from coexec.control_flow import recursion  # noqa: F401 (optional: without this line and its folder Python recurses)
from coexec.control_flow.run.on_device import OnDevice

__all__ = ["OnDevice"]
