"""Gradients: the VJPs of traced control flow.

In come blocks and loops; out come their VJPs, as blocks themselves, and the records that make tapes use them.
"""
