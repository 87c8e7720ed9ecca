"""Recursion: functions that call themselves, traced once, as graph functions that call themselves by name.

Takes calls of such functions in traced statements; returns blocks with recursive calls, and their VJPs. Importing this
package registers both; without it, `coexec.control_flow` leaves such functions to Python.
"""

from coexec.control_flow.recursion.recursion_records import RecursionRecorder
from coexec.control_flow.recursion.recursive_functions import RecursiveStatements
from coexec.control_flow.run import branch_launch
from coexec.control_flow.trace import conditionals

conditionals.interpreter = RecursiveStatements
branch_launch.make_recursion_vjp = RecursionRecorder
