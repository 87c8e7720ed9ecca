"""Memoize: library calls, and functions that provably only compute, followed as one without running their Python.

In come calls with their arguments; out go regions of the trace graph that stand for them, and what they would have put
on tapes. What a call does is observed, twice, before it is skipped.
"""
