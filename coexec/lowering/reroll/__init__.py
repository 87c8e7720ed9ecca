"""Reroll: turns unrolled Python loops back into loops.

Takes an emitted function body, and replaces its repeated operations by loops, so that XLA compiles each iteration once.
"""
