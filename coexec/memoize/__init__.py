"""Memoize: library calls, and functions proven pure, followed as one unit without running their Python.

Takes calls with their arguments; yields regions of the trace graph that stand for them, and the tape entries that they
would have made. A call is observed twice before it is skipped.
"""
